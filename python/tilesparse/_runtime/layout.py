"""Layouts of activations: those that the library reads in place, and copies of others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import ALIGNMENT, INT32_MAX, is_misaligned
from ..errors import InvalidArgumentError

_VECTOR = 4  # numbers of float32 in 16 bytes

Lines = tuple[int, int, int]  # tokens, leading dimension, layout (0 row-major, 1 column-major)
Form = tuple[tuple[int, ...], tuple[int, ...] | None]  # shape, and strides unless contiguous


def result_form(like: Tensor, features: int, column_major: bool) -> Form:
    """Return the form of a result [..., features] beside ``like`` [..., other features]."""
    shape = (*like.shape[:-1], features)
    if not column_major:
        return shape, None
    return shape, _column_strides(shape[:-1], ALIGNMENT // like.itemsize if like.is_cuda else 1)


def _column_strides(leading: Sequence[int], step: int) -> tuple[int, ...]:
    """Return the strides of a column-major matrix whose leading dimension is a multiple of the step."""
    strides: list[int] = []
    tokens = 1
    for size in reversed(leading):
        strides.insert(0, tokens)
        tokens = tokens * size
    return *strides, (tokens + step - 1) // step * step


def allocation(form: Form) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Return the method of a tensor, and its arguments, that allocates a tensor of that form beside it."""
    shape, strides = form
    if strides is None:
        return Tensor.new_empty, tuple(shape)  # one by one: a sequence takes longer to parse
    return Tensor.new_empty_strided, (shape, strides)


def empty(like: Tensor, form: Form) -> Tensor:
    """Allocate a tensor of that form, uninitialised."""
    method, arguments = allocation(form)
    return method(like, *arguments)


def usable(name: str, matrix: Tensor, layouts: tuple[int, ...]) -> tuple[Tensor, Lines]:
    """Return activations in one of the layouts, see `Lines`; copied where strides or alignment do not fit."""
    features = matrix.shape[-1]
    tokens = matrix.numel() // features
    if tokens > INT32_MAX:
        raise InvalidArgumentError(f"{name} must have fewer than 2^31 tokens, got {tokens}")
    lines = _lines(matrix, tokens, layouts)
    if lines is None or is_misaligned(matrix):
        return _dense(matrix), (tokens, features, 0)
    return matrix, lines


def like_result(residual: Tensor, column_major: bool) -> tuple[Tensor, Lines | None]:
    """Return a residual in the layout of the result, and None for its lines if it had to be copied."""
    features = residual.shape[-1]
    lines = _lines(residual, residual.numel() // features, (int(column_major),))
    if lines is None or is_misaligned(residual):
        return empty(residual, result_form(residual, features, column_major)).copy_(residual), None
    return residual, lines


def row_stride(matrix: Tensor) -> int | None:
    """Return the leading dimension; None if the matrix is not row-major as the library reads it."""
    if is_misaligned(matrix) or matrix.numel() == 0:
        return None
    features = matrix.shape[-1]
    if matrix.is_contiguous():
        return features if features * matrix.itemsize % ALIGNMENT == 0 or not matrix.is_cuda else None
    lines = _lines(matrix, matrix.numel() // features, (0,))
    return None if lines is None else lines[1]


def row_major(matrix: Tensor) -> tuple[Tensor, int]:
    """Return activations that are row-major, copied where they are not, and their leading dimension."""
    ld = row_stride(matrix)
    if ld is not None or matrix.numel() == 0:
        return matrix, matrix.shape[-1] if ld is None else ld
    return _dense(matrix), matrix.shape[-1]


def empty_group_scales(like: Tensor, leading: Sequence[int], groups: int) -> Tensor:
    """Allocate float32 scales [..., groups] of tokens that lie side by side, for each group."""
    strides = _column_strides(leading, _VECTOR)
    return like.new_empty_strided((*leading, groups), strides, dtype=torch.float32)


def group_scales(scales: Tensor) -> tuple[Tensor, int]:
    """Return scales [..., groups] as kernels read them, copied where they lie otherwise, and their stride."""
    *leading, groups = scales.shape
    tokens = scales.numel() // groups if groups else 0
    lines = _lines(scales, tokens, (1,)) if tokens else (0, _VECTOR, 1)
    if lines is None or is_misaligned(scales):
        scales = empty_group_scales(scales, leading, groups).copy_(scales)
        return scales, scales.stride(-1)
    return scales, lines[1]


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or an aligned copy."""
    return _dense(tensor) if is_misaligned(tensor) else tensor


def _dense(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _lines(matrix: Tensor, tokens: int, layouts: tuple[int, ...]) -> Lines | None:
    """Return tokens, leading dimension and layout; None if the library cannot read the matrix in place."""
    features = matrix.shape[-1]
    if tokens == 0:
        return 0, features, layouts[0]
    try:
        token_stride, feature_stride = matrix.view(-1, features).stride()
    except RuntimeError:  # tokens at varying distances
        return None
    # The stride of a single token may be anything.
    if 0 in layouts and feature_stride == 1 and (tokens == 1 or token_stride >= features):
        ld, layout = (token_stride if tokens > 1 else features), 0
    elif 1 in layouts and (token_stride == 1 or tokens == 1) and feature_stride >= tokens:
        ld, layout = feature_stride, 1
    else:
        return None
    # Contiguous rows are of whole lines, unless blocks have other sides than 16, 32, 64 or 128: their kernels
    # need no lines.
    is_dense = layout == 0 and ld == features
    return (
        None if matrix.is_cuda and not is_dense and ld * matrix.itemsize % ALIGNMENT else (tokens, ld, layout)
    )
