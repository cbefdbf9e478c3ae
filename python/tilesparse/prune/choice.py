"""One way to store one layer, among which budgets choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Choice:
    """What one pruned layer is to be: which fraction of its blocks is kept, and how they are stored.

    Attributes:
        density: kept fraction of the blocks, above 0 and at most 1.
        block_shape: (bn, bk), rows (out) and columns (in) of a block.
        nm: (2, 4) for 2:4 inside the blocks, or None.
        storage: "plain", "compressed", "int8" or "float8_e4m3fn", see `BlockSparseLinear.to_storage`.
    """

    density: float
    block_shape: tuple[int, int]
    nm: tuple[int, int] | None = None
    storage: str = "plain"


# By layer and choice: ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖² on the calibration data, in Frobenius norms; 0 is dense.
ErrorCurves: TypeAlias = Mapping[str, Mapping[Choice, float]]
