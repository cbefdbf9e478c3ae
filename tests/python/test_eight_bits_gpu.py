"""CUDA kernels whose factors both have 8 bits, bit by bit; test_kernels.py has them among all others.

Sums of int8 are integers, and every product of two numbers of float8 is one of float32, so that results have
no tolerance here.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers import PATTERNS, make_pattern
from test_kernels import (
    DEVICE,
    ROWS,
    Guarded,
    Operands,
    Problem,
    Row,
    accepted_layouts,
    accepted_shapes,
    dense_weight,
    launch,
    make_product,
    plan_of,
    run,
    runs_here,
)
from torch import Tensor

pytestmark = pytest.mark.gpu

TOKENS = [1, 3, 17, 127, 1000]
ROWS_OF_8_BITS = [row for row in ROWS if row.of_8_bits]
ROWS_OF_INT8 = [row for row in ROWS_OF_8_BITS if row.dtype == torch.int8]
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
    return operands.x.double() @ dense_weight(operands.values, problem.pattern).t()


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
        assert expected.max() == 2**14 * problem.pattern.in_features
        assert torch.equal(computed(row, problem, operands), expected.float()), problem


@pytest.mark.parametrize("y_layout", [0, 1])
@pytest.mark.parametrize("row", ROWS_OF_INT8, ids=str, indirect=True)
def test_scales_are_multiplied_one_after_the_other(row: Row, y_layout: int) -> None:
    """The sum in float32 by that of the token, then by that of the feature; each product is rounded."""
    if (0, y_layout) not in accepted_layouts(row):
        pytest.skip("writes row-major y alone")
    for block_shape, residual in product(accepted_shapes(row)[::3], (False, True)):
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
            blocks = weight.view(rows, block_shape[0], columns, block_shape[1]).transpose(1, 2)
            operands.values.copy_(blocks[problem.pattern.block_indices()].to(torch.float8_e4m3fn))
            operands.x.zero_()
            operands.x[:, k] = numbers
            expected = numbers.float()[:, None] * numbers.float()
            torch.testing.assert_close(
                computed(row, problem, operands), expected, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("row", ROWS_OF_8_BITS, ids=str, indirect=True)
def test_a_token_whose_scale_is_nan_spoils_itself_alone(row: Row) -> None:
    problem = Problem(make_pattern("random 50%", (3, 4), accepted_shapes(row)[-1]), 130, bias=True)
    operands = Operands(row, problem)
    expected = computed(row, problem, operands).clone()
    operands.x_scales[77] = torch.nan
    found = computed(row, problem, operands)
    assert found[77].isnan().all()
    rest = torch.arange(130, device=DEVICE) != 77
    assert torch.equal(found[rest], expected[rest])


@pytest.mark.parametrize("row", ROWS_OF_8_BITS, ids=str, indirect=True)
def test_captured_products_follow_x_and_scales(row: Row) -> None:
    """On a stream of its own; the graph reads anew what lies in the operands' memory."""
    problem = Problem(make_pattern("random 50%", (6, 8), accepted_shapes(row)[-1]), 300, activation="silu")
    operands, others = Operands(row, problem), Operands(row, problem)
    others.x.copy_(operands.x.flip(0))
    others.x_scales.copy_(operands.x_scales.flip(0))
    call = make_product(row, problem, operands)
    call.use_plan(*plan_of(row, problem))
    workspace = Guarded(1, (call.workspace_size() + 3) // 4, torch.float32, alignment=256)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(DEVICE), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(call, problem, operands, workspace.address)  # the first launch sets the kernel up
        with torch.cuda.graph(graph, stream=stream):
            run(call, problem, operands, workspace.address)
    torch.cuda.synchronize()
    first = computed(row, problem, operands).clone()
    operands.prepare_output()
    graph.replay()
    assert torch.equal(operands.y, first)
    operands.x.copy_(others.x)
    operands.x_scales.copy_(others.x_scales)
    operands.prepare_output()
    graph.replay()
    assert torch.equal(operands.y, computed(row, problem, others))
    assert not torch.equal(operands.y, first)
