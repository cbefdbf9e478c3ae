"""Patching: the linear layers of whole models become block-sparse."""

from .match import DEFAULT_OPTIONS
from .patcher import BlockSparseModelPatcher
from .replace import sparsify_
from .report import DenseParameter, FusedMLP, FuseReport, PatchedLayer, PatchReport, Size, SkippedLayer

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
    "sparsify_",
]
