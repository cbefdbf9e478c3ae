"""Figures of patterns, of their evolution, and of what pruning trades."""

from .figures import evolution, load_snapshots, patterns, save, save_snapshots, tradeoff

__all__ = [
    "evolution",
    "load_snapshots",
    "patterns",
    "save",
    "save_snapshots",
    "tradeoff",
]
