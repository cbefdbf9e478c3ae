"""One way to store one layer, among which budgets choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .._arguments import shown
from .._checks import as_number, check_block_shape
from ..config import check_nm, check_nm_blocks, check_storage
from ..errors import InvalidArgumentError


@dataclass(frozen=True)
class Choice:
    """What one pruned layer is to be: which fraction of its blocks is kept, and how they are stored.

    Attributes:
        density: kept fraction of the blocks, above 0 and at most 1.
        block_shape: (bn, bk), rows (out) and columns (in) of a block.
        nm: (2, 4) for 2:4 inside the blocks, or None.
        storage: "plain", "compressed", "int8" or "float8_e4m3fn", see `BlockSparseLinear.to_storage`.

    Raises:
        InvalidArgumentError: a value is not allowed, or does not fit the others; the text names it.
    """

    density: float
    block_shape: tuple[int, int]
    nm: tuple[int, int] | None = None
    storage: str = "plain"

    def __post_init__(self) -> None:
        density = as_number(self.density)
        if not 0 < density <= 1:
            raise InvalidArgumentError(
                f"density must be a number above 0 and at most 1, got {shown(self.density)}"
            )
        block_shape = check_block_shape(self.block_shape)
        check_nm(self.nm, False)
        check_nm_blocks(self.nm, False, block_shape)
        check_storage(self.storage, self.nm)
        nm = None if self.nm is None else tuple(self.nm)
        # As numbers and tuples of Python, so that equal choices are one key.
        for name, value in (("density", density), ("block_shape", block_shape), ("nm", nm)):
            object.__setattr__(self, name, value)


# By layer and choice: ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖² on the calibration data, in Frobenius norms; 0 is dense.
ErrorCurves: TypeAlias = Mapping[str, Mapping[Choice, float]]
