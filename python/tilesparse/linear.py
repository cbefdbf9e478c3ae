"""The import path of 0.1.0 of `tilesparse.nn.linear`."""

from .nn.linear import BlockSparseLinear, dense_weight, has_peers, is_conv1d, representation

__all__ = [
    "BlockSparseLinear",
    "dense_weight",
    "has_peers",
    "is_conv1d",
    "representation",
]
