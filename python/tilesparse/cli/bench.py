"""``tilesparse bench``: time one layer against torch.nn.functional.linear."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import functional
from ..nn.linear import BlockSparseLinear
from ..pattern.block_pattern import BlockPattern
from .options import DTYPES, add_device, add_layer, chosen_ops, describe_layer

ROUNDS = 9
ROUND_SECONDS = 0.01


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_layer(command)
    add_device(command)


def main(arguments: argparse.Namespace) -> None:
    """Print times of one layer: dense, sparse with the policy "dense", and sparse.

    The speedup and η = t_dense · density / t_sparse belong to the last.
    """
    device = arguments.device
    pattern = _pattern(arguments)
    print(f"{describe_layer(arguments)}, on {device}")
    print(f"{'':9}{'dense':>12}{'policy=dense':>15}{'sparse':>12}{'speedup':>10}{'η':>7}")
    for op in chosen_ops(arguments):
        products = _products(pattern, op, arguments.tokens, DTYPES[arguments.dtype], device)
        dense, materialized, sparse = _median_seconds(products, device)
        print(
            f"{op:9}{1e3 * dense:9.3f} ms{1e3 * materialized:12.3f} ms{1e3 * sparse:9.3f} ms"
            f"{dense / sparse:9.2f}x{dense / sparse * pattern.density:7.2f}"
        )


def _pattern(arguments: argparse.Namespace) -> BlockPattern:
    return BlockPattern.random(
        (arguments.out_features, arguments.in_features),
        block_shape=arguments.block,
        density=arguments.density,
        generator=torch.Generator().manual_seed(0),
    )


def _products(
    pattern: BlockPattern, op: str, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], Tensor], ...]:
    """Return calls of one product on random operands: dense, by a layer with the policy "dense", sparse."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    x, y = randn(tokens, pattern.in_features), randn(tokens, pattern.out_features)
    weight, values = randn(*pattern.shape), randn(pattern.nnz, *pattern.block_shape)
    layer = BlockSparseLinear(
        pattern.in_features,
        pattern.out_features,
        bias=False,
        pattern=pattern,
        policy="dense",
        device=device,
        dtype=dtype,
    )
    if op == "forward":
        layer.requires_grad_(False)
        return (
            lambda: F.linear(x, weight),
            lambda: layer(x),
            lambda: functional.linear(x, values, pattern),
        )
    if op == "dgrad":  # its dense weight is still there from the forward pass
        return (
            lambda: y @ weight,
            lambda: y @ weight,
            lambda: functional.dds(y, values, pattern, transpose=False),
        )
    result = layer(x)
    return (
        lambda: y.t() @ x,
        lambda: torch.autograd.grad(result, layer.weight, y, retain_graph=True)[0],
        lambda: functional.sdd(y, x, pattern),
    )


def _median_seconds(functions: Sequence[Callable[[], Tensor]], device: torch.device) -> list[float]:
    """Return the median time of each call, measured in turns so that a busy machine slows all of them."""
    for function in functions:
        _seconds(function, 3, device)
    calls = [max(1, round(ROUND_SECONDS / _seconds(function, 1, device))) for function in functions]
    rounds = [
        [_seconds(function, count, device) for function, count in zip(functions, calls, strict=True)]
        for _ in range(ROUNDS)
    ]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _seconds(function: Callable[[], Tensor], calls: int, device: torch.device) -> float:
    """Return the mean time of a call."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
