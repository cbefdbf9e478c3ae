"""Layers of encoders of texts: the native operator against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilesparse import BlockPattern, BlockSparseMatrix
from tilesparse._ops.encoder import Encoder, EncoderLayer, EncoderNorm, EncoderWeight
from tilesparse._runtime import launch

EIGHT_BITS = [
    kernel.name for kernel in launch.known_kernels() if kernel.device == 0 and kernel.dtypes >> 5 & 1
]


def weight(out: int, features: int, density: float, block: int, bias: bool = True) -> EncoderWeight:
    grid = out // block, features // block
    kept = torch.rand(grid) < density
    pattern = BlockPattern.from_block_mask(kept, block_shape=block)
    values = torch.randint(-127, 128, (pattern.nnz, block, block), dtype=torch.int8)
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
    block: int = 16,
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
    ],
    ids=["bert", "modernbert", "mpnet", "wide"],
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
