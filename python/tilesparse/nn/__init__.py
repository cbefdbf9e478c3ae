"""Layers with a block-sparse weight."""

from .block_scales import from_block_scales
from .experts import BlockSparseExperts, ExpertsLinear
from .linear import BlockSparseLinear
from .merged import concatenate
from .mlp import BlockSparseMLP
from .reference import PseudoBlockSparseLinear

__all__ = [
    "BlockSparseExperts",
    "BlockSparseLinear",
    "BlockSparseMLP",
    "ExpertsLinear",
    "PseudoBlockSparseLinear",
    "concatenate",
    "from_block_scales",
]
