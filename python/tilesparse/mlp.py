"""The import path of 0.1.0 of `tilesparse.nn.mlp`."""

from .nn.known_mlps import is_known, reason_not_known
from .nn.mlp import BlockSparseMLP

__all__ = [
    "BlockSparseMLP",
    "is_known",
    "reason_not_known",
]
