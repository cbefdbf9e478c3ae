"""Linear layers of one weight or of many experts, also of 8-bit activations: all of them are one product."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import (
    DENSE,
    Epilogue,
    Index,
    Operands,
    check_dds,
    check_like_product,
    check_one,
    check_quantizable,
    flat_bias,
    is_inside,
)
from .._runtime import device
from .._runtime.launch import dds, skips, storage_of, thresholded
from .._runtime.pattern_cache import prepared
from .._runtime.select import multiplies_as_decode, prefers_dense
from .._runtime.torch_private import is_any_autocast_enabled, transforms_active
from .autograd import PLAIN_TYPES, autocast, call, is_plain, records_gradient
from .epilogue import activated, activation_code, gated, quantized_for
from .products import DDS_NT, EXPAND, dequantize_values, refuse_gradient, stored_scales_on

_NONE = "none"  # compared by identity, which takes less time than a look-up


def linear_on(
    x: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    column_major: bool = False,
    policy: str = "sparse",
    operands: Operands = DENSE,
    gate: Tensor | None = None,
) -> Tensor:
    """Compute one of the products of `functional` with the pattern as an `Index`.

    ``operands`` say how values are stored, which tokens are in which group, and whether x has 8 bits.
    """
    code = 0 if activation is _NONE else activation_code(activation)
    if is_any_autocast_enabled():
        x, values, bias, residual, gate = autocast(x, values, bias, residual, gate)
    tensors = x, values, bias, residual, gate
    # Proxies of torch.fx cannot be asked whether they have a gradient.
    recorded = type(x) in PLAIN_TYPES and records_gradient(tensors)
    if operands is DENSE:
        is_direct = not recorded and is_plain(tensors)
    else:
        is_direct = is_plain((*tensors, *operands[:6]))
        if values.requires_grad:
            refuse_gradient(torch.is_grad_enabled(), operands)
        if operands.offsets is not None and bias is not None and bias.dim() > 1:
            bias = flat_bias(bias, index, operands.offsets)
        if operands.threshold is not None or operands.gate_threshold is not None:
            may_skip = not (recorded or column_major or policy == "dense" or transforms_active())
            x, gate, activation, operands = _with_thresholds(
                x, values, index, activation, gate, operands, may_skip
            )
            code = activation_code(activation)
        if operands.fast is not None:
            metadata, scales = operands.metadata, operands.scales
            assert scales is not None
            skipping = operands.threshold is not None or operands.gate_threshold is not None
            if policy == "dense" or skipping or multiplies_as_decode(x, index):  # in the dtype of x
                check_quantizable(x)  # the rest is checked as for other products
                stored = stored_scales_on(scales, values, index)
                operands = operands._replace(scales=stored, x_values=None, x_scales=None, fast=None)
            else:
                policy, fast = "sparse", operands.fast
                of_x: tuple[Tensor | None, Tensor | None]
                of_x = operands.x_values, operands.x_scales  # where x was quantized before it was spread
                if of_x[0] is None:
                    of_x = quantized_for(values, x, is_direct, is_inside(scales))
                operands = Operands(metadata, scales, operands.offsets, None, None, None, *of_x, False, fast)
    epilogue = Epilogue(bias, residual, code, column_major, gate)
    skipping = operands.threshold is not None or operands.gate_threshold is not None
    if (
        policy != "sparse"
        and not skipping
        and (policy == "dense" or prefers_dense(x, index, storage_of(values, operands)))
    ):
        check_dds("x", x, values, index, epilogue, operands)
        plain = values if operands is DENSE else dequantize_values(values, *operands[:2], x.dtype)
        return combined(_expanded_linear(x, plain, index, epilogue), activation, residual, gate)
    if is_direct and not recorded:
        # As `call` does, with fewer frames.
        return dds(device.DDS_NT, x, values, prepared(index, True), epilogue, operands)
    if (code == 0 and gate is None) or not (records_gradient(tensors) or transforms_active()):
        return call(DDS_NT, x, values, index, epilogue, operands)
    # A fused activation or gate has no gradient, which transforms may ask for.
    check_one(residual, gate)
    y = call(DDS_NT, x, values, index, Epilogue(bias, column_major=column_major), operands)
    return combined(y, activation, residual, gate)


def _with_thresholds(
    x: Tensor,
    values: Tensor,
    index: Index,
    activation: str,
    gate: Tensor | None,
    operands: Operands,
    may_skip: bool,
) -> tuple[Tensor, Tensor | None, str, Operands]:
    """Return x, gate, its activation and operands, which have a threshold only where a kernel skips by it."""
    threshold, gate_threshold = operands.threshold, operands.gate_threshold
    if gate is None:
        gate_threshold = None
    # On a CPU products in 8 bits are faster than half of them in float32.
    stored = operands._replace(gate_threshold=gate_threshold, fast=None if x.is_cuda else operands.fast)
    may_skip = may_skip and skips(x, values, index.block_shape, stored)
    if gate is not None and gate_threshold is not None:
        gate, activation = activated(gate, activation), "none"
        if not may_skip:
            gate, gate_threshold = thresholded(gate, gate_threshold), None
    if threshold is not None and not (may_skip and gate_threshold is None):
        x, threshold = thresholded(x, threshold), None
    return x, gate, activation, operands._replace(threshold=threshold, gate_threshold=gate_threshold)


def combined(y: Tensor, activation: str, residual: Tensor | None, gate: Tensor | None) -> Tensor:
    """Apply activation, gate and residual of `linear` to a product y [..., out_features] by PyTorch alone."""
    if gate is not None:
        return gated(y, check_like_product("gate", gate, y), activation)
    y = activated(y, activation)
    return y if residual is None else y + check_like_product("residual", residual, y)


def _expanded_linear(x: Tensor, values: Tensor, index: Index, epilogue: Epilogue) -> Tensor:
    weight, bias = call(EXPAND, values, None, index), epilogue.bias
    if not epilogue.column_major:
        return torch.nn.functional.linear(x, weight, bias)
    columns = x.reshape(-1, index.shape[1]).t()
    y = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return y.t().reshape(*x.shape[:-1], index.shape[0])
