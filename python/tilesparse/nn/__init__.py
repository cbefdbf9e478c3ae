"""Layers with a block-sparse weight."""

from .experts import BlockSparseExperts, ExpertsLinear
from .linear import BlockSparseLinear
from .merged import concatenate
from .mlp import BlockSparseMLP
from .reference import ReferenceBlockSparseLinear

__all__ = [
    "BlockSparseExperts",
    "BlockSparseLinear",
    "BlockSparseMLP",
    "ExpertsLinear",
    "ReferenceBlockSparseLinear",
    "concatenate",
]
