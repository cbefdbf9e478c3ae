"""Every CPU kernel of the registry, called through the C ABI, against float64 references.

All operands lie amid NaNs of one bit pattern that no arithmetic gives: a kernel that reads outside of
them computes NaN, one that writes there changes the pattern, and one that leaves a part of its output
out leaves NaN in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from helpers import (
    FUNCTIONS,
    LAYOUTS,
    OPTIONS,
    OUTPUTS,
    PATTERNS,
    assert_within,
    blocks_of_dense,
    dense_weight,
    make_pattern,
    reference_of_bias,
    rounded,
    rounding_unit,
    seeded,
    shuffled,
    sums_unit,
)
from torch import Tensor

from tilesparse import _C, BlockPattern
from tilesparse._checks import BLOCK_SIZES, DTYPES
from tilesparse._runtime.device import ACTIVATIONS, DDS_NN, DDS_NT, SDD_TN
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.errors import InvalidArgumentError, UnsupportedError

CPU = 0
# By the size of an element.
POISON = {
    1: (torch.int8, 0x7F),
    2: (torch.int16, 0x7FA5),
    4: (torch.int32, 0x7FA57FA5),
    8: (torch.int64, 0x7FF57FA57FA57FA5),
}
GUARD = 4096  # elements of poison before and after an operand


class Row(NamedTuple):
    """A kernel and one product, dtype and result of those it computes."""

    number: int  # as callers name it: its index plus 1
    name: str
    op: int
    dtype: torch.dtype
    result: torch.dtype

    def __str__(self) -> str:
        op = {DDS_NT: "dds_nt", DDS_NN: "dds_nn", SDD_TN: "sdd_tn"}[self.op]
        result = "" if self.result == self.dtype else f"-to-{self.result}"
        return f"{self.name}-{op}-{self.dtype}{result}".replace("torch.", "")


def results_of(op: int, dtype: torch.dtype) -> list[torch.dtype]:
    """Dtypes of what every kernel writes."""
    return [dtype, torch.float32] if op == SDD_TN and dtype.itemsize == 2 else [dtype]


ROWS = [
    Row(index + 1, kernel.name, op, dtype, result)
    for index, kernel in enumerate(_C.kernels())
    if kernel.device == CPU and not kernel.values_dtypes
    for op in (DDS_NT, DDS_NN, SDD_TN)
    if kernel.ops >> op & 1
    for dtype, code in DTYPES.items()
    if kernel.dtypes >> code & 1
    for result in results_of(op, dtype)
]


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
    product = _C.Product(descriptor(pattern), row.op, DTYPES[row.dtype], CPU, 1, kernel=row.number)
    try:
        product.select(_C.device_info(CPU))
    except UnsupportedError as error:
        return str(error)
    return ""


def descriptor(pattern: BlockPattern) -> _C.Pattern:
    """Of memory that lasts as long as the pattern."""
    return prepared(pattern.index_on(torch.device("cpu"))).descriptor


@dataclass(frozen=True)
class Problem:
    pattern: BlockPattern
    tokens: int
    x_layout: int = 0
    y_layout: int = 0
    gap: int = 0  # elements between the lines of x and y
    bias: bool = False
    activation: str = "none"
    residual: bool = False
    gated: bool = False  # the residual is a gate
    accumulate: bool = False
    of_bias: str = ""  # what becomes of the sums of y: nothing, "stored" or "added in float32"


class Guarded:
    """Lines of numbers amid poison, aligned to no more than an element."""

    def __init__(self, lines: int, length: int, dtype: torch.dtype, *, gap: int = 0) -> None:
        integer, self._poison = POISON[dtype.itemsize]
        self.ld = length + gap
        self._inside = ((lines, length), (self.ld, 1), GUARD + 1)
        size = 2 * GUARD + 1 + lines * self.ld
        self.bits = torch.full((size,), self._poison, dtype=integer)
        self.lines = self.bits.view(dtype).as_strided(*self._inside)
        self.address = self.lines.data_ptr() if self.lines.numel() else self.bits.data_ptr()

    def poison(self) -> None:
        self.bits.fill_(self._poison)

    def is_whole_outside(self) -> bool:
        bits = self.bits.clone()
        bits.as_strided(*self._inside).fill_(self._poison)
        return bool((bits == self._poison).all())


class Operands:
    """x, y, values, bias and residual or gate of one problem, random but for the output, which is poison."""

    def __init__(self, row: Row, problem: Problem) -> None:
        pattern, dtype = problem.pattern, row.dtype
        bn, bk = pattern.block_shape
        of_bias = torch.float32 if "float32" in problem.of_bias and dtype.itemsize == 2 else dtype
        self.buffers = {
            "x": _guarded_matrix(problem, pattern.in_features, problem.x_layout, dtype),
            "y": _guarded_matrix(problem, pattern.out_features, problem.y_layout, dtype),
            "values": Guarded(1, pattern.nnz * bn * bk, row.result),
            "bias": Guarded(1, pattern.out_features, of_bias),
            "residual": _guarded_matrix(problem, pattern.out_features, problem.y_layout, dtype, more=1),
        }
        self.output = self.buffers[OUTPUTS[row.op]]
        self.outputs = [self.output, self.buffers["bias"]] if problem.of_bias else [self.output]
        self.inputs = [buffer for buffer in self.buffers.values() if buffer not in self.outputs]
        for seed, buffer in enumerate(self.inputs):
            buffer.lines.copy_(_normal(buffer, seed))
        self.before = _normal(self.output, 9).to(row.result) if problem.accumulate else None
        added = "added" in problem.of_bias
        self.bias_before = _normal(self.buffers["bias"], 11).to(of_bias) if added else None
        x, y = self.buffers["x"].lines, self.buffers["y"].lines
        self.x = x.t() if problem.x_layout else x
        self.y = y.t() if problem.y_layout else y
        self.values = self.buffers["values"].lines.view(pattern.nnz, bn, bk)
        self.bias = self.buffers["bias"].lines[0] if problem.bias else None
        residual = self.buffers["residual"].lines if problem.residual else None
        self.residual = residual.t() if problem.y_layout and residual is not None else residual

    def prepare_output(self) -> None:
        for output in self.outputs:
            output.poison()
        if self.before is not None:
            self.output.lines.copy_(self.before)
        if self.bias_before is not None:
            self.buffers["bias"].lines.copy_(self.bias_before)


def _guarded_matrix(
    problem: Problem, features: int, layout: int, dtype: torch.dtype, more: int = 0
) -> Guarded:
    lines, length = (features, problem.tokens) if layout else (problem.tokens, features)
    return Guarded(lines, length, dtype, gap=problem.gap + more)


def _normal(buffer: Guarded, seed: int) -> Tensor:
    return torch.randn(buffer.lines.shape, generator=seeded(seed))


def make_product(row: Row, problem: Problem, operands: Operands) -> _C.Product:
    """The product as that kernel is to compute it."""
    x, y, residual = (operands.buffers[name] for name in ("x", "y", "residual"))
    product = _C.Product(
        descriptor(problem.pattern),
        row.op,
        DTYPES[row.dtype],
        CPU,
        problem.tokens,
        activation=ACTIVATIONS[problem.activation],
        accumulate=problem.accumulate,
        kernel=row.number,
        x_layout=problem.x_layout,
        ldx=x.ld,
        y_layout=problem.y_layout,
        ldy=y.ld,
        residual=problem.residual,
        ldr=residual.ld,
        result_dtype=DTYPES[row.result],
        gated=problem.gated,
        bias_gradient=bool(problem.of_bias),
        bias_gradient_dtype=DTYPES[operands.buffers["bias"].lines.dtype] if problem.of_bias else 0,
        accumulate_bias=operands.bias_before is not None,
    )
    assert product.resolve() == (row.number - 1, 0), "another kernel, or one with a plan"
    return product


def run(product: _C.Product, problem: Problem, operands: Operands, workspace: int) -> None:
    """Calls the kernel with a workspace at that address."""
    at = {name: buffer.address for name, buffer in operands.buffers.items()}
    bias = at["bias"] if problem.bias or problem.of_bias else 0
    residual = at["residual"] if problem.residual else 0
    product.run(at["x"], at["y"], at["values"], bias, residual, workspace, 0)


def launch(row: Row, problem: Problem, operands: Operands) -> None:
    """Calls the kernel with a poisoned workspace."""
    product = make_product(row, problem, operands)
    workspace_bytes, poison = product.workspace_size(), POISON[4][1]
    workspace = torch.full((workspace_bytes // 4 + 1024,), poison, dtype=torch.int32)
    first = -workspace.data_ptr() // 4 % 64  # the alignment of a workspace is 256 bytes
    run(product, problem, operands, workspace[first:].data_ptr())
    after = workspace[first + (workspace_bytes + 3) // 4 :]
    assert bool((workspace[:first] == poison).all()), "memory before the workspace was written"
    assert bool((after == poison).all()), "memory after the workspace was written"


def reference(row: Row, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(expected, tolerance) in float64, shaped like the output."""
    pattern = problem.pattern
    if row.op == SDD_TN:
        left, right = operands.y.double().t(), operands.x.double()
    else:
        weight = dense_weight(operands.values, pattern)
        left, right = (operands.x, weight.t()) if row.op == DDS_NT else (operands.y, weight)
        left = left.double()
    expected, magnitude = left @ right, left.abs() @ right.abs()
    if row.op == SDD_TN:
        expected, magnitude = blocks_of_dense(expected, pattern), blocks_of_dense(magnitude, pattern)
    added = operands.before.view_as(expected) if operands.before is not None else operands.bias
    if added is not None:
        expected, magnitude = expected + added.double(), magnitude + added.double().abs()
    unit = sums_unit(row.dtype)
    # Higham, "Accuracy and Stability of Numerical Algorithms", 3.1, doubled for instructions that round
    # the sum of two products on the way.
    tolerance = 2 * (left.shape[-1] + 4) * unit * magnitude
    if problem.gated:
        gate = operands.residual.double()
        gate, error = activated(problem, gate, torch.zeros_like(gate), unit)
        error = rounded(gate, error, row.dtype)
        tolerance = tolerance * gate.abs() + (expected.abs() + tolerance) * error
        return expected * gate, rounded(expected * gate, tolerance, row.dtype)
    expected, tolerance = activated(problem, expected, tolerance, unit)
    if operands.residual is not None:
        expected = expected + operands.residual.double()
        tolerance = tolerance + unit * (expected.abs() + tolerance)
    return expected, rounded(expected, tolerance, row.result)


def activated(problem: Problem, values: Tensor, tolerance: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """What the problem's activation makes of values, and of how far off they may be."""
    if problem.activation == "none":
        return values, tolerance
    # No activation's slope exceeds 1.13; the functions themselves are good to a few units.
    return FUNCTIONS[problem.activation](values), 1.13 * tolerance + 8 * unit * values.abs()


def check(row: Row, problem: Problem) -> None:
    """Runs a problem twice and checks everything about it."""
    try:
        _check(row, problem)
    except Exception as error:
        raise AssertionError(f"{row}, {problem}: {error}") from error


def _check(row: Row, problem: Problem) -> None:
    operands = Operands(row, problem)
    inputs = [buffer.bits.clone() for buffer in operands.inputs]
    results = []
    for _ in range(2):
        operands.prepare_output()
        launch(row, problem, operands)
        for output in operands.outputs:
            assert output.is_whole_outside(), "memory around an output was written"
        results.append([output.bits.clone() for output in operands.outputs])
    assert all(map(torch.equal, *results)), "two runs differ"
    for before, buffer in zip(inputs, operands.inputs, strict=True):
        assert torch.equal(buffer.bits, before), "an input was written"
    actual = {DDS_NT: operands.y, DDS_NN: operands.x, SDD_TN: operands.values}[row.op]
    assert_within(actual, *reference(row, problem, operands))
    if problem.of_bias:
        of_bias = operands.buffers["bias"].lines[0]
        assert_within(of_bias, *reference_of_bias(row.dtype, operands.y, operands.bias_before, of_bias.dtype))


def random_pattern(grid: tuple[int, int], block_shape: tuple[int, int], density: float) -> BlockPattern:
    shape = (grid[0] * block_shape[0], grid[1] * block_shape[1])
    pattern = BlockPattern.random(shape, block_shape=block_shape, density=density, generator=seeded())
    return shuffled(pattern)


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 7, 8])
def test_few_tokens(row: Row, tokens: int) -> None:
    """Of rows with more blocks than are multiplied in a row."""
    draw = random.Random(f"{row} {tokens}")
    for name in PATTERNS:
        pattern = make_pattern(name, (3, 40), draw.choice(list(product(BLOCK_SIZES[:3], BLOCK_SIZES[:3]))))
        options = draw.choice(OPTIONS[row.op])
        check(row, Problem(pattern, tokens, *draw.choice(LAYOUTS), gap=draw.choice((0, 3)), **options))


def only(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    """Takes the rows of these dtypes alone, of results too."""
    rows = [row for row in ROWS if row.dtype in dtypes and row.result in dtypes]
    return pytest.mark.parametrize("row", rows, ids=str, indirect=True)


@pytest.mark.parametrize("tokens", [0, 1, 3, 17, 127])
def test_tokens_and_block_shapes(row: Row, tokens: int) -> None:
    draw = random.Random(f"{row} {tokens}")
    for block_shape in product(BLOCK_SIZES, BLOCK_SIZES):
        pattern = random_pattern(draw.choice([(1, 1), (1, 3), (3, 1), (3, 2)]), block_shape, 0.6)
        gap, options = draw.choice((0, 1, 5)), draw.choice(OPTIONS[row.op])
        check(row, Problem(pattern, tokens, *draw.choice(LAYOUTS), gap=gap, **options))


@pytest.mark.parametrize("more", [-1, 0, 17, 500])
def test_chunks_of_tokens_for_each_thread(row: Row, more: int) -> None:
    """From 96 tokens for each processor on."""
    draw = random.Random(f"{row} {more}")
    processors = _C.device_info(CPU).multiprocessors
    for block_shape in ((16, 32), (32, 16), (128, 64)):
        pattern = random_pattern((2, 3), block_shape, 0.6)
        options = draw.choice(OPTIONS[row.op])
        check(row, Problem(pattern, 96 * processors + more, *draw.choice(LAYOUTS), **options))


@pytest.mark.parametrize("name", PATTERNS)
def test_adversarial_patterns(row: Row, name: str) -> None:
    draw = random.Random(f"{row} {name}")
    for block_shape in draw.sample(list(product(BLOCK_SIZES[:3], BLOCK_SIZES[:3])), 2):
        pattern = make_pattern(name, (7, 10), block_shape)
        options = draw.choice(OPTIONS[row.op])
        check(row, Problem(pattern, draw.choice((8, 40, 130)), *draw.choice(LAYOUTS), **options))


def test_layouts_and_options(row: Row) -> None:
    draw = random.Random(f"{row} layouts")
    for (x_layout, y_layout), options in product(LAYOUTS, OPTIONS[row.op]):
        pattern = make_pattern("random 50%", (4, 3), draw.choice([(16, 32), (32, 16), (64, 16)]))
        tokens, gap = draw.choice((5, 37, 64)), draw.choice((0, 3))
        check(row, Problem(pattern, tokens, x_layout, y_layout, gap, **options))


def test_more_than_one_wave(row: Row) -> None:
    """More tokens and features than are packed at a time, in every order of sizes."""
    draw = random.Random(f"{row} waves")
    for grid in ((3, 40), (40, 3), (20, 20)):
        check(row, Problem(random_pattern(grid, (32, 32), 0.1), 1000, *draw.choice(LAYOUTS)))
    check(row, Problem(random_pattern((65, 70), (16, 16), 0.05), 600, *draw.choice(LAYOUTS)))


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay(row: Row, value: float) -> None:
    terms = torch.zeros(16, 16)
    terms[:, 3] = value
    result = _sum_of_terms(row, terms, torch.ones(16, 16))
    torch.testing.assert_close(result, torch.full_like(result, value), equal_nan=True)


def test_results_beyond_the_range_become_infinite(row: Row) -> None:
    terms = torch.full((16, 16), torch.finfo(row.result).max / 8, dtype=torch.float64)
    assert bool(_sum_of_terms(row, terms, torch.ones(16, 16)).isinf().all())


@only(torch.float16)
def test_subnormal_results(row: Row) -> None:
    terms = torch.zeros(16, 16)
    terms[:, :3] = 2.0**-24
    assert bool((_sum_of_terms(row, terms, torch.ones(16, 16)) == 3 * 2.0**-24).all())


def test_a_short_workspace_is_refused(row: Row) -> None:
    """One less by a byte is in tests/c; here is one of whose size the product was never asked."""
    problem = Problem(make_pattern("full", (2, 3), (16, 16)), 40)
    operands = Operands(row, problem)
    before = operands.output.bits.clone()
    product = make_product(row, problem, operands)
    workspace = torch.empty(make_product(row, problem, operands).workspace_size() + 256, dtype=torch.uint8)
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
    """Float32 is for the gradient of W, from operands of 16 bits."""
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


def test_every_kernel_of_this_machine_runs() -> None:
    """In one process, so that nothing above passes by not running."""
    rows = [row for row in ROWS if not refusal(row)]
    assert "cpu_portable" in {row.name for row in rows}
    for row in rows:
        check(row, Problem(make_pattern("random 50%", (2, 3), (16, 32)), 5))
