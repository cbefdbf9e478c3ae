"""The reference layer: the function of a block-sparse layer in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._checks import check_activations, is_tensor, shown
from .._runtime.launch import thresholded
from ..errors import InvalidArgumentError, InvalidTypeError
from ..functional import quantize_activations
from ..storage.formats import storage_of
from .linear import BlockSparseLinear, linear_of, representation
from .weight import dense_blocks, note_owner


class ReferenceBlockSparseLinear(nn.Module):
    """Reference layer: the function of a `BlockSparseLinear` in plain PyTorch, slow and simple to trust.

    Each call builds the dense weight from the kept blocks, so results, gradients and optimizer states of the
    two layers correspond one to one. Use it to tell whether a problem lies in the sparse kernels or
    elsewhere. With 8-bit activations x is rounded as the layer rounds it, and has the same gradient.

    Args:
        layer: the layer to copy: parameters with their ``requires_grad``, device, dtype and mode.

    Attributes:
        weight: Parameter [nnz, bn, bk], the blocks that the layer multiplies by. Zeros of 2:4 are
            trained like other weights.
        bias: Parameter [out_features] or None.
        storage_error: the layer's `storage_error`; the weight here is rounded likewise.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    block_rows: Tensor
    block_cols: Tensor
    activations: str | None = None
    threshold: float | None = None

    def __init__(self, layer: BlockSparseLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.block_shape, self.density = layer.block_shape, layer.density
        self.storage_error, self.activations = layer.storage_error, layer.activations
        self.threshold = layer.threshold
        self._grid = layer.pattern.grid
        self._grouped = layer.activations is not None and layer.spec.granularity == "block"
        for name, parameter in (("weight", layer.weight), ("bias", layer.bias)):
            if parameter is not None:
                values = dense_blocks(layer) if name == "weight" else parameter.detach().clone()
                parameter = nn.Parameter(values, parameter.requires_grad)
            self.register_parameter(name, parameter)
        for name, indices in zip(("block_rows", "block_cols"), layer.pattern.block_indices(), strict=True):
            self.register_buffer(name, indices.to(layer.weight.device))
        self.train(layer.training)
        note_owner(self)

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Return y [..., out_features] = x Wᵀ + bias by the dense W; a residual of its shape is added."""
        if not is_tensor(input):
            raise InvalidTypeError(f"input must be a dense tensor, got {shown(input)}")
        check_activations("input", input, self.in_features)
        x = input if self.threshold is None else thresholded(input, self.threshold)
        if self.activations is not None:
            x = _rounded(x, storage_of(self.activations).dtype, self._grouped)
        y = F.linear(x, self._dense_weight(), self.bias)
        if residual is not None and residual.shape != y.shape:
            raise InvalidArgumentError(
                f"residual must have shape {tuple(y.shape)}, got {tuple(residual.shape)}"
            )
        return y if residual is None else y + residual

    def _dense_weight(self) -> Tensor:
        blocks = self.weight.new_zeros(*self._grid, *self.block_shape)
        blocks = blocks.index_put((self.block_rows, self.block_cols), self.weight)
        return blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def to_linear(self) -> nn.Linear:
        """Return the dense layer with the same weight, as `BlockSparseLinear.to_linear` does."""
        return linear_of(self._dense_weight().detach(), self)

    def extra_repr(self) -> str:
        """Return what `BlockSparseLinear` returns."""
        return representation(self)


def _rounded(x: Tensor, dtype: torch.dtype | None, grouped: bool) -> Tensor:
    """Return x as 8 bits and a scale for each token, or each group of it, hold it, with the gradient of x."""
    assert dtype is not None
    values, scales = quantize_activations(x, dtype, granularity="group" if grouped else "token")
    groups = values.float().view(*scales.shape, -1) if grouped else values.float()
    rounded = (groups * scales[..., None]).view(x.shape).to(x.dtype)
    return x + (rounded - x).detach()
