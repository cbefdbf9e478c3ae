"""Products of a pattern: dds and sdd.

Everything that decides whether and how a product runs, but for the alignment of its operands, makes up a
key. Each key is checked and resolved once, so later calls cost one look-up.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._checks import (
    ALIGNMENT,
    DTYPES,
    QUANTIZED,
    check_dds,
    check_nothing_added,
    check_one,
    check_sdd,
    check_separate,
)
from . import kernels as _kernels
from .kernels import preferred
from .layout import Form, Lines, aligned, empty, like_result, result_form, usable
from .native import DDS_NN, DDS_NT, SDD_TN
from .prepared import Prepared
from .private import current_device, current_stream, tf32_allowed
from .requests import Request
from .values import expanded, storage_of

Context = tuple[int, int, int, int]  # kernel asked for, stream, current device, precision
_NUMBERS = {**DTYPES, **QUANTIZED}


def dds(
    op: int,
    source: Tensor,
    values: Tensor,
    pattern: Prepared,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    feature_major: bool = False,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    transposed: bool = False,
    gate: Tensor | None = None,
) -> Tensor:
    """Return x Wᵀ (``op`` DDS_NT) or y W (DDS_NN). With ``transposed`` the values are those of Wᵀ."""
    if transposed:
        check_nothing_added(bias, residual, activation, gate)
        pattern, op = pattern.transposed(), DDS_NN - op
    if pattern.packs and source.is_cpu and not (metadata is None and scales is None):
        values = pattern.plain.follow(expanded, values, metadata, scales, source.dtype)
        metadata = scales = None
    if pattern.on_cpu:
        # Another thread may load a weight of another size: one shape and memory, which this keeps alive.
        values = values.detach()
    # Either of the two takes the same way.
    other = check_one(residual, gate)
    gated = gate is not None
    request = (
        op,
        source,
        values,
        bias,
        other,
        activation,
        feature_major,
        metadata,
        scales,
        _kernels.asked_kernel,
        gated,
    )
    result = pattern.run(*request)
    if result is not None:
        return result
    with pattern.launching():
        return _dds(request, pattern)


def _dds(request: Request, pattern: Prepared) -> Tensor:
    """Run a product that `Prepared.run` does not know."""
    op, source, values, bias, other, activation, feature_major, metadata, scales, _, gated = request
    context = context_of(source)
    key: Hashable = (
        op,
        source.shape,
        source.stride(),
        source.dtype,
        source.get_device(),
        values.shape,
        values.stride(),
        values.dtype,
        values.get_device(),
        None if bias is None else form_of(bias),
        None if other is None else form_of(other),
        gated,
        None if metadata is None else form_of(metadata),
        None if scales is None else form_of(scales),
        activation,
        feature_major,
        context,
    )
    if pattern.packs and source.is_cuda:
        key = key, torch.cuda.is_current_stream_capturing()
    call = pattern.find(key)
    source_at, values_at = source.data_ptr(), values.data_ptr()
    other_at = 0 if other is None else other.data_ptr()
    metadata_at = 0 if metadata is None else metadata.data_ptr()
    scales_at = 0 if scales is None else scales.data_ptr()
    addresses = source_at | values_at | other_at | metadata_at
    if call is None or (addresses % ALIGNMENT and source.is_cuda):
        name, index = "x" if op == DDS_NT else "y", pattern.index()
        residual, gate = (None, other) if gated else (other, None)
        check_dds(name, source, values, index, bias, residual, metadata, scales, gate)
        (operand, lines), weight = usable(name, source), aligned(values)
        kept = None if metadata is None else aligned(metadata)
        near, other_lines = (None, None) if other is None else like_result(other, feature_major)
        if operand is not source or weight is not values or near is not other or kept is not metadata:
            residual, gate = (None, near) if gated else (near, None)
            return dds(
                op,
                operand,
                weight,
                pattern,
                bias,
                residual,
                activation,
                feature_major,
                kept,
                scales,
                gate=gate,
            )
        form = result_form(source, index.shape[op], feature_major)
        stored = storage_of(values, metadata, scales)
        added = {"residual": other_lines, "gated": gated, "activation": activation}
        product = dds_product(op, pattern, source, lines, form, context, added | stored)
        call = pattern.call(key, product, op, source.itemsize, form)
        pattern.keep(request, product, call)
    result = empty(source, call.form)
    bias = None if bias is None else bias.contiguous()
    bias_at = 0 if bias is None else bias.data_ptr()
    workspace = source.new_empty(call.workspace) if call.workspace else None
    workspace_at = 0 if workspace is None else workspace.data_ptr()
    if call.packed is not None:
        call.packed.follow(values, pattern.generation, context[1])
    if op == DDS_NT:
        x_at, y_at = source_at, result.data_ptr()
    else:
        x_at, y_at = result.data_ptr(), source_at
    call.run(x_at, y_at, values_at, bias_at, other_at, workspace_at, context[1], metadata_at, scales_at)
    return result


def sdd(y: Tensor, x: Tensor, pattern: Prepared) -> Tensor:
    """Return yᵀ x on the pattern."""
    result = pattern.run(SDD_TN, y, x, None, None, 0, False, None, None, _kernels.asked_kernel, False)
    if result is not None:
        return result
    out = x.new_empty(*pattern.values_shape)
    write_sdd(y, x, out, pattern, False)
    return out


def sdd_with_bias(y: Tensor, x: Tensor, pattern: Prepared) -> tuple[Tensor, Tensor]:
    """Return yᵀ x on the pattern and the sums over tokens of y: the gradients of weight and bias."""
    out, of_bias = x.new_empty(*pattern.values_shape), y.new_empty(pattern.shape[0])
    write_sdd(y, x, out, pattern, False, of_bias)
    return out, of_bias


def sdd_into(y: Tensor, x: Tensor, out: Tensor, pattern: Prepared, accumulate: bool) -> None:
    """Write or add yᵀ x on the pattern to ``out``."""
    check_sdd(y, x, pattern.index(), out)
    check_separate(out, y, x)
    write_sdd(y, x, out, pattern, accumulate)


def write_sdd(
    y: Tensor,
    x: Tensor,
    out: Tensor,
    pattern: Prepared,
    accumulate: bool,
    of_bias: Tensor | None = None,
    accumulate_bias: bool = False,
) -> None:
    """Write or add yᵀ x to ``out``, which is known to be contiguous, aligned, and apart from y and x.

    ``of_bias``: [out_features] for the sums over tokens of y, likewise, or None.
    """
    with pattern.launching():
        _write_sdd(y, x, out, pattern, accumulate, of_bias, accumulate_bias)


def _write_sdd(
    y: Tensor,
    x: Tensor,
    out: Tensor,
    pattern: Prepared,
    accumulate: bool,
    of_bias: Tensor | None,
    accumulate_bias: bool,
) -> None:
    context = context_of(x)
    sums_y = None if of_bias is None else (of_bias.dtype, accumulate_bias)
    key = (SDD_TN, form_of(y), form_of(x), accumulate, sums_y, out.dtype, context)
    call = pattern.find(key)
    y_at, x_at = y.data_ptr(), x.data_ptr()
    if call is None or ((y_at | x_at) % ALIGNMENT and x.is_cuda):
        check_sdd(y, x, pattern.index(), out)
        (usable_y, y_lines), (usable_x, x_lines) = usable("y", y), usable("x", x)
        if usable_y is not y or usable_x is not x:
            return _write_sdd(usable_y, usable_x, out, pattern, accumulate, of_bias, accumulate_bias)
        result_dtype = 0 if out.dtype == x.dtype else DTYPES[out.dtype]
        bias_dtype = 0 if of_bias is None or of_bias.dtype == x.dtype else DTYPES[of_bias.dtype]
        product = _product(
            SDD_TN,
            pattern,
            x,
            x_lines,
            y_lines,
            context,
            accumulate=accumulate,
            result_dtype=result_dtype,
            bias_gradient=of_bias is not None,
            bias_gradient_dtype=bias_dtype,
            accumulate_bias=accumulate_bias,
        )
        call = pattern.call(key, product, SDD_TN, x.itemsize, (out.shape, None))
        if not accumulate and of_bias is None and out.dtype == x.dtype:
            pattern.keep((SDD_TN, y, x, None, None, 0, False, None, None, context[0], False), product, call)
    workspace = x.new_empty(call.workspace) if call.workspace else None
    workspace_at = 0 if workspace is None else workspace.data_ptr()
    bias_at = 0 if of_bias is None else of_bias.data_ptr()
    call.run(x_at, y_at, out.data_ptr(), bias_at, 0, workspace_at, context[1])


def context_of(operand: Tensor) -> Context:
    """Return the state that a call depends on besides its arguments."""
    device = operand.get_device()
    if device < 0:
        return _kernels.asked_kernel, 0, device, 0
    tf32 = operand.dtype == torch.float32 and tf32_allowed()
    return _kernels.asked_kernel, current_stream(device), current_device(), int(tf32)


def form_of(tensor: Tensor) -> tuple[object, ...]:
    """Return all of a tensor but its memory. Only tensors on the CPU (-1) and CUDA devices come here."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def dds_product(
    op: int,
    pattern: Prepared,
    source: Tensor,
    lines: Lines,
    form: Form,
    context: Context,
    options: dict[str, Any],
) -> _C.Product:
    """Describe a product of dense and sparse whose result has this form."""
    shape, strides = form
    result_lines = (lines[0], shape[-1], 0) if strides is None else (lines[0], strides[-1], 1)
    x, y = (lines, result_lines) if op == DDS_NT else (result_lines, lines)
    return _product(op, pattern, source, x, y, context, **options)


def _product(
    op: int,
    pattern: Prepared,
    like: Tensor,
    x: Lines,
    y: Lines,
    context: Context,
    residual: Lines | None = None,
    **options: Any,
) -> _C.Product:
    kernel, _, device, precision = context
    return _C.Product(
        pattern.descriptor,
        op,
        _NUMBERS[like.dtype],
        int(device >= 0),
        x[0],
        precision=precision,
        kernel=max(kernel, 0),
        prefer=preferred(kernel),
        x_layout=x[2],
        ldx=x[1],
        y_layout=y[2],
        ldy=y[1],
        residual=residual is not None,
        ldr=0 if residual is None else residual[1],
        **options,
    )
