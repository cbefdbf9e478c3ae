"""The read-only side of a pattern: sizes, index tensors, masks and comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import Index
from .._runtime import indices as _indices


class PatternView:
    """The sizes, the index tensors and the masks of a pattern; `BlockPattern` makes and updates it."""

    _index: Index

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self._index.shape

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self._index.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self._index.shape[1]

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bn, bk): rows and columns of a block."""
        return self._index.block_shape

    @property
    def grid(self) -> tuple[int, int]:
        """(R, C): block rows and block columns of the weight."""
        (out_features, in_features), (bn, bk) = self.shape, self.block_shape
        return out_features // bn, in_features // bk

    @property
    def nnz(self) -> int:
        """Number of kept blocks."""
        return self._index.col_indices.shape[0]

    @property
    def density(self) -> float:
        """Kept fraction of the blocks."""
        rows, cols = self.grid
        return self.nnz / (rows * cols)

    @property
    def device(self) -> torch.device:
        """Device of the pattern's tensors."""
        return self._index.col_indices.device

    @property
    def crow_indices(self) -> Tensor:
        """[R + 1] int32: where each block row starts."""
        return self._index.crow_indices

    @property
    def col_indices(self) -> Tensor:
        """[nnz] int32: block column of each entry."""
        return self._index.col_indices

    @property
    def slot(self) -> Tensor:
        """[nnz] int32: position in the values of each entry's block."""
        return self._index.slot

    def block_indices(self) -> tuple[Tensor, Tensor]:
        """Return (rows, cols), each [nnz] int64: the place of the block at every slot."""
        return _indices.block_indices(self._index)

    def to_block_mask(self) -> Tensor:
        """Return a mask [R, C] bool that is True for kept blocks."""
        mask = torch.zeros(self.grid, dtype=torch.bool, device=self.device)
        mask[self.block_indices()] = True
        return mask

    def to_mask(self) -> Tensor:
        """Return a mask [out_features, in_features] bool that is True for elements of kept blocks."""
        bn, bk = self.block_shape
        return self.to_block_mask().repeat_interleave(bn, 0).repeat_interleave(bk, 1)

    def __eq__(self, other: object) -> bool:
        """Return True for the same shapes and the same blocks at the same slots, on any devices."""
        if not isinstance(other, PatternView):
            return NotImplemented
        mine, theirs = self._index, other._index
        return mine[3:] == theirs[3:] and all(
            a.shape == b.shape and torch.equal(a, b.to(a.device))
            for a, b in zip(mine[:3], theirs[:3], strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # patterns are compared by content and can change

    def __repr__(self) -> str:
        return (
            f"BlockPattern(shape={self.shape}, block_shape={self.block_shape}, "
            f"nnz={self.nnz}, density={self.density:.3g}, device={str(self.device)!r})"
        )
