"""Tokens in the order of their experts, and their results as one; the host waits for nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._ops.combine import combine, spread


class Routing(NamedTuple):
    """Where the rows of a grouped product come from, and where they go."""

    offsets: Tensor  # int32 [experts + 1]: the rows of expert e are offsets[e] to offsets[e + 1] - 1
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
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return Routing(offsets, rows.view(top_k_index.shape))


def gathered(x: Tensor, routing: Routing, given: Tensor) -> Tensor:
    """Return the rows [tokens * k, features] of x [tokens, features], sorted by expert.

    Choices that are not ``given`` [tokens, k] get zeros: an expert is finite there, and so is zero times it.
    The gradient of a token is the sum of those of its rows, in a fixed order.
    """
    return spread(x, given.to(x.dtype), routing.rows)


def combined(y: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """Return the sum [tokens, features] over each token's rows of y, times its weights [tokens, k].

    Sums are taken in float32 at least and rounded once, to the dtype of y.
    """
    return combine(y, weights.to(y.dtype), routing.rows)
