"""Files of adapters."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..pattern.block_pattern import BlockPattern
from .blocks import slots_of, zero_delta

VERSION = 1  # of the file
INDEX_NAMES = ("weight", "crow_indices", "col_indices", "slot")


def loaded_delta(
    base: BlockSparseLinear, name: str, entry: Any, state: Mapping[str, Tensor]
) -> BlockSparseLinear:
    """Return the delta of one layer from its tensors in a file."""
    shape = [base.out_features, base.in_features]
    if not isinstance(entry, dict) or entry.get("shape") != shape:
        raise InvalidArgumentError(f"shape: {shape} expected, got {entry}")
    missing = [key for key in INDEX_NAMES if key not in state]
    if missing:
        raise InvalidArgumentError(f"{missing[0]}: missing")
    weight = state["weight"]
    if weight.dim() != 3 or tuple(weight.shape[1:]) != base.block_shape or not weight.is_floating_point():
        raise InvalidArgumentError(
            f"weight: floating-point blocks of {base.block_shape} expected, got {weight.dtype} of shape "
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
        raise InvalidArgumentError(f"weight: {pattern.nnz} blocks expected, got {len(weight)}")
    delta = zero_delta(base, slots_of(name, base, pattern).cpu())
    if not _is_same(state.get("mask"), delta.mask):
        raise InvalidArgumentError("mask: the entries of 2:4 that the layer keeps expected, got others")
    with torch.no_grad():
        delta.weight.copy_(weight)
    return delta


def _is_same(mask: Tensor | None, own: Tensor | None) -> bool:
    if mask is None or own is None:
        return mask is own
    return mask.dtype == own.dtype and torch.equal(mask, own.cpu())


def read_adapter(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says of its layers, and its tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("tilesparse_adapter", "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"path: {os.fspath(path)} is missing") from error
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"path: a safetensors file expected, got {os.fspath(path)}: {error}") from error
    if not isinstance(about, dict) or not isinstance(about.get("layers"), dict) or not about["layers"]:
        raise CheckpointError(f"path: a file of BlockSparseAdapter.save expected, got {os.fspath(path)}")
    if about.get("version") != VERSION:
        raise CheckpointError(
            f"path: version {VERSION} of the file expected, got {about.get('version')!r}; a newer "
            "TileSparse may have written it"
        )
    stray = [key for key in tensors if key.rpartition(".")[0] not in about["layers"]]
    if stray:
        raise CheckpointError(f"path: tensors of its layers expected in {os.fspath(path)}, got {stray[0]!r}")
    return about["layers"], tensors
