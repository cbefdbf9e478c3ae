"""The decision of ``policy="auto"``, and what was measured and counts for it."""

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._checks import DTYPES, Index
from .device import DDS_NT
from .launch import known_kernels, preference
from .pattern_cache import MAX_CALLS, forget_calls
from .torch_private import constant_when_compiled, is_exporting, of_example, tf32_allowed

DEQUANTIZE_AND_RUN_DENSE = -1  # in place of a kernel
# Up to as many tokens a product on a GPU is bound by reading the weight, and quantizing x is not worth it.
DECODE_TOKENS = 64
_SPARSE, _AUTO = 0, 1  # TS_POLICY_SPARSE and TS_POLICY_AUTO
_COMPRESSED = 1  # TS_STORAGE_2_4


def prefers_dense(x: Tensor, index: Index, storage: dict[str, Any]) -> bool:
    """Return True if writing W out and a dense product are estimated to be faster than the sparse product."""
    what = _to_choose_by(x, index)
    faster: bool = what is not None and _is_dense_faster(*what, _AUTO, tuple(storage.items()))
    return faster


def multiplies_as_decode(x: Tensor, index: Index) -> bool:
    """Return True if weights in 8 bits are better multiplied in the dtype of x, as in decode on a GPU.

    A program made by torch.export (strict=False) has one answer for all numbers of tokens, as in `_tokens`.
    """
    tokens: int | None = x.numel() // index.shape[1] if x.is_cuda else None
    if tokens is not None and is_exporting() and not torch.compiler.is_dynamo_compiling():
        tokens = of_example(tokens)
    return tokens is not None and tokens <= DECODE_TOKENS


def multiplies_compressed(x: Tensor, index: Index) -> bool:
    """Return True if the kernel chosen on this device multiplies 2:4 values as they are stored."""
    what = _to_choose_by(x, index)
    reads: bool = what is not None and _is_compressed_read(*what, _SPARSE, (("storage", _COMPRESSED),))
    return reads


def _to_choose_by(x: Tensor, index: Index) -> tuple[Any, ...] | None:
    """Return the properties of a product that decide on its kernel; None where there is no choice."""
    if x.device.type not in _devices_to_choose_for or x.dtype not in DTYPES:
        return None
    tokens, nnz = _tokens(x.numel() // index.shape[1]), index.col_indices.shape[0]
    if tokens is None:
        return None
    tf32 = x.is_cuda and x.dtype == torch.float32 and tf32_allowed()
    return tokens, nnz, index.shape, index.block_shape, x.dtype, x.get_device(), tf32


# Devices with estimates, or with measurements, as the CPU may have.
_devices_to_choose_for = {"cuda"}


def _tokens(tokens: int) -> int | None:
    """Return the number of tokens to choose for, None if it is unknown.

    In compiled code all token counts up to the next power of two share a choice. A program made by
    torch.export (strict=False) has one choice for all, that of its example.
    """
    if is_exporting() and not torch.compiler.is_dynamo_compiling():
        return of_example(tokens)
    if not torch.compiler.is_compiling():
        return tokens
    limit = 1
    while limit < tokens:
        limit *= 2
    return limit


@constant_when_compiled
def _is_dense_faster(*what: Any) -> bool:
    return _selected(*what, preference()) == DEQUANTIZE_AND_RUN_DENSE


@constant_when_compiled
def _is_compressed_read(*what: Any) -> bool:
    return bool(known_kernels()[_selected(*what, preference())].storages >> _COMPRESSED & 1)


@lru_cache(MAX_CALLS)
def _selected(
    tokens: int,
    nnz: int,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    dtype: torch.dtype,
    device: int,
    tf32: bool,
    policy: int,
    storage: tuple[tuple[str, Any], ...],
    prefer: str,
) -> int:
    product = _C.Product(
        _C.Pattern(*block_shape, *shape, nnz, 0, 0, 0),
        DDS_NT,
        DTYPES[dtype],
        int(device >= 0),
        tokens,
        precision=int(tf32),
        policy=policy,
        ldx=shape[1],
        ldy=shape[0],
        prefer=prefer,
        **dict(storage),
    )
    return product.select(_device_info(device))[0]


@cache
def _device_info(ordinal: int) -> _C.DeviceInfo:
    """Describe a CUDA device, or the CPU, which PyTorch numbers -1."""
    return _C.device_info(int(ordinal >= 0), ordinal)


def add_measurement(
    product: _C.Product, device: _C.DeviceInfo, kernel: int, microseconds: float, dense_microseconds: float
) -> None:
    """Add a measurement, see ``ts_measurement_add``; call `measurements_changed` after the last one."""
    product.add_measurement(device, kernel, microseconds, dense_microseconds)
    _devices_to_choose_for.add(("cpu", "cuda")[device.device])


def measurements_changed() -> None:
    """Choose the kernel of every product anew."""
    _selected.cache_clear()
    forget_calls()
