"""What the operands of products and conversions must be; fake tensors are checked as well."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError, UnsupportedError
from .arguments import (
    DTYPES,
    PACKED,
    QUANTIZED,
    SCALED,
    check_block_shape,
    check_shapes,
)

ALIGNMENT = 16  # bytes, of every operand and leading dimension on CUDA devices
COMPRESSIBLE = 32  # what the side of a block that is cut into groups of four must be a multiple of


class Index(NamedTuple):
    """A pattern as operators take it: block compressed rows, and each block's slot in the values."""

    crow_indices: Tensor  # [R + 1] int32
    col_indices: Tensor  # [nnz] int32
    slot: Tensor  # [nnz] int32
    shape: tuple[int, int]  # (out_features, in_features)
    block_shape: tuple[int, int]


def check_index(index: Index) -> None:
    """Check sizes, dtype and device of a pattern's tensors, not their contents."""
    block_rows = check_shapes(index.shape, index.block_shape)[2][0]
    crow, col = index.crow_indices, index.col_indices
    for name, array, length in (
        ("crow_indices", crow, block_rows + 1),
        ("col_indices", col, None),
        ("slot", index.slot, col.shape[0] if col.dim() == 1 else None),
    ):
        if array.dim() != 1 or array.dtype != torch.int32 or not array.is_contiguous():
            raise InvalidPatternError(
                f"{name} must be a contiguous 1-D int32 tensor, got shape {tuple(array.shape)} with "
                f"strides {array.stride()} of {array.dtype}"
            )
        if length is not None and array.shape[0] != length:
            raise InvalidPatternError(f"{name} must have {length} entries, got {array.shape[0]}")
        if array.device != col.device:
            raise InvalidPatternError(f"{name} must be on {col.device} like col_indices, got {array.device}")


def check_dds(
    name: str,
    matrix: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """Check the operands of x Wᵀ, if ``name`` is "x", or of y W, if it is "y"."""
    out_features, in_features = index.shape
    check_activations(name, matrix, in_features if name == "x" else out_features)
    check_values("values", values, index, metadata, scales)
    if scales is None:
        _check_alike(name, matrix, "values", values)
    else:
        check_same_device(name, matrix, "values", values)
    if bias is not None:
        check_added("bias", bias, (out_features,), name, matrix)
    check_one(residual, gate)
    for other, tensor in (("residual", residual), ("gate", gate)):
        if tensor is not None:
            check_added(other, tensor, (*matrix.shape[:-1], out_features), name, matrix)


def check_one(residual: Tensor | None, gate: Tensor | None) -> Tensor | None:
    """Return the residual or the gate, whichever is given."""
    if residual is not None and gate is not None:
        raise InvalidArgumentError("gate must be None beside a residual: a product takes one of them")
    return residual if gate is None else gate


def check_nothing_added(
    bias: Tensor | None, residual: Tensor | None, activation: int, gate: Tensor | None = None
) -> None:
    """Refuse additions to x Wᵀ by the values of the transposed weight, whose kernels add nothing."""
    for name, given in (
        ("bias", bias is not None),
        ("residual", residual is not None),
        ("gate", gate is not None),
        ("activation", activation),
    ):
        if given:
            raise UnsupportedError(f"{name} cannot be combined with the values of the transposed weight")


def check_sdd(y: Tensor, x: Tensor, index: Index, out: Tensor | None = None) -> None:
    """Check the operands of yᵀ x on the pattern, and the values it is written to."""
    check_activations("x", x, index.shape[1])
    check_activations("y", y, index.shape[0])
    if y.shape[:-1] != x.shape[:-1]:
        raise InvalidArgumentError(
            f"y must have the leading dimensions {tuple(x.shape[:-1])} of x, got {tuple(y.shape[:-1])}"
        )
    _check_alike("y", y, "x", x)
    check_device("x", x, index)
    if out is not None:
        check_values("out", out, index)
        if out.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16):
            check_same_device("out", out, "x", x)
        else:
            _check_alike("out", out, "x", x)


def check_separate(out: Tensor, y: Tensor, x: Tensor) -> None:
    """Check the memory that a product of y and x is written to."""
    for name, operand in (("y", y), ("x", x)):
        if _overlap(operand, out):
            raise InvalidArgumentError(f"out must not share memory with {name}")
    if is_misaligned(out):
        raise InvalidArgumentError(f"out must be aligned to {ALIGNMENT} bytes")


def check_activations(name: str, matrix: Tensor, features: int) -> None:
    """Check the features, layout and dtype of activations."""
    shape = matrix.shape
    if not shape or shape[-1] != features:
        raise InvalidArgumentError(f"{name} must have last dimension {features}, got shape {tuple(shape)}")
    if matrix.layout != torch.strided:
        raise InvalidTypeError(f"{name} must be a dense tensor, got a {matrix.layout} tensor")
    if matrix.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise InvalidArgumentError(f"{name} must have dtype {names}, got {matrix.dtype}")


def check_values(
    name: str, values: Tensor, index: Index, metadata: Tensor | None = None, scales: Tensor | None = None
) -> None:
    """Check the values of kept blocks, with the metadata of 2:4 and the scales of 8 and 4 bits."""
    _check_stored(name, values, index, metadata, scales)
    check_device(name, values, index)


def _check_stored(
    name: str, values: Tensor, index: Index, metadata: Tensor | None, scales: Tensor | None
) -> None:
    check_blocks(name, values, index, metadata)
    if (scales is None) == (values.dtype in SCALED):
        given = "missing" if scales is None else "given"
        raise InvalidArgumentError(
            f"scales are {given}, but values are {values.dtype}: only values of 8 or 4 bits have scales"
        )
    if scales is not None:
        nnz, bn = index.col_indices.shape[0], index.block_shape[0]
        shape = (nnz,) if scales.dim() == 1 else (nnz, bn)
        check_array("scales", scales, "[nnz] or [nnz, bn]", shape, torch.float32)
        check_same_device("scales", scales, name, values)


def check_blocks(name: str, values: Tensor, index: Index, metadata: Tensor | None) -> None:
    """Check the shapes of the values of kept blocks, and the metadata of 2:4."""
    nnz, (bn, bk) = index.col_indices.shape[0], index.block_shape
    if metadata is not None and values.dtype == PACKED:
        raise InvalidArgumentError(f"metadata must be None for {name} of int4: they cannot be 2:4")
    if metadata is None and values.dtype == PACKED:
        check_array(name, values, "[nnz, bn, bk / 2]", (nnz, bn, bk // 2))
    elif metadata is None:
        check_array(name, values, "[nnz, bn, bk]", (nnz, bn, bk))
    else:
        check_compressible(f"{name}: 2:4", (bn, bk))
        check_array(name, values, "[nnz, bn, bk / 2]", (nnz, bn, bk // 2))
        check_array("metadata", metadata, "[nnz, bk / 32, bn]", (nnz, bk // COMPRESSIBLE, bn), torch.int32)
        check_same_device("metadata", metadata, name, values)


def block_columns(values: Tensor, metadata: Tensor | None) -> int:
    """Return bk of stored values, of which a row may hold half as many elements."""
    return values.shape[2] * (1 if metadata is None and values.dtype != PACKED else 2)


def check_compressible(what: str, block_shape: Sequence[int], transposed: bool = False) -> None:
    """Refuse blocks that cannot be divided into groups of four along their rows, or their columns."""
    if block_shape[0 if transposed else 1] % COMPRESSIBLE:
        side = "bn" if transposed else "bk"
        raise InvalidArgumentError(
            f"{what} is for {side} of 32, 64 or 128, got blocks of {tuple(block_shape)}"
        )


def check_array(
    name: str, array: Tensor, form: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if array.shape != shape or not array.is_contiguous() or dtype not in (None, array.dtype):
        wanted = "" if dtype is None else f" of {dtype}"
        raise InvalidArgumentError(
            f"{name} must be a contiguous tensor {form} = {list(shape)}{wanted}, "
            f"got shape {list(array.shape)} with strides {array.stride()} of {array.dtype}"
        )


def check_mask(values: Tensor, mask: Tensor, transposed: bool) -> None:
    """Check dense blocks that are to be compressed, and the mask of what is kept."""
    if values.dim() != 3 or values.dtype not in {**DTYPES, **QUANTIZED} or not values.is_contiguous():
        raise InvalidArgumentError(
            f"values must be a contiguous tensor [nnz, bn, bk] of a supported dtype, "
            f"got shape {list(values.shape)} with strides {values.stride()} of {values.dtype}"
        )
    check_block_shape(values.shape[1:])
    check_compressible("values: 2:4", values.shape[1:], transposed)
    check_array("mask", mask, "like values", tuple(values.shape), torch.bool)
    check_same_device("mask", mask, "values", values)


def check_stored(values: Tensor, metadata: Tensor | None, scales: Tensor | None) -> None:
    """Check values that are to be dequantized or decompressed."""
    if values.dim() != 3:
        raise InvalidArgumentError(
            f"values must be [nnz, bn, bk] or [nnz, bn, bk / 2], got {tuple(values.shape)}"
        )
    nnz, bn = values.shape[:2]
    block_shape = check_block_shape((bn, block_columns(values, metadata)))
    sizes = values.new_empty(nnz, device="meta")
    index = Index(sizes, sizes, sizes, (bn, block_shape[1]), block_shape)
    _check_stored("values", values, index, metadata, scales)
    if scales is None and values.dtype not in DTYPES:
        raise InvalidArgumentError(f"values must have a dtype of activations, got {values.dtype}")


def check_dense(dense: Tensor, index: Index) -> None:
    """Check the shape and device of a dense matrix whose blocks are taken."""
    if dense.shape != index.shape:
        raise InvalidArgumentError(f"dense must have shape {index.shape}, got {tuple(dense.shape)}")
    check_device("dense", dense, index)


def check_device(name: str, tensor: Tensor, index: Index) -> None:
    if tensor.device != index.col_indices.device:
        raise InvalidArgumentError(
            f"{name} must be on {index.col_indices.device} like the pattern, got {tensor.device}"
        )


def check_like_product(name: str, tensor: Tensor, y: Tensor) -> Tensor:
    """Return the tensor if it can be combined with a product element by element."""
    check_added(name, tensor, y.shape, "the product", y)
    return tensor


def check_factor(name: str, factor: Tensor, values: Tensor) -> None:
    """Check that values can be multiplied by a factor in place."""
    sides = zip(reversed(factor.shape), reversed(values.shape), strict=False)
    if factor.dim() > values.dim() or any(side not in (1, whole) for side, whole in sides):
        raise InvalidArgumentError(
            f"{name} must have a shape that broadcasts to {list(values.shape)}, got {list(factor.shape)}"
        )
    if factor.is_complex():
        raise InvalidArgumentError(f"{name} must be real, got {factor.dtype}")
    if factor.dim():
        check_same_device(name, factor, "values", values)


def is_misaligned(tensor: Tensor) -> bool:
    """Return True for a CUDA tensor that kernels cannot read at its address."""
    return tensor.is_cuda and tensor.data_ptr() % ALIGNMENT != 0


def check_added(name: str, tensor: Tensor, shape: tuple[int, ...], like_name: str, like: Tensor) -> None:
    """Check what is added to a product, or multiplied by it."""
    if tensor.shape != shape:
        raise InvalidArgumentError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    _check_alike(name, tensor, like_name, like)


def _check_alike(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        raise InvalidArgumentError(
            f"{name} must have dtype {like.dtype} like {like_name}, got {tensor.dtype}"
        )
    check_same_device(name, tensor, like_name, like)


def check_same_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise InvalidArgumentError(f"{name} must be on {like.device} like {like_name}, got {tensor.device}")


def _overlap(operand: Tensor, out: Tensor) -> bool:
    """Return True if the address ranges of two tensors overlap."""
    first, second = _range(operand), _range(out)
    return first[0] < second[1] and second[0] < first[1]


def _range(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
