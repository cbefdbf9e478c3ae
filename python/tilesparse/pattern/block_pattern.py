"""`BlockPattern`: which blocks of a weight are kept.

The file is long because it is one class, most of it documentation: `choosing` chooses blocks, and `indices`
makes and moves index tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import checked, shown
from .._checks import Index, check_block_shape, check_index, check_shapes
from .._runtime.indices import blocks_of
from .._runtime.lock import exclusive
from .._runtime.lookup import content_of, prepared
from .._runtime.private import refuse_fakes
from ..errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError
from .choosing import (
    all_blocks,
    best_blocks,
    block_norms,
    canonical_bsr,
    canonical_scipy,
    check_matrix,
    listed_blocks,
    random_blocks,
)
from .indices import checked_index, index_of, moved_blocks, moved_index, overwrite_index, refined_index
from .view import PatternView

Device = torch.device | str | int | None


class BlockPattern(PatternView):
    """The kept blocks of a weight W of shape [out_features, in_features].

    W is divided into R x C blocks of ``block_shape``. The kept blocks are stored as block compressed rows
    (BSR) with the names of PyTorch's BSR tensors: block row r holds the entries ``crow_indices[r]`` to
    ``crow_indices[r + 1]`` of ``col_indices``, in ascending order of columns. Entry e is stored at position
    ``slot[e]`` of a values tensor [nnz, bn, bk], so a pattern can change without moving a weight. Empty
    rows, empty columns and patterns without any block are legal.

    A pattern is these three tensors, on any device. The constructor copies and validates them once.
    `update_` changes them in place, and everything that uses them follows: compiled code, captured CUDA
    graphs, and the layer whose ``pattern`` this is. Products read the pattern on the device of the values
    and copy it there if it lies elsewhere.

    Args:
        crow_indices: [R + 1] integers, tensor or sequence.
        col_indices: [nnz] integers.
        shape: (out_features, in_features), multiples of the block shape.
        block_shape: (bn, bk), rows (out) and columns (in) of a block, each 16, 32, 64 or 128; or one
            number for both.
        slot: [nnz] a permutation of 0..nnz-1; None means 0..nnz-1 in order.
        device: device of the pattern; None is the device of ``col_indices``.

    Raises:
        InvalidArgumentError: ``shape`` or ``block_shape`` is invalid.
        InvalidPatternError: the tensors do not describe a pattern of that shape.
    """

    @checked
    def __init__(
        self,
        crow_indices: Tensor | Sequence[int],
        col_indices: Tensor | Sequence[int],
        *,
        shape: Sequence[int],
        block_shape: int | Sequence[int],
        slot: Tensor | Sequence[int] | None = None,
        device: Device = None,
    ) -> None:
        refuse_fakes("a pattern")
        with torch.inference_mode(False):  # tensors made there could not be updated elsewhere
            self._own(checked_index(crow_indices, col_indices, shape, block_shape, slot, device))

    def _own(self, index: Index) -> None:
        self._index = index
        self._copies: dict[torch.device, tuple[Index, tuple[object, int]]] = {}
        self._after_update: Callable[[], None] | None = None

    @classmethod
    def from_index(cls, index: Index, after_update: Callable[[], None] | None = None) -> BlockPattern:
        """Wrap a layer's own tensors without validating them; call ``after_update`` after each change."""
        check_index(index)
        pattern = cls.__new__(cls)
        pattern._own(index)
        pattern._after_update = after_update
        return pattern

    @classmethod
    @checked
    def random(
        cls,
        shape: Sequence[int],
        *,
        block_shape: int | Sequence[int],
        density: float | None = None,
        nnz: int | None = None,
        parts: tuple[int, int] = (1, 1),
        cover: bool = True,
        generator: torch.Generator | None = None,
        device: Device = None,
    ) -> BlockPattern:
        """Draw blocks at random; leave no block row or column empty if the count allows.

        The first max(R, C) blocks pair the block rows with the block columns, both in random order; the
        shorter list repeats. Each member of the longer list gets one block, and the members of the shorter
        list get equal numbers, up to one. All other blocks are drawn uniformly, without replacement, from
        the rest. With fewer than max(R, C) blocks the pairing stops early and covers as many rows and
        columns as possible. Every block is equally likely to be kept.

        Args:
            shape: (out_features, in_features), multiples of the block shape.
            block_shape: (bn, bk), or one number for both.
            density: kept fraction; round(density * R * C) blocks are drawn.
            nnz: number of blocks, instead of a density.
            parts: (r, c): divide the block rows into r equal parts and the block columns into c, and draw
                the same number of blocks from each of the r * c parts. Tensor parallelism over r processes
                by rows, or c by columns, needs this balance. Rows and columns of the whole weight are
                covered.
            cover: False draws all blocks uniformly, without replacement. At low densities some block rows
                then stay empty (their outputs are the bias alone), and so do some block columns (their
                inputs are ignored).
            generator: a CPU generator; None is PyTorch's default generator.
            device: device of the pattern; None is the CPU.

        Raises:
            InvalidArgumentError: not exactly one of density and nnz is given, one of them is out of range, a
                density above 0 rounds to no block, the blocks cannot be divided into such parts, or
                ``cover`` is not a bool.
        """
        refuse_fakes("a pattern")
        shape, block_shape, grid = check_shapes(shape, block_shape)
        chosen = random_blocks(grid, parts, density, nnz, cover, generator)
        return cls._from_sorted(chosen, shape, block_shape, device=device)

    @classmethod
    @checked
    def full(
        cls, shape: Sequence[int], *, block_shape: int | Sequence[int], device: Device = None
    ) -> BlockPattern:
        """Keep every block; see the class for the arguments."""
        shape, block_shape, grid = check_shapes(shape, block_shape)
        return cls._from_sorted(all_blocks(grid), shape, block_shape, device=device)

    @classmethod
    @checked
    def from_blocks(
        cls,
        blocks: Tensor | Sequence[tuple[int, int]],
        *,
        shape: Sequence[int],
        block_shape: int | Sequence[int],
    ) -> BlockPattern:
        """Keep the listed blocks, in any order; block i of the list is stored at slot i of the values.

        Args:
            blocks: [nnz, 2] integers or a list of (block row, block column).
            shape: (out_features, in_features), multiples of the block shape.
            block_shape: (bn, bk), or one number for both.

        Raises:
            InvalidPatternError: a block lies outside the shape or is listed twice.
        """
        shape, block_shape, grid = check_shapes(shape, block_shape)
        chosen, slot = listed_blocks(blocks, grid)
        device = blocks.device if isinstance(blocks, Tensor) else None
        return cls._from_sorted(chosen, shape, block_shape, slot, device)

    @classmethod
    @checked
    def from_block_mask(cls, mask: Tensor, *, block_shape: int | Sequence[int]) -> BlockPattern:
        """Keep the blocks that are nonzero (True) in ``mask`` [R, C], which has one entry per block."""
        check_matrix("mask", mask)
        bn, bk = check_block_shape(block_shape)
        shape = (mask.shape[0] * bn, mask.shape[1] * bk)
        chosen = mask.detach().cpu().reshape(-1).nonzero().reshape(-1)
        return cls._from_sorted(chosen, shape, (bn, bk), device=mask.device)

    @classmethod
    @checked
    def from_mask(cls, mask: Tensor, *, block_shape: int | Sequence[int]) -> BlockPattern:
        """Keep the blocks in which ``mask`` [out_features, in_features], or a matrix, has a nonzero."""
        check_matrix("mask", mask)
        block_shape = check_shapes(mask.shape, block_shape)[1]
        return cls.from_block_mask(blocks_of(mask != 0, block_shape).any(-1).any(-1), block_shape=block_shape)

    @classmethod
    def from_bsr(cls, matrix: Tensor) -> BlockPattern:
        """Keep the blocks that a ``torch.sparse_bsr`` matrix stores, in any order; duplicates are summed.

        Raises:
            InvalidArgumentError: ``matrix`` has another layout, or blocks of an invalid shape.
        """
        crow, col, values = canonical_bsr(matrix)
        return cls(crow, col, shape=matrix.shape, block_shape=values.shape[1:])

    @classmethod
    @checked
    def from_scipy(cls, matrix: Any, *, block_shape: int | Sequence[int] | None = None) -> BlockPattern:
        """Keep the blocks of a scipy.sparse matrix of any format.

        Args:
            matrix: a scipy sparse matrix or array, its blocks in any order; duplicates are summed.
            block_shape: (bn, bk); None takes the block shape of a BSR matrix.

        Raises:
            InvalidArgumentError: the block shape is missing or invalid, or does not divide the shape.
        """
        matrix = canonical_scipy(matrix, block_shape)
        return cls(
            torch.from_numpy(matrix.indptr),
            torch.from_numpy(matrix.indices),
            shape=matrix.shape,
            block_shape=matrix.blocksize,
        )

    @classmethod
    @checked
    def from_scores(
        cls,
        scores: Tensor,
        *,
        block_shape: int | Sequence[int],
        density: float | None = None,
        nnz: int | None = None,
        parts: tuple[int, int] = (1, 1),
    ) -> BlockPattern:
        """Keep the blocks with the highest scores [R, C]; the first in row order wins a tie.

        ``density``, ``nnz`` and ``parts`` are those of `random`.

        Raises:
            InvalidArgumentError: as in `random`, or a score is NaN.
        """
        check_matrix("scores", scores)
        bn, bk = check_block_shape(block_shape)
        chosen, shape = best_blocks(scores, parts, density, nnz), (scores.shape[0] * bn, scores.shape[1] * bk)
        return cls._from_sorted(chosen, shape, (bn, bk), device=scores.device)

    @classmethod
    @checked
    def from_dense(
        cls,
        dense: Tensor,
        *,
        block_shape: int | Sequence[int],
        density: float | None = None,
        nnz: int | None = None,
        parts: tuple[int, int] = (1, 1),
    ) -> BlockPattern:
        """Keep the blocks of a dense matrix [out_features, in_features] with the largest Frobenius norm.

        ``density``, ``nnz`` and ``parts`` are those of `random`.

        Raises:
            InvalidArgumentError: as in `random`, or a norm is NaN.
        """
        check_matrix("dense", dense)
        block_shape = check_shapes(dense.shape, block_shape)[1]
        scores = block_norms(dense, block_shape)
        return cls.from_scores(scores, block_shape=block_shape, density=density, nnz=nnz, parts=parts)

    @classmethod
    def _from_sorted(
        cls,
        chosen: Tensor,
        shape: Sequence[int],
        block_shape: Sequence[int],
        slot: Tensor | None = None,
        device: Device = None,
    ) -> BlockPattern:
        """Make a pattern of ascending block numbers row * C + col on the host."""
        rows, cols = shape[0] // block_shape[0], shape[1] // block_shape[1]
        crow = torch.zeros(rows + 1, dtype=torch.int64, device="cpu")
        crow[1:] = torch.bincount(chosen // cols, minlength=rows).cumsum(0)
        return cls(
            crow, chosen % cols, shape=shape, block_shape=block_shape, slot=slot, device=device or "cpu"
        )

    @checked
    def to(self, device: torch.device | str | int) -> BlockPattern:
        """Copy to another device; return this pattern if it is already there."""
        index = moved_index(self._index, torch.device(device))
        return self if index is self._index else BlockPattern.from_index(index)

    def index_on(self, device: torch.device) -> Index:
        """Return the tensors that operators on a device take: its own, or a copy there that follows them."""
        if device == self.device:
            return self._index
        if torch.compiler.is_compiling():
            return moved_index(self._index, device)
        if not isinstance(device, torch.device):
            raise InvalidTypeError(f"device must be a torch.device, got {shown(device)}")
        with exclusive():  # so that threads get one copy
            content, copied = content_of(self._index), self._copies.get(device)
            if copied is None:
                copied = moved_index(self._index, device), content
            elif copied[1] != content:
                overwrite_index(copied[0], self._index)
            self._copies[device] = copied[0], content
            return copied[0]

    @checked
    def update_(self, other: BlockPattern) -> BlockPattern:
        """Replace the blocks by those of ``other``, a pattern of the same shape and block shape.

        If the number of blocks stays the same, everything is written in place: the pattern's tensors, the
        plans that captured graphs read, and the buffers of the layer whose pattern this is. On a CUDA device
        the host does not wait. A backward pass whose forward pass ran before the update raises
        PatternChangedError.

        Raises:
            InvalidArgumentError: ``other`` has another shape or block shape.
            InvalidPatternError: ``other`` has another number of blocks, and this is a layer's pattern.
        """
        if (other.shape, other.block_shape) != (self.shape, self.block_shape):
            raise InvalidArgumentError(
                f"other must have shape {self.shape} in blocks of {self.block_shape}, "
                f"got {other.shape} in blocks of {other.block_shape}"
            )
        if other.nnz == self.nnz:
            return self._take(other._index)
        if self._after_update is not None:
            raise InvalidPatternError(
                f"other must have {self.nnz} blocks, as many as the layer stores, got {other.nnz}"
            )
        with torch.inference_mode(False):
            self._own(moved_index(other._index, self.device, copy=True))
        return self

    @checked
    def move_blocks_(
        self,
        slots: Tensor | Sequence[int],
        blocks: Tensor | Sequence[tuple[int, int]],
        *,
        check: bool = True,
    ) -> BlockPattern:
        """Move the blocks at ``slots`` to new places; see `update_` for the effects.

        A block may take a place that another moved block leaves.

        Args:
            slots: [n] integers, each at most once.
            blocks: [n, 2] the new (block row, block column) of each.
            check: True looks for places that lie outside or are taken, for which the host waits on CUDA
                devices. False makes such places undefined behaviour.

        Raises:
            InvalidPatternError: a place lies outside or is taken; nothing has changed.
        """
        rows, cols = self.block_indices()
        places = moved_blocks(torch.stack((rows, cols), 1), slots, blocks, check)
        if check:
            return self.update_(
                BlockPattern.from_blocks(places, shape=self.shape, block_shape=self.block_shape)
            )
        return self._take(index_of(places[:, 0] * self.grid[1] + places[:, 1], self._index))

    def _take(self, other: Index) -> BlockPattern:
        with exclusive():
            overwrite_index(self._index, other)
            for device, (copied, _) in self._copies.items():
                overwrite_index(copied, self._index)
                self._copies[device] = copied, content_of(self._index)
        if self._after_update is not None:
            self._after_update()
        return self

    def transpose(self) -> BlockPattern:
        """Return the pattern of the transposed weight; every block keeps its slot."""
        col_ptr, row_idx, slot = (array.clone() for array in prepared(self._index).columns())
        (out_features, in_features), (bn, bk) = self.shape, self.block_shape
        return BlockPattern.from_index(Index(col_ptr, row_idx, slot, (in_features, out_features), (bk, bn)))

    @checked
    def refined(self, block_shape: int | Sequence[int]) -> BlockPattern:
        """Return the pattern of the same weight in smaller blocks, on the same device.

        Each block becomes n blocks: of the one at slot s they have the slots s * n and following, row by row.

        Raises:
            InvalidArgumentError: ``block_shape`` does not divide the pattern's.
        """
        return BlockPattern.from_index(refined_index(self._index, block_shape))

    def __reduce__(self) -> tuple[Callable[..., BlockPattern], tuple[Any, ...]]:
        return _rebuild, tuple(self._index)


def _rebuild(crow: Tensor, col: Tensor, slot: Tensor, shape: Any, block_shape: Any) -> BlockPattern:
    return BlockPattern(crow, col, shape=shape, block_shape=block_shape, slot=slot)
