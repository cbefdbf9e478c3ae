"""Quantization of activations, as an operator, and the last one of each thread."""

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import QUANTIZED, check_quantizable
from .._runtime import quantization as _quantization
from .._runtime.private import current_stream
from ..errors import InvalidArgumentError
from .autograd import is_plain
from .register import register_plainly

_FEATURES = 16  # of which kernels read multiples


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize activations to 8 bits, see `functional.quantize`."""
    return _quantized(x, _number(dtype), is_plain((x,)))


def quantized_for(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in the dtype of a weight that it is multiplied by, with scales; only to be read.

    Layers with one input share the result in eager mode: the last one of each thread is kept while x lives,
    and is found by the identity of x and PyTorch's count of writes to it. A weight that asks again begins a
    new pass, before which x may have been written to in a way that is not counted, as by the replay of a
    CUDA graph. A compiled training step has one operator in the place of equal ones.
    """
    number = _number(weight.dtype)
    direct = is_plain((x,))
    if not (direct or is_plain((x,), profiled=True)) or not _can_be_kept(x):
        return _quantized(x, number, direct)
    stream = current_stream(x.get_device()) if x.is_cuda else 0
    key = x._version, x.data_ptr(), x.shape, x.stride(), number, stream, torch.is_inference_mode_enabled()
    holder, taker = _last.holder, weight.data_ptr()
    entry = holder[0]
    if entry is not None and entry.of() is x and entry.key == key and taker not in entry.takers:
        entry.takers.add(taker)
        return entry.result
    result = _quantized(x, number, direct)
    holder[0] = _Entry(weakref.ref(x, lambda _: _clear(holder)), key, result, {taker})
    return result


class _Entry(NamedTuple):
    """A quantization: x, what it is found by, the result, and the addresses of the weights that have it."""

    of: Callable[[], Tensor | None]
    key: tuple[object, ...]
    result: tuple[Tensor, Tensor]
    takers: set[int]


class _Last(threading.local):
    """The last quantization of a thread, in a list, as another thread may be the one that drops x."""

    def __init__(self) -> None:
        self.holder: list[_Entry | None] = [None]


_last = _Last()


def _clear(holder: list[_Entry | None]) -> None:
    holder[0] = None


def _can_be_kept(x: Tensor) -> bool:
    """Return False where writes to x are not counted, and while a graph is captured, which has to."""
    return not x.is_inference() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _quantized(x: Tensor, code: int, direct: bool) -> tuple[Tensor, Tensor]:
    if direct:
        return _quantize(x, code)
    values, scales = _QUANTIZE(x.detach(), code)
    return values, scales


def _number(dtype: torch.dtype) -> int:
    if dtype not in QUANTIZED:
        raise InvalidArgumentError(f"dtype must be one of {list(QUANTIZED)}, got {dtype}")
    return QUANTIZED[dtype]


def _quantize(x: Tensor, code: int) -> tuple[Tensor, Tensor]:
    return _quantization.quantize(x, _checked_dtype(x, code))


def _quantize_fake(x: Tensor, code: int) -> tuple[Tensor, Tensor]:
    return _quantization.empty_quantized(x, _checked_dtype(x, code))


def _checked_dtype(x: Tensor, code: int) -> torch.dtype:
    check_quantizable(x)
    if x.dim() == 0 or x.shape[-1] % _FEATURES:
        raise InvalidArgumentError(
            f"x must be [..., features] with a multiple of {_FEATURES} features, got shape {tuple(x.shape)}"
        )
    for dtype, number in QUANTIZED.items():
        if number == code:
            return dtype
    raise InvalidArgumentError(f"dtype must be one of {list(QUANTIZED.values())}, got {code}")


_QUANTIZE = register_plainly("quantize", _quantize, _quantize_fake)
