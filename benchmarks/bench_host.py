"""Times of the host for one call of a layer: BlockSparseLinear against torch.nn.Linear.

    python benchmarks/bench_host.py --output host.json
    python benchmarks/bench_host.py --activations int8 --tokens 128 --output host_int8.json

Both layers are so small that a GPU keeps up with the host. They take turns; each turn is many calls that are
asked for without waiting in between, and its time that of the host for one of them. Medians of all turns.
On a CPU the product itself is part of the time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from harness import host_batch, parsed, positive, recording, result_parser, run_benchmark
from torch import Tensor, nn

from tilesparse import BlockSparseLinear

FEATURES = 256
DENSITY, BLOCK_SHAPE = 0.25, (32, 32)
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
# Contexts of the calls, and True with a backward pass.
MODES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool]] = {
    "inference": (torch.inference_mode, False),
    "no_grad": (torch.no_grad, False),
    "forward": (torch.enable_grad, False),
    "forward+backward": (torch.enable_grad, True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if the GPU gave up."""
    parser = result_parser(__doc__, "host.json", device=True, seed=True)
    parser.add_argument("--tokens", type=positive, default=16, help="(%(default)s)")
    parser.add_argument("--activations", choices=("int8", "float8_e4m3fn"), help="multiply in 8 bits")
    parser.add_argument("--rounds", type=positive, default=25, help="turns of each layer (%(default)s)")
    arguments = parsed(parser, argv)
    return run_benchmark(arguments, _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    torch.manual_seed(arguments.seed)
    options = {"device": arguments.device, "dtype": DTYPES[arguments.device]}
    dense = nn.Linear(FEATURES, FEATURES, **options)
    sparse = BlockSparseLinear.from_linear(dense, DENSITY, block_shape=BLOCK_SHAPE)
    if arguments.activations is not None:
        sparse.to_storage(arguments.activations, activations=arguments.activations)
    x = torch.randn(arguments.tokens, FEATURES, **options)
    for mode in MODES:
        case: dict[str, Any] = {
            "mode": mode,
            "device": arguments.device,
            "tokens": arguments.tokens,
            "features": FEATURES,
            "activations": arguments.activations,
            "results": [],
        }
        document["cases"].append(case)
        with recording(case, mode):
            case["results"].append(_measure(mode, sparse, dense, x, arguments.rounds))


def _measure(mode: str, sparse: nn.Module, dense: nn.Module, x: Tensor, rounds: int) -> dict[str, Any]:
    grad_mode, backward = MODES[mode]
    with grad_mode():
        calls = [_call(layer, x, backward) for layer in (sparse, dense)]
        for call in calls:
            host_batch(call)  # plans are made, kernels loaded
        turns = [[host_batch(call) for call in calls] for _ in range(rounds)]
    ours, theirs = (statistics.median(times) for times in zip(*turns, strict=True))
    print(f"  {mode:18} {ours:8.2f} us, dense {theirs:8.2f} us, ratio {ours / theirs:5.2f}", flush=True)
    return {
        "contender": "tilesparse",
        "host_us": round(ours, 3),
        "dense_host_us": round(theirs, 3),
        "ratio": round(ours / theirs, 4),
    }


def _call(layer: nn.Module, x: Tensor, backward: bool) -> Callable[[], object]:
    """One call on activations of its own, which require a gradient as those in a model do."""
    x = x.clone().requires_grad_(torch.is_grad_enabled())
    if not backward:
        return lambda: layer(x)
    gradient = torch.ones_like(layer(x))
    return lambda: layer(x).backward(gradient)


if __name__ == "__main__":
    sys.exit(main())
