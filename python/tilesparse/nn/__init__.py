"""Layers with a block-sparse weight."""

from .block_scales import from_block_scales
from .experts import BlockSparseExperts
from .experts_linear import ExpertsLinear
from .joined import concatenate
from .linear import BlockSparseLinear
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
