"""One rewiring of one layer: blocks that move, and what their new weights are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..nn.linear import BlockSparseLinear
from ..nn.origin import Source


def grid_of(layer: BlockSparseLinear) -> tuple[int, int]:
    """Return (R, C): numbers of block rows and block columns."""
    return layer.spec.grid


def move_blocks(
    layer: BlockSparseLinear, worth: Tensor, growth: Tensor, useful: Tensor, count: int
) -> Tensor:
    """Move the blocks of least worth to the free places of most growth, and return their slots.

    Args:
        layer: whose pattern changes in place.
        worth: [nnz].
        growth: [R, C].
        useful: bool []; False leaves every block where it is.
        count: number of blocks that move.
    """
    cols = grid_of(layer)[1]
    rows, columns = layer.pattern.block_indices()
    kept = rows * cols + columns
    growth = growth.flatten().index_fill(0, kept, -torch.inf)
    dropped = worth.sort(stable=True).indices[:count]
    free = growth.sort(descending=True, stable=True).indices[:count]
    places = torch.where(useful, free, kept.index_select(0, dropped))
    if count:
        shared = layer.origin.source is Source.SHARED
        layer.pattern.move_blocks_(dropped, torch.stack((places // cols, places % cols), 1), check=False)
        if shared:  # and so it is now: schedules of all processes decide alike
            layer.declare_shared()
    return dropped


def renew(
    layer: BlockSparseLinear,
    slots: Tensor,
    useful: Tensor,
    scale: float,
    states: Iterable[Tensor],
    generator: torch.Generator,
) -> None:
    """Give slots new weights, and zeros in their gradients and states, if `useful`.

    Weights are uniform with `scale` times the standard deviation of the layer's initialization.
    """
    weight = layer.weight
    old = weight.index_select(0, slots)
    new = torch.zeros_like(old)
    if scale:
        fan_in = layer.density * layer.in_features / (1 if layer.nm is None else 2)
        bound = scale * fan_in**-0.5
        new.uniform_(-bound, bound, generator=generator)
    weight.index_copy_(0, slots, torch.where(useful, new, old))
    gradients = weight.grad, getattr(weight, "main_grad", None)
    for state in (*(gradient for gradient in gradients if gradient is not None), *states):
        state.index_copy_(0, slots, torch.where(useful, 0, state.index_select(0, slots)))
