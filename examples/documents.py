"""Documents of several kinds of text, as texts.py and write_texts.py write them, and which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

HELD_OUT = 50  # one document in this many


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
