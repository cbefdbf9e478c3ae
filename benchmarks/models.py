"""The models that are measured: transformers in plain PyTorch, with random weights and inputs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesparse import BlockPattern, BlockSparseLinear, functional
from tilesparse.model import fuse_mlps_

LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model and of its input [batch, tokens, hidden]."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    batch: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A kind of model, the sizes of blocks it is measured with, and what is done with it."""

    kind: type[nn.Module]
    size: Size
    blocks: tuple[tuple[int, int], ...] = ((64, 64), (128, 128))
    tasks: tuple[str, ...] = ("inference",)

    def with_sizes(self, **sizes: int) -> Architecture:
        """The same with other sizes."""
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


TASKS = ("inference", "training")
MODELS = {
    "vit": Architecture(VisionEncoder, Size(32, 1280, 5120, 16, batch=64, tokens=257), tasks=TASKS),
    "roberta": Architecture(
        TextEncoder,
        Size(12, 768, 3072, 12, batch=16, tokens=512),
        blocks=((32, 32), (64, 64), (128, 128)),
        tasks=TASKS,
    ),
    "llama-mlp": Architecture(
        GatedPerceptrons,
        Size(layers=1, hidden=4096, mlp=14336, heads=32, batch=1, tokens=8192),
        blocks=((32, 32), (64, 64), (128, 32), (128, 128)),
    ),
}


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
    generator = torch.Generator().manual_seed(seed)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            shape = module.weight.shape
            pattern = BlockPattern.random(
                shape, block_shape=block_shape, density=density, generator=generator
            )
            layer = BlockSparseLinear.from_linear(module, pattern=pattern)
            with torch.no_grad():
                layer.weight.mul_(pattern.density**-0.5)  # so that results keep their variance
            if activations is not None:
                layer.to_storage(activations, activations=activations)
            model.set_submodule(name, layer)
    fuse_mlps_(model, x)
    return model


def make_dense(model: nn.Module) -> nn.Module:
    """Expands all block-sparse layers of a model: what it should compute."""
    for name, module in list(model.named_modules()):
        if isinstance(module, BlockSparseLinear):
            model.set_submodule(name, module.to_linear())
    return model
