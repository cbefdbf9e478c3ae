"""The models that are measured: transformers in plain PyTorch, with random weights and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilesparse import BlockPattern, BlockSparseLinear, functional
from tilesparse.model import BlockSparseModelPatcher, fuse_mlps_

ROTARY_BASE = 500_000.0  # of Llama 3
LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model and of its input [batch, tokens, hidden].

    ``cached`` is 0, or the positions of a KV cache, the last of which is the input's only token.
    """

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int
    cached: int = 0


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A kind of model, the sizes of blocks it is measured with, and what is done with it."""

    kind: type[nn.Module]
    size: Size
    blocks: tuple[tuple[int, int], ...] = ((64, 64), (128, 128))
    tasks: tuple[str, ...] = ("inference",)

    def with_sizes(self, **sizes: int) -> Architecture:
        """The same with other sizes; a decoder has its ``tokens`` in the cache."""
        if self.size.cached and "tokens" in sizes:
            sizes["cached"] = sizes.pop("tokens")
        return dataclasses.replace(self, size=dataclasses.replace(self.size, **sizes))

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
        """A model whose random weights follow from the seed."""
        torch.manual_seed(seed)
        with device:
            return self.kind(self.size).to(dtype)

    def inputs(self, device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
        """Normal numbers in place of embedded tokens."""
        generator = torch.Generator(device).manual_seed(seed)
        size = (self.size.batch, self.size.tokens, self.size.hidden)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)


class Encoder(nn.Module):
    """Transformer encoder [batch, tokens, hidden] -> the same."""

    norm_first: bool

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(size, self.norm_first) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        if not self.norm_first:
            x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) if self.norm_first else x


class VisionEncoder(Encoder):
    """ViT: every sum is normalised before the next layer reads it, and the last one at the end."""

    norm_first = True


class TextEncoder(Encoder):
    """RoBERTa: the embedded tokens and every sum are normalised."""

    norm_first = False


class EncoderBlock(nn.Module):
    """Attention over all tokens and a perceptron, each added to its input."""

    def __init__(self, size: Size, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.norm_first = size.heads, norm_first
        self.norm1 = nn.LayerNorm(size.hidden)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden)
        self.output = nn.Linear(size.hidden, size.hidden)
        self.norm2 = nn.LayerNorm(size.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(size.hidden, size.mlp), nn.GELU(), nn.Linear(size.mlp, size.hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self._attend(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self._attend(x))
        return self.norm2(x + self.mlp(x))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Llama's decoder blocks [batch, tokens, hidden] -> the same: a whole prompt, or one token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(size) for _ in range(size.layers))
        positions = torch.arange(size.cached or size.tokens)[-size.tokens :]
        for name, table in zip(("cos", "sin"), _rotations(positions, size), strict=True):
            self.register_buffer(name, table)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


class DecoderBlock(nn.Module):
    """Causal attention and a gated perceptron, each added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(size.hidden)
        self.attention = CausalAttention(size)
        self.norm2 = nn.RMSNorm(size.hidden)
        self.mlp = GatedMLP(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class GatedMLP(nn.Module):
    """Llama's perceptron [..., hidden] -> the same, in the form that `BlockSparseMLP` knows."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.mlp, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.mlp, bias=False)
        self.down_proj = nn.Linear(size.mlp, size.hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class GatedPerceptrons(nn.Module):
    """The products of Llama's blocks alone, one after another."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedMLP(size) for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:
        for mlp in self.blocks:
            x = mlp(x)
        return x


class Products(nn.Module):
    """The products of Llama's blocks alone, merged as servers do it: q, k and v, and gate and up."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MergedProducts(size) for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MergedProducts(nn.Module):
    """Four products; the values of q stand for what attention gives."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        merged = size.hidden * (size.heads + 2 * size.kv_heads) // size.heads
        self.qkv = nn.Linear(size.hidden, merged, bias=False)
        self.output = nn.Linear(size.hidden, size.hidden, bias=False)
        self.gate_up = nn.Linear(size.hidden, 2 * size.mlp, bias=False)
        self.down = nn.Linear(size.mlp, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.output(self.qkv(x)[..., : x.shape[-1]])
        gate, up = self.gate_up(attended).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class CausalAttention(nn.Module):
    """Attention with rotary positions, in which groups of heads share keys and values.

    With a KV cache the token is the last one: its keys and values go there, and it attends to all.
    """

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.hidden // size.heads
        self.heads, self.kv_heads = size.heads, size.kv_heads
        self.qkv = nn.Linear(size.hidden, (size.heads + 2 * size.kv_heads) * width, bias=False)
        self.output = nn.Linear(size.hidden, size.hidden, bias=False)
        cache = (size.batch, size.kv_heads, size.cached, width)
        self.register_buffer("keys", torch.randn(cache) if size.cached else None)
        self.register_buffer("values", torch.randn(cache) if size.cached else None)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        if self.keys is None or self.values is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            self.keys[:, :, -1:], self.values[:, :, -1:] = k, v
            y = self._attend_to_cache(q, self.keys, self.values)
        return self.output(y.transpose(1, 2).flatten(2))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, tokens, width]."""
        parts = (self.heads, self.kv_heads, self.kv_heads)
        heads = self.qkv(x).unflatten(-1, (sum(parts), -1)).transpose(1, 2)
        q, k, v = heads.split(parts, dim=1)
        return _rotated(q, cos, sin), _rotated(k, cos, sin), v

    def _attend_to_cache(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The heads of a group are the queries of its keys, so that the cache is read once.

        PyTorch takes cuDNN otherwise, which needs 102 us in place of 30 for one sequence on an H200, and as
        long for 16.
        """
        groups = q.reshape(q.shape[0], self.kv_heads, -1, q.shape[-1])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(groups, keys, values).reshape(q.shape)


def _rotations(positions: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, width] of the angles of both halves of a head."""
    width = size.hidden // size.heads
    frequencies = ROTARY_BASE ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


TASKS = ("inference", "training")
LLAMA = Size(layers=1, hidden=4096, mlp=14336, heads=32, kv_heads=8, batch=1, tokens=8192)
MODELS = {
    "vit": Architecture(VisionEncoder, Size(32, 1280, 5120, 16, 16, batch=64, tokens=257), tasks=TASKS),
    "roberta": Architecture(
        TextEncoder,
        Size(12, 768, 3072, 12, 12, batch=16, tokens=512),
        blocks=((32, 32), (64, 64), (128, 128)),
        tasks=TASKS,
    ),
    "llama-mlp": Architecture(GatedPerceptrons, LLAMA, ((32, 32), (64, 64), (128, 32), (128, 128))),
    "llama-products": Architecture(Products, dataclasses.replace(LLAMA, tokens=1)),
    "llama-prefill": Architecture(Decoder, LLAMA),
    "llama-decode1": Architecture(Decoder, dataclasses.replace(LLAMA, tokens=1, cached=8192)),
    "llama-decode16": Architecture(Decoder, dataclasses.replace(LLAMA, batch=16, tokens=1, cached=8192)),
}


class RandomPatcher(BlockSparseModelPatcher):
    """Keeps blocks of every linear layer at random, scaled so that results keep their variance."""

    def __init__(
        self, density: float, block_shape: tuple[int, int], seed: int, activations: str | None = None
    ) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._activations = activations
        self.add_pattern("", {"density": density, "block_shape": block_shape})

    def new_child_module(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> BlockSparseLinear:
        assert isinstance(module, nn.Linear)
        pattern = BlockPattern.random(
            module.weight.shape,
            block_shape=options["block_shape"],
            density=options["density"],
            generator=self._generator,
        )
        layer = BlockSparseLinear.from_linear(module, pattern=pattern)
        with torch.no_grad():
            layer.weight.mul_(pattern.density**-0.5)
        if self._activations is None:
            return layer
        return layer.to_storage(self._activations, activations=self._activations)


class Float8Linear(nn.Module):
    """A dense layer [..., in_features] -> [..., out_features] as users would pick it instead.

    Rows of its weight and of its input are in float8_e4m3fn, and PyTorch multiplies them, with fast sums. The
    input is rounded by this library, or by code that is to be compiled.
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, compiled: bool) -> None:
        super().__init__()
        self.compiled = compiled
        weight, scales = functional.quantize_activations(linear.weight.detach(), torch.float8_e4m3fn)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales[None])
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        x, shape = x.flatten(0, -2), x.shape[:-1]
        rows, scales = (
            rounded(x) if self.compiled else functional.quantize_activations(x, torch.float8_e4m3fn)
        )
        y = torch._scaled_mm(
            rows,
            self.weight.t(),
            scales[:, None],
            self.scales,
            bias=self.bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return y.unflatten(0, shape)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x in float8_e4m3fn, and what each is to be multiplied by, in PyTorch's operations alone."""
    scales = x.abs().amax(-1).float().clamp(min=1e-12) / LARGEST_FLOAT8
    rows = (x.float() / scales[:, None]).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return rows.to(torch.float8_e4m3fn), scales


def make_float8(model: nn.Module, compiled: bool = False) -> nn.Module:
    """Replaces all linear layers of a model by dense ones in float8."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, Float8Linear(module, compiled))
    return model


def make_sparse(
    model: nn.Module,
    density: float,
    block_shape: tuple[int, int],
    seed: int,
    activations: str | None = None,
    x: Tensor | None = None,
) -> nn.Module:
    """Replaces all linear layers of a model, whose dense weights are freed, and fuses its MLPs.

    ``activations``: "int8" or "float8_e4m3fn", which weights are stored in as well. ``x``: an input, without
    which only an nn.Sequential is fused.
    """
    patcher = RandomPatcher(density, block_shape, seed, activations)
    patcher.patch_model(model)
    fuse_mlps_(model, x)
    return model


def make_dense(model: nn.Module) -> nn.Module:
    """Expands all block-sparse layers of a model: what it should compute."""
    for name, module in list(model.named_modules()):
        if isinstance(module, BlockSparseLinear):
            model.set_submodule(name, module.to_linear())
    return model
