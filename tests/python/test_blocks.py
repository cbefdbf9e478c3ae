"""Blocks with sides of 2 to 128, which need not divide the matrix: values, gradients, conversions, layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import scipy.sparse
import torch
from helpers import use_kernel, written_sdd
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_bounds import Area
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import tilesparse as ts
from tilesparse import functional as F
from tilesparse._checks import BLOCK_SIDES
from tilesparse._checks import DTYPES as CODES
from tilesparse.errors import InvalidArgumentError

SIDES = st.integers(min(BLOCK_SIDES), max(BLOCK_SIDES))
OF_CPUS, OF_GPUS = (
    [kernel.name for kernel in ts._C.kernels() if "_blocks" in kernel.name and kernel.device == device]
    for device in range(2)
)
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(3, 3), (6, 3), (3, 6), (5, 5), (8, 8), (12, 12), (24, 24), (48, 16), (2, 128), (100, 7), (16, 16)]
MORE = [
    (2, 2),
    (4, 4),
    (6, 6),
    (7, 7),
    (9, 5),
    (10, 10),
    (16, 32),
    (17, 3),
    (32, 24),
    (48, 48),
    (64, 64),
    (96, 40),
    (128, 128),
]
# Kernels of GPUs leave blocks that tensor cores have tiles for to others.
IRREGULAR = [shape for shape in SHAPES + MORE if not {*shape} <= {16, 32, 64, 128}]


def make_matrix(
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    density: float = 0.4,
    device: str = "cpu",
) -> tuple[ts.BlockSparseMatrix, Tensor]:
    """Return a matrix whose padding is NaN, and its dense copy."""
    generator = torch.Generator().manual_seed(0)
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


def close(result: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    limit = TOLERANCE[result.dtype] * scale
    assert result.shape == expected.shape
    largest = torch.nn.functional.pad(expected.abs().flatten(), (0, 1), value=1.0).max()
    assert torch.allclose(result.double(), expected, rtol=0, atol=limit * float(largest))


def check_products(matrix: ts.BlockSparseMatrix, dense: Tensor, tokens: int) -> None:
    """Compare the three products in both layouts with float64; results hold nothing of the padding."""
    generator = torch.Generator().manual_seed(1)
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
    written_sdd(beside, given, pattern, ones, True)
    inside = ts.BlockSparseMatrix.from_dense(torch.ones_like(wide), pattern).values
    close(ones * inside.to(ones.dtype), (expected + 1) * inside, tokens**0.5 + 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_products_of_every_block_shape(data: st.DataObject) -> None:
    bn, bk = data.draw(SIDES), data.draw(SIDES)
    grid = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    cut = data.draw(st.tuples(st.integers(0, bn - 1), st.integers(0, bk - 1)))
    shape = grid[0] * bn - cut[0], grid[1] * bk - cut[1]
    dtype, tokens = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 2, 5, 8, 17, 70]))
    check_products(*make_matrix(shape, (bn, bk), dtype), tokens)


@pytest.mark.parametrize(
    ("name", "block_shape"),
    [pytest.param(*pair, marks=pytest.mark.gpu) for pair in product(OF_GPUS, IRREGULAR)]
    + [*product(OF_CPUS, SHAPES)],
    ids=str,
)
def test_kernels_for_any_block(name: str, block_shape: tuple[int, int]) -> None:
    (bn, bk), kernel = block_shape, next(k for k in ts._C.kernels() if k.name == name)
    dtypes = [dtype for dtype, code in CODES.items() if kernel.dtypes >> code & 1]
    for dtype, tokens, cut in product(dtypes, (1, 3, 9, 64, 130), ((0, 0), (1, 1))):
        shape = 5 * bn - cut[0], 4 * bk - cut[1]
        matrix, dense = make_matrix(shape, block_shape, dtype, device=("cpu", "cuda")[kernel.device])
        with use_kernel(name):
            check_products(matrix, dense, tokens)


@pytest.mark.parametrize("name", OF_CPUS)
@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_outside_of_operands_is_touched(name: str, at_end: bool) -> None:
    """Operands lie beside pages that end the process when they are read or written."""
    areas: list[Area] = []

    def placed(tensor: Tensor) -> Tensor:
        areas.append(Area(tensor.numel() * tensor.itemsize, at_end))
        return areas[-1].tensor(tensor.dtype).view(tensor.shape).copy_(tensor)

    for block_shape, dtype, tokens in product(SHAPES, DTYPES, (1, 3, 17)):
        shape = 3 * block_shape[0] - 1, 4 * block_shape[1] - 1
        matrix, dense = make_matrix(shape, block_shape, dtype)
        values, pattern = placed(matrix.values), matrix.pattern
        x, y = (placed(torch.randn(tokens, size).to(dtype)) for size in reversed(shape))
        x_t, y_t, out = placed(x.T.contiguous()), placed(y.T.contiguous()), placed(torch.zeros_like(values))
        scale = max(shape) ** 0.5
        with use_kernel(name):
            close(F.dds(x, values, pattern), x.double() @ dense.double().T, scale)
            close(F.dds(y, values, pattern, transpose=False), y.double() @ dense.double(), scale)
            close(F.dsd(values, pattern, x_t), dense.double() @ x.double().T, scale)
            close(F.dsd(values, pattern, y_t, transpose=True), dense.double().T @ y.double().T, scale)
            for left, right in ((y, x), (y_t.T, x_t.T)):
                written_sdd(left, right, pattern, out)
                expected = ts.BlockSparseMatrix.from_dense(y.double().T @ x.double(), pattern)
                close(out, expected.values, tokens**0.5)
        areas.clear()


def make_ragged(batch: int | None = None) -> tuple[Tensor, ts.BlockPattern]:
    """Return clean values of 5 x 3 blocks in a matrix of 13 x 11, with an empty row, and their pattern."""
    matrix, _ = make_matrix((13, 11), (5, 3), density=0.6)
    values = torch.nan_to_num(matrix.values)
    if batch:
        values = torch.stack([values * (i + 1) for i in range(batch)])
    return values.requires_grad_(), matrix.pattern


def vectors(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


OPERATIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "W x": (lambda w, x: w @ x, (11,)),
    "W X": (lambda w, x: w @ x, (11, 4)),
    "W of a batch": (lambda w, x: w @ x, (2, 11, 4)),
    "y W": (lambda w, y: y @ w, (13,)),
    "Y W": (lambda w, y: y @ w, (2, 4, 13)),
    "Wᵀ Y": (lambda w, y: w.T @ y, (13, 4)),
    "scaled rows": (lambda w, s: w.scale_rows(s).to_dense(), (13,)),
    "scaled block rows": (lambda w, s: w.scale_rows(s).to_dense(), (3, 5, 5)),
    "sums": (lambda w, _: torch.cat([w.sum(-1), w.sum(-2), w.sum()[..., None]], -1), (1,)),
    "diagonal": (lambda w, _: w.diagonal_blocks(), (1,)),
}


@pytest.mark.parametrize(("operation", "size"), OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("batch", [None, 2])
def test_operations_of_matrices(
    operation: Callable[[Any, Tensor], Tensor], size: tuple[int, ...], batch: int | None
) -> None:
    """Values of dense matrices, and gradients of both orders, of ragged blocks."""
    values, pattern = make_ragged(batch)
    other = vectors(*size)

    def run(values: Tensor, x: Tensor) -> Tensor:
        return operation(ts.BlockSparseMatrix(values, pattern), x)

    assert gradcheck(run, (values, other))
    assert gradgradcheck(run, (values, other), fast_mode=batch is not None)


@pytest.mark.parametrize("batch", [None, 2])
def test_values_of_operations(batch: int | None) -> None:
    """Equal those of dense matrices, whatever the padding holds."""
    values, pattern = make_ragged(batch)
    inside = ts.BlockSparseMatrix.from_dense(torch.ones(13, 11), pattern).values.bool()
    matrix = ts.BlockSparseMatrix(values.detach().masked_fill(~inside, torch.nan), pattern)
    dense, right, left = matrix.to_dense(), vectors(11, 4).detach(), vectors(3, 13).detach()
    assert dense.isfinite().all()
    pairs = {
        "columns": (matrix @ right, dense @ right),
        "vector": (matrix @ right[:, 0], dense @ right[:, 0]),
        "rows": (left @ matrix, left @ dense),
        "row": (left[0] @ matrix, left[0] @ dense),
        "transposed": (matrix.T @ left.T, dense.mT @ left.T),
        "sums of rows": (matrix.sum(-1), dense.sum(-1)),
        "sums of columns": (matrix.sum(-2), dense.sum(-2)),
        "sum": (matrix.sum(), dense.sum((-2, -1))),
        "scaled": (matrix.scale_rows(left[0]).to_dense(), left[0][:, None] * dense),
    }
    for name, (result, expected) in pairs.items():
        torch.testing.assert_close(result, expected, msg=name)
    blocks = matrix.diagonal_blocks()
    padded = torch.nn.functional.pad(dense, (0, 1, 0, 2))
    for i in range(3):
        expected = padded[..., 5 * i : 5 * i + 5, 3 * i : 3 * i + 3]
        torch.testing.assert_close(blocks[..., i, :, :], expected)
    factors = torch.linalg.inv(torch.eye(5).double() + vectors(3, 5, 5).detach() / 10)
    scaled = torch.block_diag(*factors)[:13, :13] @ dense
    torch.testing.assert_close(matrix.scale_rows(factors).to_dense(), scaled)


def test_sampled_product() -> None:
    _, pattern = make_ragged()
    a, b = vectors(13, 6), vectors(6, 11)
    sampled = F.sdd(a.T, b, pattern)
    expected = (a @ b) * pattern.to_mask()
    torch.testing.assert_close(ts.BlockSparseMatrix(sampled, pattern).to_dense(), expected)
    assert gradcheck(lambda a, b: F.sdd(a.T, b, pattern), (a, b))
    assert gradgradcheck(lambda a, b: F.sdd(a.T, b, pattern), (a, b))


def test_padding_has_no_gradient_and_is_not_drawn() -> None:
    values, pattern = make_ragged()
    inside = ts.BlockSparseMatrix.from_dense(torch.ones(13, 11), pattern).values.bool()
    (ts.BlockSparseMatrix(values, pattern) @ vectors(11, 4)).square().sum().backward()
    assert values.grad[~inside].eq(0).all() and values.grad[inside].ne(0).any()
    assert ts.BlockSparseMatrix.randn(pattern).values[~inside].eq(0).all()
    layer = ts.BlockSparseLinear(11, 13, pattern=pattern)
    assert layer.weight[~inside].eq(0).all()


def test_conversions_need_whole_blocks() -> None:
    values, pattern = make_ragged()
    matrix = ts.BlockSparseMatrix(values, pattern)
    array = scipy.sparse.csr_array(matrix.to_dense().detach().numpy())
    for convert in (
        matrix.to_bsr,
        matrix.to_scipy,
        lambda: ts.BlockSparseMatrix.from_scipy(array, block_shape=(5, 3)),
    ):
        with pytest.raises(InvalidArgumentError, match="shape that its blocks divide"):
            convert()
    whole, dense = make_matrix((12, 18), (4, 6))
    torch.testing.assert_close(whole.to_bsr().to_dense(), dense)
    back = ts.BlockSparseMatrix.from_scipy(scipy.sparse.bsr_array(whole.to_scipy()))
    torch.testing.assert_close(back.to_dense(), dense)
    with pytest.raises(InvalidArgumentError, match="one matrix in BSR, got a batch"):
        ts.BlockSparseMatrix(torch.stack((whole.values, whole.values)), whole.pattern).to_scipy()


def test_masks_of_ragged_blocks() -> None:
    _, pattern = make_ragged()
    mask = pattern.to_mask()
    assert mask.shape == (13, 11)
    assert ts.BlockPattern.from_mask(mask, block_shape=(5, 3)).to_block_mask().equal(pattern.to_block_mask())
    chosen = ts.BlockPattern.from_dense(mask.double(), block_shape=(5, 3), nnz=pattern.nnz)
    assert chosen.to_block_mask().equal(pattern.to_block_mask())
    assert pattern.transpose().to_mask().equal(mask.T)


def test_layers_of_any_block(tmp_path: Path) -> None:
    """Refuse what is slower than dense, unless a pattern is given; train, save and load it then."""
    with pytest.raises(InvalidArgumentError, match=r"rarely faster than dense.*`pattern`"):
        ts.BlockSparseLinear(12, 12, block_shape=6)
    with pytest.raises(InvalidArgumentError, match="multiple of the block size 16, got 40"):
        ts.BlockSparseLinear(32, 40, block_shape=16)
    _, pattern = make_ragged()
    layer = ts.BlockSparseLinear(11, 13, pattern=pattern, dtype=torch.float64)
    dense = layer.to_linear()
    x = vectors(7, 11)
    for activation in ("none", "gelu"):
        expected = dense(x) if activation == "none" else torch.nn.functional.gelu(dense(x))
        result = F.linear(x, layer.weight, layer.pattern, layer.bias, activation)
        torch.testing.assert_close(result, expected)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    layer(x).square().mean().backward()
    optimizer.step()
    with pytest.raises(InvalidArgumentError, match="block_shape must be"):
        layer.to_storage("int8")
    model = torch.nn.Sequential(layer)
    ts.save(model, tmp_path)
    other = torch.nn.Sequential(torch.nn.Linear(11, 13, dtype=torch.float64))
    ts.load(other, tmp_path)
    assert torch.equal(other(x), model(x))
    assert other[0].pattern == layer.pattern
