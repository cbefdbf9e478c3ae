"""Sensitivity of the loss of a model to the errors of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._replay.batches import observing
from ..errors import InvalidArgumentError
from ._checks import check_model, collected
from ._layers import dense_layers
from .calibration import Forward, Loss, call_model, own_loss
from .experts import expanded


@checked
def measure_sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Iterable[str],
    *,
    forward: Forward | None = None,
    loss: Loss | None = None,
) -> dict[str, float]:
    """Return how much relative errors of layers weigh in a loss, as `weights` of `allocate`.

    To second order, as in LeCun et al., "Optimal Brain Damage" (NIPS 1989), but with the empirical Fisher
    information in place of the Hessian, and for errors in no particular direction, the loss grows by

        error · Σ ‖∂L/∂y‖² · Σ ‖X Wᵀ‖² / (out_features · tokens)

    with sums over the tokens that the layer meets, up to a factor that all layers share. The result is scaled
    to a mean of 1.

    Args:
        model: dense, evaluated without dropout.
        batches: calibration data, as of `prune_model`, with labels where the loss needs them.
        layers: names of dense linear layers, such as those of the profiles.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        loss: ``loss(model, batch)`` gives a scalar; None is the ``loss`` of what the model gives.

    Raises:
        InvalidArgumentError: a name is not that of such a layer, there is no loss, or it is not one number
            that gradients can be taken of, does not depend on a layer, or has gradients that are not finite.
    """
    check_model(model)
    with expanded(model):
        found = dense_layers("layers", model, layers)
        data = collected(batches)
        tokens = dict.fromkeys(found, 0)
        slopes = {
            name: _zero(layer) for name, layer in found.items()
        }  # on the devices, so that no GPU is waited for
        sizes = {name: _zero(layer) for name, layer in found.items()}
        with observing(model):
            for batch in data:
                outputs: list[tuple[str, Tensor]] = []
                with ExitStack() as handles, torch.enable_grad():
                    for name, layer in found.items():
                        handles.callback(layer.register_forward_hook(_keeping(name, outputs)).remove)
                    value = loss(model, batch) if loss else own_loss((forward or call_model)(model, batch))
                    gradients = _gradients(value, [y for _, y in outputs])
                for (name, y), gradient in zip(outputs, gradients, strict=True):
                    bias = found[name].bias
                    product = y.detach().double() - (0.0 if bias is None else bias.detach().double())
                    sizes[name] += product.square().mean(-1).sum()
                    tokens[name] += y.shape[:-1].numel()
                    if gradient is not None:
                        slopes[name] += gradient.double().square().sum()
        weights = {name: float(slopes[name] * sizes[name]) / max(1, tokens[name]) for name in found}
        for name, weight in weights.items():
            if not 0 < weight < math.inf:
                raise InvalidArgumentError(
                    f"loss must depend on layer {name!r} with finite gradients, got a weight of {weight}"
                )
        mean = sum(weights.values()) / len(weights)
        return {name: weight / mean for name, weight in weights.items()}


def _zero(layer: Any) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=layer.weight.device)


def _keeping(name: str, outputs: list[tuple[str, Tensor]]) -> Callable[..., Tensor]:
    """Return a hook that keeps outputs, which have gradients even where all parameters are frozen."""

    def hook(layer: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        kept = y if y.requires_grad else y.detach().requires_grad_()
        outputs.append((name, kept))
        return kept.clone()  # which a model may write to

    return hook


def _gradients(value: Tensor, outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InvalidArgumentError(f"loss must be a tensor with one number, got {given}")
    if not outputs or not value.requires_grad:
        return (None,) * len(outputs)
    return torch.autograd.grad(value, outputs, allow_unused=True)
