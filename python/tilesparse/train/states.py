"""States of optimizers by block, such as moments: forgotten where a block moves, dropped where it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..nn.resized import has_slots


def check_states(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> None:
    """Raise unless every state of these weights is known to have a block for each slot.

    Weights are given by the names of their layers.

    Understood are tensors of the weight's shape [nnz, bn, bk], which momentum and the moments of Adam are,
    and those of which all dimensions but the first are 1 or missing, as Adafactor's factored moments are.
    Numbers, and tensors of one, such as counts of steps, belong to no block.

    Raises:
        UnsupportedError: another state, by its name.
    """
    for layer_name, weight in weights.items():
        for name, state in optimizer.state.get(weight, {}).items():
            if not _is_known(state, weight):
                form = f"shape {list(state.shape)}" if type(state) is Tensor else f"a {type(state).__name__}"
                raise UnsupportedError(
                    f"optimizer: {type(optimizer).__name__} keeps a state {name!r} of the weight of layer "
                    f"{layer_name!r}, {form}, of which it is not known what belongs to which block"
                )


def states_by_slot(optimizer: torch.optim.Optimizer, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The states that have one part for each slot, by their names."""
    for name, state in list(optimizer.state.get(weight, {}).items()):
        if isinstance(state, Tensor) and has_slots(state, weight):
            yield name, state


def narrow_states(optimizer: torch.optim.Optimizer, weight: Tensor, slots: Tensor) -> None:
    """Keep only the states of these slots. Call it before the weight is narrowed."""
    for name, state in states_by_slot(optimizer, weight):
        optimizer.state[weight][name] = state[slots]


def _is_known(state: object, weight: Tensor) -> bool:
    if isinstance(state, Tensor):
        return type(state) is Tensor and (state.dim() == 0 or has_slots(state, weight) or state.numel() == 1)
    return state is None or isinstance(state, bool | int | float | str)
