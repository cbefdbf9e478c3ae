"""Layers with a block-sparse weight."""

from .joined import concatenate
from .linear import BlockSparseLinear
from .mlp import BlockSparseMLP
from .reference import PseudoBlockSparseLinear

__all__ = [
    "BlockSparseLinear",
    "BlockSparseMLP",
    "PseudoBlockSparseLinear",
    "concatenate",
]
