"""Scores of the blocks of a weight, block by block: those that need no inverse.

All take a weight [out_features, in_features] of any dtype that layers have and give float32 scores
[out_features / bn, in_features / bk], higher for what to keep, as `BlockPattern.from_scores` ranks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_shapes
from .._runtime.pattern_cache import blocks_of
from ..calibrate.calibration import Forward, Loss, call_model, own_loss
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..model.targets import block_shape_of
from ..nn.dense import dense_weight, is_conv1d, is_stored_otherwise


def magnitude(weight: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the Frobenius norm of each block."""
    return _sums(weight.float().square(), block_shape).sqrt()


def wanda(weight: Tensor, input_norms: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the sum of |W| · ‖X‖ over each block, with the norm of each input over the calibration data.

    Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (ICLR 2024), who rank
    single weights, and those of one output among each other; blocks are ranked among all of the layer.

    Args:
        weight: [out_features, in_features].
        input_norms: [in_features].
        block_shape: (bn, bk).

    Raises:
        InvalidArgumentError: ``input_norms`` has another shape, or the weight cannot be cut into such blocks.
    """
    if input_norms.shape != weight.shape[1:]:
        raise InvalidArgumentError(
            f"input_norms must have shape {tuple(weight.shape[1:])}, got {tuple(input_norms.shape)}"
        )
    return _sums(weight.float().abs() * input_norms.float(), block_shape)


def movement(weight: Tensor, gradient: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the sum of -W · ∂L/∂W over each block: high where a step down the gradient makes weights larger.

    Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning" (NeurIPS 2020), who add it up over the
    steps of a training.
    """
    _check_gradient(weight, gradient)
    return _sums(-weight.float() * gradient.float(), block_shape)


def taylor(weight: Tensor, gradient: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the sum of |W · ∂L/∂W| over each block: by how much the loss changes without it, to first order.

    Molchanov et al., "Importance Estimation for Neural Network Pruning" (CVPR 2019).
    """
    _check_gradient(weight, gradient)
    return _sums((weight.float() * gradient.float()).abs(), block_shape)


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


def _sums(of_weights: Tensor, block_shape: tuple[int, int]) -> Tensor:
    return blocks_of(of_weights, check_shapes(of_weights.shape, block_shape)[1]).sum((2, 3))


def _check_gradient(weight: Tensor, gradient: Tensor) -> None:
    if gradient.shape != weight.shape:
        raise InvalidArgumentError(
            f"gradient must have shape {tuple(weight.shape)}, got {tuple(gradient.shape)}"
        )


GRADIENT_METHODS = {"taylor": taylor, "movement": movement}

__all__ = ["magnitude", "movement", "taylor", "wanda"]
