"""Error profiles: what each way to store a layer does to its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .._checks import check_block_shape
from ..config import BlockSparseConfig

# By layer and config: ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖² on the calibration data, in Frobenius norms; 0 is dense.
ErrorProfiles: TypeAlias = Mapping[str, Mapping[BlockSparseConfig, float]]


def block_shape_of(config: BlockSparseConfig) -> tuple[int, int]:
    """Return (bn, bk) of a config, as which it keeps one number, too."""
    return check_block_shape(config.block_shape)
