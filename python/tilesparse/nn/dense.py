"""Weights of dense layers, and the best blocks of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._checks import DTYPES, check_shapes
from .._runtime.pattern_cache import blocks_of
from ..errors import InvalidArgumentError
from ..pattern import BlockPattern
from .parameters import is_sharded


def is_conv1d(module: nn.Module) -> bool:
    """Return True for Transformers' Conv1D, a linear layer with weight [in_features, out_features]."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def dense_weight(linear: Any) -> Tensor:
    """Return W [out_features, in_features] of a dense layer without gradient: a view, or a copy.

    It is a copy of weights that `is_stored_otherwise`, in the dtype of the bias or PyTorch's default if they
    have 8 bits.
    """
    weight: Tensor = linear.weight.detach()
    if is_stored_otherwise(weight):
        weight = weight.to_dense() if weight.layout != torch.strided or _is_two_of_four(weight) else weight
        dtype = torch.get_default_dtype() if linear.bias is None else linear.bias.dtype
        weight = weight.to(dtype) if weight.dtype in _FLOAT8 else weight
    return weight.T if is_conv1d(linear) else weight


_SPARSE = (torch.sparse_bsr, torch.sparse_csr, torch.sparse_bsc, torch.sparse_csc, torch.sparse_coo)


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def is_stored_otherwise(weight: Tensor) -> bool:
    """Return True for a weight that is no plain tensor, or not of a dtype that layers have."""
    plain = type(weight.detach()) is Tensor or is_sharded(weight)
    return not plain or weight.layout != torch.strided or weight.dtype not in DTYPES


def reason_not_dense(weight: Tensor) -> str | None:
    """Say why a weight that `is_stored_otherwise` has no dense form that is known here, or return None."""
    if not is_stored_otherwise(weight):
        return None
    kind = type(weight.detach())
    if kind is not Tensor and not is_sharded(weight) and not _is_two_of_four(weight):
        return f"its weight is a {kind.__module__}.{kind.__name__}; make it a plain tensor first"
    if weight.layout not in (torch.strided, *_SPARSE):
        return f"its weight has the layout {weight.layout}; make it dense first"
    if weight.dtype not in (*DTYPES, *_FLOAT8):
        return f"its weight is {weight.dtype}, for which there are no sparse layers"
    return None


def _is_two_of_four(weight: Tensor) -> bool:
    return isinstance(weight, torch.sparse.SparseSemiStructuredTensor)


def linear_of(weight: Tensor, like: Any) -> nn.Linear:
    """Return a dense layer of this weight and of copies of another layer's bias and flags."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, like.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, like.weight.requires_grad)
    if like.bias is not None:
        linear.bias = nn.Parameter(like.bias.detach().clone(), like.bias.requires_grad)
    return linear.train(like.training)


def best_blocks(
    weight: Tensor,
    scores: Tensor | None,
    density: float,
    block_shape: tuple[int, int],
    parts: tuple[int, int],
) -> BlockPattern:
    """Return the pattern of the blocks with the highest scores, by default their Frobenius norms."""
    if weight.is_meta and scores is None:
        raise InvalidArgumentError(
            "linear must not be on the meta device, where there is nothing to score; give pattern"
        )
    grid = check_shapes(weight.shape, block_shape)[2]
    if scores is None:
        if bool(weight.isnan().any()):
            raise InvalidArgumentError(
                "linear must not hold NaN in its weight, which cannot be ranked; give pattern"
            )
        return BlockPattern.from_dense(weight, block_shape=block_shape, density=density, parts=parts)
    if scores.shape == weight.shape:
        precision = torch.promote_types(scores.dtype, torch.float32)
        scores = blocks_of(scores, block_shape).sum((2, 3), dtype=precision)
    if scores.shape != grid:
        raise InvalidArgumentError(
            f"scores must have shape {grid} or {tuple(weight.shape)}, got {tuple(scores.shape)}"
        )
    return BlockPattern.from_scores(scores, block_shape=block_shape, density=density, parts=parts)
