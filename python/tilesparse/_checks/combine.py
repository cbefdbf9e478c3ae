"""What the operands must be that copy tokens to rows and add rows up; fake tensors are checked as well."""

import torch
from torch import Tensor

from ..errors import InvalidArgumentError
from .arguments import DTYPES
from .operands import check_same_device

_FEATURES = 16  # of which kernels read multiples


def check_combination(name: str, matrix: Tensor, weights: Tensor | None, rows: Tensor, lines: int) -> None:
    """Check a matrix [lines, features], of tokens or of their rows, beside weights and rows of the tokens."""
    if rows.dim() != 2 or rows.dtype != torch.int64:
        raise InvalidArgumentError(
            f"rows must be [tokens, choices] of int64, got shape {tuple(rows.shape)} of {rows.dtype}"
        )
    if matrix.dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise InvalidArgumentError(f"{name} must have dtype {allowed}, got {matrix.dtype}")
    if matrix.dim() != 2 or matrix.shape[0] != lines or matrix.shape[1] % _FEATURES:
        raise InvalidArgumentError(
            f"{name} must be [{lines}, features] with a multiple of {_FEATURES} features, got shape "
            f"{tuple(matrix.shape)}"
        )
    check_same_device("rows", rows, name, matrix)
    if weights is None:
        return
    if weights.shape != rows.shape or weights.dtype != matrix.dtype:
        raise InvalidArgumentError(
            f"weights must have shape {tuple(rows.shape)} of {matrix.dtype}, got {tuple(weights.shape)} of "
            f"{weights.dtype}"
        )
    check_same_device("weights", weights, name, matrix)
