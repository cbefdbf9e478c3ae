"""Replaces the linear layers of whole models."""

from .patcher import BlockSparseModelPatcher
from .reports import DenseParameter, FusedMLP, FuseReport, PatchedLayer, PatchReport, Size, SkippedLayer
from .rules import DEFAULT_OPTIONS

__all__ = [
    "DEFAULT_OPTIONS",
    "BlockSparseModelPatcher",
    "DenseParameter",
    "FuseReport",
    "FusedMLP",
    "PatchReport",
    "PatchedLayer",
    "Size",
    "SkippedLayer",
]
