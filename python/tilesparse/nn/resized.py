"""Weights whose number of blocks has changed, and optimizers that keep states for the blocks of before.

A `BlockSparseLinear` whose state_dict brings another number of blocks keeps its Parameter, so that
optimizers, lists of parameters and hooks go on holding it. What an optimizer keeps of each block does not
follow by itself, and a fused one reads and writes it by the weight's size without a look at its own. So once
a weight has been resized every optimizer is checked before it steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import PatternChangedError

_resized: Any = WeakIdKeyDictionary()
_hooks: list[Any] = []  # one, for all optimizers, from the first resized weight on


def watch(weight: Tensor) -> None:
    """Check the states of this weight before every later step of an optimizer."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_states))
    _resized[weight] = None


def has_slots(state: Tensor, weight: Tensor) -> bool:
    """Return True if a state has one part for each block of a weight [nnz, bn, bk].

    Moments have the weight's shape, factored ones have 1 in place of some dimensions, or leave them out.
    """
    nnz, bn, bk = weight.shape
    factored = {(nnz, bn, 1), (nnz, 1, bk), (nnz, 1, 1), (nnz, bn), (nnz, bk), (nnz,)}
    return state.shape == weight.shape or tuple(state.shape) in factored


def _check_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise PatternChangedError, before anything is written, for states of another number of blocks."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight in _resized:
                _check_states_of(optimizer, weight)


def _check_states_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    for name, state in optimizer.state.get(weight, {}).items():
        if isinstance(state, Tensor) and state.numel() != 1 and not has_slots(state, weight):
            raise PatternChangedError(
                f"{type(optimizer).__name__} keeps {name!r} of shape {list(state.shape)} for a block-sparse "
                f"weight that now is {list(weight.shape)}: its number of blocks changed; build the optimizer "
                "again, or load its own state_dict after that of the model"
            )
