"""Whole models: linear layers become block-sparse or dense, MLPs are fused, and reports say what was done."""

from .fuse import fuse_mlps_
from .patcher import BlockSparseModelPatcher
from .replace import densify_, sparsify_
from .report import Report, summary

__all__ = ["BlockSparseModelPatcher", "Report", "densify_", "fuse_mlps_", "sparsify_", "summary"]
