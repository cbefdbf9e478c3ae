"""Replaces the linear layers of whole models."""

from .patcher import (
    DEFAULT_OPTIONS,
    BlockSparseModelPatcher,
    DenseParameter,
    FusedMLP,
    FuseReport,
    PatchedLayer,
    PatchReport,
    Size,
    SkippedLayer,
)

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
