"""Scores of blocks: norms of their weights, and how far gradients drive these away from zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.linear import BlockSparseLinear
from ._layers import Layers, Uncopied, check_keys, closure_of, gradient_of, precision_of

SCORES = ("magnitude", "movement")


@torch.no_grad()
def magnitudes(layer: BlockSparseLinear, norm: float) -> Tensor:
    """[nnz] norms of the kept blocks, of any finite or infinite order."""
    weight = layer.weight.detach()
    norms: Tensor = torch.linalg.vector_norm(weight.flatten(1), norm, dim=1, dtype=precision_of(weight))
    return norms


class Movement(Uncopied):
    """Sums of -w · g over each block and over steps of an optimizer, of w and g before the step.

    A score is positive where gradient descent has moved a block's weights away from zero (Sanh et al.,
    "Movement Pruning: Adaptive Sparsity by Fine-Tuning", NeurIPS 2020). Steps that ``torch.amp.GradScaler``
    leaves out do not count, and gradients that still have its factor are divided by it.
    """

    def __init__(self, layers: Layers, optimizer: torch.optim.Optimizer) -> None:
        self._layers = layers
        self._scores: dict[str, Tensor] = {}
        self._hook = optimizer.register_step_pre_hook(self._add)

    def remove(self) -> None:
        """Stop summing."""
        self._hook.remove()

    def of(self, name: str) -> Tensor:
        """[nnz] scores of a layer: zero before the first step, and where its number of blocks has changed."""
        layer = self._layers[name]
        nnz, device = layer.weight.shape[0], layer.weight.device
        scores = self._scores.get(name)
        if scores is None or scores.shape[0] != nnz:
            scores = torch.zeros(nnz, dtype=precision_of(layer.weight), device=device)
        self._scores[name] = scores = scores.to(device, precision_of(layer.weight))
        return scores

    def keep(self, name: str, slots: Tensor) -> None:
        """Keep only these slots."""
        self._scores[name] = self.of(name)[slots]

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the scores, by names of layers."""
        return {name: self.of(name).clone() for name in self._layers}

    def check_state(self, state: Any) -> None:
        """Raise InvalidArgumentError for a state that `load_state_dict` cannot take."""
        check_keys("state_dict: movement", state, self._layers)
        for name, scores in state.items():
            nnz = self._layers[name].weight.shape[0]
            if not isinstance(scores, Tensor) or scores.shape != (nnz,):
                raise InvalidArgumentError(
                    f"state_dict: movement of layer {name!r} must be a tensor [{nnz}]; load the model first"
                )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state_dict`, after `check_state`."""
        for name, scores in state.items():
            weight = self._layers[name].weight
            self._scores[name] = scores.to(weight.device, precision_of(weight), copy=True)

    @torch.no_grad()
    def _add(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None:
            raise UnsupportedError(
                "optimizer must step without a closure, since movement is summed before a step, when "
                "a closure has not computed any gradient yet"
            )
        scale, overflow = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        for name, layer in self._layers.items():
            weight, gradient = layer.weight, gradient_of(name, layer)
            if gradient is None:
                continue
            moved = (weight.detach().to(precision_of(weight)) * gradient).sum((1, 2))
            if scale is not None:
                moved /= scale.to(moved.device, non_blocking=True)
            if overflow is not None:
                moved = torch.where(overflow.to(moved.device, non_blocking=True) == 0, moved, 0)
            self.of(name).sub_(moved)


def check_movement(movement: Movement | None, state: Any) -> None:
    """Raise unless the state is that of these scores, or {} where there are none."""
    if movement is None:
        check_keys("state_dict: movement", state, ())
    else:
        movement.check_state(state)
