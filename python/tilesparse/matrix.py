"""The import path of 0.1.0 of `tilesparse.pattern.matrix`."""

from .pattern.matrix import BlockSparseMatrix

__all__ = [
    "BlockSparseMatrix",
]
