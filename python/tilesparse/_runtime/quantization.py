"""Activations in 8 bits, by the library's kernels."""

from contextlib import nullcontext

import torch
from torch import Tensor

from .. import _C
from .._checks import DTYPES, QUANTIZED
from .device import on
from .layout import row_major
from .private import current_device, current_stream


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (values [..., features], scales [...]) of activations whose dtype and features were checked."""
    values, scales = empty_quantized(x, dtype)
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


def empty_quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate what `quantize` returns."""
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)
