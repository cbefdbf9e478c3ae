"""BlockSparseMatrix: constructors, conversions, products, changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from helpers import (
    DEVICE_DTYPES,
    DEVICES,
    DTYPES,
    PATTERNS,
    assert_product_close,
    dense_weight,
    make_pattern,
    randn,
    random_values,
    seeded,
)

from tilesparse import BlockPattern, BlockSparseMatrix
from tilesparse.errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError

BLOCK_SHAPE = (16, 32)


def make_matrix(
    name: str = "random 50%", *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> BlockSparseMatrix:
    pattern = make_pattern(name, (4, 6), BLOCK_SHAPE)
    return BlockSparseMatrix(random_values(pattern, dtype=dtype, device=device), pattern)


def reference(matrix: BlockSparseMatrix) -> torch.Tensor:
    """The dense float64 matrix on the host."""
    return dense_weight(matrix.values, matrix.pattern)


@pytest.mark.parametrize("device", DEVICES)
def test_filled_constructors(device: str) -> None:
    pattern = make_pattern("banded", (4, 6), BLOCK_SHAPE)
    kept = pattern.to_mask().double()
    assert torch.equal(
        reference(
            BlockSparseMatrix(
                torch.zeros(pattern.nnz, *pattern.block_shape, device=device, dtype=torch.float16), pattern
            )
        ),
        torch.zeros_like(kept),
    )
    drawn = BlockSparseMatrix.randn(pattern, device=device, dtype=torch.bfloat16)
    assert (drawn.dtype, drawn.device.type) == (torch.bfloat16, device)
    assert torch.equal(reference(drawn) != 0, kept.bool())


def test_randn_is_normal_and_follows_its_generator() -> None:
    pattern = BlockPattern.full((256, 256), block_shape=(64, 64))
    matrix = BlockSparseMatrix.randn(pattern, generator=seeded(4))
    assert torch.equal(matrix.values, BlockSparseMatrix.randn(pattern, generator=seeded(4)).values)
    # Mean and variance of 65536 numbers, six standard deviations of each.
    assert matrix.values.mean().abs() < 6 / 256
    assert (matrix.values.var() - 1).abs() < 6 * 2**0.5 / 256


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_dense_round_trip(device: str, dtype: torch.dtype, name: str) -> None:
    matrix = make_matrix(name, dtype=dtype, device=device)
    dense = matrix.to_dense()
    assert (dense.dtype, dense.device.type, dense.shape) == (dtype, device, matrix.shape)
    assert torch.equal(dense.cpu().double(), reference(matrix))
    assert torch.equal(BlockSparseMatrix.from_dense(dense, matrix.pattern).values, matrix.values)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bsr_round_trip(dtype: torch.dtype, name: str) -> None:
    matrix = make_matrix(name, dtype=dtype)
    bsr = matrix.to_bsr()
    assert bsr.layout == torch.sparse_bsr and bsr.dtype == dtype
    assert torch.equal(bsr.to_dense().double(), reference(matrix))
    assert torch.equal(BlockSparseMatrix.from_bsr(bsr).to_dense(), matrix.to_dense())


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scipy_round_trip(dtype: torch.dtype, name: str) -> None:
    matrix = make_matrix(name, dtype=dtype)
    array = matrix.to_scipy()
    assert isinstance(array, scipy.sparse.bsr_array)
    assert (array.toarray() == reference(matrix).numpy()).all()
    for given in (array, array.tocoo(), array.tocsr()):
        back = BlockSparseMatrix.from_scipy(given, block_shape=BLOCK_SHAPE)
        assert back.pattern.nnz == matrix.pattern.nnz and torch.equal(reference(back), reference(matrix))


@pytest.mark.parametrize("columns", [[3, 0, 1], [1, 0, 1], [2, 2, 2], []], ids=str)
def test_blocks_of_scipy_are_sorted_and_summed(columns: list[int]) -> None:
    values = torch.randn(len(columns), 16, 16, generator=seeded())
    dense = torch.zeros(16, 4, 16)
    for column, block in zip(columns, values, strict=True):
        dense[:, column] += block
    array = scipy.sparse.bsr_array((values.numpy(), columns, [0, len(columns)]), shape=(16, 64))
    matrix = BlockSparseMatrix.from_scipy(array)
    assert torch.equal(matrix.to_dense(), dense.view(16, 64))
    assert matrix.pattern.col_indices.tolist() == sorted({*columns})
    assert array.indices.tolist() == columns  # what was given is left as it was


@pytest.mark.parametrize("kind", ["npz", "mtx"])
def test_files_of_scipy_come_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    matrix, path = make_matrix(dtype=torch.float64), tmp_path / f"matrix.{kind}"
    if kind == "npz":
        scipy.sparse.save_npz(path, matrix.to_scipy())
        read = scipy.sparse.load_npz(path)
    else:
        scipy.io.mmwrite(path, matrix.to_scipy().tocoo())
        read = scipy.io.mmread(path)
    back = BlockSparseMatrix.from_scipy(read, block_shape=BLOCK_SHAPE)
    assert torch.equal(back.to_dense(), matrix.to_dense())


def outside() -> Any:
    array = scipy.sparse.csr_array(np.ones((16, 32)))
    array.indices[3] = 10**6
    return array


@pytest.mark.parametrize(
    ("matrix", "block_shape", "error", "text"),
    [
        (np.ones((16, 32)), 16, InvalidTypeError, "matrix must be a scipy.sparse matrix or array"),
        (scipy.sparse.csr_array((16, 32)), None, InvalidArgumentError, "block_shape must be given .*'csr'"),
        (scipy.sparse.csr_array((16, 24)), 16, InvalidArgumentError, "matrix.*divide.*24"),
        (scipy.sparse.csr_array((16, 32), dtype=np.int64), 16, InvalidArgumentError, "dtype.*got int64"),
        (outside(), 16, ValueError, "indices must be < 32"),
    ],
)
def test_matrices_of_scipy_that_do_not_fit(
    matrix: Any, block_shape: int | None, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        BlockSparseMatrix.from_scipy(matrix, block_shape=block_shape)


def test_arrays_of_other_libraries_are_shared() -> None:
    own = make_matrix(dtype=torch.float64)
    values, crow, col, slot = (
        np.from_dlpack(one)
        for one in (own.values, own.pattern.crow_indices, own.pattern.col_indices, own.pattern.slot)
    )
    pattern = BlockPattern(crow, col, shape=own.shape, block_shape=BLOCK_SHAPE, slot=slot)
    matrix = BlockSparseMatrix(values, pattern)
    assert matrix.values.data_ptr() == own.values.data_ptr() and pattern == own.pattern
    dense = np.from_dlpack(own.to_dense())
    assert torch.equal(BlockSparseMatrix.from_dense(dense, pattern).values, own.values)
    assert BlockPattern.from_mask(dense, block_shape=BLOCK_SHAPE) == BlockPattern.from_dense(
        dense, block_shape=BLOCK_SHAPE, nnz=own.pattern.nnz
    )
    blocks = torch.stack(own.pattern.block_indices(), 1).numpy()
    listed = BlockPattern.from_blocks(blocks, shape=own.shape, block_shape=BLOCK_SHAPE)
    assert torch.equal(listed.to_block_mask(), pattern.to_block_mask())
    x = np.random.default_rng(0).standard_normal((3, own.shape[0], 2))
    read_only = x[:, :, 0]
    read_only.flags.writeable = False
    for left in (x[:, :, 0], x[::-1, :, 0], x[:, ::-1, 0], x[:, :, 0].astype(">f8"), read_only):
        np.testing.assert_allclose(np.from_dlpack(left @ matrix), left @ dense)
        np.testing.assert_allclose(np.from_dlpack(matrix.T @ left.T), dense.T @ left.T)
    assert np.shares_memory(np.from_dlpack(matrix.values), values)


@pytest.mark.parametrize(
    "array", [np.ones((2, 16, 16), np.complex64), np.ones((1, 16, 16), object), np.array(["a"])], ids=str
)
def test_arrays_without_a_dtype_of_products_are_refused(array: np.ndarray) -> None:
    pattern = BlockPattern.full((16, 32), block_shape=16)
    with pytest.raises(InvalidArgumentError, match="values must"):
        BlockSparseMatrix(array, pattern)
    matrix = BlockSparseMatrix.randn(pattern)
    calls: dict[str, Callable[[Any], object]] = {
        "values": lambda given: BlockSparseMatrix(given, pattern),
        "dense": lambda given: matrix @ given,
        "factors": matrix.scale_rows,
    }
    for name, function in calls.items():
        with pytest.raises(InvalidTypeError, match=f"{name} must be a dense tensor, or an array with DLPack"):
            function([1.0])


def bsr(values: torch.Tensor, columns: list[int]) -> torch.Tensor:
    """A matrix [16, 64] of one block row, as PyTorch lets it be made."""
    crow, col = torch.tensor([0, len(columns)]), torch.tensor(columns)
    return torch.sparse_bsr_tensor(crow, col, values, (16, 64), check_invariants=False)


@pytest.mark.filterwarnings("ignore:Sparse BSR")
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
def test_matrices_have_the_dtypes_of_products(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgumentError, match=f"must have dtype float64, float32, .*got {dtype}"):
        BlockSparseMatrix.from_bsr(bsr(torch.ones(2, 16, 16).to(dtype), [1, 0]))


@pytest.mark.filterwarnings("ignore:Sparse BSR")
@pytest.mark.parametrize("columns", [[1, 0, 1], [2, 2, 2]], ids=str)
def test_invariants_of_bsr_are_checked(columns: list[int]) -> None:
    with pytest.raises(InvalidPatternError, match="col_indices must ascend without duplicates"):
        BlockSparseMatrix.from_bsr(bsr(torch.ones(len(columns), 16, 16), columns))
    with pytest.raises(InvalidArgumentError, match="matrix must be a 2-D"):
        BlockSparseMatrix.from_bsr(torch.ones(16, 64))


@pytest.mark.parametrize("device", DEVICES)
def test_to_changes_dtype_and_shares_the_pattern(device: str) -> None:
    matrix = make_matrix()
    moved = matrix.to(device, torch.bfloat16)
    assert (moved.device.type, moved.dtype) == (device, torch.bfloat16)
    assert moved.pattern is matrix.pattern
    assert (moved.pattern.nnz, moved.block_shape) == (matrix.pattern.nnz, BLOCK_SHAPE)


@pytest.mark.parametrize("name", PATTERNS)
def test_transpose(name: str) -> None:
    matrix = make_matrix(name)
    assert torch.equal(reference(matrix.T), reference(matrix).t())
    assert torch.equal(matrix.T.T.values, matrix.values) and matrix.T.T.pattern == matrix.pattern


@pytest.mark.parametrize(("device", "dtype"), [DEVICE_DTYPES[0], DEVICE_DTYPES[1], DEVICE_DTYPES[-1]])
def test_products(device: str, dtype: torch.dtype) -> None:
    matrix = make_matrix(dtype=dtype, device=device)
    dense = reference(matrix)
    out_features, in_features = matrix.shape
    right = randn(in_features, 10, dtype=dtype, device=device, seed=1)
    left = randn(10, out_features, dtype=dtype, device=device, seed=2)
    assert_product_close(matrix @ right, dense, right)
    assert_product_close(matrix.T @ left.t(), dense.t(), left.t())
    assert_product_close(left @ matrix, left, dense)
    assert_product_close(right.t() @ matrix.T, right.t(), dense.t())


def test_conversions_and_products_are_differentiable() -> None:
    pattern = make_pattern("diagonal", (2, 2), (16, 16))
    values = random_values(pattern, dtype=torch.float64).requires_grad_()
    dense = randn(32, 32, dtype=torch.float64).requires_grad_()
    right = randn(32, 2, dtype=torch.float64).requires_grad_()
    for function, inputs in (
        (lambda v: BlockSparseMatrix(v, pattern).to_dense(), (values,)),
        (lambda d: BlockSparseMatrix.from_dense(d, pattern).values, (dense,)),
        (lambda v, b: BlockSparseMatrix(v, pattern) @ b, (values, right)),
        (lambda v, b: BlockSparseMatrix(v, pattern).T @ b, (values, right)),
        (lambda v, b: b.t() @ BlockSparseMatrix(v, pattern), (values, right)),
    ):
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_move_blocks() -> None:
    values = randn(3, 16, 16, dtype=torch.float32)
    pattern = BlockPattern.from_blocks([(0, 0), (1, 1), (2, 2)], shape=(48, 48), block_shape=16)
    matrix = BlockSparseMatrix(values, pattern)
    tensors = (pattern.crow_indices, pattern.col_indices, pattern.slot)
    pattern.move_blocks_([0, 1], [(1, 1), (0, 2)])  # into the place that the other one leaves
    dense = matrix.to_dense()
    assert torch.equal(dense[16:32, 16:32], values[0])
    assert torch.equal(dense[:16, 32:], values[1])
    assert torch.equal(dense[32:, 32:], values[2])
    assert matrix.values is values and matrix.pattern is pattern
    assert pattern == BlockPattern.from_blocks([(1, 1), (0, 2), (2, 2)], shape=(48, 48), block_shape=(16, 16))
    after = (pattern.crow_indices, pattern.col_indices, pattern.slot)
    assert all(tensor is before for tensor, before in zip(after, tensors, strict=True))


@pytest.mark.parametrize(
    ("slots", "blocks", "named"),
    [
        ([0], [(2, 2)], "blocks"),
        ([0], [(3, 0)], "blocks"),
        ([0, 1], [(0, 1), (0, 1)], "blocks"),
        ([3], [(0, 1)], "slots"),
        ([-1], [(0, 1)], "slots"),
        ([0, 0], [(0, 1), (0, 2)], "slots"),
        ([0, 1], [(0, 1)], "blocks"),
    ],
)
def test_move_blocks_refuses_collisions(slots: list[int], blocks: list[tuple[int, int]], named: str) -> None:
    pattern = BlockPattern.from_blocks([(0, 0), (1, 1), (2, 2)], shape=(48, 48), block_shape=16)
    matrix = BlockSparseMatrix(randn(3, 16, 16, dtype=torch.float32), pattern)
    before = matrix.to_dense()
    same, versions = copy.deepcopy(pattern), versions_of(pattern)
    with pytest.raises(InvalidArgumentError, match=named):
        pattern.move_blocks_(slots, blocks)
    assert torch.equal(matrix.to_dense(), before)
    assert matrix.pattern is pattern and pattern == same and versions_of(pattern) == versions


def versions_of(pattern: BlockPattern) -> list[int]:
    """How often each of a pattern's tensors was written to."""
    return [tensor._version for tensor in (pattern.crow_indices, pattern.col_indices, pattern.slot)]


def test_values_must_fit() -> None:
    pattern = make_pattern("diagonal", (2, 2), (16, 32))
    for values in (torch.ones(3, 16, 32), torch.ones(2, 32, 16), torch.ones(2, 32, 16).transpose(1, 2)):
        with pytest.raises(InvalidArgumentError, match="values"):
            BlockSparseMatrix(values, pattern)
    with pytest.raises(InvalidArgumentError, match="dense"):
        BlockSparseMatrix.from_dense(torch.ones(64, 32), pattern)
