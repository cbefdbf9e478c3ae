"""The blocks that a pattern keeps: listed, drawn at random, or chosen by scores.

Blocks are numbered row * C + col.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import shown
from .._checks import INT32_MAX, as_integer, check_content, check_shapes, checked_count, checked_fraction
from .._runtime.indices import blocks_of
from ..errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError
from .indices import is_integer


def check_matrix(name: str, matrix: Tensor) -> None:
    """Refuse a tensor that is not a dense matrix with content."""
    if matrix.dim() != 2 or matrix.layout != torch.strided:
        raise InvalidArgumentError(
            f"{name} must be a dense 2-D tensor, got shape {tuple(matrix.shape)}, {matrix.layout}"
        )
    check_content(name, matrix)


def listed_blocks(blocks: Tensor | Sequence[tuple[int, int]], grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the numbers of listed (row, col) blocks in ascending order, and each one's place in the list."""
    rows, cols = grid
    if isinstance(blocks, Tensor):
        check_content("blocks", blocks)
    pairs = torch.as_tensor(blocks, device="cpu")
    if pairs.numel() == 0:
        pairs = torch.empty(0, 2, dtype=torch.int64, device="cpu")
    if pairs.dim() != 2 or pairs.shape[1] != 2 or not is_integer(pairs):
        raise InvalidPatternError(
            f"blocks must be (row, col) pairs of integers, got shape {tuple(pairs.shape)} of {pairs.dtype}"
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
    return chosen, slot


def block_norms(dense: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the Frobenius norm [R, C] of each block of a matrix, in float32 at least."""
    blocks, dtype = blocks_of(dense.detach(), block_shape), torch.promote_types(dense.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(blocks, dim=(-2, -1), dtype=dtype)
    return norms


def random_blocks(
    grid: tuple[int, int],
    parts: Sequence[int],
    density: float | None,
    nnz: int | None,
    cover: bool,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw blocks as `BlockPattern.random` describes; return their numbers in ascending order."""
    if not isinstance(cover, bool):
        raise InvalidArgumentError(f"cover must be True or False, got {cover!r}")
    of_parts, kept = _blocks_of_parts(grid, parts, density, nnz)
    covering = _covering(grid, check_parts(parts), kept if cover else 0, generator)
    chosen = [
        numbers[_drawn(len(numbers), first, kept, generator)]
        for numbers, first in zip(of_parts, covering, strict=True)
    ]
    return torch.cat(chosen).sort().values


def best_blocks(scores: Tensor, parts: Sequence[int], density: float | None, nnz: int | None) -> Tensor:
    """Choose the blocks with the highest scores [R, C]; return their numbers in ascending order."""
    if scores.is_complex():
        raise InvalidArgumentError(f"scores must be real numbers, got {scores.dtype}")
    flat = scores.detach().cpu().reshape(-1)
    if bool(flat.isnan().any()):
        raise InvalidArgumentError("scores must be numbers that can be ranked, got NaN")
    of_parts, kept = _blocks_of_parts((scores.shape[0], scores.shape[1]), parts, density, nnz)
    best = flat[of_parts].sort(dim=1, descending=True, stable=True).indices[:, :kept]
    return of_parts.gather(1, best).flatten().sort().values


def canonical_bsr(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arrays of a BSR matrix, its own if their columns are sorted and without duplicates."""
    if not isinstance(matrix, Tensor):
        raise InvalidTypeError(f"matrix must be a 2-D torch.sparse_bsr tensor, got {shown(matrix)}")
    if matrix.layout != torch.sparse_bsr or matrix.dim() != 2:
        raise InvalidArgumentError(
            f"matrix must be a 2-D torch.sparse_bsr tensor, got {matrix.dim()}-D {matrix.layout}"
        )
    crow, col, values = matrix.crow_indices(), matrix.col_indices(), matrix.values()
    check_content("matrix", crow)
    counts, cols = crow.diff(), matrix.shape[1] // max(1, values.shape[2])
    inside = bool(((col >= 0) & (col < cols)).all()) and int(crow[0]) == 0 and int(crow[-1]) == len(col)
    if not inside or bool((counts < 0).any()):
        return crow, col, values  # for the constructor to say what is wrong
    rows = torch.arange(len(counts), device=col.device).repeat_interleave(counts)
    numbers, place = torch.unique(rows * cols + col, return_inverse=True)
    if torch.equal(place, torch.arange(len(col), device=col.device)):
        return crow, col, values
    summed = values.new_zeros(len(numbers), *values.shape[1:]).index_add(0, place, values)
    starts = torch.arange(len(crow), device=col.device) * cols
    return torch.searchsorted(numbers, starts), numbers % cols, summed


def canonical_scipy(matrix: Any, block_shape: int | Sequence[int] | None) -> Any:
    """Return a BSR copy of a scipy matrix, with sorted columns and without duplicates."""
    if not hasattr(matrix, "tobsr"):
        raise InvalidTypeError(f"matrix must be a scipy.sparse matrix or array, got {shown(matrix)}")
    if block_shape is None and matrix.format != "bsr":
        raise InvalidArgumentError(
            f"block_shape must be given for a scipy matrix of format {matrix.format!r}"
        )
    if block_shape is not None:
        block_shape = check_shapes(matrix.shape, block_shape)[1]
    matrix = matrix.tobsr(blocksize=block_shape, copy=True)
    matrix.sum_duplicates()
    matrix.sort_indices()
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
    if rows * cols > INT32_MAX:
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


def check_parts(parts: Sequence[int]) -> tuple[int, int]:
    """Return parts as two positive integers."""
    try:
        r, c = (as_integer(count) for count in parts)
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
        kept = round(checked_fraction("density", density) * total)
        if kept == 0 and density > 0:
            raise InvalidArgumentError(
                f"density must be 0 or at least {1 / total:.3g}: {density} of {total} blocks rounds to none"
            )
        return kept
    return checked_count("nnz", nnz, 0, total)
