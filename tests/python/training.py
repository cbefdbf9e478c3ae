"""A small model of two sparse layers that is trained in a few steps, as tests of patterns need it."""

from __future__ import annotations

from typing import Any

import torch
from helpers import randn, seeded
from torch import Tensor, nn

from tilesparse import BlockSparseLinear

IN, OUT, BLOCK = 96, 64, 16
RATE = 0.01


def make(density: float = 0.5, device: str = "cpu", **options: Any) -> Any:
    generator = seeded(1)
    options = {"block_shape": BLOCK, "dtype": torch.float32, "density": density, **options}
    return nn.Sequential(
        BlockSparseLinear(IN, OUT, generator=generator, **options),
        nn.ReLU(inplace=True),
        BlockSparseLinear(OUT, IN, generator=generator, **options),
    ).to(device)


def sparse(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    """To be lowered: on data of its own in each step."""
    weight = next(model.parameters())
    x = randn(8, IN, dtype=weight.dtype, seed=step).to(weight.device)
    loss: Tensor = (model(x) - x.roll(1, -1)).square().mean()
    return loss


def backward(model: nn.Module, step: int = 0) -> Tensor:
    loss = loss_of(model, step)
    torch.autograd.backward(loss)
    return loss


def train(
    model: Any, optimizer: Any, schedule: Any = None, steps: range = range(1), fractions: Any = None
) -> list[int]:
    """Return the number of blocks of the first layer after each step."""
    counts = []
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        for one in (schedule, fractions):
            if hasattr(one, "step"):  # others have hooks
                one.step()
        counts.append(len(next(model.parameters())))
    return counts


def slots_of(layer: Any) -> list[tuple[int, int]]:
    """The place of each slot's block."""
    return list(zip(*map(Tensor.tolist, layer.pattern.block_indices()), strict=True))
