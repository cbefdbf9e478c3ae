"""Block-sparse adapters for block-sparse layers."""

from .adapter import BlockSparseAdapter
from .linear import AdaptedLinear

__all__ = [
    "AdaptedLinear",
    "BlockSparseAdapter",
]
