"""Whole models: linear layers become block-sparse or dense, MLPs are fused, and reports say what was done."""

from .fuse import fuse_mlps_
from .report import Report

__all__ = ["Report", "fuse_mlps_"]
