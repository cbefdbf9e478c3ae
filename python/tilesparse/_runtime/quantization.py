"""Activations in 8 bits, by the library's kernels."""

from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from .. import _C
from .._checks import DTYPES, QUANTIZED, check_quantizable
from ..errors import InvalidArgumentError
from .device import on
from .layout import row_major
from .native import QUANTIZER
from .private import current_device, current_stream

_FEATURES = 16  # of which kernels read multiples


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (values [..., features], scales [...]) of activations; what no kernel can read is refused."""
    result: tuple[Tensor, Tensor] | None = QUANTIZER.run(x, QUANTIZED[dtype])
    return _quantized(x, dtype) if result is None else result


def _quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize what the native module does not read, or what it does not know yet."""
    values, scales = empty_quantized(x, dtype)
    QUANTIZER.keep(values.new_empty(0), scales.new_empty(0), QUANTIZED[dtype], Tensor.new_empty)
    if x.numel() == 0:
        return values, scales
    features = x.shape[-1]
    x, stride = row_major(x)
    here = not x.is_cuda or x.get_device() == current_device()
    with nullcontext() if here else on(x.device):
        _C.quantize(
            int(x.is_cuda),
            DTYPES[x.dtype],
            QUANTIZED[dtype],
            x.numel() // features,
            features,
            (x.data_ptr(), stride),
            (values.data_ptr(), features),
            scales.data_ptr(),
            current_stream(x.get_device()) if x.is_cuda else 0,
        )
    return values, scales


@cache
def least_scale() -> float:
    """Return the least scale that a token can have: the one of zeros."""
    return float(_quantized(torch.zeros(1, _FEATURES, device="cpu"), torch.int8)[1])


def empty_quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Check x, and allocate what `quantize` returns."""
    check_quantizable(x)
    if x.dim() == 0 or x.shape[-1] % _FEATURES:
        raise InvalidArgumentError(
            f"x must be [..., features] with a multiple of {_FEATURES} features, got shape {tuple(x.shape)}"
        )
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)
