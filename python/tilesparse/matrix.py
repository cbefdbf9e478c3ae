"""`BlockSparseMatrix`: values and their pattern, with conversions and products."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import functional
from ._checks import (
    DTYPES,
    Array,
    check_values,
    check_whole_blocks,
    is_ragged,
    is_tensor,
    pattern_shapes,
    shared,
    shown,
)
from ._ops.autograd import call
from ._ops.products import EXPAND, GATHER
from .errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from .pattern import BlockPattern, zero_outside_


class BlockSparseMatrix:
    """A matrix [out_features, in_features] that stores some of its blocks; the rest is zero.

    ``==`` and hashing use identity. Products (``@`` with a vector, a matrix or a batch of them on either
    side, and those of `functional`), sums and conversions to tensors are differentiable with respect to
    ``values`` and their dense operands. Several matrices may share one pattern, whose
    `BlockPattern.move_blocks_` moves blocks in all of them.

    Values [b, nnz, bn, bk] make a batch of matrices with one pattern: products then have b results, of one
    dense operand for each matrix or of one for all.

    Values and dense operands are tensors, or arrays of NumPy, CuPy, JAX and others with DLPack, whose memory
    is shared. Results are tensors, of which ``numpy.from_dlpack`` and others make arrays without a copy.

    Args:
        values: [nnz, bn, bk] or [b, nnz, bn, bk], contiguous; float64, float32, float16 or bfloat16. They are
            not copied, unless NumPy has them read-only.
        pattern: places of the blocks; values[..., i, :, :] is the block at slot i.
    """

    def __init__(self, values: Array, pattern: BlockPattern) -> None:
        tensor = _array("values", values)
        _check_dtype("values", tensor)
        batched = tensor.dim() == 4 and tensor.shape[0] > 0
        if batched and not tensor.is_contiguous():
            raise InvalidArgumentError(f"values must be contiguous, got strides {tensor.stride()}")
        check_values("values", tensor[0] if batched else tensor, pattern.index_on(tensor.device))
        self.values = tensor
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
    def from_dense(cls, dense: Array, pattern: BlockPattern) -> "BlockSparseMatrix":
        """Take the blocks of a pattern from a dense matrix [out_features, in_features]; differentiable."""
        tensor = _array("dense", dense)
        return cls(call(GATHER, tensor, None, pattern.index_on(tensor.device)), pattern)

    @classmethod
    def from_bsr(cls, matrix: Tensor) -> "BlockSparseMatrix":
        """Convert a ``torch.sparse_bsr`` matrix of any of the dtypes above; contiguous values are shared."""
        if not isinstance(matrix, Tensor) or matrix.layout != torch.sparse_bsr or matrix.dim() != 2:
            raise InvalidTypeError(f"matrix must be a 2-D torch.sparse_bsr tensor, got {shown(matrix)}")
        _check_dtype("matrix", matrix)
        values = matrix.values().contiguous()
        index: Any = matrix.crow_indices(), matrix.col_indices()
        return cls(values, BlockPattern(*index, shape=matrix.shape, block_shape=values.shape[1:]))

    @classmethod
    def from_scipy(
        cls, matrix: Any, *, block_shape: int | Sequence[int] | None = None
    ) -> "BlockSparseMatrix":
        """Convert a scipy.sparse matrix of any format, float64 or float32; scipy sorts, and sums duplicates.

        Args:
            matrix: [out_features, in_features].
            block_shape: (bn, bk), which divides it; None takes the block shape of a BSR matrix.
        """
        if not hasattr(matrix, "tobsr"):
            raise InvalidTypeError(f"matrix must be a scipy.sparse matrix or array, got {shown(matrix)}")
        if matrix.dtype.name not in ("float64", "float32"):
            raise InvalidArgumentError(f"matrix must have dtype float64 or float32, got {matrix.dtype.name}")
        if block_shape is None and matrix.format != "bsr":
            raise InvalidArgumentError(
                f"block_shape must be given for the format {matrix.format!r}, got None"
            )
        if block_shape is not None:
            shape, block_shape, _ = pattern_shapes(matrix.shape, block_shape)
            check_whole_blocks("matrix", shape, block_shape)
        if hasattr(matrix, "check_format"):
            matrix.check_format()  # conversions of scipy write out of bounds otherwise
        bsr = matrix.tobsr(blocksize=block_shape, copy=True)
        bsr.sum_duplicates()
        bsr.sort_indices()
        pattern = BlockPattern(bsr.indptr, bsr.indices, shape=bsr.shape, block_shape=bsr.blocksize)
        return cls(_array("matrix", bsr.data).contiguous(), pattern)

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
        """Return the dense matrix [out_features, in_features], or a batch of them; differentiable."""
        index = self.pattern.index_on(self.device)
        return self._each(lambda values: call(EXPAND, values, None, index))

    def to_bsr(self) -> Tensor:
        """Return a detached ``torch.sparse_bsr`` tensor with the values in row order.

        Raises:
            InvalidArgumentError: blocks do not divide the matrix, or values are a batch.
        """
        arrays = self._in_row_order()
        return torch.sparse_bsr_tensor(*arrays, self.shape, check_invariants=False)  # a pattern holds them

    def to_scipy(self) -> Any:
        """Return a ``scipy.sparse.bsr_array`` on the host, of half precision in float32, as `to_bsr` does."""
        try:
            import scipy.sparse  # optional: only this function needs it
        except ImportError as error:
            raise UnsupportedError("to_scipy needs SciPy: pip install scipy") from error

        crow, col, values = (array.cpu() for array in self._in_row_order())
        values = values.float() if values.itemsize == 2 else values
        return scipy.sparse.bsr_array((values.numpy(), col.numpy(), crow.numpy()), shape=self.shape)

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

    def __matmul__(self, dense: Array) -> Tensor:
        """Return W @ dense: [out_features] of a vector [in_features], or [..., out_features, n] of matrices.

        Of a batch of values the first dimension of the result is the batch, and that of ``dense`` if it has
        three. Differentiable; see `functional.dsd`, also for Wᵀ.
        """
        pattern = self.pattern
        return self._each(lambda values, x: _product(values, pattern, x), _array("dense", dense))

    def __rmatmul__(self, dense: Array) -> Tensor:
        """Return dense [..., out_features] @ W, with batches as in W @ dense; see `functional.dds`."""
        pattern = self.pattern
        return self._each(
            lambda values, y: functional.dds(y, values, pattern, transpose=False), _array("dense", dense)
        )

    __array_ufunc__ = None  # so that NumPy leaves ``x @ W`` to this class

    def sum(self, dim: int | None = None) -> Tensor:
        """Return the sums of rows [out_features] (``dim`` -1), of columns [in_features] (-2) or of all."""
        if dim not in (None, -1, -2):
            raise InvalidArgumentError(f"dim must be -1 (of rows), -2 (of columns) or None, got {dim!r}")
        out_features, in_features = self.shape
        if dim == -2:
            return self.values.new_ones(out_features) @ self
        rows = self @ self.values.new_ones(in_features)
        return rows if dim == -1 else rows.sum(-1)

    def diagonal_blocks(self) -> Tensor:
        """Return the blocks (i, i) [..., min(R, C), bn, bk], zeros where there is none; differentiable.

        Parts outside of the matrix are zeros. ``torch.linalg.inv`` of these blocks is a block Jacobi
        preconditioner, which `scale_rows` applies.
        """
        rows, columns = self.pattern.to(self.device).block_indices()
        slots = (rows == columns).nonzero().flatten()
        values = self._inside()
        size = (*values.shape[:-3], min(self.pattern.grid), *self.block_shape)
        return values.new_zeros(size).index_copy(-3, rows[slots], values.index_select(-3, slots))

    def scale_rows(self, factors: Array) -> "BlockSparseMatrix":
        """Return the matrix whose rows, or block rows, are multiplied from the left; differentiable.

        Args:
            factors: [out_features], a number for each row, or [R, bn, bn], a matrix for each block row.
        """
        by = _array("factors", factors)
        (rows, _), (bn, _) = self.pattern.grid, self.block_shape
        places, values = self.pattern.to(self.device).block_indices()[0], self._inside()
        if by.shape == (self.shape[0],):
            padded = torch.nn.functional.pad(by, (0, rows * bn - len(by)))
            scaled = padded.view(rows, bn, 1).index_select(0, places) * values
        elif by.shape == (rows, bn, bn):
            scaled = by.index_select(0, places) @ values
        else:
            raise InvalidArgumentError(
                f"factors must be [{self.shape[0]}] or [{rows}, {bn}, {bn}], got {list(by.shape)}"
            )
        return BlockSparseMatrix(scaled.contiguous(), self.pattern)

    def _in_row_order(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies of the arrays of BSR: starts of rows, columns, and values, detached."""
        check_whole_blocks("a BSR matrix", self.shape, self.block_shape)
        if self.values.dim() == 4:
            raise InvalidArgumentError("values must be those of one matrix in BSR, got a batch")
        index = self.pattern.index_on(self.device)
        values = self.values.detach()[index.slot.long()]
        return index.crow_indices.clone(), index.col_indices.clone(), values

    def _inside(self) -> Tensor:
        """Return the values with zeros where blocks reach out of the matrix; differentiable."""
        if not is_ragged(self.shape, self.block_shape):
            return self.values
        pattern = self.pattern.to(self.device)
        kept = zero_outside_(torch.ones_like(self.values, dtype=torch.bool), pattern)
        return torch.where(kept, self.values, self.values.new_zeros(()))

    def _each(self, function: Callable[..., Tensor], *dense: Tensor) -> Tensor:
        """Apply a function to values and dense operands, or to those of each matrix of a batch."""
        if self.values.dim() == 3:
            return function(self.values, *dense)
        count = self.values.shape[0]
        for operand in dense:
            if operand.dim() > 3 or (operand.dim() == 3 and operand.shape[0] != count):
                raise InvalidArgumentError(
                    f"dense must be a vector, matrix or batch of {count} matrices, got {list(operand.shape)}"
                )
        operands = [operand.unbind() if operand.dim() == 3 else [operand] * count for operand in dense]
        return torch.stack([function(*each) for each in zip(self.values.unbind(), *operands, strict=True)])


def _product(values: Tensor, pattern: BlockPattern, dense: Tensor) -> Tensor:
    """Return W @ dense, of a vector, a matrix or a batch of them."""
    if dense.dim() == 1:
        return functional.dds(dense, values, pattern)
    if dense.dim() == 2:
        return functional.dsd(values, pattern, dense)
    return functional.dds(dense.mT, values, pattern).mT


def _array(name: str, given: object) -> Tensor:
    """Return a tensor in the memory of an array; refuse anything else."""
    tensor = shared(name, given)
    if not is_tensor(tensor):
        raise InvalidTypeError(f"{name} must be a dense tensor, or an array with DLPack, got {shown(given)}")
    return tensor  # type: ignore[no-any-return]


def _check_dtype(name: str, values: Tensor) -> None:
    if values.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"{name} must have dtype float64, float32, float16 or bfloat16, got {values.dtype}"
        )
