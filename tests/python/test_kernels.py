"""Every kernel of the registry, called through the C ABI, against float64 references; grouped products too.

All operands lie amid poison: NaNs of one bit pattern that no arithmetic gives. A kernel that reads
outside of them computes NaN, one that writes there changes the pattern, and one that leaves a part of
its output out leaves NaN in it. Kernels of the CPU have their tests in test_cpu_kernels.py, by the same
`check`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, cycle, product
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from helpers import (
    FUNCTIONS,
    LAYOUTS,
    OPTIONS,
    OUTPUTS,
    PATTERNS,
    STORAGES,
    Storage,
    Stored,
    assert_within,
    expanded_by_definition,
    make_pattern,
    random_mask,
    reference_of_bias,
    rounded,
    rounding_unit,
    seeded,
    shuffled,
    stored_values,
    sums_unit,
)
from torch import Tensor

from tilesparse import _C, BlockPattern
from tilesparse._checks import BLOCK_SIZES, COMPRESSIBLE, DTYPES, QUANTIZED, SCALED
from tilesparse._runtime.device import ACTIVATIONS, DDS_NN, DDS_NT, SDD_TN
from tilesparse._runtime.pattern_cache import Prepared, prepared
from tilesparse.errors import InvalidArgumentError, PatternChangedError, UnsupportedError
from tilesparse.storage import compress

pytestmark = pytest.mark.gpu

CPU, CUDA, TF32, FAST, PER_BLOCK, PER_FEATURE = 0, 1, 1, 1, 1, 3
DEVICE = torch.device("cuda", 0)
TOKENS = [0, 1, 3, 17, 127, 1000, 4097]
LIMITED = "TILESPARSE_DEVICE_LIMITS" in os.environ  # test_other_gpus.py knows what is refused then
CHUNK = 16  # bytes, the alignment of operands on a GPU
CODES = DTYPES | QUANTIZED  # of what is multiplied
GUARD = {"cpu": 1 << 15, "cuda": 1 << 17}  # bytes of poison around an operand; the latter, the largest block
# By the size of an element. As int8 it is a number, which spoils results all the same.
POISON = {
    1: (torch.int8, 0x7F),
    2: (torch.int16, 0x7FA5),
    4: (torch.int32, 0x7FA57FA5),
    8: (torch.int64, 0x7FF57FA57FA57FA5),
}


FACTS = ("name", "device", "min_compute_capability", "precision", "plan", "max_tokens")


class Row(NamedTuple):
    """A kernel and one product, dtype, storage and result of those it computes; None are plain values."""

    number: int  # as callers name it: its index plus 1
    name: str  # this and what follows: `FACTS`
    device: int
    capability: int
    precision: int
    plan: int
    max_tokens: int  # 0: any number
    op: int
    dtype: torch.dtype
    storage: Storage | None
    result: torch.dtype
    grouped: bool = False

    @property
    def on(self) -> torch.device:
        return DEVICE if self.device == CUDA else torch.device("cpu")

    @property
    def of_8_bits(self) -> bool:
        """True if x has 8 bits, and so values and scales of its own."""
        return self.dtype in QUANTIZED

    @property
    def scales_inside(self) -> bool:
        """True if scales are inside of the sums: of 128 k of a token, and of blocks."""
        return self.of_8_bits and "scaled" in self.name

    @property
    def of_any_block(self) -> bool:
        """True if blocks may have any sides; such kernels compute no grouped products."""
        return "_blocks" in self.name

    @property
    def of_y(self) -> torch.dtype:
        """The dtype of y, bias and residual."""
        return self.result if self.op == DDS_NT else self.dtype

    @property
    def of_values(self) -> torch.dtype:
        """The dtype of dense blocks."""
        return self.result if self.op == SDD_TN else self.dtype

    def __str__(self) -> str:
        names = [name for name, storage in STORAGES.items() if storage == self.storage]
        if self.device == CPU:
            names += [{DDS_NT: "dds_nt", DDS_NN: "dds_nn", SDD_TN: "sdd_tn"}[self.op], str(self.dtype)]
        if self.result != self.dtype:
            names.append(f"to {self.result}")
        return " ".join([self.name, *names]).replace("torch.", "")


def storages_of(kernel: _C.KernelInfo, dtype: torch.dtype) -> list[Storage | None]:
    """Storages that a kernel reads without conversion, of 8 bits with either kind of scales."""
    if dtype in QUANTIZED:  # as x is
        return [form for form, bit in ((None, 1), (STORAGES["2:4"], 2)) if kernel.storages & bit]
    own = kernel.values_dtypes == 0 or kernel.values_dtypes >> DTYPES[dtype] & 1
    found: list[Storage | None] = [None] if kernel.storages & 1 and own else []
    for storage in STORAGES.values():
        quantized = storage.quantized
        reads = own if quantized is None else kernel.values_dtypes >> SCALED[quantized] & 1
        if reads and kernel.storages >> storage.compressed & 1:
            found.append(storage)
    return found


def results_of(kernel: _C.KernelInfo, op: int, dtype: torch.dtype) -> list[torch.dtype]:
    """Dtypes of what it writes."""
    if kernel.device == CPU:  # those of all kernels there
        if dtype in QUANTIZED:
            return [torch.float32, torch.float16, torch.bfloat16]
        return [dtype, torch.float32] if op == SDD_TN and dtype.itemsize == 2 else [dtype]
    if kernel.result_dtypes == 0:
        return [dtype]
    return [result for result, code in DTYPES.items() if kernel.result_dtypes >> code & 1]


def rows_of(device: int) -> list[Row]:
    return [
        Row(index + 1, *(getattr(kernel, fact) for fact in FACTS), op, dtype, storage, result)
        for index, kernel in enumerate(_C.kernels())
        if kernel.device == device
        for op in (DDS_NT, DDS_NN, SDD_TN)
        if kernel.ops >> op & 1
        for dtype in CODES
        if kernel.dtypes >> CODES[dtype] & 1 and (op == DDS_NT or dtype not in QUANTIZED)
        for storage in storages_of(kernel, dtype)
        for result in results_of(kernel, op, dtype)
    ]


# Kernels with "grouped" in their name compute grouped products alone.
ROWS = [row for row in rows_of(CUDA) if "grouped" not in row.name]
GROUPED_ROWS = [
    row._replace(grouped=True) for row in rows_of(CUDA) if not row.scales_inside and not row.of_any_block
]
ROWS_OF_DECODE_TOKENS = [row for row in ROWS if row.max_tokens]
ROWS_WITH_PLANS = [row for row in ROWS if row.plan]
# Kernels that are given the expansion of values they do not read.
ROWS_THAT_EXPAND = [row for row in ROWS if row.storage is None and row.op != SDD_TN and not row.scales_inside]
# Kernels whose results are row-major, without activation, residual or gate.
OF_PLAIN_RESULTS = {f"sm90_dds_nt_{sums}_bf16_pingpong_384x128" for sums in ("int8", "float8_fast")}
PLAIN_OPTIONS = {op: [each for each in options if "of_bias" not in each] for op, options in OPTIONS.items()}


def runs_here(row: Row) -> bool:
    """Kernels for 8.0 run everywhere later, those for 9.0 there alone."""
    here = _C.device_info(CUDA).compute_capability
    return row.capability == here or (row.capability == 80 and here > 80)


@pytest.fixture(params=ROWS, ids=str)
def row(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Row:
    found: Row = request.param
    record_property("kernel", found.name)
    if not runs_here(found):
        pytest.skip(f"needs compute capability {found.capability}")
    if not accepted_shapes(found):
        other = "computes no grouped products" if found.grouped else "is refused with these limits"
        pytest.skip("is tested with other blocks, in test_blocks" if found.of_any_block else other)
    return found


def of(rows: list[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=str, indirect=True)


def options_of(row: Row) -> list[dict[str, Any]]:
    """The options of results that a kernel computes."""
    options = OPTIONS[row.op]
    if row.name not in OF_PLAIN_RESULTS:
        return options
    return [each for each in options if each["activation"] == "none" and not each["residual"]]


@cache
def accepted_shapes(row: Row) -> list[tuple[int, int]]:
    """The block shapes a kernel accepts."""
    shapes = [shape for shape in product(BLOCK_SIZES, BLOCK_SIZES) if accepts(row, shape)]
    assert shapes or row.grouped or row.of_any_block or LIMITED, "the kernel accepts no block shape"
    return shapes


@cache
def accepted_layouts(row: Row) -> list[tuple[int, int]]:
    """The layouts of x and y a kernel accepts."""
    possible = [(0, 0), (0, 1)] if row.of_8_bits else LAYOUTS
    layouts = [layouts for layouts in possible if accepts(row, accepted_shapes(row)[0], *layouts)]
    assert (0, 0) in layouts, "the kernel refuses row-major activations"
    return layouts


def accepts(
    row: Row,
    block_shape: tuple[int, int],
    x_layout: int = 0,
    y_layout: int = 0,
    tokens: int = 8,
    device: _C.DeviceInfo | None = None,
) -> bool:
    """Return True if the kernel computes such products on the device that is here, or on another."""
    if row.storage is not None and row.storage.compressed and block_shape[1] % COMPRESSIBLE:
        return False
    if row.scales_inside and block_shape != (128, 128):  # which is refused before kernels are asked
        return False
    groups = 1 + row.grouped
    pattern = BlockPattern.full((groups * block_shape[0], block_shape[1]), block_shape=block_shape)
    try:
        product = _C.Product(
            entry_of(row, torch.device("cpu"), pattern, groups).descriptor,
            row.op,
            CODES[row.dtype],
            row.device,
            tokens,
            precision=row.precision,
            kernel=row.number,
            x_layout=x_layout,
            y_layout=y_layout,
            grouped=row.grouped,
            **form_of(row, tokens),
        )
        product.select(_C.device_info(row.device) if device is None else device)
    except UnsupportedError:
        return False
    except ValueError:
        if row.grouped:
            return False
        raise
    return True


def form_of(row: Row, tokens: int = 0, gap: int = 0) -> dict[str, Any]:
    """Storage of values and results, as arguments of `_C.Product`; ``gap``: bytes between lines."""
    storage = row.storage
    if row.scales_inside:
        ld = max(4, (4 * tokens + gap + CHUNK - 1) // CHUNK * CHUNK // 4)
        return {"granularity": PER_BLOCK, "result_dtype": DTYPES[row.result], "x_scales_ld": ld}
    if row.of_8_bits:
        form = {"granularity": PER_FEATURE, "result_dtype": DTYPES[row.result]}
        return form if storage is None else form | {"storage": int(storage.compressed)}
    if storage is None:
        return {} if row.result == row.dtype else {"result_dtype": DTYPES[row.result]}
    return {
        "storage": int(storage.compressed),
        "values_dtype": 0 if storage.quantized is None else SCALED[storage.quantized],
        "granularity": 0 if storage.quantized is None else 1 + storage.row_scales,
    }


def entry_of(row: Row, device: torch.device, pattern: BlockPattern, groups: int) -> Prepared:
    """The arrays of a pattern on a device; their memory lasts as long as the pattern."""
    entry = prepared(pattern.index_on(device))
    return entry.grouped(groups) if row.grouped else entry


def within(row: Row, tokens: int) -> int:
    """The number of tokens itself, or one that a kernel for few tokens computes in its place."""
    return (tokens - 1) % row.max_tokens + 1 if row.max_tokens and tokens else tokens


@dataclass(frozen=True)
class Problem:
    pattern: BlockPattern  # of all groups
    tokens: int
    x_layout: int = 0
    y_layout: int = 0
    gap: int = 0  # bytes between the lines of x and y
    bias: bool = False
    activation: str = "none"
    residual: bool = False
    gated: bool = False  # the residual is a gate
    accumulate: bool = False
    of_bias: str = ""  # what becomes of the sums of y: nothing, "stored" or "added in float32"
    counts: tuple[int, ...] = ()  # tokens of each group; () for one product

    @property
    def groups(self) -> int:
        return len(self.counts) or 1

    @property
    def offsets(self) -> list[int]:
        """Indices at which groups begin, and the number of tokens."""
        return list(accumulate(self.counts or (self.tokens,), initial=0))

    @property
    def features(self) -> int:
        """Features of y."""
        return self.pattern.out_features // self.groups

    def part(self, group: int) -> tuple[BlockPattern, slice | Tensor]:
        """The pattern of a group by itself, and the slots that its blocks have in that of all."""
        if not self.counts:
            return self.pattern, slice(None)
        height = self.pattern.grid[0] // self.groups
        mask = self.pattern.to_block_mask().cpu()[group * height : (group + 1) * height]
        rows, columns = (index.cpu() for index in self.pattern.block_indices())
        order = (rows * self.pattern.grid[1] + columns).argsort()
        slots = order[rows[order] // height == group]
        return BlockPattern.from_block_mask(mask, block_shape=self.pattern.block_shape), slots


class Guarded:
    """Lines of numbers amid poison, aligned to exactly `alignment` bytes: as far as a device demands."""

    def __init__(
        self,
        lines: int,
        length: int,
        dtype: torch.dtype,
        *,
        gap: int = 0,
        alignment: int = 0,
        device: torch.device = DEVICE,
    ) -> None:
        size, guard = dtype.itemsize, GUARD[device.type]
        integer, self._poison = POISON[size]
        chunk = CHUNK if device.type == "cuda" else size
        alignment = alignment or chunk
        # On the CPU lines may begin anywhere: one element more.
        odd = device.type == "cpu" and gap > 0
        self.ld = (length * size + gap + chunk - 1) // chunk * chunk // size + odd
        elements = 2 * (guard + 2 * alignment) // size + lines * self.ld
        self.bits = torch.full((elements,), self._poison, dtype=integer, device=device)
        begin = guard + alignment + -(self.bits.data_ptr() + guard) % (2 * alignment)
        self._inside: tuple[Any, Any, int | None] = ((lines, length), (self.ld, 1), begin // size)
        self.lines = self.bits.view(dtype).as_strided(*self._inside)
        self.address = self.bits.data_ptr() + begin

    def poison(self) -> None:
        self.bits.fill_(self._poison)

    def is_poison(self, *, inside: bool) -> bool:
        """Return True if the poison is whole around the lines, or also inside of them."""
        bits = self.bits.clone()
        if not inside:
            bits.as_strided(*self._inside).fill_(self._poison)
        return bool((bits == self._poison).all())


class Part(NamedTuple):
    """The operands of one group, of which `expected` is a product; scales of x where x has 8 bits."""

    pattern: BlockPattern
    x: Tensor
    y: Tensor
    values: Tensor
    plain: Tensor
    before: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    scales: Tensor | None
    x_scales: Tensor | None


class Operands:
    """x, y, values, bias and residual or gate of one problem, random but for the output, which is poison.

    Beside values lies what their storage has besides; `plain` is what products multiply by.
    """

    def __init__(self, row: Row, problem: Problem) -> None:
        self.row, pattern, dtype, on = row, problem.pattern, row.dtype, row.on
        stored = random_stored(row, pattern)
        of_bias = torch.float32 if "float32" in problem.of_bias and dtype.itemsize == 2 else row.of_y

        def matrix(features: int, layout: int, dtype: torch.dtype, more: int = 0) -> Guarded:
            lines, length = (features, problem.tokens) if layout else (problem.tokens, features)
            return Guarded(lines, length, dtype, gap=problem.gap + more, device=on)

        def vector(length: int, dtype: torch.dtype, alignment: int = 0) -> Guarded:
            return Guarded(1, length, dtype, alignment=alignment, device=on)

        self.buffers = {
            "x": matrix(pattern.in_features, problem.x_layout, dtype),
            "y": matrix(problem.features, problem.y_layout, row.of_y),
            "values": vector(stored.values.numel(), stored.values.dtype),
            "bias": vector(pattern.out_features, of_bias, of_bias.itemsize),
            "residual": matrix(problem.features, problem.y_layout, row.of_y, CHUNK),
        }
        if stored.metadata is not None:
            self.buffers["metadata"] = vector(stored.metadata.numel(), torch.int32)
        if stored.scales is not None:
            self.buffers["scales"] = vector(stored.scales.numel(), torch.float32, 4)
        if row.of_8_bits:
            lines, gap = (pattern.in_features // 128, problem.gap) if row.scales_inside else (1, 0)
            self.buffers["x_scales"] = Guarded(lines, problem.tokens, torch.float32, gap=gap, device=on)
        if problem.counts:
            self.buffers["group_offsets"] = vector(problem.groups + 1, torch.int32, 4)
        self.output = self.buffers[OUTPUTS[row.op]]
        self.outputs = [self.output, self.buffers["bias"]] if problem.of_bias else [self.output]
        self.inputs = [buffer for buffer in self.buffers.values() if buffer not in self.outputs]
        self.before = normal(self.output.lines.shape, row.result, 9, on) if problem.accumulate else None
        added = "added" in problem.of_bias
        self.bias_before = normal(self.buffers["bias"].lines.shape, of_bias, 11, on) if added else None
        given = stored._asdict() | {"group_offsets": torch.tensor(problem.offsets)}
        for seed, (name, buffer) in enumerate(self.buffers.items()):
            if buffer not in self.outputs:
                random = some(name, buffer, seed) if name not in given else given[name]
                buffer.lines.copy_(random.view_as(buffer.lines))
        transposed = {"x": problem.x_layout == 1, "y": problem.y_layout == 1}
        self.x, self.y = (
            self.buffers[name].lines.t() if transposed[name] else self.buffers[name].lines for name in "xy"
        )
        if row.of_8_bits:
            self.scales, of_x = self.buffers["scales"].lines[0], self.buffers["x_scales"].lines
            self.x_scales = of_x.t() if row.scales_inside else of_x[0]
        self.values = self.buffers["values"].lines.view(stored.values.shape)
        self.plain = stored.plain
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

    def part(self, problem: Problem, group: int) -> Part:
        pattern, slots = problem.part(group)
        tokens = slice(*problem.offsets[group : group + 2])
        features = slice(group * problem.features, (group + 1) * problem.features)
        scales, x_scales = getattr(self, "scales", None), getattr(self, "x_scales", None)
        if scales is not None and x_scales is not None and problem.counts:
            scales, x_scales = scales[features], x_scales[tokens]
        return Part(
            pattern,
            self.x[tokens],
            self.y[tokens],
            self.values[slots] if self.output is self.buffers["values"] else self.values,
            self.plain[slots],
            None if self.before is None else self.before.view_as(self.values)[slots],
            None if self.bias is None else self.bias[features],
            None if self.residual is None else self.residual[tokens],
            scales,
            x_scales,
        )


def random_stored(row: Row, pattern: BlockPattern) -> Stored:
    size = torch.Size([pattern.nnz, *pattern.block_shape])
    if row.of_8_bits:
        values = of_8_bits(size, row.dtype, 10, row.on)
        count = pattern.nnz if row.scales_inside else pattern.out_features
        scales, metadata, plain = scales_of_8_bits(count, 11, row.on), None, values
        if row.storage is not None:
            values, metadata = compress(values, random_mask(values.shape).to(row.on))
            plain = expanded_by_definition(values, metadata, None, row.dtype)
        return Stored(values, metadata, scales, plain)
    if row.storage is not None:
        return stored_values(pattern, row.storage, dtype=row.of_values, device=str(row.on))
    values = normal(size, row.of_values, 10, row.on)
    return Stored(values, None, None, values)


def normal(size: torch.Size, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(size, dtype=dtype, device=device, generator=generator)


def some(name: str, buffer: Guarded, seed: int) -> Tensor:
    """Random contents for an operand."""
    size, dtype, device = buffer.lines.shape, buffer.lines.dtype, buffer.lines.device
    if name == "x_scales":
        return scales_of_8_bits(size.numel(), seed, device)
    return (of_8_bits if dtype in QUANTIZED else normal)(size, dtype, seed, device)


def of_8_bits(size: torch.Size, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """All numbers of int8; of float8 normal ones and a few of the others, but NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    bits = torch.randint(-128, 128, size, dtype=torch.int8, device=device, generator=generator)
    if dtype == torch.int8:
        return bits
    bits[bits.bitwise_and(127) == 127] = 0  # NaN
    rare = torch.rand(size, device=device, generator=generator) < 0.01
    return torch.where(rare, bits.view(dtype).float(), normal(size, torch.float32, seed, device)).to(dtype)


def scales_of_8_bits(count: int, seed: int, device: torch.device) -> Tensor:
    """Scales of either sign, small enough for sums in float16."""
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.rand(count, device=device, generator=generator) - 0.5) / 64


def make_product(row: Row, problem: Problem, operands: Operands, **changes: Any) -> _C.Product:
    """The product as that kernel is to compute it, but for a plan; `changes` replace arguments."""
    x, y, residual = (operands.buffers[name] for name in ("x", "y", "residual"))
    arguments: dict[str, Any] = {
        "activation": ACTIVATIONS[problem.activation],
        "precision": row.precision,
        "accumulate": problem.accumulate,
        "kernel": row.number,
        "x_layout": problem.x_layout,
        "ldx": x.ld,
        "y_layout": problem.y_layout,
        "ldy": y.ld,
        "residual": problem.residual,
        "ldr": residual.ld,
        "gated": problem.gated,
        "grouped": row.grouped,
        "bias_gradient": bool(problem.of_bias),
        "bias_gradient_dtype": DTYPES[operands.buffers["bias"].lines.dtype] if problem.of_bias else 0,
        "accumulate_bias": operands.bias_before is not None,
        **form_of(row, problem.tokens, problem.gap),
    }
    descriptor = entry_of(row, row.on, problem.pattern, problem.groups).descriptor
    product = _C.Product(
        descriptor, row.op, CODES[row.dtype], row.device, problem.tokens, **(arguments | changes)
    )
    assert product.resolve() == (row.number - 1, row.plan), "another kernel was chosen"
    return product


class Plan(NamedTuple):
    """Address and size of a plan, and the key of its kernel and pattern."""

    address: int
    size: int
    key: int


def plan_of(row: Row, problem: Problem) -> Plan:
    """The plan as products of tensors walk it, made by the GPU; empty for kernels without one."""
    if not row.plan:
        return Plan(0, 0, 0)
    entry = entry_of(row, DEVICE, problem.pattern, problem.groups)
    memory = entry._plans.get(row.op, row.number - 1, row.plan)
    return Plan(memory.data_ptr(), memory.numel(), _C.plan_key(entry.descriptor, row.number - 1, row.op))


def run(product: _C.Product, problem: Problem, operands: Operands, workspace: int, **changes: int) -> None:
    """Call the kernel with a workspace at that address; `changes` replace other addresses."""
    addresses = {name: buffer.address for name, buffer in operands.buffers.items()}
    if not (problem.bias or problem.of_bias):
        addresses["bias"] = 0
    if not problem.residual:
        addresses["residual"] = 0
    stream = torch.cuda.current_stream(DEVICE).cuda_stream if operands.row.device == CUDA else 0
    product.run(**(addresses | changes), workspace=workspace, stream=stream)


def workspace_of(row: Row, product: _C.Product) -> Guarded:
    size = (product.workspace_size() + 3) // 4
    return Guarded(1, size, torch.float32, alignment=256, device=row.on)


def launch(
    row: Row,
    problem: Problem,
    operands: Operands,
    plan: Plan | None = None,
    arguments: Mapping[str, int] = MappingProxyType({}),
    **addresses: int,
) -> None:
    """Call the kernel with a poisoned workspace, and as it is called otherwise but for what is given."""
    product = make_product(row, problem, operands, **arguments)
    if row.plan:
        product.use_plan(*(plan_of(row, problem) if plan is None else plan))
    workspace = workspace_of(row, product)
    run(product, problem, operands, workspace.address, **addresses)
    assert workspace.is_poison(inside=False), "memory around the workspace was written"
    for output in operands.outputs:
        assert output.is_poison(inside=False), "memory around an output was written"


def reference(row: Row, problem: Problem, part: Part) -> tuple[Tensor, Tensor]:
    """(expected, tolerance) in float64, shaped like the output."""
    pattern = part.pattern
    if row.op == SDD_TN:
        left, right = part.y.t(), part.x
    elif row.op == DDS_NT:
        # Times their scales where these are inside of the sums.
        blocks = part.plain.double() * part.scales[:, None, None] if row.scales_inside else part.plain
        left, right = part.x, dense_weight(blocks, pattern).t()
    else:
        left, right = part.y, dense_weight(part.plain, pattern)
    left, right = left.double(), right.double()
    if row.scales_inside:
        left = left * part.x_scales.double().repeat_interleave(128, 1)
    elif row.of_8_bits:
        left, right = left * part.x_scales[:, None].double(), right * part.scales.double()
    expected, magnitude = left @ right, left.abs() @ right.abs()
    if row.op == SDD_TN:
        expected, magnitude = blocks_of(expected, pattern), blocks_of(magnitude, pattern)
    added = part.before if part.before is not None else part.bias
    if added is not None:
        expected, magnitude = expected + added.double(), magnitude + added.double().abs()
    tolerance = relative_error(row, left.shape[-1]) * magnitude
    unit = sums_unit(row.dtype)
    if problem.gated:
        gate = part.residual.double()
        gate, error = activated(row, problem, gate, torch.zeros_like(gate))
        error = rounded(gate, error, row.result)
        tolerance = tolerance * gate.abs() + (expected.abs() + tolerance) * error
        return expected * gate, rounded(expected * gate, tolerance, row.result)
    expected, tolerance = activated(row, problem, expected, tolerance)
    if part.residual is not None:
        expected = expected + part.residual.double()
        tolerance = tolerance + unit * (expected.abs() + tolerance)
    return expected, rounded(expected, tolerance, row.result)


def by_definition(row: Row, problem: Problem, part: Part) -> Tensor:
    """The result for x in int8, whose sums are exact, step by step in float32."""
    sums = part.x.double() @ dense_weight(part.plain, part.pattern).t()
    result = sums.float() * part.x_scales[:, None] * part.scales
    result = result if part.bias is None else result + part.bias.float()
    function = FUNCTIONS[problem.activation]
    if problem.gated:
        return (result * function(part.residual.float())).to(row.result)
    result = function(result)
    return (result if part.residual is None else result + part.residual.float()).to(row.result)


def activated(row: Row, problem: Problem, values: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the problem's activation to values and to their tolerance."""
    if problem.activation == "none":
        return values, tolerance
    # No activation's slope exceeds 1.13; the functions themselves are good to a few units, gelu in 16 bits on
    # a GPU to what the C header states.
    unit = sums_unit(row.dtype)
    tolerance = 1.13 * tolerance + 8 * unit * values.abs()
    if problem.activation == "gelu" and row.result.itemsize == 2 and row.device == CUDA:
        tolerance = tolerance + 1e-5
    return FUNCTIONS[problem.activation](values), tolerance


def relative_error(row: Row, terms: int) -> float:
    """Bound of |error| / sum of |l r| before the result is rounded.

    Tensor cores multiply exactly and truncate sums to float32 or better, twice the error of rounding
    (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021); on the CPU some instructions round the
    sum of two products on the way. TF32 rounds each factor to 2^-11.
    Its threefold variant adds three products for each term. Where rounding splits both factors it drops one
    below 2^-22 and keeps factors to 2^-23, which is 8 units together; where one is cut off, one below 2^-21
    and keeps that factor to 2^-22, which is 14. Sums of float64 are rounded, here and in the reference.
    Products of int8 add up exactly; then 8 bits have two scales. Tensor cores of compute capability 8.9, 9.0
    and 12.0 keep 12 bits and more where they add 32 products of float8 and their sum, which is carried over
    after 512 on 9.0 unless sums are fast, and after 128 in kernels for 8.0; these multiply halves elsewhere.
    """
    unit = rounding_unit(torch.float32)
    if row.dtype == torch.int8:
        return 8 * unit
    if row.dtype == torch.float8_e4m3fn and row.device == CUDA and row.capability == 90:
        kept = terms if row.precision == FAST else min(terms, 512)
        return (kept / 16 + 4) * 2**-12 + 2 * (terms + 4) * unit
    if row.dtype == torch.float8_e4m3fn and row.device == CUDA and multiplies_float8():
        return (min(terms, 128) / 16 + 4) * 2**-12 + 2 * (terms + 4) * unit
    if row.dtype != torch.float32 or row.device == CPU:
        return 2 * (terms + 4) * sums_unit(row.dtype)
    if row.precision == TF32:
        return 2 * (terms + 4) * unit + 2 * 2**-11 + 2**-22
    return 2 * (3 * terms + 4) * unit + 14 * unit


def multiplies_float8() -> bool:
    """True if kernels for 8.0 have an instruction for float8 on this GPU."""
    here = _C.device_info(CUDA).compute_capability
    return here == 89 or here // 10 == 12


def dense_weight(values: Tensor, pattern: BlockPattern) -> Tensor:
    """W [out_features, in_features] in float64 on the values' device."""
    blocks = torch.zeros(*pattern.grid, *pattern.block_shape, dtype=torch.float64, device=values.device)
    blocks[pattern.block_indices()] = values.double()
    return blocks.transpose(1, 2).reshape(pattern.shape)


def blocks_of(dense: Tensor, pattern: BlockPattern) -> Tensor:
    """[nnz, bn, bk] the pattern's blocks of a dense matrix, in slot order."""
    (rows, cols), (bn, bk) = pattern.grid, pattern.block_shape
    return dense.reshape(rows, bn, cols, bk).transpose(1, 2)[pattern.block_indices()]


def host_plan(row: Row, problem: Problem) -> tuple[Plan, Tensor]:
    """The plan as the host makes it, and the device memory it is in. Elsewhere the GPU makes them."""
    entry = entry_of(row, torch.device("cpu"), problem.pattern, 1)
    plan = torch.empty(_C.plan_size(entry.descriptor, row.number - 1, row.op), dtype=torch.uint8)
    _C.plan_build(entry.descriptor, row.number - 1, row.op, plan.data_ptr(), plan.numel())
    memory = plan.to(DEVICE)
    key = _C.plan_key(entry.descriptor, row.number - 1, row.op)
    return Plan(memory.data_ptr(), memory.numel(), key), memory


def check(row: Row, problem: Problem, plan: Plan | None = None) -> None:
    """Runs a problem twice and checks everything about it.

    Some kernels store column-major results in whole vectors of 16 bytes only: they get more tokens.
    """
    layouts = (problem.x_layout, problem.y_layout)
    if not accepts(row, problem.pattern.block_shape, *layouts, problem.tokens) and not row.grouped:
        problem = replace(problem, tokens=(problem.tokens + 7) // 8 * 8)
    try:
        _check(row, problem, plan)
    except Exception as error:
        raise AssertionError(f"{row}, {problem}: {error}") from error


def _check(row: Row, problem: Problem, plan: Plan | None) -> None:
    operands = Operands(row, problem)
    inputs = [buffer.bits.clone() for buffer in operands.inputs]
    results = []
    for _ in range(2):
        operands.prepare_output()
        launch(row, problem, operands, plan)
        results.append([output.bits.clone() for output in operands.outputs])
    assert all(map(torch.equal, *results)), "two runs differ"
    for before, buffer in zip(inputs, operands.inputs, strict=True):
        assert torch.equal(buffer.bits, before), "an input was written"
    check_groups(row, problem, operands, range(problem.groups))
    if problem.of_bias:
        of_bias = operands.buffers["bias"].lines[0]
        expected, tolerance = reference_of_bias(row.dtype, operands.y, operands.bias_before, of_bias.dtype)
        assert_within(of_bias, expected.cpu(), tolerance.cpu())


def check_groups(row: Row, problem: Problem, operands: Operands, groups: Iterable[int]) -> None:
    """Compare the results of groups with the reference of each."""
    for group in groups:
        part = operands.part(problem, group)
        expected, tolerance = reference(row, problem, part)
        actual = {DDS_NT: part.y, DDS_NN: part.x, SDD_TN: part.values}[row.op]
        try:
            assert_within(actual, expected.cpu(), tolerance.cpu())
            if row.device == CPU and row.dtype == torch.int8 and problem.activation in ("none", "relu"):
                torch.testing.assert_close(actual, by_definition(row, problem, part), rtol=0, atol=0)
        except AssertionError as error:
            raise AssertionError(f"group {group} of {problem.counts}: {error}") from error


def random_pattern(
    shape: tuple[int, int], block_shape: tuple[int, int], density: float, seed: int = 0
) -> BlockPattern:
    return shuffled(
        BlockPattern.random(shape, block_shape=block_shape, density=density, generator=seeded(seed))
    )


def test_small(row: Row) -> None:
    """Each layout, and more tokens than one CTA sums up: all there is to check for a sanitizer."""
    pattern = make_pattern("random 50%", (2, 3), accepted_shapes(row)[0])
    for (x_layout, y_layout), options in product(accepted_layouts(row), options_of(row)[-2:]):
        check(row, Problem(pattern, 17, x_layout, y_layout, gap=CHUNK, **options))
    check(row, Problem(pattern, within(row, 600)))


def test_many_tiles(row: Row) -> None:
    """Several for each multiprocessor, as many for one as for another, and CTAs beyond the last token."""
    block_shape = accepted_shapes(row)[-1]
    pattern = make_pattern("random 50%", (1280 // block_shape[0], 384 // block_shape[1]), block_shape)
    for options in options_of(row)[-2:]:
        check(row, Problem(pattern, within(row, 64 * 257), **options))


POSITIVE = 4e-3  # of sums of float8, beside what rounding the result takes


@of([row for row in ROWS if row.of_8_bits and row.precision != FAST])
@pytest.mark.parametrize("terms", [1024, 4096, 16384])
def test_positive_sums(row: Row, terms: int) -> None:
    """Products of one sign, whose sum outgrows what tensor cores add to it in 8 bits."""
    block_shape = accepted_shapes(row)[-1]
    pattern = BlockPattern.full((256, terms), block_shape=block_shape)
    problem = Problem(pattern, within(row, 300))
    operands = Operands(row, problem)
    for name in ("x", "values", "scales", "x_scales"):
        lines = operands.buffers[name].lines
        chance = torch.Generator(lines.device).manual_seed(len(name))
        positive = torch.rand(lines.shape, device=lines.device, generator=chance)
        lines.copy_((positive + 1) / 128 if "scales" in name else 100 * positive)
    operands.plain = operands.values
    if row.storage is not None:
        metadata = operands.buffers["metadata"].lines[0].view(pattern.nnz, -1, block_shape[0])
        operands.plain = expanded_by_definition(operands.values, metadata, None, row.dtype)
    results = []
    for _ in range(2):
        operands.prepare_output()
        launch(row, problem, operands)
        results.append(operands.y.clone())
    assert torch.equal(*results), "two runs differ"
    part = operands.part(problem, 0)
    expected, _ = reference(row, problem, part)
    error = ((part.y.double() - expected) / expected).abs().max().item()
    assert error < rounding_unit(row.result) + (POSITIVE if row.dtype != torch.int8 else 0) + 1e-6


@of([row for row in ROWS if row.dtype == torch.float8_e4m3fn and not row.scales_inside])
def test_fast_sums(row: Row) -> None:
    """Sums of float8 that stay with the tensor cores, which are as good as others up to 512 k."""
    fast = row._replace(precision=FAST)
    for block_shape in accepted_shapes(row):
        pattern = make_pattern("random 50%", (1280 // block_shape[0], 512 // block_shape[1]), block_shape)
        for tokens, options in product((130, 2100), options_of(row)[-2:]):
            check(fast, Problem(pattern, within(row, tokens), **options))


def test_long_sums(row: Row) -> None:
    """Few tiles and many k, which some kernels cut into parts."""
    options = cycle(options_of(row))
    for block_shape in accepted_shapes(row)[::2]:
        long = 6144 // block_shape[row.op != DDS_NN]
        grid = (long, 2) if row.op == DDS_NN else (2, long)
        pattern = make_pattern("random 50%", grid, block_shape)
        for x_layout, y_layout in accepted_layouts(row):
            check(row, Problem(pattern, within(row, 200), x_layout, y_layout, **next(options)))
        if row.op != SDD_TN:  # several tiles, of tokens and of features
            several = 640 // block_shape[row.op == DDS_NN]
            grid = (long, several) if row.op == DDS_NN else (several, long)
            check(row, Problem(make_pattern("random 50%", grid, block_shape), within(row, 300)))


@pytest.mark.parametrize("name", ["random 50%", "power-law rows", "empty"])
@of(ROWS_WITH_PLANS)
def test_plans_of_the_host(row: Row, name: str) -> None:
    for block_shape in accepted_shapes(row)[::3]:
        problem = Problem(make_pattern(name, (40, 10), block_shape), 137)
        plan, memory = host_plan(row, problem)
        check(row, problem, plan)
        del memory  # not before


@pytest.mark.parametrize("name", PATTERNS)
def test_adversarial_patterns(row: Row, name: str) -> None:
    draw = random.Random(f"{row} {name}")
    shapes = accepted_shapes(row)
    for block_shape in draw.sample(shapes, min(3, len(shapes))):
        pattern = make_pattern(name, (7, 10), block_shape)
        tokens, options = within(row, draw.choice((17, 130, 200))), draw.choice(options_of(row))
        check(row, Problem(pattern, tokens, *draw.choice(accepted_layouts(row)), **options))


@pytest.mark.parametrize("density", [0.01, 0.3, 0.97])
def test_densities(row: Row, density: float) -> None:
    """Sums long enough to go round the ring of stages several times."""
    draw = random.Random(f"{row} {density}")
    pattern = random_pattern((1152, 1536), draw.choice(accepted_shapes(row)), density)
    tokens = within(row, draw.choice((5, 130, 257)))
    check(row, Problem(pattern, tokens, *draw.choice(accepted_layouts(row))))


@pytest.mark.parametrize("tokens", TOKENS)
def test_tokens_and_block_shapes(row: Row, tokens: int) -> None:
    draw = random.Random(f"{row} {tokens}")
    for block_shape in accepted_shapes(row):
        rows, cols = draw.choice([(1, 1), (1, 3), (3, 1), (3, 2)])
        pattern = random_pattern((rows * block_shape[0], cols * block_shape[1]), block_shape, 0.6)
        gap, options = draw.choice((0, CHUNK, 5 * CHUNK)), draw.choice(options_of(row))
        layouts = draw.choice(accepted_layouts(row))
        check(row, Problem(pattern, within(row, tokens), *layouts, gap=gap, **options))


@pytest.mark.parametrize("tokens", [1, 37, 64])
def test_layouts_and_strides(row: Row, tokens: int) -> None:
    draw = random.Random(f"{row} {tokens} strides")
    for gap, (x_layout, y_layout) in product((0, CHUNK, 11 * CHUNK), accepted_layouts(row)):
        pattern = make_pattern("random 50%", (4, 3), draw.choice(accepted_shapes(row)))
        check(row, Problem(pattern, tokens, x_layout, y_layout, gap=gap))


def test_options(row: Row) -> None:
    """Bias and activation, or accumulation, for tokens and patterns with and without anything to add."""
    draw = random.Random(f"{row} options")
    for options, tokens in product(options_of(row), (0, 45, 1100)):
        for name in ("empty rows and columns", "empty"):
            pattern = make_pattern(name, (3, 4), draw.choice(accepted_shapes(row)))
            layouts = draw.choice(accepted_layouts(row))
            check(row, Problem(pattern, within(row, tokens), *layouts, **options))


@of([row for row in ROWS if row.name in OF_PLAIN_RESULTS])
def test_other_results_are_refused(row: Row) -> None:
    pattern = make_pattern("full", (3, 4), accepted_shapes(row)[0])
    for options in OPTIONS[row.op]:
        if options not in options_of(row):
            with pytest.raises(AssertionError, match="without activation, residual or gate"):
                check(row, Problem(pattern, 45, **options))


def test_more_tiles_than_multiprocessors(row: Row) -> None:
    """CTAs that compute several tiles one after another, in several bands of tokens."""
    shape, density, tokens = ((2048, 2560), 0.97, 260) if row.op == SDD_TN else ((1280, 1280), 0.1, 4200)
    draw = random.Random(f"{row} tiles")
    for block_shape in {draw.choice(accepted_shapes(row)), accepted_shapes(row)[-1]}:
        pattern = random_pattern(shape, block_shape, density)
        check(row, Problem(pattern, within(row, tokens), *draw.choice(accepted_layouts(row))))


@of([row for row in ROWS if row.dtype == torch.float64])
def test_sums_of_integers_are_exact(row: Row) -> None:
    """float64 holds each product and each sum, in whatever order."""
    for block_shape in accepted_shapes(row)[::3]:
        pattern = make_pattern("power-law rows", (640 // block_shape[0], 768 // block_shape[1]), block_shape)
        for x_layout, y_layout in accepted_layouts(row):
            problem = Problem(pattern, within(row, 333), x_layout, y_layout)
            operands = Operands(row, problem)
            for buffer in operands.inputs:
                buffer.lines.mul_(1000).round_()
            operands.plain = operands.values
            operands.prepare_output()
            launch(row, problem, operands)
            part = operands.part(problem, 0)
            actual = {DDS_NT: part.y, DDS_NN: part.x, SDD_TN: part.values}[row.op]
            assert torch.equal(actual, reference(row, problem, part)[0])


@of(ROWS_THAT_EXPAND)
def test_expanded_values(row: Row) -> None:
    """A kernel is given dense blocks, in its workspace, of storages that it does not read."""
    draw = random.Random(f"{row} expanded")
    shapes = [shape for shape in accepted_shapes(row) if shape[1] % COMPRESSIBLE == 0]
    for storage in [STORAGES["2:4"]] if row.of_8_bits else STORAGES.values():
        given = row._replace(storage=storage)
        for name in ("random 50%", "empty rows and columns"):
            pattern = make_pattern(name, (3, 4), draw.choice(shapes))
            layouts, options = draw.choice(accepted_layouts(row)), draw.choice(options_of(row))
            check(given, Problem(pattern, within(row, draw.choice((17, 130))), *layouts, **options))


@of(ROWS_OF_DECODE_TOKENS)
def test_every_number_of_few_tokens(row: Row) -> None:
    draw = random.Random(f"{row} few tokens")
    for tokens in (*range(1, 66), 127, 128, 129, row.max_tokens - 1, row.max_tokens):
        pattern = make_pattern("power-law rows", (9, 12), draw.choice(accepted_shapes(row)))
        check(row, Problem(pattern, tokens, **draw.choice(options_of(row))))
    problem = Problem(pattern, row.max_tokens + 1)
    with pytest.raises(UnsupportedError, match="fewer tokens"):
        make_product(row, problem, Operands(row, problem))


@of(ROWS_OF_DECODE_TOKENS)
def test_many_rows_and_a_long_one(row: Row) -> None:
    """More rows than multiprocessors, and one of many more blocks than the others; columns of dds_nn."""
    draw = random.Random(f"{row} rows")
    forward = row.op == DDS_NT
    for block_shape in accepted_shapes(row):
        for tokens in (8, 16, 32, 64):
            pattern = random_pattern((5120, 640) if forward else (640, 5120), block_shape, 0.3)
            check(row, Problem(pattern, within(row, tokens - draw.randrange(8))))
        name, grid = ("one full row", (3, 600)) if forward else ("one full column", (600, 3))
        check(row, Problem(make_pattern(name, grid, block_shape), draw.randint(1, row.max_tokens)))


def test_refused_calls_write_nothing(row: Row) -> None:
    problem = Problem(make_pattern("full", (2, 3), accepted_shapes(row)[0]), within(row, 600))
    operands = Operands(row, problem)
    x, values = operands.buffers["x"], operands.buffers["values"]
    size = row.dtype.itemsize
    refused: list[tuple[str, dict[str, Any]]] = [
        ("x must be aligned", {"x": x.address + size}),
        ("x.data must not be null", {"x": 0}),
        ("x.ld", {"arguments": {"ldx": x.ld - CHUNK // size}}),
        ("x.ld", {"arguments": {"ldx": x.ld + 1}}),
        ("values.data must be aligned", {"values": values.address + row.result.itemsize}),
        ("overlap", {"y": x.address, "values": x.address}),
        *_bad_residuals(row, operands),
        *_bad_extras(operands),
        ("kernel must be 0 to", {"arguments": {"kernel": 1_000_000}}),
    ]
    if row.plan:
        plan = plan_of(row, problem)
        refused += [
            ("plan.data must not be null", {"plan": plan._replace(address=0)}),
            ("plan.bytes", {"plan": plan._replace(size=8)}),
            ("plan.key", {"plan": plan._replace(key=plan.key ^ 1)}),
        ]
    for message, changes in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            launch(row, problem, operands, **changes)
    assert operands.output.is_poison(inside=True)
    check(row, problem)


def _bad_residuals(row: Row, operands: Operands) -> list[tuple[str, dict[str, Any]]]:
    residual, size = operands.buffers["residual"], row.of_y.itemsize
    good = {"residual": residual.address}
    gated = {"arguments": {"gated": True}}
    if row.op != DDS_NT:
        return [("residual.data must be null", good), ("gate.data must be null", good | gated)]
    short = {"arguments": {"ldr": operands.y.shape[1] - CHUNK // size}}
    return [
        ("residual must be aligned", {"residual": residual.address + size}),
        ("residual.ld", good | short),
        ("residual.ld", good | {"arguments": {"ldr": residual.ld + 1}}),
        ("y and residual must not overlap", {"residual": operands.output.address}),
        ("gate must be aligned", gated | {"residual": residual.address + size}),
        ("gate.ld", good | {"arguments": {"ldr": residual.ld + 1, "gated": True}}),
        ("y and gate must not overlap", gated | {"residual": operands.output.address}),
    ]


def _bad_extras(operands: Operands) -> list[tuple[str, dict[str, Any]]]:
    """Bad addresses of metadata and scales."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, least in (("metadata", CHUNK), ("scales", 4), ("x_scales", CHUNK)):
        if name in operands.buffers:
            address, field = operands.buffers[name].address, name.replace("x_scales", "x.scales")
            found += [
                (f"{field} must not be null", {name: 0}),
                (f"{field} must be aligned", {name: address + least // 2}),
            ]
    return found


def test_a_short_workspace_is_refused(row: Row) -> None:
    """A workspace is needed for the sum over many tokens of few blocks, say; otherwise it may be null.

    A product that was never asked for its size takes it to be 0; one less by a byte is in tests/c.
    """
    problem = Problem(make_pattern("first block", (2, 3), accepted_shapes(row)[0]), within(row, 4097))
    operands = Operands(row, problem)
    product = make_product(row, problem, operands)
    product.use_plan(*plan_of(row, problem))
    needed = make_product(row, problem, operands).workspace_size()
    if needed == 0:
        run(product, problem, operands, 0)
        return
    workspace = Guarded(1, (needed + 3) // 4, torch.float32, alignment=256)
    with pytest.raises(InvalidArgumentError, match="workspace_bytes"):
        run(product, problem, operands, workspace.address)
    assert product.workspace_size() == needed
    with pytest.raises(InvalidArgumentError, match="workspace must not be null"):
        run(product, problem, operands, 0)
    assert operands.output.is_poison(inside=True)


@of([*ROWS_WITH_PLANS, *(row for row in GROUPED_ROWS if row.plan)])
def test_another_plan_in_memory_is_an_error_of_the_next_call(row: Row) -> None:
    """The kernel writes no results, in whatever shape it is launched, and the device goes on."""
    key = 11  # the word of a plan's header
    block_shape = accepted_shapes(row)[-1]
    for problem in (
        [of_groups(row, [30, 0, 90], block_shape, (3, 4))]
        if row.grouped
        else [
            Problem(make_pattern("random 50%", (3, 40), block_shape), within(row, 16)),
            Problem(make_pattern("random 50%", (40, 3), block_shape), within(row, 3000)),
        ]
    ):
        operands = Operands(row, problem)
        operands.prepare_output()
        entry = entry_of(row, DEVICE, problem.pattern, problem.groups)
        plan = entry._plans.get(row.op, row.number - 1, row.plan).view(torch.int32)
        plan[key] ^= 1
        launch(row, problem, operands)
        torch.cuda.synchronize(DEVICE)
        plan[key] ^= 1
        assert operands.output.is_poison(inside=True)
        with pytest.raises(PatternChangedError, match=f"kernel {row.name} found another one"):
            launch(row, problem, operands)
        assert operands.output.is_poison(inside=True)
        check(row, problem)


def test_every_kernel_of_this_gpu_runs() -> None:
    """In one process, so that nothing above passes by not running."""
    rows = [row for row in ROWS if runs_here(row) and not row.of_any_block]  # these are tested in test_blocks
    assert rows, "the library has no CUDA kernel that this GPU runs"
    for row in rows:
        check(row, Problem(make_pattern("random 50%", (2, 3), accepted_shapes(row)[0]), within(row, 8)))


# ---- groups ----

# Tokens of each group. The last ones of a group do not fill a tile, and groups begin anywhere.
COUNTS = {
    "uneven": [0, 17, 1, 0, 300, 33, 129, 0],
    "all to one": [0, 0, 517, 0],
    "one group": [130],
    "two tiles each": [256, 256, 256],
    "many groups": [i % 4 for i in range(512)],
    "no tokens": [0, 0, 0],
}
BROKEN = {
    "beyond": [0, 10, 10**9, 2**31 - 1],
    "negative": [-(2**31), -5, 40, 100],
    "descending": [100, 60, 30, 0],
    "everything twice": [0, 100, 0, 100],
}


def of_groups(
    row: Row, counts: list[int], block_shape: tuple[int, int], grid: tuple[int, int], **options: Any
) -> Problem:
    """Weights of different densities, from 0 to 1; fewer tokens for kernels that take no more."""
    if row.max_tokens:
        counts = [count * row.max_tokens // max(sum(counts), row.max_tokens) for count in counts]
    density = torch.linspace(0, 1, len(counts)).roll(1).repeat_interleave(grid[0])
    mask = torch.rand(len(counts) * grid[0], grid[1], generator=seeded(3)) < density[:, None]
    pattern = shuffled(BlockPattern.from_block_mask(mask, block_shape=block_shape))
    return Problem(pattern, sum(counts), gap=CHUNK, counts=tuple(counts), **options)


@of(GROUPED_ROWS)
@pytest.mark.parametrize("name", COUNTS)
def test_each_group_meets_its_weight(row: Row, name: str) -> None:
    draw = random.Random(f"{row} {name}")
    shapes = accepted_shapes(row)
    many = len(COUNTS[name]) > 8
    for block_shape in draw.sample(shapes, min(1 if many else 3, len(shapes))):
        grid = (2, 3) if many else (5, 7)
        check(row, of_groups(row, COUNTS[name], block_shape, grid, **draw.choice(PLAIN_OPTIONS[row.op])))


@of([row for row in GROUPED_ROWS if row.dtype == torch.float8_e4m3fn])
def test_fast_sums_of_groups(row: Row) -> None:
    fast = row._replace(precision=FAST)
    for block_shape in accepted_shapes(row)[-2:]:
        grid = 384 // block_shape[0], 512 // block_shape[1]
        for options in PLAIN_OPTIONS[row.op]:
            check(fast, of_groups(row, [37, 0, 300, 90], block_shape, grid, **options))


@of(GROUPED_ROWS)
def test_nothing_of_other_groups_enters_a_sum(row: Row) -> None:
    """A NaN in one group's tokens spoils results of this group alone, and none through 0 * NaN."""
    problem = of_groups(row, [37, 61, 90], accepted_shapes(row)[-1], (3, 4))
    operands = Operands(row, problem)
    own = slice(*problem.offsets[1:3])
    for name in "xy":
        if name != OUTPUTS[row.op] and row.dtype != torch.int8:
            operands.buffers[name].lines[own] = torch.nan
    if row.of_8_bits:
        operands.x_scales[own] = torch.nan
    operands.prepare_output()
    launch(row, problem, operands)
    check_groups(row, problem, operands, (0, 2))


@of([row for row in GROUPED_ROWS if row.op == SDD_TN])
def test_groups_without_tokens_have_no_gradient(row: Row) -> None:
    """Their values become 0, or stay what they were if they are added to."""
    for adds in (False, True):
        check(row, of_groups(row, [0, 50, 0], accepted_shapes(row)[0], (3, 4), accumulate=adds))


@of(GROUPED_ROWS)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_offsets_write_nothing_outside(row: Row, name: str) -> None:
    problem = of_groups(row, [30, 30, 40], accepted_shapes(row)[0], (3, 4))
    operands = Operands(row, problem)
    operands.buffers["group_offsets"].lines.copy_(torch.tensor([BROKEN[name]]))
    operands.prepare_output()
    launch(row, problem, operands)
    torch.cuda.synchronize(DEVICE)


@of(GROUPED_ROWS)
def test_routing_changes_between_replays(row: Row) -> None:
    """A graph follows the offsets, which the host does not read."""
    first = of_groups(row, [40, 0, 60, 20], accepted_shapes(row)[0], (3, 4))
    operands = Operands(row, first)
    operands.prepare_output()
    product = make_product(row, first, operands)
    product.use_plan(*plan_of(row, first))
    workspace = workspace_of(row, product)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(product, first, operands, workspace.address)
    for counts in ((40, 0, 60, 20), (0, 0, 120, 0), (1, 2, 3, 114)):
        problem = replace(first, counts=counts)
        operands.buffers["group_offsets"].lines.copy_(torch.tensor([problem.offsets]))
        operands.prepare_output()
        graph.replay()
        check_groups(row, problem, operands, range(problem.groups))
