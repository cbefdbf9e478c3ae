"""The products as operators: kernels, gradients and counts of work; linear layers are one product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._checks import (
    DENSE,
    DTYPES,
    Epilogue,
    Index,
    Operands,
    check_dds,
    check_factor_scales,
    check_like_product,
    check_one,
    check_quantizable,
    flat_bias,
    is_inside,
)
from .._runtime import device, launch
from .._runtime.launch import dds, skips, storage_of, thresholded
from .._runtime.pattern_cache import Prepared, prepared
from .._runtime.select import multiplies_as_decode, prefers_dense
from .._runtime.torch_private import is_any_autocast_enabled, transforms_active
from ..errors import InvalidArgumentError, UnsupportedError
from .autograd import (
    OF_DDS_NN,
    OF_DDS_NT,
    OF_SDD_TN,
    PLAIN_TYPES,
    Product,
    Tensors,
    autocast,
    by_number,
    call,
    dds_fake,
    differentiable,
    expand_fake,
    gather_fake,
    is_plain,
    records_gradient,
    register,
    register_plainly,
    row_scales_fake,
    sdd_tn_fake,
)
from .epilogue import (
    activated,
    activation_code,
    bias_gradient,
    gated,
    quantized_for,
    weight_and_bias_gradients,
)

# ---- gradients, see `Product` ----


def _dds_nt_gradients(
    grad: Tensor, x: Tensor, values: Tensor, index: Index, needs: Sequence[bool], operands: Operands
) -> Tensors:
    of_x = None
    refuse_gradient(needs[1], operands)
    if needs[0]:
        by, stored = _factor_of_dgrad(values, index, operands)
        of_x = call(DDS_NN, grad, by, index, operands=stored)
    of_residual, offsets = grad if needs[3] else None, operands.offsets
    if needs[1] and needs[2] and offsets is None:
        both = weight_and_bias_gradients(grad, x, index)
        if both is not None:
            return of_x, *both, of_residual
    return (
        of_x,
        grouped_sdd_on(grad, x, index, offsets) if needs[1] else None,
        _bias_gradient(grad, offsets) if needs[2] else None,
        of_residual,
    )


def _factor_of_dgrad(values: Tensor, index: Index, operands: Operands) -> tuple[Tensor, Operands]:
    """Return the values that the gradient of x is a product of, and how they are stored."""
    metadata, scales, offsets, compressed, compressed_t, metadata_t, *_ = operands
    fast = operands.fast
    if fast is not None and scales is not None:  # as if x had not been rounded (straight-through)
        return values, Operands(metadata, stored_scales_on(scales, values, index), offsets)
    if compressed is None:
        return values, operands
    if records_gradient((values,)):  # of the gradient, which passes through here, too
        plain = dequantize_values(compressed, metadata, None, values.dtype)
        return plain + (values - values.detach()), DENSE
    if compressed_t is not None:
        return compressed_t, Operands(metadata_t, transposed=True)
    return compressed, Operands(metadata)


def _dds_nn_gradients(
    grad: Tensor, y: Tensor, values: Tensor, index: Index, needs: Sequence[bool], operands: Operands
) -> Tensors:
    refuse_gradient(needs[1], operands)
    return (
        call(DDS_NT, grad, values, index, operands=operands) if needs[0] else None,
        grouped_sdd_on(y, grad, index, operands.offsets) if needs[1] else None,
    )


def _sdd_tn_gradients(
    grad: Tensor, y: Tensor, x: Tensor, index: Index, needs: Sequence[bool], operands: Operands
) -> Tensors:
    values = grad.contiguous()
    return (
        call(DDS_NT, x, values, index, operands=operands) if needs[0] else None,
        call(DDS_NN, y, values, index, operands=operands) if needs[1] else None,
    )


def grouped_sdd_on(y: Tensor, x: Tensor, index: Index, offsets: Tensor | None) -> Tensor:
    """Return yᵀ x [nnz, bn, bk] on a pattern; with offsets each group's blocks from its own rows."""
    return call(SDD_TN, y, x, index, operands=DENSE if offsets is None else Operands(offsets=offsets))


def refuse_gradient(needed: bool, operands: Operands) -> None:
    """Raise if a gradient is needed of values that are stored in fewer bytes."""
    stored = operands.metadata is not None or operands.scales is not None
    if needed and stored and operands.compressed is None:
        raise UnsupportedError(
            "values must be dense blocks to have a gradient: 2:4 and storages of 8 or 4 bits have none; "
            "train dense blocks, with a mask for 2:4"
        )


def stored_scales_on(scales: Tensor, values: Tensor, index: Index) -> Tensor:
    """Return the scales as those of values that are dequantized, of rows of blocks or of blocks."""
    if not is_inside(scales):
        return row_scales_on(scales, index)
    check_factor_scales(scales, values, index)
    return scales.flatten()


def row_scales_on(scales: Tensor, index: Index) -> Tensor:
    """Return the scales of the rows of blocks [nnz, bn], kept ones of packed layers; only to be read."""
    if is_plain((scales,)):
        return launch.kept_row_scales(scales, prepared(index))
    result: Tensor = _ROW_SCALES(scales, *index)
    return result


# ---- gradients of biases ----


def _bias_gradient(grad: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the sums over the tokens of grad, or over those of each group, one behind the other."""
    if offsets is None:
        return bias_gradient(grad)
    if transforms_active():  # which differentiate PyTorch's own operators alone
        sums = grad.new_zeros(offsets.shape[0] - 1, grad.shape[1])
        return sums.index_add(0, _groups_of(grad.shape[0], offsets), grad).reshape(-1)
    fast = is_plain((grad, offsets)) and not records_gradient((grad,))
    result: Tensor = (launch.group_sums if fast else _GROUP_SUMS)(grad, offsets)
    return result.reshape(-1)


def _keep_offsets(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, offsets = inputs
    ctx.save_for_backward(offsets)
    ctx.tokens = y.shape[0]


def _gradient_of_sums(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (offsets,) = ctx.saved_tensors
    return grad.index_select(0, _groups_of(ctx.tokens, offsets)), None


def _groups_of(tokens: int, offsets: Tensor) -> Tensor:
    """Return int32 [tokens]: the group of each token; the last one of tokens that are in none."""
    every = torch.arange(tokens, device=offsets.device, dtype=torch.int32)
    groups = torch.searchsorted(offsets[1:], every, right=True, out_int32=True)
    return groups.clamp(max=offsets.shape[0] - 2)


# ---- registration ----


def _of_one_factor(function: Callable[[Tensor, Prepared], Tensor]) -> Callable[..., Tensor]:
    return lambda first, _, pattern, *__: function(first, pattern)


_DDS_NT = partial(launch.dds, device.DDS_NT), partial(dds_fake, device.DDS_NT), _dds_nt_gradients
_DDS_NN = partial(launch.dds, device.DDS_NN), partial(dds_fake, device.DDS_NN), _dds_nn_gradients
DDS_NT = differentiable("dds_nt", 2, _DDS_NT, OF_DDS_NT, looks=True)
DDS_NN = differentiable("dds_nn", 2, _DDS_NN, OF_DDS_NN)
SDD_TN = differentiable("sdd_tn", 2, (launch.sdd, sdd_tn_fake, _sdd_tn_gradients), OF_SDD_TN)
GATHER: Product  # whose gradient is the other's
_EXPAND = (
    _of_one_factor(launch.expand),
    expand_fake,
    lambda grad, _, __, index, *___: (call(GATHER, grad, None, index),),
)
EXPAND = differentiable("expand", 1, _EXPAND, looks=True)
_GATHER = (
    _of_one_factor(launch.gather),
    gather_fake,
    lambda grad, _, __, index, *___: (call(EXPAND, grad.contiguous(), None, index),),
)
GATHER = differentiable("gather", 1, _GATHER)
_ROW_SCALES = register("row_scales", 1, _of_one_factor(launch.row_scales), row_scales_fake)
_GROUP_SUMS = register_plainly(
    "group_sums",
    launch.group_sums,
    lambda y, offsets: y.new_empty(offsets.shape[0] - 1, y.shape[1]),
    gradients=(_gradient_of_sums, _keep_offsets),
)


# ---- work ----


def _flops(takes: Sequence[str], first: Sequence[int], _: Any, *rest: Any, **named: Any) -> int:
    """Count two operations for each kept element and token, as if tokens were evenly shared by groups."""
    _, col, _, _, (bn, bk), *given = rest
    offsets = {**dict(zip(takes, given, strict=False)), **named}.get("offsets")
    groups = 1 if offsets is None else offsets[0] - 1
    return 2 * math.prod(first[:-1]) * int(col[0] * bn * bk) // groups


for _name, _takes in (
    ("dds_nt", OF_DDS_NT),
    ("dds_nn", OF_DDS_NN),
    ("sdd_tn", OF_SDD_TN),
    ("sdd_tn_with_bias", ()),
):
    register_flop_formula(getattr(torch.ops.tilesparse, _name))(partial(_flops, _takes))


# ---- stored values ----


COMPRESS = register_plainly("compress", launch.compress, launch.empty_compressed)
_DEQUANTIZE_VALUES = register_plainly(
    "dequantize_values",
    by_number(launch.dequantized, DTYPES),
    by_number(launch.empty_dequantized, DTYPES),
)


def dequantize_values(
    values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantize and decompress stored values; see `storage.dequantize`."""
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype must be one of {list(DTYPES)}, got {dtype}")
    plain: Tensor = _DEQUANTIZE_VALUES(values, metadata, scales, DTYPES[dtype])
    return plain


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
