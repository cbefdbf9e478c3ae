"""What the operands of grouped products must be; fake tensors are checked as well."""

import torch
from torch import Tensor

from ..errors import InvalidArgumentError, InvalidTypeError
from .operands import Index, check_added, check_dds, check_sdd

MAX_GROUPS = 1024


def group_count(index: Index, offsets: Tensor) -> int:
    """Return the number of groups that offsets [groups + 1] of a pattern stand for."""
    if offsets.layout != torch.strided:
        raise InvalidTypeError(f"offsets must be a dense tensor, got a {offsets.layout} tensor")
    if offsets.dim() != 1 or offsets.dtype != torch.int32 or not offsets.is_contiguous():
        raise InvalidArgumentError(
            f"offsets must be a contiguous tensor [experts + 1] of torch.int32, got shape "
            f"{list(offsets.shape)} with strides {offsets.stride()} of {offsets.dtype}"
        )
    if offsets.device != index.col_indices.device:
        raise InvalidArgumentError(
            f"offsets must be on {index.col_indices.device} like the pattern, got {offsets.device}"
        )
    groups = offsets.shape[0] - 1
    if not 1 <= groups <= MAX_GROUPS:
        raise InvalidArgumentError(
            f"offsets must have 2 to {MAX_GROUPS + 1} entries, one more than experts, got {groups + 1}"
        )
    if index.shape[0] % (groups * index.block_shape[0]):
        raise InvalidArgumentError(
            f"pattern must have the same number of rows of blocks for each of {groups} experts, for which "
            f"there are offsets, got {index.shape[0]} out_features in blocks of {index.block_shape[0]}"
        )
    return groups


def flat_bias(bias: Tensor, index: Index, offsets: Tensor) -> Tensor:
    """Return a bias [groups, features] of one weight's features as that of all, [groups * features]."""
    groups = group_count(index, offsets)
    if bias.shape != (groups, index.shape[0] // groups):
        raise InvalidArgumentError(
            f"bias must have shape {(groups, index.shape[0] // groups)} or {(index.shape[0],)}, got "
            f"{tuple(bias.shape)}"
        )
    return bias.reshape(-1)


def check_grouped_dds(
    name: str,
    matrix: Tensor,
    values: Tensor,
    index: Index,
    offsets: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    gate: Tensor | None = None,
) -> int:
    """Check the operands of x Wᵀ, if ``name`` is "x", or of y W, if it is "y"; return how many groups."""
    groups = group_count(index, offsets)
    _check_rows(name, matrix)
    check_dds(name, matrix, values, _of_one(index, groups), None, residual, metadata, scales, gate)
    if bias is not None:
        check_added("bias", bias, (index.shape[0],), name, matrix)
    return groups


def check_grouped_sdd(y: Tensor, x: Tensor, index: Index, offsets: Tensor) -> int:
    """Check the operands of yᵀ x on the pattern, group by group; return the number of groups."""
    groups = group_count(index, offsets)
    _check_rows("x", x)
    _check_rows("y", y)
    check_sdd(y, x, _of_one(index, groups))
    return groups


def _of_one(index: Index, groups: int) -> Index:
    """Return the pattern with the shape of one weight, which activations belong to."""
    return index._replace(shape=(index.shape[0] // groups, index.shape[1]))


def _check_rows(name: str, matrix: Tensor) -> None:
    if matrix.dim() != 2:
        raise InvalidArgumentError(f"{name} must be [tokens, features], got shape {tuple(matrix.shape)}")
