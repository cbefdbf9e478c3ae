"""Operands of products in 8 bits, and what they must be; fake tensors are checked as well."""

import torch
from torch import Tensor

from ..errors import InvalidArgumentError
from .arguments import DTYPES, QUANTIZED, SCALE_GROUP, check_exact_sums
from .operands import (
    Index,
    check_activations,
    check_added,
    check_array,
    check_blocks,
    check_device,
    check_one,
    check_same_device,
)


def check_quantized_dds(
    x: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None,
    residual: Tensor | None,
    scales: Tensor,
    gate: Tensor | None = None,
    metadata: Tensor | None = None,
) -> None:
    """Check the operands of x Wᵀ that is multiplied in 8 bits, but for the quantized x."""
    out_features, in_features = index.shape
    check_activations("x", x, in_features)
    check_quantizable(x)
    if values.dtype not in QUANTIZED:
        raise InvalidArgumentError(f"values must have dtype int8, float8_e4m3fn, got {values.dtype}")
    check_exact_sums("in_features", in_features, values.dtype)
    check_blocks("values", values, index, metadata)
    check_same_device("x", x, "values", values)
    check_device("values", values, index)
    check_factor_scales(scales, values, index)
    if metadata is not None and is_inside(scales):
        raise InvalidArgumentError(
            "metadata must be None with scales of blocks, which are inside of the sums"
        )
    if bias is not None:
        check_added("bias", bias, (out_features,), "x", x)
    check_one(residual, gate)
    for other, tensor in (("residual", residual), ("gate", gate)):
        if tensor is not None:
            check_added(other, tensor, (*x.shape[:-1], out_features), "x", x)


def check_quantizable(x: Tensor) -> None:
    """Check the dtype of activations that have 8 bits in a product."""
    if x.dtype not in DTYPES or x.dtype == torch.float64:
        raise InvalidArgumentError(f"x must be float32, float16 or bfloat16, got {x.dtype}")


def check_quantized_x(
    x: Tensor, x_values: Tensor, x_scales: Tensor, dtype: torch.dtype, scales: Tensor
) -> None:
    """Check activations in 8 bits, and their scales, beside those that they were made from.

    ``scales``: those of the weight, which say whether the ones of x are inside of the sums.
    """
    groups = (x.shape[-1] // SCALE_GROUP,) if is_inside(scales) else ()
    for name, tensor, shape, wanted in (
        ("x_values", x_values, x.shape, dtype),
        ("x_scales", x_scales, (*x.shape[:-1], *groups), torch.float32),
    ):
        if tensor.shape != shape or tensor.dtype != wanted:
            raise InvalidArgumentError(
                f"{name} must have shape {tuple(shape)} of {wanted}, got {tuple(tensor.shape)} of "
                f"{tensor.dtype}"
            )
        check_same_device(name, tensor, "x", x)


def is_inside(scales: Tensor) -> bool:
    """Return True for scales of blocks [nnz, 1], which stay inside of the sums, not [out_features]."""
    return scales.dim() == 2


def check_factor_scales(scales: Tensor, values: Tensor, index: Index) -> None:
    """Check the scales of values that x is multiplied by in 8 bits."""
    if not is_inside(scales):
        return check_feature_scales(scales, index)
    if index.block_shape != (SCALE_GROUP, SCALE_GROUP) or values.dtype != torch.float8_e4m3fn:
        raise InvalidArgumentError(
            f"scales must be [out_features] unless values are float8_e4m3fn in blocks of 128 x 128, got "
            f"{list(scales.shape)} with values of {values.dtype} in blocks of {index.block_shape}"
        )
    check_array("scales", scales, "[nnz, 1]", (index.col_indices.shape[0], 1), torch.float32)
    check_device("scales", scales, index)


def check_feature_scales(scales: Tensor, index: Index) -> None:
    """Check a scale for each output feature."""
    check_array("scales", scales, "[out_features]", (index.shape[0],), torch.float32)
    check_device("scales", scales, index)
