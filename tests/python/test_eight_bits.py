"""8 bits of both factors (W8A8): products, layers, their storage, and everything that holds layers."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    DEVICES,
    FUNCTIONS,
    PATTERNS,
    Recorder,
    assert_within,
    dense_weight,
    make_pattern,
    randn,
    random_values,
    rounded,
    seeded,
    sums_unit,
)
from torch import Tensor, nn

import tilesparse
from tilesparse import (
    BlockPattern,
    BlockSparseConfig,
    BlockSparseLinear,
    functional,
    sparsify_,
    storage,
    tuning,
)
from tilesparse._runtime import select
from tilesparse.cli import main
from tilesparse.config import LayerSpec
from tilesparse.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from tilesparse.export import decompositions
from tilesparse.model import BlockSparseModelPatcher
from tilesparse.nn import ReferenceBlockSparseLinear
from tilesparse.tuning import Product, load, products_of

EIGHT = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
RESULTS = [torch.float32, torch.float16, torch.bfloat16]
IN, OUT, TOKENS = 128, 192, 70
OPS: Any = torch.ops.tilesparse
CHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]

both = pytest.mark.parametrize("name", EIGHT)
on_every_device = pytest.mark.parametrize("device", DEVICES)


def make(name: str, seed: int = 0, **options: Any) -> Any:
    options = {"block_shape": 32, "storage": name, "activations": name, **options}
    return BlockSparseLinear(IN, OUT, generator=seeded(seed), **options)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 1) -> Tensor:
    return randn(*(shape or (TOKENS,)), IN, dtype=dtype, device=device, seed=seed)


def stored(pattern: BlockPattern, name: str, device: str = "cpu") -> tuple[Tensor, Tensor]:
    values = random_values(pattern, dtype=torch.float32)
    quantized, scales = storage.quantize(values, EIGHT[name], per="feature", pattern=pattern)
    return quantized.to(device), scales.to(device)


def expected(
    x: Tensor, values: Tensor, scales: Tensor, pattern: BlockPattern, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The product of the same operands in float64, and how far off sums in float32 may be."""
    x_values, x_scales = (each.cpu() for each in functional.quantize(x, values.dtype))
    x_values, weight = x_values.double(), dense_weight(values.double(), pattern)
    of_both = x_scales.double()[..., None] * scales.cpu().double()
    y, magnitude = (x_values @ weight.t()) * of_both, (x_values.abs() @ weight.abs().t()) * of_both
    if bias is not None:
        y, magnitude = y + bias.cpu().double(), magnitude + bias.cpu().double().abs()
    return y, (IN + 12) * unit_of_sums(x, values.dtype) * magnitude


def unit_of_sums(x: Tensor, dtype: torch.dtype) -> float:
    """The largest relative error of an addition: tensor cores keep fewer bits of sums of float8."""
    return 2**-12 / 32 if x.is_cuda and dtype == torch.float8_e4m3fn else sums_unit(torch.float32)


# ---- products ----


@both
@pytest.mark.parametrize("dtype", RESULTS)
@on_every_device
def test_products_are_those_of_the_same_operands(device: str, dtype: torch.dtype, name: str) -> None:
    for kind in PATTERNS:
        pattern = make_pattern(kind, (6, 4), (32, 32))
        values, scales = stored(pattern, name, device)
        bias = randn(OUT, dtype=dtype, device=device, seed=4)
        x = tokens(dtype=dtype, device=device)
        for given in (None, bias):
            y = functional.quantized_linear(x, values, pattern, scales, given)
            assert y.dtype == dtype and y.is_contiguous()
            reference, tolerance = expected(x, values, scales, pattern, given)
            assert_within(y, reference, rounded(reference, tolerance, dtype))


@on_every_device
def test_sums_of_integers_are_exact(device: str) -> None:
    pattern = make_pattern("random 50%", (6, 4), (32, 32))
    values = torch.randint(-128, 128, (pattern.nnz, 32, 32), generator=seeded(), dtype=torch.int8)
    x_values = torch.randint(-128, 128, (TOKENS, IN), generator=seeded(1), dtype=torch.int8)
    wanted = (x_values.double() @ dense_weight(values.double(), pattern).t()).float()
    values, x_values = values.to(device), x_values.to(device)
    x, ones = x_values.float(), torch.ones(max(TOKENS, OUT), device=device)
    index = pattern.index_on(x.device)
    rest = {"scales": ones[:OUT], "x_values": x_values, "x_scales": ones[:TOKENS], "fast": True}
    assert torch.equal(OPS.dds_nt(x, values, *index, **rest).cpu(), wanted)


@both
@on_every_device
def test_bias_activation_residual_and_gate(device: str, name: str) -> None:
    pattern = make_pattern("random 50%", (6, 4), (32, 32))
    values, scales = stored(pattern, name, device)
    x, bias = tokens(7, 10, device=device), randn(OUT, dtype=torch.float32, device=device)
    added, gate = (randn(7, 10, OUT, dtype=torch.float32, device=device, seed=seed) for seed in (5, 6))
    plain = functional.quantized_linear(x, values, pattern, scales, bias)
    # Column-major results come from another kernel, with other sums of float8.
    _, error = expected(x, values, scales, pattern, bias)
    near = 1e-5 + 4 * float(error.max()) if device != "cpu" and name != "int8" else 1e-5
    for activation, function in FUNCTIONS.items():
        cases: list[tuple[Any, Tensor]] = [
            ({}, function(plain)),
            ({"residual": added}, function(plain) + added),
            ({"gate": gate}, plain * function(gate)),
        ]
        for options, wanted in cases:
            for column_major in (False, True):
                y = functional.quantized_linear(
                    x, values, pattern, scales, bias, activation, column_major_output=column_major, **options
                )
                torch.testing.assert_close(y, wanted, rtol=1e-5, atol=near)
                assert (y.stride(-1) == 1) != column_major
    with pytest.raises(InvalidArgumentError, match="gate must be None beside a residual"):
        functional.quantized_linear(x, values, pattern, scales, residual=added, gate=gate)


@both
@on_every_device
def test_layouts_and_numbers_of_tokens(device: str, name: str) -> None:
    pattern = make_pattern("random 50%", (6, 4), (32, 32))
    values, scales = stored(pattern, name, device)
    x = tokens(device=device)
    whole = functional.quantized_linear(x, values, pattern, scales)
    wide = torch.cat([x, x], 1)
    for other in (wide[:, :IN], x.t().contiguous().t(), torch.cat([x[:1], x])[1:]):
        assert torch.equal(functional.quantized_linear(other, values, pattern, scales), whole)
    for shape in ((), (0,), (1,), (2, 0), (5, 14)):
        some = x[: math.prod(shape)].reshape(*shape, IN)
        y = functional.quantized_linear(some, values, pattern, scales)
        assert y.shape == (*shape, OUT)
        wanted = whole[: math.prod(shape)].reshape(y.shape)
        if device == "cuda" and math.prod(shape) <= select.DECODE_TOKENS:
            of_rows = storage.row_scales(scales, pattern)
            wanted = functional.linear(some, values, pattern, scales=of_rows)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    strided = randn(2 * TOKENS, OUT, dtype=torch.float32, device=device)[::2]
    y = functional.quantized_linear(x, values, pattern, scales, residual=strided)
    torch.testing.assert_close(y, whole + strided, rtol=1e-5, atol=1e-5)


@both
def test_tokens_of_zeros_infinities_and_nan(name: str) -> None:
    pattern = make_pattern("full", (6, 4), (32, 32))
    values, scales = stored(pattern, name)
    x = tokens()
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0, math.inf, -math.inf, math.nan
    y = functional.quantized_linear(x, values, pattern, scales)
    assert bool((y[0] == 0).all()) and bool(y[1:4].isnan().all())
    assert bool(y[4:].isfinite().all())


@both
def test_what_operands_must_be(name: str) -> None:
    pattern = make_pattern("random 50%", (6, 4), (32, 32))
    values, scales = stored(pattern, name)
    x = tokens()

    def linear(**changed: Any) -> Tensor:
        options: Any = {"x": x, "values": values, "pattern": pattern, "scales": scales, **changed}
        return functional.quantized_linear(**options)

    for changed, message in (
        ({"x": x.double()}, "x must be float32, float16 or bfloat16"),
        ({"x": x[:, :64]}, "x must have last dimension 128"),
        ({"values": values.float()}, "dtype must be one of"),
        ({"values": values[:-1]}, "values must be a contiguous tensor"),
        ({"scales": scales[:-1]}, r"scales must be a contiguous tensor \[out_features\] = \[192\]"),
        ({"scales": scales.double()}, "scales must be a contiguous tensor"),
        ({"bias": scales[:-1]}, "bias must have shape"),
        ({"bias": scales.half()}, "bias must have dtype torch.float32"),
        ({"residual": x}, "residual must have shape"),
        ({"activation": "tanh"}, "activation must be one of"),
        ({"policy": "fast"}, "policy must be one of"),
        ({"use_fast_accum": 1}, "use_fast_accum must be"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            linear(**changed)
    if values.is_floating_point():
        with pytest.raises(UnsupportedError, match="values must be dense blocks to have a gradient"):
            linear(values=values.clone().requires_grad_())
    index, (x_values, x_scales) = pattern.index_on(x.device), functional.quantize(x, EIGHT[name])
    for of_x, message in (
        ((x_values[:5], x_scales), "x_values must have shape"),
        ((x_values, x_scales[:5]), "x_scales must have shape"),
        ((x_values.view(torch.uint8), x_scales), "x_values must have shape"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            rest = {"scales": scales, "x_values": of_x[0], "x_scales": of_x[1], "fast": True}
            OPS.dds_nt(x, values, *index, **rest)


def test_sums_of_too_many_integers_are_refused() -> None:
    wide: Any = {
        "in_features": 1 << 17,
        "out_features": 16,
        "density": 0.01,
        "block_shape": 16,
        "device": "meta",
    }
    with pytest.raises(InvalidArgumentError, match="in_features must be below 131072"):
        BlockSparseLinear(**wide, storage="int8", activations="int8")
    BlockSparseLinear(**wide, storage="float8_e4m3fn", activations="float8_e4m3fn")


@both
@on_every_device
def test_opcheck(device: str, name: str) -> None:
    pattern = make_pattern("random 50%", (6, 4), (32, 32))
    values, scales = stored(pattern, name, device)
    x = tokens(device=device).requires_grad_()
    bias = randn(OUT, dtype=torch.float32, device=device).requires_grad_()
    residual = randn(TOKENS, OUT, dtype=torch.float32, device=device).requires_grad_()
    of_x, index = functional.quantize(x, EIGHT[name]), pattern.index_on(x.device)
    # PyTorch looks for writes by a product of each operand, which it has not for float8.
    checks = CHECKS if name == "int8" else CHECKS[1:]
    rest = {"scales": scales, "x_values": of_x[0], "x_scales": of_x[1]}
    plain, gate = (x.detach(), values, *index, bias.detach(), None, 2, True), residual.detach()
    for arguments, options in (
        ((x, values, *index, bias, residual), {"fast": True}),
        (plain, {"gate": gate, "fast": False}),
    ):
        torch.library.opcheck(OPS.dds_nt.default, arguments, rest | options, test_utils=checks)
    torch.library.opcheck(OPS.row_scales.default, (scales, *index))


# ---- gradients ----


@both
@pytest.mark.parametrize("activation", ["none", "gelu"])
@on_every_device
def test_gradients_are_those_of_the_dequantized_weight(device: str, activation: str, name: str) -> None:
    layer = make(name, device=device)
    dense = layer.to_linear()
    x = tokens(device=device)
    residual = randn(TOKENS, OUT, dtype=torch.float32, device=device)
    results = []
    for own in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, residual, layer.bias.detach())]
        given, added, bias = leaves
        if own:
            layer.bias = nn.Parameter(bias)
            leaves[2] = layer.bias
            y = layer(given, residual=added, activation=activation)
        else:
            z = given @ dense.weight.t() + bias
            rounding = layer(given).detach() - z.detach()
            y = FUNCTIONS[activation](z + rounding) + added
        results.append(torch.autograd.grad(y.square().sum(), leaves))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@both
def test_gradients_of_gates_and_of_second_order(name: str) -> None:
    layer = make(name)
    x, gate = tokens().requires_grad_(), randn(TOKENS, OUT, dtype=torch.float32).requires_grad_()
    y = layer(x, gate=gate, activation="silu")
    of_x, of_gate = torch.autograd.grad(y.sum(), (x, gate), create_graph=True)
    dense = layer.to_linear().weight
    torch.testing.assert_close(of_x, nn.functional.silu(gate) @ dense, rtol=1e-4, atol=1e-4)
    (mixed,) = torch.autograd.grad(of_x.sum(), gate)
    assert of_gate.shape == mixed.shape == gate.shape and bool(mixed.abs().sum() > 0)
    func = torch.func.grad(lambda x: layer(x).sum())(x.detach())
    torch.testing.assert_close(func, dense.sum(0).expand_as(x), rtol=1e-4, atol=1e-4)


def test_nothing_but_the_weight_is_saved_for_the_gradient_of_x() -> None:
    layer, x = make("int8"), tokens().requires_grad_()
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        layer(x)
    assert sorted(saved) == sorted([tuple(layer.weight.shape), (OUT,)])


# ---- few tokens on a GPU, and other ways to compute ----


@both
@on_every_device
def test_the_dense_policy_multiplies_by_the_dequantized_weight(device: str, name: str) -> None:
    layer, x = make(name, device=device, policy="dense"), tokens(device=device)
    with Recorder() as recorder:
        y = layer(x)
    assert "quantize" not in recorder.seen and "dds_nt in 8 bits" not in recorder.seen
    torch.testing.assert_close(y, layer.to_linear()(x), rtol=1e-5, atol=1e-5)
    layer.policy = "auto"
    with Recorder() as recorder:
        layer(x)
    assert recorder.seen == {"quantize", "dds_nt in 8 bits"}


@both
def test_few_tokens_on_a_gpu_are_multiplied_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product that is chosen is computed on every device, and follows pattern and scales."""
    assert not select.multiplies_as_decode(tokens(1), make(name).index())
    monkeypatch.setattr("tilesparse._ops.linear.multiplies_as_decode", lambda x, index: True)
    layer, x = make(name), tokens(3).requires_grad_()
    for change in (
        lambda: None,
        lambda: layer.pattern.update_(make_pattern_like(layer, 5)),
        lambda: layer.scales.mul_(2),
        lambda: layer.load_state_dict(make(name, 3).state_dict()),
    ):
        change()
        with Recorder() as recorder:
            y = layer(x)
        assert "quantize" not in recorder.seen and "dds_nt" in recorder.seen
        wanted = layer.to_linear()(x)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(gradient, layer.to_linear().weight.sum(0).expand(3, IN))
    for wrong, message in (
        (x.double(), "x must be float32, float16 or bfloat16"),
        (x[:, :64], "x must have last"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            layer(wrong)
    with pytest.raises(InvalidArgumentError, match="scales must be a contiguous tensor"):
        functional.quantized_linear(x, layer.weight, layer.pattern, layer.scales[1:])


def make_pattern_like(layer: Any, seed: int) -> BlockPattern:
    spec = layer.spec
    return BlockPattern.random(spec.shape, block_shape=spec.block_shape, nnz=spec.nnz, generator=seeded(seed))


@pytest.mark.gpu
@both
def test_the_number_of_tokens_decides_on_a_gpu(name: str) -> None:
    layer = make(name, device="cuda")
    for count, wanted in ((select.DECODE_TOKENS, set()), (select.DECODE_TOKENS + 1, {"quantize"})):
        with Recorder() as recorder:
            layer(tokens(count, device="cuda"))
        assert recorder.seen & {"quantize"} == wanted


@pytest.mark.gpu
@both
@pytest.mark.parametrize("count", [8, TOKENS])
def test_graphs_follow_scales_and_patterns(count: int, name: str) -> None:
    layer, other = make(name, device="cuda"), make(name, 7, device="cuda")
    x = tokens(count, device="cuda").requires_grad_()

    def step() -> tuple[Tensor, ...]:
        y = layer(x)
        return (y, *torch.autograd.grad(y.sum(), x))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: x.copy_(tokens(count, device="cuda", seed=9)),
        lambda: layer.scales.copy_(other.scales),
        lambda: layer.pattern.update_(make_pattern_like(layer, 5)),
    ]
    for change in changes:
        with torch.no_grad():
            change()
        graph.replay()
        assert all(map(torch.equal, captured, step()))


@both
@on_every_device
def test_scales_of_rows_follow_every_write_and_are_kept_by_packed_layers(device: str, name: str) -> None:
    from tilesparse._ops.products import row_scales_on

    layer = make(name, device=device)

    def check() -> None:
        rows, _ = layer.pattern.block_indices()
        wanted = layer.scales.view(-1, 32)[rows]
        assert torch.equal(row_scales_on(layer.scales, layer.index()), wanted)
        assert torch.equal(storage.row_scales(layer.scales, layer.pattern), wanted)

    check()
    layer.scales.data.mul_(2)  # which PyTorch does not count
    check()
    layer.prepack()
    first = row_scales_on(layer.scales, layer.index())
    assert row_scales_on(layer.scales, layer.index()) is first
    layer.pattern.update_(make_pattern_like(layer, 9))
    check()
    layer.prepack()
    check()
    layer.scales.mul_(3)
    check()
    layer.scales.data.mul_(2)
    layer.prepack()
    check()


@both
@on_every_device
def test_gradients_of_x_follow_scales_that_are_written_to(device: str, name: str) -> None:
    layer, other = make(name, device=device), make(name, device=device)
    x = torch.randn(64, layer.in_features, device=device, requires_grad=True)

    def gradient(of: BlockSparseLinear) -> Tensor:
        y = of(x)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    gradient(layer)
    other.scales.mul_(torch.linspace(0.1, 4, len(other.scales), device=device))
    layer.scales.data.copy_(other.scales)
    assert torch.equal(gradient(layer), gradient(other))


# ---- configs and layers ----


@both
def test_configs_and_specs(name: str) -> None:
    config = BlockSparseConfig(storage=name, activations=name)
    assert config.scales == "feature" and config == BlockSparseConfig(
        storage=name, activations=name, scales="feature"
    )
    other = next(one for one in EIGHT if one != name)
    for options, message in (
        ({"storage": name, "activations": other}, "activations must be None, or the dtype of the storage"),
        ({"activations": name}, "activations must be None.* with storage 'plain'"),
        ({"storage": name, "activations": 8}, "activations must be None"),
        ({"storage": name, "activations": name, "scales": "block"}, "scales must be 'feature'"),
        ({"storage": name, "scales": "feature"}, "scales must be 'row' or 'block'"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            BlockSparseConfig(**options)
    plain = LayerSpec(shape=(64, 64), block_shape=(32, 32), nnz=2, dtype=torch.float32)
    spec = plain.with_storage(name, activations=name)
    assert (spec.scales, spec.activations) == ("feature", name)
    assert LayerSpec.from_json(spec.to_json()) == spec
    weight_only = plain.with_storage(name)
    assert "activations" not in weight_only.to_json() and weight_only.activations is None
    with pytest.raises(InvalidArgumentError, match="scales must be one of"):
        LayerSpec(
            shape=(64, 64), block_shape=(32, 32), nnz=2, dtype=torch.float32, storage=name, scales="feature"
        )
    for forged in (
        {"activations": other},
        {"activations": "int4"},
        {"activations": [name]},
        {"scales": "row"},
        {"nm": [1, 4]},
        {"storage": "plain"},
        {"extra": 1},
    ):
        with pytest.raises(InvalidArgumentError):
            LayerSpec.from_json({**spec.to_json(), **forged})


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_from_a_dense_one(dtype: torch.dtype, name: str) -> None:
    linear = nn.Linear(IN, OUT, dtype=dtype)
    layer = BlockSparseLinear.from_linear(linear, 1, block_shape=32, storage=name, activations=name)
    assert layer.activations == layer.storage == name and layer.scales.shape == (OUT,)
    assert f"storage={name!r}, activations={name!r}" in repr(layer)
    largest = linear.weight.detach().float().abs().amax(1)
    torch.testing.assert_close(layer.scales, largest / (127 if name == "int8" else 448))
    assert 0 < layer.storage_error < 0.05
    x = tokens(dtype=dtype)
    torch.testing.assert_close(layer(x), linear(x), rtol=0.1, atol=0.1)
    torch.testing.assert_close(layer(x), ReferenceBlockSparseLinear(layer)(x), rtol=2e-2, atol=2e-2)


@both
def test_to_storage_there_and_back(name: str) -> None:
    layer = BlockSparseLinear(IN, OUT, block_shape=32, generator=seeded())
    plain = layer.plain_values()
    for storages in ((name, name), (name, None), (name, name), ("plain", None)):
        layer.to_storage(storages[0], activations=storages[1])
        assert (layer.storage, layer.activations) == storages
        torch.testing.assert_close(layer.plain_values(), plain, rtol=0.1, atol=0.01)
    layer(tokens()).sum().backward()
    assert layer.weight.grad is not None
    exact = make(name)
    before = exact.state_dict()
    assert exact.to_storage(name, activations=name).state_dict().keys() == before.keys()
    for options, message in (
        ({"storage": "plain", "activations": name}, "activations must be None"),
        ({"storage": name, "activations": name, "per": "block"}, "per must be 'feature'"),
        ({"storage": name, "per": "feature"}, "per must be 'row' or 'block'"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            exact.to_storage(**options)
    with pytest.raises(InvalidArgumentError, match="finite"):
        nn.init.constant_(layer.weight, math.inf)
        layer.to_storage(name, activations=name)


@both
@on_every_device
def test_layers_without_blocks_and_with_empty_rows(device: str, name: str) -> None:
    layer = make(name, density=0, device=device)
    assert bool((layer.scales == 1).all())
    assert torch.equal(layer(tokens(device=device)), layer.bias.expand(TOKENS, OUT))
    pattern = make_pattern("empty rows and columns", (6, 4), (32, 32))
    layer = BlockSparseLinear(IN, OUT, pattern=pattern, storage=name, activations=name, device=device)
    x = tokens(device=device)
    assert torch.equal(layer(x)[:, :32], layer.bias[:32].expand(TOKENS, 32))


@both
def test_copies_dtypes_devices_and_state_dicts(name: str) -> None:
    layer, x = make(name), tokens()
    y = layer(x)
    copies = [copy.deepcopy(layer)]
    if name == "int8":  # PyTorch does not unpickle the other
        copies.append(pickle.loads(pickle.dumps(layer)))
    for copied in copies:
        assert copied.spec == layer.spec and torch.equal(copied(x), y)
    other = make(name, 5, density=0.25)  # of another number of blocks
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.scales.dtype == torch.float32 and half.weight.dtype == EIGHT[name]
    assert half.spec.dtype == torch.bfloat16 and half(x.bfloat16()).dtype == torch.bfloat16
    empty = BlockSparseLinear.from_spec(layer.spec, device="meta").to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), y)
    drawn = BlockSparseLinear.from_spec(layer.spec, device="cpu")
    drawn.reset_parameters(seeded(3))
    assert drawn.spec == layer.spec and bool(drawn(x).isfinite().all())
    double = make(name).double()
    with pytest.raises(InvalidArgumentError, match="x must be float32, float16 or bfloat16"):
        double(x.double())


@both
@pytest.mark.parametrize("per", ["row", "block"])
def test_states_of_other_scales_are_refused(per: str, name: str) -> None:
    """Also those of as many blocks as there are features, which metadata tells apart."""
    full = BlockPattern.full((256, 1024), block_shape=32)  # 256 blocks
    options: Any = {"pattern": full, "generator": seeded()}
    layer = BlockSparseLinear(1024, 256, **options, storage=name, activations=name)
    other = BlockSparseLinear(1024, 256, **options).to_storage(name, per=per)
    for target, source in ((layer, other), (other, layer)):
        before = {key: tensor.clone() for key, tensor in target.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"scales must be .* call to_storage"):
            target.load_state_dict(source.state_dict())
        target.load_state_dict(before)
        if per == "row" and source is other:
            with pytest.raises(RuntimeError, match=r"scales must be .* call to_storage"):
                target.load_state_dict(dict(source.state_dict()))


@both
def test_autocast_and_grad_modes(name: str) -> None:
    layer, x = make(name), tokens()
    y = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x)
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), y, rtol=0.05, atol=0.05)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    with torch.inference_mode():
        assert torch.equal(layer(x), y)


@both
def test_compiled_and_exported_layers(name: str) -> None:
    layer, x = make(name).eval(), tokens()
    model = nn.Sequential(layer, nn.ReLU())
    wanted = model(x)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x), wanted)
    torch.testing.assert_close(compiled(x[:5]), wanted[:5])
    trained = x.clone().requires_grad_()
    compiled(trained).sum().backward()
    mine = x.clone().requires_grad_()
    model(mine).sum().backward()
    torch.testing.assert_close(trained.grad, mine.grad)
    shapes = {"input": {0: torch.export.Dim("tokens")}}
    for strict in (False, True):
        program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict)
        for some in (x, x[:3]):
            torch.testing.assert_close(program.module()(some), model(some))
    plain = program.run_decompositions(decompositions())
    assert not any("tilesparse" in str(node.target) for node in plain.graph.nodes)
    torch.testing.assert_close(plain.module()(x), wanted)


def test_decompositions_of_bias_residual_gate_and_gradient() -> None:
    pattern = make_pattern("random 50%", (6, 4), (32, 32))
    values, scales = stored(pattern, "int8")
    x, other = tokens(), randn(TOKENS, OUT, dtype=torch.float32)

    class Model(nn.Module):
        def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            run: Callable[..., Tensor] = functional.quantized_linear
            of = values, pattern, scales
            dense = run(x, *of, policy="dense")
            return run(x, *of, None, "relu", residual=other), run(x, *of, None, "silu", gate=other), dense

    program = torch.export.export(Model(), (x, other)).run_decompositions(decompositions())
    assert not any("tilesparse" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x, other), Model()(x, other))


# ---- measured and chosen ----


@both
def test_the_command_lists_kernels_for_8_bits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["info"])
    assert re.search(rf"cpu_portable .*forward.*{name}", capsys.readouterr().out)


@both
def test_products_are_chosen_and_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILESPARSE_TUNE_FILE", str(tmp_path / "tune.json"))
    layer = make(name)
    product = Product.of(layer, tokens=100)
    assert product.activations == name and "W8A8" in str(product)
    assert Product.of(layer, tokens=100, op="dgrad").activations is None
    chosen = tuning.choose(product, "cpu")
    assert chosen.kernel in {kernel.name for kernel in tuning.kernels() if EIGHT[name] in kernel.dtypes}
    try:
        (measured,) = tuning.tune([product], "cpu", candidates=1, repetitions=1)
        assert measured.product == product and set(measured.microseconds) == {chosen.kernel}
        assert load()[0] == [measured]
    finally:
        monkeypatch.setenv("TILESPARSE_TUNE_FILE", "")
        load()
    tilesparse.save(nn.Sequential(layer), tmp_path / "saved")
    found = products_of(tmp_path / "saved", [10, 100])
    assert [(one.op, one.tokens, one.activations) for one in found] == [
        ("forward", 10, None),
        ("forward", 10, name),
        ("forward", 100, name),
        ("dgrad", 10, None),
        ("dgrad", 100, None),
    ]
    for changed, message in (
        ({"op": "dgrad"}, "op must be 'forward' with activations"),
        ({"column_major": True}, "column_major must be False with activations"),
        ({"dtype": torch.float64}, "dtype must have 16 or 32 bits with activations"),
        ({"storage": "plain"}, "activations must be None"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            replace(product, **changed)


# ---- what holds layers ----


FRESH = """
import sys, torch, tilesparse
from torch import nn

dense = nn.Linear(128, 192), nn.ReLU(), nn.Linear(192, 128)
model = tilesparse.load(nn.Sequential(*dense), sys.argv[1])
x, y = torch.load(sys.argv[1] + "/expected.pt")
assert torch.equal(model(x), y)
"""


def dense_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, IN))


@both
def test_patcher_and_sparsify(name: str) -> None:
    x = tokens()
    config = BlockSparseConfig(1, 32, storage=name, activations=name)
    model = dense_model()
    wanted = model(x)
    report = sparsify_(model, config)
    assert f"{name} W8A8" in str(report) and report.layers[0].activations == name
    torch.testing.assert_close(model(x), wanted, rtol=0.1, atol=0.1)
    patcher = BlockSparseModelPatcher()
    patcher.add_pattern(".*", {"density": 1, "block_shape": 32, "storage": name, "activations": name})
    other = dense_model()
    patcher.patch_model(other)
    assert torch.equal(other(x), model(x))
    reference = dense_model()
    sparsify_(reference, BlockSparseConfig(1, 32))
    tilesparse.prepare_for_inference_(model)
    torch.testing.assert_close(model(x), other(x))


@both
def test_pruned_models(name: str) -> None:
    model = dense_model()
    config = BlockSparseConfig(0.5, 32, storage=name, activations=name)
    report = tilesparse.prune_(model, config, [tokens()])
    assert f"{name} W8A8" in str(report)
    assert isinstance(model[0], BlockSparseLinear) and model[0].activations == name


@both
def test_checkpoints(name: str, tmp_path: Path) -> None:
    model, x = dense_model(), tokens()
    sparsify_(
        model, {"0": BlockSparseConfig(0.5, 32, storage=name, activations=name), "2": BlockSparseConfig(1)}
    )
    tilesparse.save(model, tmp_path)
    for other in (tilesparse.load(dense_model, tmp_path), tilesparse.load(dense_model(), tmp_path)):
        assert torch.equal(other(x), model(x)) and other[0].spec == model[0].spec
    torch.save((x, model(x)), tmp_path / "expected.pt")
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path)], check=True)
    half = tilesparse.load(dense_model, tmp_path, dtype=torch.bfloat16)
    assert half[0].scales.dtype == torch.float32 and half(x.bfloat16()).dtype == torch.bfloat16
    config = tmp_path / "config.json"
    text = config.read_text()
    assert text.count('"activations"') == 1
    for before, after in (
        (f'"activations": "{name}"', '"activations": "int4"'),
        (f'"activations": "{name}"', '"activations": "plain"'),
        ('"scales": "feature"', '"scales": "row"'),
        ('"scales": "feature"', '"scales": "block"'),
        ('"version": 2', '"version": 1'),
        ('"version": 2', '"version": 4'),
    ):
        assert before in text
        config.write_text(text.replace(before, after))
        with pytest.raises(CheckpointError):
            tilesparse.load(dense_model, tmp_path)
    without = json.loads(text)
    del without["tilesparse"]["layers"]["0"]["activations"]
    config.write_text(json.dumps(without))
    with pytest.raises(CheckpointError):
        tilesparse.load(dense_model, tmp_path)


@both
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    settings = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **size)
    model = transformers.LlamaForCausalLM(settings).eval()
    sparsify_(model, BlockSparseConfig(0.5, 32, storage=name, activations=name))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    layer = loaded.model.layers[0].mlp.up_proj
    assert isinstance(layer, BlockSparseLinear) and layer.activations == name
    assert layer.scales.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, wanted)
        half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert half.model.layers[0].mlp.up_proj.scales.dtype == torch.float32
        torch.testing.assert_close(half(tokens).logits.float(), wanted, rtol=0.1, atol=0.1)
        tilesparse.prepare_for_inference_(loaded)
        torch.testing.assert_close(loaded(tokens).logits, wanted, rtol=0.02, atol=0.02)
        generated = loaded.generate(tokens, max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 15)


@both
def test_lora_beside_such_layers(name: str) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    settings = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **size)
    model = transformers.LlamaForCausalLM(settings)
    sparsify_(model, BlockSparseConfig(0.5, 32, storage=name, activations=name))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    batch, losses = torch.arange(24)[None], []
    for _ in range(8):
        loss = adapted(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
