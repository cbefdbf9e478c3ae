"""Scores of the blocks of a weight, block by block: those that need no inverse.

All take a weight [out_features, in_features] of any dtype that layers have and give float32 scores
[out_features / bn, in_features / bk], higher for what to keep, as `BlockPattern.from_scores` ranks them.
"""

from __future__ import annotations

from torch import Tensor

from .._arguments import checked
from .._checks import check_shapes
from .._runtime.indices import blocks_of
from ..errors import InvalidArgumentError


@checked
def magnitude(weight: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the Frobenius norm of each block."""
    return _sums(weight.float().square(), block_shape).sqrt()


@checked
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


@checked
def movement(weight: Tensor, gradient: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the sum of -W · ∂L/∂W over each block: high where a step down the gradient makes weights larger.

    Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning" (NeurIPS 2020), who add it up over the
    steps of a training.
    """
    _check_gradient(weight, gradient)
    return _sums(-weight.float() * gradient.float(), block_shape)


@checked
def taylor(weight: Tensor, gradient: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """The sum of |W · ∂L/∂W| over each block: by how much the loss changes without it, to first order.

    Molchanov et al., "Importance Estimation for Neural Network Pruning" (CVPR 2019).
    """
    _check_gradient(weight, gradient)
    return _sums((weight.float() * gradient.float()).abs(), block_shape)


def _sums(of_weights: Tensor, block_shape: tuple[int, int]) -> Tensor:
    return blocks_of(of_weights, check_shapes(of_weights.shape, block_shape)[1]).sum((2, 3))


def _check_gradient(weight: Tensor, gradient: Tensor) -> None:
    if gradient.shape != weight.shape:
        raise InvalidArgumentError(
            f"gradient must have shape {tuple(weight.shape)}, got {tuple(gradient.shape)}"
        )


__all__ = ["magnitude", "movement", "taylor", "wanda"]
