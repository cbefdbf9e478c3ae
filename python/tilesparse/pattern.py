"""Which blocks of a weight are kept: `BlockPattern`, its index tensors, and how blocks are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks
from ._checks import Array, Index, grid_of, is_ragged, is_tensor, shared, shown
from ._runtime import pattern_cache
from ._runtime.device import exclusive
from ._runtime.pattern_cache import blocks_of, content_of, prepared, update_of, validate
from ._runtime.torch_private import refuse_fakes
from .errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError


def moved_index(index: Index, device: torch.device, copy: bool = False) -> Index:
    """Move an index to a device, through pinned memory on the way to a GPU so that the host does not wait."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    here = index.col_indices.device
    if device == here and not copy:
        return index
    pinned = here.type == "cpu" and device.type == "cuda" and not torch.compiler.is_compiling()
    tensors = (tensor.pin_memory() if pinned else tensor for tensor in index[:3])
    crow, col, slot = (tensor.to(device, non_blocking=pinned, copy=True) for tensor in tensors)
    return Index(crow, col, slot, index.shape, index.block_shape)


@torch.no_grad()
def overwrite_index(target: Index, source: Index) -> None:
    """Write the source over the target in place; what is derived from the target follows."""
    source = moved_index(source, target.col_indices.device)
    with update_of(target), torch.inference_mode(target.col_indices.is_inference()):
        for to, tensor in zip(target[:3], source[:3], strict=True):
            to.copy_(tensor)


def index_of(numbers: Tensor, like: Index) -> Index:
    """Make an index of the block number row * C + col at every slot; on a GPU the host does not wait."""
    rows, cols = grid_of(like.shape, like.block_shape)
    numbers, slot = numbers.sort()
    starts = torch.arange(rows + 1, device=numbers.device) * cols
    crow = torch.searchsorted(numbers, starts, out_int32=True)
    return Index(crow, (numbers % cols).int(), slot.int(), *like[3:])


def _index_array(name: str, array: Array | Sequence[int], length: int | None = None) -> Tensor:
    """Return an int32 copy of an index array on the host."""
    given = _integers(name, array, InvalidPatternError)
    if given.dim() != 1 or length not in (None, len(given)):
        wanted = "a 1-D array" if length is None else f"a 1-D array with {length} entries"
        raise InvalidPatternError(f"{name} must be {wanted}, got shape {tuple(given.shape)}")
    if len(given) and not 0 <= int(given.min()) <= int(given.max()) <= _checks.INT32_MAX:
        raise InvalidPatternError(
            f"{name} must have entries from 0 to 2^31 - 1, got {int(given.min())} to {int(given.max())}"
        )
    return given.to(torch.int32, copy=True).contiguous()


def _integers(
    name: str,
    given: Array | Sequence[Any],
    error: type[InvalidArgumentError] = InvalidArgumentError,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return given integers as an int64 tensor on a device; bool does not count."""
    given = shared(name, given)
    if isinstance(given, Tensor):
        _checks.check_content(name, given)
    try:
        numbers = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError) as wrong:
        raise error(f"{name} must be an array or lists of integers, got {shown(given)}: {wrong}") from wrong
    if numbers.numel() and (
        numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool
    ):
        raise error(f"{name} must be integers, got {numbers.dtype}")
    return numbers.long()


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
        """(R, C): block rows and block columns of the weight, of which the last may reach out of it."""
        return grid_of(self.shape, self.block_shape)

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
        return pattern_cache.block_indices(self._index)

    def to_block_mask(self) -> Tensor:
        """Return a mask [R, C] bool that is True for kept blocks."""
        mask = torch.zeros(self.grid, dtype=torch.bool, device=self.device)
        mask[self.block_indices()] = True
        return mask

    def waste(self, mask: Array) -> float:
        """Return the part of the kept elements that is 0 in a mask [out_features, in_features], or a matrix.

        Raises:
            InvalidArgumentError: ``mask`` has another shape, or nonzeros outside of the kept blocks.
        """
        wanted = check_matrix("mask", mask) != 0
        if wanted.shape != self.shape:
            raise InvalidArgumentError(f"mask must have shape {self.shape}, got {tuple(wanted.shape)}")
        counts = blocks_of(wanted, self.block_shape).count_nonzero((-2, -1))
        kept = counts[self.to_block_mask().to(counts.device)]
        if int(kept.sum()) != int(counts.sum()):
            raise InvalidArgumentError(
                f"mask must lie within the kept blocks, got {int(counts.sum() - kept.sum())} nonzeros outside"
            )
        return 1 - int(kept.sum()) / (self.nnz * math.prod(self.block_shape)) if self.nnz else 0.0

    def to_mask(self) -> Tensor:
        """Return a mask [out_features, in_features] bool that is True for elements of kept blocks."""
        (rows, cols), (bn, bk) = self.shape, self.block_shape
        mask = self.to_block_mask().repeat_interleave(bn, 0).repeat_interleave(bk, 1)
        return mask[:rows, :cols].contiguous()

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


Device = torch.device | str | int | None


class BlockPattern(PatternView):
    """The kept blocks of a weight W of shape [out_features, in_features].

    The kept ones of R x C blocks are stored as block compressed rows (BSR) with the names of PyTorch's BSR
    tensors: block row r holds the entries ``crow_indices[r]`` to ``crow_indices[r + 1]`` of ``col_indices``,
    in ascending order of columns. Entry e is stored at position ``slot[e]`` of a values tensor [nnz, bn, bk],
    so a pattern can change without moving a weight. Empty rows, columns and patterns are legal. The last
    block row and column may reach out of the weight: values there are never read, and are zero in gradients
    and conversions.

    The constructor copies and validates the three tensors once. `update_` changes them in place, and
    everything that uses them follows: compiled code, captured CUDA graphs, and the layer whose ``pattern``
    this is.

    Args:
        crow_indices: [R + 1] integers: a tensor, an array with DLPack, or a sequence.
        col_indices: [nnz] integers.
        shape: (out_features, in_features).
        block_shape: (bn, bk), rows (out) and columns (in) of a block, each 2 to 128; or one number for both.
        slot: [nnz] a permutation of 0..nnz-1; None means 0..nnz-1 in order.
        device: device of the pattern; None is the device of ``col_indices``.

    Raises:
        InvalidArgumentError: ``shape`` or ``block_shape`` is invalid.
        InvalidPatternError: the tensors do not describe a pattern of that shape.
    """

    def __init__(
        self,
        crow_indices: Array | Sequence[int],
        col_indices: Array | Sequence[int],
        *,
        shape: Sequence[int],
        block_shape: int | Sequence[int],
        slot: Array | Sequence[int] | None = None,
        device: Device = None,
    ) -> None:
        refuse_fakes("a pattern")
        col_indices = shared("col_indices", col_indices)
        if device is None:
            device = col_indices.device if isinstance(col_indices, Tensor) else "cpu"
        shape, block_shape, (block_rows, _) = _checks.pattern_shapes(shape, block_shape)
        with torch.inference_mode(False):  # tensors made there could not be updated elsewhere
            crow = _index_array("crow_indices", crow_indices, block_rows + 1)
            col = _index_array("col_indices", col_indices)
            order = torch.arange(len(col), dtype=torch.int32, device="cpu") if slot is None else slot
            index = Index(crow, col, _index_array("slot", order, len(col)), shape, block_shape)
            validate(index)
            self._own(moved_index(index, torch.device(device)))

    def _own(self, index: Index) -> None:
        self._index = index
        self._copies: dict[torch.device, tuple[Index, tuple[object, int]]] = {}
        self._after_update: Callable[[], None] | None = None

    @classmethod
    def from_index(cls, index: Index, after_update: Callable[[], None] | None = None) -> BlockPattern:
        """Wrap a layer's own tensors without validating them; call ``after_update`` after each change."""
        _checks.check_index(index)
        pattern = cls.__new__(cls)
        pattern._own(index)
        pattern._after_update = after_update
        return pattern

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        *,
        block_shape: int | Sequence[int],
        density: float | None = None,
        nnz: int | None = None,
        parts: tuple[int, int] = (1, 1),
        generator: torch.Generator | None = None,
        device: Device = None,
    ) -> BlockPattern:
        """Draw blocks at random; leave no block row or column empty if the count allows.

        The first max(R, C) blocks pair the block rows with the block columns, both in random order, of which
        the shorter list repeats; fewer blocks cover as many rows and columns as possible. All others are
        drawn uniformly, without replacement. Every block is equally likely to be kept.

        Args:
            shape: (out_features, in_features).
            block_shape: (bn, bk), or one number for both.
            density: kept fraction; round(density * R * C) blocks are drawn.
            nnz: number of blocks, instead of a density.
            parts: (r, c): draw the same number of blocks from each of r equal parts of the block rows by c of
                the block columns, as tensor parallelism over r processes by rows, or c by columns, needs.
            generator: a CPU generator; None is PyTorch's default generator.
            device: device of the pattern; None is the CPU.

        Raises:
            InvalidArgumentError: not exactly one of density and nnz is given, one of them is out of range, a
                density above 0 rounds to no block, or the blocks cannot be divided into such parts.
        """
        refuse_fakes("a pattern")
        shape, block_shape, grid = _checks.pattern_shapes(shape, block_shape)
        of_parts, kept = _blocks_of_parts(grid, parts, density, nnz)
        covering = _covering(grid, check_parts(parts), kept, generator)
        chosen = [
            numbers[_drawn(len(numbers), first, kept, generator)]
            for numbers, first in zip(of_parts, covering, strict=True)
        ]
        return cls._from_sorted(torch.cat(chosen).sort().values, shape, block_shape, device=device)

    @classmethod
    def full(
        cls, shape: Sequence[int], *, block_shape: int | Sequence[int], device: Device = None
    ) -> BlockPattern:
        """Keep every block; see the class for the arguments."""
        shape, block_shape, grid = _checks.pattern_shapes(shape, block_shape)
        return cls._from_sorted(all_blocks(grid), shape, block_shape, device=device)

    @classmethod
    def from_blocks(
        cls,
        blocks: Array | Sequence[tuple[int, int]],
        *,
        shape: Sequence[int],
        block_shape: int | Sequence[int],
    ) -> BlockPattern:
        """Keep the listed blocks, in any order; block i of the list is stored at slot i of the values.

        Args:
            blocks: [nnz, 2] integers or a list of (block row, block column).
            shape: (out_features, in_features).
            block_shape: (bn, bk), or one number for both.

        Raises:
            InvalidPatternError: a block lies outside the shape or is listed twice.
        """
        shape, block_shape, (rows, cols) = _checks.pattern_shapes(shape, block_shape)
        blocks = shared("blocks", blocks)
        pairs = _integers("blocks", blocks, InvalidPatternError)
        if pairs.numel() == 0:
            pairs = pairs.view(0, 2)
        if pairs.dim() != 2 or pairs.shape[1] != 2:
            raise InvalidPatternError(f"blocks must be (row, col) pairs, got shape {tuple(pairs.shape)}")
        row, col = pairs.unbind(1)
        outside = ((row < 0) | (row >= rows) | (col < 0) | (col >= cols)).nonzero()
        if len(outside):
            first = tuple(pairs[outside[0, 0]].tolist())
            raise InvalidPatternError(f"blocks: {first} lies outside the {rows} x {cols} blocks of the shape")
        chosen, slot = (row * cols + col).sort()
        twice = (chosen[1:] == chosen[:-1]).nonzero()
        if len(twice):
            first = divmod(int(chosen[twice[0, 0]]), cols)
            raise InvalidPatternError(f"blocks: {first} is listed twice")
        device = blocks.device if isinstance(blocks, Tensor) else None
        return cls._from_sorted(chosen, shape, block_shape, slot, device)

    @classmethod
    def from_block_mask(
        cls, mask: Array, *, block_shape: int | Sequence[int], shape: Sequence[int] | None = None
    ) -> BlockPattern:
        """Keep the blocks that are nonzero (True) in ``mask`` [R, C], which has one entry per block.

        ``shape`` is that of the weight, where blocks do not divide it.
        """
        mask = check_matrix("mask", mask)
        shape, block_shape = shape_of_grid("mask", mask, block_shape, shape)
        chosen = mask.detach().cpu().reshape(-1).nonzero().reshape(-1)
        return cls._from_sorted(chosen, shape, block_shape, device=mask.device)

    @classmethod
    def from_mask(cls, mask: Array, *, block_shape: int | Sequence[int] | None = None) -> BlockPattern:
        """Keep the blocks in which ``mask`` [out_features, in_features], or a matrix, has a nonzero.

        Args:
            mask: the elements to cover; `waste` says how much of the blocks is none of them.
            block_shape: (bn, bk), or one number for both; None chooses one of 16 to 128, of those that divide
                the shape if there are any: larger blocks have faster products on GPUs, and cover more than
                the mask.
        """
        mask = check_matrix("mask", mask) != 0
        if block_shape is None:
            block_shape = _best_block_shape(mask)
        shape, block_shape, _ = _checks.pattern_shapes(mask.shape, block_shape)
        kept = blocks_of(mask, block_shape).any(-1).any(-1)
        return cls.from_block_mask(kept, block_shape=block_shape, shape=shape)

    @classmethod
    def from_scores(
        cls,
        scores: Array,
        *,
        block_shape: int | Sequence[int],
        density: float | None = None,
        nnz: int | None = None,
        parts: tuple[int, int] = (1, 1),
        shape: Sequence[int] | None = None,
    ) -> BlockPattern:
        """Keep the blocks with the highest scores [R, C]; the first in row order wins a tie.

        ``density``, ``nnz`` and ``parts`` are those of `random`, ``shape`` that of `from_block_mask`.
        """
        scores = check_matrix("scores", scores)
        shape, block_shape = shape_of_grid("scores", scores, block_shape, shape)
        if scores.is_complex():
            raise InvalidArgumentError(f"scores must be real numbers, got {scores.dtype}")
        flat = scores.detach().cpu().reshape(-1)
        if bool(flat.isnan().any()):
            raise InvalidArgumentError("scores must be numbers that can be ranked, got NaN")
        of_parts, kept = _blocks_of_parts(grid_of(shape, block_shape), parts, density, nnz)
        best = flat[of_parts].sort(dim=1, descending=True, stable=True).indices[:, :kept]
        chosen = of_parts.gather(1, best).flatten().sort().values
        return cls._from_sorted(chosen, shape, block_shape, device=scores.device)

    @classmethod
    def from_dense(
        cls,
        dense: Array,
        *,
        block_shape: int | Sequence[int],
        density: float | None = None,
        nnz: int | None = None,
        parts: tuple[int, int] = (1, 1),
    ) -> BlockPattern:
        """Keep the blocks of a dense matrix [out_features, in_features] with the largest Frobenius norm.

        ``density``, ``nnz`` and ``parts`` are those of `random`.
        """
        dense = check_matrix("dense", dense)
        shape, block_shape, _ = _checks.pattern_shapes(dense.shape, block_shape)
        blocks, dtype = (
            blocks_of(dense.detach(), block_shape),
            torch.promote_types(dense.dtype, torch.float32),
        )
        scores: Tensor = torch.linalg.vector_norm(blocks, dim=(-2, -1), dtype=dtype)
        return cls.from_scores(
            scores, block_shape=block_shape, density=density, nnz=nnz, parts=parts, shape=shape
        )

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
        rows, cols = grid_of(shape, block_shape)
        crow = torch.zeros(rows + 1, dtype=torch.int64, device="cpu")
        crow[1:] = torch.bincount(chosen // cols, minlength=rows).cumsum(0)
        return cls(
            crow, chosen % cols, shape=shape, block_shape=block_shape, slot=slot, device=device or "cpu"
        )

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

    def move_blocks_(
        self, slots: Tensor | Sequence[int], blocks: Tensor | Sequence[tuple[int, int]], *, check: bool = True
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
        places = torch.stack(self.block_indices(), 1)
        chosen, new = (
            _integers(name, given, device=places.device)
            for name, given in (("slots", slots), ("blocks", blocks))
        )
        chosen = chosen.reshape(-1)
        if new.numel() != 2 * len(chosen):
            raise InvalidArgumentError(
                f"blocks must be {len(chosen)} places, one per slot, got shape {tuple(new.shape)}"
            )
        if check:
            numbers = chosen.tolist()
            if len(set(numbers)) != len(numbers) or not all(0 <= slot < self.nnz for slot in numbers):
                raise InvalidPatternError(f"slots must be different numbers from 0 to {self.nnz - 1}")
        places[chosen] = new.reshape(-1, 2)
        if not check:
            return self._take(index_of(places[:, 0] * self.grid[1] + places[:, 1], self._index))
        return self.update_(BlockPattern.from_blocks(places, shape=self.shape, block_shape=self.block_shape))

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

    def refined(self, block_shape: int | Sequence[int]) -> BlockPattern:
        """Return the pattern of the same weight in smaller blocks, on the same device.

        Each block becomes n blocks: of the one at slot s they have the slots s * n and following, row by row.
        """
        small, (bn, bk) = _checks.check_block_shape(block_shape, _checks.BLOCK_SIDES), self.block_shape
        if bn % small[0] or bk % small[1]:
            raise InvalidArgumentError(f"block_shape must divide the blocks of {bn}x{bk}, got {block_shape}")
        _checks.check_whole_blocks("a pattern in smaller blocks", self.shape, self.block_shape)
        rows, cols = self.block_indices()
        down = torch.arange(bn // small[0], device=rows.device)
        across = torch.arange(bk // small[1], device=rows.device)
        rows = rows[:, None, None] * len(down) + down[:, None]
        cols = cols[:, None, None] * len(across) + across
        numbers = (rows * (self.in_features // small[1]) + cols).flatten()
        return BlockPattern.from_index(index_of(numbers, self._index._replace(block_shape=small)))

    def __reduce__(self) -> tuple[Callable[..., BlockPattern], tuple[Any, ...]]:
        return _rebuild, tuple(self._index)


def _rebuild(crow: Tensor, col: Tensor, slot: Tensor, shape: Any, block_shape: Any) -> BlockPattern:
    return BlockPattern(crow, col, shape=shape, block_shape=block_shape, slot=slot)


# The time of a kept value in blocks of a size, relative to blocks of 128: what small blocks cost on GPUs.
BLOCK_COSTS = {128: 1.0, 64: 1.1, 32: 1.4, 16: 1.7}


def _best_block_shape(mask: Tensor) -> tuple[int, int]:
    """Return the block shape with the fastest product of those that divide a mask, or of all if none does."""
    finest = blocks_of(mask, (16, 16)).any(-1).any(-1)
    of_rows, of_cols = (
        [size for size in BLOCK_COSTS if side % size == 0] or [*BLOCK_COSTS] for side in mask.shape
    )
    costs = {
        (rows, cols): float(blocks_of(finest, (rows // 16, cols // 16)).any(-1).any(-1).float().mean())
        * BLOCK_COSTS[min(rows, cols)]
        for rows in of_rows
        for cols in of_cols
    }
    return min(costs, key=lambda shape: costs[shape])


def shape_of_grid(
    name: str, grid: Tensor, block_shape: int | Sequence[int], shape: Sequence[int] | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shape of a weight with a number for each block, if not given of whole blocks, and theirs."""
    bn, bk = _checks.check_block_shape(block_shape, _checks.BLOCK_SIDES)
    rows, cols = grid.shape
    given = (rows * bn, cols * bk) if shape is None else shape
    checked, sides, wanted = _checks.pattern_shapes(given, (bn, bk))
    if wanted != (rows, cols):
        raise InvalidArgumentError(
            f"{name} must have a number for each of the {wanted[0]} x {wanted[1]} blocks of shape, "
            f"got {tuple(grid.shape)}"
        )
    return checked, sides


def check_matrix(name: str, given: Array) -> Tensor:
    """Return a dense matrix with content; refuse anything else."""
    matrix: Tensor = shared(name, given)
    if not is_tensor(matrix) or matrix.dim() != 2:
        raise InvalidTypeError(f"{name} must be a dense 2-D tensor, got {shown(given)}")
    _checks.check_content(name, matrix)
    return matrix


def _blocks_of_parts(
    grid: tuple[int, int], parts: Sequence[int], density: float | None, nnz: int | None
) -> tuple[Tensor, int]:
    """Return the ascending numbers of all blocks, [r * c, blocks of a part], and how many a part keeps."""
    (rows, cols), (r, c) = grid, check_parts(parts)
    if rows % r or cols % c:
        raise InvalidArgumentError(f"parts must divide the {rows} x {cols} blocks of the shape, got {(r, c)}")
    if nnz is None:
        kept = _kept_blocks(rows * cols // (r * c), density, None)
    else:
        kept, left = divmod(_kept_blocks(rows * cols, density, nnz), r * c)
        if left:
            raise InvalidArgumentError(f"nnz must be a multiple of the {r * c} parts, got {nnz}")
    numbers = all_blocks(grid).view(r, rows // r, c, cols // c)
    return numbers.transpose(1, 2).reshape(r * c, -1), kept


def all_blocks(grid: tuple[int, int]) -> Tensor:
    """Return the numbers of all blocks, if there are not too many to choose from."""
    rows, cols = grid
    if rows * cols > _checks.INT32_MAX:
        raise InvalidArgumentError(
            f"shape must have fewer than 2^31 blocks to choose from, got {rows} x {cols}; "
            "BlockPattern.from_blocks takes a list of those to keep"
        )
    return torch.arange(rows * cols, device="cpu")


def _covering(
    grid: tuple[int, int], parts: tuple[int, int], kept: int, generator: torch.Generator | None
) -> Tensor:
    """Return [r * c, n <= kept] places in each part that cover as many block rows and columns as they can.

    Parts side by side share an order of their block rows and take turns in it; likewise for columns.
    """
    (r, c), (rows, cols) = parts, (grid[0] // parts[0], grid[1] // parts[1])
    count = min(kept, max(-(-rows // c), -(-cols // r)))
    if count == 0:
        return torch.empty(r * c, 0, dtype=torch.int64, device="cpu")

    def orders(length: int, number: int) -> Tensor:
        each = [torch.randperm(length, generator=generator, device="cpu") for _ in range(number)]
        return torch.stack(each)

    of_rows, of_cols = orders(rows, r), orders(cols, c)
    i, j, turn = (torch.arange(length, device="cpu") for length in (r, c, count))
    row = of_rows[i[:, None, None], (j[:, None] * count + turn) % rows]
    col = of_cols[j[:, None], (i[:, None, None] * count + turn) % cols]
    return (row * cols + col).view(r * c, count)


def _drawn(size: int, first: Tensor, kept: int, generator: torch.Generator | None) -> Tensor:
    """Return different places below ``size``: the first ones given, and others at random."""
    order = torch.randperm(size, generator=generator, device="cpu")
    others = torch.ones(size, dtype=torch.bool, device="cpu").index_fill_(0, first, False)
    return torch.cat((first, order[others[order]]))[:kept]


def kept_blocks(dense: Tensor, pattern: BlockPattern) -> Tensor:
    """Return a copy [nnz, bn, bk] of the kept blocks of a dense matrix."""
    places = pattern_cache.block_indices(pattern.index_on(dense.device))
    return blocks_of(dense, pattern.block_shape)[places].contiguous()


def with_blocks(blocks: Tensor, pattern: BlockPattern) -> Tensor:
    """Return the dense matrix that has these blocks [nnz, bn, bk] and zeros elsewhere."""
    places = pattern_cache.block_indices(pattern.index_on(blocks.device))
    return pattern_cache.placed(blocks, places, pattern.shape, pattern.block_shape)


@torch.no_grad()
def zero_outside_(values: Tensor, pattern: BlockPattern) -> Tensor:
    """Write zeros to the parts of blocks [nnz, bn, bk] that lie outside of the weight."""
    if is_ragged(pattern.shape, pattern.block_shape):
        for side, places in enumerate(pattern.block_indices()):
            block, size = pattern.block_shape[side], pattern.shape[side]
            within = torch.arange(block, device=values.device)
            outside = places.to(values.device)[:, None] * block + within >= size
            values.masked_fill_(outside.unsqueeze(2 - side), 0)
    return values


def check_parts(parts: Sequence[int]) -> tuple[int, int]:
    """Return parts as two positive integers."""
    try:
        r, c = (_checks.as_integer(count) for count in parts)
        if r > 0 and c > 0:
            return r, c
    except (TypeError, ValueError):
        pass
    raise InvalidArgumentError(f"parts must be (r, c), two positive integers, got {parts!r}")


def check_parts_beside(pattern: object | None, parts: Sequence[int]) -> tuple[int, int]:
    """Return parts of blocks that are still to be chosen; a given pattern has its own."""
    checked = check_parts(parts)
    if pattern is not None and checked != (1, 1):
        raise InvalidArgumentError(f"parts must be (1, 1) beside a pattern, which has its own, got {parts!r}")
    return checked


def _kept_blocks(total: int, density: float | None, nnz: int | None) -> int:
    """Return how many of ``total`` blocks to keep."""
    if (density is None) == (nnz is None):
        raise InvalidArgumentError("exactly one of density and nnz must be given")
    if density is not None:
        kept = round(_checks.checked_fraction("density", density) * total)
        if kept == 0 and density > 0:
            raise InvalidArgumentError(
                f"density must be 0 or at least {1 / total:.3g}: {density} of {total} blocks rounds to none"
            )
        return kept
    return _checks.checked_count("nnz", nnz, 0, total)


__all__ = ["BlockPattern"]
