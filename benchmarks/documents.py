"""Texts that examples learn, and which are held out: documents of several kinds, and Python sources."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 50  # one document or file in this many


def read(file: Path) -> list[str]:
    """Return the documents of a file, between form feeds."""
    return file.read_text().split("\f")


def by_kind(folder: Path) -> dict[str, list[str]]:
    """Return the documents of each kind in a folder."""
    return {file.stem: read(file) for file in sorted(folder.glob("*.txt"))}


def limited(documents: Iterable[str], characters: int) -> list[str]:
    """Return the first documents, of so many characters or little more."""
    kept, size = list[str](), 0
    for document in documents:
        if size >= characters:
            break
        kept.append(document)
        size += len(document)
    return kept


def parted(documents: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the documents to train on, and those that are held out, which are the same in every run."""
    parts: dict[bool, list[str]] = {False: [], True: []}
    for document in documents:
        parts[hashlib.sha256(document.encode()).digest()[0] % HELD_OUT == 0].append(document)
    return parts[False], parts[True]


def sources(most: int) -> tuple[Tensor, Tensor]:
    """Return (training, held out): uint8 [bytes] of .py files of this installation, together ``most`` or so.

    No file is taken twice, nor one that begins or ends as another does, such as generated tables.
    """
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    files = sorted({file for root in roots for file in root.rglob("*.py") if file.is_file()})
    random.Random(0).shuffle(files)
    parts: list[bytes] = []
    seen: set[bytes] = set()
    size = 0
    for file in files:
        text = file.read_bytes()
        ends = {text[:1000], text[-1000:]}
        if not ends.isdisjoint(seen):
            continue
        seen |= ends
        size += len(text)
        parts.append(text)
        if size > most:
            break
    held_out = b"".join(parts[::HELD_OUT])
    del parts[::HELD_OUT]
    return _as_tensor(b"".join(parts)), _as_tensor(held_out)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
