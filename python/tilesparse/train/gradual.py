"""Patterns that shrink while a model trains: blocks really go, and with them memory and time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._checks import checked_count, checked_fraction
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.linear import BlockSparseLinear
from ..nn.origin import has_peers
from ..nn.weight import keep_blocks
from ..storage.formats import storage_of
from ._layers import (
    Layers,
    check_keys,
    check_not_removed,
    check_optimized,
    check_trainable,
    checked_choice,
    checked_optimizer,
    matched_layers,
    sparse_layers,
)
from .patterns import SCORES, Movement, check_states, magnitudes, states_by_slot


class Gradual:
    """Schedule that removes blocks of `BlockSparseLinear` layers in training, down to a density.

    Step it after the optimizer. From ``begin`` to ``end``, in fractions of all steps, the density d falls
    from that at the beginning, d₀, to the one asked for, d₁, as

        d(t) = d₁ + (d₀ - d₁) (1 - t)³, where t goes from 0 to 1 (Zhu and Gupta, "To prune, or not to prune",
        2017)

    in a few events. Each removes the blocks of lowest score from every layer; of equal scores the later slot
    goes. The defaults follow "The Journey Matters" (2025), in which pruning from 25 % to 75 % of the compute
    did best and the loss followed the average number of parameters. Start with density 1 and the policy
    "auto", which multiplies dense as long as that is faster.

    Removed blocks free their memory. Each weight stays the same Parameter, and its gradient and the
    optimizer's states are narrowed with it; a captured CUDA graph has to be captured again, and compiled code
    is compiled anew after each event. One process trains the model.

    Args:
        model: has `BlockSparseLinear` layers in the storage "plain".
        optimizer: has their weights.
        density: at the end, above 0 and at most that of the layer; or densities by regular expressions on
            names of layers, matched as in the patcher, of which the first counts. Layers that none matches
            stay as they are.
        steps: of the whole training.
        begin: when blocks begin to go, in fractions of ``steps``.
        end: when the last ones do.
        events: how often blocks are removed.
        score: "magnitude", the L1 norm of a block, or "movement", the sum of -weight · gradient over steps
            so far (Sanh et al., "Movement Pruning", NeurIPS 2020).

    Attributes:
        steps: how many steps were counted.

    Raises:
        InvalidArgumentError: there is no such layer, the optimizer has not all their weights, one is frozen
            or shared, a density is above that of a layer or rounds to no block, or another argument is not
            allowed.
        UnsupportedError: a weight is sharded, parametrized or not stored plain, or other processes train,
            too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        density: float | Mapping[str, float],
        steps: int,
        begin: float = 0.25,
        end: float = 0.75,
        events: int = 20,
        score: str = "magnitude",
    ) -> None:
        optimizer = checked_optimizer(optimizer)
        total, events = checked_count("steps", steps), checked_count("events", events)
        begin, end = checked_fraction("begin", begin), checked_fraction("end", end)
        if begin >= end:
            raise InvalidArgumentError(f"begin must be less than end={end}, got {begin}")
        checked_choice("score", score, SCORES)
        _check_whole(model)
        groups = matched_layers(model, "density", density)
        self._layers = {name: layer for layers in groups.values() for name, layer in layers.items()}
        _check_shrinkable(self._layers)
        check_optimized(self._layers, optimizer)
        self._last = {name: _target(name, self._layers[name], d) for d, of in groups.items() for name in of}
        self._first = {name: layer.weight.shape[0] for name, layer in self._layers.items()}
        self._model, self._optimizer = model, optimizer
        self._movement = Movement(self._layers, optimizer) if score == "movement" else None
        # The steps after which blocks go, and when that is on the way from begin to end, from 0 to 1.
        self._events: dict[int, float] = {}
        for event in range(1, events + 1):
            time = event / events
            self._events[max(1, round(total * (begin + (end - begin) * time)))] = time
        self._removed = False
        self.steps = 0

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step of the optimizer, and remove blocks if it is time to; return True if it was.

        Raises:
            InvalidArgumentError: `remove` was called.
            UnsupportedError: the optimizer has states of which it is not known what belongs to which block,
                or other processes train, too. Nothing has changed.
        """
        check_not_removed(self._removed)
        time = self._events.get(self.steps + 1)
        if time is not None:
            _check_shrinkable(self._layers)
            check_optimized(self._layers, self._optimizer)
            check_states(self._optimizer, {name: layer.weight for name, layer in self._layers.items()})
            _check_whole(self._model)
        self.steps += 1
        if time is None:
            return False
        for name, layer in self._layers.items():
            first, last = self._first[name], self._last[name]
            left = last + round((first - last) * (1 - time) ** 3)
            if left < layer.weight.shape[0]:
                self._remove(name, layer, left)
        return True

    def remove(self) -> None:
        """Remove all hooks and end the schedule; layers stay as they are."""
        self._removed = True
        if self._movement is not None:
            self._movement.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return all that later events depend on, but for the states of model and optimizer."""
        movement = {} if self._movement is None else self._movement.state_dict()
        return {"steps": self.steps, "first": dict(self._first), "movement": movement}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, bit for bit if model and optimizer are loaded, too, before it.

        Raises:
            InvalidArgumentError: it is none of these layers. Nothing has changed then.
        """
        check_keys("state_dict", state_dict, ("steps", "first", "movement"))
        steps = checked_count("state_dict: steps", state_dict["steps"], 0)
        check_keys("state_dict: first", state_dict["first"], self._layers)
        first = {name: checked_count("state_dict: first", state_dict["first"][name]) for name in self._layers}
        Movement.check_state(self._movement, state_dict["movement"])
        if self._movement is not None:
            self._movement.load_state_dict(state_dict["movement"])
        self.steps, self._first = steps, first

    def _remove(self, name: str, layer: BlockSparseLinear, left: int) -> None:
        movement = self._movement
        worth = magnitudes(layer) if movement is None else movement.of(name)
        slots = worth.sort(descending=True, stable=True).indices[:left].sort().values
        if movement is not None:
            movement.keep(name, slots)
        _keep_slots(layer, self._optimizer, slots)


def compact_(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Remove the blocks whose weights are all zero, as `GroupLasso` and `BlockGates` leave them.

    The model computes the same. Weights stay the same Parameters, and are narrowed with their gradients and
    the states of the optimizer. The host waits for the GPU, once for each layer.

    Args:
        model: whose `BlockSparseLinear` layers in the storage "plain" are looked at, and no others.
        optimizer: of the model, if it is to be used afterwards.

    Returns:
        How many blocks each of these layers has lost, by its name.

    Raises:
        InvalidArgumentError: there is no such layer, or a weight is shared by several.
        UnsupportedError: a weight is sharded or parametrized, the optimizer has states of which it is not
            known what belongs to which block, a weight has a ``main_grad``, or the model is one of
            DistributedDataParallel. All errors are raised before anything has changed.
    """
    check_unwrapped(model)
    layers = {
        name: layer for name, layer in sparse_layers(model).items() if storage_of(layer.storage).trainable
    }
    if not layers:
        raise InvalidArgumentError("model: no BlockSparseLinear in the storage 'plain' in it")
    _check_shrinkable(layers, frozen=True)
    if optimizer is not None:
        optimizer = checked_optimizer(optimizer)
        check_states(optimizer, {name: layer.weight for name, layer in layers.items()})
    removed = {}
    for name, layer in layers.items():
        slots = layer.weight.detach().flatten(1).any(1).nonzero().flatten()
        removed[name] = layer.weight.shape[0] - len(slots)
        if removed[name]:
            _keep_slots(layer, optimizer, slots)
    return removed


def _keep_slots(layer: BlockSparseLinear, optimizer: torch.optim.Optimizer | None, slots: Tensor) -> None:
    """Keep only the blocks at ``slots``, ascending, and their states of the optimizer."""
    if optimizer is not None:
        for name, state in states_by_slot(optimizer, layer.weight):
            optimizer.state[layer.weight][name] = state[slots]
    keep_blocks(layer, slots)


def check_unwrapped(model: nn.Module) -> None:
    """Raise where DistributedDataParallel has buckets for weights that are about to shrink."""
    if isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            "model must be the module inside; DistributedDataParallel has to be built anew afterwards"
        )


def _check_whole(model: nn.Module) -> None:
    """Raise unless this process alone trains the model."""
    if isinstance(model, DistributedDataParallel) or has_peers():
        raise UnsupportedError(
            "model must be trained by one process; the buckets of DistributedDataParallel and the shards of "
            "fully_shard do not follow weights that shrink"
        )


def _check_shrinkable(layers: Layers, *, frozen: bool = False) -> None:
    """Raise where blocks cannot go, or anything beside a weight has its size."""
    check_trainable(layers, frozen=frozen)
    for name, layer in layers.items():
        if getattr(layer.weight, "main_grad", None) is not None:
            raise UnsupportedError(
                f"model: layer {name!r}: its weight has a main_grad, which does not shrink with it"
            )


def _target(name: str, layer: BlockSparseLinear, density: float) -> int:
    """Return the number of blocks at the end."""
    total = math.prod(layer.spec.grid)
    last = round(density * total)
    if not 0 < last <= layer.weight.shape[0]:
        raise InvalidArgumentError(
            f"density of layer {name!r} must be from {1 / total:.3g} to its own {layer.density:.4g}, got "
            f"{density}"
        )
    return last
