"""The ``tilesparse`` command."""

from .command import main

__all__ = [
    "main",
]
