"""Layers that can be adapted, and the blocks that their adapters train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._names import NamePattern
from ..errors import InvalidArgumentError
from ..nn.experts_linear import ExpertsLinear
from ..nn.linear import BlockSparseLinear
from ..patch.modules import owners_of_parameters
from ..pattern.block_pattern import BlockPattern
from .linear import AdaptedLinear


def matching_layers(model: nn.Module, regex: str) -> dict[str, BlockSparseLinear]:
    """Return the block-sparse layers that a name or regular expression matches, by name."""
    pattern = NamePattern.parse(regex)
    modules = dict(model.named_modules())
    adapted = tuple(f"{name}." for name, module in modules.items() if isinstance(module, AdaptedLinear))
    names = [
        name
        for name, module in modules.items()
        if pattern.match(name)
        and isinstance(module, BlockSparseLinear | AdaptedLinear)
        and not name.startswith(adapted)
    ]
    if not names:
        raise InvalidArgumentError(f"regex must match a block-sparse layer, got {regex!r}")
    owners = owners_of_parameters(modules.values())
    return {name: adaptable_layer(modules, owners, name) for name in names}


def adaptable_layer(
    modules: Mapping[str, nn.Module], owners: Mapping[nn.Parameter, list[nn.Module]], name: str
) -> BlockSparseLinear:
    """Return the layer of this name, or raise InvalidArgumentError if it cannot be adapted."""
    layer = modules.get(name)
    if isinstance(layer, AdaptedLinear):
        raise InvalidArgumentError(
            f"model must have no adapter at layer {name!r}; call its merge or remove first"
        )
    if not isinstance(layer, BlockSparseLinear) or not name:
        kind = "nothing" if layer is None else type(layer).__name__
        raise InvalidArgumentError(f"model must have a BlockSparseLinear as {name!r}, got {kind}")
    sharing = [owner for owner in owners.get(layer.weight, ()) if owner is not layer]
    if sharing:
        other = next(other for other, module in modules.items() if module is sharing[0])
        raise InvalidArgumentError(
            f"model must not share the weight of layer {name!r}, got one that {other!r} has, too"
        )
    return layer


def chosen_slots(
    name: str,
    layer: BlockSparseLinear,
    density: float,
    scores: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Return the slots of the blocks to train, ascending, on the host."""
    nnz = layer.pattern.nnz
    if nnz == 0:
        raise InvalidArgumentError(
            f"regex must match layers that keep blocks, got {name!r}, which keeps none"
        )
    if scores is None:
        order = torch.randperm(nnz, generator=generator, device="cpu")
    elif not isinstance(scores, Tensor):
        raise InvalidArgumentError(f"scores of {name!r} must be a tensor, got {type(scores).__name__}")
    elif scores.shape != (nnz,):
        raise InvalidArgumentError(f"scores of {name!r} must have shape {(nnz,)}, got {tuple(scores.shape)}")
    elif bool(scores.isnan().any()):
        raise InvalidArgumentError(f"scores of {name!r} must not have NaN, which cannot be ranked")
    else:
        order = scores.detach().cpu().argsort(descending=True, stable=True)
    return order[: max(1, round(density * nnz))].sort().values


def zero_delta(base: BlockSparseLinear, slots: Tensor) -> BlockSparseLinear:
    """Return a delta of zeros with these blocks of a layer, and its mask of 2:4."""
    blocks = torch.stack(base.pattern.to("cpu").block_indices(), dim=1)[slots]
    options: Any = {
        "bias": False,
        "pattern": BlockPattern.from_blocks(
            blocks, shape=(base.out_features, base.in_features), block_shape=base.block_shape
        ),
        "nm": base.nm,
        "transposable": base.transposable,
        "device": base.weight.device,
        "dtype": torch.promote_types(base.spec.dtype, torch.float32),
    }
    kind: Any = BlockSparseLinear
    if isinstance(base, ExpertsLinear):
        kind, options["experts"] = ExpertsLinear, base.experts
    delta: BlockSparseLinear = kind(base.in_features, base.out_features, **options)
    mask = base.kept_mask()
    with torch.no_grad():
        delta.weight.zero_()
        if mask is not None and delta.mask is not None:
            delta.mask.copy_(mask[slots.to(mask.device)])
    return delta


def slots_of(name: str, base: BlockSparseLinear, pattern: BlockPattern) -> Tensor:
    """Return for each block of a pattern, by slot, its slot in the layer."""
    places = {block: slot for slot, block in enumerate(_blocks(base.pattern))}
    blocks = _blocks(pattern)
    missing = [block for block in blocks if block not in places]
    if missing:
        raise InvalidArgumentError(
            f"pattern must have blocks that layer {name!r} keeps, got {missing[0]}, which it does not"
        )
    return torch.tensor([places[block] for block in blocks], device=base.weight.device)


def _blocks(pattern: BlockPattern) -> list[tuple[int, int]]:
    """Return (row, column) of each block, by slot."""
    rows, cols = pattern.block_indices()
    return list(zip(rows.tolist(), cols.tolist(), strict=True))
