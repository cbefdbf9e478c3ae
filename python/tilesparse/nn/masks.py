"""2:4 inside dense blocks: which weights count, and products with these alone."""

from __future__ import annotations

from torch import Tensor

from .._checks import Index
from .._ops.autocast import autocast
from .._ops.autograd import is_plain, records_gradient
from .._ops.linear import linear_on, linear_through
from .._ops.masks import masked, straight_through
from .._ops.values import COMPRESS
from .._runtime.choice import multiplies_compressed
from .._runtime.lookup import prepared
from ..errors import InvalidArgumentError
from ..storage.values import two_of_four


def chosen_mask(weight: Tensor, scores: Tensor | None, transposable: bool) -> Tensor:
    """Return the mask of the two of each four weights with the highest scores, by default magnitudes."""
    scores = weight.detach().abs() if scores is None else scores
    if scores.shape != weight.shape:
        raise InvalidArgumentError(f"scores must have shape {tuple(weight.shape)}, got {tuple(scores.shape)}")
    return two_of_four(scores, transposable=transposable)


def masked_linear(
    x: Tensor,
    weight: Tensor,
    mask: Tensor,
    index: Index,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    column_major: bool = False,
    policy: str,
    transposable: bool,
) -> Tensor:
    """Compute a product with masked dense blocks, whose gradient passes straight through the mask.

    The weight is masked in every call, unless the layer is packed: not every write to it can be seen.
    """
    if is_plain((x, weight, mask)) and weight.is_cpu and not records_gradient((weight,)):
        pattern = prepared(index)
        if pattern.packs:
            packed = pattern.plain.follow(masked, weight, mask)
            return linear_on(x, packed, index, bias, "none", residual, column_major, policy)
    x, weight, bias, residual = autocast(x, weight, bias, residual)
    if policy != "sparse" or not multiplies_compressed(x, index):
        zeroed = straight_through(weight, mask)
        return linear_on(x, zeroed, index, bias, "none", residual, column_major, policy)
    compressed, metadata = COMPRESS(weight.detach(), mask, False)
    if not records_gradient((weight,)):
        stored = metadata, None
        return linear_on(x, compressed, index, bias, "none", residual, column_major, stored=stored)
    transposed: tuple[Tensor | None, Tensor | None] = None, None
    if transposable and x.requires_grad:
        transposed = COMPRESS(weight.detach(), mask, True)
    kept = compressed, metadata, *transposed
    return linear_through(x, weight, index, bias, residual, kept, column_major)
