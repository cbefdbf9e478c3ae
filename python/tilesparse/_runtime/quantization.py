"""Activations in 8 bits, by the library's kernels."""

from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from .. import _C
from .._checks import DTYPES, QUANTIZED, SCALE_GROUP, check_quantizable
from ..errors import InvalidArgumentError
from .device import on
from .layout import empty_group_scales, row_major
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
    _fill(x, values, scales)
    return values, scales


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values [..., features], scales [..., features / 128]) of activations in float8_e4m3fn.

    Scales of one group of all tokens lie side by side.
    """
    values, scales = empty_quantized_groups(x)
    _fill(x, values, scales, scales.stride(-1))
    return values, scales


def _fill(x: Tensor, values: Tensor, scales: Tensor, scales_ld: int = 0) -> None:
    """Write values and scales of x; ``scales_ld``: of those of groups."""
    if x.numel() == 0:
        scales.fill_(least_scale())  # of tokens without features, as of zeros
        return
    features = x.shape[-1]
    x, stride = row_major(x)
    here = not x.is_cuda or x.get_device() == current_device()
    with nullcontext() if here else on(x.device):
        _C.quantize(
            int(x.is_cuda),
            DTYPES[x.dtype],
            QUANTIZED[values.dtype],
            x.numel() // features,
            features,
            (x.data_ptr(), stride),
            (values.data_ptr(), features),
            scales.data_ptr(),
            current_stream(x.get_device()) if x.is_cuda else 0,
            scales_ld,
        )


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


def empty_quantized_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Check x, and allocate what `quantize_groups` returns."""
    check_quantizable(x)
    if x.dim() == 0 or x.shape[-1] % SCALE_GROUP:
        raise InvalidArgumentError(
            f"x must be [..., features] with a multiple of {SCALE_GROUP} features, got shape {tuple(x.shape)}"
        )
    values = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return values, empty_group_scales(x, x.shape[:-1], x.shape[-1] // SCALE_GROUP)
