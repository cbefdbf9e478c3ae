"""Figures of patterns, of their evolution, and of quality against time."""

from .figures import evolution, patterns, tradeoff
from .saving import save
from .sources import load_snapshots, save_snapshots

__all__ = [
    "evolution",
    "load_snapshots",
    "patterns",
    "save",
    "save_snapshots",
    "tradeoff",
]
