"""Several layers of one x as one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .._arguments import checked
from ..errors import InvalidArgumentError
from ..pattern.block_pattern import BlockPattern
from .linear import BlockSparseLinear
from .parts import Stored, layer_like, stored_of


@checked
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
    kinds = [_kind(each, layer.weight.device) for each, layer in zip(stored, layers, strict=True)]
    for number, kind in enumerate(kinds):
        for name, value in kind.items():
            if value != kinds[0][name]:
                raise InvalidArgumentError(
                    f"layers must agree in {name}, got {kinds[0][name]} and, of layers[{number}], {value}"
                )
    bn, bk = (min(sizes) for sizes in zip(*(each.spec.block_shape for each in stored), strict=True))
    stored = [each.refined((bn, bk)) for each in stored]
    blocks, above = [], 0
    for each in stored:
        rows, columns = each.pattern.block_indices()
        blocks.append(torch.stack((rows + above // bn, columns), 1))
        above += each.spec.shape[0]
    shape = above, stored[0].spec.shape[1]
    pattern = BlockPattern.from_blocks(torch.cat(blocks), shape=shape, block_shape=(bn, bk))
    parts = _with_bias(stored)
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    spec = replace(stored[0].spec, shape=shape, nnz=pattern.nnz)
    return layer_like(layers[0], Stored(spec, pattern, tensors))


def reason_not_one(layers: Sequence[nn.Module]) -> str | None:
    """Say why layers of one x cannot be one product, or return None.

    Layers whose blocks differ could be one in smaller blocks, which take more time than that saves.
    """
    dense = [type(layer).__name__ for layer in layers if not isinstance(layer, BlockSparseLinear)]
    if dense:
        return f"a {dense[0]} is among them"
    specs = [layer.spec for layer in layers if isinstance(layer, BlockSparseLinear)]
    for name in ("block_shape", "dtype", "storage", "nm", "transposable", "scales", "activations", "policy"):
        values = {getattr(spec, name): None for spec in specs}
        if len(values) > 1:
            return f"they differ in {name}: {', '.join(map(str, values))}"
    if len({(spec.shape[1], layer.weight.device) for spec, layer in zip(specs, layers, strict=True)}) > 1:
        return "they differ in in_features or device"
    return None


def _kind(stored: Stored, device: torch.device) -> dict[str, object]:
    """Return what layers have to agree in."""
    names = "dtype", "storage", "nm", "transposable", "scales", "activations", "policy"
    of_spec = {name: getattr(stored.spec, name) for name in names}
    return {"in_features": stored.spec.shape[1], "device": device, **of_spec}


def _with_bias(stored: Sequence[Stored]) -> list[dict[str, Tensor]]:
    """Return the tensors of all, with a bias of zeros for those that have none where others have one."""
    if not any("bias" in each.tensors for each in stored):
        return [each.tensors for each in stored]
    found = []
    for each in stored:
        device = each.tensors["weight"].device
        zeros = torch.zeros(each.spec.shape[0], dtype=each.spec.dtype, device=device)
        found.append({"bias": zeros, **each.tensors})
    return found
