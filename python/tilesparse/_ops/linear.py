"""Linear layers of one weight, of 8-bit activations, and of many experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._checks import (
    Index,
    check_dds,
    check_factor_scales,
    check_grouped_dds,
    check_grouped_sdd,
    check_like_product,
    check_one,
    check_quantizable,
    flat_bias,
    is_inside,
)
from .._runtime import device, launch
from .._runtime.launch import dds_quantized, storage_of
from .._runtime.pattern_cache import Prepared, prepared
from .._runtime.select import multiplies_as_decode, prefers_dense
from .._runtime.torch_private import is_any_autocast_enabled, transforms_active
from . import schemas
from .autograd import Product, Tensors, autocast, autograd_of, call, is_plain, records_gradient, transformable
from .epilogue import activate, activated, activation_code, gated, quantized_for, sums_with_activation
from .products import (
    DDS_NN,
    DDS_NT,
    DDS_NT_THROUGH,
    EXPAND,
    dequantize_values,
    flops,
    other_gradients,
    refuse_fused_gate,
    refuse_gradient,
)
from .schemas import LIB, differentiable, register, register_plainly


def linear_on(
    x: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    column_major: bool = False,
    policy: str = "sparse",
    stored: tuple[Tensor | None, Tensor | None] = (None, None),
    gate: Tensor | None = None,
) -> Tensor:
    """Compute `functional.linear` with the pattern as an `Index`; ``stored``: metadata and scales."""
    code = activation_code(activation)
    if is_any_autocast_enabled():
        x, values, bias, residual, gate = autocast(x, values, bias, residual, gate)
    extras = extras_of(values, *stored)
    if policy != "sparse" and (policy == "dense" or _prefers_dense(x, values, index, *stored)):
        check_dds("x", x, values, index, bias, residual, *stored, gate)
        plain = dequantize_values(values, *stored, x.dtype) if extras else values
        y = _expanded_linear(x, plain, index, bias, column_major)
        return combined(y, activation, residual, gate)
    tensors = x, values, bias, residual, gate
    if (code == 0 and gate is None) or not (records_gradient(tensors) or transforms_active()):
        if gate is not None:
            extras = (*(extras or (None, None, False)), gate)
        return call(DDS_NT, x, values, index, bias, residual, code, column_major, extras)
    # A fused activation or gate has no gradient, which transforms may ask for.
    check_one(residual, gate)
    if gate is None and not column_major and sums_with_activation(x, bias):
        y = call(DDS_NT, x, values, index, _detached(bias), None, 0, False, extras)
        return combined(activate(y, bias, activation), "none", residual, None)
    y = call(DDS_NT, x, values, index, bias, None, 0, column_major, extras)
    return combined(y, activation, residual, gate)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def combined(y: Tensor, activation: str, residual: Tensor | None, gate: Tensor | None) -> Tensor:
    """Apply activation, gate and residual of `linear` to a product y [..., out_features] by PyTorch alone."""
    if gate is not None:
        return gated(y, check_like_product("gate", gate, y), activation)
    y = activated(y, activation)
    return y if residual is None else y + check_like_product("residual", residual, y)


def linear_through(
    x: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None,
    residual: Tensor | None,
    kept: tuple[Tensor | None, ...],
    column_major: bool = False,
) -> Tensor:
    """Compute `linear` with compressed values, and pass the gradient to ``values`` straight through.

    ``kept``: compressed values and metadata, then both of the transposed weight or None twice.
    """
    return call(DDS_NT_THROUGH, x, values, index, bias, residual, 0, column_major, kept)


def _prefers_dense(
    x: Tensor, values: Tensor, index: Index, metadata: Tensor | None, scales: Tensor | None
) -> bool:
    return prefers_dense(x, index, storage_of(values, metadata, scales))


def extras_of(values: Tensor, metadata: Tensor | None, scales: Tensor | None) -> tuple[Any, ...]:
    if metadata is None and scales is None:
        return ()
    refuse_gradient(records_gradient((values,)), metadata, scales)
    return metadata, scales, False


def _expanded_linear(
    x: Tensor, values: Tensor, index: Index, bias: Tensor | None, column_major: bool
) -> Tensor:
    weight = call(EXPAND, values, None, index)
    if not column_major:
        return torch.nn.functional.linear(x, weight, bias)
    columns = x.reshape(-1, index.shape[1]).t()
    y = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return y.t().reshape(*x.shape[:-1], index.shape[0])


def quantized_linear_on(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    index: Index,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    column_major: bool = False,
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
        return linear_on(x, values, index, bias, activation, residual, column_major, policy, stored, gate)
    tensors = x, values, bias, residual, gate
    direct, recorded = is_plain((*tensors, scales, metadata)), records_gradient(tensors)
    of_x = quantized_for(values, x, direct, is_inside(scales))
    if direct and not recorded:
        pattern = prepared(index, DDS_NT_QUANTIZED.looks)
        return dds_quantized(
            x, values, pattern, bias, residual, code, column_major, scales, gate, metadata, *of_x, fast
        )
    refuse_gradient(recorded and values.requires_grad, None, scales)
    if (code == 0 and gate is None) or not (recorded or transforms_active()):
        extras = scales, gate, metadata, *of_x, fast
        return call(DDS_NT_QUANTIZED, x, values, index, bias, residual, code, column_major, extras)
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
        return launch.kept_row_scales(scales, prepared(index))
    made: Tensor = _ROW_SCALES(scales, *index)
    return made


def _row_scales(scales: Tensor, _: None, pattern: Prepared, *__: object) -> Tensor:
    return launch.row_scales(scales, pattern)


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


_ROW_SCALES = register("row_scales", 1, _row_scales, schemas.row_scales_fake)
DDS_NT_QUANTIZED = differentiable(
    "dds_nt_quantized",
    2,
    (dds_quantized, schemas.dds_nt_quantized_fake, _gradients),
    2,
    2,
    looks=True,
    kept=slice(3),
)
register_flop_formula(torch.ops.tilesparse.dds_nt_quantized)(flops)


def grouped_linear_on(
    x: Tensor,
    values: Tensor,
    index: Index,
    offsets: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    stored: tuple[Tensor | None, Tensor | None],
    gate: Tensor | None,
) -> Tensor:
    """Compute `functional.grouped_linear` with the pattern as an `Index`; ``stored``: metadata and scales."""
    code = activation_code(activation)
    if is_any_autocast_enabled():
        x, values, bias, residual, gate = autocast(x, values, bias, residual, gate)
    if bias is not None and bias.dim() > 1:
        bias = flat_bias(bias, index, offsets)
    refuse_gradient(records_gradient((values,)), *stored)
    recorded = records_gradient((x, values, bias, residual, gate)) or transforms_active()
    if (code == 0 and gate is None) or not recorded:
        extras = offsets, *stored, gate
        return call(_DDS_NT, x, values, index, bias, residual, code, False, extras)
    # A fused activation or gate has no gradient, which transforms may ask for.
    check_one(residual, gate)
    y = call(_DDS_NT, x, values, index, bias, extras=(offsets, *stored, None))
    return combined(y, activation, residual, gate)


def grouped_sdd_on(y: Tensor, x: Tensor, index: Index, offsets: Tensor) -> Tensor:
    """Return yᵀ x [nnz, bn, bk] on a pattern, each group's blocks from its own rows of y and x."""
    return call(_SDD_TN, y, x, index, extras=(offsets,))


# ---- kernels and fakes ----


def _grouped_dds_nt(
    x: Tensor,
    values: Tensor,
    pattern: Prepared,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    offsets: Tensor,
    metadata: Tensor | None,
    scales: Tensor | None,
    gate: Tensor | None,
) -> Tensor:
    added = bias, residual, activation, metadata, scales, gate
    return launch.grouped_dds(device.DDS_NT, x, values, pattern, offsets, *added)


def _dds_nt_fake(
    x: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None,
    residual: Tensor | None,
    _: int,
    offsets: Tensor,
    *stored_and_gate: Tensor | None,
) -> Tensor:
    groups = check_grouped_dds("x", x, values, index, offsets, bias, residual, *stored_and_gate)
    return x.new_empty(x.shape[0], index.shape[0] // groups)


# These take bias, residual, activation and column_major of `call` as well, which are not given.


def _grouped_dds_nn(y: Tensor, values: Tensor, pattern: Prepared, *rest: Any) -> Tensor:
    offsets, metadata, scales = rest[4:]
    stored = {"metadata": metadata, "scales": scales}
    return launch.grouped_dds(device.DDS_NN, y, values, pattern, offsets, **stored)


def _dds_nn_fake(y: Tensor, values: Tensor, index: Index, *rest: Any) -> Tensor:
    offsets, metadata, scales = rest[4:]
    check_grouped_dds("y", y, values, index, offsets, metadata=metadata, scales=scales)
    return y.new_empty(y.shape[0], index.shape[1])


def _grouped_sdd_tn(y: Tensor, x: Tensor, pattern: Prepared, *rest: Any) -> Tensor:
    return launch.grouped_sdd(y, x, pattern, rest[-1])


def _sdd_tn_fake(y: Tensor, x: Tensor, index: Index, *rest: Any) -> Tensor:
    check_grouped_sdd(y, x, index, rest[-1])
    return x.new_empty(index.col_indices.shape[0], *index.block_shape)


def _group_sums_fake(y: Tensor, offsets: Tensor) -> Tensor:
    return y.new_empty(offsets.shape[0] - 1, y.shape[1])


# ---- gradients ----


def _grouped_dds_nt_gradients(
    grad: Tensor,
    x: Tensor,
    values: Tensor,
    index: Index,
    needs: Sequence[bool],
    offsets: Tensor,
    metadata: Tensor | None,
    scales: Tensor | None,
    gate: Tensor | None,
) -> Tensors:
    refuse_gradient(needs[1], metadata, scales)
    refuse_fused_gate(gate)
    return (
        call(_DDS_NN, grad, values, index, extras=(offsets, metadata, scales)) if needs[0] else None,
        call(_SDD_TN, grad, x, index, extras=(offsets,)) if needs[1] else None,
        _sums_of_groups(grad, offsets).reshape(-1) if needs[2] else None,
        grad if needs[3] else None,
    )


def _grouped_dds_nn_gradients(
    grad: Tensor,
    y: Tensor,
    values: Tensor,
    index: Index,
    needs: Sequence[bool],
    offsets: Tensor,
    metadata: Tensor | None,
    scales: Tensor | None,
) -> Tensors:
    refuse_gradient(needs[1], metadata, scales)
    extras = offsets, metadata, scales, None
    return (
        call(_DDS_NT, grad, values, index, extras=extras) if needs[0] else None,
        call(_SDD_TN, y, grad, index, extras=(offsets,)) if needs[1] else None,
    )


def _grouped_sdd_tn_gradients(
    grad: Tensor, y: Tensor, x: Tensor, index: Index, needs: Sequence[bool], offsets: Tensor
) -> Tensors:
    values, dense = grad.contiguous(), (None, None)
    return (
        call(_DDS_NT, x, values, index, extras=(offsets, *dense, None)) if needs[0] else None,
        call(_DDS_NN, y, values, index, extras=(offsets, *dense)) if needs[1] else None,
    )


def _sums_of_groups(y: Tensor, offsets: Tensor) -> Tensor:
    """Return [groups, features]: the sums over the tokens of each group of y, the gradient of biases."""
    if transforms_active():  # which differentiate PyTorch's own operators alone
        return y.new_zeros(offsets.shape[0] - 1, y.shape[1]).index_add(0, _groups_of(y.shape[0], offsets), y)
    if is_plain((y, offsets)) and not records_gradient((y,)):
        return launch.group_sums(y, offsets)
    sums: Tensor = _GROUP_SUMS(y, offsets)
    return sums


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

_LAYOUT = 2 + len(Index._fields) + 3  # where `call` has column_major, which these do not take


def _without_layout(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments: op(*arguments[:_LAYOUT], *arguments[_LAYOUT + 1 :])


def _register_dds_nt() -> Product:
    op = register("grouped_dds_nt", 2, _grouped_dds_nt, _dds_nt_fake, looks=True)
    backward, setup_context = autograd_of(_grouped_dds_nt_gradients, 2, 2, 1)
    torch.library.register_autograd(
        "tilesparse::grouped_dds_nt", backward, setup_context=setup_context, lib=LIB
    )
    transformed = _without_layout(transformable(op, backward, setup_context))

    def kernel(
        x: Tensor,
        values: Tensor,
        pattern: Prepared,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: int,
        _: bool,
        *extras: Any,
    ) -> Tensor:
        return _grouped_dds_nt(x, values, pattern, bias, residual, activation, *extras)

    return Product(_without_layout(op), slice(None), kernel, _grouped_dds_nt_gradients, transformed, True)


_DDS_NT = _register_dds_nt()
_DDS_NN = differentiable("grouped_dds_nn", 2, (_grouped_dds_nn, _dds_nn_fake, _grouped_dds_nn_gradients))
_SDD_TN = differentiable("grouped_sdd_tn", 2, (_grouped_sdd_tn, _sdd_tn_fake, _grouped_sdd_tn_gradients))
_GROUP_SUMS = register_plainly(
    "group_sums", launch.group_sums, _group_sums_fake, gradients=(_gradient_of_sums, _keep_offsets)
)


def _flops(place: int, *arguments: Any, **options: Any) -> int:
    """Count two operations for each kept element and token, as if tokens were evenly shared by groups."""
    groups: int = arguments[place][0] - 1
    return flops(*arguments, **options) // groups


for _name, _place in (("grouped_dds_nt", 10), ("grouped_dds_nn", 7), ("grouped_sdd_tn", 7)):
    register_flop_formula(getattr(torch.ops.tilesparse, _name))(partial(_flops, _place))
