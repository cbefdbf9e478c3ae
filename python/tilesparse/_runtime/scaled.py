"""Products of two factors in 8 bits, with scales outside or inside of the sums."""

import torch
from torch import Tensor

from .._checks import (
    ALIGNMENT,
    DTYPES,
    QUANTIZED,
    check_one,
    check_quantized_dds,
    check_quantized_x,
    is_inside,
)
from . import kernels as _kernels
from . import values as _values
from .layout import aligned, empty, group_scales, like_result, result_form, row_major
from .native import DDS_NT, SCALES_PER_BLOCK, SCALES_PER_FEATURE
from .prepared import Prepared
from .products import Context, context_of, dds_product, form_of
from .requests import QuantizedRequest


def dds_quantized(
    x: Tensor,
    values: Tensor,
    pattern: Prepared,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    feature_major: bool,
    scales: Tensor,
    gate: Tensor | None,
    metadata: Tensor | None,
    x_values: Tensor,
    x_scales: Tensor,
    fast: bool,
) -> Tensor:
    """Return x Wᵀ in the dtype of x, of which only ``x_values`` and ``x_scales`` are read."""
    if metadata is not None and pattern.packs and x.is_cpu:
        values = pattern.plain.follow(_values.decompressed, values, metadata)
        metadata = None
    if pattern.on_cpu:
        values = values.detach()  # see `products.dds`
    request = (
        x,
        x_values,
        x_scales,
        values,
        scales,
        bias,
        check_one(residual, gate),
        activation,
        feature_major,
        _kernels.asked_kernel,
        gate is not None,
        fast,
        metadata,
    )
    result = pattern.run_quantized(*request)
    if result is not None:
        return result
    with pattern.launching():
        return _dds_quantized(request, pattern)


def _dds_quantized(request: QuantizedRequest, pattern: Prepared) -> Tensor:
    """Run a product that `Prepared.run_quantized` does not know."""
    x, x_values, x_scales, values, scales, bias, other = request[:7]
    activation, feature_major, kernel, gated, fast, metadata = request[7:]
    context = _context(x, fast and values.dtype == torch.float8_e4m3fn)
    forms = [None if tensor is None else form_of(tensor) for tensor in (bias, other, metadata)]
    forms += map(form_of, (x_values, x_scales, values, scales))
    key = x.shape, x.dtype, x.get_device(), *forms, gated, activation, feature_major, context
    if pattern.packs and x.is_cuda:
        key = *key, torch.cuda.is_current_stream_capturing()
    call = pattern.find(key)
    if call is None or (x.is_cuda and _are_misaligned(x_values, x_scales, values, other, metadata)):
        residual, gate = (None, other) if gated else (other, None)
        check_quantized_dds(x, values, pattern.index(), bias, residual, scales, gate, metadata)
        check_quantized_x(x, x_values, x_scales, values.dtype, scales)
        operand, ld = row_major(x_values)
        inside, weight = is_inside(scales), aligned(values)
        of_tokens, scales_ld = group_scales(x_scales) if inside else (aligned(x_scales.contiguous()), 0)
        near, lines = (None, None) if other is None else like_result(other, feature_major)
        kept = None if metadata is None else aligned(metadata)
        changed = (operand, x_values), (of_tokens, x_scales), (weight, values), (near, other)
        if kept is not metadata or any(one is not given for one, given in changed):
            options = activation, feature_major, kernel, gated, fast, kept
            return _dds_quantized((x, operand, of_tokens, weight, scales, bias, near, *options), pattern)
        form = result_form(x, pattern.shape[0], feature_major)
        added = {"residual": lines, "gated": gated, "activation": activation}
        stored = {
            "storage": int(metadata is not None),
            "values_dtype": QUANTIZED[values.dtype],
            "granularity": SCALES_PER_BLOCK if inside else SCALES_PER_FEATURE,
            "result_dtype": DTYPES[x.dtype],
            "x_scales_ld": scales_ld,
        }
        x_lines = x[..., 0].numel(), ld, 0
        product = dds_product(DDS_NT, pattern, x_values, x_lines, form, context, added | stored)
        call = pattern.call(key, product, DDS_NT, x.itemsize, form)
        pattern.keep_quantized(request, product, call)
    result = empty(x, call.form)
    workspace = x.new_empty(call.workspace) if call.workspace else None
    bias = None if bias is None else bias.contiguous()
    if call.packed is not None:
        call.packed.follow(values, pattern.generation, context[1])
    tensors = x_values, result, values, bias, other, workspace, metadata
    *addresses, metadata_at = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    call.run(*addresses, context[1], metadata_at, scales.data_ptr(), x_scales.data_ptr())
    return result


def _context(x: Tensor, fast: bool) -> Context:
    """Return the state that a call depends on; products in 8 bits have no TF32, but fast sums of float8."""
    kernel, stream, device, _ = context_of(x)
    return kernel, stream, device, int(fast and x.is_cuda)


def _are_misaligned(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.data_ptr() % ALIGNMENT != 0 for tensor in tensors)
