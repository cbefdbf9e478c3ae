"""The import path of 0.1.0 of `tilesparse.nn.linear`."""

from .nn.convert import dense_weight, is_conv1d
from .nn.linear import BlockSparseLinear, representation
from .nn.origin import has_peers

__all__ = [
    "BlockSparseLinear",
    "dense_weight",
    "has_peers",
    "is_conv1d",
    "representation",
]
