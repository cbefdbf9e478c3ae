"""What arguments must be, checked before anything is computed."""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import InvalidArgumentError, InvalidTypeError

BLOCK_SIZES = (16, 32, 64, 128)
INT32_MAX = 2**31 - 1
POLICIES = ("sparse", "auto", "dense")
DTYPES = {torch.float64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}
QUANTIZED = {torch.int8: 5, torch.float8_e4m3fn: 6}  # of values and activations that have scales
PACKED = torch.uint8  # two values of int4, the first in the low four bits
SCALE_GROUP = 128  # features of x that have one scale, and sides of a block, of scales inside of the sums
SCALED = {**QUANTIZED, PACKED: 7}  # of all values that have scales
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # magnitudes that become those of scales
EXACT_FEATURES = 1 << 17  # below which sums of int8 products stay below 2^31


def check_block_shape(block_shape: int | Sequence[int]) -> tuple[int, int]:
    """Return (bn, bk); one number stands for square blocks."""
    sizes = block_shape if isinstance(block_shape, Sequence | Tensor) else (block_shape, block_shape)
    try:
        bn, bk = (as_integer(size) for size in sizes)
        if bn in BLOCK_SIZES and bk in BLOCK_SIZES:
            return bn, bk
    except (TypeError, ValueError):
        pass
    raise InvalidArgumentError(
        f"block_shape must be (bn, bk) of 16, 32, 64 or 128, or one of these numbers for both, "
        f"got {block_shape}"
    )


def check_module(model: object) -> None:
    """Refuse anything but a module."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def check_content(name: str, tensor: Tensor) -> None:
    """Refuse a tensor on the meta device, which has no numbers."""
    if tensor.is_meta:
        raise InvalidArgumentError(f"{name} must be a tensor with content, got one on the meta device")


def check_text(name: str, text: object) -> None:
    """Refuse anything but a string."""
    if not isinstance(text, str):
        raise InvalidTypeError(f"{name} must be a string, got {type(text).__name__}")


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


def is_sequence(value: object) -> bool:
    """Return True for objects with a length and elements: arrays and tensors too, but not text or models."""
    if isinstance(value, Tensor):
        return is_tensor(value) and not value.is_meta and not value.is_complex() and value.dim() > 0
    has_elements = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return has_elements and not isinstance(value, str | bytes | Mapping | nn.Module)


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
    except (AssertionError, RuntimeError, TypeError) as error:  # the first of a PyTorch without that device
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
    """Return validated (shape, block_shape, grid)."""
    bn, bk = check_block_shape(block_shape)
    if not is_sequence(shape) or len(shape) != 2:
        raise InvalidArgumentError(f"shape must be (out_features, in_features), got {shape!r}")
    features = []
    for name, size, block in (("out_features", shape[0], bn), ("in_features", shape[1], bk)):
        try:
            number = as_integer(size)
        except TypeError:
            number = 0
        if number % block or not 0 < number <= INT32_MAX:
            raise InvalidArgumentError(
                f"{name} must be a positive multiple of the block size {block} below 2^31, got {size}"
            )
        features.append(number)
    return (features[0], features[1]), (bn, bk), (features[0] // bn, features[1] // bk)
