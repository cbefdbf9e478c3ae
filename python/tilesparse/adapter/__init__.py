"""Block-sparse adapters of block-sparse layers."""

from .adapter import AdaptedLinear, BlockSparseAdapter

__all__ = [
    "AdaptedLinear",
    "BlockSparseAdapter",
]
