"""Folders of safetensors files that are replaced as a whole."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from .._runtime.tensor_files import (
    StoredTensor,
    checked_texts,
    named,
    read_header,
    read_json,
    shown,
    write_json,
    write_tensors,
)
from ..errors import CheckpointError, InvalidArgumentError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_SHARD = "model-{:05}-of-{:05}.safetensors"
_OWN_FILES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
_SAVING, _SAVED = ".saving-", ".saved-"  # folders inside: of a save under way, and of one that stands
_LOCK = ".saving"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A new folder inside of another, for `put_in_place`; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=_SAVING, dir=folder) as temporary:
        yield Path(temporary)


def byte_limit(size: object) -> int:
    """The bytes that a size of shards says, as Transformers writes them."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"(\d{1,15}) ?([KMGT]B)?", size) if isinstance(size, str) else None
    if found is None or int(found[1]) == 0:
        raise InvalidArgumentError(f"max_shard_size must be bytes, or a text such as '5GB', got {size!r}")
    return int(found[1]) * _UNITS[found[2] or ""]


def write_files(folder: Path, tensors: Mapping[str, Tensor], limit: int) -> dict[str, str]:
    """Writes one file or several with an index, and returns the checksum of each file's header."""
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    if len(shards) == 1:
        return {WEIGHTS: write_tensors(folder / WEIGHTS, tensors)}
    names = [_SHARD.format(number, len(shards)) for number in range(1, len(shards) + 1)]
    files = {name: write_tensors(folder / name, shard) for name, shard in zip(names, shards, strict=True)}
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return {INDEX: write_json(folder / INDEX, index), **files}


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Has other saves into a folder wait, of threads and processes alike, where the file system has locks.

    The lock is a file's, since network file systems lock no folders for other hosts. Who holds it removes it,
    so one that was opened before and locked afterwards locks nothing.
    """
    file = folder / _LOCK
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_at(file, descriptor):
                continue
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _is_at(file: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    return False


def put_in_place(temporary: Path, folder: Path, files: Iterable[str]) -> None:
    """Replaces the checkpoint of a folder, in one moment: when ``config.json`` is renamed.

    Before, the former checkpoint stands. Afterwards the new one does, whose files `read_headers` finds in
    ``.saved-…`` until they are moved as well, since ``config.json`` has their checksums. Of saves at the same
    time one waits for the other here, so that all files in ``.saved-…`` are its own or left by one that was
    killed.
    """
    with _alone_in(folder):
        _put_in_place(temporary, folder, files)


def _put_in_place(temporary: Path, folder: Path, files: Iterable[str]) -> None:
    former = [old for old in folder.iterdir() if _OWN_FILES.fullmatch(old.name) or old.name == CONFIG]
    for old in former:
        if old.is_dir():
            raise IsADirectoryError(f"path must have a file as {str(old)!r}, got a folder")
    temporary.chmod(folder.stat().st_mode)  # who may read the folder may read what is not moved yet
    _sync(temporary)
    saved = temporary.rename(folder / temporary.name.replace(_SAVING, _SAVED))
    try:
        (saved / CONFIG).replace(folder / CONFIG)
    except BaseException:
        if (saved / CONFIG).exists():
            saved.rename(temporary)  # which its owner removes
        raise
    _sync(folder)
    for name in files:
        (saved / name).replace(folder / name)
    _sync(folder)
    for old in former:
        if old.name not in (*files, CONFIG):
            old.unlink()
    for left in folder.glob(f"{_SAVED}*"):  # of earlier saves, too, that were killed
        shutil.rmtree(left)


def _sync(folder: Path) -> None:
    """Has the disk know the names in a folder, before anything that relies on them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def state_of(folder: Path) -> object:
    """What a save changes wherever it makes files of a checkpoint another one's, or moves them."""
    with suppress(OSError):
        found = (folder / CONFIG).stat()
        return found.st_ino, found.st_mtime_ns, sorted(folder.glob(f"{_SAVED}*/*"))
    return None


def read_headers(folder: Path, expected: Mapping[str, str] | None) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint; ``expected`` has the checksums of its files."""
    checksums: dict[str, str] = {}
    places: dict[str, str] | None = None
    # Where a save was cut off, files of the former one may lie beside these.
    saved = [] if expected is None else sorted(folder.glob(f"{_SAVED}*"))
    if WEIGHTS in expected if expected and saved else (folder / WEIGHTS).exists():
        shards = [WEIGHTS]
    else:
        index, checksums[INDEX] = read_json(_standing(folder, INDEX, saved, expected))
        with named(INDEX):
            places = checked_texts("weight_map", index.get("weight_map"))
        shards = sorted(set(places.values()))
        for shard in shards:
            if not re.fullmatch(r"[\w.-]{1,251}\.safetensors", shard, re.ASCII):
                raise CheckpointError(f"{INDEX} must name safetensors files beside it, got {shown(shard)}")
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        tensors, checksums[shard] = read_header(_standing(folder, shard, saved, expected))
        if places is not None and set(tensors) != {name for name in places if places[name] == shard}:
            raise CheckpointError(f"{INDEX} names other tensors in {shard} than there are")
        stored |= tensors
    expected = checksums if expected is None else expected
    for name in sorted({*checksums, *expected}):
        if checksums.get(name) != expected.get(name):
            raise CheckpointError(f"{CONFIG}: does not belong to {shown(name)}, or that is damaged")
    return stored


def _standing(folder: Path, name: str, saved: Iterable[Path], expected: Mapping[str, str] | None) -> Path:
    """Where a file of the checkpoint lies: a save that was cut off may not have moved it to its place."""
    for file in (place / name for place in saved):
        with suppress(CheckpointError):
            checksum = read_json(file)[1] if name == INDEX else read_header(file)[1]
            if expected and checksum == expected.get(name):
                return file
    return folder / name


def check_belongs(name: str, checksum: str, expected: Mapping[str, str] | None) -> None:
    """Checks that a file, which others read from its place, was not left there by a save that was cut off.

    ``expected`` has the checksums of the checkpoint's files; None and nothing are as good.
    """
    if expected and expected.get(name) != checksum:
        raise CheckpointError(
            f"{name} does not belong to {CONFIG}; where tilesparse.save was cut off, tilesparse.load reads "
            "the checkpoint, and saving it again makes it whole"
        )
