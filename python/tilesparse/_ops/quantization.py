"""Quantization of activations, as an operator, and the last one of each thread."""

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import shown
from .._checks import QUANTIZED
from .._runtime import quantization as _quantization
from .._runtime.private import current_stream, version
from ..errors import InvalidArgumentError
from .autograd import is_plain
from .register import register_plainly


def quantize(x: Tensor, dtype: torch.dtype, per: str = "token") -> tuple[Tensor, Tensor]:
    """Quantize activations to 8 bits, see `functional.quantize`."""
    if per != "token" and (per != "group" or dtype != torch.float8_e4m3fn):
        raise InvalidArgumentError(
            f"per must be 'token', or 'group' with dtype torch.float8_e4m3fn, got {shown(per)} with {dtype}"
        )
    return _quantized(x, dtype if per == "token" else None, is_plain((x,)))


def quantized_for(weight: Tensor, x: Tensor, direct: bool, grouped: bool = False) -> tuple[Tensor, Tensor]:
    """Return x in the dtype of a weight that it is multiplied by, with scales; only to be read.

    Layers with one input share the result in eager mode: the last one of each thread is kept while x lives,
    and is found by the identity of x and PyTorch's count of writes to it. A weight that asks again begins a
    new pass, before which x may have been written to in a way that is not counted, as by the replay of a
    CUDA graph. Compiled graphs have one operator in the place of equal ones (`_libraries.inductor_hooks`).

    Args:
        weight: values in 8 bits.
        x: activations.
        direct: whether `is_plain` holds for x.
        grouped: whether each 128 features of a token have a scale of their own.
    """
    dtype = None if grouped else weight.dtype
    if not (direct or is_plain((x,), profiled=True)) or not (_counts_writes(x) or _last.constant is x):
        return _quantized(x, dtype, direct)
    stream = current_stream(x.get_device()) if x.is_cuda else 0
    form = x.data_ptr(), x.shape, x.stride(), x.dtype
    key = version(x), form, dtype, stream, torch.is_inference_mode_enabled()
    holder, taker = _last.holder, weight.data_ptr()
    entry = holder[0]
    if entry is not None and entry.of() is x and entry.key == key and taker not in entry.takers:
        entry.takers.add(taker)
        return entry.result
    result = _quantized(x, dtype, direct)
    holder[0] = _Entry(weakref.ref(x, lambda _: _clear(holder)), key, result, {taker})
    return result


class constant:
    """Have layers share the quantization of an x that nothing writes to in this context.

    So they do in inference mode, where PyTorch counts no writes, and in a CUDA graph that is captured, whose
    replays must make everything they read: nothing is kept beyond the context then.
    """

    def __init__(self, x: Tensor) -> None:
        self._x = None if _counts_writes(x) else x

    def __enter__(self) -> None:
        if self._x is not None:
            _last.holder[0], _last.constant = None, self._x

    def __exit__(self, *_: object) -> None:
        if self._x is not None:
            _last.holder[0] = _last.constant = None


class _Entry(NamedTuple):
    """A quantization: x, what it is found by, the result, and the addresses of the weights that have it."""

    of: Callable[[], Tensor | None]
    key: tuple[object, ...]
    result: tuple[Tensor, Tensor]
    takers: set[int]


class _Last(threading.local):
    """The last quantization of a thread, in a list, as another thread may be the one that drops x.

    Attributes:
        constant: what the context `constant` is about.
    """

    def __init__(self) -> None:
        self.holder: list[_Entry | None] = [None]
        self.constant: Tensor | None = None


_last = _Last()


def _clear(holder: list[_Entry | None]) -> None:
    holder[0] = None


def _counts_writes(x: Tensor) -> bool:
    """Return False where writes to x are not counted, or would not be in the replays of a captured graph."""
    return not x.is_inference() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _quantized(x: Tensor, dtype: torch.dtype | None, direct: bool) -> tuple[Tensor, Tensor]:
    """Quantize x by token, or without a dtype by groups of features."""
    if dtype is None:
        if direct:
            return _quantization.quantize_groups(x)
        values, scales = _QUANTIZE_GROUPS(x.detach())
        return values, scales
    if dtype not in QUANTIZED:
        raise InvalidArgumentError(f"dtype must be one of {list(QUANTIZED)}, got {dtype}")
    if direct:
        return _quantization.quantize(x, dtype)
    values, scales = _QUANTIZE(x.detach(), QUANTIZED[dtype])
    return values, scales


def _quantize(x: Tensor, code: int) -> tuple[Tensor, Tensor]:
    return _quantization.quantize(x, _dtype(code))


def _quantize_fake(x: Tensor, code: int) -> tuple[Tensor, Tensor]:
    return _quantization.empty_quantized(x, _dtype(code))


def _dtype(code: int) -> torch.dtype:
    for dtype, number in QUANTIZED.items():
        if number == code:
            return dtype
    raise InvalidArgumentError(f"dtype must be one of {list(QUANTIZED.values())}, got {code}")


_QUANTIZE = register_plainly("quantize", _quantize, _quantize_fake)
_QUANTIZE_GROUPS = register_plainly(
    "quantize_groups", _quantization.quantize_groups, _quantization.empty_quantized_groups
)
