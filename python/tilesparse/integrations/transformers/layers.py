"""Block-sparse layers and tensors of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ...nn.linear import BlockSparseLinear


def sparse_layers(model: nn.Module) -> Iterator[tuple[str, BlockSparseLinear]]:
    """Yield the block-sparse layers of a model with their names."""
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear):
            yield name, module


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names."""
    yield from model.named_parameters()
    yield from model.named_buffers()
