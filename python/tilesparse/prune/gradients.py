"""Scores of blocks from the gradients of a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..nn.convert import dense_weight, is_conv1d, is_stored_otherwise
from .calibration import Forward, Loss, call_model, own_loss
from .configs import block_shape_of
from .layer import GRADIENT_METHODS


def gradient_scores(
    model: nn.Module,
    batches: Sequence[Any],
    targets: Mapping[str, BlockSparseConfig],
    method: str,
    forward: Forward | None,
    loss: Loss | None,
) -> dict[str, Tensor]:
    """Return scores of blocks by "taylor" or "movement", added up over the batches."""
    score = GRADIENT_METHODS[method]
    weights = [model.get_submodule(name).get_parameter("weight") for name in targets]
    for name, weight in zip(targets, weights, strict=True):
        if is_stored_otherwise(weight):
            raise InvalidArgumentError(
                f"method must not be {method!r} for layer {name!r}: PyTorch has no gradient of its weight, "
                f"{weight.dtype} of layout {weight.layout}; make it dense first"
            )
    frozen = [weight for weight in weights if not weight.requires_grad]
    found: dict[str, Tensor] = {}
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        for number, batch in enumerate(batches):
            with torch.enable_grad():
                value = loss(model, batch) if loss else own_loss((forward or call_model)(model, batch))
                if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                    raise InvalidArgumentError(
                        "loss must be a tensor with one number that depends on the weights, got "
                        f"{type(value).__name__ if not isinstance(value, Tensor) else tuple(value.shape)}"
                    )
                gradients = torch.autograd.grad(value, weights, allow_unused=True)
            for (name, config), gradient in zip(targets.items(), gradients, strict=True):
                layer = model.get_submodule(name)
                if gradient is None:
                    continue
                gradient = gradient.T if is_conv1d(layer) else gradient
                scores = score(dense_weight(layer), gradient, block_shape_of(config))
                if not bool(scores.isfinite().all()):
                    raise InvalidArgumentError(
                        f"loss: batch {number} (counted from 0) gives layer {name!r} a gradient with NaN or "
                        "infinities"
                    )
                found[name] = found[name] + scores if name in found else scores
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
    without = [name for name in targets if name not in found]
    if without:
        raise InvalidArgumentError(f"loss: does not depend on layer {without[0]!r}")
    return found
