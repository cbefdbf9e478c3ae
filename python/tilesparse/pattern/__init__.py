"""Patterns: the places of the kept blocks of a weight."""

from .block_pattern import BlockPattern

__all__ = [
    "BlockPattern",
]
