"""The import path of 0.1.0 of `tilesparse.nn.mlp`."""

from .nn.mlp import BlockSparseMLP, is_known, reason_not_known

__all__ = [
    "BlockSparseMLP",
    "is_known",
    "reason_not_known",
]
