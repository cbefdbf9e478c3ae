"""Manifest of a checkpoint: the section of ``config.json`` on block-sparse layers.

docs/checkpoints.md has the format.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .._files import (
    StoredTensor,
    checked_texts,
    few,
    named,
    read_header,
    read_json,
    shown,
    write_json,
    write_tensors,
)
from ..config import METHOD, NEWER, LayerSpec
from ..errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError
from ..nn.linear import BlockSparseLinear

VERSION = max(NEWER.values())  # the newest; a section has the least version that knows what is in it
_KEYS = {"version", "layers", "ties", "files"}


def section(model: nn.Module) -> dict[str, Any]:
    """Return what a configuration says of a model's block-sparse layers, ready for JSON.

    Returns:
        ``{"version": 1, "layers": {name: entry}}`` with `LayerSpec.to_json` of each `BlockSparseLinear` as
        entry. A layer that the model has under several names is listed under the first. With 8-bit
        activations the version is 2, with experts 3, with a threshold 4: earlier readers refuse them.
    """
    layers = {
        name: module.spec.to_json()
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseLinear)
    }
    return section_of(layers)


def section_of(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with these entries, in the first version that has all of their fields."""
    return {"version": max(map(_version_of, layers.values()), default=1), "layers": layers}


def parsed_layers(section: object) -> dict[str, LayerSpec]:
    """Return the spec of each layer that a section describes; it may have other keys than these."""
    if not isinstance(section, Mapping):
        raise InvalidArgumentError(f"tilesparse must be a section, got {shown(section)}")
    version, layers = section.get("version"), section.get("layers")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidArgumentError(f"version must be a number of at least 1, got {shown(version)}")
    if version > VERSION:
        raise InvalidArgumentError(
            f"version must be at most {VERSION} here, got {shown(version)}; install a newer tilesparse"
        )
    if not isinstance(layers, Mapping) or not all(isinstance(name, str) for name in layers):
        raise InvalidArgumentError(f"layers must have an entry for each layer's name, got {shown(layers)}")
    forms = {}
    for name, entry in layers.items():
        try:
            forms[name] = LayerSpec.from_json(entry)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"layers: {shown(name)}: {error}") from None
    return forms


def _version_of(entry: object) -> int:
    """Return the first version that has all fields of an entry."""
    fields = entry if isinstance(entry, Mapping) else {}
    return max((version for field, version in NEWER.items() if field in fields), default=1)


def read_section(folder: Path) -> tuple[dict[str, LayerSpec], dict[str, str], dict[str, str] | None]:
    """Return what the configuration says: specs of layers, other names of tensors, checksums of files."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"path must be a folder, there is none at {str(folder)!r}")
    config = read_json(folder / CONFIG)[0]
    quantization = config.get("quantization_config")
    is_quantization = is_method(quantization)
    if not is_quantization and METHOD not in config:
        raise CheckpointError(
            f"{CONFIG} must have a section {METHOD!r} or a quantization_config of that method, got neither"
        )
    # If both are there, Transformers has carried the other along, from an earlier checkpoint.
    own: Any = quantization if is_quantization else config[METHOD]
    with named(CONFIG):
        forms = parsed_layers(own)
        if not is_quantization and (others := sorted(set(own) - _KEYS)):
            raise InvalidArgumentError(f"{METHOD} must have keys from {sorted(_KEYS)}, got {few(others)}")
        ties = checked_texts("ties", own.get("ties", {}))
        files = own.get("files")
        return forms, ties, None if files is None else checked_texts("files", files)


def is_method(quantization: object) -> bool:
    """Return True for a quantization_config of this package."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers of its own, by their attributes."""
    for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and attribute not in module._non_persistent_buffers_set:
            yield attribute, tensor


def joined(prefix: str, attribute: str) -> str:
    """Join the name of a module and an attribute's."""
    return f"{prefix}.{attribute}" if prefix else attribute


def checked_folder(path: object) -> Path:
    """Return the folder that is given as the path of a checkpoint, which may be missing yet."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidArgumentError(f"path must be the path of a folder, got {shown(path)}")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise InvalidArgumentError(f"path must be the path of a folder, got the file {str(folder)!r}")
    return folder


CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_SHARD = "model-{:05}-of-{:05}.safetensors"
_OWN_FILES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
SAVING, _SAVED = ".saving-", ".saved-"  # folders inside: of a save under way, and of one that stands
_LOCK = ".saving"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def byte_limit(size: object) -> int:
    """Return the bytes of a size of shards, which Transformers writes as text."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"(\d{1,15}) ?([KMGT]B)?", size) if isinstance(size, str) else None
    if found is None or int(found[1]) == 0:
        raise InvalidArgumentError(f"max_shard_size must be bytes, or a text such as '5GB', got {size!r}")
    return int(found[1]) * _UNITS[found[2] or ""]


class Shards:
    """Files of a checkpoint, each written once the next tensors would pass the limit of bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._tensors: dict[str, Tensor] = {}
        self._size = self._total = 0
        self._written: list[tuple[Path, str, list[str]]] = []  # with checksums and names of tensors

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the file under way."""
        if self._tensors and self._size + tensor.nbytes > self._limit:
            self._write()
        self._tensors[name] = tensor
        self._size, self._total = self._size + tensor.nbytes, self._total + tensor.nbytes

    def _write(self) -> None:
        file = self._folder / f"shard-{len(self._written)}"
        self._written.append((file, write_tensors(file, self._tensors), list(self._tensors)))
        self._tensors, self._size = {}, 0

    def finish(self) -> dict[str, str]:
        """Write what is left, and an index of several files; return the checksum of each file's header."""
        if self._tensors or not self._written:
            self._write()
        files, places = dict[str, str](), dict[str, str]()
        count = len(self._written)
        for number, (file, checksum, names) in enumerate(self._written, 1):
            name = WEIGHTS if count == 1 else _SHARD.format(number, count)
            file.rename(self._folder / name)
            files[name] = checksum
            places |= dict.fromkeys(names, name)
        if count == 1:
            return files
        index = {"metadata": {"total_size": self._total}, "weight_map": places}
        return {INDEX: write_json(self._folder / INDEX, index), **files}


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let other saves into a folder wait, of threads and processes alike, where the file system has locks.

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
    """Replace the checkpoint of a folder, in one moment: when ``config.json`` is renamed.

    Before, the former checkpoint stands. Afterwards the new one does, whose files `read_headers` finds in
    ``.saved-…`` until they are moved as well, since ``config.json`` has their checksums. Of saves at the same
    time one waits for the other here, so that all files in ``.saved-…`` are its own or left by one that was
    killed.
    """
    with _alone_in(folder):
        former = [old for old in folder.iterdir() if _OWN_FILES.fullmatch(old.name) or old.name == CONFIG]
        for old in former:
            if old.is_dir():
                raise IsADirectoryError(f"path must have a file as {str(old)!r}, got a folder")
        temporary.chmod(folder.stat().st_mode)  # who may read the folder may read what is not moved yet
        _sync(temporary)
        saved = temporary.rename(folder / temporary.name.replace(SAVING, _SAVED))
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
    """Flush the names in a folder to the disk, before anything that relies on them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def state_of(folder: Path) -> object:
    """Return what a save changes wherever it replaces or moves files of a checkpoint."""
    with suppress(OSError):
        found = (folder / CONFIG).stat()
        return found.st_ino, found.st_mtime_ns, sorted(folder.glob(f"{_SAVED}*/*"))
    return None


def read_headers(folder: Path, expected: Mapping[str, str] | None) -> dict[str, StoredTensor]:
    """Return all tensors of the checkpoint; ``expected`` has the checksums of its files."""
    checksums: dict[str, str] = {}
    places: dict[str, str] | None = None
    # If a save was cut off, files of the former one may lie beside these.
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
    """Return the place of a file, which a save that was cut off may not have moved."""
    for file in (place / name for place in saved):
        with suppress(CheckpointError):
            checksum = read_json(file)[1] if name == INDEX else read_header(file)[1]
            if expected and checksum == expected.get(name):
                return file
    return folder / name


def check_belongs(name: str, checksum: str, expected: Mapping[str, str] | None) -> None:
    """Check that a file, which others read from its place, was not left there by a save that was cut off.

    ``expected`` has the checksums of the checkpoint's files; None and nothing are as good.
    """
    if expected and expected.get(name) != checksum:
        raise CheckpointError(
            f"{name} does not belong to {CONFIG}; where tilesparse.save was cut off, tilesparse.load reads "
            "the checkpoint, and saving it again makes it whole"
        )
