"""`functional.linear` for patterns as operators take them."""

from typing import Any

import torch
from torch import Tensor

from .._checks import Index, check_dds, check_like_product, check_one
from .._runtime.choice import prefers_dense
from .._runtime.private import is_any_autocast_enabled, transforms_active
from .._runtime.values import storage_of
from .activations import activated, activation_code
from .autocast import autocast
from .autograd import call, records_gradient
from .bias import activate, sums_with_activation
from .gates import gated
from .products import DDS_NT, DDS_NT_THROUGH, EXPAND, refuse_gradient
from .values import expand_values


def linear_on(
    x: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    feature_major: bool = False,
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
        plain = expand_values(values, *stored, x.dtype) if extras else values
        y = _expanded_linear(x, plain, index, bias, feature_major)
        return combined(y, activation, residual, gate)
    tensors = x, values, bias, residual, gate
    if (code == 0 and gate is None) or not (records_gradient(tensors) or transforms_active()):
        if gate is not None:
            extras = (*(extras or (None, None, False)), gate)
        return call(DDS_NT, x, values, index, bias, residual, code, feature_major, extras)
    # A fused activation or gate has no gradient, which transforms may ask for.
    check_one(residual, gate)
    if gate is None and not feature_major and sums_with_activation(x, bias):
        y = call(DDS_NT, x, values, index, _detached(bias), None, 0, False, extras)
        return combined(activate(y, bias, activation), "none", residual, None)
    y = call(DDS_NT, x, values, index, bias, None, 0, feature_major, extras)
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
    feature_major: bool = False,
) -> Tensor:
    """Compute `linear` with compressed values, and pass the gradient to ``values`` straight through.

    ``kept``: compressed values and metadata, then both of the transposed weight or None twice.
    """
    return call(DDS_NT_THROUGH, x, values, index, bias, residual, 0, feature_major, kept)


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
    x: Tensor, values: Tensor, index: Index, bias: Tensor | None, feature_major: bool
) -> Tensor:
    weight = call(EXPAND, values, None, index)
    if not feature_major:
        return torch.nn.functional.linear(x, weight, bias)
    columns = x.reshape(-1, index.shape[1]).t()
    y = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return y.t().reshape(*x.shape[:-1], index.shape[0])
