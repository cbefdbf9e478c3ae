"""Layers of a checkpoint as a server's process needs them: cut, merged, stored as kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..._files import named
from ...config import LayerSpec
from ...errors import InvalidArgumentError, UnsupportedError
from ...nn.experts import ExpertsLinear
from ...nn.linear import BlockSparseLinear
from ...nn.merged import concatenate, reason_not_one
from ...tuning.product import stored_for_kernels

Span = tuple[int, int]
MANY = 4096  # tokens of a prompt


def sparse_part(
    name: str,
    spec: LayerSpec,
    state: Mapping[str, Tensor],
    rows: Sequence[Span],
    columns: Span,
    dtype: torch.dtype,
) -> BlockSparseLinear:
    """Return rows and columns of a layer of a checkpoint, from the spec and tensors of the whole layer.

    Several spans of rows become one layer. Values in 8 bits do not get the dtype; errors name the layer.
    """
    with named(name):
        layer = BlockSparseLinear.from_state(spec, state, dtype)
    part = _cut(name, layer, rows, columns)
    # If the number of tokens decided, compiled code would keep the decision of one number for all.
    part.policy = "sparse" if part.policy == "auto" else part.policy
    return part


def experts_part(
    name: str,
    spec: LayerSpec,
    state: Mapping[str, Tensor],
    rows: Sequence[Span],
    columns: Span,
    dtype: torch.dtype,
) -> ExpertsLinear:
    """Return rows and columns of a projection of all experts; each expert has as many spans of rows.

    Arguments and errors are those of `sparse_part`; the numbers of rows are of all experts together.
    """
    with named(name):
        layer = BlockSparseLinear.from_state(replace(spec, experts=None), state, dtype)
    part = _cut(name, layer, rows, columns)
    made = ExpertsLinear.from_state(replace(part.spec, experts=spec.experts), part.state_dict())
    assert isinstance(made, ExpertsLinear)
    return made


def _cut(name: str, layer: BlockSparseLinear, rows: Sequence[Span], columns: Span) -> BlockSparseLinear:
    """Return spans of rows below each other, and columns of them."""
    if [*rows] == [(0, layer.out_features)] and columns == (0, layer.in_features):
        return layer
    try:
        parts = [layer.cut(span, columns) for span in rows]
    except InvalidArgumentError as error:
        raise UnsupportedError(f"{name}: it cannot be cut so for tensor parallelism: {error}") from error
    return parts[0] if len(parts) == 1 else concatenate(parts)


def dense_part(weight: Tensor, rows: Sequence[Span], columns: Span, dtype: torch.dtype) -> nn.Linear:
    """Return rows and columns of a dense weight [out_features, in_features] as a layer."""
    own = torch.cat([weight[slice(*span), slice(*columns)] for span in rows])
    linear = nn.Linear(own.shape[1], own.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(own.to(dtype), requires_grad=False)
    return linear


def merged(parts: list[nn.Module]) -> list[nn.Module]:
    """Return one layer in place of several, where they can be one."""
    layers = [part for part in parts if isinstance(part, BlockSparseLinear)]
    if len(parts) == 1 or reason_not_one(parts) is not None:
        return parts
    return [concatenate(layers)]


def for_serving(part: nn.Module) -> nn.Module:
    """Return a layer whose values no call has to convert: kernels on its device read them so."""
    return stored_for_kernels(part) if isinstance(part, BlockSparseLinear) else part


def experts_for_serving(part: ExpertsLinear) -> ExpertsLinear:
    """Return a projection of experts that no call has to convert, however many tokens they have."""
    made = stored_for_kernels(part, tokens=MANY)
    assert isinstance(made, ExpertsLinear)
    return made


def multiplied(parts: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Return x Wᵀ of all parts, one after the other: [..., rows of all]."""
    results = [part(x) for part in parts]
    return results[0] if len(results) == 1 else torch.cat(results, -1)
