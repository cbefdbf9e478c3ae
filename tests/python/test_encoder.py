"""Layers of encoders of texts: the native operator against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import use_kernel
from torch import Tensor, nn

from tilesparse import BlockPattern, BlockSparseMatrix
from tilesparse._ops.encoder import Encoder, EncoderLayer, EncoderNorm, EncoderWeight
from tilesparse._runtime import launch
from tilesparse.errors import InvalidArgumentError, UnsupportedError

EIGHT_BITS = [
    kernel.name for kernel in launch.known_kernels() if kernel.device == 0 and kernel.dtypes >> 5 & 1
]


def weight(out: int, features: int, density: float, block: Any, bias: bool = True) -> EncoderWeight:
    rows, cols = block if isinstance(block, tuple) else (block, block)
    grid = out // rows, features // cols
    kept = torch.rand(grid) < density
    pattern = BlockPattern.from_block_mask(kept, block_shape=block)
    values = torch.randint(-127, 128, (pattern.nnz, rows, cols), dtype=torch.int8)
    scales = (0.5 + torch.rand(out)) / 74 / math.sqrt(max(features * density, 1))
    return EncoderWeight(pattern, values, scales, torch.randn(out) / 4 if bias else None)


def norm(hidden: int, bias: bool = True) -> EncoderNorm:
    return EncoderNorm(1 + torch.randn(hidden) / 4, torch.randn(hidden) / 4 if bias else None, 1e-5)


def layer(
    hidden: int = 64,
    heads: int = 2,
    features: int = 32,
    inner: int = 128,
    density: float = 0.5,
    block: Any = 16,
    positions: int = 512,
    **options: Any,
) -> EncoderLayer:
    attended, gated = heads * features, options.get("gated", False)
    if options.pop("rotates", False):
        angles = torch.arange(positions)[:, None] * 100 ** (-torch.arange(features // 2) / features)
        options["rotary"] = torch.cat([angles.cos(), angles.sin()], 1)
    if options.pop("biased", False):
        options["position_bias"] = torch.randn(heads, 2 * positions - 1)
    return EncoderLayer(
        heads,
        weight(3 * attended, hidden, density, block),
        weight(hidden, attended, density, block),
        weight((1 + gated) * inner, hidden, density, block),
        weight(hidden, inner, density, block, bias=False),
        norm(hidden),
        norm(hidden, bias=False),
        **options,
    )


def dense(of: EncoderWeight) -> Tensor:
    whole = BlockSparseMatrix(of.values.double(), of.pattern).to_dense()
    return whole * of.scales[:, None].double()


def quantized(x: Tensor) -> Tensor:
    """Activations as products see them; their quantization is not what is tested here."""
    scales = (x.float().abs().amax(-1, keepdim=True) / 127).clamp_min(2.0**-116)
    return (x.float() / scales).round().double() * scales.double()


def linear(x: Tensor, of: EncoderWeight) -> Tensor:
    y = quantized(x) @ dense(of).T
    return y if of.bias is None else y + of.bias


def turned(x: Tensor, rotary: Tensor | None) -> Tensor:
    if rotary is None:
        return x
    cosine, sine = rotary[: x.shape[-2]].double().chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def attention(of: EncoderLayer, x: Tensor) -> Tensor:
    q, k, v = x.view(len(x), 3, of.heads, -1).permute(1, 2, 0, 3)
    tokens, features = q.shape[1:]
    q, k, v = quantized(turned(q, of.rotary)), quantized(turned(k, of.rotary)), quantized(v)
    scores = q @ k.mT * (features**-0.5 if of.scale is None else of.scale)
    distance = torch.arange(tokens) - torch.arange(tokens)[:, None]
    if of.position_bias is not None:
        middle = of.position_bias.shape[1] // 2
        scores = scores + of.position_bias[:, middle + distance].double()
    if of.window:
        scores = scores.masked_fill(distance.abs() > of.window, -math.inf)
    return (scores.softmax(-1) @ v).permute(1, 0, 2).reshape(tokens, -1)


def normed(x: Tensor, of: EncoderNorm) -> Tensor:
    if of.weight is None:
        return x
    bias = None if of.bias is None else of.bias.double()
    return nn.functional.layer_norm(x, x.shape[-1:], of.weight.double(), bias, of.epsilon)


ACTIVATIONS = {
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "none": lambda x: x,
}


def expected(of: EncoderLayer, x: Tensor) -> Tensor:
    activation = ACTIVATIONS[of.activation]
    before = normed(x, of.attention_norm) if of.norm_first else x
    h = x + linear(attention(of, linear(before, of.qkv)), of.output)
    h = h if of.norm_first else normed(h, of.attention_norm)
    inner = linear(normed(h, of.mlp_norm) if of.norm_first else h, of.up)
    if of.gated:
        first, second = inner.chunk(2, -1)
        inner = activation(first) * second
    else:
        inner = activation(inner)
    y = h + linear(inner, of.down)
    return y if of.norm_first else normed(y, of.mlp_norm)


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def by_sentence(layers: list[EncoderLayer], x: Tensor, lengths: list[int]) -> Tensor:
    results = []
    for sentence in x.double().split([length for length in lengths if length]):
        for one in layers:
            sentence = expected(one, sentence)
        results.append(sentence)
    return torch.cat(results)


@pytest.mark.parametrize(
    "lengths",
    [[1], [5], [512], [3, 0, 1, 70, 16], [128] * 3, [7, 300, 49, 1, 1, 1, 64, 90, 33, 8, 100]],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_first": True, "gated": True, "rotates": True, "window": 9, "activation": "silu"},
        {"biased": True, "heads": 3, "features": 16, "activation": "relu"},
        {"features": 64, "hidden": 128, "block": 32, "scale": 0.2},
        {"features": 80, "hidden": 96, "inner": 192, "block": 32, "biased": True, "window": 40},
    ],
    ids=["bert", "modernbert", "mpnet", "wide", "odd"],
)
def test_layers_match_float64(lengths: list[int], options: dict[str, Any]) -> None:
    torch.manual_seed(sum(lengths))
    layers = [layer(**options) for _ in range(2)]
    encoder = Encoder(layers)
    x = torch.randn(sum(lengths), encoder.hidden)
    y = encoder(x, offsets_of(lengths))
    reference = by_sentence(layers, x, lengths)
    error = (y - reference).norm() / reference.norm()
    assert error < 0.02  # codes of 8 bits that fall to the other side of a tie
    for threads in 1, 2, 4:
        assert torch.equal(with_threads(threads, encoder, x, offsets_of(lengths)), y)


def test_kernels_and_threads_agree_bit_by_bit() -> None:
    """Products and scores are exact; the rest differs by rounding alone, and not by threads at all."""
    torch.manual_seed(0)
    layers = [layer(hidden=128, heads=4, inner=256, block=32) for _ in range(2)]
    encoder = Encoder(layers)
    results = []
    for lengths in [20, 7, 1, 0, 11], [130, 2, 75, 64, 9, 33], [8] * 70:
        x, offsets = torch.randn(sum(lengths), 128), offsets_of(lengths)
        alone = torch.cat(
            [
                encoder(one, offsets_of([len(one)]))
                for one in x.split([length for length in lengths if length])
            ]
        )
        for name in EIGHT_BITS:
            with use_kernel(name):
                try:
                    of_threads = [with_threads(threads, encoder, x, offsets) for threads in (1, 2, 4)]
                except UnsupportedError as error:
                    assert "lacks" in str(error) or "grant" in str(error)
                    continue
            assert torch.equal(of_threads[0], of_threads[1]) and torch.equal(of_threads[0], of_threads[2]), (
                name
            )
            error = (of_threads[0] - alone).norm() / alone.norm()
            assert error < 0.01, name
            results.append(name)
        assert torch.equal(encoder(x, offsets), alone)  # whatever the other sentences are
    assert {"cpu_portable", "cpu_avx2"} <= set(results)


@pytest.mark.parametrize(
    "lengths",
    [[90], [20, 0, 1, 60], [130], [33, 97], [60] * 9],
    ids=["features", "features of sentences", "rows", "rows of sentences", "sentences"],
)
@pytest.mark.parametrize("gated", [False, True])
def test_shared_work_gives_the_same_bits(lengths: list[int], gated: bool) -> None:
    """Threads share features of few tokens, steps of few sentences, or sentences."""
    torch.manual_seed(0)
    options: Any = {"gated": gated, "norm_first": gated, "activation": "silu" if gated else "gelu"}
    encoder = Encoder([layer(256, 4, 64, 1024, block=64, **options) for _ in range(4)])
    x, offsets = torch.randn(sum(lengths), 256), offsets_of(lengths)
    alone = with_threads(1, encoder, x, offsets)
    for threads in 2, 3, 4:
        for _ in range(3):
            assert torch.equal(with_threads(threads, encoder, x, offsets), alone)


def with_threads(threads: int, encoder: Encoder, x: Tensor, offsets: Tensor) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return encoder(x, offsets)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("norm_first", [True, False])
def test_what_is_not_finite_spoils_its_sentence_alone(spoilt: float, window: int, norm_first: bool) -> None:
    torch.manual_seed(0)
    lengths, encoder = [6, 20, 9], Encoder([layer(window=window, norm_first=norm_first)])
    x, offsets = torch.randn(35, 64), offsets_of(lengths)
    clean = encoder(x, offsets)
    x[6 + 10, 5] = spoilt
    y = encoder(x, offsets)
    within = (torch.arange(35) - 16).abs() <= (window or 35)
    within &= (torch.arange(35) >= 6) & (torch.arange(35) < 26)
    assert y[within].isnan().all(1).all() or y[within].isnan().any(1).all()
    assert torch.equal(y[~within], clean[~within])
    for threads in 1, 2, 4:
        torch.testing.assert_close(
            with_threads(threads, encoder, x, offsets), y, rtol=0, atol=0, equal_nan=True
        )


def test_large_and_small_numbers() -> None:
    """Scores far apart, rows of zeros and subnormal numbers."""
    torch.manual_seed(0)
    of = layer(norm_first=True, scale=100.0)
    x = torch.randn(40, 64)
    x[3], x[5], x[7] = 0, 1e-41, 1e15
    y = Encoder([of])(x, offsets_of([40]))
    reference = by_sentence([of], x, [40])
    assert y.isfinite().all()
    assert ((y - reference).norm(dim=1) / reference.norm(dim=1)).quantile(0.9) < 0.05


def test_bfloat16_and_strided_rows() -> None:
    torch.manual_seed(0)
    encoder = Encoder([layer(), layer()])
    wide, offsets = torch.randn(50, 100), offsets_of([30, 20])
    x = wide[:, 10:74]
    y = encoder(x, offsets)
    assert torch.equal(y, encoder(x.contiguous(), offsets))
    half = encoder(x.bfloat16(), offsets)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, encoder(x.bfloat16().float(), offsets).bfloat16())


@pytest.mark.parametrize("block", [16, 32])
def test_values_written_in_place_count_and_memory_is_reused(block: int) -> None:
    torch.manual_seed(0)
    of = layer(block=block)
    encoder = Encoder([of])
    x, offsets = torch.randn(12, 64), offsets_of([12])
    before = encoder(x, offsets)
    of.up.values.zero_()
    assert not torch.equal(encoder(x, offsets), before)
    assert torch.equal(encoder(x, offsets), Encoder([of])(x, offsets))


@pytest.mark.parametrize(
    ("block", "density"), [(32, 0.5), (32, 1.0), (32, 0.0), (64, 0.4), ((64, 16), 0.95)], ids=str
)
def test_packed_values_give_the_same_bits(block: Any, density: float) -> None:
    """Tensors of inference mode are not packed, as writes to them are not counted."""
    torch.manual_seed(0)
    of = layer(hidden=192, features=64, inner=320, block=block, density=density)
    parts = {name: getattr(of, name) for name in ("qkv", "output", "up", "down")}
    with torch.inference_mode():
        parts = {name: part._replace(values=part.values.clone()) for name, part in parts.items()}
    packed, read = Encoder([of, of]), Encoder([of._replace(**parts)] * 2)
    for lengths in [1], [16, 3], [40] * 5, [70, 0, 200, 33, 90, 300]:
        x, offsets = torch.randn(sum(lengths), 192), offsets_of(lengths)
        for threads in 1, 2, 3:
            y = with_threads(threads, packed, x, offsets)
            assert torch.equal(y, with_threads(threads, read, x, offsets))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"heads": 8}, r"layers\[0\].head_features must be 16 to 256, got 8"),
        ({"gated": True}, r"layers\[0\].up.pattern.out_features must be 256, got 128"),
        (
            {"heads": 4, "rotary": torch.ones(9, 16)},
            r"head_features must be a multiple of 32 where rotary is given",
        ),
        ({"window": -1}, r"layers\[0\].window must be 0 to 2147483647, got -1"),
        ({"scale": math.inf}, r"layers\[0\].scale must be finite, got inf"),
        (
            {"attention_norm": EncoderNorm(None, None, 1e-5)},
            r"layers\[0\].attention_norm.weight must not be null",
        ),
        (
            {"mlp_norm": EncoderNorm(torch.ones(64), None, 0.0)},
            r"epsilon must be a finite number above 0, got 0",
        ),
        (
            {"mlp_norm": EncoderNorm(torch.ones(63), None, 1e-5)},
            r"mlp_norm.weight must be \[64\], got \[63\]",
        ),
        ({"rotary": torch.ones(9, 31)}, r"layers\[0\].rotary must be \[9, 32\], got \[9, 31\]"),
        ({"position_bias": torch.ones(2, 4)}, r"layers\[0\].position_bias must be \[2, 3\], got \[2, 4\]"),
        ({"output": weight(64, 128, 0.5, 16)}, r"layers\[0\].qkv.pattern.out_features must be 384, got 192"),
    ],
)
def test_layers_that_do_not_fit_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        Encoder([layer()._replace(**change)])


def test_bad_calls() -> None:
    encoder = Encoder([layer(rotates=True, positions=8)])
    x = torch.randn(10, 64)
    for offsets, text in [
        (torch.tensor([0, 11], dtype=torch.int32), r"offsets\[1\] must be tokens, 10, got 11"),
        (torch.tensor([1, 10], dtype=torch.int32), r"offsets\[0\] must be 0, got 1"),
        (torch.tensor([0, 6, 5, 10], dtype=torch.int32), r"offsets must ascend, got 5 after 6 at 2"),
        (torch.tensor([0, 10], dtype=torch.int32), r"layers\[0\].positions must be 10 to 16777216, got 8"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            encoder(x, offsets)
    offsets = offsets_of([5, 5])
    with pytest.raises(InvalidArgumentError, match=r"x must be \[tokens, 64\], got \[10, 63\]"):
        encoder(x[:, 1:], offsets)
    with pytest.raises(InvalidArgumentError, match="x must have dtype float32 or bfloat16"):
        encoder(x.double(), offsets)
    assert encoder(torch.empty(0, 64), offsets_of([0, 0])).shape == (0, 64)
