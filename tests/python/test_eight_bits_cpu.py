"""Products of x in 8 bits on the CPU: every kernel that multiplies int8 or float8, called through the C ABI.

Sums of int8 are exact, so without gelu and silu results have the bits that the definition gives. Operands lie
amid poison, as in test_cpu_kernels.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from helpers import (
    FUNCTIONS,
    OPTIONS,
    PATTERNS,
    assert_within,
    bytes_of,
    dense_weight,
    make_pattern,
    randn,
    rounded,
    seeded,
    sums_unit,
)
from test_cpu_kernels import descriptor, random_pattern
from test_kernels import CPU, POISON, Guarded
from torch import Tensor

from tilesparse import _C, BlockPattern
from tilesparse._checks import BLOCK_SIZES, DTYPES
from tilesparse._runtime.device import ACTIVATIONS, DDS_NT
from tilesparse.errors import InvalidArgumentError, UnsupportedError

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
CODES = {INT8: 5, FLOAT8: 6}
SCALES_PER_FEATURE = 3
RESULTS = [torch.float32, torch.float16, torch.bfloat16]


class Row(NamedTuple):
    """A kernel and the dtype of x and values."""

    number: int  # as callers name it: its index plus 1
    name: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}".replace("torch.", "")


ROWS = [
    Row(index + 1, kernel.name, dtype)
    for index, kernel in enumerate(_C.kernels())
    for dtype, code in CODES.items()
    if kernel.device == CPU and kernel.ops >> DDS_NT & 1 and kernel.dtypes >> code & 1
]


guarded = partial(Guarded, device=torch.device("cpu"))


@dataclass(frozen=True)
class Problem:
    pattern: BlockPattern
    tokens: int
    result: torch.dtype = torch.float32
    y_layout: int = 0
    gap: int = 0  # elements between the lines of x, y and residual
    bias: bool = False
    activation: str = "none"
    residual: bool = False
    gated: bool = False  # the residual is a gate


def choose(dtype: torch.dtype, result: torch.dtype = torch.float32, kernel: int = 0) -> int:
    """The index of the kernel that is chosen."""
    product = _C.Product(
        descriptor(BlockPattern.full((16, 16), block_shape=(16, 16))),
        DDS_NT,
        CODES[dtype],
        CPU,
        1,
        kernel=kernel,
        granularity=SCALES_PER_FEATURE,
        result_dtype=DTYPES[result],
    )
    return product.select(_C.device_info(CPU))[0]


def refusal(row: Row) -> str:
    """Why this machine cannot run a kernel; empty if it can."""
    try:
        choose(row.dtype, kernel=row.number)
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.fixture(params=ROWS, ids=str)
def row(request: pytest.FixtureRequest) -> Row:
    row: Row = request.param
    reason = refusal(row)
    if reason:
        pytest.skip(reason)
    return row


@dataclass
class Operands:
    """Operands of one problem, random unless they are given; x and values as their bits."""

    row: Row
    problem: Problem
    x_bits: Tensor | None = None
    values_bits: Tensor | None = None
    buffers: dict[str, Guarded] = field(init=False)

    def __post_init__(self) -> None:
        problem, pattern = self.problem, self.problem.pattern
        (bn, bk), (outs, ins) = pattern.block_shape, pattern.shape
        lines = (outs, problem.tokens) if problem.y_layout else (problem.tokens, outs)
        self.buffers = {
            "x": guarded(problem.tokens, ins, torch.int8, gap=problem.gap),
            "y": guarded(*lines, problem.result, gap=problem.gap),
            "values": guarded(1, pattern.nnz * bn * bk, torch.int8),
            "bias": guarded(1, outs, problem.result),
            "residual": guarded(*lines, problem.result, gap=problem.gap + 1),
            "scales": guarded(1, outs, torch.float32),
            "x_scales": guarded(1, problem.tokens, torch.float32),
        }
        size = (pattern.nnz, bn, bk)
        x = bytes_of((problem.tokens, ins), self.row.dtype, 1) if self.x_bits is None else self.x_bits
        values = bytes_of(size, self.row.dtype, 2) if self.values_bits is None else self.values_bits
        self["x"].copy_(x)
        self["values"].copy_(values.reshape(1, -1))
        for seed, name in enumerate(("bias", "residual")):
            self[name].copy_(randn(*self[name].shape, dtype=torch.float64, seed=seed))
        unit = 1 / 4096 if self.row.dtype == INT8 else 1 / 64  # keeps results of float16 finite
        for seed, name in enumerate(("scales", "x_scales")):
            self[name].copy_((torch.rand(self[name].shape, generator=seeded(seed)) + 0.5) * unit)
        self.x, self.values = x.view(self.row.dtype), values.view(size).view(self.row.dtype)

    def __getitem__(self, name: str) -> Tensor:
        return self.buffers[name].lines

    def by_tokens(self, name: str) -> Tensor:
        return self[name].t() if self.problem.y_layout else self[name]


def product_of(operands: Operands, pattern: _C.Pattern) -> _C.Product:
    """The product by the kernel of the row."""
    row, problem, buffers = operands.row, operands.problem, operands.buffers
    product = _C.Product(
        pattern,
        DDS_NT,
        CODES[row.dtype],
        CPU,
        problem.tokens,
        activation=ACTIVATIONS[problem.activation],
        kernel=row.number,
        ldx=buffers["x"].ld,
        y_layout=problem.y_layout,
        ldy=buffers["y"].ld,
        residual=problem.residual,
        ldr=buffers["residual"].ld,
        granularity=SCALES_PER_FEATURE,
        result_dtype=DTYPES[problem.result],
        gated=problem.gated,
    )
    assert product.resolve() == (row.number - 1, 0)
    return product


def call(product: _C.Product, operands: Operands, workspace: int) -> None:
    """Calls the kernel for a poisoned y, with the workspace at that address."""
    problem, buffers = operands.problem, operands.buffers
    buffers["y"].poison()
    at = {name: buffer.address for name, buffer in buffers.items()}
    product.run(
        at["x"],
        at["y"],
        at["values"],
        at["bias"] if problem.bias else 0,
        at["residual"] if problem.residual else 0,
        workspace,
        0,
        scales=at["scales"],
        x_scales=at["x_scales"],
    )


def run(operands: Operands) -> Tensor:
    """Calls the kernel with a poisoned workspace; y as [tokens, out_features]."""
    product = product_of(operands, descriptor(operands.problem.pattern))
    size, poison = product.workspace_size(), POISON[4][1]
    workspace = torch.full((size // 4 + 1024,), poison, dtype=torch.int32)
    first = -workspace.data_ptr() // 4 % 64
    call(product, operands, workspace[first:].data_ptr())
    after = workspace[first + (size + 3) // 4 :]
    assert bool((workspace[:first] == poison).all()) and bool((after == poison).all()), (
        "outside the workspace"
    )
    return operands.by_tokens("y")


def sums_of(operands: Operands) -> tuple[Tensor, Tensor]:
    """The sums of x times W in float64, exact for int8, and those of magnitudes."""
    x = operands.x.double() if operands.row.dtype == INT8 else operands.x.float().double()
    values = operands.values if operands.row.dtype == INT8 else operands.values.float()
    weight = dense_weight(values, operands.problem.pattern)
    return x @ weight.t(), x.abs() @ weight.abs().t()


def exact(operands: Operands) -> Tensor:
    """The result of int8 by its definition, step by step in float32."""
    problem = operands.problem
    sums, _ = sums_of(operands)
    result = sums.float() * operands["x_scales"][0, :, None] * operands["scales"][0]
    if problem.bias:
        result = result + operands["bias"][0].float()
    other = operands.by_tokens("residual").float()
    if problem.gated:
        return (result * FUNCTIONS[problem.activation](other)).to(problem.result)
    result = FUNCTIONS[problem.activation](result)
    return (result + other if problem.residual else result).to(problem.result)


def close(operands: Operands) -> tuple[Tensor, Tensor]:
    """(expected, tolerance) in float64."""
    problem, unit = operands.problem, sums_unit(torch.float32)
    sums, magnitude = sums_of(operands)
    scales = operands["x_scales"][0, :, None].double() * operands["scales"][0].double()
    bias = operands["bias"][0].double() if problem.bias else torch.zeros(())
    expected = sums * scales + bias
    tolerance = (problem.pattern.shape[1] + 8) * unit * (magnitude * scales + bias.abs())
    other = operands.by_tokens("residual").double()
    function = FUNCTIONS[problem.activation]
    if problem.gated:
        gate = function(other)
        error = rounded(gate, 8 * unit * gate.abs(), problem.result)
        tolerance = tolerance * gate.abs() + (expected.abs() + tolerance) * error
        expected = expected * gate
    else:
        expected, tolerance = function(expected), 1.13 * tolerance + 8 * unit * function(expected).abs()
        if problem.residual:
            expected = expected + other
            tolerance = tolerance + unit * expected.abs()
    return expected, rounded(expected, tolerance, problem.result)


def check(operands: Operands) -> None:
    """Runs a problem twice and checks everything about it."""
    inputs = {name: buffer.bits.clone() for name, buffer in operands.buffers.items() if name != "y"}
    y = run(operands)
    first = operands.buffers["y"].bits.clone()
    run(operands)
    assert torch.equal(operands.buffers["y"].bits, first), "two runs differ"
    assert operands.buffers["y"].is_poison(inside=False), "memory around y was written"
    for name, bits in inputs.items():
        assert torch.equal(operands.buffers[name].bits, bits), f"{name} was written"
    if operands.row.dtype == INT8 and operands.problem.activation in ("none", "relu"):
        torch.testing.assert_close(y, exact(operands), rtol=0, atol=0)
    else:
        assert_within(y, *close(operands))


def drawn(row: Row, draw: random.Random, pattern: BlockPattern, tokens: int) -> None:
    """Check a problem whose options are drawn."""
    options, gap = draw.choice(OPTIONS[DDS_NT]), draw.choice((0, 1, 5))
    check(Operands(row, Problem(pattern, tokens, draw.choice(RESULTS), draw.choice((0, 1)), gap, **options)))


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 8, 11, 12, 17, 127])
def test_tokens_and_block_shapes(row: Row, tokens: int) -> None:
    draw = random.Random(f"{row} {tokens}")
    for block_shape in product(BLOCK_SIZES, BLOCK_SIZES):
        grid = draw.choice([(1, 1), (1, 3), (3, 1), (3, 2)])
        drawn(row, draw, random_pattern(grid, block_shape, 0.6), tokens)


@pytest.mark.parametrize("name", PATTERNS)
def test_adversarial_patterns(row: Row, name: str) -> None:
    """With rows of more blocks than are multiplied in a row."""
    draw = random.Random(f"{row} {name}")
    for tokens, grid in ((5, (3, 40)), (70, (7, 10))):
        block_shape = draw.choice(list(product(BLOCK_SIZES[:3], BLOCK_SIZES[:3])))
        drawn(row, draw, make_pattern(name, grid, block_shape), tokens)


def test_options_and_results(row: Row) -> None:
    draw = random.Random(f"{row} options")
    for i, options in enumerate(OPTIONS[DDS_NT]):
        pattern = make_pattern("random 50%", (4, 3), draw.choice([(16, 32), (32, 16), (64, 16)]))
        tokens, layout = draw.choice((5, 37)), draw.choice((0, 1))
        check(Operands(row, Problem(pattern, tokens, RESULTS[i % 3], layout, 3, **options)))


@pytest.mark.parametrize("more", [-1, 0, 500])
def test_chunks_of_tokens_for_each_thread(row: Row, more: int) -> None:
    """From 96 tokens for each processor on."""
    tokens = 96 * _C.device_info(CPU).multiprocessors + more
    for block_shape in ((16, 32), (128, 64)):
        check(Operands(row, Problem(random_pattern((2, 3), block_shape, 0.6), tokens)))


of_int8 = pytest.mark.parametrize("row", [row for row in ROWS if row.dtype == INT8], ids=str, indirect=True)
of_float8 = pytest.mark.parametrize(
    "row", [row for row in ROWS if row.dtype == FLOAT8], ids=str, indirect=True
)


@of_int8
@pytest.mark.parametrize("tokens", [3, 20])
def test_extreme_numbers(row: Row, tokens: int) -> None:
    """Sums of two products of bytes that do not fit into 16 bits, with a sign or without."""
    pattern = make_pattern("banded", (3, 5), (16, 64))
    for x, w, others in product((-128, -127, 127), (-128, 127), (-128, 127)):
        xs = torch.full((tokens, pattern.shape[1]), x, dtype=torch.int8)
        ws = torch.full((pattern.nnz, *pattern.block_shape), w, dtype=torch.int8)
        xs[:, 1::2], ws[..., ::3] = others, others
        check(Operands(row, Problem(pattern, tokens), xs, ws))


@of_int8
@pytest.mark.parametrize("tokens", [1, 16])
def test_the_largest_sums(row: Row, tokens: int) -> None:
    """2^14 times the most features: a bit more, and they would not fit into 32 bits."""
    pattern = BlockPattern.full((16, 2**17 - 16), block_shape=(16, 16))
    size = (pattern.nnz, *pattern.block_shape)
    for x, w in ((-128, -128), (-128, 127), (127, -128)):
        xs = torch.full((tokens, pattern.shape[1]), x, dtype=torch.int8)
        check(Operands(row, Problem(pattern, tokens), xs, torch.full(size, w, dtype=torch.int8)))


@pytest.mark.parametrize("tokens", [2, 30])
def test_tokens_without_a_scale_are_nan(row: Row, tokens: int) -> None:
    """Features without a block included, and no other token."""
    operands = Operands(row, Problem(make_pattern("empty rows and columns", (4, 3), (16, 16)), tokens))
    operands["x_scales"][0, 1] = float("nan")
    y = run(operands)
    assert bool(y[1].isnan().all())
    assert not bool(y[torch.arange(tokens) != 1].isnan().any())


@of_float8
def test_nan_of_float8_stays(row: Row) -> None:
    pattern = BlockPattern.full((16, 32), block_shape=(16, 32))
    x = torch.zeros(20, 32, dtype=torch.int8)
    x[3, 5] = 127
    y = run(Operands(row, Problem(pattern, 20), x, torch.zeros(1, 16, 32, dtype=torch.int8)))
    assert bool(y[3].isnan().all()) and not bool(y[4].isnan().any())


@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_threads(row: Row) -> None:
    operands = Operands(row, Problem(make_pattern("power-law rows", (9, 12), (32, 16)), 200))
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(run(operands).clone())
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_no_features_are_zero(row: Row) -> None:
    """Nothing is multiplied: y is the bias."""
    pattern = make_pattern("empty", (2, 2), (16, 16))
    operands = Operands(row, Problem(pattern, 9, bias=True))
    assert torch.equal(run(operands), operands["bias"].expand(9, -1))


@pytest.mark.parametrize("dtype", CODES)
def test_the_best_instruction_set_is_chosen(dtype: torch.dtype) -> None:
    available = [row.number - 1 for row in ROWS if row.dtype == dtype and not refusal(row)]
    assert choose(dtype) == available[0]


def test_missing_instruction_sets_are_named() -> None:
    for row in ROWS:
        reason = refusal(row)
        if reason:
            assert f"kernel {row.name} cannot compute this: the processor lacks" in reason


def test_results_of_float64_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"y\.dtype must be 2 to 4 for x of int8, got 1"):
        choose(INT8, torch.float64)


def test_kernels_of_other_dtypes_refuse() -> None:
    names = [kernel.name for kernel in _C.kernels()]
    for name in ("cpu_avx512_bf16", "cpu_amx_bf16"):
        if name in names:
            with pytest.raises(UnsupportedError, match="it computes another dtype"):
                choose(INT8, kernel=names.index(name) + 1)


def test_every_kernel_of_this_machine_runs() -> None:
    """In one process, so that nothing above passes by not running."""
    rows = [row for row in ROWS if not refusal(row)]
    assert {("cpu_portable", INT8), ("cpu_portable", FLOAT8)} <= {(row.name, row.dtype) for row in rows}
    for row in rows:
        check(Operands(row, Problem(make_pattern("random 50%", (2, 3), (16, 32)), 5)))
