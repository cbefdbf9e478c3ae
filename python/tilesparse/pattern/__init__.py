"""Where the kept blocks of a weight lie."""

from .block_pattern import BlockPattern

__all__ = [
    "BlockPattern",
]
