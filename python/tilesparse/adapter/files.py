"""Safetensors files of adapters, written and read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._files import replacing
from .._runtime.tensor_files import opened, write_tensors
from ..errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..nn.tensors import INDEX_NAMES
from ..pattern.block_pattern import BlockPattern
from .blocks import slots_of, zero_delta

_VERSION = 1  # of the file
_METADATA = "tilesparse_adapter"


def write_adapter(path: str | PathLike[str], deltas: Mapping[str, BlockSparseLinear]) -> None:
    """Write deltas by name to a file, which replaces an existing one once it is complete.

    Raises:
        InvalidArgumentError: the path is a folder or cannot be written.
    """
    tensors = {
        f"{name}.{key}": tensor
        for name, delta in deltas.items()
        for key, tensor in delta.state_dict().items()
    }
    layers = {name: {"shape": [delta.out_features, delta.in_features]} for name, delta in deltas.items()}
    about = {"version": _VERSION, "layers": layers}
    if Path(path).is_dir():
        raise InvalidArgumentError(f"path must be the path of a file, got the folder {os.fspath(path)!r}")
    try:
        with replacing(path) as file:
            write_tensors(file, tensors, {_METADATA: json.dumps(about)})
    except OSError as error:
        raise InvalidArgumentError(f"path must be a file that can be written: {error}") from error


def loaded_delta(
    base: BlockSparseLinear, name: str, entry: Any, state: Mapping[str, Tensor]
) -> BlockSparseLinear:
    """Return the delta of one layer from its tensors in a file."""
    shape = [base.out_features, base.in_features]
    if not isinstance(entry, dict) or entry.get("shape") != shape:
        raise InvalidArgumentError(f"shape must be {shape}, got {entry}")
    missing = [key for key in ("weight", *INDEX_NAMES) if key not in state]
    if missing:
        raise InvalidArgumentError(f"{missing[0]} is missing")
    weight = state["weight"]
    if weight.dim() != 3 or tuple(weight.shape[1:]) != base.block_shape or not weight.is_floating_point():
        raise InvalidArgumentError(
            f"weight must have floating-point blocks of {base.block_shape}, got {weight.dtype} of shape "
            f"{tuple(weight.shape)}"
        )
    pattern = BlockPattern(
        state["crow_indices"],
        state["col_indices"],
        shape=shape,
        block_shape=base.block_shape,
        slot=state["slot"],
    )
    if pattern.nnz != len(weight):
        raise InvalidArgumentError(f"weight must have {pattern.nnz} blocks, got {len(weight)}")
    delta = zero_delta(base, slots_of(name, base, pattern).cpu())
    if not _is_same(state.get("mask"), delta.mask):
        raise InvalidArgumentError("mask must be that of the layer, got one with other entries of 2:4")
    with torch.no_grad():
        delta.weight.copy_(weight)
    return delta


def _is_same(mask: Tensor | None, own: Tensor | None) -> bool:
    if mask is None or own is None:
        return mask is own
    return mask.dtype == own.dtype and torch.equal(mask, own.cpu())


def read_adapter(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the layers that a file describes, and its tensors.

    Raises:
        CheckpointError: the file is missing, damaged, newer or not one of `write_adapter`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        opened(Path(path)).close()
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(_METADATA, "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"path: {os.fspath(path)} is missing") from error
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"path must be a safetensors file, got {os.fspath(path)}: {error}") from error
    if not isinstance(about, dict) or not isinstance(about.get("layers"), dict) or not about["layers"]:
        raise CheckpointError(f"path must be a file of BlockSparseAdapter.save, got {os.fspath(path)}")
    if about.get("version") != _VERSION:
        raise CheckpointError(
            f"path must have version {_VERSION} of the file format, got {about.get('version')!r}; a newer "
            "TileSparse may have written it"
        )
    stray = [key for key in tensors if key.rpartition(".")[0] not in about["layers"]]
    if stray:
        raise CheckpointError(
            f"path must have tensors of its layers alone, got {stray[0]!r} in {os.fspath(path)}"
        )
    return about["layers"], tensors
