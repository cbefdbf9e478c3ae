"""8 bits of both factors (W8A8): products, layers, their storage, and everything that holds layers."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
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
    random_mask,
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
)
from tilesparse._runtime import select
from tilesparse.config import LayerSpec
from tilesparse.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from tilesparse.nn import ReferenceBlockSparseLinear
from tilesparse.nn.weight import dense_blocks, layer_index

NM = (2, 4)
FLOAT8 = torch.float8_e4m3fn
EIGHT = {"int8": torch.int8, "float8_e4m3fn": FLOAT8}
GROUPED = "float8 by block"  # a scale for 128 features of a token, and one for each block
RESULTS = [torch.float32, torch.float16, torch.bfloat16]
TOKENS = 70
OPS: Any = torch.ops.tilesparse

# How layers are made: in_features, out_features, and options; 2:4 inside of the blocks as well.
LAYERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "int8": (128, 192, {"block_shape": 32, "storage": "int8", "activations": "int8"}),
    "float8_e4m3fn": (
        128,
        192,
        {"block_shape": 32, "storage": "float8_e4m3fn", "activations": "float8_e4m3fn"},
    ),
    GROUPED: (640, 384, {"block_shape": 128}),
}
IN, OUT, _ = LAYERS["int8"]

both = pytest.mark.parametrize("name", EIGHT)
every_kind = pytest.mark.parametrize("name", LAYERS)
on_every_device = pytest.mark.parametrize("device", DEVICES)


def make(name: str, seed: int = 0, **options: Any) -> Any:
    ins, outs, own = LAYERS[name]
    device = options.pop("device", "cpu")
    layer = BlockSparseLinear(ins, outs, generator=seeded(seed), **{**own, **options}).to(device)
    if name == GROUPED:
        layer.to_storage("float8_e4m3fn", granularity="block", activations="float8_e4m3fn")
    return layer


def pattern_of(name: str, kind: str = "random 50%") -> BlockPattern:
    ins, outs, options = LAYERS[name]
    block = options["block_shape"]
    return make_pattern(kind, (outs // block, ins // block), (block, block))


def tokens(
    *shape: int, name: str = "int8", dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 1
) -> Tensor:
    """Activations; of groups with magnitudes that differ, so that it shows which scale each has."""
    x = randn(*(shape or (TOKENS,)), LAYERS[name][0], dtype=torch.float32, device="cpu", seed=seed)
    if name == GROUPED:
        x = (x.unflatten(-1, (-1, 128)) * 0.5 ** torch.arange(5)[:, None]).flatten(-2)
    return x.to(device, dtype)


def quantized(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = EIGHT.get(name, FLOAT8)
    granularity = "group" if name == GROUPED else "token"
    return functional.quantize_activations(x, dtype, granularity=granularity)


def stored(pattern: BlockPattern, name: str, device: str = "cpu") -> tuple[Tensor, Tensor]:
    values = random_values(pattern, dtype=torch.float32)
    if name == GROUPED:
        values = values * 0.25 ** torch.arange(pattern.nnz).remainder(5)[:, None, None]
        values, scales = storage.quantize_weights(values, FLOAT8, granularity="block")
        return values.to(device), scales[:, None].to(device)
    values, scales = storage.quantize_weights(values, EIGHT[name], granularity="feature", pattern=pattern)
    return values.to(device), scales.to(device)


def expected(
    name: str, x: Tensor, values: Tensor, scales: Tensor, pattern: BlockPattern, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The product of the same operands in float64, and how far off sums in float32 may be."""
    left, of_x = (each.cpu().double() for each in quantized(name, x))
    values, scales = values.cpu().double(), scales.cpu().double()
    if name == GROUPED:
        left, right = left * of_x.repeat_interleave(128, -1), values * scales[..., None]
    else:
        rows, _ = pattern.block_indices()
        left, right = left * of_x[..., None], values * scales.view(-1, values.shape[1])[rows][..., None]
    weight = dense_weight(right, pattern)
    y, magnitude = left @ weight.t(), left.abs() @ weight.abs().t()
    if bias is not None:
        y, magnitude = y + bias.cpu().double(), magnitude + bias.cpu().double().abs()
    # Tensor cores keep fewer bits of sums of float8.
    unit = 2**-12 / 32 if x.is_cuda and name != "int8" else sums_unit(torch.float32)
    return y, (x.shape[-1] + (16 if name == GROUPED else 12)) * unit * magnitude


# ---- products ----


@every_kind
@pytest.mark.parametrize("dtype", RESULTS)
@on_every_device
def test_products_are_those_of_the_same_operands(device: str, dtype: torch.dtype, name: str) -> None:
    for kind in PATTERNS:
        pattern = pattern_of(name, kind)
        values, scales = stored(pattern, name, device)
        bias = randn(pattern.out_features, dtype=dtype, device=device, seed=4)
        x = tokens(name=name, dtype=dtype, device=device)
        for given in (None, bias):
            y = functional.quantized_linear(x, values, pattern, scales, given)
            assert y.dtype == dtype and y.is_contiguous()
            reference, tolerance = expected(name, x, values, scales, pattern, given)
            assert_within(y, reference, rounded(reference, tolerance, dtype))


@on_every_device
def test_long_sums_of_positive_float8(device: str) -> None:
    """Tensor cores alone would lose a fifth of them."""
    pattern = BlockPattern.full((128, 16384), block_shape=(128, 128))
    weight = torch.rand(pattern.nnz, 128, 128, generator=seeded(), device="cpu").to(device)
    values, scales = storage.quantize_weights(weight, FLOAT8, granularity="feature", pattern=pattern)
    x = torch.rand(130, 16384, generator=seeded(1)).to(device)
    y = functional.quantized_linear(x, values, pattern, scales)
    x_values, x_scales = (part.cpu().double() for part in functional.quantize_activations(x, FLOAT8))
    wanted = (x_values * x_scales[:, None]) @ (
        dense_weight(values.double(), pattern) * scales.cpu().double()[:, None]
    ).t()
    assert ((y.cpu() - wanted) / wanted).abs().max() < 4e-3


def test_each_scale_is_that_of_its_group_and_block() -> None:
    """Small integers and powers of two, of which all sums are exact."""
    pattern = pattern_of(GROUPED)
    values = torch.randint(-1, 2, (pattern.nnz, 128, 128), generator=seeded()).to(FLOAT8)
    x_values = torch.randint(-1, 2, (70, 640), generator=seeded(1)).to(FLOAT8)
    x_scales = 2.0 ** torch.randint(-2, 3, (70, 5), generator=seeded(2))
    scales = 2.0 ** torch.randint(-2, 3, (pattern.nnz, 1), generator=seeded(3))
    left = x_values.double() * x_scales.double().repeat_interleave(128, 1)
    wanted = left @ dense_weight(values.double() * scales.double()[..., None], pattern).t()
    index, x = pattern.index_on(torch.device("cpu")), x_values.float()
    for laid in (x_scales, x_scales.t().contiguous().t()):
        rest = {"scales": scales, "x_values": x_values, "x_scales": laid, "fast": False}
        assert torch.equal(OPS.dds_nt(x, values, *index, **rest), wanted.float())


@every_kind
@on_every_device
def test_bias_activation_residual_and_gate(device: str, name: str) -> None:
    pattern = pattern_of(name)
    values, scales = stored(pattern, name, device)
    outs = pattern.out_features
    x, bias = tokens(7, 10, name=name, device=device), randn(outs, dtype=torch.float32, device=device)
    added, gate = (randn(7, 10, outs, dtype=torch.float32, device=device, seed=seed) for seed in (5, 6))
    plain = functional.quantized_linear(x, values, pattern, scales, bias)
    # Column-major results come from another kernel, with other sums of float8.
    _, error = expected(name, x, values, scales, pattern, bias)
    near = 1e-5 + 4 * float(error.max()) if device != "cpu" and name != "int8" else 1e-5
    near = max(near, 4e-5) if name == GROUPED else near  # sums of five times as many, and larger
    for activation, function in FUNCTIONS.items():
        cases: list[tuple[Any, Tensor]] = [
            ({}, function(plain)),
            ({"residual": added}, function(plain) + added),
            ({"gate": gate}, plain * function(gate)),
        ]
        for options, wanted in cases:
            for column_major in (False,) if device != "cpu" and name == GROUPED else (False, True):
                y = functional.quantized_linear(
                    x, values, pattern, scales, bias, activation, column_major_output=column_major, **options
                )
                torch.testing.assert_close(y, wanted, rtol=1e-5, atol=near)
                assert (y.stride(-1) == 1) != column_major
    with pytest.raises(InvalidArgumentError, match="gate must be None"):
        functional.quantized_linear(x, values, pattern, scales, residual=added, gate=gate)


@both
@on_every_device
def test_layouts_and_numbers_of_tokens(device: str, name: str) -> None:
    pattern = pattern_of(name)
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


@pytest.mark.parametrize("count", [1, 3, 9, 65, 130, 600])
def test_numbers_of_tokens_and_layouts_with_scales_inside(count: int) -> None:
    pattern = pattern_of(GROUPED)
    values, scales = stored(pattern, GROUPED)
    x, other = (tokens(count, name=GROUPED, seed=seed) for seed in (1, 2))
    wanted, tolerance = expected(GROUPED, x, values, scales, pattern)
    beside, between = torch.cat((other, x), 1)[:, 640:], torch.stack((x, other), 1)[:, 0]
    for seen, major in product((x, beside, between, x.mT.contiguous().mT), (False, True)):
        y = functional.quantized_linear(seen, values, pattern, scales, column_major_output=major)
        assert_within(y, wanted, tolerance)


@every_kind
def test_tokens_of_zeros_infinities_and_nan(name: str) -> None:
    pattern = pattern_of(name, "full")
    values, scales = stored(pattern, name)
    x = tokens(name=name)
    wanted = functional.quantized_linear(x, values, pattern, scales)
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0, math.inf, -math.inf, math.nan
    y = functional.quantized_linear(x, values, pattern, scales)
    assert bool((y[0] == 0).all()) and bool(y[1:4].isnan().all())
    assert torch.equal(y[4:], wanted[4:])


@both
def test_what_operands_must_be(name: str) -> None:
    pattern = pattern_of(name)
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
    index, (x_values, x_scales) = pattern.index_on(x.device), functional.quantize_activations(x, EIGHT[name])
    for of_x, message in (
        ((x_values[:5], x_scales), "x_values must have"),
        ((x_values, x_scales[:5]), "x_scales must have"),
        ((x_values.view(torch.uint8), x_scales), "x_values must have"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            rest = {"scales": scales, "x_values": of_x[0], "x_scales": of_x[1], "fast": True}
            OPS.dds_nt(x, values, *index, **rest)


def test_what_operands_with_scales_inside_must_be() -> None:
    pattern = pattern_of(GROUPED)
    values, scales = stored(pattern, GROUPED)
    x = tokens(name=GROUPED)
    small = make_pattern("random 50%", (2, 10), (64, 64))
    blocks = random_values(small, dtype=torch.float32).to(FLOAT8)
    for arguments, message in (
        ((values, pattern, scales[1:]), "scales"),
        ((blocks, small, torch.ones(small.nnz, 1)), "in blocks of 128 x 128"),
        ((values.float().to(torch.int8), pattern, scales), "in blocks of 128 x 128"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            functional.quantized_linear(x, *arguments)
    index, (x_values, x_scales) = pattern.index_on(x.device), quantized(GROUPED, x)
    for of_x in (x_scales[:, 0], x_scales[:, 1:], x_scales.double()):
        rest = {"scales": scales, "x_values": x_values, "x_scales": of_x, "fast": False}
        with pytest.raises(InvalidArgumentError, match="x_scales must have"):
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


# ---- 2:4 inside of the blocks ----


def stored_2_4(pattern: BlockPattern, name: str, device: str) -> tuple[Tensor, ...]:
    """(compressed, metadata, scales, the same values as dense blocks)."""
    values = random_values(pattern, dtype=torch.float32)
    mask = random_mask(tuple(values.shape))
    dense, scales = storage.quantize_weights(
        values * mask, EIGHT[name], granularity="feature", pattern=pattern
    )
    return tuple(each.to(device) for each in (*storage.compress(dense, mask), scales, dense))


def tolerance_of(y: Tensor, name: str) -> Tensor:
    """Tensor cores add float8 in another order and fewer bits; sums of int8 are equal bit by bit.

    Kernels for 8.0 and 9.0, of which each product has one, multiply these by scales, add parts and compute
    activations in float32, each in an order of its own, and round what comes out.
    """
    if not y.is_cuda:
        return torch.zeros_like(y)
    if name != "int8":
        return 2**-7 * y.abs() + 2**-7 * y.abs().max()
    largest = y.abs().max().float()
    return torch.finfo(y.dtype).eps * y.abs().float() + 4 * torch.finfo(torch.float32).eps * largest


@both
@pytest.mark.parametrize("block_shape", [(16, 32), (32, 64), (64, 64), (128, 32), (64, 128), (128, 128)])
@on_every_device
def test_products_of_2_4_are_those_of_dense_blocks(
    device: str, block_shape: tuple[int, int], name: str
) -> None:
    grid = 384 // block_shape[0], 256 // block_shape[1]
    for index, kind in enumerate(PATTERNS):
        pattern = make_pattern(kind, grid, block_shape)
        compressed, metadata, scales, dense = stored_2_4(pattern, name, device)
        count, dtype = (1, 17, 130)[index % 3], (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        bias, x = randn(384, dtype=dtype, device=device), randn(count, 256, dtype=dtype, device=device)
        for options in ({}, {"bias": bias, "activation": "gelu"}, {"use_fast_accum": True}):
            y = functional.quantized_linear(x, compressed, pattern, scales, metadata=metadata, **options)
            wanted = functional.quantized_linear(x, dense, pattern, scales, **options)
            tolerance = tolerance_of(wanted, name)
            assert_within(y, wanted.double().cpu(), tolerance.double().cpu())


@both
@on_every_device
@torch.no_grad()
def test_layers_add_products_as_they_are_told(device: str, name: str) -> None:
    made = BlockSparseLinear(512, 256, block_shape=64, density=0.5, generator=seeded())
    layer = made.to_storage(name, activations=name).to(device)
    x = randn(256, 512, dtype=torch.float32, device=device).abs()
    for fast in (False, True):
        layer.use_fast_accum = fast
        scales = layer.scales
        assert scales is not None
        own = functional.quantized_linear(
            x, layer.weight, layer.pattern, scales, layer.bias, use_fast_accum=fast
        )
        assert torch.equal(layer(x), own)


def test_metadata_is_checked() -> None:
    pattern = make_pattern("random 50%", (6, 4), (64, 64))
    compressed, metadata, scales, dense = stored_2_4(pattern, "int8", "cpu")
    x = torch.randn(8, 256, generator=seeded())
    for values, words, message in (
        (compressed, None, r"values must be .* \[nnz, bn, bk\]"),
        (dense, metadata, r"values must be .* \[nnz, bn, bk / 2\]"),
        (compressed, metadata[:1], "metadata must be a contiguous"),
        (compressed, metadata.float(), "metadata must be a contiguous"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            functional.quantized_linear(x, values, pattern, scales, metadata=words)
    flat = make_pattern("full", (6, 4), (64, 16))
    with pytest.raises(InvalidArgumentError, match="2:4 is for bk of 32, 64 or 128"):
        functional.quantized_linear(x[:, :64], compressed, flat, scales, metadata=metadata)


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


@on_every_device
def test_layers_with_scales_inside_and_their_gradients(device: str) -> None:
    layer = make(GROUPED, device=device)
    assert layer.scales is not None and layer.scales.shape == (layer.spec.nnz, 1)
    assert (layer.spec.granularity, layer.activations) == ("block", "float8_e4m3fn")
    x = tokens(2, 70, name=GROUPED, device=device).requires_grad_()
    y = layer(x)
    reference, tolerance = expected(GROUPED, x.detach(), layer.weight.detach(), layer.scales, layer.pattern)
    assert layer.bias is not None
    assert_within(y.detach(), reference + layer.bias.detach().cpu().double(), tolerance + 1e-5)
    grad = randn(*y.shape, dtype=torch.float32, device=device, seed=7)
    y.backward(grad)
    weight = layer.to_linear().weight.detach().double()
    torch.testing.assert_close(x.grad, (grad.double() @ weight).float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(weight.float(), dense_weight(dense_blocks(layer).cpu(), layer.pattern).to(device))


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
    assert not select.multiplies_as_decode(tokens(1), layer_index(make(name)))
    monkeypatch.setattr("tilesparse._ops.products.multiplies_as_decode", lambda x, index: True)
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


def test_configs_and_specs() -> None:
    plain = LayerSpec(shape=(64, 64), block_shape=(32, 32), nnz=2, dtype=torch.float32)
    block: Any = {"block_shape": 128, "granularity": "block"}
    for name, other in (("int8", "float8_e4m3fn"), ("float8_e4m3fn", "int8")):
        config = BlockSparseConfig.w8a8(name)
        assert config.granularity == "feature" and config == BlockSparseConfig.w8a8(
            name, granularity="feature"
        )
        spec = plain.with_storage(name, activations=name)
        assert (spec.granularity, spec.activations) == ("feature", name)
        assert LayerSpec.from_json(spec.to_json()) == spec
        weight_only = plain.with_storage(name)
        assert "activations" not in weight_only.to_json() and weight_only.activations is None
        for options, message in (
            ({"storage": name, "activations": other}, "activations must be None"),
            ({"activations": name}, "activations must be None"),
            ({"storage": name, "activations": 8}, "activations must be None"),
            ({"storage": name, "activations": name, "granularity": "block"}, "granularity must be"),
            ({"storage": name, "granularity": "feature"}, "granularity must be"),
            ({"storage": "int8", "activations": "int8", **block}, "granularity must be"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                BlockSparseConfig(**options)
        with pytest.raises(InvalidArgumentError, match="granularity must be one of"):
            replace(weight_only, granularity="feature")
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
    config = BlockSparseConfig.w8a8("float8_e4m3fn", **block)
    assert config.granularity == "block"
    spec = make(GROUPED).spec
    assert LayerSpec.from_json(spec.to_json()) == spec
    with pytest.raises(InvalidArgumentError, match="granularity must be one of"):
        LayerSpec.from_json({**spec.to_json(), "block_shape": [64, 64], "nnz": 3})


@both
def test_to_storage_there_and_back(name: str) -> None:
    layer = BlockSparseLinear(IN, OUT, density=1, block_shape=32, generator=seeded())
    plain, largest = dense_blocks(layer), layer.to_linear().weight.detach().abs().amax(1)
    for storages in ((name, name), (name, None), (name, name), ("plain", None)):
        layer.to_storage(storages[0], activations=storages[1])
        assert (layer.storage, layer.activations) == storages
        torch.testing.assert_close(dense_blocks(layer), plain, rtol=0.1, atol=0.01)
        if storages[1] is not None:
            torch.testing.assert_close(
                layer.scales, largest / (127 if name == "int8" else 448), rtol=1e-2, atol=0
            )
            assert f"storage={name!r}, activations={name!r}" in repr(layer)
    layer(tokens()).sum().backward()
    assert layer.weight.grad is not None
    exact = make(name)
    before = exact.state_dict()
    assert exact.to_storage(name, activations=name).state_dict().keys() == before.keys()
    for options, message in (
        ({"storage": "plain", "activations": name}, "activations must be None"),
        ({"storage": name, "activations": name, "granularity": "block"}, "granularity must be"),
        ({"storage": name, "granularity": "feature"}, "granularity must be"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            exact.to_storage(**options)
    with pytest.raises(InvalidArgumentError, match="finite"):
        nn.init.constant_(layer.weight, math.inf)
        layer.to_storage(name, activations=name)


def test_there_and_back_and_copies_with_scales_inside() -> None:
    layer = make(GROUPED)
    blocks, x = dense_blocks(layer), tokens(name=GROUPED)
    y = layer(x)
    assert 0 < layer.storage_error < 0.04
    others = [copy.deepcopy(layer), make(GROUPED).requires_grad_(False)]
    others[1].load_state_dict(layer.state_dict())
    for other in others:
        assert torch.equal(other(x), y)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.scales is not None and half.scales.dtype == torch.float32
    torch.testing.assert_close(half(x.bfloat16()).float(), y, rtol=0.1, atol=3)
    reference = ReferenceBlockSparseLinear(layer)(x)
    torch.testing.assert_close(reference, y, rtol=1e-4, atol=1e-3)
    assert torch.equal(layer.to_storage("plain").weight, blocks)


def test_states_with_scales_inside_are_for_such_layers() -> None:
    layer = make(GROUPED)
    by_feature = copy.deepcopy(layer).to_storage("float8_e4m3fn", activations="float8_e4m3fn")
    assert by_feature.spec.granularity == "feature"
    for one, other in ((layer, by_feature), (by_feature, layer)):
        with pytest.raises(RuntimeError, match=r"scales must be .* call to_storage"):
            one.load_state_dict(other.state_dict())


@both
@pytest.mark.parametrize("granularity", ["row", "block"])
def test_states_of_other_scales_are_refused(granularity: str, name: str) -> None:
    """Also those of as many blocks as there are features, which metadata tells apart."""
    full = BlockPattern.full((256, 1024), block_shape=32)  # 256 blocks
    options: Any = {"pattern": full, "generator": seeded()}
    layer = BlockSparseLinear(1024, 256, **options, storage=name, activations=name)
    other = BlockSparseLinear(1024, 256, **options).to_storage(name, granularity=granularity)
    for target, source in ((layer, other), (other, layer)):
        before = {key: tensor.clone() for key, tensor in target.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"scales must be .* call to_storage"):
            target.load_state_dict(source.state_dict())
        target.load_state_dict(before)
        if granularity == "row" and source is other:
            with pytest.raises(RuntimeError, match=r"scales must be .* call to_storage"):
                target.load_state_dict(dict(source.state_dict()))


@every_kind
def test_compiled_and_exported_layers(name: str) -> None:
    model, x = nn.Sequential(make(name).eval(), nn.ReLU()), tokens(name=name)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for some in (x, x[:5]):
        torch.testing.assert_close(compiled(some), model(some))
    gradients = []
    for run in (compiled, model):
        leaf = x.clone().requires_grad_()
        run(leaf).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
    program = torch.export.export(model, (x,), dynamic_shapes={"input": {0: torch.export.Dim("tokens")}})
    for some in (x, x[:3]):
        torch.testing.assert_close(program.module()(some), model(some))


# ---- measured and chosen ----


# ---- what holds layers ----


# Configs of the first of two layers, whose blocks all stay with density 1.
CONFIGS = {name: BlockSparseConfig.w8a8(name, block_shape=32) for name in EIGHT}
CONFIGS |= {f"2:4 {name}": BlockSparseConfig.w8a8(name, block_shape=32, nm=NM) for name in EIGHT}
CONFIGS[GROUPED] = BlockSparseConfig.w8a8("float8_e4m3fn", block_shape=128, granularity="block")


def dense_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 256))


def batch() -> Tensor:
    return randn(TOKENS, 256, dtype=torch.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    model, x, config = dense_model(), batch(), CONFIGS[name]
    sparsify_(model, {"0": config, "2": BlockSparseConfig(1)})
    tilesparse.save(model, tmp_path)
    for other in (tilesparse.load(dense_model, tmp_path), tilesparse.load(dense_model(), tmp_path)):
        assert torch.equal(other(x), model(x)) and other[0].spec == model[0].spec
    half = tilesparse.load(dense_model, tmp_path).bfloat16()
    assert half[0].scales.dtype == torch.float32 and half(x.bfloat16()).dtype == torch.bfloat16
    file = tmp_path / "config.json"
    text = file.read_text()
    assert text.count('"activations"') == 1
    own, scales = config.storage, config.granularity
    for before, after in (
        (f'"activations": "{own}"', '"activations": "int4"'),
        (f'"activations": "{own}"', '"activations": "plain"'),
        (f'"scales": "{scales}"', '"scales": "row"'),
        (f'"scales": "{scales}"', f'"scales": "{"feature" if scales == "block" else "block"}"'),
        ('"version": 2', '"version": 5'),
    ):
        assert before in text
        file.write_text(text.replace(before, after))
        with pytest.raises(CheckpointError):
            tilesparse.load(dense_model, tmp_path)
    without = json.loads(text)
    del without["tilesparse"]["layers"]["0"]["activations"]
    file.write_text(json.dumps(without))
    with pytest.raises(CheckpointError):
        tilesparse.load(dense_model, tmp_path)
