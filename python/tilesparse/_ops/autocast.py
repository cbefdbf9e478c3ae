"""Casts of operands under autocast: parameters are cast once per region, as in PyTorch."""

from __future__ import annotations

import weakref
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._checks import QUANTIZED
from .._runtime.private import is_any_autocast_enabled, may_be_watched, transforms_active


def autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors as autocast casts them on the device of the first."""
    tensors = (first, *others)
    device = first.device.type
    if not is_any_autocast_enabled() or device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(_cast(tensor, dtype) if _is_castable(tensor) else tensor for tensor in tensors)


def _is_castable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return (
        tensor is not None
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.dtype not in QUANTIZED
    )


class _Casts(dict[tuple[int, torch.dtype, bool, bool], tuple[Tensor, int, Tensor]]):
    """Casts of a region: the tensor, its version at that time, and the result."""


_casts = weakref.ref(_Casts())  # of the region that has begun last, if it has not ended


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not _is_cached(tensor):
        return tensor.to(dtype)
    casts = _casts()
    if casts is None:
        casts = _begin_region(tensor)
    key = id(tensor), dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    source, version, result = casts.get(key, (None, 0, tensor))
    if source is not tensor or version != tensor._version:
        result = tensor.to(dtype)
        casts[key] = tensor, tensor._version, result
    return result


def _is_cached(tensor: Tensor) -> bool:
    """Return True for what PyTorch's autocast caches: float32 leaves that have a gradient."""
    return (
        type(tensor) is torch.nn.Parameter
        and tensor.requires_grad
        and tensor.dtype == torch.float32
        and not tensor.is_inference()
        and torch.is_autocast_cache_enabled()
        and not (is_compiling() or may_be_watched() or transforms_active())
    )


def _begin_region(like: Tensor) -> _Casts:
    """Have PyTorch's cache, which it clears at the end of a region, keep alive what is cast in this one."""
    global _casts
    casts = _Casts()
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(1, 1, device=like.device, requires_grad=True)
        product: Any = torch.mm(leaf, leaf)  # an operator whose operands autocast casts and caches
    product.grad_fn.next_functions[0][0].metadata["tilesparse"] = casts
    _casts = weakref.ref(casts)
    return casts
