"""Manifest of a checkpoint: the section of ``config.json`` on block-sparse layers.

docs/checkpoints.md has the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .._checks import DTYPES, POLICIES, check_block_shape, check_shapes
from .._runtime.tensor_files import checked_texts, few, named, read_json, shown
from ..config import METHOD, QUANTIZED_BY_NAME, STORAGES, check_nm, check_nm_blocks, check_storage
from ..errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from .files import CONFIG

VERSION = 1  # of the section
_KEYS = {"version", "layers", "ties", "files"}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class SavedForm(NamedTuple):
    """What the section says of a layer."""

    shape: tuple[int, int]
    block_shape: tuple[int, int]
    nnz: int
    dtype: torch.dtype  # of plain values
    storage: str
    nm: tuple[int, int] | None
    transposable: bool
    scales: str | None
    policy: str


def section(model: nn.Module) -> dict[str, Any]:
    """What a configuration has to say of a model's block-sparse layers, ready for JSON.

    Returns:
        ``{"version": 1, "layers": {name: entry}}`` with an entry for each `BlockSparseLinear` as it is now:
        ``shape`` [out_features, in_features], ``block_shape`` [bn, bk], ``nnz``, ``dtype`` of plain values,
        ``storage``, ``nm``, ``transposable``, ``scales`` ("row", "block" or None) and ``policy``. A layer
        that the model has under several names is listed under the first.
    """
    layers = {
        name: _entry(module)
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseLinear)
    }
    return {"version": VERSION, "layers": layers}


def _entry(layer: BlockSparseLinear) -> dict[str, Any]:
    scales = None if layer.scales is None else "row" if layer.scales.dim() == 2 else "block"
    return {
        "shape": [layer.out_features, layer.in_features],
        "block_shape": list(layer.block_shape),
        "nnz": layer.col_indices.shape[0],
        "dtype": str(layer.spec.dtype).removeprefix("torch."),
        "storage": layer.storage,
        "nm": None if layer.nm is None else list(layer.nm),
        "transposable": layer.transposable,
        "scales": scales,
        "policy": layer.policy,
    }


def forms(folder: Path) -> Mapping[str, SavedForm]:
    """What the configuration of a checkpoint says of each layer, by name.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    return read_section(folder)[0]


def check_section(section: object) -> None:
    """Checks what a configuration says of block-sparse layers; keys besides version and layers may be there.

    Raises:
        InvalidArgumentError: it is of a newer version, or not what `section` makes.
    """
    parsed_layers(section)


def parsed_layers(section: object) -> dict[str, SavedForm]:
    """Return the spec of each layer that a section describes."""
    if not isinstance(section, Mapping):
        raise InvalidArgumentError(f"tilesparse: a section expected, got {shown(section)}")
    version, layers = section.get("version"), section.get("layers")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidArgumentError(f"version: a number from 1 expected, got {shown(version)}")
    if version > VERSION:
        raise InvalidArgumentError(
            f"version: up to {VERSION} is known here, got {shown(version)}; install a newer tilesparse"
        )
    if not isinstance(layers, Mapping) or not all(isinstance(name, str) for name in layers):
        raise InvalidArgumentError(f"layers: an entry for each layer's name expected, got {shown(layers)}")
    return {name: _form(name, entry) for name, entry in layers.items()}


def _form(name: str, entry: object) -> SavedForm:
    try:
        if not isinstance(entry, Mapping) or set(entry) != {*SavedForm._fields}:
            raise InvalidArgumentError(
                f"an entry with {', '.join(SavedForm._fields)} expected, got {shown(entry)}"
            )
        return _checked_form(entry)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"layers: {shown(name)}: {error}") from None


def _checked_form(entry: Mapping[str, Any]) -> SavedForm:
    for field in ("shape", "block_shape"):
        if not isinstance(entry[field], list | tuple) or len(entry[field]) != 2:
            raise InvalidArgumentError(f"{field}: two numbers expected, got {shown(entry[field])}")
    for field in ("shape", "block_shape", "nnz"):
        numbers = entry[field] if field != "nnz" else [entry[field]]
        if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
            raise InvalidArgumentError(f"{field}: integers from 0 to 2^31 - 1 expected, got {shown(numbers)}")
    block_shape = check_block_shape(entry["block_shape"])
    shape, _, (rows, cols) = check_shapes(entry["shape"], block_shape)
    if entry["nnz"] > rows * cols:
        raise InvalidArgumentError(f"nnz: at most {rows * cols} expected, got {entry['nnz']}")
    choices = {"dtype": tuple(_DTYPES), "storage": STORAGES, "nm": (None, [2, 4], (2, 4)), "policy": POLICIES}
    for field, allowed in choices.items():
        if entry[field] not in allowed:
            raise InvalidArgumentError(f"{field}: one of {list(allowed)} expected, got {shown(entry[field])}")
    nm, storage, transposable = entry["nm"], entry["storage"], entry["transposable"]
    if not isinstance(transposable, bool):
        raise InvalidArgumentError(f"transposable: true or false expected, got {shown(transposable)}")
    check_nm(nm, transposable)
    check_nm_blocks(nm, transposable, block_shape)
    check_storage(storage, nm)
    scales = ("row", "block") if storage in QUANTIZED_BY_NAME else (None,)
    if entry["scales"] not in scales:
        raise InvalidArgumentError(
            f"scales: one of {list(scales)} expected with storage {storage!r}, got {shown(entry['scales'])}"
        )
    checked = {"shape": shape, "block_shape": block_shape, "dtype": _DTYPES[entry["dtype"]]}
    return SavedForm(**{**entry, **checked, "nm": None if nm is None else (2, 4)})


def read_section(folder: Path) -> tuple[dict[str, SavedForm], dict[str, str], dict[str, str] | None]:
    """What the configuration says of layers, of names of one tensor, and of files."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"path: a folder expected, there is none at {str(folder)!r}")
    config = read_json(folder / CONFIG)[0]
    quantization = config.get("quantization_config")
    is_quantization = is_method(quantization)
    if not is_quantization and METHOD not in config:
        raise CheckpointError(
            f"{CONFIG}: a section {METHOD!r} or a quantization_config of that method expected, got neither"
        )
    # Where both are there Transformers has carried the other along, from an earlier checkpoint.
    own: Any = quantization if is_quantization else config[METHOD]
    with named(CONFIG):
        forms = parsed_layers(own)
        if not is_quantization and (others := sorted(set(own) - _KEYS)):
            raise InvalidArgumentError(f"{METHOD}: keys from {sorted(_KEYS)} expected, got {few(others)}")
        ties = checked_texts("ties", own.get("ties", {}))
        files = own.get("files")
        return forms, ties, None if files is None else checked_texts("files", files)


def is_method(quantization: object) -> bool:
    """Return True for a quantization_config of this package."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD
