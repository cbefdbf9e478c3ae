"""Scales inside of the sums: float8 with one for 128 features of a token, and one for each block."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    DEVICES,
    FUNCTIONS,
    PATTERNS,
    assert_within,
    dense_weight,
    make_pattern,
    randn,
    random_values,
    rounded,
    seeded,
)
from torch import Tensor, nn

import tilesparse
from tilesparse import BlockPattern, BlockSparseConfig, BlockSparseLinear, functional, sparsify_, storage
from tilesparse.config import LayerSpec
from tilesparse.errors import InvalidArgumentError
from tilesparse.export import decompositions
from tilesparse.nn import ReferenceBlockSparseLinear, from_block_scales

FLOAT8 = torch.float8_e4m3fn
RESULTS = [torch.float32, torch.float16, torch.bfloat16]
SIDE, GRID = 128, (3, 5)
OUT, IN = GRID[0] * SIDE, GRID[1] * SIDE
OPS: Any = torch.ops.tilesparse
# Without the one that looks for writes by a product of each operand, which PyTorch has not for float8.
CHECKS = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]

on_every_device = pytest.mark.parametrize("device", DEVICES)


def some_pattern(name: str = "random 50%") -> BlockPattern:
    return make_pattern(name, GRID, (SIDE, SIDE))


def stored(pattern: BlockPattern, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Blocks of magnitudes that differ, so that it shows which scale a block has."""
    values = random_values(pattern, dtype=torch.float32)
    values = values * 0.25 ** torch.arange(pattern.nnz).remainder(5)[:, None, None]
    quantized, scales = storage.quantize_weights(values, FLOAT8, granularity="block")
    return quantized.to(device), scales[:, None].to(device)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 1) -> Tensor:
    """Groups of magnitudes that differ."""
    x = randn(*(shape or (70,)), IN, dtype=torch.float32, device="cpu", seed=seed)
    groups = x.view(*x.shape[:-1], GRID[1], SIDE)
    return (groups * 0.5 ** torch.arange(GRID[1])[:, None]).view(x.shape).to(device, dtype)


def expected(x: Tensor, values: Tensor, scales: Tensor, pattern: BlockPattern) -> tuple[Tensor, Tensor]:
    """The product of the same operands in float64, and how far off sums in float32 may be."""
    x_values, x_scales = (
        each.cpu().double() for each in functional.quantize_activations(x, FLOAT8, granularity="group")
    )
    left = x_values * x_scales.repeat_interleave(SIDE, -1)
    right = dense_weight(values.cpu().double() * scales.cpu().double()[..., None], pattern)
    unit = 2**-12 / 32 if x.is_cuda else 2**-24
    return left @ right.t(), (IN + 16) * unit * (left.abs() @ right.abs().t())


def layer_of(device: str = "cpu", dtype: torch.dtype = torch.float32) -> BlockSparseLinear:
    layer = BlockSparseLinear(IN, OUT, pattern=some_pattern(), generator=seeded(), dtype=dtype)
    return layer.to_storage("float8_e4m3fn", granularity="block", activations="float8_e4m3fn").to(device)


# ---- products ----


@pytest.mark.parametrize("dtype", RESULTS)
@on_every_device
def test_products_are_those_of_the_same_operands(device: str, dtype: torch.dtype) -> None:
    for name in PATTERNS:
        pattern = some_pattern(name)
        values, scales = stored(pattern, device)
        x = tokens(dtype=dtype, device=device)
        y = functional.quantized_linear(x, values, pattern, scales)
        assert y.dtype == dtype and y.is_contiguous()
        reference, tolerance = expected(x, values, scales, pattern)
        assert_within(y, reference, rounded(reference, tolerance, dtype))


@pytest.mark.parametrize("count", [1, 3, 9, 65, 130, 600])
def test_numbers_of_tokens_and_layouts(count: int) -> None:
    pattern = some_pattern()
    values, scales = stored(pattern)
    wide = torch.cat((tokens(count), tokens(count, seed=2)), 1)
    for x in (tokens(count), wide[:, IN:], tokens(2 * count)[::2], tokens(IN, count).mT[..., :IN]):
        x = x if x.shape[-1] == IN else tokens(count)
        for column_major in (False, True):
            y = functional.quantized_linear(x, values, pattern, scales, column_major_output=column_major)
            reference, tolerance = expected(x, values, scales, pattern)
            assert_within(y, reference, tolerance)


@on_every_device
def test_bias_activation_residual_and_gate(device: str) -> None:
    pattern = some_pattern()
    values, scales = stored(pattern, device)
    x, bias = tokens(device=device), randn(OUT, dtype=torch.float32, device=device, seed=3)
    other = randn(70, OUT, dtype=torch.float32, device=device, seed=4)
    sums, tolerance = expected(x, values, scales, pattern)
    sums = sums + bias.cpu().double()
    for name, function in FUNCTIONS.items():
        y = functional.quantized_linear(x, values, pattern, scales, bias, name, residual=other)
        loose = 1.2 * tolerance + 2**-20 * (1 + sums.abs() + other.cpu().abs())
        assert_within(y, function(sums) + other.cpu(), loose)
        y = functional.quantized_linear(x, values, pattern, scales, bias, name, gate=other)
        gate = function(other.cpu().double())
        assert_within(y, sums * gate, (tolerance + 2**-20 * sums.abs()) * (gate.abs() + 2**-18))


def test_each_scale_is_that_of_its_group_and_block() -> None:
    """Small integers and powers of two, of which all sums are exact."""
    pattern = some_pattern()
    values = torch.randint(-1, 2, (pattern.nnz, SIDE, SIDE), generator=seeded()).to(FLOAT8)
    x_values = torch.randint(-1, 2, (70, IN), generator=seeded(1)).to(FLOAT8)
    x_scales = 2.0 ** torch.randint(-2, 3, (70, GRID[1]), generator=seeded(2))
    scales = 2.0 ** torch.randint(-2, 3, (pattern.nnz, 1), generator=seeded(3))
    left = x_values.double() * x_scales.double().repeat_interleave(SIDE, 1)
    wanted = left @ dense_weight(values.double() * scales.double()[..., None], pattern).t()
    index, x = pattern.index_on(torch.device("cpu")), x_values.float()
    for laid in (x_scales, x_scales.t().contiguous().t()):
        rest = None, None, 0, False, scales, None, None, x_values, laid, False
        assert torch.equal(OPS.dds_nt_quantized(x, values, *index, *rest), wanted.float())


def test_a_group_with_an_infinity_spoils_its_token_alone() -> None:
    pattern = some_pattern("full")
    values, scales = stored(pattern)
    x = tokens(5)
    wanted = functional.quantized_linear(x, values, pattern, scales)
    x[3, 200] = torch.inf
    found = functional.quantized_linear(x, values, pattern, scales)
    assert found[3].isnan().all()
    assert torch.equal(found[[0, 1, 2, 4]], wanted[[0, 1, 2, 4]])


def test_what_operands_must_be() -> None:
    pattern = some_pattern()
    values, scales = stored(pattern)
    x = tokens()
    with pytest.raises(InvalidArgumentError, match=r"scales must be a contiguous tensor .*\[nnz, 1\]|scales"):
        functional.quantized_linear(x, values, pattern, scales[1:])
    small = make_pattern("random 50%", (2, IN // 64), (64, 64))
    blocks = random_values(small, dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match="in blocks of 128 x 128"):
        functional.quantized_linear(x, blocks.to(FLOAT8), small, torch.ones(small.nnz, 1))
    with pytest.raises(InvalidArgumentError, match="in blocks of 128 x 128"):
        functional.quantized_linear(x, values.float().to(torch.int8), pattern, scales)
    index, (x_values, x_scales) = (
        pattern.index_on(x.device),
        functional.quantize_activations(x, FLOAT8, granularity="group"),
    )
    for of_x in (x_scales[:, 0], x_scales[:, 1:], x_scales.double()):
        rest = None, None, 0, False, scales, None, None, x_values, of_x, False
        with pytest.raises(InvalidArgumentError, match="x_scales must have shape"):
            OPS.dds_nt_quantized(x, values, *index, *rest)


# ---- quantization ----


@pytest.mark.parametrize("source", RESULTS)
@on_every_device
def test_groups_have_the_bits_of_the_definition(device: str, source: torch.dtype) -> None:
    for shape in ((256,), (1, 128), (5, 384), (2, 3, 1152), (33, 4096)):
        x = randn(*shape, dtype=source, device=device, seed=len(shape))
        flat = x.view(-1, SIDE)
        flat[-1] = 0
        flat[0, 7] *= 100
        if len(flat) > 2:
            flat[1, 3] = torch.nan
        groups = x.float().cpu().unflatten(-1, (-1, SIDE))  # PyTorch does not divide by a number on a GPU
        finite = groups.isfinite().all(-1)
        scales = (groups.abs().amax(-1) / 448).clamp(min=2.0**-116)
        scaled = torch.where(finite[..., None], groups * (1 / scales)[..., None], 0.0)
        values, found = functional.quantize_activations(x, FLOAT8, granularity="group")
        assert torch.equal(values.cpu().float(), scaled.to(FLOAT8).float().view(shape))
        wanted = torch.where(finite, scales, torch.nan)
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
        assert found.stride(-1) % 4 == 0 and (found.dim() == 1 or found.stride(-2) == 1)


def test_bad_groups_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="a multiple of 128 features"):
        functional.quantize_activations(torch.zeros(3, 192), FLOAT8, granularity="group")
    with pytest.raises(InvalidArgumentError, match="granularity must be 'token', or 'group'"):
        functional.quantize_activations(torch.zeros(3, 128), torch.int8, granularity="group")
    with pytest.raises(InvalidArgumentError, match="granularity must be 'token', or 'group'"):
        functional.quantize_activations(torch.zeros(3, 128), FLOAT8, granularity="block")
    values, scales = functional.quantize_activations(torch.zeros(0, 256), FLOAT8, granularity="group")
    assert values.shape == (0, 256) and scales.shape == (0, 2)


@on_every_device
def test_opcheck(device: str) -> None:
    pattern = some_pattern()
    values, scales = stored(pattern, device)
    x = tokens(2, 35, device=device)
    torch.library.opcheck(OPS.quantize_groups.default, (x,), test_utils=CHECKS)
    index, of_x = pattern.index_on(x.device), functional.quantize_activations(x, FLOAT8, granularity="group")
    rest = None, None, 0, False, scales, None, None, *of_x, False
    arguments = x.clone().requires_grad_(), values, *index, *rest
    torch.library.opcheck(OPS.dds_nt_quantized.default, arguments, test_utils=CHECKS)


# ---- layers ----


@on_every_device
def test_layers_and_their_gradients(device: str) -> None:
    layer = layer_of(device)
    assert layer.scales is not None and layer.scales.shape == (layer.spec.nnz, 1)
    assert (layer.spec.granularity, layer.activations) == ("block", "float8_e4m3fn")
    x = tokens(2, 70, device=device).requires_grad_()
    y = layer(x)
    reference, tolerance = expected(x.detach(), layer.weight.detach(), layer.scales, layer.pattern)
    assert layer.bias is not None
    assert_within(y.detach(), reference + layer.bias.detach().cpu().double(), tolerance + 1e-5)
    grad = randn(*y.shape, dtype=torch.float32, device=device, seed=7)
    y.backward(grad)
    weight = layer.to_linear().weight.detach().double()
    torch.testing.assert_close(x.grad, (grad.double() @ weight).float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(weight.float(), dense_weight(layer.plain_values().cpu(), layer.pattern).to(device))


def test_there_and_back_and_copies() -> None:
    layer = layer_of()
    blocks, x = layer.plain_values(), tokens()
    y = layer(x)
    assert 0 < layer.storage_error < 0.04
    others = [copy.deepcopy(layer), layer_of().requires_grad_(False)]
    others[1].load_state_dict(layer.state_dict())
    for other in others:
        assert torch.equal(other(x), y)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.scales is not None and half.scales.dtype == torch.float32
    torch.testing.assert_close(half(x.bfloat16()).float(), y, rtol=0.1, atol=3)
    reference = ReferenceBlockSparseLinear(layer)(x)
    torch.testing.assert_close(reference, y, rtol=1e-4, atol=1e-3)
    assert torch.equal(layer.to_storage("plain").weight, blocks)


def test_joined_layers_and_parts_of_layers() -> None:
    one, other, x = layer_of(), layer_of().to_storage("plain").to_storage("int8"), tokens()
    other.to_storage("float8_e4m3fn", granularity="block", activations="float8_e4m3fn")
    joined = tilesparse.nn.concatenate([one, other])
    assert joined.spec.granularity == "block"
    assert torch.equal(joined(x), torch.cat((one(x), other(x)), -1))
    part = one.cut(rows=(SIDE, OUT), columns=(0, 2 * SIDE))
    assert part.spec.granularity == "block"
    whole = one.to_linear().weight[SIDE:, : 2 * SIDE]
    assert torch.equal(part.to_linear().weight, whole)
    with pytest.raises(InvalidArgumentError, match="scales must be one of"):
        one.cut(rows=(64, OUT))


def test_states_of_other_scales_are_refused() -> None:
    layer = layer_of()
    by_feature = copy.deepcopy(layer).to_storage("float8_e4m3fn", activations="float8_e4m3fn")
    assert by_feature.spec.granularity == "feature"
    for one, other in ((layer, by_feature), (by_feature, layer)):
        with pytest.raises(RuntimeError, match=r"scales must be \[.* call to_storage"):
            one.load_state_dict(other.state_dict())


def test_configs_and_specs() -> None:
    options: Any = {"storage": "float8_e4m3fn", "activations": "float8_e4m3fn", "granularity": "block"}
    config = BlockSparseConfig(block_shape=128, **options)
    assert config.granularity == "block"
    for wrong in ({"block_shape": 64}, {"storage": "int8", "activations": "int8"}):
        with pytest.raises(InvalidArgumentError, match="scales must be 'feature' with 8-bit activations, or"):
            BlockSparseConfig(**{"block_shape": 128, **options, **wrong})
    spec = layer_of().spec
    assert LayerSpec.from_json(spec.to_json()) == spec
    with pytest.raises(InvalidArgumentError, match="scales must be one of"):
        LayerSpec.from_json({**spec.to_json(), "block_shape": [64, 64], "nnz": 3})
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, 2))
    sparsify_(model, {"0": config})
    (layer, _) = model
    assert isinstance(layer, BlockSparseLinear) and layer.spec.granularity == "block"


def test_compiled_exported_and_decomposed() -> None:
    layer, x = layer_of(), tokens()
    y = layer(x)
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), y)
    program = torch.export.export(layer, (x,))
    assert torch.equal(program.module()(x), y)
    plain = program.run_decompositions(decompositions())
    assert not any("tilesparse" in str(node.target) for node in plain.graph.nodes)
    torch.testing.assert_close(plain.module()(x), y, rtol=1e-4, atol=1e-3)


def test_checkpoints(tmp_path: Path) -> None:
    model, x = nn.Sequential(layer_of()), tokens()
    tilesparse.save(model, tmp_path / "saved")
    other = nn.Sequential(nn.Linear(IN, OUT))
    tilesparse.load(other, tmp_path / "saved")
    assert torch.equal(other(x), model(x))
    assert other[0].spec == model[0].spec


# ---- float8 checkpoints with a scale for each block ----


def checkpoint() -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scales, and W in float64."""
    weight = (randn(OUT, IN, dtype=torch.float32, device="cpu", seed=5) * 100).to(FLOAT8)
    scales = torch.rand(GRID, generator=seeded(6)) / 100 + 1e-4
    return (
        weight,
        scales,
        weight.double() * scales.double().repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1),
    )


def test_whole_checkpoints_are_mapped_block_by_block() -> None:
    weight, scales, dense = checkpoint()
    bias = randn(OUT, dtype=torch.float32, device="cpu", seed=8)
    layer = from_block_scales(weight, scales, 1.0, bias=bias, dtype=torch.float32)
    assert torch.equal(layer.to_linear().weight.double(), dense.float().double())
    x = tokens()
    values, of_x = functional.quantize_activations(x, FLOAT8, granularity="group")
    left = values.double() * of_x.double().repeat_interleave(SIDE, 1)
    torch.testing.assert_close(layer(x).double(), left @ dense.t() + bias, rtol=1e-4, atol=1e-3)


def test_the_best_blocks_or_those_of_a_pattern_are_kept() -> None:
    weight, scales, dense = checkpoint()
    blocks = dense.view(GRID[0], SIDE, GRID[1], SIDE).transpose(1, 2)
    layer = from_block_scales(weight, scales, 0.4)
    wanted = BlockPattern.from_scores(blocks.square().sum((2, 3)), block_shape=SIDE, density=0.4)
    assert layer.pattern == wanted and layer.spec.dtype == torch.bfloat16 and layer.bias is None
    pattern = some_pattern()
    layer = from_block_scales(weight, scales, pattern=pattern, dtype=torch.float32)
    assert layer.pattern == pattern
    assert torch.equal(layer.plain_values(), blocks[pattern.block_indices()].float())
    chosen = from_block_scales(weight, scales, 0.2, scores=-scales)
    assert chosen.pattern == BlockPattern.from_scores(-scales, block_shape=SIDE, density=0.2)


def test_other_checkpoints_are_refused() -> None:
    weight, scales, _ = checkpoint()
    for wrong in (weight.float(), weight[:100], weight[None]):
        with pytest.raises(InvalidArgumentError, match="weight must be float8_e4m3fn"):
            from_block_scales(wrong, scales)
    for of_blocks in (scales[1:], scales.double()):
        with pytest.raises(InvalidArgumentError, match="weight_scale_inv must be float32"):
            from_block_scales(weight, of_blocks)
    with pytest.raises(InvalidArgumentError, match="scores must be"):
        from_block_scales(weight, scales, scores=scales[1:])
    with pytest.raises(InvalidArgumentError, match="pattern must have shape"):
        from_block_scales(weight, scales, pattern=make_pattern("full", (2, 2), (64, 64)))
