"""Which blocks a pattern keeps: how many, of which parts, drawn at random or taken from a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import shown
from .._checks import as_integer, check_content, check_shapes, checked_count, checked_fraction
from ..errors import InvalidArgumentError, InvalidTypeError


def check_matrix(name: str, matrix: Tensor) -> None:
    """Refuse tensors that are not dense matrices with content."""
    if matrix.dim() != 2 or matrix.layout != torch.strided:
        raise InvalidArgumentError(
            f"{name}: a dense 2-D tensor expected, got shape {tuple(matrix.shape)}, {matrix.layout}"
        )
    check_content(name, matrix)


def canonical_scipy(matrix: Any, block_shape: int | Sequence[int] | None) -> Any:
    """A scipy BSR copy with sorted columns and no duplicates."""
    if not hasattr(matrix, "tobsr"):
        raise InvalidTypeError(f"matrix must be a scipy.sparse matrix or array, got {shown(matrix)}")
    if block_shape is None and matrix.format != "bsr":
        raise InvalidArgumentError(f"block_shape: needed for a scipy matrix of format {matrix.format!r}")
    if block_shape is not None:
        block_shape = check_shapes(matrix.shape, block_shape)[1]
    matrix = matrix.tobsr(blocksize=block_shape, copy=True)
    matrix.sum_duplicates()
    matrix.sort_indices()
    return matrix


def blocks_of_parts(
    grid: tuple[int, int], parts: Sequence[int], density: float | None, nnz: int | None
) -> tuple[Tensor, int]:
    """Ascending numbers row * C + col of all blocks, [r * c, blocks of a part], and how many a part keeps."""
    (rows, cols), (r, c) = grid, check_parts(parts)
    if rows % r or cols % c:
        raise InvalidArgumentError(
            f"parts: divisors of the {rows} x {cols} blocks of the shape expected, got {(r, c)}"
        )
    if nnz is None:
        kept = _kept_blocks(rows * cols // (r * c), density, None)
    else:
        kept, left = divmod(_kept_blocks(rows * cols, density, nnz), r * c)
        if left:
            raise InvalidArgumentError(f"nnz: a multiple of the {r * c} parts expected, got {nnz}")
    numbers = torch.arange(rows * cols, device="cpu").view(r, rows // r, c, cols // c)
    return numbers.transpose(1, 2).reshape(r * c, -1), kept


def covering_blocks(
    grid: tuple[int, int], parts: tuple[int, int], kept: int, generator: torch.Generator | None
) -> Tensor:
    """[r * c, n <= kept] places in each part, which cover as many block rows and columns as they can.

    Parts side by side share an order of their block rows, and take turns in it; likewise for columns.
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


def drawn(size: int, first: Tensor, kept: int, generator: torch.Generator | None) -> Tensor:
    """Different places below ``size``: these first ones, and others at random."""
    order = torch.randperm(size, generator=generator, device="cpu")
    others = torch.ones(size, dtype=torch.bool, device="cpu").index_fill_(0, first, False)
    return torch.cat((first, order[others[order]]))[:kept]


def check_parts(parts: Sequence[int]) -> tuple[int, int]:
    """Parts as two integers, or an error."""
    try:
        r, c = (as_integer(count) for count in parts)
        if r > 0 and c > 0:
            return r, c
    except (TypeError, ValueError):
        pass
    raise InvalidArgumentError(f"parts: (r, c), two positive integers, expected, got {parts!r}")


def check_parts_beside(pattern: object | None, parts: Sequence[int]) -> tuple[int, int]:
    """Parts of blocks that are still to be chosen: a pattern has its own."""
    checked = check_parts(parts)
    if pattern is not None and checked != (1, 1):
        raise InvalidArgumentError(
            f"parts: none beside a pattern expected, got {parts!r}; say it in the pattern"
        )
    return checked


def _kept_blocks(total: int, density: float | None, nnz: int | None) -> int:
    """How many of ``total`` blocks to keep."""
    if (density is None) == (nnz is None):
        raise InvalidArgumentError("density, nnz: exactly one of them expected")
    if density is not None:
        kept = round(checked_fraction("density", density) * total)
        if kept == 0 and density > 0:
            raise InvalidArgumentError(
                f"density: {density} of {total} blocks rounds to none; give 0 or at least {1 / total:.3g}"
            )
        return kept
    return checked_count("nnz", nnz, 0, total)
