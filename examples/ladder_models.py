"""How the models of ladder.py compute: one byte after others, linear layers in float8, and how long."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilesparse import BlockSparseLinear, BlockSparseModelPatcher
from tilesparse.cli.demo import GPT

LARGEST = 448.0  # of float8_e4m3fn
ROWS = 16  # that a dense product in float8 has a multiple of
FLUSHED = 256 << 20  # bytes, more than the cache of any GPU
WARM_UP_SECONDS = 0.5
REPETITIONS = 31

_cuda: Any = torch.cuda  # parts of it have no types


class Float8Linear(nn.Module):
    """A dense layer in float8 as PyTorch has it: rows of x and of the weight have a scale, and sums are fast.

    Compiled, the scales of x are found and x is rounded in one kernel, with what precedes it where possible.
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = rounded(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        count = tokens.shape[0]
        # cuBLAS has no product of one row for some widths.
        rows, scales = rounded(F.pad(tokens, (0, 0, 0, -count % ROWS)))
        y: Tensor = torch._scaled_mm(
            rows,
            self.weight.t(),
            scales,
            self.scales,
            bias=self.bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return y[:count].view(*x.shape[:-1], -1)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows, features] in float8_e4m3fn, and what each row is to be multiplied by, [rows, 1]."""
    scales = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def in_float8(model: GPT) -> None:
    """Put the linear layers of the blocks into float8, dense and sparse ones, with activations in float8."""
    for name, module in list(model.blocks.named_modules()):
        if isinstance(module, BlockSparseLinear):
            module.to_storage("float8_e4m3fn", activations="float8_e4m3fn")
        elif isinstance(module, nn.Linear):
            model.blocks.set_submodule(name, Float8Linear(module))


def fused(model: GPT) -> None:
    """Let products of sparse layers apply what follows them, and let all of them be sparse."""
    for module in model.modules():
        if isinstance(module, BlockSparseLinear):
            module.policy = "sparse"
    BlockSparseModelPatcher().fuse_mlps(model)


class NextByte(nn.Module):
    """A GPT that reads one byte [1, 1] after all others of its context, whose keys and values are kept."""

    def __init__(self, model: GPT, context: int) -> None:
        super().__init__()
        self.model = model
        self.steps = nn.Sequential(*(Step(block, context) for block in model.blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [1, 1, 256]."""
        model = self.model
        x = model.tokens(tokens) + model.positions[-1:]
        return model.head(model.norm(self.steps(x)))


class Step(nn.Module):
    """A block for one token: keys and values are random but for its own, which are the last."""

    keys: Tensor
    values: Tensor

    def __init__(self, block: Any, context: int) -> None:
        super().__init__()
        self.block: Any = block
        weight = block.norm1.weight
        heads = block.attention.heads
        for name in ("keys", "values"):
            self.register_buffer(name, weight.new_empty(1, heads, context, len(weight) // heads).normal_())

    def forward(self, x: Tensor) -> Tensor:
        attention = self.block.attention
        parts = attention.inputs(self.block.norm1(x)).unflatten(-1, (3, attention.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        self.keys[:, :, -1:], self.values[:, :, -1:] = k, v
        # The fastest that PyTorch has for one query on GPUs.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if x.is_cuda else contextlib.nullcontext():
            y = F.scaled_dot_product_attention(q, self.keys, self.values)
        x = x + attention.output(y.transpose(1, 2).flatten(2))
        x = x + self.block.mlp(self.block.norm2(x))
        return x


def milliseconds(call: Callable[[], Tensor], device: str) -> float:
    """Return the median time of a call; on GPUs of a CUDA graph, with nothing in the cache."""
    if device == "cpu":
        return statistics.median(_host_ms(call) for _ in range(5))
    graph, flush = torch.cuda.CUDAGraph(), torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    stream = _cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        call()
    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(REPETITIONS):
        events = [_cuda.Event(enable_timing=True) for _ in range(2)]
        flush.zero_()
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return float(statistics.median(times))


def _host_ms(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)
