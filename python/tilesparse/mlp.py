"""The import path of 0.1.0 of `tilesparse.nn.mlp`."""

from .nn.mlp import BlockSparseMLP

__all__ = [
    "BlockSparseMLP",
]
