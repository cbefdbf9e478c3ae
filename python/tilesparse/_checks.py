"""Validation of arguments and operands, fake tensors included; words for users in reports and warnings."""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable, Sequence
from numbers import Number, Real
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor, nn
from tqdm import tqdm

from .errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError, UnsupportedError

BLOCK_SIZES = (16, 32, 64, 128)  # of blocks that most kernels multiply, and that layers have by default
BLOCK_SIDES = range(2, 129)  # of those that patterns may have
INT32_MAX = 2**31 - 1
POLICIES = ("sparse", "auto", "dense")
DTYPES = {torch.float64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}
QUANTIZED = {torch.int8: 5, torch.float8_e4m3fn: 6}  # of values and activations that have scales
PACKED = torch.uint8  # two values of int4, the first in the low four bits
SCALE_GROUP = 128  # features of x that have one scale, and sides of a block, of scales inside of the sums
SCALED = {**QUANTIZED, PACKED: 7}  # of all values that have scales
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # magnitudes that become those of scales
EXACT_FEATURES = 1 << 17  # below which sums of int8 products stay below 2^31


class Array(Protocol):
    """A tensor, or an array of NumPy, CuPy, JAX or another library that has DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


def shared(name: str, given: Any) -> Any:
    """Return a tensor in the memory of an array, and what is no array as it is.

    Copies are made of what NumPy has read-only, reversed or in another byte order: PyTorch would write to the
    first, and end the process at the second.
    """
    if isinstance(given, Tensor) or not hasattr(given, "__dlpack__"):
        return given
    try:
        if isinstance(given, np.ndarray):
            usable = given.flags.writeable and min(given.strides, default=0) >= 0 and given.dtype.isnative
            return torch.from_numpy(given if usable else given.astype(given.dtype.newbyteorder("="), "C"))
        if min(getattr(given, "strides", None) or (0,)) < 0:
            raise BufferError("a stride is negative")
        return torch.utils.dlpack.from_dlpack(given)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} must be an array that PyTorch can share: {error}") from error


def shown(value: object) -> str:
    """Return a value for a message: its text if that is short, otherwise its type."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a {value.layout} tensor {list(value.shape)}"
    parts = value if isinstance(value, list | tuple) else (value,)
    if all(part is None or isinstance(part, str | Number | torch.dtype | torch.device) for part in parts):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    kind = type(value)
    own = kind.__module__.split(".")[0] in ("builtins", "torch", __package__)
    return kind.__name__ if own else f"{kind.__module__}.{kind.__name__}"


def check_flag(name: str, value: object) -> None:
    """Raise `InvalidTypeError` unless a value is True or False."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, got {shown(value)}")


def check_choice(name: str, choice: object, choices: Collection[object]) -> None:
    """Refuse what is none of some texts, numbers, dtypes or None."""
    if not isinstance(choice, str | Real | torch.dtype | None) or choice not in choices:
        raise InvalidArgumentError(f"{name} must be one of {list(choices)}, got {shown(choice)}")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise `InvalidTypeError` for what is not of a class, which has a short name."""
    if not isinstance(value, kind):
        raise InvalidTypeError(f"{name} must be a {kind.__name__}, got {shown(value)}")


def check_callable(name: str, value: object) -> None:
    """Raise `InvalidTypeError` for what is neither None nor can be called."""
    if value is not None and not callable(value):
        raise InvalidTypeError(f"{name} must be a function or None, got {shown(value)}")


def items_of(name: str, given: Any, what: str) -> list[Any]:
    """Return the items of a list or another iterable of them, a text not being one."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidTypeError(f"{name} must be a list of {what}, got {shown(given)}")
    return list(given)


def check_block_shape(
    block_shape: int | Sequence[int], sizes: Sequence[int] = BLOCK_SIZES
) -> tuple[int, int]:
    """Return (bn, bk), both among the sizes; one number stands for square blocks."""
    sides = _sides(block_shape)
    if sides is None or not {*sides} <= {*sizes}:
        of_layers = sizes is BLOCK_SIZES
        why = "; layers of other blocks are rarely faster than dense, and are made with `pattern` alone"
        raise InvalidArgumentError(
            f"block_shape must be (bn, bk) of {'16, 32, 64 or 128' if of_layers else '2 to 128'}, or one of "
            f"these numbers for both, got {block_shape}{why if of_layers and sides else ''}"
        )
    return sides


def _sides(block_shape: object) -> tuple[int, int] | None:
    """Return two sides that blocks may have; None if they may not."""
    sizes = block_shape if isinstance(block_shape, Sequence | Tensor) else (block_shape, block_shape)
    try:
        bn, bk = (as_integer(size) for size in sizes)
    except (TypeError, ValueError):
        return None
    return (bn, bk) if bn in BLOCK_SIDES and bk in BLOCK_SIDES else None


def check_module(model: object, name: str = "model") -> None:
    """Refuse anything but a module."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"{name} must be a torch.nn.Module, got {type(model).__name__}")


def check_content(name: str, tensor: Tensor) -> None:
    """Refuse a tensor on the meta device, which has no numbers."""
    if tensor.is_meta:
        raise InvalidArgumentError(f"{name} must be a tensor with content, got one on the meta device")


def check_policy(policy: object) -> None:
    """Refuse an unknown policy."""
    if policy not in POLICIES:
        raise InvalidArgumentError(f"policy must be one of {list(POLICIES)}, got {policy!r}")


def as_integer(number: object) -> int:
    """Convert an integer of Python or NumPy, or a one-element tensor, to int; refuse 2.0 and True."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"must be an integer, got {number!r}")
    return int(number.__index__())


def is_tensor(value: object) -> bool:
    """Return True for a tensor with strides, as products and conversions need it."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested


def checked_count(name: str, count: object, least: int = 1, most: int | None = None) -> int:
    """Return an integer that lies in a range."""
    try:
        number = as_integer(count)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgumentError(f"{name} must be an integer {allowed}, got {count!r}")
    return number


def checked_number(name: str, number: object, *, above_zero: bool = False) -> float:
    """Return a finite number that is not negative."""
    value = as_number(number)
    if not 0 <= value < math.inf or (above_zero and value == 0):
        least = "above 0" if above_zero else "of at least 0"
        raise InvalidArgumentError(f"{name} must be a finite number {least}, got {number!r}")
    return value


def checked_fraction(name: str, fraction: object) -> float:
    """Return a number from 0 to 1."""
    value = as_number(fraction)
    if not 0 <= value <= 1:
        raise InvalidArgumentError(f"{name} must be a number from 0 to 1, got {fraction!r}")
    return value


def as_number(number: object) -> float:
    """Convert a real number to float; return NaN for anything else, which fails every comparison."""
    try:
        return float(number) if isinstance(number, Real) and not isinstance(number, bool) else math.nan
    except OverflowError:  # an integer beyond all floats
        return math.nan


def checked_seed(seed: object) -> int:
    """Return an integer seed."""
    try:
        return as_integer(seed)
    except TypeError as error:
        raise InvalidArgumentError(f"seed must be an integer, got {seed!r}") from error


def checked_device(device: object) -> torch.device:
    """Return a device that has memory, with its number, which could differ between threads."""
    try:
        found = torch.empty(0, device=device).device  # type: ignore[call-overload]
    # The first is of a PyTorch without that device.
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"device must be one that PyTorch has here, got {device!r}: {error}"
        ) from error
    if found.type == "meta":
        raise InvalidArgumentError("device must have memory, got meta")
    return found  # type: ignore[no-any-return]


def check_writable(name: str, path: Path) -> None:
    """Refuse a path where no file or folder can be made or changed, before its content is computed."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        if place.is_file() and place != path:
            raise NotADirectoryError(f"{str(place)!r} is a file")
        if place.is_file():
            place.open("ab").close()
        if place.is_file() or place.is_dir():  # a new file takes the place of the former
            folder = place if place.is_dir() else Path(os.path.realpath(place)).parent
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InvalidArgumentError(
            f"{name} must be a path that can be written, got {str(path)!r}: {error}"
        ) from error


def check_exact_sums(name: str, in_features: int, dtype: torch.dtype | None) -> None:
    """Refuse more features than sums of int8 products are exact for."""
    if dtype == torch.int8 and in_features >= EXACT_FEATURES:
        raise InvalidArgumentError(
            f"{name} must be below {EXACT_FEATURES} with activations in int8, got {in_features}"
        )


def check_shapes(
    shape: Sequence[int], block_shape: int | Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return validated (shape, block_shape, grid) of blocks as most kernels need them: they divide it."""
    bn, bk = check_block_shape(block_shape)
    shape, _, grid = pattern_shapes(shape, block_shape)
    for name, size, block in (("out_features", shape[0], bn), ("in_features", shape[1], bk)):
        if size % block:
            raise InvalidArgumentError(f"{name} must be a multiple of the block size {block}, got {size}")
    return shape, (bn, bk), grid


def pattern_shapes(
    shape: Sequence[int], block_shape: int | Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return validated (shape, block_shape, grid) of a pattern, whose last blocks may reach out of it."""
    sides = check_block_shape(block_shape, BLOCK_SIDES)
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 2:
        raise InvalidArgumentError(f"shape must be (out_features, in_features), got {shape!r}")
    rows, cols = (
        checked_count(name, size, 1, INT32_MAX)
        for name, size in zip(("out_features", "in_features"), shape, strict=True)
    )
    return (rows, cols), sides, grid_of((rows, cols), sides)


def grid_of(shape: Sequence[int], block_shape: Sequence[int]) -> tuple[int, int]:
    """Return (R, C), the block rows and columns of a shape, of which the last ones may reach out of it."""
    (rows, cols), (bn, bk) = shape, block_shape
    return -(-rows // bn), -(-cols // bk)


def is_ragged(shape: Sequence[int], block_shape: Sequence[int]) -> bool:
    """Return True if the last block row or column reaches out of the shape."""
    return shape[0] % block_shape[0] != 0 or shape[1] % block_shape[1] != 0


def is_regular(shape: Sequence[int], block_shape: Sequence[int]) -> bool:
    """Return True for blocks as most kernels need them, which divide the shape."""
    return {*block_shape} <= {*BLOCK_SIZES} and not is_ragged(shape, block_shape)


def check_whole_blocks(what: str, shape: Sequence[int], block_shape: Sequence[int]) -> None:
    """Refuse a shape that blocks do not divide, for what has no other."""
    if is_ragged(shape, block_shape):
        raise InvalidArgumentError(
            f"{what} must have a shape that its blocks divide, got {tuple(shape)} in blocks of "
            f"{tuple(block_shape)}"
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


class Epilogue(NamedTuple):
    """Steps after a kernel's sums y: activation(y + bias) + residual, or (y + bias) ⊙ activation(gate)."""

    bias: Tensor | None = None  # [out_features]
    residual: Tensor | None = None
    activation: int = 0  # its number in `device.ACTIVATIONS`
    column_major: bool = False  # layout of the result
    gate: Tensor | None = None  # in the place of a residual


class Operands(NamedTuple):
    """Storage and groups of both factors of a product; tensors come first, and have no gradient."""

    metadata: Tensor | None = None  # of 2:4 values
    scales: Tensor | None = None  # of values in 8 or 4 bits; with `fast` of features, or of blocks [nnz, 1]
    offsets: Tensor | None = None  # int32 [groups + 1]: where the tokens of each group begin
    compressed: Tensor | None = None  # 2:4 values in place of dense blocks, which then get the gradient
    compressed_t: Tensor | None = None  # the same of Wᵀ, for the gradient of x
    metadata_t: Tensor | None = None
    x_values: Tensor | None = None  # x in 8 bits, multiplied in its place; gradients do not need it
    x_scales: Tensor | None = None
    transposed: bool = False  # whether the values are those of Wᵀ
    # None to multiply x in its own dtype. Otherwise x has 8 bits, too, and True lets tensor cores add all
    # products of float8, in fewer bits than float32 has.
    fast: bool | None = None
    threshold: float | None = None  # magnitude up to which numbers of x count as zero
    gate_threshold: float | None = None  # the same of the gate, after its activation

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors among them, or None."""
        return self[:8]


NO_EPILOGUE, DENSE = Epilogue(), Operands()


def checked_threshold(name: str, value: object) -> float | None:
    """Return a threshold of activations as a float; raise unless it is None or a number from 0 on."""
    number = None if value is None else as_number(value)
    if number is not None and not number >= 0:
        raise InvalidArgumentError(f"{name} must be None or a number from 0 on, got {shown(value)}")
    return number


def operands_of(metadata: Tensor | None, scales: Tensor | None) -> Operands:
    """Return the operands of values that are stored so."""
    return DENSE if metadata is None and scales is None else Operands(metadata, scales)


def check_index(index: Index) -> None:
    """Check sizes, dtype and device of a pattern's tensors, not their contents."""
    block_rows = pattern_shapes(index.shape, index.block_shape)[2][0]
    col = index.col_indices
    lengths = block_rows + 1, col.numel(), col.numel()
    for name, array, length in zip(Index._fields[:3], index[:3], lengths, strict=True):
        if array.shape != (length,) or array.dtype != torch.int32 or not array.is_contiguous():
            raise InvalidPatternError(
                f"{name} must be a contiguous 1-D int32 tensor with {length} entries, got shape "
                f"{tuple(array.shape)} with strides {array.stride()} of {array.dtype}"
            )
        if array.device != col.device:
            raise InvalidPatternError(f"{name} must be on {col.device} like col_indices, got {array.device}")


def check_dds(
    name: str,
    matrix: Tensor,
    values: Tensor,
    index: Index,
    epilogue: Epilogue = NO_EPILOGUE,
    operands: Operands = DENSE,
) -> None:
    """Check the operands of x Wᵀ, if ``name`` is "x", or of y W, if it is "y"."""
    bias, residual, _, _, gate = epilogue
    one = index
    if operands.offsets is not None:
        _check_rows(name, matrix)
        one = _of_one(index, group_count(index, operands.offsets))
    check_activations(name, matrix, one.shape[1 if name == "x" else 0])
    if operands.fast is not None:
        _check_quantized(matrix, values, index, operands)
    elif operands.compressed is None:
        check_values("values", values, one, operands.metadata, operands.scales)
    else:
        check_values("values", values, index)
        check_values("compressed", operands.compressed, index, operands.metadata)
        check_like("compressed", operands.compressed, "values", values)
    check_like(name, matrix, "values", values, dtype=values.dtype if operands.scales is None else None)
    check_one(residual, gate)
    shape = *matrix.shape[:-1], one.shape[0]
    for other, tensor, wanted in (
        ("bias", bias, index.shape[:1]),
        ("residual", residual, shape),
        ("gate", gate, shape),
    ):
        if tensor is not None:
            check_like(other, tensor, name, matrix, wanted)


def _check_quantized(x: Tensor, values: Tensor, index: Index, operands: Operands) -> None:
    """Check the factors of x Wᵀ that is multiplied in 8 bits."""
    metadata, scales, _, _, _, _, x_values, x_scales = operands.tensors
    if scales is None or x_values is None or x_scales is None:
        raise InvalidArgumentError("scales, x_values and x_scales must be given with fast, got None")
    for name, tensor in (("offsets", operands.offsets), ("metadata", metadata)):
        if tensor is not None and is_inside(scales):
            raise InvalidArgumentError(
                f"{name} must be None with scales of blocks, which are inside of the sums"
            )
    check_quantizable(x)
    if values.dtype not in QUANTIZED:
        raise InvalidArgumentError(f"values must have dtype int8, float8_e4m3fn, got {values.dtype}")
    check_exact_sums("in_features", index.shape[1], values.dtype)
    check_blocks("values", values, index, metadata)
    check_device("values", values, index)
    check_factor_scales(scales, values, index)
    groups = (x.shape[-1] // SCALE_GROUP,) if is_inside(scales) else ()
    check_like("x_values", x_values, "x", x, x.shape, values.dtype)
    check_like("x_scales", x_scales, "x", x, (*x.shape[:-1], *groups), torch.float32)


def check_one(residual: Tensor | None, gate: Tensor | None) -> Tensor | None:
    """Return the residual or the gate, whichever is given."""
    if residual is not None and gate is not None:
        raise InvalidArgumentError("gate must be None beside a residual: a product takes one of them")
    return residual if gate is None else gate


def check_nothing_added(epilogue: Epilogue) -> None:
    """Refuse additions to x Wᵀ by the values of the transposed weight, whose kernels add nothing."""
    bias, residual, activation, _, gate = epilogue
    for name, given in (
        ("bias", bias),
        ("residual", residual),
        ("gate", gate),
        ("activation", activation or None),
    ):
        if given is not None:
            raise UnsupportedError(f"{name} cannot be combined with the values of the transposed weight")


def check_sdd(y: Tensor, x: Tensor, index: Index, offsets: Tensor | None = None) -> None:
    """Check the operands of yᵀ x on the pattern."""
    if offsets is not None:
        _check_rows("x", x)
        _check_rows("y", y)
        index = _of_one(index, group_count(index, offsets))
    check_activations("x", x, index.shape[1])
    check_activations("y", y, index.shape[0])
    if y.shape[:-1] != x.shape[:-1]:
        raise InvalidArgumentError(
            f"y must have the leading dimensions {tuple(x.shape[:-1])} of x, got {tuple(y.shape[:-1])}"
        )
    check_like("y", y, "x", x)
    check_device("x", x, index)


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
        check_like("scales", scales, name, values, dtype=None)


def check_blocks(name: str, values: Tensor, index: Index, metadata: Tensor | None) -> None:
    """Check the shapes of the values of kept blocks, and the metadata of 2:4."""
    nnz, (bn, bk) = index.col_indices.shape[0], index.block_shape
    if metadata is not None or values.dtype in SCALED:
        check_shapes(index.shape, index.block_shape)
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
        check_like("metadata", metadata, name, values, dtype=None)


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
    check_like("mask", mask, "values", values, dtype=None)


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
    check_like(name, tensor, "the pattern", index.col_indices, dtype=None)


def check_like_product(name: str, tensor: Tensor, y: Tensor) -> Tensor:
    """Return the tensor if it can be combined with a product element by element."""
    check_like(name, tensor, "the product", y, y.shape)
    return tensor


def is_misaligned(tensor: Tensor) -> bool:
    """Return True for a CUDA tensor that kernels cannot read at its address."""
    return tensor.is_cuda and tensor.data_ptr() % ALIGNMENT != 0


_ITS_OWN: Any = object()  # the dtype of the other tensor


def check_like(
    name: str,
    tensor: Tensor,
    like_name: str,
    like: Tensor,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = _ITS_OWN,
) -> None:
    """Check device, dtype and shape of a tensor beside another; None: any shape, or any dtype."""
    if shape is not None and tensor.shape != tuple(shape):
        raise InvalidArgumentError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    wanted = like.dtype if dtype is _ITS_OWN else dtype
    if wanted is not None and tensor.dtype != wanted:
        same = f" like {like_name}" if wanted == like.dtype else ""
        raise InvalidArgumentError(f"{name} must have dtype {wanted}{same}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise InvalidArgumentError(f"{name} must be on {like.device} like {like_name}, got {tensor.device}")


_FEATURES = 16  # of which kernels read multiples


def check_combination(name: str, matrix: Tensor, weights: Tensor | None, rows: Tensor, lines: int) -> None:
    """Check a matrix [lines, features], of tokens or of their rows, beside weights and rows of the tokens."""
    if rows.dim() != 2 or rows.dtype != torch.int64:
        raise InvalidArgumentError(
            f"rows must be [tokens, choices] of int64, got shape {tuple(rows.shape)} of {rows.dtype}"
        )
    if matrix.dim() != 2 or matrix.shape[0] != lines or matrix.shape[1] % _FEATURES:
        raise InvalidArgumentError(
            f"{name} must be [{lines}, features] with a multiple of {_FEATURES} features, got shape "
            f"{tuple(matrix.shape)}"
        )
    check_activations(name, matrix, matrix.shape[1])
    check_like("rows", rows, name, matrix, dtype=None)
    if weights is not None:
        check_like("weights", weights, name, matrix, rows.shape)


MAX_GROUPS = 1024


def group_count(index: Index, offsets: Tensor) -> int:
    """Return the number of groups that offsets [groups + 1] of a pattern stand for."""
    if not is_tensor(offsets):
        raise InvalidTypeError(f"offsets must be a dense tensor, got {shown(offsets)}")
    check_array("offsets", offsets, "[experts + 1]", (offsets.numel(),), torch.int32)
    check_device("offsets", offsets, index)
    groups = offsets.shape[0] - 1
    if not 1 <= groups <= MAX_GROUPS:
        raise InvalidArgumentError(
            f"offsets must have 2 to {MAX_GROUPS + 1} entries, one more than experts, got {groups + 1}"
        )
    if index.shape[0] % (groups * index.block_shape[0]):
        raise InvalidArgumentError(
            f"pattern must have the same number of rows of blocks for each of {groups} experts, for which "
            f"there are offsets, got {index.shape[0]} out_features in blocks of {index.block_shape[0]}"
        )
    return groups


def flat_bias(bias: Tensor, index: Index, offsets: Tensor) -> Tensor:
    """Return a bias [groups, features] of one weight's features as that of all, [groups * features]."""
    groups = group_count(index, offsets)
    if bias.shape != (groups, index.shape[0] // groups):
        raise InvalidArgumentError(
            f"bias must have shape {(groups, index.shape[0] // groups)} or {(index.shape[0],)}, got "
            f"{tuple(bias.shape)}"
        )
    return bias.reshape(-1)


def _of_one(index: Index, groups: int) -> Index:
    """Return the pattern with the shape of one weight, which activations belong to."""
    return index._replace(shape=(index.shape[0] // groups, index.shape[1]))


def _check_rows(name: str, matrix: Tensor) -> None:
    if matrix.dim() != 2:
        raise InvalidArgumentError(f"{name} must be [tokens, features], got shape {tuple(matrix.shape)}")


def check_quantizable(x: Tensor) -> None:
    """Check the dtype of activations that have 8 bits in a product."""
    if x.dtype not in DTYPES or x.dtype == torch.float64:
        raise InvalidArgumentError(f"x must be float32, float16 or bfloat16, got {x.dtype}")


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


MOST = 8  # groups of names in a warning


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table whose first column is text."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        name.ljust(first) + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]


def without_numbers(name: str) -> str:
    """Return a name as "model.layers.*.mlp", which all layers share."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def listed(names: Iterable[str]) -> str:
    """Join names as "model.layers.*.mlp.up_proj (32), pooler.dense": numbers in names do not count."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name), []).append(name or "the model")
    texts = [own[0] if len(own) == 1 else f"{group} ({len(own)})" for group, own in groups.items()]
    return ", ".join(texts[:MOST] + ["…"] * (len(texts) > MOST))


def empty_of(
    places: tuple[Tensor, Tensor], shape: tuple[int, int], block_shape: tuple[int, int]
) -> tuple[int, int]:
    """Count block rows and columns of a weight without a block at these places; 0 on the meta device."""
    if places[0].is_meta:
        return 0, 0
    rows, columns = (
        int(at.bincount(minlength=size // block).eq(0).sum())
        for at, size, block in zip(places, shape, block_shape, strict=True)
    )
    return rows, columns


def empty_texts(layers: Iterable[Any]) -> list[str]:
    """Describe the layers of a report that have block rows or columns without a block."""
    layers = list(layers)
    kinds = {
        "empty_rows": "empty block rows, whose outputs are the bias alone",
        "empty_columns": "empty block columns, whose inputs nothing reads",
    }
    texts = []
    for attribute, what in kinds.items():
        counts = {layer.name: getattr(layer, attribute) for layer in layers if hasattr(layer, attribute)}
        own = [name for name, count in counts.items() if count]
        if own:
            texts.append(f"{what}: {sum(counts.values())} in {listed(own)}")
    return texts


def warn_user(text: str) -> None:
    """Warn at the line outside of this package that led here."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


SECONDS = 5.0  # between two lines, and before a bar appears

logger = logging.getLogger("tilesparse")


class _Stderr(logging.Handler):
    """Write messages as lines on what is stderr at that moment, above a bar that is shown there."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


logger.addHandler(_Stderr())
logger.setLevel(logging.INFO)
logger.propagate = False  # handlers of the program would write each line again


class Progress:
    """A bar on a terminal, and a message every few seconds elsewhere, so that logs stay readable."""

    def __init__(self, total: int) -> None:
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(total=total, delay=SECONDS, file=sys.stderr) if on_terminal else None
        self._total = total
        self._said = self._began = time.monotonic()

    def show(self, done: int, text: str) -> None:
        """Show that ``done`` of all steps are done, with ``text`` about them."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            if done >= self._total:
                self._bar.close()
        elif time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            logger.info("%d/%d  %s%s", done, self._total, text, self._left(done))

    def _left(self, done: int) -> str:
        """Estimate the time left from the steps of this run; return nothing at the end."""
        if not 0 < done < self._total:
            return ""
        seconds = (time.monotonic() - self._began) * (self._total - done) / done
        return f", about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Round a time for reading: "12 s", "3 min", "2 h 10 min"."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
