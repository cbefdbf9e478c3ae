"""Block patterns: which blocks of a weight are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import checked, shown
from .._checks import (
    Index,
    check_block_shape,
    check_content,
    check_index,
    check_shapes,
)
from .._runtime import indices as _indices
from .._runtime.indices import blocks_of
from .._runtime.lock import exclusive
from .._runtime.lookup import content_of, prepared
from .._runtime.private import refuse_fakes
from ..errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError
from .choosing import blocks_of_parts, canonical_scipy, check_matrix, check_parts, covering_blocks, drawn
from .indices import checked_index, index_of, is_integer, moved_index, overwrite_index

Device = torch.device | str | int | None


class BlockPattern:
    """The kept blocks of a weight W of shape [out_features, in_features].

    W is cut into R x C blocks of ``block_shape``. The kept ones are listed as block compressed rows
    (BSR), with the names of PyTorch's BSR tensors: block row r holds the entries ``crow_indices[r]`` to
    ``crow_indices[r + 1]`` of ``col_indices``, whose columns ascend. Entry e is stored at position
    ``slot[e]`` of a values tensor [nnz, bn, bk], so a pattern can change without moving a weight. Empty
    rows, empty columns and patterns without any block are legal.

    A pattern is these three tensors, on whatever device. They are copied and checked here, once.
    `update_` changes them in place, and everything that uses them follows: compiled code, captured CUDA
    graphs, and the layer whose ``pattern`` this is. Products want them on the device of the values, and
    copy them there otherwise.

    Args:
        crow_indices: [R + 1] integers, tensor or sequence.
        col_indices: [nnz] integers.
        shape: (out_features, in_features), multiples of the block shape.
        block_shape: (bn, bk), rows (out) and columns (in) of a block, each 16, 32, 64 or 128; or one
            number for both.
        slot: [nnz] a permutation of 0..nnz-1; None means 0..nnz-1 in order.
        device: where the tensors are to lie; None is where ``col_indices`` lies.

    Raises:
        InvalidArgumentError: ``shape`` or ``block_shape`` is not allowed.
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
        """Draw blocks at random, so that no block row or column stays empty where the count allows.

        The first max(R, C) blocks pair the block rows with the block columns, both in random order, the
        shorter of the two lists again and again: each member of the longer one gets one block, and those of
        the shorter one as equally many as possible. All other blocks are drawn uniformly, without
        replacement, from what is left. With fewer than max(R, C) blocks the pairing is cut short, so that as
        many rows and as many columns as possible have a block. Every block is equally likely to be kept.

        Args:
            shape: (out_features, in_features), multiples of the block shape.
            block_shape: (bn, bk), or one number for both.
            density: kept fraction; round(density * R * C) blocks are drawn.
            nnz: how many blocks, in place of a density.
            parts: (r, c): block rows are cut into r equal parts and block columns into c, and as many blocks
                are drawn from each of the r * c parts, density or nnz / (r * c) of it. Tensor parallelism
                over r processes by rows, or c by columns, needs such a balance. The rows and columns that
                are covered are those of the whole weight.
            cover: False draws all blocks uniformly, without replacement. At low densities that leaves block
                rows empty, whose outputs are the bias alone, and block columns, whose inputs do not count.
            generator: a CPU generator; None is PyTorch's default one.
            device: of the pattern; None is the CPU.

        Raises:
            InvalidArgumentError: not exactly one of density and nnz, or one out of range, or a density
                that is not 0 and rounds to no block, or blocks that cannot be cut into such parts, or a
                ``cover`` that is no bool.
        """
        refuse_fakes("a pattern")
        shape, block_shape, grid = check_shapes(shape, block_shape)
        if not isinstance(cover, bool):
            raise InvalidArgumentError(f"cover must be True or False, got {cover!r}")
        of_parts, kept = blocks_of_parts(grid, parts, density, nnz)
        covering = covering_blocks(grid, check_parts(parts), kept if cover else 0, generator)
        chosen = [
            numbers[drawn(len(numbers), first, kept, generator)]
            for numbers, first in zip(of_parts, covering, strict=True)
        ]
        return cls._from_sorted(torch.cat(chosen).sort().values, shape, block_shape, device=device)

    @classmethod
    @checked
    def full(
        cls, shape: Sequence[int], *, block_shape: int | Sequence[int], device: Device = None
    ) -> BlockPattern:
        """Every block kept.

        Args:
            shape: (out_features, in_features), multiples of the block shape.
            block_shape: (bn, bk), or one number for both.
            device: of the pattern; None is the CPU.

        Raises:
            InvalidArgumentError: ``shape`` or ``block_shape`` is not allowed.
        """
        shape, block_shape, (rows, cols) = check_shapes(shape, block_shape)
        chosen = torch.arange(rows * cols, device="cpu")
        return cls._from_sorted(chosen, shape, block_shape, device=device)

    @classmethod
    @checked
    def from_blocks(
        cls,
        blocks: Tensor | Sequence[tuple[int, int]],
        *,
        shape: Sequence[int],
        block_shape: int | Sequence[int],
    ) -> BlockPattern:
        """The listed blocks, in any order; block i of the list is stored at slot i of the values.

        Args:
            blocks: [nnz, 2] integers or a list of (block row, block column).
            shape: (out_features, in_features), multiples of the block shape.
            block_shape: (bn, bk), or one number for both.

        Raises:
            InvalidPatternError: a block lies outside the shape or is listed twice.
        """
        shape, block_shape, (rows, cols) = check_shapes(shape, block_shape)
        device = None
        if isinstance(blocks, Tensor):
            check_content("blocks", blocks)
            device = blocks.device
        pairs = torch.as_tensor(blocks, device="cpu")
        if pairs.numel() == 0:
            pairs = torch.empty(0, 2, dtype=torch.int64, device="cpu")
        if pairs.dim() != 2 or pairs.shape[1] != 2 or not is_integer(pairs):
            raise InvalidPatternError(
                f"blocks: (row, col) pairs of integers expected, "
                f"got shape {tuple(pairs.shape)} of {pairs.dtype}"
            )
        row, col = pairs.long().unbind(1)
        outside = ((row < 0) | (row >= rows) | (col < 0) | (col >= cols)).nonzero()
        if len(outside):
            first = tuple(pairs[outside[0, 0]].tolist())
            raise InvalidPatternError(f"blocks: {first} lies outside the {rows} x {cols} blocks of the shape")
        chosen, slot = (row * cols + col).sort()
        twice = (chosen[1:] == chosen[:-1]).nonzero()
        if len(twice):
            first = divmod(int(chosen[twice[0, 0]]), cols)
            raise InvalidPatternError(f"blocks: {first} is listed twice")
        return cls._from_sorted(chosen, shape, block_shape, slot, device)

    @classmethod
    @checked
    def from_block_mask(cls, mask: Tensor, *, block_shape: int | Sequence[int]) -> BlockPattern:
        """The blocks that are nonzero (True) in ``mask``.

        Args:
            mask: [R, C], one entry for each block.
            block_shape: (bn, bk), or one number for both.

        Raises:
            InvalidArgumentError: the mask has not two dimensions, or the block shape is not allowed.
        """
        check_matrix("mask", mask)
        bn, bk = check_block_shape(block_shape)
        shape = (mask.shape[0] * bn, mask.shape[1] * bk)
        chosen = mask.detach().cpu().reshape(-1).nonzero().reshape(-1)
        return cls._from_sorted(chosen, shape, (bn, bk), device=mask.device)

    @classmethod
    @checked
    def from_mask(cls, mask: Tensor, *, block_shape: int | Sequence[int]) -> BlockPattern:
        """The blocks that hold at least one nonzero.

        Args:
            mask: [out_features, in_features], one entry for each element; or a matrix itself.
            block_shape: (bn, bk), or one number for both.

        Raises:
            InvalidArgumentError: the mask has not two dimensions, or cannot be cut into such blocks.
        """
        check_matrix("mask", mask)
        block_shape = check_shapes(mask.shape, block_shape)[1]
        return cls.from_block_mask(blocks_of(mask != 0, block_shape).any(-1).any(-1), block_shape=block_shape)

    @classmethod
    def from_bsr(cls, matrix: Tensor) -> BlockPattern:
        """The blocks a ``torch.sparse_bsr`` matrix stores; slot i is its i-th stored block.

        Raises:
            InvalidArgumentError: it is no such matrix, or its blocks have another shape than is allowed.
        """
        if not isinstance(matrix, Tensor):
            raise InvalidTypeError(f"matrix must be a 2-D torch.sparse_bsr tensor, got {shown(matrix)}")
        if matrix.layout != torch.sparse_bsr or matrix.dim() != 2:
            raise InvalidArgumentError(
                f"matrix: a 2-D sparse BSR tensor expected, got {matrix.dim()}-D {matrix.layout}"
            )
        return cls(
            matrix.crow_indices(),
            matrix.col_indices(),
            shape=matrix.shape,
            block_shape=matrix.values().shape[1:],
        )

    @classmethod
    @checked
    def from_scipy(cls, matrix: Any, *, block_shape: int | Sequence[int] | None = None) -> BlockPattern:
        """The blocks of a scipy.sparse matrix of any format.

        Args:
            matrix: a scipy sparse matrix or array; duplicates are summed.
            block_shape: (bn, bk); None takes that of a BSR matrix.

        Raises:
            InvalidArgumentError: the block shape is missing or not allowed, or does not divide the shape.
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
        """The best-scored blocks; of equal scores the first in row order.

        Args:
            scores: [R, C] one number per block, higher is better.
            block_shape: (bn, bk), or one number for both.
            density: kept fraction.
            nnz: how many blocks, in place of a density.
            parts: (r, c): as many of each part, see `random`.

        Raises:
            InvalidArgumentError: as of `random`, or a score is NaN.
        """
        check_matrix("scores", scores)
        if scores.is_complex():
            raise InvalidArgumentError(f"scores must be real numbers, got {scores.dtype}")
        bn, bk = check_block_shape(block_shape)
        flat = scores.detach().cpu().reshape(-1)
        if bool(flat.isnan().any()):
            raise InvalidArgumentError("scores: NaN cannot be ranked")
        grid = scores.shape[0], scores.shape[1]
        of_parts, kept = blocks_of_parts(grid, parts, density, nnz)
        best = flat[of_parts].sort(dim=1, descending=True, stable=True).indices[:, :kept]
        chosen = of_parts.gather(1, best).flatten().sort().values
        return cls._from_sorted(chosen, (grid[0] * bn, grid[1] * bk), (bn, bk), device=scores.device)

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
        """The blocks of a dense matrix [out_features, in_features] with the largest Frobenius norm.

        Args:
            dense: what to choose blocks of.
            block_shape: (bn, bk), or one number for both.
            density: kept fraction.
            nnz: how many blocks, in place of a density.
            parts: (r, c): as many of each part, see `random`.

        Raises:
            InvalidArgumentError: as of `random`, or a norm is NaN.
        """
        check_matrix("dense", dense)
        block_shape = check_shapes(dense.shape, block_shape)[1]
        blocks = blocks_of(dense.detach(), block_shape)
        precision = torch.promote_types(dense.dtype, torch.float32)
        scores = torch.linalg.vector_norm(blocks, dim=(-2, -1), dtype=precision)
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
        """From ascending block numbers row * C + col on the host."""
        rows, cols = shape[0] // block_shape[0], shape[1] // block_shape[1]
        crow = torch.zeros(rows + 1, dtype=torch.int64, device="cpu")
        crow[1:] = torch.bincount(chosen // cols, minlength=rows).cumsum(0)
        return cls(
            crow, chosen % cols, shape=shape, block_shape=block_shape, slot=slot, device=device or "cpu"
        )

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
        """Where the pattern's tensors lie."""
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

    @checked
    def to(self, device: torch.device | str | int) -> BlockPattern:
        """A copy on another device, or this pattern if it is there."""
        index = moved_index(self._index, torch.device(device))
        return self if index is self._index else BlockPattern.from_index(index)

    def index_on(self, device: torch.device) -> Index:
        """As operators on that device take it: its own tensors, or a copy there that follows them."""
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
        """Takes over the blocks of ``other``, a pattern of the same shape and block shape.

        With as many blocks as before everything is written in place: the pattern's tensors, plans that
        captured graphs read, and, where it is a layer's, the layer's buffers. On a CUDA device the host does
        not wait. A backward pass whose forward pass ran before the update raises PatternChangedError.

        Raises:
            InvalidArgumentError: another shape or block shape.
            InvalidPatternError: another number of blocks, in a layer's pattern.
        """
        if (other.shape, other.block_shape) != (self.shape, self.block_shape):
            raise InvalidArgumentError(
                f"other: shape {self.shape} in blocks of {self.block_shape} expected, "
                f"got {other.shape} in blocks of {other.block_shape}"
            )
        if other.nnz == self.nnz:
            return self._take(other._index)
        if self._after_update is not None:
            raise InvalidPatternError(
                f"other: {self.nnz} blocks expected, as many as the layer has weights for, got {other.nnz}"
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
        """Gives the blocks at ``slots`` new places; see `update_` for what follows.

        Blocks may take places that other moved blocks leave.

        Args:
            slots: [n] integers, each at most once.
            blocks: [n, 2] the new (block row, block column) of each.
            check: whether to look for places that lie outside or are taken, for which the host waits on CUDA
                devices. Without, such places are undefined behaviour.

        Raises:
            InvalidPatternError: a place lies outside, or is taken. Nothing has changed then.
        """
        chosen = self._numbers("slots", slots).reshape(-1)
        places = self._numbers("blocks", blocks)
        if places.numel() != 2 * len(chosen):
            raise InvalidArgumentError(
                f"blocks: {len(chosen)} places expected, one per slot, got shape {tuple(places.shape)}"
            )
        places = places.reshape(-1, 2)
        if check:
            numbers = chosen.tolist()
            if len(set(numbers)) != len(numbers) or not all(0 <= slot < self.nnz for slot in numbers):
                raise InvalidPatternError(f"slots: different numbers from 0 to {self.nnz - 1} expected")
        everywhere = torch.stack(self.block_indices(), 1)
        everywhere[chosen] = places
        if check:
            return self.update_(
                BlockPattern.from_blocks(everywhere, shape=self.shape, block_shape=self.block_shape)
            )
        return self._take(index_of(everywhere[:, 0] * self.grid[1] + everywhere[:, 1], self._index))

    def _numbers(self, name: str, given: Tensor | Sequence[Any]) -> Tensor:
        """Integers on the pattern's device."""
        if isinstance(given, Tensor):
            check_content(name, given)
        numbers = torch.as_tensor(given, device=self.device)
        if numbers.numel() and not is_integer(numbers):
            raise InvalidArgumentError(f"{name} must be integers, got {numbers.dtype}")
        return numbers.long()

    def _take(self, other: Index) -> BlockPattern:
        with exclusive():
            overwrite_index(self._index, other)
            for device, (copied, _) in self._copies.items():
                overwrite_index(copied, self._index)
                self._copies[device] = copied, content_of(self._index)
        if self._after_update is not None:
            self._after_update()
        return self

    def block_indices(self) -> tuple[Tensor, Tensor]:
        """(rows, cols), each [nnz] int64: where the block at every slot lies."""
        return _indices.block_indices(self._index)

    def to_block_mask(self) -> Tensor:
        """[R, C] bool, True for kept blocks."""
        mask = torch.zeros(self.grid, dtype=torch.bool, device=self.device)
        mask[self.block_indices()] = True
        return mask

    def to_mask(self) -> Tensor:
        """[out_features, in_features] bool, True for elements of kept blocks."""
        bn, bk = self.block_shape
        return self.to_block_mask().repeat_interleave(bn, 0).repeat_interleave(bk, 1)

    def transpose(self) -> BlockPattern:
        """The pattern of the transposed weight; every block keeps its slot."""
        col_ptr, row_idx, slot = (array.clone() for array in prepared(self._index).columns())
        (out_features, in_features), (bn, bk) = self.shape, self.block_shape
        return BlockPattern.from_index(Index(col_ptr, row_idx, slot, (in_features, out_features), (bk, bn)))

    def __eq__(self, other: object) -> bool:
        """Same shapes, same blocks at the same slots, on whatever devices."""
        if not isinstance(other, BlockPattern):
            return NotImplemented
        mine, theirs = self._index, other._index
        return mine[3:] == theirs[3:] and all(
            a.shape == b.shape and torch.equal(a, b.to(a.device))
            for a, b in zip(mine[:3], theirs[:3], strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # patterns are compared by content and can change

    def __reduce__(self) -> tuple[Callable[..., BlockPattern], tuple[Any, ...]]:
        return _rebuild, tuple(self._index)

    def __repr__(self) -> str:
        return (
            f"BlockPattern(shape={self.shape}, block_shape={self.block_shape}, "
            f"nnz={self.nnz}, density={self.density:.3g}, device={str(self.device)!r})"
        )


def _rebuild(
    crow_indices: Tensor,
    col_indices: Tensor,
    slot: Tensor,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
) -> BlockPattern:
    return BlockPattern(crow_indices, col_indices, shape=shape, block_shape=block_shape, slot=slot)
