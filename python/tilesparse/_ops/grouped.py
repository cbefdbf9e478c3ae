"""Grouped products as operators, with their gradients: tokens in groups, each with a weight of its own.

The gradients of each product are the other two, as of products with one weight (`products`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._checks import Index, check_grouped_dds, check_grouped_sdd, check_one, flat_bias
from .._runtime import grouped as _grouped
from .._runtime import native as _native
from .._runtime.prepared import Prepared
from .._runtime.private import is_any_autocast_enabled, transforms_active
from .activations import activation_code
from .autocast import autocast
from .autograd import Product, Tensors, autograd_of, call, is_plain, records_gradient, transformable
from .linear import combined
from .products import flops, refuse_fused_gate, refuse_gradient
from .register import differentiable, register, register_plainly
from .schemas import LIB


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


def _dds_nt(
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
    return _grouped.grouped_dds(_native.DDS_NT, x, values, pattern, offsets, *added)


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


# These take bias, residual, activation and feature_major of `call` as well, which are not given.


def _dds_nn(y: Tensor, values: Tensor, pattern: Prepared, *rest: Any) -> Tensor:
    offsets, metadata, scales = rest[4:]
    stored = {"metadata": metadata, "scales": scales}
    return _grouped.grouped_dds(_native.DDS_NN, y, values, pattern, offsets, **stored)


def _dds_nn_fake(y: Tensor, values: Tensor, index: Index, *rest: Any) -> Tensor:
    offsets, metadata, scales = rest[4:]
    check_grouped_dds("y", y, values, index, offsets, metadata=metadata, scales=scales)
    return y.new_empty(y.shape[0], index.shape[1])


def _sdd_tn(y: Tensor, x: Tensor, pattern: Prepared, *rest: Any) -> Tensor:
    return _grouped.grouped_sdd(y, x, pattern, rest[-1])


def _sdd_tn_fake(y: Tensor, x: Tensor, index: Index, *rest: Any) -> Tensor:
    check_grouped_sdd(y, x, index, rest[-1])
    return x.new_empty(index.col_indices.shape[0], *index.block_shape)


def _group_sums_fake(y: Tensor, offsets: Tensor) -> Tensor:
    return y.new_empty(offsets.shape[0] - 1, y.shape[1])


# ---- gradients ----


def _dds_nt_gradients(
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


def _dds_nn_gradients(
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


def _sdd_tn_gradients(
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
        return _grouped.group_sums(y, offsets)
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

_LAYOUT = 2 + len(Index._fields) + 3  # where `call` has feature_major, which these do not take


def _without_layout(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments: op(*arguments[:_LAYOUT], *arguments[_LAYOUT + 1 :])


def _register_dds_nt() -> Product:
    op = register("grouped_dds_nt", 2, _dds_nt, _dds_nt_fake, looks=True)
    backward, setup_context = autograd_of(_dds_nt_gradients, 2, 2, 1)
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
        return _dds_nt(x, values, pattern, bias, residual, activation, *extras)

    return Product(_without_layout(op), slice(None), kernel, _dds_nt_gradients, transformed, True)


_DDS_NT = _register_dds_nt()
_DDS_NN = differentiable("grouped_dds_nn", 2, (_dds_nn, _dds_nn_fake, _dds_nn_gradients))
_SDD_TN = differentiable("grouped_sdd_tn", 2, (_sdd_tn, _sdd_tn_fake, _sdd_tn_gradients))
_GROUP_SUMS = register_plainly(
    "group_sums", _grouped.group_sums, _group_sums_fake, gradients=(_gradient_of_sums, _keep_offsets)
)


def _flops(place: int, *arguments: Any, **options: Any) -> int:
    """Count two operations for each kept element and token, as if tokens were evenly shared by groups."""
    groups: int = arguments[place][0] - 1
    return flops(*arguments, **options) // groups


for _name, _place in (("grouped_dds_nt", 10), ("grouped_dds_nn", 7), ("grouped_sdd_tn", 7)):
    register_flop_formula(getattr(torch.ops.tilesparse, _name))(partial(_flops, _place))
