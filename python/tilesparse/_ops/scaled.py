"""Linear layers that multiply in 8 bits: x is quantized by token or by group, weights by feature or block."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._checks import Index, check_factor_scales, check_one, check_quantizable, is_inside
from .._runtime import values as _values
from .._runtime.choice import multiplies_as_decode
from .._runtime.lookup import prepared
from .._runtime.prepared import Prepared
from .._runtime.private import is_any_autocast_enabled, transforms_active
from .._runtime.scaled import dds_quantized
from . import fakes as _fakes
from .activations import activation_code
from .autocast import autocast
from .autograd import Tensors, call, is_plain, records_gradient
from .linear import combined, linear_on
from .products import DDS_NN, flops, other_gradients, refuse_fused_gate, refuse_gradient
from .quantization import quantized_for
from .register import differentiable, register


def quantized_linear_on(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    index: Index,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    feature_major: bool = False,
    policy: str = "sparse",
    gate: Tensor | None = None,
    fast: bool = True,
    metadata: Tensor | None = None,
) -> Tensor:
    """Compute `functional.quantized_linear` with the pattern as an `Index`."""
    code = activation_code(activation)
    if is_any_autocast_enabled():
        x, bias, residual, gate = autocast(x, bias, residual, gate)
    if policy == "dense" or multiplies_as_decode(x, index):
        check_quantizable(x)  # the rest is checked as for other products
        refuse_gradient(records_gradient((values,)), None, scales)
        stored = metadata, stored_scales_on(scales, values, index)
        return linear_on(x, values, index, bias, activation, residual, feature_major, policy, stored, gate)
    tensors = x, values, bias, residual, gate
    direct, recorded = is_plain((*tensors, scales, metadata)), records_gradient(tensors)
    of_x = quantized_for(values, x, direct, is_inside(scales))
    if direct and not recorded:
        pattern = prepared(index, DDS_NT_QUANTIZED.looks)
        return dds_quantized(
            x, values, pattern, bias, residual, code, feature_major, scales, gate, metadata, *of_x, fast
        )
    refuse_gradient(recorded and values.requires_grad, None, scales)
    if (code == 0 and gate is None) or not (recorded or transforms_active()):
        extras = scales, gate, metadata, *of_x, fast
        return call(DDS_NT_QUANTIZED, x, values, index, bias, residual, code, feature_major, extras)
    check_one(residual, gate)
    y = call(DDS_NT_QUANTIZED, x, values, index, bias, extras=(scales, None, metadata, *of_x, fast))
    return combined(y, activation, residual, gate)


def stored_scales_on(scales: Tensor, values: Tensor, index: Index) -> Tensor:
    """Return the scales as those of values that are dequantized, of rows of blocks or of blocks."""
    if not is_inside(scales):
        return row_scales_on(scales, index)
    check_factor_scales(scales, values, index)
    return scales.flatten()


def row_scales_on(scales: Tensor, index: Index) -> Tensor:
    """Return the scales of the rows of blocks [nnz, bn], kept ones of packed layers; only to be read."""
    if is_plain((scales,)):
        return _values.kept_row_scales(scales, prepared(index))
    made: Tensor = _ROW_SCALES(scales, *index)
    return made


def _row_scales(scales: Tensor, _: None, pattern: Prepared, *__: object) -> Tensor:
    return _values.row_scales(scales, pattern)


def _gradients(
    grad: Tensor,
    x: Tensor,
    values: Tensor,
    index: Index,
    needs: Sequence[bool],
    scales: Tensor,
    gate: Tensor | None,
    metadata: Tensor | None,
) -> Tensors:
    """Return the gradients as if x had not been rounded (straight-through)."""
    refuse_gradient(needs[1], None, scales)
    refuse_fused_gate(gate)
    of_x = None
    if needs[0]:
        stored = metadata, stored_scales_on(scales, values, index)
        of_x = call(DDS_NN, grad, values, index, extras=(*stored, False))
    return of_x, *other_gradients(grad, x, index, needs)


_ROW_SCALES = register("row_scales", 1, _row_scales, _fakes.row_scales_fake)
DDS_NT_QUANTIZED = differentiable(
    "dds_nt_quantized",
    2,
    (dds_quantized, _fakes.dds_nt_quantized_fake, _gradients),
    2,
    2,
    looks=True,
    kept=slice(3),
)
register_flop_formula(torch.ops.tilesparse.dds_nt_quantized)(flops)
