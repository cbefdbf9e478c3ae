"""``tilesparse demo``: a small GPT on Python's own sources, trained dense and block-sparse side by side."""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._checks import Progress
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..model.replace import sparsify_
from ..nn.linear import BlockSparseLinear
from .command import add_device, parse_block

TEXT_BYTES, VALIDATION_BATCHES, LEARNING_RATE = 8 << 20, 16, 1e-3


class Size(NamedTuple):
    """Shape of the model and of one batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(layers=1, width=64, heads=2, context=32, batch=4),
    "small": Size(layers=3, width=512, heads=8, context=64, batch=8),
    "medium": Size(layers=8, width=1024, heads=16, context=512, batch=16),
    "large": Size(layers=8, width=2048, heads=16, context=1024, batch=8),
}


class Attention(nn.Module):
    """Causal self-attention on [batch, tokens, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inputs, self.output = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map x to the same shape; a token attends to those before."""
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = (
            nn.LayerNorm(width),
            Attention(width, heads),
            nn.LayerNorm(width),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, tokens, width] to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder that predicts the next byte: tokens [batch, context] -> logits [batch, context, 256]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, size.width), nn.Linear(size.width, 256)
        self.positions = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens."""
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))  # type: ignore[no-any-return]


def add_demo(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = command.add_argument
    add("--density", type=float, default=0.25, help="fraction of blocks kept (%(default)s)")
    add("--block", type=parse_block, help="32, or 32x64 for out x in (32; on a GPU 64)")
    add("--size", choices=SIZES, help="size of the model (small; on a GPU medium or large)")
    add("--steps", type=int, help="training steps (80; on a GPU 300)")
    add_device(command)


def run_demo(arguments: argparse.Namespace) -> None:
    """Train a dense and a sparse model on the same batches, in turns, and print the comparison."""
    device, on_gpu = arguments.device, arguments.device.type == "cuda"
    large = on_gpu and torch.cuda.get_device_properties(device).total_memory > 32 << 30
    size = SIZES[arguments.size or ("large" if large else "medium" if on_gpu else "small")]
    steps, (bn, bk) = (
        arguments.steps or (300 if on_gpu else 80),
        arguments.block or ((64, 64) if on_gpu else (32, 32)),
    )
    torch.manual_seed(0)
    text = library_sources()
    train, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    models = {"dense": GPT(size).to(device)}
    models["sparse"] = sparse_copy(models["dense"], arguments.density, (bn, bk))
    dtype = "bfloat16" if on_gpu else "float32"
    print(
        f"GPT of {size.layers} layers, width {size.width}, {size.batch} x {size.context} bytes per step, "
        f"{steps} steps on {len(train) / 1e6:.1f} MB of text\n{4 * size.layers} linear layers made "
        f"block-sparse: density {arguments.density:g}, blocks {bn}x{bk}, {dtype} on {device}"
    )
    optimizers = {name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()}
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1)
        for optimizer in optimizers.values()
    ]
    seconds: dict[str, list[float]] = {name: [] for name in models}
    progress, losses = Progress(steps), dict.fromkeys(models, 0.0)
    for step in range(steps):
        batch = batch_of(train, size, device)
        for name in models if step % 2 else reversed(models):  # a busy machine slows both
            start = time.perf_counter()
            loss = loss_of(models[name], batch)
            optimizers[name].zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers[name].step()
            losses[name] = loss.item()  # waits for the GPU
            seconds[name].append(time.perf_counter() - start)
        for schedule in schedules:
            schedule.step()
        progress.show(step + 1, "  ".join(f"{name} loss {loss:.3f}" for name, loss in losses.items()))
    batches = [batch_of(held_out, size, device) for _ in range(VALIDATION_BATCHES)]
    print(
        table(
            models, {name: statistics.median(some[steps // 10 :]) for name, some in seconds.items()}, batches
        )
    )


def sparse_copy(dense: GPT, density: float, block_shape: tuple[int, int]) -> GPT:
    """Return a copy with block-sparse transformer blocks, initialised anew for their smaller fan-in."""
    sparse, layers = copy.deepcopy(dense), r"blocks\.\d+\.(attention\.(inputs|output)|mlp\.[02])$"
    for layer in sparsify_(sparse, BlockSparseConfig(density, block_shape), layers=layers).skipped:
        raise InvalidArgumentError(f"layer {layer.name!r}: {layer.reason}")
    for module in sparse.modules():
        if isinstance(module, BlockSparseLinear):
            module.reset_parameters()
    return sparse


def library_sources() -> Tensor:
    """Return bytes of the .py files of the running Python, always in the same random order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        file for file in root.rglob("*.py") if not {"site-packages", "dist-packages"} & {*file.parts}
    )
    random.Random(0).shuffle(files)
    text = bytearray()
    while files and len(text) < TEXT_BYTES:
        text += files.pop().read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)


def batch_of(text: Tensor, size: Size, device: torch.device) -> Tensor:
    """Return random windows [batch, context + 1] of the text."""
    starts = torch.randint(len(text) - size.context, (size.batch, 1))
    return text[starts + torch.arange(size.context + 1)].long().to(device)


def loss_of(model: GPT, batch: Tensor) -> Tensor:
    """Return the mean loss in nats per byte."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def table(models: dict[str, GPT], seconds: dict[str, float], batches: list[Tensor]) -> str:
    """Return the comparison, a line for each property."""
    parameters = {name: list(model.parameters()) for name, model in models.items()}
    rows: dict[str, Callable[[str], str]] = {
        "": str,
        "validation loss (nats per byte)": lambda name: (
            f"{statistics.fmean(loss_of(models[name], batch).item() for batch in batches):.3f}"
        ),
        "parameters": lambda name: f"{sum(p.numel() for p in parameters[name]):,}",
        "bytes of weights": lambda name: f"{sum(p.nbytes for p in parameters[name]):,}",
        "time per step": lambda name: f"{1e3 * seconds[name]:.1f} ms",
        "speedup": lambda name: f"{seconds['dense'] / seconds[name]:.2f}x",
    }
    return "\n".join(
        f"{row:32}" + "".join(f"{cell(name):>16}" for name in models) for row, cell in rows.items()
    )
