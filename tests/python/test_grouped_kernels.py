"""Every CUDA kernel that computes grouped products; each group is compared with a float64 reference.

As in test_kernels.py all operands lie amid poison.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import OPTIONS, OUTPUTS, assert_within, seeded, shuffled
from test_kernels import (
    CHUNK,
    CODES,
    CUDA,
    DEVICE,
    EVERY_ROW,
    Guarded,
    Plan,
    Row,
    blocks_of,
    dense_weight,
    form_of,
    normal,
    prepared_on,
    random_stored,
    reference,
    runs_here,
)
from test_kernels import Problem as OneProblem
from torch import Tensor

from tilesparse import _C, BlockPattern
from tilesparse._checks import BLOCK_SIZES, COMPRESSIBLE
from tilesparse._runtime.device import ACTIVATIONS, SDD_TN
from tilesparse.errors import UnsupportedError

pytestmark = pytest.mark.gpu

# Tokens of each group. The last ones of a group do not fill a tile, and groups begin anywhere.
COUNTS = {
    "uneven": [0, 17, 1, 0, 300, 33, 129, 0],
    "all to one": [0, 0, 517, 0],
    "one group": [130],
    "two tiles each": [256, 256, 256],
    "many groups": [i % 4 for i in range(512)],
    "no tokens": [0, 0, 0],
}
PLAIN_OPTIONS: dict[int, list[dict[str, Any]]] = {
    op: [each for each in options if "of_bias" not in each] for op, options in OPTIONS.items()
}


def accepts(row: Row, block_shape: tuple[int, int], *, device: _C.DeviceInfo | None = None) -> bool:
    """Return True if the kernel computes grouped products of blocks of that shape on a GPU, or on this."""
    if row.storage is not None and row.storage.compressed and block_shape[1] % COMPRESSIBLE:
        return False
    pattern = BlockPattern.full((2 * block_shape[0], block_shape[1]), block_shape=block_shape)
    descriptor = prepared_on("cpu", pattern).grouped(2).descriptor
    options = {"precision": row.precision, "kernel": row.number, "grouped": True, **form_of(row)}
    try:
        product = _C.Product(descriptor, row.op, CODES[row.dtype], CUDA, 8, **options)
        product.select(device or _C.device_info(CUDA))
    except (UnsupportedError, ValueError):
        return False
    return True


@pytest.fixture(params=[row for row in EVERY_ROW if not row.of_8_bits], ids=str)
def row(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Row:
    record_property("kernel", request.param.name)
    if not runs_here(request.param):
        pytest.skip(f"needs compute capability {request.param.capability}")
    if not accepted_shapes(request.param):
        pytest.skip("computes no grouped products")
    found: Row = request.param
    return found


def accepted_shapes(row: Row) -> list[tuple[int, int]]:
    return [(bn, bk) for bn in BLOCK_SIZES for bk in BLOCK_SIZES if accepts(row, (bn, bk))]


@dataclass(frozen=True)
class Problem:
    pattern: BlockPattern  # of all groups
    counts: list[int]
    options: dict[str, Any]

    @property
    def groups(self) -> int:
        return len(self.counts)

    @property
    def offsets(self) -> list[int]:
        """Where groups begin, and the number of tokens."""
        return [sum(self.counts[:group]) for group in range(self.groups + 1)]

    @property
    def rows(self) -> int:
        """Block rows of a group."""
        return self.pattern.grid[0] // self.groups

    @property
    def features(self) -> int:
        """Those of y."""
        return self.pattern.out_features // self.groups

    def part(self, group: int) -> OneProblem:
        """The product of a group by itself."""
        mask = self.pattern.to_block_mask()[group * self.rows : (group + 1) * self.rows]
        pattern = BlockPattern.from_block_mask(mask, block_shape=self.pattern.block_shape)
        return OneProblem(pattern, self.counts[group], **self.options)

    def dense(self, values: Tensor) -> Tensor:
        """The weights [groups, features, in_features] in float64 that blocks belong to."""
        blocks = values.view(-1, *self.pattern.block_shape)
        return dense_weight(blocks, self.pattern).view(self.groups, self.features, -1)


def make_problem(
    row: Row, counts: list[int], block_shape: tuple[int, int], grid: tuple[int, int], **options: Any
) -> Problem:
    """Weights of different densities, from 0 to 1; fewer tokens for kernels that take no more."""
    if row.max_tokens:
        counts = [count * row.max_tokens // max(sum(counts), row.max_tokens) for count in counts]
    density = torch.linspace(0, 1, len(counts)).roll(1).repeat_interleave(grid[0])
    mask = torch.rand(len(counts) * grid[0], grid[1], generator=seeded(3)) < density[:, None]
    return Problem(shuffled(BlockPattern.from_block_mask(mask, block_shape=block_shape)), counts, options)


class Operands:
    """Those of a grouped product, random but for the output, which is poison, or what is added to."""

    def __init__(self, row: Row, problem: Problem) -> None:
        pattern, tokens, options = problem.pattern, sum(problem.counts), problem.options
        stored = random_stored(pattern, row.storage, row.dtype if row.op != SDD_TN else row.result)
        self.buffers = {
            "x": Guarded(tokens, pattern.in_features, row.dtype, gap=CHUNK),
            "y": Guarded(tokens, problem.features, row.of_y, gap=2 * CHUNK),
            "values": Guarded(1, stored.values.numel(), stored.values.dtype),
            "residual": Guarded(tokens, problem.features, row.of_y),
            "bias": Guarded(1, pattern.out_features, row.of_y, alignment=row.of_y.itemsize),
            "group_offsets": Guarded(1, problem.groups + 1, torch.int32, alignment=4),
        }
        given = {"values": stored.values, "group_offsets": torch.tensor([problem.offsets], device=DEVICE)}
        for name, tensor in (("metadata", stored.metadata), ("scales", stored.scales)):
            if tensor is not None:
                self.buffers[name] = Guarded(1, tensor.numel(), tensor.dtype, alignment=16)
                given[name] = tensor
        self.output = self.buffers[OUTPUTS[row.op]]
        for seed, (name, buffer) in enumerate(self.buffers.items()):
            if buffer is not self.output:
                size = buffer.lines.shape
                random_or_given = given[name] if name in given else normal(size, buffer.lines.dtype, seed)
                buffer.lines.copy_(random_or_given.view(size))
        accumulate = options.get("accumulate", False)
        self.before = normal(self.output.lines.shape, row.result, 9) if accumulate else None
        self.weights = problem.dense(stored.plain)
        self.weights_before = None if self.before is None else problem.dense(self.before)
        self.residual = self.buffers["residual"].lines if options.get("residual") else None
        self.bias = self.buffers["bias"].lines[0] if options.get("bias") else None

    @property
    def x(self) -> Tensor:
        return self.buffers["x"].lines

    @property
    def y(self) -> Tensor:
        return self.buffers["y"].lines

    def prepare_output(self) -> None:
        self.output.poison()
        if self.before is not None:
            self.output.lines.copy_(self.before)


class Part:
    """The operands of one group, as `reference` takes them."""

    def __init__(self, problem: Problem, operands: Operands, group: int) -> None:
        tokens = slice(*problem.offsets[group : group + 2])
        features = slice(group * problem.features, (group + 1) * problem.features)
        pattern, before = problem.part(group).pattern, operands.weights_before
        self.x, self.y = operands.x[tokens], operands.y[tokens]
        self.plain = blocks_of(operands.weights[group], pattern)
        self.before = None if before is None else blocks_of(before[group], pattern)
        self.bias = None if operands.bias is None else operands.bias[features]
        self.residual = None if operands.residual is None else operands.residual[tokens]


def make_product(row: Row, problem: Problem, operands: Operands) -> _C.Product:
    options, buffers = problem.options, operands.buffers
    product = _C.Product(
        prepared_on(DEVICE, problem.pattern).grouped(problem.groups).descriptor,
        row.op,
        CODES[row.dtype],
        CUDA,
        sum(problem.counts),
        activation=ACTIVATIONS[options.get("activation", "none")],
        precision=row.precision,
        accumulate=options.get("accumulate", False),
        kernel=row.number,
        ldx=buffers["x"].ld,
        ldy=buffers["y"].ld,
        residual=operands.residual is not None,
        ldr=buffers["residual"].ld,
        gated=options.get("gated", False),
        grouped=True,
        **form_of(row),
    )
    assert product.resolve() == (row.number - 1, row.plan), "another kernel was chosen"
    return product


def plan_of(row: Row, problem: Problem) -> Plan:
    if not row.plan:
        return Plan(0, 0, 0)
    entry = prepared_on(DEVICE, problem.pattern).grouped(problem.groups)
    memory = entry._plans.get(row.op, row.number - 1, row.plan)
    key = _C.plan_key(entry.descriptor, row.number - 1, row.op)
    return Plan(memory.data_ptr(), memory.numel(), key)


def launch(row: Row, problem: Problem, operands: Operands) -> None:
    """Computes the product once; no memory around output and workspace is written."""
    product = make_product(row, problem, operands)
    product.use_plan(*plan_of(row, problem))
    workspace = Guarded(1, (product.workspace_size() + 3) // 4, torch.float32, alignment=256)
    addresses = {name: buffer.address for name, buffer in operands.buffers.items()}
    if operands.bias is None:
        addresses["bias"] = 0
    if operands.residual is None:
        addresses["residual"] = 0
    stream = torch.cuda.current_stream(DEVICE).cuda_stream
    given = {"metadata": 0, "scales": 0, **addresses}
    product.run(**given, workspace=workspace.address, stream=stream)
    assert workspace.is_poison(inside=False), "memory around the workspace was written"
    assert operands.output.is_poison(inside=False), "memory around the output was written"


def check_group(row: Row, problem: Problem, operands: Operands, group: int, results: Tensor) -> None:
    """Compares results of all groups, of the gradient of W dense, with the reference of one."""
    part = problem.part(group)
    of_group: Any = Part(problem, operands, group)
    expected, tolerance = reference(row, part, of_group)
    if row.op == SDD_TN:
        actual = blocks_of(results[group], part.pattern)
    else:
        actual = results[slice(*problem.offsets[group : group + 2])]
    try:
        assert_within(actual, expected.cpu(), tolerance.cpu())
    except AssertionError as error:
        raise AssertionError(f"{row}, group {group} of {problem.counts}: {error}") from error


def check_groups(row: Row, problem: Problem, operands: Operands, groups: Iterable[int]) -> None:
    lines = operands.output.lines
    results = problem.dense(lines) if row.op == SDD_TN else lines
    for group in groups:
        check_group(row, problem, operands, group, results)


def check(row: Row, problem: Problem) -> None:
    """Computes a product twice and compares each group with its reference."""
    operands = Operands(row, problem)
    inputs = [buffer for buffer in operands.buffers.values() if buffer is not operands.output]
    before, results = [buffer.bits.clone() for buffer in inputs], []
    for _ in range(2):
        operands.prepare_output()
        launch(row, problem, operands)
        results.append(operands.output.bits.clone())
    assert torch.equal(*results), "two runs differ"
    assert all(torch.equal(buffer.bits, bits) for buffer, bits in zip(inputs, before, strict=True))
    check_groups(row, problem, operands, range(problem.groups))


@pytest.mark.parametrize("name", COUNTS)
def test_each_group_meets_its_weight(row: Row, name: str) -> None:
    draw = random.Random(f"{row} {name}")
    shapes = accepted_shapes(row)
    many = len(COUNTS[name]) > 8
    for block_shape in draw.sample(shapes, min(1 if many else 3, len(shapes))):
        grid = (2, 3) if many else (5, 7)
        options = draw.choice(PLAIN_OPTIONS[row.op])
        check(row, make_problem(row, COUNTS[name], block_shape, grid, **options))


def test_nothing_of_other_groups_enters_a_sum(row: Row) -> None:
    """A NaN in one group's tokens spoils results of this group alone, and none through 0 * NaN."""
    block_shape = accepted_shapes(row)[-1]
    problem = make_problem(row, [37, 61, 90], block_shape, (3, 4))
    operands = Operands(row, problem)
    spoiled = slice(*problem.offsets[1:3])
    for name in "xy":
        if name != OUTPUTS[row.op]:
            operands.buffers[name].lines[spoiled] = torch.nan
    operands.prepare_output()
    launch(row, problem, operands)
    check_groups(row, problem, operands, (0, 2))


def test_groups_without_tokens_have_no_gradient(row: Row) -> None:
    """Their values become 0, or stay what they were if they are added to."""
    if row.op != SDD_TN:
        pytest.skip("computes no gradient of W")
    for accumulate in (False, True):
        check(row, make_problem(row, [0, 50, 0], accepted_shapes(row)[0], (3, 4), accumulate=accumulate))


BROKEN = {
    "beyond": [0, 10, 10**9, 2**31 - 1],
    "negative": [-(2**31), -5, 40, 100],
    "descending": [100, 60, 30, 0],
    "everything twice": [0, 100, 0, 100],
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_offsets_write_nothing_outside(row: Row, name: str) -> None:
    problem = make_problem(row, [30, 30, 40], accepted_shapes(row)[0], (3, 4))
    operands = Operands(row, problem)
    operands.buffers["group_offsets"].lines.copy_(torch.tensor([BROKEN[name]]))
    operands.prepare_output()
    launch(row, problem, operands)
    torch.cuda.synchronize(DEVICE)


def test_routing_changes_between_replays(row: Row) -> None:
    """A graph follows the offsets, which the host does not read."""
    first = make_problem(row, [40, 0, 60, 20], accepted_shapes(row)[0], (3, 4))
    operands = Operands(row, first)
    operands.prepare_output()
    product = make_product(row, first, operands)
    product.use_plan(*plan_of(row, first))
    workspace = Guarded(1, (product.workspace_size() + 3) // 4, torch.float32, alignment=256)
    addresses = {"metadata": 0, "scales": 0} | {name: b.address for name, b in operands.buffers.items()}
    addresses |= {"bias": 0, "residual": 0, "workspace": workspace.address}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product.run(**addresses, stream=torch.cuda.current_stream(DEVICE).cuda_stream)
    for counts in ([40, 0, 60, 20], [0, 0, 120, 0], [1, 2, 3, 114]):
        problem = replace(first, counts=counts)
        operands.buffers["group_offsets"].lines.copy_(torch.tensor([problem.offsets]))
        operands.prepare_output()
        graph.replay()
        check_groups(row, problem, operands, range(problem.groups))
