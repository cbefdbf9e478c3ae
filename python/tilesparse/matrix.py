"""`BlockSparseMatrix`: values and their pattern, with conversions and products."""

from typing import Any

import torch
from torch import Tensor

from . import functional
from ._checks import DTYPES, check_values, check_whole_blocks, shown
from ._ops.autograd import call
from ._ops.products import EXPAND, GATHER
from .errors import InvalidArgumentError, InvalidTypeError
from .pattern import BlockPattern, zero_outside_


class BlockSparseMatrix:
    """A matrix [out_features, in_features] that stores some of its blocks; the rest is zero.

    ``==`` and hashing use identity. Products (``@`` with a vector, a matrix or a batch of them on either
    side, and those of `functional`) and conversions to dense matrices are differentiable with respect to
    ``values`` and their dense operands. Several matrices may share one pattern, whose
    `BlockPattern.move_blocks_` moves blocks in all of them.

    Args:
        values: [nnz, bn, bk], contiguous; float64, float32, float16 or bfloat16. They are not copied.
        pattern: places of the blocks; values[i] is the block at slot i.
    """

    def __init__(self, values: Tensor, pattern: BlockPattern) -> None:
        _check_dtype("values", values)
        check_values("values", values, pattern.index_on(values.device))
        self.values = values
        self.pattern = pattern

    @classmethod
    def randn(
        cls,
        pattern: BlockPattern,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "BlockSparseMatrix":
        """Draw the kept elements from the standard normal distribution, by a generator of the same device."""
        size = (pattern.nnz, *pattern.block_shape)
        values = torch.randn(size, generator=generator, dtype=dtype, device=device)
        return cls(zero_outside_(values, pattern), pattern)

    @classmethod
    def from_dense(cls, dense: Tensor, pattern: BlockPattern) -> "BlockSparseMatrix":
        """Take the blocks of a pattern from a dense matrix [out_features, in_features]; differentiable."""
        return cls(call(GATHER, dense, None, pattern.index_on(dense.device)), pattern)

    @classmethod
    def from_bsr(cls, matrix: Tensor) -> "BlockSparseMatrix":
        """Convert a ``torch.sparse_bsr`` matrix of any of the dtypes above; contiguous values are shared."""
        if not isinstance(matrix, Tensor) or matrix.layout != torch.sparse_bsr or matrix.dim() != 2:
            raise InvalidTypeError(f"matrix must be a 2-D torch.sparse_bsr tensor, got {shown(matrix)}")
        _check_dtype("matrix", matrix)
        values = matrix.values().contiguous()
        index: Any = matrix.crow_indices(), matrix.col_indices()
        return cls(values, BlockPattern(*index, shape=matrix.shape, block_shape=values.shape[1:]))

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.pattern.shape

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bn, bk)."""
        return self.pattern.block_shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    def __repr__(self) -> str:
        return f"BlockSparseMatrix({self.pattern!r}, dtype={self.dtype}, device={str(self.device)!r})"

    def to_dense(self) -> Tensor:
        """Return the dense matrix [out_features, in_features]; differentiable."""
        return call(EXPAND, self.values, None, self.pattern.index_on(self.device))

    def to_bsr(self) -> Tensor:
        """Return a detached ``torch.sparse_bsr`` tensor with the values in row order.

        Raises:
            InvalidArgumentError: blocks do not divide the matrix.
        """
        check_whole_blocks("a BSR matrix", self.shape, self.block_shape)
        index = self.pattern.index_on(self.device)
        return torch.sparse_bsr_tensor(
            index.crow_indices.clone(),
            index.col_indices.clone(),
            self.values.detach()[index.slot.long()],
            self.shape,
            check_invariants=False,  # a pattern holds them
        )

    def to(self, *args: Any, **kwargs: Any) -> "BlockSparseMatrix":
        """Convert the values by ``values.to(...)`` to another dtype or device.

        The pattern stays where it is: of one on the CPU, a product on a GPU looks for changes in every call,
        which takes the host 12 ms for ten million blocks, see `BlockPattern.to`.
        """
        return BlockSparseMatrix(self.values.to(*args, **kwargs), self.pattern)

    @property
    def T(self) -> "BlockSparseMatrix":
        """The transposed matrix [in_features, out_features]; its values are a differentiable copy.

        ``x @ matrix`` and `functional.dsd` multiply by the transposed without one.
        """
        return BlockSparseMatrix(self.values.mT.contiguous(), self.pattern.transpose())

    def __matmul__(self, dense: Tensor) -> Tensor:
        """Return W @ dense: [out_features] of a vector [in_features], or [..., out_features, n] of matrices.

        Differentiable; see `functional.dsd`, also for Wᵀ.
        """
        if dense.dim() == 1:
            return functional.dds(dense, self.values, self.pattern)
        if dense.dim() == 2:
            return functional.dsd(self.values, self.pattern, dense)
        return functional.dds(dense.mT, self.values, self.pattern).mT

    def __rmatmul__(self, dense: Tensor) -> Tensor:
        """Return dense [..., out_features] @ W; see `functional.dds`."""
        return functional.dds(dense, self.values, self.pattern, transpose=False)


def _check_dtype(name: str, values: Tensor) -> None:
    if values.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"{name} must have dtype float64, float32, float16 or bfloat16, got {values.dtype}"
        )
