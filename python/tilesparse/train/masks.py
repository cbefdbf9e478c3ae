"""Masks of 2:4 in training: how often they are chosen anew, and what becomes of masked weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import checked_count, checked_number
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ._layers import (
    Hooked,
    check_keys,
    check_optimized,
    check_plain_weight,
    checked_optimizer,
    gradient_of,
    refuse_closure,
    sparse_layers,
)


class MaskSchedule(Hooked):
    """Schedule that updates 2:4 masks every few optimizer steps, and pulls masked weights towards zero.

    Gradients pass straight through the masks, so that a weight may come back. Without a decay masked weights
    wander, and masks keep flipping. With the mask M, the gradient g and the weight W it is

        g ← g + decay · (1 - M) · W

    before the step (Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024, who
    choose transposable masks every 40 steps, and the decay by how many bits of the masks flip).

    It works by hooks of the optimizer, whose steps are called as before, without a closure; nothing waits for
    a GPU. A step that ``torch.amp.GradScaler`` leaves out does not count, unless the optimizer is fused,
    where the host cannot know. Layers without masks are passed over. In several processes masks are equal
    where weights are. With ``broadcast_buffers=False`` those that layers began with differ even so: call
    `refresh` once, after the weights have been broadcast.

    Args:
        model: has `BlockSparseLinear` layers with ``nm=(2, 4)`` in the storage "plain".
        optimizer: has their weights.
        every: choose masks after every so many steps, which ``steps`` counts.
        decay: per step, 0 for none.

    Raises:
        UnsupportedError: a weight is a sharded tensor, as ``fully_shard`` leaves them.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int, decay: float
    ) -> None:
        optimizer = checked_optimizer(optimizer)
        self._every, self._decay = checked_count("every", every), checked_number("decay", decay)
        self._layers = {name: layer for name, layer in sparse_layers(model).items() if layer.mask is not None}
        if not self._layers:
            raise InvalidArgumentError(
                "model must have a BlockSparseLinear with nm=(2, 4) in the storage 'plain'"
            )
        check_optimized(self._layers, optimizer)
        for name, layer in self._layers.items():
            check_plain_weight(name, layer.weight, "masks of sharded weights are not chosen")
        self.steps = 0
        self._hooks = [optimizer.register_step_post_hook(self._count)]
        if self._decay:
            self._hooks.append(optimizer.register_step_pre_hook(self._decay_gradients))

    def remove(self) -> None:
        """Remove the hooks; masks and everything else stay as they are."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def refresh(self) -> None:
        """Update all masks now, in addition to the schedule."""
        for _, layer, _ in self._masked():
            layer.update_mask_()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps. Masks are buffers of the model, and in its state_dict."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, bit for bit if model and optimizer are loaded, too."""
        check_keys("state_dict", state_dict, ("steps",))
        self.steps = checked_count("state_dict: steps", state_dict["steps"], 0)

    def _masked(self) -> Iterator[tuple[str, BlockSparseLinear, Tensor]]:
        """Yield the layers that have masks now."""
        for name, layer in self._layers.items():
            if layer.mask is not None:
                yield name, layer, layer.mask

    def _count(self, *_: Any) -> None:
        self.steps += 1
        if self.steps % self._every == 0:
            self.refresh()

    @torch.no_grad()
    def _decay_gradients(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_closure(args, kwargs)
        scale: Any = getattr(optimizer, "grad_scale", None)  # GradScaler's, where gradients still have it
        for name, layer, mask in self._masked():
            weight, grad = layer.weight, gradient_of(name, layer)
            if grad is None:
                continue
            factor = self._decay if scale is None else self._decay * scale.to(grad.device, non_blocking=True)
            grad.add_(torch.where(mask, 0, weight) * factor)
