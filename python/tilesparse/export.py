"""Block-sparse products in PyTorch's own operators, for exported programs that run without this package."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._checks import LARGEST, PACKED, QUANTIZED, SCALE_GROUP, Index, Operands, is_inside
from ._ops.autograd import OF_DDS_NN, OF_DDS_NT, records_of
from ._ops.epilogue import activated
from ._runtime.device import ACTIVATIONS
from ._runtime.launch import least_scale
from .errors import UnsupportedError

__all__ = ["decompositions"]

_FIELDS = len(Index._fields)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a table for `torch.export.ExportedProgram.run_decompositions`.

    The products of an exported model become dense ones of a weight that the program writes out, zeros
    included, from blocks and pattern. That is what ONNX and other targets without block-sparse operators can
    run; those that fold constants keep the dense weight, and need the memory and time of a dense layer.
    `torch.onnx.export` takes the result with ``dynamo=True``.

    Returns:
        Functions by operator: of forward products, and of the gradient of their input.

    Raises:
        UnsupportedError: when the table is applied to weights that are 2:4 in another storage than "plain".
    """
    ops: Any = torch.ops.tilesparse
    return {
        ops.dds_nt.default: _dds_nt,
        ops.dds_nn.default: _dds_nn,
        ops.row_scales.default: _row_scales,
        ops.quantize.default: partial(_quantize, least_scale()),
        ops.quantize_groups.default: partial(_quantize_groups, least_scale()),
        ops.expand.default: _expand,
        ops.dequantize_values.default: lambda values, metadata, scales, _: _plain(values, metadata, scales),
    }


def _dds_nt(x: Tensor, values: Tensor, *rest: Any, **named: Any) -> Any:
    pattern, (epilogue, operands) = rest[:_FIELDS], records_of(OF_DDS_NT, *rest[_FIELDS:], **named)
    if operands.offsets is not None or operands.compressed is not None:
        return NotImplemented
    bias, residual, activation, _, gate = epilogue
    if operands.fast is not None:
        y = _product_of_eight_bits(values, pattern, operands)
        bias, residual = (None if added is None else added.float() for added in (bias, residual))
        y = y if bias is None else y + bias
    else:
        y = torch.nn.functional.linear(x, _weight(x, values, pattern, operands), bias)
    name = list(ACTIVATIONS)[activation]
    if gate is not None:
        return (y * activated(gate, name).to(y.dtype)).to(x.dtype)
    y = activated(y, name)
    return (y if residual is None else y + residual).to(x.dtype)


def _product_of_eight_bits(values: Tensor, pattern: tuple[Any, ...], operands: Operands) -> Tensor:
    metadata, scales, _, _, _, _, x, x_scales = operands.tensors
    assert scales is not None and x is not None and x_scales is not None
    linear = torch.nn.functional.linear
    if is_inside(scales):
        weight = _expand(values.float() * scales[..., None], *pattern)
        return linear((_groups(x.float()) * x_scales[..., None]).flatten(-2), weight)
    weight = _expand(_plain(values, metadata, None).float(), *pattern)
    return linear(x.float(), weight) * x_scales[..., None] * scales


def _row_scales(scales: Tensor, *pattern: Any) -> Tensor:
    _, col, slot, _, (bn, _) = pattern
    in_order = scales.view(-1, bn)[_block_rows(pattern[0], col)]
    return torch.empty_like(in_order).index_put((slot.long(),), in_order)


def _quantize(least: float, x: Tensor, code: int) -> tuple[Tensor, Tensor]:
    dtype = {number: dtype for dtype, number in QUANTIZED.items()}[code]
    largest = LARGEST[dtype]
    x = x.float()
    is_finite = x.isfinite().all(-1)
    scales = (x.abs().amax(-1) / largest).clamp(min=least)
    scaled = torch.where(is_finite[..., None], x * (1 / scales)[..., None], 0.0).clamp(-largest, largest)
    values = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return values, torch.where(is_finite, scales, torch.nan)


def _quantize_groups(least: float, x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = _quantize(least, _groups(x), QUANTIZED[torch.float8_e4m3fn])
    return values.flatten(-2), scales


def _groups(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // SCALE_GROUP, SCALE_GROUP)


def _dds_nn(y: Tensor, values: Tensor, *rest: Any, **named: Any) -> Any:
    _, operands = records_of(OF_DDS_NN, *rest[_FIELDS:], **named)
    if operands.offsets is not None:
        return NotImplemented
    return y @ _weight(y, values, rest[:_FIELDS], operands)


def _weight(like: Tensor, values: Tensor, pattern: tuple[Any, ...], operands: Operands) -> Tensor:
    plain = _plain(values, operands.metadata, operands.scales).to(like.dtype)
    return _expand(plain.transpose(1, 2) if operands.transposed else plain, *pattern)


def _plain(values: Tensor, metadata: Tensor | None, scales: Tensor | None) -> Tensor:
    if metadata is not None:
        raise UnsupportedError(
            "storage must be 'plain', or 8 or 4 bits without 2:4, where a program is decomposed, got "
            "metadata of 2:4; call to_storage('plain') before the export"
        )
    if scales is None:
        return values
    if values.dtype == PACKED:
        values = _unpacked(values)
    return values.float() * scales.view(*scales.shape, *(1,) * (3 - scales.dim()))


def _unpacked(values: Tensor) -> Tensor:
    """Return the numbers of int4, in float32."""
    codes = values.int()  # PyTorch's exporter types a shift of uint8 as int8, which ONNX Runtime refuses
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(2).float()
    return torch.where(both < 8, both, both - 16)


def _expand(
    values: Tensor, crow: Tensor, col: Tensor, slot: Tensor, shape: list[int], block_shape: list[int]
) -> Tensor:
    (out_features, in_features), (bn, bk) = shape, block_shape
    rows, cols = out_features // bn, in_features // bk
    row = _block_rows(crow, col)
    blocks = values.new_zeros(rows * cols, bn, bk)
    blocks = blocks.index_put((row * cols + col,), values[slot.long()])
    return blocks.view(rows, cols, bn, bk).transpose(1, 2).reshape(out_features, in_features)


def _block_rows(crow: Tensor, col: Tensor) -> Tensor:
    """Return the block row of each entry, in operators that exporters know: no repeat_interleave."""
    entries = torch.arange(col.shape[0], device=col.device)
    return (entries[:, None] >= crow[1:]).sum(1)
