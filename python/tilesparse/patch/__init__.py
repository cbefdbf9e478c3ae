"""Patching: the linear layers of whole models become block-sparse."""

from .patcher import BlockSparseModelPatcher
from .reports import DenseParameter, FusedMLP, FuseReport, PatchedLayer, PatchReport, Size, SkippedLayer
from .rules import DEFAULT_OPTIONS
from .sparsify import sparsify_

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
