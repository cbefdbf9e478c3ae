"""Times of a lone layer that looks for writes which PyTorch does not count, and of one that does not.

    python benchmarks/bench_looks.py --output looks.json

A lone layer meets the clock in every call. Both are one layer in one process; they take turns. Medians of all
turns: of a call when many follow each other for a quarter of a second, comparisons included; of the host's
time for a call; and of the GPU's for one with a cold L2 cache. On a CPU nothing is looked for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Timer, host_batch, parsed, positive, recording, result_parser, run_benchmark, warm_up
from torch import Tensor

from tilesparse import BlockSparseLinear
from tilesparse._runtime.device import KNOWN
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.nn.weight import layer_index

LAYERS = ((4096, 4096, 64), (28672, 8192, 32), (28672, 8192, 64))  # output and input features, block size
SECONDS = 0.25  # of calls in a row: several intervals between comparisons
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
TIMES = ("call_us", "host_us", "device_us")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if the GPU gave up."""
    parser = result_parser(__doc__, "looks.json", device=True)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 16], help="(%(default)s)")
    parser.add_argument("--density", type=float, default=0.25, help="(%(default)s)")
    parser.add_argument("--rounds", type=positive, default=15, help="turns of each (%(default)s)")
    return run_benchmark(parsed(parser, argv), _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    if arguments.device == "cuda":
        warm_up()
    timer = Timer(arguments.device)
    for out_features, in_features, block in LAYERS:
        options: dict[str, Any] = {"device": arguments.device, "dtype": DTYPES[arguments.device]}
        generator = torch.Generator().manual_seed(0)
        layer = BlockSparseLinear(
            in_features,
            out_features,
            bias=False,
            density=arguments.density,
            block_shape=block,
            generator=generator,
            **options,
        )
        for tokens in arguments.tokens:
            case = {"out": out_features, "in": in_features, "block": block, "tokens": tokens, "results": []}
            document["cases"].append(case)
            x = torch.randn(tokens, in_features, **options)
            with recording(case, f"{out_features}x{in_features} b{block}, {tokens}"), torch.inference_mode():
                case["results"] += _measure(layer, x, timer, arguments.rounds)


def _measure(layer: BlockSparseLinear, x: Tensor, timer: Timer, rounds: int) -> list[dict[str, Any]]:
    def call() -> Tensor:
        y: Tensor = layer(x)
        return y

    turns: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for number in range(rounds + 1):  # the first is left out
        for looks in (True, False) if number % 2 else (False, True):
            _look(layer, looks)
            times = _row(call), host_batch(call), timer.microseconds(call, 100)
            turns[looks].append(times)
    _look(layer, True)
    medians = {
        looks: [statistics.median(times) for times in zip(*rows[1:], strict=True)]
        for looks, rows in turns.items()
    }
    for name, ours, without in zip(TIMES, medians[True], medians[False], strict=True):
        print(f"  {tuple(x.shape)} {name:9} {ours:8.2f} us, without {without:8.2f} us, {ours / without:.4f}")
    return [
        {"contender": "with" if looks else "without", **dict(zip(TIMES, times, strict=True))}
        for looks, times in medians.items()
    ]


def _look(layer: BlockSparseLinear, looks: bool) -> None:
    """Have calls read the clock, or not."""
    layer(torch.zeros(1, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device))
    index = layer_index(layer)
    entry = prepared(index)
    KNOWN.keep(index, entry, entry._copies_at(), entry._use if looks else None)


def _row(call: Callable[[], Tensor]) -> float:
    """Microseconds of one of the calls that follow each other for some time."""
    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        for _ in range(100):
            call()
        calls += 100
    wait()
    return 1e6 * (time.perf_counter() - start) / calls


if __name__ == "__main__":
    sys.exit(main())
