"""Neurons that are off: products that skip their weights, thresholds of layers, and how they are chosen."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn, seeded
from torch import Tensor, nn

import tilesparse as ts
from tilesparse import _C, BlockPattern, BlockSparseLinear, functional
from tilesparse._runtime import launch
from tilesparse.errors import InvalidArgumentError
from tilesparse.nn import BlockSparseExperts, BlockSparseMLP, ExpertsLinear
from tilesparse.nn.reference import ReferenceBlockSparseLinear
from tilesparse.storage import dequantize, quantize_int4, quantize_weights

INF, NAN = math.inf, math.nan
OUT, IN = 256, 384
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are called for as many tokens as they take, not only for those that they pay for."""
    monkeypatch.setattr(launch, "SKIPPED_TOKENS", 8)


def masked(x: Tensor, threshold: float) -> Tensor:
    """Zeros in the place of numbers up to a magnitude, but for NaN and infinities, in float64."""
    wide = x.double()
    return torch.where((wide.abs() <= threshold) & wide.isfinite(), 0, wide)


def dense_of(values: Tensor, pattern: BlockPattern) -> Tensor:
    return ts.BlockSparseMatrix(values, pattern).to_dense().double()


def weight_of(
    device: str,
    dtype: torch.dtype,
    block_shape: tuple[int, int],
    storage: str = "plain",
    density: float = 0.6,
) -> tuple[BlockPattern, Tensor, Tensor | None, Tensor]:
    """A pattern, values, scales and W in float64."""
    pattern = BlockPattern.random(
        (OUT, IN), block_shape=block_shape, density=density, generator=seeded(1)
    ).to(device)
    values = randn(pattern.nnz, *block_shape, dtype=dtype, device=device, seed=2)
    if storage == "plain":
        return pattern, values, None, dense_of(values, pattern)
    granularity = "block" if storage == "int8 of blocks" else "row"
    if storage == "int4":
        stored, scales = quantize_int4(values)
    else:
        stored, scales = quantize_weights(values, torch.int8, granularity=granularity)
    return pattern, stored, scales, dense_of(dequantize(stored, scales=scales, dtype=torch.float32), pattern)


def assert_close(y: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else expected.new_ones(())
    assert y.dtype == dtype
    error = (y.double() - expected).abs()[expected.isfinite()]
    assert not len(error) or error.max() <= TOLERANCES[dtype] * max(1, float(scale))
    assert torch.equal(y.isfinite(), expected.isfinite())


CASES = [
    *(("plain", (rows, columns)) for rows in (16, 32, 64, 128) for columns in (16, 64, 128)),
    *((storage, (rows, 64)) for storage in ("int8", "int8 of blocks", "int4") for rows in (32, 64, 128)),
    ("int8", (64, 32)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("storage", "block_shape"), CASES, ids=str)
def test_products(device: str, dtype: torch.dtype, storage: str, block_shape: tuple[int, int]) -> None:
    pattern, values, scales, weight = weight_of(device, dtype, block_shape, storage)
    bias = randn(OUT, dtype=dtype, device=device, seed=3)
    for tokens in (1, 2, 3, 7, 8, 9):
        x = randn(tokens, IN, dtype=dtype, device=device, seed=tokens)
        gate = randn(tokens, OUT, dtype=dtype, device=device, seed=4)
        how: dict[str, Any] = {"scales": scales}
        product = masked(x, 0.7) @ weight.t() + bias.double()
        y = functional.linear(x, values, pattern, bias, threshold=0.7, **how)
        assert_close(y, product, dtype)
        y = functional.linear(x, values, pattern, bias, "relu", residual=gate, threshold=0.7, **how)
        assert_close(y, product.relu() + gate.double(), dtype)
        y = functional.linear(x, values, pattern, bias, "silu", gate=gate, threshold=0.7, **how)
        assert_close(y, product * nn.functional.silu(gate.float()).to(dtype).double(), dtype)
        y = functional.linear(x, values, pattern, bias, "relu", gate=gate, gate_threshold=0.7, **how)
        expected = (x.double() @ weight.t() + bias.double()) * masked(gate.relu(), 0.7)
        assert_close(y, expected, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, INF])
@pytest.mark.parametrize("tokens", [2, 9])
def test_which_numbers_count_as_zero(device: str, dtype: torch.dtype, threshold: float, tokens: int) -> None:
    """Ties do; NaN and infinities do not, whatever the threshold, and so do not on any path."""
    pattern, values, _, weight = weight_of(device, dtype, (64, 64), density=1.0)
    x = torch.zeros(tokens, IN, dtype=dtype, device=device)
    x[0, :6] = torch.tensor([0.5, -0.5, 0.25, -0.0, 0.500244140625, 3.0])
    x[1, 7] = NAN
    if dtype == torch.float32:
        x[0, 4] = math.nextafter(0.5, 1)
    y = functional.linear(x, values, pattern, threshold=threshold)
    expected = masked(x[0], threshold) @ weight.t()
    assert_close(y[:1], expected[None], dtype)
    assert y[1].isnan().all()
    x[1, 7] = INF
    y = functional.linear(x, values, pattern, threshold=threshold)
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_what_is_off_is_not_read(device: str, kind: str) -> None:
    """Weights that are NaN do not reach results where they are off for all tokens."""
    dtype = torch.bfloat16
    pattern, values, _, _ = weight_of(device, dtype, (64, 128), density=1.0)
    dense = ts.BlockSparseMatrix(values, pattern).to_dense()
    features = IN if kind == "inputs" else OUT
    on = torch.zeros(features, dtype=torch.bool, device=device)
    for number in (0, 5, features - 1):
        on[number] = True
        poisoned = dense.clone()
        (poisoned.T if kind == "inputs" else poisoned)[~on] = NAN
        bad = ts.BlockSparseMatrix.from_dense(poisoned, pattern).values
        clean = ts.BlockSparseMatrix.from_dense(poisoned.nan_to_num(), pattern).values
        x = randn(3, IN, dtype=dtype, device=device, seed=1)
        gate = randn(3, OUT, dtype=dtype, device=device, seed=2)
        if kind == "inputs":
            x = torch.where(on, x.abs() + 1, x.clamp(-1, 1))
            pairs: list[Any] = [{"threshold": 1.0}]
        else:
            gate = torch.where(on, gate.abs() + 1, gate.clamp(-1, 1))
            pairs = [{"gate": gate, "gate_threshold": 1.0}]
        for how in pairs:
            y = functional.linear(x, bad, pattern, **how)
            assert torch.equal(y, functional.linear(x, clean, pattern, **how))
            assert kind == "inputs" or not y[:, ~on].any()
    zeros = torch.zeros(2, IN, dtype=dtype, device=device)
    if kind == "inputs":  # all off
        assert not functional.linear(zeros, torch.full_like(values, NAN), pattern, threshold=0.0).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_and_orders_have_equal_bits(device: str, dtype: torch.dtype) -> None:
    pattern, values, _, _ = weight_of(device, dtype, (64, 64))
    x = randn(7, IN, dtype=dtype, device=device, seed=1)
    gate = randn(7, OUT, dtype=dtype, device=device, seed=2)
    order = torch.randperm(7, generator=seeded(3)).to(device)
    each: list[dict[str, Any]] = [{"threshold": 0.5}, {"gate": gate, "gate_threshold": 0.5}]
    for how in each:
        first = functional.linear(x, values, pattern, **how)
        assert torch.equal(first, functional.linear(x, values, pattern, **how))
        moved: dict[str, Any] = {
            name: one[order] if isinstance(one, Tensor) else one for name, one in how.items()
        }
        assert torch.equal(first[order], functional.linear(x[order], values, pattern, **moved))


@pytest.mark.parametrize("storage", ["plain", "int8", "int8 of blocks"])
@pytest.mark.parametrize("density", [0.03, 0.3, 1.0])
def test_threads_have_equal_bits(storage: str, density: float) -> None:
    """Columns of blocks are summed in parts, whatever their number, some of them empty."""
    pattern, values, scales, weight = weight_of("cpu", torch.float32, (32, 32), storage, density)
    x, threads, results = randn(3, IN, dtype=torch.float32, seed=1), torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(functional.linear(x, values, pattern, scales=scales, threshold=0.5))
    finally:
        torch.set_num_threads(threads)
    assert_close(results[0], masked(x, 0.5) @ weight.t(), torch.float32)
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("device", DEVICES)
def test_without_threshold_nothing_changes(device: str) -> None:
    layer = BlockSparseLinear(IN, OUT, density=0.5, device=device)
    x = torch.randn(3, IN, device=device)
    with torch.no_grad():
        before = layer(x)
        layer.threshold = 0.5
        assert not torch.equal(layer(x), before)
        layer.threshold = None
        assert torch.equal(layer(x), before)


def test_gradients() -> None:
    pattern, values, _, _ = weight_of("cpu", torch.float64, (16, 16), density=0.1)
    x = torch.randn(2, IN, dtype=torch.float64, generator=seeded(1)).requires_grad_()
    gate = torch.randn(2, OUT, dtype=torch.float64, generator=seeded(2)).requires_grad_()
    values.requires_grad_()

    def run(x: Tensor, values: Tensor, gate: Tensor) -> Tensor:
        return functional.linear(x, values, pattern, gate=gate, threshold=0.5, gate_threshold=0.5)

    inputs = x[:, :IN], values, gate
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_layers(device: str) -> None:
    """Whatever a layer is made into keeps its threshold, and computes the same function."""
    layer = BlockSparseLinear(IN, OUT, density=0.5, block_shape=32, device=device)
    layer.threshold = 0.5
    x = torch.randn(4, IN, device=device)
    with torch.no_grad():
        y = layer(x)
        many = layer(x.repeat(5, 1))[:4]
        assert torch.allclose(y, many, atol=1e-5)
        assert torch.equal(copy.deepcopy(layer)(x), y)
        assert torch.allclose(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), y, atol=1e-5)
        assert torch.allclose(ReferenceBlockSparseLinear(layer)(x), y, atol=1e-5)
        exported = torch.export.export(layer, (x,)).module()
        assert torch.allclose(exported(x), y, atol=1e-5)
        layer.weight.mul_(2)
        bias = layer.bias
        assert torch.allclose(layer(x) - bias, 2 * (y - bias), atol=1e-5)
    layer(x).square().sum().backward()
    assert layer.weight.grad is not None
    for storage in ("int8", "int4", "plain"):
        assert layer.to_storage(storage).threshold == 0.5
        with torch.no_grad():
            expected = masked(x, 0.5).float() @ copy.deepcopy(layer).to_storage("plain").to_linear().weight.T
            assert torch.allclose(layer(x) - layer.bias, expected, atol=1e-3)
    layer.to_storage("int8", activations="int8")
    with torch.no_grad():
        assert torch.allclose(layer(x), layer(x.repeat(30, 1))[:4], atol=0.1)
    assert layer.set_nm is not None and "threshold=0.5" in repr(layer)


@pytest.mark.parametrize("value", [-1.0, NAN, "half", True])
def test_thresholds_are_checked(value: Any) -> None:
    layer = BlockSparseLinear(64, 64, density=1.0)
    with pytest.raises(InvalidArgumentError, match="threshold must be None or a number from 0 on"):
        layer.threshold = value
    assert layer.threshold is None


class MLP(nn.Module):
    def __init__(self, hidden: int = 160) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(64, hidden, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(hidden, 64, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


def model_of(hidden: int = 160) -> Any:
    torch.manual_seed(0)
    relu = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    attention = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q_proj", "o_proj")})
    return nn.Sequential(MLP(hidden), MLP(), relu, *attention.values())


def batches() -> list[Tensor]:
    return [torch.randn(2, 32, 64, generator=seeded(number)) for number in range(4)]


def test_sparsify_activations(tmp_path: Path) -> None:
    model, x = model_of(), torch.randn(3, 64, generator=seeded(9))
    report = ts.sparsify_activations_(model, batches(), 0.6)
    assert report.skipped == []
    assert [layer.name for layer in report.layers] == ["0.down_proj", "1.down_proj", "2.2"]
    assert 0.6 <= report.facts["off"] <= 0.66 and "neurons are off" in str(report)
    assert all(0 <= layer.error < 1 for layer in report.layers)
    ts.save(model, tmp_path)
    loaded = model_of()
    ts.load(loaded, tmp_path)
    for layer in report.layers:
        assert loaded.get_submodule(layer.name).threshold == layer.threshold
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    again = ts.sparsify_activations_(model, batches(), 0.3)
    assert again.facts["off"] < 0.6  # thresholds that were there before count for nothing


def test_zeros_of_relu_are_free() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    before = model(batches()[0])
    (layer,) = ts.sparsify_activations_(model, batches(), 0.0).layers
    assert layer.threshold == 0 and 0.4 < layer.off < 0.6 and layer.error < 1e-6
    assert torch.allclose(model(batches()[0]), before, atol=1e-5)


def test_what_is_skipped_is_named() -> None:
    model = nn.Sequential(MLP(72))
    report = ts.sparsify_activations_(model, batches(), 0.5)
    assert [layer.name for layer in report.skipped] == ["0.down_proj"] and not report.layers
    with pytest.raises(InvalidArgumentError, match="fraction"):
        ts.sparsify_activations_(model_of(), batches(), 1.5)


def test_fused_mlps_keep_thresholds() -> None:
    layers = [BlockSparseLinear(64, 128, density=1.0, block_shape=32) for _ in range(2)]
    down = BlockSparseLinear(128, 64, density=1.0, block_shape=32)
    mlp = BlockSparseMLP(layers[0], down, layers[1], activation="silu")
    (layer,) = ts.sparsify_activations_(mlp, [torch.randn(64, 64)], 0.5).layers
    assert layer.name == "down" and down.threshold == layer.threshold > 0


EXPERTS = 4
ROUTINGS = [(3, 0, 5, 1), (0, 0, 0, 2), (9, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0), (17, 12, 0, 40)]


def experts_on(device: str, dtype: torch.dtype, density: float, storage: str = "plain") -> ExpertsLinear:
    layer = ExpertsLinear(
        IN, EXPERTS * OUT, experts=EXPERTS, density=density, block_shape=(64, 32), generator=seeded(1)
    )
    assert layer.bias is not None
    nn.init.normal_(layer.bias)
    return layer.to(device, dtype).requires_grad_(False).to_storage(storage)


def of_experts(x: Any, layer: Any, counts: tuple[int, ...]) -> Tensor:
    """The product in float64."""
    stored = copy.deepcopy(layer).to_storage("plain")
    dense = ts.BlockSparseMatrix(stored.weight, stored.pattern).to_dense().double().view(EXPERTS, OUT, IN)
    bias = layer.bias.double().view(EXPERTS, OUT)
    parts = zip(x.split(counts), dense, bias, strict=True)
    return torch.cat([rows.double() @ w.T + b for rows, w, b in parts])


def offsets_of(counts: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor((0, *counts)).cumsum(0).int().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", ROUTINGS, ids=str)
@pytest.mark.parametrize("density", [0.1, 0.6, 1.0])
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.float32, "plain"), (torch.bfloat16, "plain"), (torch.bfloat16, "int8")],
    ids=str,
)
def test_experts(
    device: str,
    counts: tuple[int, ...],
    density: float,
    dtype: torch.dtype,
    storage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "SKIPPED_TOKENS", 99)
    layer, offsets = experts_on(device, dtype, density, storage), offsets_of(counts, device)
    x, gate = (randn(sum(counts), size, dtype=dtype, device=device, seed=3) for size in (IN, OUT))
    layer.threshold = 0.7
    product = of_experts(masked(x, 0.7), layer, counts)
    assert_close(layer(x, offsets), product, dtype)
    assert_close(layer(x, offsets, residual=gate, activation="relu"), product.relu() + gate.double(), dtype)
    assert_close(layer(x, offsets, gate=gate), product * gate.double(), dtype)
    assert torch.equal(layer(x, offsets), layer(x, offsets))
    layer.threshold = 0.0
    x[x.abs() < 0.5] = 0.0
    assert_close(layer(x, offsets), of_experts(x, layer, counts), dtype)
    layer.threshold = INF
    assert_close(layer(x, offsets), of_experts(torch.zeros_like(x), layer, counts), dtype)
    if len(x) and density == 1:
        x[0, 0] = NAN
        assert layer(x, offsets)[0].isnan().any() and layer(x, offsets)[1:].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_experts_read_nothing_else(device: str) -> None:
    """Weights that are NaN: of other experts, and of neurons that are off for all tokens of the expert."""
    dtype, counts = torch.bfloat16, (2, 0, 1, 0)
    layer, offsets = experts_on(device, dtype, 1.0), offsets_of(counts, device)
    layer.threshold = 1.0
    on = torch.zeros(3, IN, dtype=torch.bool, device=device)
    on[0, 5] = on[1, 5] = on[2, IN - 1] = True
    x = randn(3, IN, dtype=dtype, device=device, seed=1)
    x = torch.where(on, x.abs() + 1.5, x.clamp(-1, 1))
    before = layer(x, offsets)
    dense = ts.BlockSparseMatrix(layer.weight, layer.pattern).to_dense().view(EXPERTS, OUT, IN)
    kept = torch.zeros_like(dense, dtype=torch.bool)
    kept[0, :, 5] = kept[2, :, IN - 1] = True
    poisoned = torch.where(kept, dense, NAN).flatten(0, 1)
    layer.weight.copy_(ts.BlockSparseMatrix.from_dense(poisoned, layer.pattern).values)
    assert torch.equal(layer(x, offsets), before)


def mixture() -> BlockSparseExperts:
    torch.manual_seed(0)
    up, down = (
        ExpertsLinear(i, EXPERTS * o, density=1.0, experts=EXPERTS, block_shape=32)
        for i, o in ((64, 256), (128, 64))
    )
    return BlockSparseExperts(up, down)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = mixture()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        chosen = (rows[:, :2].abs() * 100).long() % EXPERTS
        weights = torch.full(chosen.shape, 0.5, dtype=x.dtype, device=x.device)
        y: Tensor = self.experts(rows, chosen, weights)
        return y.view(x.shape)


@pytest.mark.parametrize("device", DEVICES)
def test_sparsify_experts(device: str, tmp_path: Path) -> None:
    model, x = Routed().to(device), torch.randn(1, 3, 64, generator=seeded(9)).to(device)
    data = [batch.to(device) for batch in batches()]
    with torch.no_grad():
        dense = model(x)
        report = ts.sparsify_activations_(model, data, 0.5)
        (layer,) = report.layers
        assert not report.skipped and layer.name == "experts.down"
        assert 0.45 < layer.off < 0.56 and 0 < layer.error < 0.5
        assert model.experts.down.threshold == layer.threshold > 0
        y = model(x)
        assert 0 < (y - dense).norm() < 0.5 * dense.norm()
        ts.save(model, tmp_path)
        loaded = Routed().to(device)
        ts.load(loaded, tmp_path)
        assert loaded.experts.down.threshold == layer.threshold
        assert torch.allclose(loaded(x), y, atol=1e-6)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(x), y, atol=1e-5)
        for storage in ("int8", "plain"):
            model.experts.down.to_storage(storage)
            assert model.experts.down.threshold == layer.threshold
            assert (model(x) - y).norm() < 0.05 * y.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_graphs_follow_masks(kind: str) -> None:
    dtype = torch.bfloat16
    pattern, values, _, weight = weight_of("cuda", dtype, (64, 64))
    x, gate = (torch.zeros(2, size, dtype=dtype, device="cuda") for size in (IN, OUT))
    how: Any = {"threshold": 0.5} if kind == "inputs" else {"gate": gate, "gate_threshold": 0.5}

    def run() -> Tensor:
        return functional.linear(x, values, pattern, **how)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for seed in range(4):
        x.copy_(randn(2, IN, dtype=dtype, device="cuda", seed=seed))
        gate.copy_(randn(2, OUT, dtype=dtype, device="cuda", seed=10 + seed))
        graph.replay()
        expected = (
            masked(x, 0.5) @ weight.t() if kind == "inputs" else x.double() @ weight.t() * masked(gate, 0.5)
        )
        assert_close(y, expected, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skip": 3}, "skip must be 0 to 2, got 3"),
        ({"threshold": 0.5}, "threshold must be 0 where skip is 0, got 0.5"),
        ({"skip": 1, "threshold": -1.0}, "threshold must be a number from 0 on, got -1"),
        ({"skip": 1, "threshold": NAN}, "threshold must be a number from 0 on"),
        ({"skip": 1, "tokens": 9}, "tokens must be at most 8 with skip"),
        ({"skip": 1, "dtype": 1}, "x.dtype must be float32, float16 or bfloat16 with skip"),
        ({"skip": 1, "op": 1}, "op must be dds_nt with skip"),
        ({"skip": 1, "x_layout": 1}, "x.layout must be 0 with skip"),
        ({"skip": 1, "kernel": 1}, "kernel must be 0 with skip"),
        ({"skip": 2}, "gate.data must not be null for outputs with skip"),
        ({"skip": 2, "grouped": True}, "group_offsets must be null for outputs with skip"),
        (
            {"skip": 1, "values_dtype": 7, "granularity": 2},
            "values.dtype must be that of x or int8 with skip",
        ),
    ],
)
def test_the_c_interface_refuses(changes: dict[str, Any], message: str) -> None:
    given = {"op": 0, "dtype": 2, "tokens": 1, "ldx": 64, "ldy": 64} | changes
    op, dtype, tokens = (given.pop(name) for name in ("op", "dtype", "tokens"))
    product = _C.Product(_C.Pattern(32, 32, 64, 64, 4, 0, 0, 0), op, dtype, 0, tokens, **given)
    with pytest.raises(InvalidArgumentError, match=message):
        product.workspace_size()
