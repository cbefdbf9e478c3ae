"""Grouped products: tokens sorted by expert, each with a weight of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    DEVICE_DTYPES,
    DEVICES,
    FUNCTIONS,
    STORAGES,
    assert_product_close,
    assert_within,
    blocks_of_dense,
    dense_weight,
    product_with_bound,
    randn,
    random_mask,
    random_values,
    reference_of_bias,
    rounded,
    rounding_unit,
    seeded,
    shuffled,
    stored_values,
    sums_unit,
    use_kernel,
)
from torch import Tensor

from tilesparse import _C, BlockPattern, functional, storage
from tilesparse._checks import QUANTIZED
from tilesparse._runtime.device import DDS_NN, DDS_NT, SDD_TN
from tilesparse._runtime.launch import known_kernels
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.errors import InvalidArgumentError, PatternChangedError, UnsupportedError

OPS = torch.ops.tilesparse
DENSITIES = [0.0, 0.1, 0.5, 1.0]  # of one expert after another
COUNTS = {
    "uneven": [3, 0, 17, 1, 0, 130],
    "all to one": [0, 0, 0, 75, 0, 0],
    "few": [1, 2, 0, 1, 1, 3],
    "many": [200, 301, 97, 64, 1, 128],
    "none": [0] * 6,
    "one expert": [41],
    "two, the first without tokens": [0, 9],
    "512": [(7 * i) % 5 for i in range(512)],
}


def pattern_of(
    experts: int, grid: tuple[int, int] = (3, 4), block_shape: tuple[int, int] = (16, 32), seed: int = 0
) -> BlockPattern:
    """The blocks of all experts in random slots; experts differ in density, and some have no block."""
    scores = torch.rand(experts, *grid, generator=seeded(seed))
    densities = torch.tensor(DENSITIES).repeat(experts // 4 + 1)[1 : experts + 1]
    mask = scores < densities[:, None, None]
    return shuffled(BlockPattern.from_block_mask(mask.flatten(0, 1), block_shape=block_shape))


def grouped_linear(
    x: Tensor, values: Tensor, pattern: BlockPattern, offsets: Any, *args: Any, **options: Any
) -> Tensor:
    return functional.linear(x, values, pattern, *args, offsets=offsets, **options)


def offsets_of(counts: list[int], device: str = "cpu") -> Tensor:
    ends = list(itertools.accumulate(counts, initial=0))
    return torch.tensor(ends, dtype=torch.int32, device=device)


def features_of(pattern: BlockPattern, counts: list[int]) -> int:
    return pattern.out_features // len(counts)


def weights_of(values: Tensor, pattern: BlockPattern, counts: list[int]) -> Tensor:
    """[experts, out_features, in_features] in float64."""
    return dense_weight(values, pattern).view(len(counts), -1, pattern.in_features)


def assert_forward(
    y: Tensor, x: Tensor, values: Tensor, pattern: BlockPattern, counts: list[int], bias: Tensor | None = None
) -> None:
    weights = weights_of(values, pattern, counts)
    rows = None if bias is None else bias.detach().cpu().view(len(counts), 1, -1)

    def product(tokens: Tensor, expert: int) -> tuple[Tensor, Tensor]:
        return product_with_bound(
            tokens, weights[expert].t(), y.dtype, None if rows is None else rows[expert]
        )

    found = [product(tokens, expert) for expert, tokens in enumerate(x.detach().split(counts))]
    assert_within(y, torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found]))


def assert_gradients(
    grads: dict[str, Tensor], dy: Tensor, x: Tensor, values: Tensor, pattern: BlockPattern, counts: list[int]
) -> None:
    """Gradients of x, values and bias [experts * out_features]."""
    weights, dtype = weights_of(values, pattern, counts), x.dtype
    dys, xs = dy.cpu().split(counts), x.detach().cpu().split(counts)
    of_x = [product_with_bound(dys[e], weights[e], dtype) for e in range(len(counts))]
    assert_within(grads["x"], torch.cat([one[0] for one in of_x]), torch.cat([one[1] for one in of_x]))
    of_w = [product_with_bound(dys[e].t(), xs[e], dtype) for e in range(len(counts))]
    blocks = [blocks_of_dense(torch.cat([one[i] for one in of_w]), pattern) for i in range(2)]
    assert_within(grads["values"], blocks[0], blocks[1])
    of_bias = [reference_of_bias(dtype, dys[e], None, dtype) for e in range(len(counts))]
    assert_within(grads["bias"], torch.cat([one[0] for one in of_bias]), torch.cat([o[1] for o in of_bias]))


class Case:
    """Operands of a product that require gradients, and the gradient of its result."""

    def __init__(
        self,
        counts: list[int],
        dtype: torch.dtype,
        device: str,
        block_shape: tuple[int, int] = (16, 32),
        grid: tuple[int, int] = (3, 4),
    ) -> None:
        self.counts, self.tokens = counts, sum(counts)
        self.pattern = pattern_of(len(counts), grid, block_shape)
        self.out = features_of(self.pattern, counts)
        self.x = self.randn(self.tokens, self.pattern.in_features, dtype, device, 1)
        self.values = random_values(self.pattern, dtype=dtype, device=device).requires_grad_()
        self.bias = self.randn(len(counts), self.out, dtype, device, 3)
        self.dy = self.randn(self.tokens, self.out, dtype, device, 4).detach()
        self.offsets = offsets_of(counts, device)

    @staticmethod
    def randn(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
        return randn(rows, columns, dtype=dtype, device=device, seed=seed).requires_grad_()

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The result and the gradients of x, values and bias."""
        y = grouped_linear(self.x, self.values, self.pattern, self.offsets, self.bias)
        grads = torch.autograd.grad(y, (self.x, self.values, self.bias), self.dy)
        return y.detach(), {"x": grads[0], "values": grads[1], "bias": grads[2].flatten()}


# ---- what is computed ----


@pytest.mark.parametrize("routing", COUNTS)
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_products_match_float64_expert_by_expert(device: str, dtype: torch.dtype, routing: str) -> None:
    counts = COUNTS[routing]
    case = Case(counts, dtype, device, *(((16, 16), (1, 2)) if len(counts) > 100 else ()))
    y, grads = case.run()
    assert_forward(y, case.x, case.values, case.pattern, counts, case.bias)
    assert_gradients(grads, case.dy, case.x, case.values, case.pattern, counts)
    again, grads_again = case.run()
    assert torch.equal(y, again) and all(torch.equal(grads[name], grads_again[name]) for name in grads)


@pytest.mark.parametrize("block_shape", [(16, 16), (32, 16), (64, 64), (128, 128), (16, 128), (128, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_every_block_shape(device: str, dtype: torch.dtype, block_shape: tuple[int, int]) -> None:
    counts = [5, 0, 64, 133]
    case = Case(counts, dtype, device, block_shape, (2, 3))
    y, grads = case.run()
    assert_forward(y, case.x, case.values, case.pattern, counts, case.bias)
    assert_gradients(grads, case.dy, case.x, case.values, case.pattern, counts)


def cpu_kernels() -> list[str]:
    return [kernel.name for kernel in known_kernels() if kernel.device == 0]


@pytest.mark.parametrize("kernel", cpu_kernels())
def test_every_cpu_kernel(kernel: str) -> None:
    """Kernels that this machine has the instructions for match float64."""
    ran = 0
    for dtype, routing in itertools.product((torch.float32, torch.bfloat16), ("few", "uneven", "many")):
        case = Case(COUNTS[routing], dtype, "cpu")
        try:
            with use_kernel(kernel):
                y, grads = case.run()
        except UnsupportedError as error:
            assert kernel in str(error)
            continue
        ran += 1
        assert_forward(y, case.x, case.values, case.pattern, case.counts, case.bias)
        assert_gradients(grads, case.dy, case.x, case.values, case.pattern, case.counts)
    assert ran or kernel != "cpu_portable"


@pytest.mark.parametrize("routing", ["uneven", "few", "many", "all to one"])
@pytest.mark.parametrize(("device", "dtype"), [p for p in DEVICE_DTYPES if p.values[0] == "cpu"])
def test_each_expert_has_the_bits_of_its_product_alone(device: str, dtype: torch.dtype, routing: str) -> None:
    counts = COUNTS[routing]
    case = Case(counts, dtype, device)
    y, grads = case.run()
    rows = case.out // case.pattern.block_shape[0]
    crow, col, slot = case.pattern.crow_indices, case.pattern.col_indices, case.pattern.slot
    for expert, (first, last) in enumerate(itertools.pairwise(case.offsets.tolist())):
        begin, end = int(crow[expert * rows]), int(crow[(expert + 1) * rows])
        slots = slot[begin:end].long()
        alone = BlockPattern(
            crow[expert * rows : (expert + 1) * rows + 1] - begin,
            col[begin:end],
            shape=(case.out, case.pattern.in_features),
            block_shape=case.pattern.block_shape,
        )
        x = case.x.detach()[first:last].clone().requires_grad_()
        values = case.values.detach()[slots].contiguous().requires_grad_()
        own = functional.linear(x, values, alone, case.bias[expert].detach())
        assert torch.equal(y[first:last], own)
        of_x, of_values = torch.autograd.grad(own, (x, values), case.dy[first:last])
        assert torch.equal(grads["x"][first:last], of_x)
        assert torch.equal(grads["values"][slots], of_values)


@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_tokens_of_one_expert_reach_no_other(device: str, dtype: torch.dtype) -> None:
    """Not even as NaN times a zero."""
    counts = [3, 40, 0, 17, 70, 1]
    case = Case(counts, dtype, device)
    y, grads = case.run()
    blocks = case.pattern.block_indices()[0] // (case.out // case.pattern.block_shape[0])
    for expert in (1, 4):
        first, last = case.offsets[expert : expert + 2].tolist()
        spoilt = Case(counts, dtype, device)
        with torch.no_grad():
            spoilt.x[first:last] = math.nan
            spoilt.dy[first:last] = math.inf
        other_y, other = spoilt.run()
        own = torch.zeros(case.tokens, dtype=torch.bool, device=device)
        own[first:last] = True
        assert torch.equal(y[~own], other_y[~own])
        assert torch.equal(grads["x"][~own], other["x"][~own])
        kept = blocks != expert
        assert torch.equal(grads["values"][kept], other["values"][kept])
        of_bias = torch.arange(len(counts), device=device).repeat_interleave(case.out) != expert
        assert torch.equal(grads["bias"][of_bias], other["bias"][of_bias])
        assert not other["bias"][~of_bias].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_experts_without_tokens_are_zero_in_poisoned_memory(device: str) -> None:
    counts = [0, 5, 0, 0]
    case = Case(counts, torch.float32, device)
    rows = case.out // case.pattern.block_shape[0]
    of_expert = case.pattern.block_indices()[0] // rows
    before = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True  # new memory holds NaN
    torch.use_deterministic_algorithms(True)
    try:
        y, grads = case.run()
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before[0]
        torch.use_deterministic_algorithms(before[1])
    assert_forward(y, case.x, case.values, case.pattern, counts, case.bias)
    assert not grads["values"][of_expert != 1].any()
    assert not grads["bias"].view(4, -1)[[0, 2, 3]].any()
    assert_gradients(grads, case.dy, case.x, case.values, case.pattern, counts)


@pytest.mark.parametrize("device", DEVICES)
def test_operands_with_gaps_between_their_rows(device: str) -> None:
    """And what lies in the gaps, beside x, residual and gradient, is not read."""
    counts = [7, 0, 20, 5]
    case = Case(counts, torch.float32, device)

    def spread(matrix: Tensor) -> Tensor:
        wide = torch.full((matrix.shape[0] + 2, matrix.shape[1] + 32), math.nan, device=device)
        inner = wide[1:-1, 16:-16]
        return inner.copy_(matrix.detach())

    x, residual = spread(case.x).requires_grad_(), spread(torch.ones_like(case.dy))
    y = grouped_linear(x, case.values, case.pattern, case.offsets, case.bias, residual=residual)
    grads = torch.autograd.grad(y, (x, case.values, case.bias), spread(case.dy))
    expected, wanted = case.run()
    torch.testing.assert_close(y, expected + 1)
    torch.testing.assert_close(grads[0], wanted["x"])
    torch.testing.assert_close(grads[1], wanted["values"])
    torch.testing.assert_close(grads[2].flatten(), wanted["bias"])
    columns = case.x.detach().t().contiguous().t()  # column-major: copied
    y = grouped_linear(columns, case.values, case.pattern, case.offsets, case.bias)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("other", ["nothing", "residual", "gate"])
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("routing", ["few", "uneven"])
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_epilogues(device: str, dtype: torch.dtype, routing: str, activation: str, other: str) -> None:
    counts = COUNTS[routing]
    case = Case(counts, dtype, device)
    added = randn(case.tokens, case.out, dtype=dtype, device=device, seed=9)
    options: dict[str, Any] = {} if other == "nothing" else {other: added}
    exact = torch.cat(
        [
            tokens.double() @ weight.t() + bias
            for tokens, weight, bias in zip(
                case.x.detach().cpu().split(counts),
                weights_of(case.values, case.pattern, counts),
                case.bias.detach().cpu().double(),
                strict=True,
            )
        ]
    )
    function, host = FUNCTIONS[activation], added.cpu().double()
    expected = exact * function(host) if other == "gate" else function(exact)
    expected = expected + host if other == "residual" else expected
    arguments = case.x, case.values, case.pattern, case.offsets, case.bias, activation
    recorded = grouped_linear(*arguments, **options)
    with torch.no_grad():
        fused = grouped_linear(*arguments, **options)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for y in (recorded, fused):
        torch.testing.assert_close(y.detach().cpu().double(), expected, atol=tolerance, rtol=tolerance)
    assert recorded.requires_grad and not fused.requires_grad


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("routing", ["few", "uneven"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_storages(device: str, dtype: torch.dtype, routing: str, storage: str) -> None:
    counts = COUNTS[routing]
    case = Case(counts, dtype, device, (32, 32))
    stored = stored_values(case.pattern, STORAGES[storage], dtype=dtype, device=device)
    y = grouped_linear(case.x, stored.values, case.pattern, case.offsets, **stored.extras)
    assert_forward(y, case.x, stored.plain, case.pattern, counts)
    (of_x,) = torch.autograd.grad(y, case.x, case.dy)
    weights = weights_of(stored.plain, case.pattern, counts)
    for grad, dy, weight in zip(of_x.split(counts), case.dy.split(counts), weights, strict=True):
        assert_product_close(grad, dy, weight)


# ---- 8 bits of both factors ----

EIGHT = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def in_8_bits(case: Case, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Values and scales of features, and the weights [experts, out, in] in float64 that they stand for."""
    values, scales = storage.quantize_weights(
        case.values.detach(), EIGHT[name], granularity="feature", pattern=case.pattern
    )
    whole = dense_weight(values.cpu().double(), case.pattern) * scales.cpu().double()[:, None]
    weights = whole.view(len(case.counts), -1, case.pattern.in_features)
    return {"values": values, "scales": scales}, weights


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("routing", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("device", DEVICES)
def test_8_bits_match_float64_expert_by_expert(
    device: str, name: str, dtype: torch.dtype, routing: str, fast: bool
) -> None:
    counts = COUNTS[routing]
    case = Case(counts, dtype, device, *(((16, 16), (1, 2)) if len(counts) > 100 else ((32, 32), (3, 4))))
    stored, weights = in_8_bits(case, name)
    options: dict[str, Any] = {"offsets": case.offsets, "use_fast_accum": fast}
    arguments = stored["values"], case.pattern, stored["scales"], case.bias
    y = functional.quantized_linear(case.x, *arguments, **options)
    x, of_x = (each.cpu().double() for each in functional.quantize_activations(case.x, EIGHT[name]))
    x = x * of_x[:, None]
    if device == "cuda" and case.tokens <= 64:
        x = case.x.detach().cpu().double()  # which is multiplied as it is
    exact, sizes = (
        torch.cat([tokens @ weight.t() for tokens, weight in zip(left.split(counts), right, strict=True)])
        for left, right in ((x, weights), (x.abs(), weights.abs()))
    )
    bias = case.bias.detach().cpu().double().repeat_interleave(torch.tensor(counts), 0)
    unit = 2**-12 / 32 if device == "cuda" and name == "float8" else sums_unit(torch.float32)
    bound = (case.pattern.in_features + 12) * unit * (sizes + bias.abs())
    if device == "cuda" and case.tokens <= 64:  # by weights that are rounded to the dtype of x
        bound = bound + 2 * rounding_unit(dtype) * sizes
    assert_within(y, exact + bias, rounded(exact + bias, bound, dtype))
    assert torch.equal(y, functional.quantized_linear(case.x, *arguments, **options))
    (of_x,) = torch.autograd.grad(y, case.x, case.dy)
    for grad, dy, weight in zip(of_x.split(counts), case.dy.split(counts), weights, strict=True):
        expected, tolerance = product_with_bound(dy, weight, dtype)
        tolerance = tolerance + 2 * rounding_unit(dtype) * (dy.cpu().double().abs() @ weight.abs())
        assert_within(grad, expected, tolerance)


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("device", DEVICES)
def test_each_expert_has_the_bits_of_its_8_bit_product_alone(device: str, name: str) -> None:
    """In int8 on every device, whose sums are exact; in float8 where one kernel adds them."""
    counts = [90, 0, 1, 170, 75]
    case = Case(counts, torch.bfloat16, device, (32, 32))
    stored, _ = in_8_bits(case, name)
    scales, rows = stored["scales"].view(len(counts), -1), case.out // 32
    arguments = stored["values"], case.pattern, stored["scales"], case.bias, "silu"
    with torch.no_grad():
        y = functional.quantized_linear(case.x, *arguments, offsets=case.offsets)
    crow, col, slot = case.pattern.crow_indices, case.pattern.col_indices, case.pattern.slot
    for expert, (first, last) in enumerate(itertools.pairwise(case.offsets.tolist())):
        if last - first < 65 or (name == "float8" and device == "cuda"):
            continue
        begin, end = int(crow[expert * rows]), int(crow[(expert + 1) * rows])
        alone = BlockPattern(
            crow[expert * rows : (expert + 1) * rows + 1] - begin,
            col[begin:end],
            shape=(case.out, case.pattern.in_features),
            block_shape=(32, 32),
        )
        values = stored["values"][slot[begin:end].long().to(device)].contiguous()
        with torch.no_grad():
            own = functional.quantized_linear(
                case.x[first:last], values, alone, scales[expert].contiguous(), case.bias[expert], "silu"
            )
        assert torch.equal(y[first:last], own)


@pytest.mark.parametrize("other", ["residual", "gate"])
@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("device", DEVICES)
def test_8_bits_have_the_epilogue_of_others(device: str, name: str, other: str) -> None:
    """Also of 2:4, and a token that is not finite spoils its own result alone."""
    case = Case([90, 0, 1, 170, 75], torch.float32, device, (32, 32))
    added = randn(case.tokens, case.out, dtype=torch.float32, device=device, seed=9)
    mask = random_mask(torch.Size(case.values.shape)).to(device)
    for compressed in (False, True):
        case.values.data *= mask if compressed else 1
        stored, _ = in_8_bits(case, name)
        values, metadata = stored["values"], None
        if compressed:
            values, metadata = storage.compress(values, mask)
        arguments: Any = values, case.pattern, stored["scales"], case.bias
        options: dict[str, Any] = {"offsets": case.offsets, "metadata": metadata}
        x = case.x.detach()
        plain = functional.quantized_linear(x, *arguments, **options)
        others: dict[str, Any] = {other: added, "activation": "gelu"}
        fused = functional.quantized_linear(x, *arguments, **options, **others)
        gelu = torch.nn.functional.gelu
        expected = plain * gelu(added) if other == "gate" else gelu(plain) + added
        torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-5)
        x = x.index_fill(0, torch.tensor([3, 100], device=device), torch.inf)
        spoilt = functional.quantized_linear(x, *arguments, **options)
        finite = spoilt.isfinite().all(1)
        assert not spoilt[[3, 100]].isfinite().any() and int(finite.sum()) == case.tokens - 2
        assert torch.equal(spoilt[finite], plain[finite])


def test_what_grouped_products_in_8_bits_must_be() -> None:
    case = Case([3, 0, 9], torch.float32, "cpu", (128, 128), (1, 1))
    stored, _ = in_8_bits(case, "float8")
    given: dict[str, Any] = {"x": case.x, "pattern": case.pattern, "offsets": case.offsets, **stored}
    of_blocks = torch.ones(case.pattern.nnz, 1)
    for changed, message in (
        ({"scales": of_blocks}, "offsets must be None with scales of blocks"),
        ({"scales": stored["scales"][:128]}, r"scales must be a contiguous tensor \[out_features\]"),
        ({"policy": "dense"}, "policy must be left out"),
        ({"column_major_output": True}, "column_major_output must be left out"),
        ({"offsets": case.offsets.long()}, "offsets must be a contiguous tensor"),
        ({"bias": torch.zeros(3, 64)}, r"bias must have shape \(3, 128\)"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            functional.quantized_linear(**{**given, **changed})
    columns = prepared(case.pattern.index_on(torch.device("cpu"))).grouped(3).descriptor
    inside: dict[str, Any] = {"granularity": 1, "result_dtype": 2, "x_scales_ld": 16, "grouped": True}
    with pytest.raises(InvalidArgumentError, match=r"x\.granularity must be 4 for a grouped product"):
        _C.Product(columns, DDS_NT, QUANTIZED[torch.float8_e4m3fn], 0, 12, **inside).resolve()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN, SDD_TN])
def test_one_workspace_serves_all_offsets(op: int, dtype: torch.dtype) -> None:
    """Its size is asked for before anybody knows them; nothing is written behind it."""
    experts, guard, draw = 5, 1 << 16, seeded(4)
    pattern = pattern_of(experts, (4, 6), (32, 32))
    out, ins = pattern.out_features // experts, pattern.in_features
    columns = prepared(pattern.index_on(torch.device("cpu"))).grouped(experts)
    values = random_values(pattern, dtype=dtype)
    for tokens in (1, 7, 33, 300, 1500):
        x, y = torch.zeros(tokens, ins, dtype=dtype), torch.zeros(tokens, out, dtype=dtype)
        numbers = {torch.float32: 2, torch.bfloat16: 4}
        product = _C.Product(
            columns.descriptor, op, numbers[dtype], 0, tokens, ldx=ins, ldy=out, grouped=True
        )
        product.resolve()
        size = product.workspace_size()
        memory = torch.full((size + guard + 64,), 0x5A, dtype=torch.uint8)
        first = -memory.data_ptr() % 64
        for routing in range(6):
            inner = torch.randint(0, tokens + 1, (experts - 1,), generator=draw).sort()[0].tolist()
            ends = [0, *(inner if routing else [0] * (experts - 1)), tokens]
            offsets = torch.tensor(ends, dtype=torch.int32)
            addresses = [tensor.data_ptr() for tensor in (x, y, values)]
            workspace = memory.data_ptr() + first
            product.run(*addresses, 0, 0, workspace, 0, group_offsets=offsets.data_ptr())
            assert bool((memory[first + size :] == 0x5A).all()) and bool((memory[:first] == 0x5A).all())


# ---- gradients of every order ----


def test_gradcheck() -> None:
    counts = [2, 0, 3]
    case = Case(counts, torch.float64, "cpu", (16, 16), (1, 2))
    residual, gate = (randn(5, case.out, dtype=torch.float64, seed=s).requires_grad_() for s in (6, 7))

    def product(*tensors: Tensor, **options: Any) -> Tensor:
        x, values, bias = tensors[:3]
        return grouped_linear(x, values, case.pattern, case.offsets, bias, **options)

    for name, other in (("residual", residual), ("gate", gate)):
        for activation in ("none", "silu"):

            def function(*tensors: Tensor, name: str = name, activation: str = activation) -> Tensor:
                return product(*tensors, activation=activation, **{name: tensors[3]})

            inputs = case.x, case.values, case.bias, other
            assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
            assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


# ---- patterns that change ----


@pytest.mark.parametrize("device", DEVICES)
def test_products_follow_updates_of_the_pattern(device: str) -> None:
    counts = [5, 0, 33, 4]
    case = Case(counts, torch.float32, device)
    other = pattern_of(4, seed=1)
    case.pattern = BlockPattern.random(
        other.shape, block_shape=other.block_shape, nnz=other.nnz, device=device, generator=seeded(2)
    )
    case.values = random_values(other, dtype=torch.float32, device=device).requires_grad_()
    for new in (None, other):
        if new is not None:
            case.pattern.update_(new.to(device))
        y, grads = case.run()
        assert_forward(y, case.x, case.values, case.pattern, counts, case.bias)
        assert_gradients(grads, case.dy, case.x, case.values, case.pattern, counts)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_pass_refuses_a_pattern_that_has_changed(device: str) -> None:
    case = Case([5, 0, 33, 4], torch.float32, device)
    case.pattern = case.pattern.to(device)
    y = grouped_linear(case.x, case.values, case.pattern, case.offsets)
    changed = BlockPattern.random(
        case.pattern.shape, block_shape=(16, 32), nnz=case.pattern.nnz, device=device, generator=seeded(5)
    )
    case.pattern.update_(changed)
    with pytest.raises(PatternChangedError):
        y.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_one_pattern_serves_several_numbers_of_experts(device: str) -> None:
    pattern = pattern_of(4).to(device)
    values = random_values(pattern, dtype=torch.float32, device=device)
    for counts in ([11], [5, 6], [1, 2, 3, 5]):
        x = randn(11, pattern.in_features, dtype=torch.float32, device=device)
        y = grouped_linear(x, values, pattern, offsets_of(counts, device))
        assert_forward(y, x, values, pattern, counts)
    assert_product_close(functional.linear(x, values, pattern), x, dense_weight(values, pattern).t())


# ---- operators ----


def check(op: Any, *arguments: Any, **options: Any) -> None:
    assert set(torch.library.opcheck(op.default, arguments, options).values()) == {"SUCCESS"}


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    case = Case([3, 0, 9], torch.float32, device)
    index, offsets = case.pattern.index_on(case.x.device), case.offsets
    bias = case.bias.detach().flatten().requires_grad_()
    check(OPS.dds_nt, case.x, case.values, *index, bias, case.dy, offsets=offsets)
    plain = case.x.detach(), case.values.detach()
    check(OPS.dds_nt, *plain, *index, activation=1, gate=case.dy, offsets=offsets)
    check(OPS.dds_nn, case.dy.requires_grad_(), case.values, *index, offsets=offsets)
    check(OPS.sdd_tn, case.dy, case.x, *index, offsets)
    check(OPS.group_sums, case.dy, offsets)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_follows_offsets_and_numbers_of_tokens(device: str) -> None:
    case = Case([3, 0, 9], torch.float32, device)
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(x: Tensor, values: Tensor, offsets: Tensor, bias: Tensor) -> Tensor:
        return grouped_linear(x, values, case.pattern, offsets, bias, "silu")

    for counts in ([3, 0, 9], [0, 30, 1], [5, 4, 3]):
        x = randn(sum(counts), case.pattern.in_features, dtype=torch.float32, device=device).requires_grad_()
        offsets = offsets_of(counts, device)
        y = compiled(x, case.values, offsets, case.bias)
        expected = grouped_linear(x, case.values, case.pattern, offsets, case.bias, "silu")
        torch.testing.assert_close(y, expected)
        inputs = x, case.values, case.bias
        grads = torch.autograd.grad(y.square().sum(), inputs)
        for one, other in zip(grads, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


# ---- what is refused ----

# The changed operand, its new value, and the beginning of the message.
BAD: dict[str, tuple[str, Callable[[Case], Any], str]] = {
    "int64": ("offsets", lambda c: c.offsets.long(), "offsets"),
    "two dimensions": ("offsets", lambda c: c.offsets[None], "offsets"),
    "gaps": ("offsets", lambda c: c.offsets.repeat_interleave(2)[::2], "offsets"),
    "one offset": ("offsets", lambda c: c.offsets[:1], "offsets must have 2 to 1025"),
    "experts that do not divide the rows": ("offsets", lambda c: offsets_of([12, 0, 0, 0, 0]), "pattern"),
    "a list": ("offsets", lambda c: [0, 12], "offsets"),
    "not from 0": (
        "offsets",
        lambda c: c.offsets + c.offsets.new_tensor([1, 0, 0, 0]),
        r"group_offsets\[0\]",
    ),
    "descending": ("offsets", lambda c: c.offsets.new_tensor([0, 9, 3, 12]), "group_offsets must ascend"),
    "an early end": (
        "offsets",
        lambda c: offsets_of([3, 0, 8]),
        r"group_offsets\[3\] must be tokens, 12, got 11",
    ),
    "x of three dimensions": ("x", lambda c: c.x.detach()[None], r"x must be \[tokens, features\]"),
    "x of other features": ("x", lambda c: c.x[:, :64], "x must have last dimension"),
    "x in 8 bits": ("x", lambda c: c.x.detach().to(torch.int8), "x must have dtype"),
    "bias of one expert": ("bias", lambda c: c.bias[0], "bias"),
    "bias transposed": ("bias", lambda c: c.bias.t(), r"bias must have shape \(3,"),
    "residual of all": ("residual", lambda c: torch.zeros(12, c.pattern.out_features), "residual"),
    "residual and gate": ("gate", lambda c: c.dy, "gate must be None"),
    "an unknown activation": ("activation", lambda c: "tanh", "activation"),
    "values of another pattern": ("values", lambda c: c.values.detach()[1:], "values"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments(what: str) -> None:
    name, change, message = BAD[what]
    case = Case([3, 0, 9], torch.float32, "cpu")
    given = {"x": case.x, "values": case.values, "pattern": case.pattern, "offsets": case.offsets}
    given["residual"] = case.dy if what == "residual and gate" else None
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        grouped_linear(**{**given, name: change(case)})


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("name", EIGHT)
def test_graphs_in_8_bits_follow_their_offsets(name: str) -> None:
    counts = [1000, 0, 500, 548]
    case = Case(counts, torch.bfloat16, "cuda", (64, 64), (4, 4))
    case.pattern = case.pattern.to("cuda")
    stored, _ = in_8_bits(case, name)
    x = case.x.detach()

    def run() -> Tensor:
        return functional.quantized_linear(
            x, stored["values"], case.pattern, stored["scales"], offsets=case.offsets
        )

    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = run()
    for routing in (counts, counts[::-1], [sum(counts), 0, 0, 0], [0, 0, 1, sum(counts) - 1]):
        case.offsets.copy_(offsets_of(routing))
        graph.replay()
        assert torch.equal(y, run())


@pytest.mark.gpu
@pytest.mark.alone
def test_the_host_does_not_wait() -> None:
    case = Case([1000, 0, 500, 548], torch.bfloat16, "cuda", (64, 64), (4, 4))
    case.pattern = case.pattern.to("cuda")
    expected, _ = case.run()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)  # cycles
        asleep = torch.cuda.Event()
        asleep.record()
        y, _ = case.run()
        assert not asleep.query(), "the host waited for the GPU"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_large_experts_keep_at_one_pace() -> None:
    """Sums over so many k that clusters wait for one another, on a GPU of 9.0; they repeat bit by bit."""
    counts, out, ins = [6000, 0, 1, 4000, 2500, 3883], 8704, 4096
    size = len(counts) * out, ins
    pattern = BlockPattern.random(size, block_shape=128, density=0.05, parts=(len(counts), 1))
    pattern = pattern.to("cuda")
    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    values, dy = draw(pattern.nnz, 128, 128), draw(sum(counts), out)
    x = draw(sum(counts), ins).requires_grad_()
    y = grouped_linear(x, values, pattern, offsets_of(counts, "cuda"))
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    blocks = torch.zeros(*pattern.grid, 128, 128, dtype=torch.bfloat16, device="cuda")
    blocks[pattern.block_indices()] = values
    weights = blocks.transpose(1, 2).reshape(len(counts), out, ins)
    for own, part, weight in zip(dy.split(counts), first.split(counts), weights, strict=True):
        exact = own.float() @ weight.float()
        assert (part.float() - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_offsets_lead_out_of_no_operand(dtype: torch.dtype) -> None:
    """Results are undefined then, but memory beside them keeps what it holds, and nothing fails."""
    case = Case([40, 0, 70, 18], dtype, "cuda", (64, 64), (2, 2))
    for broken in ([0, -5, 1 << 30, 100, 128], [90, 3, 2, 1, 0], [-(1 << 31)] * 5, [0, 128, 0, 128, 4096]):
        case.offsets.copy_(torch.tensor(broken, dtype=torch.int32))
        guards = [torch.full((1 << 16,), 7, dtype=torch.uint8, device="cuda") for _ in range(8)]
        case.run()
        torch.cuda.synchronize()
        assert all(bool((guard == 7).all()) for guard in guards)
    case.offsets.copy_(offsets_of(case.counts))
    y, _ = case.run()
    assert_forward(y, case.x, case.values, case.pattern, case.counts, case.bias)
