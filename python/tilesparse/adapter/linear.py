"""A block-sparse layer with an adapter beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._ops.autocast import autocast
from .._ops.grouped import grouped_linear_on
from .._ops.linear import combined, linear_on
from ..nn.linear import BlockSparseLinear
from ..storage.registry import storage_of


class AdaptedLinear(nn.Module):
    """y = base_layer(x) + x Δᵀ, where Δ has some of the blocks that the layer keeps.

    Attributes:
        base_layer: the frozen `BlockSparseLinear`, in any storage.
        delta: a `BlockSparseLinear` without bias whose weight [n, bn, bk] is Δ. Beside layers of 16 bits it
            is float32: products cast it to the dtype of x, gradients accumulate in float32. In storages other
            than "plain" it can be multiplied and merged, but neither trained nor saved.
    """

    @checked
    def __init__(self, base_layer: BlockSparseLinear, delta: BlockSparseLinear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.delta = delta

    # Models read these attributes of their layers: T5 asks for the dtype of the weight.

    @property
    def weight(self) -> nn.Parameter:
        """The weight of base_layer, without Δ."""
        return self.base_layer.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias of base_layer."""
        return self.base_layer.bias

    @property
    def in_features(self) -> int:
        """Size of the last dimension of x."""
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        """Size of the last dimension of y."""
        return self.base_layer.out_features

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Compute y = x (W + Δ)ᵀ + bias, with Δ in its own blocks alone.

        Args:
            input: x [..., in_features].
            residual: [..., out_features], added to the result, or None.

        Returns:
            y [..., out_features].
        """
        y = self.base_layer(input, residual=residual)
        return linear_on(input, self._values(input.dtype), self.delta.index(), residual=y)

    def _values(self, dtype: torch.dtype) -> Tensor:
        """Return Δ [n, bn, bk] as products take it."""
        delta = self.delta
        if delta.origin.pending:
            delta.validate_pattern()
        if not storage_of(
            delta.storage
        ).trainable:  # a loop over all layers of the model may have stored it otherwise
            values = delta.plain_values()
        else:
            values = delta.weight if delta.mask is None else torch.where(delta.mask, delta.weight, 0)
        return values.to(dtype)


class AdaptedExperts(AdaptedLinear):
    """y[t] = base_layer(x)[t] + x[t] Δ_eᵀ for the tokens t of each expert e of an `ExpertsLinear`."""

    @property
    def experts(self) -> int:
        """Number of experts."""
        base: Any = self.base_layer
        experts: int = base.experts
        return experts

    def forward(
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: str = "none",
    ) -> Tensor:
        """Compute what `ExpertsLinear.forward` does, with Δ added to the weights.

        Args:
            x: [tokens, in_features], sorted by expert.
            offsets: int32 [experts + 1]: the tokens of expert e are offsets[e] to offsets[e + 1] - 1.
            residual: [tokens, out], added to the result, or None.
            gate: [tokens, out], by which the result is multiplied in the place of a residual, or None.
            activation: of the result, or of the gate where there is one.

        Returns:
            y [tokens, out].
        """
        base: Any = self.base_layer
        y = base(x, offsets)
        assert offsets is not None
        index, none = self.delta.index(), (None, None)
        y = grouped_linear_on(x, self._values(x.dtype), index, offsets, None, "none", y, none, None)
        y, residual, gate = autocast(y, residual, gate)
        return combined(y, activation, residual, gate)
