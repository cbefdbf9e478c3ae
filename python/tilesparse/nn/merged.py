"""One product for several layers that a module calls with one x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..errors import InvalidArgumentError
from ..pattern import BlockPattern
from .linear import BlockSparseLinear, layer_like
from .weight import Stored, stored_of


@torch.no_grad()
def concatenate(layers: Sequence[BlockSparseLinear]) -> BlockSparseLinear:
    """Return one layer whose result is the results of several layers of one x, one after the other.

    It has the block rows of the first layer, below these those of the second, and so on. One product of more
    rows takes less time than several, as with q, k and v. Where block shapes differ all blocks are divided
    into the smallest, see `BlockPattern.refined`; nothing is rounded.

    Args:
        layers: which agree in in_features, dtype, device, storage, 2:4, scales, activations and policy. If
            one of them has a bias the result has one, of zeros for those without.

    Returns:
        A layer of copied tensors.

    Raises:
        InvalidArgumentError: there is no layer, or they do not agree.
        UnsupportedError: a weight is sharded.

    Examples:
        >>> y = concatenate([q, k, v])(x)  # torch.cat([q(x), k(x), v(x)], -1)
    """
    if not layers:
        raise InvalidArgumentError("layers must have at least one layer, got none")
    stored = [stored_of(layer, "concatenate") for layer in layers]
    difference = _difference([_kind(layer) for layer in layers])
    if difference is not None:
        name, values = difference
        raise InvalidArgumentError(f"layers must agree in {name}, got {values}")
    bn, bk = (min(sizes) for sizes in zip(*(each.spec.block_shape for each in stored), strict=True))
    stored = [each.refined((bn, bk)) for each in stored]
    blocks, above = [], 0
    for each in stored:
        rows, columns = each.pattern.block_indices()
        blocks.append(torch.stack((rows + above // bn, columns), 1))
        above += each.spec.shape[0]
    shape = above, stored[0].spec.shape[1]
    pattern = BlockPattern.from_blocks(torch.cat(blocks), shape=shape, block_shape=(bn, bk))
    spec = replace(stored[0].spec, shape=shape, nnz=pattern.nnz)
    parts = [each.tensors for each in stored]
    if any("bias" in part for part in parts):
        zeros = [
            torch.zeros(each.spec.shape[0], dtype=spec.dtype, device=layers[0].weight.device)
            for each in stored
        ]
        parts = [{"bias": zero, **part} for zero, part in zip(zeros, parts, strict=True)]
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    whole = layer_like(layers[0], Stored(spec, pattern, tensors))
    whole.use_fast_accum = layers[0].use_fast_accum
    return whole


def reason_not_one(layers: Sequence[nn.Module]) -> str | None:
    """Say why layers of one x cannot be one product, or return None."""
    sparse = [layer for layer in layers if isinstance(layer, BlockSparseLinear)]
    if len(sparse) < len(layers):
        dense = next(type(layer).__name__ for layer in layers if not isinstance(layer, BlockSparseLinear))
        return f"a {dense} is among them"
    difference = _difference([{"block_shape": layer.block_shape, **_kind(layer)} for layer in sparse])
    return None if difference is None else "they differ in {}: {}".format(*difference)


def _difference(kinds: list[dict[str, object]]) -> tuple[str, str] | None:
    """Return the first name with several values, and these."""
    for name in kinds[0]:
        values = dict.fromkeys(kind[name] for kind in kinds)
        if len(values) > 1:
            return name, ", ".join(map(str, values))
    return None


def _kind(layer: BlockSparseLinear) -> dict[str, object]:
    """Return what layers have to agree in."""
    names = "dtype", "storage", "nm", "transposable", "granularity", "activations", "policy", "threshold"
    own = {name: getattr(layer.spec, name) for name in names}
    own["use_fast_accum"] = layer.use_fast_accum
    return {**own, "in_features": layer.in_features, "device": layer.weight.device}
