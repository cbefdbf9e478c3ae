"""Blocks with sides of 2 to 128, which need not divide the matrix: values, gradients, conversions, layers."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilesparse as ts
from tilesparse import functional as F
from tilesparse._checks import BLOCK_SIDES
from tilesparse._checks import DTYPES as CODES
from tilesparse._runtime.launch import use_kernel

SIDES = st.integers(min(BLOCK_SIDES), max(BLOCK_SIDES))
KERNELS = [kernel.name for kernel in ts._C.kernels() if "_blocks" in kernel.name]
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(3, 3), (6, 3), (3, 6), (5, 5), (8, 8), (12, 12), (24, 24), (48, 16), (2, 128), (100, 7), (16, 16)]


def make_matrix(shape, block_shape, dtype=torch.float64, density=0.4, seed=0, device="cpu"):
    """Return a matrix whose padding is NaN, and its dense copy."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])
    mask = torch.rand(rows, cols, generator=generator) < density
    mask[rows // 2] = False  # an empty row
    pattern = ts.BlockPattern.from_block_mask(mask, block_shape=block_shape, shape=shape)
    order = torch.randperm(pattern.nnz, generator=generator)
    places = torch.stack(pattern.block_indices(), 1)[order]
    pattern = ts.BlockPattern.from_blocks(places, shape=shape, block_shape=block_shape)
    values = torch.randn(pattern.nnz, *block_shape, generator=generator, dtype=torch.float64)
    dense = ts.BlockSparseMatrix(values, pattern).to_dense().to(dtype)
    kept = ts.BlockSparseMatrix.from_dense(torch.ones(shape), pattern).values.bool()
    poisoned = torch.where(kept, values, torch.nan).to(dtype)
    return ts.BlockSparseMatrix(poisoned.to(device), pattern.to(device)), dense.to(device)


def close(result, expected, scale=1.0):
    limit = TOLERANCE[result.dtype] * scale
    assert result.shape == expected.shape
    largest = torch.nn.functional.pad(expected.abs().flatten(), (0, 1), value=1.0).max()
    assert torch.allclose(result.double(), expected, rtol=0, atol=limit * float(largest))


def check_products(matrix, dense, tokens, seed=1):
    """Compare the three products in both layouts with float64; results hold nothing of the padding."""
    generator = torch.Generator().manual_seed(seed)
    out, into = matrix.shape
    given = torch.randn(tokens, into, generator=generator).to(matrix.dtype).to(matrix.device)
    beside = torch.randn(tokens, out, generator=generator).to(matrix.dtype).to(matrix.device)
    values, pattern, wide = matrix.values, matrix.pattern, dense.double()
    x, y = given.double(), beside.double()
    scale = max(matrix.shape) ** 0.5
    close(F.dds(given, values, pattern), x @ wide.T, scale)
    close(F.dds(beside, values, pattern, transpose=False), y @ wide, scale)
    close(F.dsd(values, pattern, given.T.contiguous()), wide @ x.T, scale)
    close(F.dsd(values, pattern, beside.T.contiguous(), transpose=True), wide.T @ y.T, scale)
    expected = ts.BlockSparseMatrix.from_dense(y.T @ x, pattern).values
    for left, right in product((beside, beside.T.contiguous().T), (given, given.T.contiguous().T)):
        close(F.sdd(left, right, pattern), expected, tokens**0.5)
    ones = torch.ones_like(expected, dtype=matrix.dtype)
    F.sdd(beside, given, pattern, out=ones, accumulate=True)
    inside = ts.BlockSparseMatrix.from_dense(torch.ones_like(wide), pattern).values
    close(ones * inside.to(ones.dtype), (expected + 1) * inside, tokens**0.5 + 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_products_of_every_block_shape(data):
    bn, bk = data.draw(SIDES), data.draw(SIDES)
    grid = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    cut = data.draw(st.tuples(st.integers(0, bn - 1), st.integers(0, bk - 1)))
    shape = grid[0] * bn - cut[0], grid[1] * bk - cut[1]
    dtype, tokens = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 2, 5, 8, 17, 70]))
    check_products(*make_matrix(shape, (bn, bk), dtype), tokens)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("block_shape", SHAPES, ids=str)
def test_kernels_for_any_block(name, block_shape):
    (bn, bk), kernel = block_shape, next(k for k in ts._C.kernels() if k.name == name)
    if kernel.device == 1 and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    dtypes = [dtype for dtype, code in CODES.items() if kernel.dtypes >> code & 1]
    for dtype, tokens, cut in product(dtypes, (1, 3, 9, 64, 130), ((0, 0), (1, 1))):
        shape = 5 * bn - cut[0], 4 * bk - cut[1]
        matrix, dense = make_matrix(shape, block_shape, dtype, device=("cpu", "cuda")[kernel.device])
        with use_kernel(name):
            check_products(matrix, dense, tokens)
