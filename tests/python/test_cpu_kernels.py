"""Every CPU kernel of the registry, called through the C ABI, against float64 references.

Operands lie amid poison as those of test_kernels.py, aligned to no more than an element. Sums of int8 are
exact, so without gelu and silu results have the bits that the definition gives.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import cycle, product
from typing import Any, TypeVar

import pytest
import torch
from helpers import LAYOUTS, OPTIONS, PATTERNS, make_pattern, rounding_unit, seeded, shuffled
from test_kernels import (
    CODES,
    COUNTS,
    CPU,
    PLAIN_OPTIONS,
    Operands,
    Problem,
    Row,
    accepted_layouts,
    by_definition,
    check,
    form_of,
    launch,
    make_product,
    of_groups,
    rows_of,
    run,
)
from torch import Tensor

from tilesparse import _C, BlockPattern
from tilesparse._checks import BLOCK_SIZES, DTYPES, QUANTIZED
from tilesparse._runtime.device import DDS_NN, DDS_NT, SDD_TN
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.errors import InvalidArgumentError, UnsupportedError

Case = TypeVar("Case")
ROWS = [row for row in rows_of(CPU) if row.storage is None]


@pytest.fixture(params=ROWS, ids=str)
def row(request: pytest.FixtureRequest) -> Row:
    row: Row = request.param
    reason = refusal(row)
    if reason:
        pytest.skip(reason)
    return row


def refusal(row: Row) -> str:
    """Why this machine cannot run a kernel; empty if it can."""
    pattern = BlockPattern.full((16, 16), block_shape=(16, 16))
    form = {"kernel": row.number, **form_of(row)}
    product = _C.Product(descriptor(pattern), row.op, CODES[row.dtype], CPU, 1, **form)
    try:
        product.select(_C.device_info(CPU))
    except UnsupportedError as error:
        return str(error)
    return ""


def descriptor(pattern: BlockPattern) -> _C.Pattern:
    """Return the descriptor of a pattern; its memory lasts as long as the pattern."""
    return prepared(pattern.index_on(torch.device("cpu"))).descriptor


def random_pattern(grid: tuple[int, int], block_shape: tuple[int, int], density: float) -> BlockPattern:
    shape = (grid[0] * block_shape[0], grid[1] * block_shape[1])
    pattern = BlockPattern.random(shape, block_shape=block_shape, density=density, generator=seeded())
    return shuffled(pattern)


def only(*dtypes: torch.dtype, results: Iterable[torch.dtype] = ()) -> pytest.MarkDecorator:
    """Takes the rows of these dtypes alone, of results too unless others are given."""
    rows = [row for row in ROWS if row.dtype in dtypes and row.result in (results or dtypes)]
    return pytest.mark.parametrize("row", rows, ids=str, indirect=True)


def test_tokens_and_block_shapes(row: Row) -> None:
    """Every shape with two of the numbers of tokens; which, differs from kernel to kernel."""
    draw = random.Random(f"{row} tokens")
    numbers = cycle(draw.sample((0, 1, 3, 17, 127), 5))
    for block_shape in (*product(BLOCK_SIZES, BLOCK_SIZES),) * 2:
        pattern = random_pattern(draw.choice([(1, 1), (1, 3), (3, 1), (3, 2)]), block_shape, 0.6)
        gap, options = draw.choice((0, 1, 5)), draw.choice(OPTIONS[row.op])
        check(row, Problem(pattern, next(numbers), *draw.choice(accepted_layouts(row)), gap=gap, **options))


def test_chunks_of_tokens_for_each_thread(row: Row) -> None:
    """From 96 tokens for each processor on."""
    draw = random.Random(f"{row} chunks")
    processors = _C.device_info(CPU).multiprocessors
    shapes = cycle(draw.sample(((16, 32), (32, 16), (128, 64)), 3))
    for more in (-1, 0, 17, 500):
        pattern, options = random_pattern((2, 3), next(shapes), 0.6), draw.choice(OPTIONS[row.op])
        check(row, Problem(pattern, 96 * processors + more, *draw.choice(accepted_layouts(row)), **options))


def test_adversarial_patterns(row: Row) -> None:
    """With two numbers of few tokens, in rows of more blocks than are multiplied in a row; half with many.

    Of the twelve patterns, four have the same number of few tokens.
    """
    draw = random.Random(f"{row} patterns")
    few = draw.sample((1, 2, 4, 5, 7, 8), 6)
    for place, name in enumerate(PATTERNS):
        sizes = [(few[place % 6], (3, 40)), (few[(place + 1 + place // 6) % 6], (3, 40))]
        if place % 2 == ROWS.index(row) % 2:
            sizes.append((draw.choice((40, 130)), (7, 10)))
        for tokens, grid in sizes:
            pattern = make_pattern(name, grid, draw.choice(list(product(BLOCK_SIZES[:3], BLOCK_SIZES[:3]))))
            gap, options = draw.choice((0, 3)), draw.choice(OPTIONS[row.op])
            check(row, Problem(pattern, tokens, *draw.choice(accepted_layouts(row)), gap=gap, **options))


def test_layouts_and_options(row: Row) -> None:
    draw = random.Random(f"{row} layouts")
    for (x_layout, y_layout), options in product(accepted_layouts(row), OPTIONS[row.op]):
        pattern = make_pattern("random 50%", (4, 3), draw.choice([(16, 32), (32, 16), (64, 16)]))
        tokens, gap = draw.choice((5, 37, 64)), draw.choice((0, 3))
        check(row, Problem(pattern, tokens, x_layout, y_layout, gap, **options))


def share(row: Row, cases: list[Case], *dtypes: torch.dtype) -> list[Case]:
    """The cases of a row where all dtypes of an instruction set and product divide them."""
    same = [other for other in ROWS if (other.name, other.op) == (row.name, row.op)]
    same = [other for other in same if not dtypes or other.dtype in dtypes]
    return cases[same.index(row) % len(cases) :: min(len(same), len(cases))]


def test_more_than_one_wave(row: Row) -> None:
    """More tokens and features than are packed at a time, in every order of sizes."""
    draw = random.Random(f"{row} waves")
    large = (
        ((3, 40), 32, 0.1, 1000),
        ((40, 3), 32, 0.1, 1000),
        ((20, 20), 32, 0.1, 1000),
        ((65, 70), 16, 0.05, 600),
    )
    for grid, block, density, tokens in share(row, list(large)):
        pattern = random_pattern(grid, (block, block), density)
        check(row, Problem(pattern, tokens, *draw.choice(accepted_layouts(row))))


@only(torch.float64, torch.float32)
def test_panels_beyond_the_cache(row: Row) -> None:
    """They are multiplied in slices, of which some block rows have no entries."""
    draw, tokens = random.Random(f"{row}"), 96 * _C.device_info(CPU).multiprocessors + 17
    shape = (8192, 1152) if row.op == DDS_NN else (1152, 8192)
    for bn, bk in share(row, [(16, 128), (128, 16)], torch.float64, torch.float32):
        pattern = random_pattern((shape[0] // bn, shape[1] // bk), (bn, bk), 0.03)
        check(row, Problem(pattern, tokens, *draw.choice(LAYOUTS), **draw.choice(OPTIONS[row.op])))


@pytest.mark.parametrize("row", [row for row in ROWS if not row.of_any_block], ids=str, indirect=True)
def test_each_group_meets_its_weight(row: Row) -> None:
    grouped = row._replace(grouped=True)
    for options in PLAIN_OPTIONS[row.op][-2:]:
        check(grouped, of_groups(grouped, COUNTS["uneven"], (32, 16), (3, 4), **options))


@only(torch.float32)
@pytest.mark.parametrize("gap", [0, 3])
def test_results_of_more_than_four_mebibytes(row: Row, gap: int) -> None:
    """For these huge pages are asked for, which changes neither them nor what lies around them."""
    grid, tokens = {DDS_NT: ((33, 2), 1100), DDS_NN: ((2, 33), 1100), SDD_TN: ((33, 32), 16)}[row.op]
    check(row, Problem(random_pattern(grid, (32, 32), 1.0), tokens, gap=gap))


@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_threads(row: Row) -> None:
    problem = Problem(make_pattern("power-law rows", (9, 12), (32, 16)), 200, **OPTIONS[row.op][-1])
    operands, results = Operands(row, problem), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        operands.prepare_output()
        launch(row, problem, operands)
        results.append(operands.output.bits.clone())
    assert all(torch.equal(results[0], other) for other in results[1:])


def product_of(row: Row, x: Tensor, y: Tensor, values: Tensor, **options: Any) -> Tensor:
    """The output of one block W [16, 16], x and y being [tokens, 16]."""
    problem = Problem(BlockPattern.full((16, 16), block_shape=(16, 16)), len(x), **options)
    operands = Operands(row, problem)
    for name, operand in (("x", x), ("y", y), ("values", values.reshape(1, -1))):
        operands.buffers[name].lines.copy_(operand)
    launch(row, problem, operands)
    return {DDS_NT: operands.y, DDS_NN: operands.x, SDD_TN: operands.values[0]}[row.op]


@only(torch.float16, torch.bfloat16)
def test_results_are_rounded_once_to_nearest_even(row: Row) -> None:
    """Sums of a number and parts that are each too small to change it."""
    unit, ones = rounding_unit(row.dtype), torch.ones(16, 16)
    for first, parts in product((1, 1 + 2 * unit), range(16)):
        terms = torch.zeros(16, 16, dtype=torch.float64)
        terms[:, 0], terms[:, 1 : parts + 1] = first, unit / 8
        expected = (terms.sum(1, keepdim=True)).to(row.dtype)
        actual = _sum_of_terms(row, terms, ones)
        assert bool((actual == expected).all()), (
            f"{first} + {parts} units / 8: {actual[0, 0]} instead of {expected[0]}"
        )


def _sum_of_terms(row: Row, terms: Tensor, ones: Tensor) -> Tensor:
    """The product whose every result is the sum of one row of terms."""
    if row.op == DDS_NT:
        return product_of(row, terms, ones, ones)
    if row.op == DDS_NN:
        return product_of(row, ones, terms, ones)
    return product_of(row, ones, terms.t(), ones)


@only(*DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay(row: Row, value: float) -> None:
    terms = torch.zeros(16, 16)
    terms[:, 3] = value
    result = _sum_of_terms(row, terms, torch.ones(16, 16))
    torch.testing.assert_close(result, torch.full_like(result, value), equal_nan=True)


@only(*DTYPES)
def test_results_beyond_the_range_become_infinite(row: Row) -> None:
    terms = torch.full((16, 16), torch.finfo(row.result).max / 8, dtype=torch.float64)
    assert bool(_sum_of_terms(row, terms, torch.ones(16, 16)).isinf().all())


@only(torch.float16)
def test_subnormal_results(row: Row) -> None:
    terms = torch.zeros(16, 16)
    terms[:, :3] = 2.0**-24
    assert bool((_sum_of_terms(row, terms, torch.ones(16, 16)) == 3 * 2.0**-24).all())


@only(*DTYPES)
def test_a_short_workspace_is_refused(row: Row) -> None:
    """One less by a byte is in tests/c; here is one of whose size the product was never asked."""
    problem = Problem(make_pattern("full", (2, 3), (16, 16)), 40)
    operands = Operands(row, problem)
    before = operands.output.bits.clone()
    product = make_product(row, problem, operands)
    needed = make_product(row, problem, operands).workspace_size()
    if needed == 0:  # of a gradient of the weight in small blocks
        assert row.op == SDD_TN and "blocks" in row.name
        return run(product, problem, operands, 0)
    workspace = torch.empty(needed + 256, dtype=torch.uint8)
    aligned = workspace[-workspace.data_ptr() % 256 :].data_ptr()
    with pytest.raises(InvalidArgumentError, match="workspace_bytes"):
        run(product, problem, operands, aligned)
    assert product.workspace_size() > 0
    with pytest.raises(InvalidArgumentError, match="workspace"):
        run(product, problem, operands, 0)
    assert torch.equal(operands.output.bits, before)
    run(product, problem, operands, aligned)
    assert not torch.equal(operands.output.bits, before)


def test_other_results_are_refused() -> None:
    """Float32 is for the gradient of W, from operands of 16 bits; float64 not for x in 8 bits."""
    pattern = descriptor(BlockPattern.full((16, 16), block_shape=(16, 16)))
    for op, dtype, result in (
        (DDS_NT, torch.bfloat16, torch.float32),
        (DDS_NN, torch.float16, torch.float32),
        (SDD_TN, torch.float64, torch.float32),
        (SDD_TN, torch.float32, torch.bfloat16),
        (SDD_TN, torch.bfloat16, torch.float16),
    ):
        product = _C.Product(pattern, op, DTYPES[dtype], CPU, 1, result_dtype=DTYPES[result])
        with pytest.raises(UnsupportedError, match="dtype"):
            product.select(_C.device_info(CPU))
    with pytest.raises(InvalidArgumentError, match=r"y\.dtype must be 2 to 4 for x of int8, got 1"):
        _C.Product(pattern, DDS_NT, CODES[torch.int8], CPU, 1, granularity=3, result_dtype=1).resolve()


# ---- 8 bits of both factors ----

IN_FLOAT32 = [torch.float32]


def in_8_bits(row: Row, pattern: BlockPattern, x: Tensor, values: Tensor, **options: Any) -> Operands:
    """Operands with these bits."""
    operands = Operands(row, Problem(pattern, len(x), **options))
    operands.x.copy_(x.to(torch.int8).view(row.dtype))
    operands.values.copy_(values.to(torch.int8).view(row.dtype))
    operands.plain = operands.values
    return operands


def computed(row: Row, operands: Operands, pattern: BlockPattern) -> Tensor:
    operands.prepare_output()
    launch(row, Problem(pattern, len(operands.x)), operands)
    return operands.y


@only(torch.int8, results=IN_FLOAT32)
@pytest.mark.parametrize("tokens", [3, 20])
def test_extreme_numbers(row: Row, tokens: int) -> None:
    """Sums of two products of bytes that do not fit into 16 bits, with a sign or without."""
    pattern = make_pattern("banded", (3, 5), (16, 64))
    for x, w, others in product((-128, -127, 127), (-128, 127), (-128, 127)):
        xs = torch.full((tokens, pattern.in_features), x)
        ws = torch.full((pattern.nnz, *pattern.block_shape), w)
        xs[:, 1::2], ws[..., ::3] = others, others
        operands = in_8_bits(row, pattern, xs, ws)
        y = computed(row, operands, pattern)
        problem = Problem(pattern, tokens)
        assert torch.equal(y, by_definition(row, problem, operands.part(problem, 0)))


@only(torch.int8, results=IN_FLOAT32)
@pytest.mark.parametrize("tokens", [1, 16])
def test_the_largest_sums(row: Row, tokens: int) -> None:
    """2^14 times the most features: a bit more, and they would not fit into 32 bits."""
    pattern = BlockPattern.full((16, 2**17 - 16), block_shape=(16, 16))
    for x, w in ((-128, -128), (-128, 127), (127, -128)):
        xs = torch.full((tokens, pattern.in_features), x)
        operands = in_8_bits(row, pattern, xs, torch.full((pattern.nnz, 16, 16), w))
        expected = torch.tensor(float(x * w * pattern.in_features)) * operands.x_scales[:, None]
        assert torch.equal(computed(row, operands, pattern), expected * operands.scales)


@only(*QUANTIZED, results=IN_FLOAT32)
@pytest.mark.parametrize("tokens", [2, 30])
def test_tokens_without_a_scale_are_nan(row: Row, tokens: int) -> None:
    """Features without a block included, and no other token."""
    pattern = make_pattern("empty rows and columns", (4, 3), (16, 16))
    operands = Operands(row, Problem(pattern, tokens))
    operands.x_scales[1] = float("nan")
    y = computed(row, operands, pattern)
    assert bool(y[1].isnan().all())
    assert not bool(y[torch.arange(tokens) != 1].isnan().any())


@only(torch.float8_e4m3fn, results=IN_FLOAT32)
def test_nan_of_float8_stays(row: Row) -> None:
    pattern = BlockPattern.full((16, 32), block_shape=(16, 32))
    x = torch.zeros(20, 32)
    x[3, 5] = 127
    y = computed(row, in_8_bits(row, pattern, x, torch.zeros(1, 16, 32)), pattern)
    assert bool(y[3].isnan().all()) and not bool(y[4].isnan().any())


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_the_best_instruction_set_is_chosen(dtype: torch.dtype) -> None:
    pattern = descriptor(BlockPattern.full((16, 16), block_shape=(16, 16)))
    product = _C.Product(pattern, DDS_NT, CODES[dtype], CPU, 1, granularity=3, result_dtype=2)
    best = next(row for row in ROWS if row.dtype == dtype and not refusal(row))
    assert product.select(_C.device_info(CPU))[0] == best.number - 1


def test_kernels_that_cannot_compute_it_say_why() -> None:
    """Other dtypes, or instructions that are not there."""
    for row in ROWS:
        reason = refusal(row)
        assert not reason or f"kernel {row.name} cannot compute this: the processor lacks" in reason
        if "bf16" in row.name:
            with pytest.raises(UnsupportedError, match="it computes another dtype"):
                other = row._replace(dtype=torch.int8, op=DDS_NT, result=torch.float32)
                raise UnsupportedError(refusal(other))


def test_every_kernel_of_this_machine_runs() -> None:
    """In one process, so that nothing above passes by not running."""
    rows = [row for row in ROWS if not refusal(row)]
    assert {row.dtype for row in rows if row.name == "cpu_portable"} == {*CODES}
    for row in rows:
        check(row, Problem(make_pattern("random 50%", (2, 3), (16, 32)), 5))
