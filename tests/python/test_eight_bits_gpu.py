"""CUDA kernels whose factors both have 8 bits, bit by bit; test_kernels.py has them among all others.

Sums of int8 are integers, and every product of two numbers of float8 is one of float32, so that results have
no tolerance here.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from helpers import PATTERNS, expanded_by_definition, make_pattern
from test_kernels import (
    DEVICE,
    OF_PLAIN_RESULTS,
    ROWS,
    Operands,
    Problem,
    Row,
    accepted_layouts,
    accepted_shapes,
    dense_weight,
    launch,
    runs_here,
)
from torch import Tensor

from tilesparse import BlockSparseLinear, functional
from tilesparse._checks import COMPRESSIBLE
from tilesparse.storage import compress

pytestmark = pytest.mark.gpu

TOKENS = [1, 3, 17, 127, 1000]
ROWS_OF_8_BITS = [row for row in ROWS if row.of_8_bits]
ROWS_OF_INT8 = [row for row in ROWS_OF_8_BITS if row.dtype == torch.int8]
ROWS_OF_SCALES_INSIDE = [row for row in ROWS if row.scales_inside]
ROWS_OF_FLOAT8 = [row for row in ROWS_OF_8_BITS if row.dtype == torch.float8_e4m3fn]


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    row: Row = request.param
    if not runs_here(row):
        pytest.skip(f"needs compute capability {row.capability}")
    return row


def of_results(rows: list[Row], result: torch.dtype) -> list[Row]:
    return [row for row in rows if row.result == result]


def integer_sums(operands: Operands, problem: Problem) -> Tensor:
    """The sums of int8 products, [tokens, out_features] in float64, which has each of them."""
    return operands.x.double() @ dense_weight(plain_values(operands), problem.pattern).t()


def plain_values(operands: Operands) -> Tensor:
    """The values as dense blocks, as they are now."""
    metadata = operands.buffers.get("metadata")
    if metadata is None:
        return operands.values
    nnz, bn, half = operands.values.shape
    words = metadata.lines.view(nnz, 2 * half // COMPRESSIBLE, bn)
    return expanded_by_definition(operands.values, words, None, operands.values.dtype)


def store_values(operands: Operands, blocks: Tensor, kept: Tensor) -> None:
    """Write dense blocks as the kernel reads them; 2:4 has those that are kept, two of each four at most."""
    metadata = operands.buffers.get("metadata")
    if metadata is not None:
        blocks, words = compress(blocks, kept)
        metadata.lines.copy_(words.view_as(metadata.lines))
    operands.values.copy_(blocks)


def computed(row: Row, problem: Problem, operands: Operands) -> Tensor:
    operands.prepare_output()
    launch(row, problem, operands)
    assert operands.output.is_poison(inside=False), "memory around y was written"
    return operands.y


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("row", of_results(ROWS_OF_INT8, torch.float32), ids=str, indirect=True)
def test_sums_of_int8_are_exact(row: Row, name: str) -> None:
    for index, block_shape in enumerate(accepted_shapes(row), len(name)):
        problem = Problem(make_pattern(name, (9, 11), block_shape), TOKENS[index % len(TOKENS)])
        operands = Operands(row, problem)
        for scales in (operands.x_scales, operands.scales):
            scales.fill_(1)
        expected = integer_sums(operands, problem).float()
        assert torch.equal(computed(row, problem, operands), expected), problem


@pytest.mark.parametrize("row", of_results(ROWS_OF_INT8, torch.float32), ids=str, indirect=True)
def test_the_largest_sums_of_int8(row: Row) -> None:
    """With as many features as may be, 128 * 128 of each adds up to almost 2^31."""
    for block_shape in accepted_shapes(row)[::5]:
        columns = (2**17 - 1) // block_shape[1]
        problem = Problem(make_pattern("full", (2, columns), block_shape), 17)
        operands = Operands(row, problem)
        operands.x.fill_(-128)
        operands.values.fill_(-128)
        operands.values[:, 1] = 127
        for scales in (operands.x_scales, operands.scales):
            scales.fill_(1)
        expected = integer_sums(operands, problem)
        kept = problem.pattern.in_features // (1 if row.storage is None else 2)
        assert expected.max() == 2**14 * kept
        assert torch.equal(computed(row, problem, operands), expected.float()), problem


@pytest.mark.parametrize("y_layout", [0, 1])
@pytest.mark.parametrize("row", ROWS_OF_INT8, ids=str, indirect=True)
def test_scales_are_multiplied_one_after_the_other(row: Row, y_layout: int) -> None:
    """The sum in float32 by that of the token, then by that of the feature; each product is rounded."""
    if (0, y_layout) not in accepted_layouts(row):
        pytest.skip("writes row-major y alone")
    residuals = (False,) if row.name in OF_PLAIN_RESULTS else (False, True)
    for block_shape, residual in product(accepted_shapes(row)[::3], residuals):
        pattern = make_pattern("random 50%", (5, 7), block_shape)
        problem = Problem(pattern, 136, y_layout=y_layout, residual=residual)
        operands = Operands(row, problem)
        expected = integer_sums(operands, problem).float() * operands.x_scales[:, None] * operands.scales
        if operands.residual is not None:
            expected = expected + operands.residual.float()
        assert torch.equal(computed(row, problem, operands), expected.to(row.result)), problem


@pytest.mark.parametrize("row", of_results(ROWS_OF_FLOAT8, torch.float32), ids=str, indirect=True)
def test_every_product_of_two_numbers_of_float8(row: Row) -> None:
    """All 256 by all 256, NaN and subnormal numbers included, at several places of k."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    for block_shape in accepted_shapes(row):
        rows, columns = 256 // block_shape[0], max(1, 128 // block_shape[1])
        problem = Problem(make_pattern("full", (rows, columns), block_shape), 256)
        operands = Operands(row, problem)
        for scales in (operands.x_scales, operands.scales):
            scales.fill_(1)
        for k in range(5, problem.pattern.in_features, 27):
            weight = torch.zeros(problem.pattern.shape, device=DEVICE)
            weight[:, k] = numbers.float()
            kept = torch.zeros_like(weight, dtype=torch.bool)
            kept[:, k] = True
            blocks, kept = (
                matrix.view(rows, block_shape[0], columns, block_shape[1]).transpose(1, 2)[
                    problem.pattern.block_indices()
                ]
                for matrix in (weight, kept)
            )
            store_values(operands, blocks.to(torch.float8_e4m3fn), kept)
            operands.x.zero_()
            operands.x[:, k] = numbers
            expected = numbers.float()[:, None] * numbers.float()
            torch.testing.assert_close(
                computed(row, problem, operands), expected, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize(
    "row",
    [row for row in of_results(ROWS_OF_FLOAT8, torch.float32) if row.capability == 80],
    ids=str,
    indirect=True,
)
def test_long_sums_of_positive_numbers_of_float8(row: Row) -> None:
    """Tensor cores cut off parts of sums, which add up where all products have one sign."""
    for block_shape in accepted_shapes(row)[-1:]:
        problem = Problem(make_pattern("full", (2, 16384 // block_shape[1]), block_shape), 130)
        operands = Operands(row, problem)
        for factor in (operands.x, operands.values):
            factor.copy_(factor.float().abs())
        for scales in (operands.x_scales, operands.scales):
            scales.fill_(1)
        expected = integer_sums(operands, problem)
        found = computed(row, problem, operands).double()
        assert (found / expected - 1).abs().max() < 1e-3


@pytest.mark.parametrize("row", ROWS_OF_8_BITS, ids=str, indirect=True)
def test_a_token_whose_scale_is_nan_spoils_itself_alone(row: Row) -> None:
    name = "full" if row.scales_inside else "random 50%"  # what has no blocks has no scales of x either
    pattern = make_pattern(name, (3, 4), accepted_shapes(row)[-1])
    problem = Problem(pattern, 130, bias=True)
    operands = Operands(row, problem)
    expected = computed(row, problem, operands).clone()
    operands.x_scales[77] = torch.nan
    found = computed(row, problem, operands)
    assert found[77].isnan().all()
    rest = torch.arange(130, device=DEVICE) != 77
    assert torch.equal(found[rest], expected[rest])


@pytest.mark.parametrize("tokens", [1, 127, 130, 1000])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("row", ROWS_OF_SCALES_INSIDE, ids=str, indirect=True)
def test_scales_inside_of_the_sums_are_those_of_their_group_and_block(
    row: Row, name: str, tokens: int
) -> None:
    """Small integers and powers of two, of which all sums are exact: each mistaken scale shows."""
    problem = Problem(make_pattern(name, (5, 9), (128, 128)), tokens, gap=16)
    operands = Operands(row, problem)
    generator = torch.Generator(DEVICE).manual_seed(tokens)

    def draw(low: int, high: int, like: Tensor) -> Tensor:
        return torch.randint(low, high + 1, like.shape, generator=generator, device=DEVICE).float()

    operands.x.copy_(draw(-1, 1, operands.x))
    operands.values.copy_(draw(-1, 1, operands.values))
    for scales in (operands.x_scales, operands.scales):
        scales.copy_(2 ** draw(-2, 2, scales))
    blocks = operands.values.double() * operands.scales.double()[:, None, None]
    x = operands.x.double() * operands.x_scales.double().repeat_interleave(128, 1)
    expected = x @ dense_weight(blocks, problem.pattern).t()
    assert torch.equal(computed(row, problem, operands), expected.to(row.result)), problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 128), (3, 1024), (9, 1152), (1000, 4096), (2, 5, 4224)])
def test_groups_are_quantized_as_on_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    x.view(-1, 128)[::5] *= 1e-4
    x.view(-1)[7] = torch.inf
    x.view(-1, 128)[-1] = 0
    values, scales = functional.quantize_activations(x, torch.float8_e4m3fn, granularity="group")
    found, of_found = functional.quantize_activations(x.to(DEVICE), torch.float8_e4m3fn, granularity="group")
    assert torch.equal(found.cpu().view(torch.uint8), values.view(torch.uint8))
    torch.testing.assert_close(of_found.cpu(), scales, rtol=0, atol=0, equal_nan=True)
    assert of_found.stride() == scales.stride()


def test_layers_with_scales_inside_agree_with_those_on_the_cpu() -> None:
    layer = BlockSparseLinear(1024, 640, density=0.5, block_shape=128, dtype=torch.bfloat16)
    layer.to_storage("float8_e4m3fn", granularity="block", activations="float8_e4m3fn")
    here = copy.deepcopy(layer).to(DEVICE)
    for tokens in (5, 65, 300):  # few tokens are multiplied in their own dtype
        x = torch.randn(2, tokens, 1024, dtype=torch.bfloat16)
        y, found = layer(x), here(x.to(DEVICE))
        assert (found.cpu().float() - y.float()).norm() <= (0.06 if tokens == 5 else 4e-3) * y.float().norm()
    graph = torch.cuda.CUDAGraph()
    x = torch.randn(300, 1024, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        here(x)
        with torch.cuda.graph(graph):
            y = here(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, here(x))
