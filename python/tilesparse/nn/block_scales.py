"""Layers of float8 weights with a scale for each block of 128 x 128, as in the checkpoints of DeepSeek."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import SCALE_GROUP
from ..config import LayerSpec
from ..errors import InvalidArgumentError
from ..pattern import BlockPattern
from .linear import BlockSparseLinear
from .weight import INDEX_NAMES


@torch.no_grad()
def from_block_scales(
    weight: Tensor,
    weight_scale_inv: Tensor,
    density: float = 0.5,
    *,
    pattern: BlockPattern | None = None,
    scores: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> BlockSparseLinear:
    """Return a layer with the best blocks of a float8 weight that has a scale for each block.

    Nothing is rounded: blocks and scales are copied as they are. Products quantize x by groups of 128
    features, as the model does that the checkpoint is of, see `functional.quantized_linear`.

    Args:
        weight: float8_e4m3fn [out_features, in_features], both multiples of 128.
        weight_scale_inv: float32 [out_features / 128, in_features / 128]: W is weight times the scale of its
            block of 128 x 128.
        density: kept fraction of the blocks.
        pattern: the blocks to keep, in blocks of 128 x 128; `density` is then taken from it.
        scores: one number for each block, of the shape of `weight_scale_inv`, higher is better; None is the
            Frobenius norm of W there.
        bias: [out_features] or None.
        dtype: of x, y and the bias.

    Raises:
        InvalidArgumentError: a tensor has another shape or dtype, or a score is NaN.
    """
    blocks = _blocks_of(weight, weight_scale_inv)
    if pattern is None:
        if scores is None:
            norms = [row.float().square().sum((1, 2)).sqrt() for row in blocks]
            scores = torch.stack(norms) * weight_scale_inv.abs()
        elif scores.shape != weight_scale_inv.shape:
            raise InvalidArgumentError(
                f"scores must be {list(weight_scale_inv.shape)}, got {list(scores.shape)}"
            )
        pattern = BlockPattern.from_scores(scores, block_shape=SCALE_GROUP, density=density)
    elif (pattern.shape, pattern.block_shape) != (tuple(weight.shape), (SCALE_GROUP, SCALE_GROUP)):
        raise InvalidArgumentError(
            f"pattern must have shape {tuple(weight.shape)} in blocks of 128 x 128, got {pattern.shape} in "
            f"{pattern.block_shape}"
        )
    kept = tuple(index.to(weight.device) for index in pattern.block_indices())
    tensors = {name: getattr(pattern, name) for name in INDEX_NAMES}
    tensors["weight"] = blocks.view(torch.uint8)[kept].view(weight.dtype)
    tensors["scales"] = weight_scale_inv[kept][:, None]
    if bias is not None:
        tensors["bias"] = bias.to(dtype, copy=True)
    spec = LayerSpec.of(
        pattern,
        dtype,
        storage="float8_e4m3fn",
        granularity="block",
        activations="float8_e4m3fn",
    )
    return BlockSparseLinear.from_state(spec, tensors)


def _blocks_of(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the blocks [R, C, 128, 128] of a checked weight, a view."""
    if weight.dim() != 2 or weight.dtype != torch.float8_e4m3fn or any(n % SCALE_GROUP for n in weight.shape):
        raise InvalidArgumentError(
            f"weight must be float8_e4m3fn [out_features, in_features], both multiples of {SCALE_GROUP}, got "
            f"{list(weight.shape)} of {weight.dtype}"
        )
    rows, columns = (size // SCALE_GROUP for size in weight.shape)
    if scales.shape != (rows, columns) or scales.dtype != torch.float32:
        raise InvalidArgumentError(
            f"weight_scale_inv must be float32 {[rows, columns]}, one for each block, got "
            f"{list(scales.shape)} of {scales.dtype}"
        )
    return weight.view(rows, SCALE_GROUP, columns, SCALE_GROUP).transpose(1, 2)
