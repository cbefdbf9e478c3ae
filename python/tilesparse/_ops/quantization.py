"""Quantization of activations, as an operator."""

import torch
from torch import Tensor

from .._checks import DTYPES, QUANTIZED
from .._runtime import quantization as _quantization
from ..errors import InvalidArgumentError
from .register import register_plainly

_FEATURES = 16  # of which kernels read multiples


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize activations to 8 bits, see `functional.quantize`."""
    if dtype not in QUANTIZED:
        raise InvalidArgumentError(f"dtype must be one of {list(QUANTIZED)}, got {dtype}")
    values, scales = _QUANTIZE(x.detach(), QUANTIZED[dtype])
    return values, scales


def _quantize(x: Tensor, code: int) -> tuple[Tensor, Tensor]:
    return _quantization.quantize(x, _checked_dtype(x, code))


def _quantize_fake(x: Tensor, code: int) -> tuple[Tensor, Tensor]:
    return _quantization.empty_quantized(x, _checked_dtype(x, code))


def _checked_dtype(x: Tensor, code: int) -> torch.dtype:
    if x.dtype not in DTYPES or x.dtype == torch.float64:
        raise InvalidArgumentError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % _FEATURES:
        raise InvalidArgumentError(
            f"x must be [..., features] with a multiple of {_FEATURES} features, got shape {tuple(x.shape)}"
        )
    for dtype, number in QUANTIZED.items():
        if number == code:
            return dtype
    raise InvalidArgumentError(f"dtype must be one of {list(QUANTIZED.values())}, got {code}")


_QUANTIZE = register_plainly("quantize", _quantize, _quantize_fake)
