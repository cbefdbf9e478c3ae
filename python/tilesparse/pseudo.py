"""The import path of 0.1.0 of `tilesparse.nn.reference`."""

from .nn.reference import PseudoBlockSparseLinear

__all__ = [
    "PseudoBlockSparseLinear",
]
