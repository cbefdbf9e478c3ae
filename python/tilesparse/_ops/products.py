"""The products as operators: kernels, gradients, and counts of their work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._checks import DTYPES, Index, block_columns, check_mask, check_stored
from .._runtime import device, launch
from .._runtime.launch import compress, dds, empty_compressed, expand, gather, sdd, sdd_into
from .._runtime.pattern_cache import Prepared
from ..errors import InvalidArgumentError, UnsupportedError
from . import schemas
from .autograd import Tensors, call, records_gradient
from .epilogue import bias_gradient, weight_and_bias_gradients
from .schemas import differentiable, register, register_plainly

# ---- kernels: take two factors, or one and None, a pattern, and the rest of `call`'s arguments ----


_dds_nt = partial(dds, device.DDS_NT)
_dds_nn = partial(dds, device.DDS_NN)


def _dds_nt_through(
    x: Tensor,
    values: Tensor,
    pattern: Prepared,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    column_major: bool,
    compressed: Tensor,
    metadata: Tensor,
    *_: Tensor | None,
) -> Tensor:
    """Multiply by compressed values in place of the dense blocks, which get the gradient."""
    return _dds_nt(x, compressed, pattern, bias, residual, activation, column_major, metadata)


def _sdd_tn(y: Tensor, x: Tensor, pattern: Prepared, *_: object) -> Tensor:
    return sdd(y, x, pattern)


def _sdd_tn_into(y: Tensor, x: Tensor, pattern: Prepared, out: Tensor, accumulate: bool) -> None:
    sdd_into(y, x, out, pattern, accumulate)


def _expand(values: Tensor, _: None, pattern: Prepared, *__: object) -> Tensor:
    return expand(values, pattern)


def _gather(dense: Tensor, _: None, pattern: Prepared, *__: object) -> Tensor:
    return gather(dense, pattern)


# ---- gradients ----


def _dds_nt_gradients(
    grad: Tensor, x: Tensor, values: Tensor, index: Index, needs: Sequence[bool], *extras: Any
) -> Tensors:
    stored, gate = extras[:3], extras[3:]
    refuse_gradient(needs[1], *stored)
    refuse_fused_gate(*gate)
    return (
        call(DDS_NN, grad, values, index, extras=stored) if needs[0] else None,
        *other_gradients(grad, x, index, needs),
    )


def other_gradients(grad: Tensor, x: Tensor, index: Index, needs: Sequence[bool]) -> Tensors:
    """Return the gradients of values, bias and residual."""
    of_residual = grad if needs[3] else None
    both = weight_and_bias_gradients(grad, x, index) if needs[1] and needs[2] else None
    if both is not None:
        return *both, of_residual
    return (
        call(SDD_TN, grad, x, index) if needs[1] else None,
        bias_gradient(grad) if needs[2] else None,
        of_residual,
    )


def refuse_fused_gate(gate: Tensor | None = None) -> None:
    """Raise if a gradient is needed through a gate that the product has multiplied by."""
    if gate is not None:
        raise UnsupportedError(
            "gate must be None where a gradient is recorded: a fused gate has none; functional.linear "
            "multiplies by it after the product"
        )


def refuse_gradient(
    needed: bool, metadata: Tensor | None = None, scales: Tensor | None = None, transposed: bool = False
) -> None:
    """Raise if a gradient is needed of values that are stored in fewer bytes."""
    if needed and (metadata is not None or scales is not None):
        raise UnsupportedError(
            "values must be dense blocks to have a gradient: 2:4 and storages of 8 or 4 bits have none; "
            "train dense blocks, with a mask for 2:4"
        )


def _dds_nt_through_gradients(
    grad: Tensor,
    x: Tensor,
    values: Tensor,
    index: Index,
    needs: Sequence[bool],
    compressed: Tensor,
    metadata: Tensor,
    transposed: Tensor | None,
    transposed_metadata: Tensor | None,
) -> Tensors:
    kept: tuple[Any, ...] = compressed, (metadata, None, False)
    if needs[0] and records_gradient((values,)):  # of the gradient, which passes through here, too
        plain = dequantize_values(compressed, metadata, None, values.dtype)
        kept = plain + (values - values.detach()), ()
    elif transposed is not None:
        kept = transposed, (transposed_metadata, None, True)
    return (
        call(DDS_NN, grad, kept[0], index, extras=kept[1]) if needs[0] else None,
        *other_gradients(grad, x, index, needs),  # as if the weight were plain
    )


def _dds_nn_gradients(
    grad: Tensor, y: Tensor, values: Tensor, index: Index, needs: Sequence[bool], *stored: Any
) -> Tensors:
    refuse_gradient(needs[1], *stored)
    return (
        call(DDS_NT, grad, values, index, extras=stored) if needs[0] else None,
        call(SDD_TN, y, grad, index) if needs[1] else None,
    )


def _sdd_tn_gradients(grad: Tensor, y: Tensor, x: Tensor, index: Index, needs: Sequence[bool]) -> Tensors:
    values = grad.contiguous()
    return (
        call(DDS_NT, x, values, index) if needs[0] else None,
        call(DDS_NN, y, values, index) if needs[1] else None,
    )


def _expand_gradients(grad: Tensor, _: Tensor, __: Tensor, index: Index, needs: Sequence[bool]) -> Tensors:
    return (call(GATHER, grad, None, index),)


def _gather_gradients(grad: Tensor, _: Tensor, __: Tensor, index: Index, needs: Sequence[bool]) -> Tensors:
    return (call(EXPAND, grad.contiguous(), None, index),)


# ---- registration ----


DDS_NT = differentiable("dds_nt", 2, (_dds_nt, schemas.dds_nt_fake, _dds_nt_gradients), 2, 2, looks=True)
DDS_NN = differentiable("dds_nn", 2, (_dds_nn, schemas.dds_nn_fake, _dds_nn_gradients), 0, 1)
_THROUGH = _dds_nt_through, schemas.dds_nt_through_fake, _dds_nt_through_gradients
DDS_NT_THROUGH = differentiable("dds_nt_through", 2, _THROUGH, 2, 2, looks=True)
SDD_TN = differentiable("sdd_tn", 2, (_sdd_tn, schemas.sdd_tn_fake, _sdd_tn_gradients))
EXPAND = differentiable("expand", 1, (_expand, schemas.expand_fake, _expand_gradients), looks=True)
GATHER = differentiable("gather", 1, (_gather, schemas.gather_fake, _gather_gradients))
SDD_TN_INTO = register("sdd_tn_into", 2, _sdd_tn_into, schemas.sdd_tn_into_fake)


# ---- work ----


def flops(
    first: Sequence[int], _: Sequence[int], crow: Any, col: Sequence[int], *rest: Any, **__: Any
) -> int:
    """Count two operations for each kept element and token."""
    block_shape = rest[2]
    tokens = math.prod(first[:-1])
    return 2 * tokens * col[0] * int(block_shape[0] * block_shape[1])


for _name in ("dds_nt", "dds_nt_through", "dds_nn", "sdd_tn", "sdd_tn_with_bias", "sdd_tn_into"):
    register_flop_formula(getattr(torch.ops.tilesparse, _name))(flops)


def _compress(values: Tensor, mask: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor]:
    check_mask(values, mask, transposed)
    return compress(values, mask, transposed)


def _compress_fake(values: Tensor, mask: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor]:
    check_mask(values, mask, transposed)
    return empty_compressed(values, transposed)


def _dequantize_values(values: Tensor, metadata: Tensor | None, scales: Tensor | None, code: int) -> Tensor:
    dtype = _checked_dtype(values, metadata, scales, code)
    return launch.dequantize_values(values, metadata, scales, dtype)


def _dequantize_values_fake(
    values: Tensor, metadata: Tensor | None, scales: Tensor | None, code: int
) -> Tensor:
    dtype = _checked_dtype(values, metadata, scales, code)
    of_values = values.dtype if scales is None else dtype
    return values.new_empty(*values.shape[:2], block_columns(values, metadata), dtype=of_values)


def _checked_dtype(values: Tensor, metadata: Tensor | None, scales: Tensor | None, code: int) -> torch.dtype:
    if not 1 <= code <= len(DTYPES):
        raise InvalidArgumentError(f"dtype must be a number from 1 to {len(DTYPES)}, got {code}")
    check_stored(values, metadata, scales)
    return list(DTYPES)[code - 1]


COMPRESS = register_plainly("compress", _compress, _compress_fake)
_DEQUANTIZE_VALUES = register_plainly("dequantize_values", _dequantize_values, _dequantize_values_fake)


def dequantize_values(
    values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantize and decompress stored values; see `storage.dequantize`."""
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype must be one of {list(DTYPES)}, got {dtype}")
    plain: Tensor = _DEQUANTIZE_VALUES(values, metadata, scales, DTYPES[dtype])
    return plain
