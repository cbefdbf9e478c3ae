"""Block patterns: which blocks of a weight are kept."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._prepared import PreparedPattern
from .errors import InvalidArgumentError, InvalidPatternError

BLOCK_SIZES = (16, 32, 64, 128)
INT32_MAX = 2**31 - 1

_handles = itertools.count(1)
_live: "weakref.WeakValueDictionary[int, BlockPattern]" = weakref.WeakValueDictionary()


class BlockPattern:
    """The kept blocks of a weight W of shape [out_features, in_features].

    W is cut into R x C blocks of ``block_shape``. The kept ones are listed as block compressed rows
    (BSR): block row r holds the entries ``row_ptr[r]`` to ``row_ptr[r + 1]`` of ``col_idx``, whose
    columns ascend. Entry e is stored at position ``slot[e]`` of a values tensor [nnz, bn, bk], so a
    pattern can change without moving a weight. Empty rows, empty columns and patterns without any
    block are legal. The arrays are copied, kept on the host, and must not be modified.

    Args:
        row_ptr: [R + 1] integers, tensor or sequence.
        col_idx: [nnz] integers.
        shape: (out_features, in_features), multiples of the block shape.
        block_shape: (bn, bk), rows (out) and columns (in) of a block; each 16, 32, 64 or 128.
        slot: [nnz] a permutation of 0..nnz-1; None means 0..nnz-1 in order.

    Raises:
        InvalidArgumentError: ``shape`` or ``block_shape`` is not allowed.
        InvalidPatternError: the arrays do not describe a pattern of that shape.
    """

    def __init__(
        self,
        row_ptr: Tensor | Sequence[int],
        col_idx: Tensor | Sequence[int],
        *,
        shape: Sequence[int],
        block_shape: Sequence[int],
        slot: Tensor | Sequence[int] | None = None,
    ) -> None:
        self._shape, self._block_shape, (block_rows, _) = _check_shapes(shape, block_shape)
        self._row_ptr = _index_array("row_ptr", row_ptr, block_rows + 1)
        self._col_idx = _index_array("col_idx", col_idx)
        nnz = len(self._col_idx)
        if slot is None:
            slot = torch.arange(nnz, dtype=torch.int32, device="cpu")
        self._slot = _index_array("slot", slot, nnz)
        self.prepared = self._prepare()
        self.prepared.validate()
        self._version = 0
        self._handle = next(_handles)
        _live[self._handle] = self

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        *,
        block_shape: Sequence[int],
        density: float | None = None,
        nnz: int | None = None,
        generator: torch.Generator | None = None,
    ) -> "BlockPattern":
        """Blocks drawn uniformly without replacement.

        Args:
            density: kept fraction; round(density * R * C) blocks are drawn. Or give
            nnz: how many blocks.
            generator: a CPU generator; None is PyTorch's default one.

        Raises:
            InvalidArgumentError: not exactly one of density and nnz, or one out of range.
        """
        shape, block_shape, (rows, cols) = _check_shapes(shape, block_shape)
        kept = _kept_blocks(rows * cols, density, nnz)
        chosen = torch.randperm(rows * cols, generator=generator, device="cpu")[:kept]
        return cls._from_sorted(chosen.sort().values, shape, block_shape)

    @classmethod
    def full(cls, shape: Sequence[int], *, block_shape: Sequence[int]) -> "BlockPattern":
        """Every block kept."""
        shape, block_shape, (rows, cols) = _check_shapes(shape, block_shape)
        return cls._from_sorted(torch.arange(rows * cols, device="cpu"), shape, block_shape)

    @classmethod
    def from_blocks(
        cls, blocks: Tensor | Sequence[tuple[int, int]], *, shape: Sequence[int], block_shape: Sequence[int]
    ) -> "BlockPattern":
        """The listed blocks, in any order; block i of the list is stored at slot i of the values.

        Args:
            blocks: [nnz, 2] integers or a list of (block row, block column).

        Raises:
            InvalidPatternError: a block lies outside the shape or is listed twice.
        """
        shape, block_shape, (rows, cols) = _check_shapes(shape, block_shape)
        pairs = torch.as_tensor(blocks, device="cpu")
        if pairs.numel() == 0:
            pairs = torch.empty(0, 2, dtype=torch.int64, device="cpu")
        if pairs.dim() != 2 or pairs.shape[1] != 2 or not _is_integer(pairs):
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
        return cls._from_sorted(chosen, shape, block_shape, slot)

    @classmethod
    def from_block_mask(cls, mask: Tensor, *, block_shape: Sequence[int]) -> "BlockPattern":
        """The blocks that are nonzero (True) in ``mask`` [R, C]."""
        _check_matrix("mask", mask)
        bn, bk = _check_block_shape(block_shape)
        shape = (mask.shape[0] * bn, mask.shape[1] * bk)
        return cls._from_sorted(mask.detach().cpu().reshape(-1).nonzero().reshape(-1), shape, (bn, bk))

    @classmethod
    def from_mask(cls, mask: Tensor, *, block_shape: Sequence[int]) -> "BlockPattern":
        """The blocks that hold at least one nonzero of the element mask [out_features, in_features]."""
        _check_matrix("mask", mask)
        return cls.from_block_mask(blocks_of(mask != 0, block_shape).any(-1).any(-1), block_shape=block_shape)

    @classmethod
    def from_bsr(cls, matrix: Tensor) -> "BlockPattern":
        """The blocks a ``torch.sparse_bsr`` matrix stores; slot i is its i-th stored block."""
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
    def from_scipy(cls, matrix: Any, *, block_shape: Sequence[int] | None = None) -> "BlockPattern":
        """The blocks of a scipy.sparse matrix of any format.

        Args:
            matrix: a scipy sparse matrix or array; duplicates are summed.
            block_shape: (bn, bk); None takes that of a BSR matrix.
        """
        matrix = canonical_scipy(matrix, block_shape)
        return cls(
            torch.from_numpy(matrix.indptr),
            torch.from_numpy(matrix.indices),
            shape=matrix.shape,
            block_shape=matrix.blocksize,
        )

    @classmethod
    def from_scores(
        cls,
        scores: Tensor,
        *,
        block_shape: Sequence[int],
        density: float | None = None,
        nnz: int | None = None,
    ) -> "BlockPattern":
        """The best-scored blocks; of equal scores the first in row order.

        Args:
            scores: [R, C] one number per block, higher is better.
            density: kept fraction, or give
            nnz: how many blocks.
        """
        _check_matrix("scores", scores)
        bn, bk = _check_block_shape(block_shape)
        flat = scores.detach().cpu().reshape(-1)
        if bool(flat.isnan().any()):
            raise InvalidArgumentError("scores: NaN cannot be ranked")
        kept = _kept_blocks(flat.numel(), density, nnz)
        best = flat.sort(descending=True, stable=True).indices[:kept]
        shape = (scores.shape[0] * bn, scores.shape[1] * bk)
        return cls._from_sorted(best.sort().values, shape, (bn, bk))

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        *,
        block_shape: Sequence[int],
        density: float | None = None,
        nnz: int | None = None,
    ) -> "BlockPattern":
        """The blocks of a dense matrix [out_features, in_features] with the largest Frobenius norm."""
        _check_matrix("dense", dense)
        blocks = blocks_of(dense.detach(), block_shape)
        precision = torch.promote_types(dense.dtype, torch.float32)
        scores = torch.linalg.vector_norm(blocks, dim=(-2, -1), dtype=precision)
        return cls.from_scores(scores, block_shape=block_shape, density=density, nnz=nnz)

    @classmethod
    def _from_sorted(
        cls, chosen: Tensor, shape: Sequence[int], block_shape: Sequence[int], slot: Tensor | None = None
    ) -> "BlockPattern":
        """From ascending block numbers row * C + col."""
        rows, cols = shape[0] // block_shape[0], shape[1] // block_shape[1]
        row_ptr = torch.zeros(rows + 1, dtype=torch.int64, device="cpu")
        row_ptr[1:] = torch.bincount(chosen // cols, minlength=rows).cumsum(0)
        return cls(row_ptr, chosen % cols, shape=shape, block_shape=block_shape, slot=slot)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self._shape

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self._shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self._shape[1]

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bn, bk): rows and columns of a block."""
        return self._block_shape

    @property
    def grid(self) -> tuple[int, int]:
        """(R, C): block rows and block columns of the weight."""
        return self._shape[0] // self._block_shape[0], self._shape[1] // self._block_shape[1]

    @property
    def nnz(self) -> int:
        """Number of kept blocks."""
        return self._col_idx.shape[0]

    @property
    def density(self) -> float:
        """Kept fraction of the blocks."""
        rows, cols = self.grid
        return self.nnz / (rows * cols)

    @property
    def row_ptr(self) -> Tensor:
        """[R + 1] int32 on the host: where each block row starts."""
        return self._row_ptr

    @property
    def col_idx(self) -> Tensor:
        """[nnz] int32 on the host: block column of each entry."""
        return self._col_idx

    @property
    def slot(self) -> Tensor:
        """[nnz] int32 on the host: position in the values of each entry's block."""
        return self._slot

    @property
    def handle(self) -> int:
        """A number that is this object's alone in this process."""
        return self._handle

    @property
    def version(self) -> int:
        """How often the pattern was updated."""
        return self._version

    def update_(self, other: "BlockPattern") -> "BlockPattern":
        """Takes over the blocks of ``other``, a pattern of the same shape and block shape.

        A backward pass whose forward pass ran before the update raises PatternChangedError.
        """
        if (other.shape, other.block_shape) != (self.shape, self.block_shape):
            raise InvalidArgumentError(
                f"other: shape {self.shape} in blocks of {self.block_shape} expected, "
                f"got {other.shape} in blocks of {other.block_shape}"
            )
        self._row_ptr, self._col_idx, self._slot = other.row_ptr, other.col_idx, other.slot
        self._version += 1
        self.prepared = self._prepare()
        return self

    def block_indices(self) -> tuple[Tensor, Tensor]:
        """(rows, cols), each [nnz] int64: where the block at every slot lies."""
        rows, cols = self.prepared.block_indices()
        return rows, cols

    def to_block_mask(self) -> Tensor:
        """[R, C] bool on the host, True for kept blocks."""
        mask = torch.zeros(self.grid, dtype=torch.bool, device="cpu")
        mask[self.block_indices()] = True
        return mask

    def to_mask(self) -> Tensor:
        """[out_features, in_features] bool on the host, True for elements of kept blocks."""
        bn, bk = self._block_shape
        return self.to_block_mask().repeat_interleave(bn, 0).repeat_interleave(bk, 1)

    def transpose(self) -> "BlockPattern":
        """The pattern of the transposed weight; every block keeps its slot."""
        col_ptr, row_idx, col_slot = self.prepared.columns()
        return BlockPattern(
            col_ptr, row_idx, shape=self._shape[::-1], block_shape=self._block_shape[::-1], slot=col_slot
        )

    def __eq__(self, other: object) -> bool:
        """Same shapes, same blocks at the same slots."""
        if not isinstance(other, BlockPattern):
            return NotImplemented
        return (
            (self._shape, self._block_shape) == (other._shape, other._block_shape)
            and torch.equal(self._row_ptr, other._row_ptr)
            and torch.equal(self._col_idx, other._col_idx)
            and torch.equal(self._slot, other._slot)
        )

    __hash__ = None  # type: ignore[assignment]  # patterns are compared by content and can change

    def __reduce__(self) -> tuple[Callable[..., "BlockPattern"], tuple[Any, ...]]:
        arrays = (self._row_ptr, self._col_idx, self._slot)
        return _rebuild, (*arrays, self._shape, self._block_shape)

    def __repr__(self) -> str:
        return (
            f"BlockPattern(shape={self._shape}, block_shape={self._block_shape}, "
            f"nnz={self.nnz}, density={self.density:.3g})"
        )

    def _prepare(self) -> PreparedPattern:
        return PreparedPattern(self._row_ptr, self._col_idx, self._slot, self._shape, self._block_shape)


def lookup(handle: int) -> BlockPattern:
    """The live pattern with that handle."""
    pattern = _live.get(handle)
    if pattern is None:
        raise InvalidArgumentError(f"handle: no pattern with handle {handle} is alive")
    return pattern


def canonical_scipy(matrix: Any, block_shape: Sequence[int] | None) -> Any:
    """A scipy BSR copy with sorted columns and no duplicates."""
    if block_shape is None and matrix.format != "bsr":
        raise InvalidArgumentError(f"block_shape: needed for a scipy matrix of format {matrix.format!r}")
    if block_shape is not None:
        block_shape = _check_shapes(matrix.shape, block_shape)[1]
    matrix = matrix.tobsr(blocksize=block_shape, copy=True)
    matrix.sum_duplicates()
    matrix.sort_indices()
    return matrix


def _rebuild(
    row_ptr: Tensor, col_idx: Tensor, slot: Tensor, shape: tuple[int, int], block_shape: tuple[int, int]
) -> BlockPattern:
    return BlockPattern(row_ptr, col_idx, shape=shape, block_shape=block_shape, slot=slot)


def _check_block_shape(block_shape: Sequence[int]) -> tuple[int, int]:
    if len(block_shape) != 2 or any(size not in BLOCK_SIZES for size in block_shape):
        raise InvalidArgumentError(
            f"block_shape: (bn, bk) with sizes from {BLOCK_SIZES} expected, got {tuple(block_shape)}"
        )
    return int(block_shape[0]), int(block_shape[1])


def _check_shapes(
    shape: Sequence[int], block_shape: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Checked (shape, block_shape, grid)."""
    bn, bk = _check_block_shape(block_shape)
    if len(shape) != 2:
        raise InvalidArgumentError(f"shape: (out_features, in_features) expected, got {tuple(shape)}")
    for name, size, block in (("out_features", shape[0], bn), ("in_features", shape[1], bk)):
        if size % block or not 0 < size <= INT32_MAX:
            raise InvalidArgumentError(
                f"{name}: a positive multiple of the block size {block} below 2^31 expected, got {size}"
            )
    out_features, in_features = int(shape[0]), int(shape[1])
    return (out_features, in_features), (bn, bk), (out_features // bn, in_features // bk)


def _is_integer(array: Tensor) -> bool:
    return not (array.is_floating_point() or array.is_complex() or array.dtype == torch.bool)


def _index_array(name: str, array: Tensor | Sequence[int], length: int | None = None) -> Tensor:
    """A host int32 copy of an index array."""
    given = torch.as_tensor(array, device="cpu")
    if given.numel() == 0:
        given = given.long()
    if given.dim() != 1 or not _is_integer(given):
        raise InvalidPatternError(
            f"{name}: a 1-D array of integers expected, got shape {tuple(given.shape)} of {given.dtype}"
        )
    if length is not None and len(given) != length:
        raise InvalidPatternError(f"{name}: {length} entries expected, got {len(given)}")
    if len(given) and not 0 <= int(given.min()) <= int(given.max()) <= INT32_MAX:
        raise InvalidPatternError(
            f"{name}: entries from 0 to 2^31 - 1 expected, got {int(given.min())} to {int(given.max())}"
        )
    return given.to(torch.int32, copy=True).contiguous()


def _check_matrix(name: str, matrix: Tensor) -> None:
    if matrix.dim() != 2 or matrix.layout != torch.strided:
        raise InvalidArgumentError(
            f"{name}: a dense 2-D tensor expected, got shape {tuple(matrix.shape)}, {matrix.layout}"
        )


def blocks_of(matrix: Tensor, block_shape: Sequence[int]) -> Tensor:
    """[out, in] as a view [R, C, bn, bk]."""
    _, (bn, bk), (rows, cols) = _check_shapes(matrix.shape, block_shape)
    return matrix.reshape(rows, bn, cols, bk).transpose(1, 2)


def _kept_blocks(total: int, density: float | None, nnz: int | None) -> int:
    """How many of ``total`` blocks to keep."""
    if (density is None) == (nnz is None):
        raise InvalidArgumentError("density, nnz: exactly one of them expected")
    if density is not None:
        if not 0 <= density <= 1:
            raise InvalidArgumentError(f"density: a number from 0 to 1 expected, got {density}")
        return round(density * total)
    if nnz is None or not 0 <= nnz <= total:
        raise InvalidArgumentError(f"nnz: a number from 0 to {total} expected, got {nnz}")
    return nnz
