"""Activations in 8 bits: the bits that the definition gives, on every device and instruction set."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn
from torch import Tensor

from tilesparse import functional
from tilesparse._checks import QUANTIZED
from tilesparse.errors import InvalidArgumentError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST = 2.0**-116


def defined(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The definition, in PyTorch's float32 on the CPU."""
    x = x.detach().cpu().float()
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scales = (largest / LARGEST[dtype]).clamp(min=LEAST)
    finite = x.isfinite().all(-1)
    scaled = torch.where(finite[..., None], x * (1 / scales)[..., None], 0)
    values = scaled.round() if dtype == torch.int8 else scaled
    return values.to(dtype), torch.where(finite, scales, math.nan)


def assert_defined(x: Tensor, dtype: torch.dtype) -> None:
    values, scales = functional.quantize_activations(x, dtype)
    expected, expected_scales = defined(x, dtype)
    assert values.dtype == dtype and values.device == x.device and values.is_contiguous()
    assert torch.equal(values.cpu().view(torch.int8), expected.view(torch.int8))
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=0, atol=0, equal_nan=True)


def hostile(features: int, dtype: torch.dtype) -> Tensor:
    """Tokens of zeros, subnormal, smallest and largest numbers, ties, infinities and NaN."""
    limits = torch.finfo(dtype)
    x = randn(16, features, dtype=dtype)
    x[0] = 0
    x[0, 1] = -0.0
    x[1] = limits.smallest_normal / 4
    x[2] *= limits.smallest_normal
    x[3] = limits.max
    x[4] = torch.linspace(-1, 1, features) * (limits.max / 2)
    x[5] = torch.arange(features) % 128 - 0.5
    x[5, -1] = 127
    x[6, 3] = math.inf
    x[7, -1] = -math.inf
    x[8, features // 2] = math.nan
    x[9, 0] = -math.nan
    x[10, 0], x[10, 1] = math.inf, math.nan
    x[11] = 0
    x[11, -1] = -448
    x[12] = torch.linspace(-448, 448, features)
    x[13] = torch.linspace(-(2.0**-5), 2.0**-5, features)  # of which most are subnormal in float8
    x[13, 0] = 448
    x[14] *= min(2.0**-100, 1) if dtype != torch.float16 else 2.0**-10
    x[15, 1:] = 0
    return x


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_bits_are_those_of_the_definition(device: str, source: torch.dtype, dtype: torch.dtype) -> None:
    for features in (16, 48, 768, 1008, 4096, 14336):
        assert_defined(hostile(features, source).to(device), dtype)
    for tokens, features in ((1, 64), (3, 32768 + 16), (2, 70000 // 16 * 16), (700, 48)):
        assert_defined(randn(tokens, features, dtype=source, device=device), dtype)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("source", DTYPES)
def test_every_number_of_16_bits_is_rounded_as_pytorch_does(source: torch.dtype, dtype: torch.dtype) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = numbers.view(source) if source != torch.float32 else numbers.float() / 7
    x = x[x.isfinite() & (x.float().abs() <= LARGEST[dtype])]
    x = torch.cat((x, x.new_full((16 - len(x) % 16,), LARGEST[dtype])))  # the scale is 1
    values, scales = functional.quantize_activations(x, dtype)
    assert scales == 1
    rounded = (x.float().round() if dtype == torch.int8 else x.float()).to(dtype)
    assert torch.equal(values.view(torch.int8), rounded.view(torch.int8))


@pytest.mark.parametrize("device", DEVICES)
def test_views_and_shapes(device: str) -> None:
    x = randn(6, 5, 96, dtype=torch.bfloat16, device=device)
    views = {
        "rows apart": x[..., :64],
        "misaligned": x[..., 3:67],
        "column-major": x.reshape(30, 96).t()[:80].t(),
        "every other": x[:, ::2],
        "one token": x[0, 0],
        "expanded": x[:1, :1].expand(4, 3, 96),
    }
    for view in views.values():
        assert_defined(view, torch.int8)
        assert_defined(view, torch.float8_e4m3fn)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_quantize(device: str) -> None:
    values, scales = functional.quantize_activations(torch.empty(0, 32, device=device))
    assert values.shape == (0, 32) and scales.shape == (0,)
    for dtype in LARGEST:
        torch.full((5,), 7.0, device=device)  # where memory was freed
        assert_defined(torch.empty(5, 0, device=device), dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_traced(device: str) -> None:
    x = randn(4, 64, dtype=torch.float32, device=device)
    torch.library.opcheck(torch.ops.tilesparse.quantize.default, (x, QUANTIZED[torch.int8]))
    compiled: Any = torch.compile(functional.quantize_activations, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(x), functional.quantize_activations(x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_graph_follows_what_it_reads() -> None:
    x = torch.zeros(64, 4096, dtype=torch.bfloat16, device="cuda")
    functional.quantize_activations(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scales = functional.quantize_activations(x)
    x.copy_(randn(64, 4096, dtype=torch.bfloat16))
    values.fill_(77)
    graph.replay()
    for one, other in zip((values, scales), functional.quantize_activations(x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_groups_have_the_bits_of_the_definition(device: str, source: torch.dtype) -> None:
    for shape in ((256,), (1, 128), (5, 384), (2, 3, 1152), (33, 4096)):
        x = randn(*shape, dtype=source, device=device, seed=len(shape))
        flat = x.view(-1, 128)
        flat[-1] = 0
        flat[0, 7] *= 100
        if len(flat) > 2:
            flat[1, 3] = torch.nan
        groups = x.float().cpu().view(*shape[:-1], -1, 128)  # PyTorch does not divide by a number on a GPU
        finite = groups.isfinite().all(-1)
        scales = (groups.abs().amax(-1) / 448).clamp(min=2.0**-116)
        scaled = torch.where(finite[..., None], groups * (1 / scales)[..., None], 0.0)
        values, found = functional.quantize_activations(x, torch.float8_e4m3fn, granularity="group")
        assert torch.equal(values.cpu().float(), scaled.to(torch.float8_e4m3fn).float().view(shape))
        wanted = torch.where(finite, scales, torch.nan)
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
        assert found.stride(-1) % 4 == 0 and (found.dim() == 1 or found.stride(-2) == 1)


def test_bad_arguments_are_named() -> None:
    two = torch.ones(2, 32)
    for x, dtype, granularity, message in (
        (torch.ones(2, 24), torch.int8, "token", "x must be .* multiple of 16 features"),
        (torch.ones(()), torch.int8, "token", "x must be"),
        (two.double(), torch.int8, "token", "x must be float32, float16 or bfloat16"),
        (two, torch.uint8, "token", "dtype must be one of"),
        (torch.zeros(3, 192), torch.float8_e4m3fn, "group", "a multiple of 128 features"),
        (torch.zeros(3, 128), torch.int8, "group", "granularity must be"),
        (torch.zeros(3, 128), torch.float8_e4m3fn, "block", "granularity must be"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            functional.quantize_activations(x, dtype, granularity=granularity)
    with pytest.raises(InvalidArgumentError, match="dtype"):
        torch.ops.tilesparse.quantize(two, 3)
    values, scales = functional.quantize_activations(
        torch.zeros(0, 256), torch.float8_e4m3fn, granularity="group"
    )
    assert values.shape == (0, 256) and scales.shape == (0, 2)
