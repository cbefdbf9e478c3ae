"""Group lasso: blocks that the loss hardly needs become exactly zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._checks import checked_number
from ._layers import (
    Uncopied,
    check_optimized,
    check_trainable,
    checked_optimizer,
    gradient_of,
    precision_of,
    some_sparse_layers,
)


class GroupLasso(Uncopied):
    """Group lasso: pulls the norm of every block towards zero after each step of an optimizer.

    It is the proximal step of the penalty strength · √(bn · bk) · ‖W_b‖₂, summed over all blocks b (Yuan and
    Lin, "Model selection and estimation in regression with grouped variables", JRSS B 2006):

        W_b ← W_b · max(0, 1 - lr · strength · √(bn · bk) / ‖W_b‖₂)

    with the learning rate of the weight's group in that step. So blocks reach zero exactly, and `compact`
    then removes them. For an optimizer such as Adam this is a decoupled penalty, as the weight decay of AdamW
    is. In 16 bits weights that are to change by less than their precision do not change: train in float32,
    with autocast.

    It works by a hook of the optimizer; nothing waits for a GPU. Steps that ``torch.amp.GradScaler`` leaves
    out leave weights as they are.

    Args:
        model: has `BlockSparseLinear` layers in the storage "plain", all of which are pulled at.
        optimizer: has their weights.
        strength: of the penalty.

    Raises:
        InvalidArgumentError: there is no such layer, the optimizer has not all their weights, one is frozen
            or shared, or ``strength`` is no number of at least 0.
        UnsupportedError: a weight is sharded, parametrized or not stored plain.
    """

    @checked
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, strength: float) -> None:
        optimizer = checked_optimizer(optimizer)
        self._strength = checked_number("strength", strength)
        layers = some_sparse_layers(model)
        check_trainable(layers)
        check_optimized(layers, optimizer)
        self._layers = layers
        self._hook = optimizer.register_step_post_hook(self._shrink)

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    @torch.no_grad()
    def _shrink(self, optimizer: Any, *_: Any) -> None:
        check_optimized(self._layers, optimizer)  # a weight may have been replaced
        had_gradient = {
            id(layer.weight): gradient_of(name, layer) is not None for name, layer in self._layers.items()
        }
        overflow = getattr(optimizer, "found_inf", None)  # GradScaler leaves it for fused optimizers
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if not had_gradient.get(id(weight)):
                    continue
                threshold = group["lr"] * self._strength * weight[0].numel() ** 0.5 if len(weight) else 0.0
                if overflow is not None:
                    threshold = threshold * (overflow.to(weight.device, non_blocking=True) == 0)
                weight.mul_(_factors(weight, threshold))


def _factors(weight: Tensor, threshold: float | Tensor) -> Tensor:
    """[nnz, 1, 1]: what is left of each block, from 0 to 1."""
    precision = precision_of(weight)
    norms = torch.linalg.vector_norm(weight, dim=(1, 2), dtype=precision, keepdim=True)
    left: Tensor = 1 - threshold / norms.clamp_min(torch.finfo(precision).tiny)
    return left.clamp_min(0)
