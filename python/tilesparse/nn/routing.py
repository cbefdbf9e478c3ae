"""Tokens in the order of their experts, and their results as one; the host waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Routing(NamedTuple):
    """Where the rows of a grouped product come from, and where they go."""

    offsets: Tensor  # int32 [experts + 1]: the rows of expert e are offsets[e] to offsets[e + 1] - 1
    order: Tensor  # int64 [tokens * k]: sorted row -> token * k + choice
    rows: Tensor  # int64 [tokens, k]: the sorted row of each choice


def routing_of(top_k_index: Tensor, experts: int) -> Routing:
    """Sort the choices of tokens by expert.

    Args:
        top_k_index: [tokens, k] integers from 0 to experts - 1.
        experts: how many there are.
    """
    chosen = top_k_index.reshape(-1).to(torch.int16)  # a quarter of the passes that sorting int64 takes
    chosen, order = chosen.sort(stable=True)
    numbers = torch.arange(experts + 1, device=chosen.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(chosen, numbers, out_int32=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Routing(offsets, order, rows.view(top_k_index.shape))


class _Gather(torch.autograd.Function):
    """x [tokens, features] in the order of experts, [tokens * k, features].

    The gradient of a token is the sum of those of its rows, in a fixed order: PyTorch's own adds them as
    they come.
    """

    @staticmethod
    def forward(x: Tensor, order: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, order // rows.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order, rows = ctx.saved_tensors
        return _combine(grads[0], torch.ones_like(rows, dtype=grads[0].dtype), order, rows), None, None


class _Combine(torch.autograd.Function):
    """Σ_j weights[t, j] y[rows[t, j]], read once."""

    @staticmethod
    def forward(y: Tensor, weights: Tensor, order: Tensor, rows: Tensor) -> Tensor:
        return F.embedding_bag(rows, y, per_sample_weights=weights, mode="sum")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        y, weights, order, rows = ctx.saved_tensors
        of_rows = _gather(grads[0], order, rows)
        of_y = of_rows * weights.reshape(-1)[order, None] if ctx.needs_input_grad[0] else None
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = (of_rows * y).sum(-1)[rows]
        return of_y, of_weights, None, None


_gather: Callable[[Tensor, Tensor, Tensor], Tensor] = _Gather.apply
_combine: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _Combine.apply


def gathered(x: Tensor, routing: Routing) -> Tensor:
    """Return the rows [tokens * k, features] of x [tokens, features], sorted by expert."""
    return _gather(x, routing.order, routing.rows)


def combined(y: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """Return the sum [tokens, features] over each token's rows of y, times its weights [tokens, k].

    Sums are taken in float32 at least and rounded once, to the dtype of y.
    """
    return _combine(y, weights.to(y.dtype), routing.order, routing.rows)
