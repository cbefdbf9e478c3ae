"""Second moments of the inputs that layers meet, and their inverses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import checked_number
from .._runtime.torch_private import exact_float32
from ..errors import InvalidArgumentError
from ..pattern import BlockPattern

DAMPING = 0.01  # of the mean of the diagonal of XᵀX / tokens
_STRONGER = 10.0  # what damping is multiplied by where it was too weak
_MOST_DAMPING = 1e6


class Moments:
    """Sums over the tokens that a layer has met, in float64.

    They are sums of its inputs X, of X₀, which these are in the dense model, and of their products XᵀX and
    X₀ᵀX.

    Products are computed in float32, or float64 for inputs in that, and added up in float64. All are of
    inputs less their mean in the first call, so that nothing is lost where these vary little about a large
    mean.

    Args:
        features: the layer's in_features.
        device: of the sums.
        compare: whether there are X₀.
        origin: what inputs are taken less, [features], in place of their mean in the first call.
    """

    def __init__(
        self, features: int, device: torch.device, compare: bool = False, *, origin: Tensor | None = None
    ) -> None:
        options: Any = {"dtype": torch.float64, "device": device}
        self._products = torch.zeros(features, features, **options)
        self._sums, self._origin = torch.zeros(features, **options), torch.zeros(features, **options)
        self._across = torch.zeros(features, features, **options) if compare else None
        self._dense_sums, self._dense_origin = self._sums.clone(), self._origin.clone()
        self._tokens, self._prior = torch.zeros((), **options), torch.zeros((), **options)
        self._fixed = origin
        self._finite: dict[int, Tensor] = {}

    def add(self, x: Tensor, dense: Tensor | None, number: int, keep: Tensor | None = None) -> None:
        """Add the inputs of one call; nothing waits for a GPU.

        Args:
            x: [..., features].
            dense: what it is in the dense model. Another shape, or None, means that there are other tokens:
                x then counts in its place.
            number: of the batch.
            keep: bools [...], False for tokens that do not count, such as padding; those of another shape
                are for other tokens.
        """
        if dense is None or dense.shape != x.shape:
            dense = x
        if keep is None or keep.shape != x.shape[:-1]:
            keep = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        keep = keep.to(self._sums.device).reshape(-1, 1)
        if not self._finite:
            self._origin, self._dense_origin = self._mean_of(x, keep), self._mean_of(dense, keep)
            if self._fixed is not None:
                self._origin = self._fixed
        self._tokens += keep.sum()
        x = self._rows(x, keep, self._origin)
        sums = x.sum(0, dtype=torch.float64)
        with exact_products(x.device):
            self._products += x.T @ x
            if self._across is not None:
                dense = self._rows(dense, keep, self._dense_origin)
                self._across += dense.T @ x
                self._dense_sums += dense.sum(0, dtype=torch.float64)
        self._sums += sums
        self._finite[number] = self._finite.get(number, True) & sums.isfinite().all()

    def _rows(self, x: Tensor, keep: Tensor, origin: Tensor) -> Tensor:
        """Return [tokens, features] less the origin; zeros for tokens that do not count."""
        x = x.detach().to(self._sums.device, torch.promote_types(x.dtype, torch.float32))
        return torch.where(keep, x.reshape(-1, x.shape[-1]) - origin.to(x.dtype), 0)

    def _mean_of(self, x: Tensor, keep: Tensor) -> Tensor:
        """Return the mean over tokens that count, as a number of the inputs' dtype."""
        rows = self._rows(x, keep, torch.zeros_like(self._origin))
        return (rows.sum(0, dtype=torch.float64) / keep.sum().clamp(min=1)).to(rows.dtype).double()

    @property
    def origin(self) -> Tensor:
        """Mean that is subtracted from inputs [features], once there were any."""
        return self._origin

    @property
    def _weight(self) -> Tensor:
        """Number that sums are divided by: tokens, and those that `drawn_to` stands for."""
        return self._tokens + self._prior

    def weight(self) -> float:
        """Return how many tokens moments are of, those of `drawn_to` included; waits for the GPU."""
        return float(self._weight)

    def drawn_to(self, others: Moments, strength: float) -> Moments:
        """Return these moments as if there were ``strength`` more tokens like the others, of one origin."""
        other, share = copy(self), strength / others._tokens.clamp(min=1)
        other._products = self._products + share * others._products
        other._sums = self._sums + share * others._sums
        # As if there were none where all tokens are masked.
        other._origin, other._prior = others._origin, strength * others._tokens.clamp(max=1)
        other._finite = {**others._finite}
        return other

    def tokens(self) -> int:
        """Return how many tokens were counted; waits for the GPU, as `not_finite` does."""
        return int(self._tokens)

    def not_finite(self) -> int | None:
        """Return the first batch with NaN or infinities, or None."""
        if not self._finite:
            return None
        good = torch.stack(list(self._finite.values())).tolist()
        return next((number for number, fine in zip(self._finite, good, strict=True) if not fine), None)

    def second(self, *, centred: bool = False) -> Tensor:
        """Return XᵀX / tokens [features, features], of X less its mean if centred."""
        off = self._sums / self._weight
        found = (self._products / self._weight).addr_(off, off, alpha=-1)
        return found if centred else found.addr_(self.mean(), self.mean())

    def across(self, *, centred: bool = False) -> Tensor | None:
        """Return X₀ᵀX / tokens [features, features], less the means if centred; None where X₀ = X."""
        if self._across is None:
            return None
        dense, off = self._dense_sums / self._weight, self._sums / self._weight
        found = (self._across / self._weight).addr_(dense, off, alpha=-1)
        return found if centred else found.addr_(self.dense_mean(), self.mean())

    def mean(self) -> Tensor:
        """Return the mean of X [features]."""
        return self._sums / self._weight + self._origin

    def dense_mean(self) -> Tensor:
        """Return the mean of X₀ [features], where there are any."""
        return self._dense_sums / self._weight + self._dense_origin

    def reordered(self, order: Tensor) -> Moments:
        """Return the moments of the same inputs with features in another order: order[i] becomes i."""
        other, order = copy(self), order.to(self._sums.device)
        other._products, other._sums = self._products[order][:, order], self._sums[order]
        other._across = None if self._across is None else self._across[order][:, order]
        other._dense_sums = self._dense_sums[order]
        other._origin, other._dense_origin = self._origin[order], self._dense_origin[order]
        return other


class Damped(NamedTuple):
    """H = XᵀX / tokens + λ I, which is positive definite."""

    matrix: Tensor  # [in_features, in_features] float64
    inverse: Tensor  # likewise
    added: float  # λ
    damping: float  # λ over the mean of the diagonal


def damped(second_moment: Tensor, damping: float = DAMPING) -> Damped:
    """XᵀX / tokens with its diagonal raised, and the inverse.

    Where damping is too weak for a Cholesky factor in float64, as for inputs that depend on each other and no
    damping at all, ten times as much is tried, and so on.

    Args:
        second_moment: [in_features, in_features], of any floating dtype.
        damping: what is added to the diagonal, over the mean of the diagonal. If that is zero the matrix
            becomes the identity: then nothing is known of the inputs.
    """
    checked_number("damping", damping)
    if second_moment.dim() != 2 or second_moment.shape[0] != second_moment.shape[1]:
        raise InvalidArgumentError(
            f"second_moment must be a square matrix, got shape {tuple(second_moment.shape)}"
        )
    moment = second_moment.double()
    mean = float(moment.diagonal().mean())
    if not 0 <= mean < float("inf"):
        raise InvalidArgumentError(
            f"second_moment must be finite with a positive diagonal, got a mean of {mean}"
        )
    if mean == 0:
        mean, damping = 1.0, 1.0
    identity = torch.eye(len(moment), dtype=torch.float64, device=moment.device)
    while True:
        matrix = torch.add(moment, identity, alpha=damping * mean)
        factor, info = torch.linalg.cholesky_ex(matrix)
        if int(info) == 0:
            inverse = torch.cholesky_inverse(factor).contiguous()
            if bool(inverse.isfinite().all()):
                return Damped(matrix, inverse, damping * mean, damping)
        damping = max(damping * _STRONGER, 1e-9)
        if damping > _MOST_DAMPING:
            raise InvalidArgumentError("second_moment must be positive semidefinite")


def supports(pattern: BlockPattern, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows [r, 1] of a weight and the columns [s] that they keep, rows that keep the same together."""
    bn, bk = pattern.block_shape
    masks, own = torch.unique(pattern.to_block_mask().cpu(), dim=0, return_inverse=True)
    for number, kept in enumerate(masks):
        rows = ((own == number).nonzero() * bn + torch.arange(bn, device="cpu")).view(-1, 1)
        columns = (kept.nonzero() * bk + torch.arange(bk, device="cpu")).flatten()
        if len(columns):
            yield rows.to(device), columns.to(device)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Compute float32 products in full precision, whatever settings and autocast say."""
    with exact_float32(), torch.autocast(device.type, enabled=False):
        yield
