"""The import path of 0.1.0 of `tilesparse.cli.demo`."""

from .cli.demo import GPT, SIZES, Settings, Size, load_text, make_sparse, run, synchronize, train

__all__ = [
    "GPT",
    "SIZES",
    "Settings",
    "Size",
    "load_text",
    "make_sparse",
    "run",
    "synchronize",
    "train",
]
