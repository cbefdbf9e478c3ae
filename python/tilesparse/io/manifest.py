"""Manifest of a checkpoint: the section of ``config.json`` on block-sparse layers.

docs/checkpoints.md has the format.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
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
    # Where both are there Transformers has carried the other along, from an earlier checkpoint.
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
SAVING = ".saving-"  # a folder inside, of a save under way
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


def put_in_place(temporary: Path, folder: Path, files: Iterable[str]) -> None:
    """Replace the checkpoint of a folder by complete files, last ``config.json``, with their checksums."""
    names = [*files, CONFIG]
    former = [old for old in folder.iterdir() if _OWN_FILES.fullmatch(old.name) or old.name in names]
    for old in former:
        if old.is_dir():
            raise IsADirectoryError(f"path must have a file as {str(old)!r}, got a folder")
    for name in names:
        (temporary / name).replace(folder / name)
    for old in former:
        if old.name not in names:
            old.unlink()


def read_headers(folder: Path, expected: Mapping[str, str] | None) -> dict[str, StoredTensor]:
    """Return all tensors of the checkpoint; ``expected`` has the checksums of its files."""
    checksums: dict[str, str] = {}
    places: dict[str, str] | None = None
    if (folder / WEIGHTS).exists():
        shards = [WEIGHTS]
    else:
        index, checksums[INDEX] = read_json(folder / INDEX)
        with named(INDEX):
            places = checked_texts("weight_map", index.get("weight_map"))
        shards = sorted(set(places.values()))
        for shard in shards:
            if not re.fullmatch(r"[\w.-]{1,251}\.safetensors", shard, re.ASCII):
                raise CheckpointError(f"{INDEX} must name safetensors files beside it, got {shown(shard)}")
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        tensors, checksums[shard] = read_header(folder / shard)
        if places is not None and set(tensors) != {name for name in places if places[name] == shard}:
            raise CheckpointError(f"{INDEX} names other tensors in {shard} than there are")
        stored |= tensors
    expected = checksums if expected is None else expected
    for name in sorted({*checksums, *expected}):
        if checksums.get(name) != expected.get(name):
            raise CheckpointError(f"{CONFIG}: does not belong to {shown(name)}, or that is damaged")
    return stored


def check_belongs(name: str, checksum: str, expected: Mapping[str, str] | None) -> None:
    """Check that a file is the checkpoint's; ``expected`` has the checksums of its files, or nothing."""
    if expected and expected.get(name) != checksum:
        raise CheckpointError(f"{CONFIG}: does not belong to {shown(name)}, or that is damaged")
