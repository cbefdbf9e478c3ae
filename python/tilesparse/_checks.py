"""What arguments must be: checked before anything is computed; operands of products also of fake tensors."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError, UnsupportedError

BLOCK_SIZES = (16, 32, 64, 128)
INT32_MAX = 2**31 - 1
ALIGNMENT = 16  # bytes, of every operand and leading dimension on CUDA devices
POLICIES = ("sparse", "auto", "dense")
DTYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
QUANTIZED = {torch.int8: 4, torch.float8_e4m3fn: 5}  # of values that have scales
COMPRESSIBLE = 32  # what the side of a block that is cut into groups of four must be a multiple of


class Index(NamedTuple):
    """A pattern as operators take it: block compressed rows, and where each block lies in the values."""

    crow_indices: Tensor  # [R + 1] int32
    col_indices: Tensor  # [nnz] int32
    slot: Tensor  # [nnz] int32
    shape: tuple[int, int]  # (out_features, in_features)
    block_shape: tuple[int, int]


def check_block_shape(block_shape: int | Sequence[int]) -> tuple[int, int]:
    """(bn, bk); one number stands for square blocks."""
    sizes = block_shape if isinstance(block_shape, Sequence | Tensor) else (block_shape, block_shape)
    try:
        bn, bk = (as_integer(size) for size in sizes)
        if bn in BLOCK_SIZES and bk in BLOCK_SIZES:
            return bn, bk
    except (TypeError, ValueError):
        pass
    raise InvalidArgumentError(
        f"block_shape: (bn, bk) with sizes from {BLOCK_SIZES}, or one of these for both, expected, "
        f"got {block_shape}"
    )


def check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model: a torch.nn.Module expected, got {type(model).__name__}")


def check_content(name: str, tensor: Tensor) -> None:
    """That its numbers can be read on the host."""
    if tensor.is_meta:
        raise InvalidArgumentError(f"{name} must be a tensor with content, got one on the meta device")


def check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidTypeError(f"{name} must be a string, got {type(text).__name__}")


def check_policy(policy: object) -> None:
    if policy not in POLICIES:
        raise InvalidArgumentError(f"policy: one of {list(POLICIES)} expected, got {policy!r}")


def as_integer(number: object) -> int:
    """An integer of Python, NumPy or a one-element tensor as one of Python; 2.0 and True are none."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"an integer expected, got {number!r}")
    return int(number.__index__())


def is_tensor(value: object) -> bool:
    """Whether it is a tensor with strides, as products and conversions want it."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def is_sequence(value: object) -> bool:
    """Whether it has a length and elements with numbers: also an array or a tensor, but no text or model."""
    if isinstance(value, Tensor):
        return is_tensor(value) and not value.is_meta and not value.is_complex() and value.dim() > 0
    has_elements = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return has_elements and not isinstance(value, str | bytes | Mapping | nn.Module)


def checked_count(name: str, count: object, least: int = 1, most: int | None = None) -> int:
    try:
        number = as_integer(count)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgumentError(f"{name}: an integer {allowed} expected, got {count!r}")
    return number


def checked_number(name: str, number: object, *, above_zero: bool = False) -> float:
    """A finite number that is not negative."""
    value = as_number(number)
    if not 0 <= value < math.inf or (above_zero and value == 0):
        least = "above 0" if above_zero else "of at least 0"
        raise InvalidArgumentError(f"{name}: a finite number {least} expected, got {number!r}")
    return value


def checked_fraction(name: str, fraction: object) -> float:
    value = as_number(fraction)
    if not 0 <= value <= 1:
        raise InvalidArgumentError(f"{name}: a number from 0 to 1 expected, got {fraction!r}")
    return value


def as_number(number: object) -> float:
    """A real number as one of Python; NaN for everything else, which no comparison lets pass."""
    try:
        return float(number) if isinstance(number, Real) and not isinstance(number, bool) else math.nan
    except OverflowError:  # an integer beyond all floats
        return math.nan


def checked_seed(seed: object) -> int:
    try:
        return as_integer(seed)
    except TypeError as error:
        raise InvalidArgumentError(f"seed: an integer expected, got {seed!r}") from error


def checked_device(device: object) -> torch.device:
    """One that has memory, with its number, which threads would choose otherwise."""
    try:
        found = torch.empty(0, device=device).device  # type: ignore[call-overload]
    except (AssertionError, RuntimeError, TypeError) as error:  # the first of a PyTorch without that device
        raise InvalidArgumentError(
            f"device: one that PyTorch has expected, got {device!r}: {error}"
        ) from error
    if found.type == "meta":
        raise InvalidArgumentError("device: one with memory expected, got meta")
    return found  # type: ignore[no-any-return]


def check_writable(name: str, path: Path) -> None:
    """That a file or folder can be made or changed there, before what is to be written is computed."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        if place.is_dir():
            tempfile.TemporaryFile(dir=place).close()
        elif place == path:
            place.open("ab").close()
        else:
            raise NotADirectoryError(f"{str(place)!r} is a file")
    except OSError as error:
        raise InvalidArgumentError(
            f"{name} must be a path that can be written, got {str(path)!r}: {error}"
        ) from error


def check_shapes(
    shape: Sequence[int], block_shape: int | Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Checked (shape, block_shape, grid)."""
    bn, bk = check_block_shape(block_shape)
    if not is_sequence(shape) or len(shape) != 2:
        raise InvalidArgumentError(f"shape: (out_features, in_features) expected, got {shape!r}")
    features = []
    for name, size, block in (("out_features", shape[0], bn), ("in_features", shape[1], bk)):
        try:
            number = as_integer(size)
        except TypeError:
            number = 0
        if number % block or not 0 < number <= INT32_MAX:
            raise InvalidArgumentError(
                f"{name}: a positive multiple of the block size {block} below 2^31 expected, got {size}"
            )
        features.append(number)
    return (features[0], features[1]), (bn, bk), (features[0] // bn, features[1] // bk)


def check_index(index: Index) -> None:
    """Sizes, dtype and device of a pattern's tensors, not what is in them."""
    block_rows = check_shapes(index.shape, index.block_shape)[2][0]
    crow, col = index.crow_indices, index.col_indices
    for name, array, length in (
        ("crow_indices", crow, block_rows + 1),
        ("col_indices", col, None),
        ("slot", index.slot, col.shape[0] if col.dim() == 1 else None),
    ):
        if array.dim() != 1 or array.dtype != torch.int32 or not array.is_contiguous():
            raise InvalidPatternError(
                f"{name}: a contiguous 1-D int32 tensor expected, got shape {tuple(array.shape)} with "
                f"strides {array.stride()} of {array.dtype}"
            )
        if length is not None and array.shape[0] != length:
            raise InvalidPatternError(f"{name}: {length} entries expected, got {array.shape[0]}")
        if array.device != col.device:
            raise InvalidPatternError(
                f"{name}: device {col.device} of col_indices expected, got {array.device}"
            )


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
    """Of x Wᵀ, where ``name`` is "x", or y W, where it is "y"."""
    out_features, in_features = index.shape
    check_activations(name, matrix, in_features if name == "x" else out_features)
    check_values("values", values, index, metadata, scales)
    if scales is None:
        _check_alike(name, matrix, "values", values)
    else:
        _check_same_device(name, matrix, "values", values)
    if bias is not None:
        _check_added("bias", bias, (out_features,), name, matrix)
    check_one(residual, gate)
    for other, tensor in (("residual", residual), ("gate", gate)):
        if tensor is not None:
            _check_added(other, tensor, (*matrix.shape[:-1], out_features), name, matrix)


def check_one(residual: Tensor | None, gate: Tensor | None) -> Tensor | None:
    """Residual or gate, whichever is given."""
    if residual is not None and gate is not None:
        raise InvalidArgumentError("gate: none expected beside a residual; a product has one of them")
    return residual if gate is None else gate


def check_nothing_added(
    bias: Tensor | None, residual: Tensor | None, activation: int, gate: Tensor | None = None
) -> None:
    """Of x Wᵀ by the values of the transposed weight, which is a product of the kind that adds nothing."""
    for name, given in (
        ("bias", bias is not None),
        ("residual", residual is not None),
        ("gate", gate is not None),
        ("activation", activation),
    ):
        if given:
            raise UnsupportedError(f"{name}: none expected with the values of the transposed weight")


def check_sdd(y: Tensor, x: Tensor, index: Index, out: Tensor | None = None) -> None:
    """Of yᵀ x on the pattern, and of the values it is written to."""
    check_activations("x", x, index.shape[1])
    check_activations("y", y, index.shape[0])
    if y.shape[:-1] != x.shape[:-1]:
        raise InvalidArgumentError(
            f"y: the leading dimensions {tuple(x.shape[:-1])} of x expected, got {tuple(y.shape[:-1])}"
        )
    _check_alike("y", y, "x", x)
    _check_device("x", x, index)
    if out is not None:
        check_values("out", out, index)
        if out.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16):
            _check_same_device("out", out, "x", x)
        else:
            _check_alike("out", out, "x", x)


def check_separate(out: Tensor, y: Tensor, x: Tensor) -> None:
    """Of the memory that a product of y and x is written to."""
    for name, operand in (("y", y), ("x", x)):
        if _overlap(operand, out):
            raise InvalidArgumentError(f"out: must not share memory with {name}")
    if is_misaligned(out):
        raise InvalidArgumentError(f"out: must be aligned to {ALIGNMENT} bytes")


def check_activations(name: str, matrix: Tensor, features: int) -> None:
    shape = matrix.shape
    if not shape or shape[-1] != features:
        raise InvalidArgumentError(f"{name}: last dimension {features} expected, got shape {tuple(shape)}")
    if matrix.layout != torch.strided:
        raise InvalidTypeError(f"{name} must be a dense tensor, got a {matrix.layout} tensor")
    if matrix.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise InvalidArgumentError(f"{name}: dtype {names} expected, got {matrix.dtype}")


def check_values(
    name: str, values: Tensor, index: Index, metadata: Tensor | None = None, scales: Tensor | None = None
) -> None:
    """Of kept blocks: plain, or with the metadata of 2:4 or the scales of 8 bits."""
    _check_stored(name, values, index, metadata, scales)
    _check_device(name, values, index)


def _check_stored(
    name: str, values: Tensor, index: Index, metadata: Tensor | None, scales: Tensor | None
) -> None:
    nnz, (bn, bk) = index.col_indices.shape[0], index.block_shape
    if metadata is None:
        _check_array(name, values, "[nnz, bn, bk]", (nnz, bn, bk))
    else:
        check_compressible(f"{name}: 2:4", (bn, bk))
        _check_array(name, values, "[nnz, bn, bk / 2]", (nnz, bn, bk // 2))
        _check_array("metadata", metadata, "[nnz, bk / 32, bn]", (nnz, bk // COMPRESSIBLE, bn), torch.int32)
        _check_same_device("metadata", metadata, name, values)
    if (scales is None) == (values.dtype in QUANTIZED):
        given = "missing" if scales is None else "given"
        raise InvalidArgumentError(
            f"scales: {given}, but values are {values.dtype}; those of 8 bits have any"
        )
    if scales is not None:
        shape = (nnz,) if scales.dim() == 1 else (nnz, bn)
        _check_array("scales", scales, "[nnz] or [nnz, bn]", shape, torch.float32)
        _check_same_device("scales", scales, name, values)


def check_compressible(what: str, block_shape: Sequence[int], transposed: bool = False) -> None:
    """That blocks can be cut into groups of four along their rows, or their columns."""
    if block_shape[0 if transposed else 1] % COMPRESSIBLE:
        side = "bn" if transposed else "bk"
        raise InvalidArgumentError(
            f"{what} is for {side} of 32, 64 or 128, got blocks of {tuple(block_shape)}"
        )


def _check_array(
    name: str, array: Tensor, form: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if array.shape != shape or not array.is_contiguous() or dtype not in (None, array.dtype):
        wanted = "" if dtype is None else f" of {dtype}"
        raise InvalidArgumentError(
            f"{name}: a contiguous tensor {form} = {list(shape)}{wanted} expected, "
            f"got shape {list(array.shape)} with strides {array.stride()} of {array.dtype}"
        )


def check_mask(values: Tensor, mask: Tensor, transposed: bool) -> None:
    """Of plain values that are to be compressed, and which of them are kept."""
    if values.dim() != 3 or values.dtype not in {**DTYPES, **QUANTIZED} or not values.is_contiguous():
        raise InvalidArgumentError(
            f"values: a contiguous tensor [nnz, bn, bk] of a dtype that values have expected, "
            f"got shape {list(values.shape)} with strides {values.stride()} of {values.dtype}"
        )
    check_block_shape(values.shape[1:])
    check_compressible("values: 2:4", values.shape[1:], transposed)
    _check_array("mask", mask, "like values", tuple(values.shape), torch.bool)
    _check_same_device("mask", mask, "values", values)


def check_stored(values: Tensor, metadata: Tensor | None, scales: Tensor | None) -> None:
    """Of values that are to be expanded."""
    if values.dim() != 3:
        raise InvalidArgumentError(f"values: [nnz, bn, bk] or [nnz, bn, bk / 2] expected, got {values.shape}")
    nnz, bn, columns = values.shape
    block_shape = check_block_shape((bn, columns * (1 if metadata is None else 2)))
    sizes = values.new_empty(nnz, device="meta")
    index = Index(sizes, sizes, sizes, (bn, block_shape[1]), block_shape)
    _check_stored("values", values, index, metadata, scales)
    if scales is None and values.dtype not in DTYPES:
        raise InvalidArgumentError(f"values: dtype of activations expected, got {values.dtype}")


def check_dense(dense: Tensor, index: Index) -> None:
    if dense.shape != index.shape:
        raise InvalidArgumentError(f"dense: shape {index.shape} expected, got {tuple(dense.shape)}")
    _check_device("dense", dense, index)


def _check_device(name: str, tensor: Tensor, index: Index) -> None:
    if tensor.device != index.col_indices.device:
        raise InvalidArgumentError(
            f"{name}: device {index.col_indices.device} of the pattern expected, got {tensor.device}"
        )


def check_like_product(name: str, tensor: Tensor, y: Tensor) -> Tensor:
    """The tensor, if it can be combined with a product, element by element."""
    _check_added(name, tensor, y.shape, "the product", y)
    return tensor


def check_factor(name: str, factor: Tensor, values: Tensor) -> None:
    """That values can be multiplied by it in place."""
    sides = zip(reversed(factor.shape), reversed(values.shape), strict=False)
    if factor.dim() > values.dim() or any(side not in (1, whole) for side, whole in sides):
        raise InvalidArgumentError(
            f"{name} must have a shape that broadcasts to {list(values.shape)}, got {list(factor.shape)}"
        )
    if factor.is_complex():
        raise InvalidArgumentError(f"{name} must be real, got {factor.dtype}")
    if factor.dim():
        _check_same_device(name, factor, "values", values)


def is_misaligned(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.data_ptr() % ALIGNMENT != 0


def _check_added(name: str, tensor: Tensor, shape: tuple[int, ...], like_name: str, like: Tensor) -> None:
    if tensor.shape != shape:
        raise InvalidArgumentError(f"{name}: shape {tuple(shape)} expected, got {tuple(tensor.shape)}")
    _check_alike(name, tensor, like_name, like)


def _check_alike(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        raise InvalidArgumentError(f"{name}: dtype {like.dtype} of {like_name} expected, got {tensor.dtype}")
    _check_same_device(name, tensor, like_name, like)


def _check_same_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise InvalidArgumentError(
            f"{name}: device {like.device} of {like_name} expected, got {tensor.device}"
        )


def _overlap(operand: Tensor, out: Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    first, second = _range(operand), _range(out)
    return first[0] < second[1] and second[0] < first[1]


def _range(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
