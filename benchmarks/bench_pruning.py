"""What finding the sparsity takes on a GPU: pruning a decoder block, and patterns that move in training.

    python benchmarks/bench_pruning.py --output pruning.json

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import (
    CudaTimer,
    HostTimer,
    parsed,
    positive,
    recording,
    run_benchmark,
    steady_times,
    write_json,
)
from models import LLAMA
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from tilesparse import BlockSparseLinear
from tilesparse.cli.demo import synchronize
from tilesparse.prune import prune_model
from tilesparse.train import PatternSchedule, block_gradient_norms

METHODS: dict[str, dict[str, Any]] = {
    "obs": {},
    "wanda": {"method": "wanda"},
    "obs, no refit": {"refit": False},
}
SCHEDULES: dict[str, dict[str, Any]] = {  # what grows blocks
    "set": {"grow": "random"},
    "rigl": {"grow": "gradient"},
}
EVERY = 100  # steps between two rewirings, of which the share of the time is told
LAUNCH_SECONDS = 0.01  # the host needs less for a step that rewires
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if the GPU gave up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("pruning.json"), help="as JSON (%(default)s)")
    add("--device", choices=DTYPES, default="cuda", help="cpu only tries the script (%(default)s)")
    add("--hidden", type=positive, default=LLAMA.hidden, help="features of the decoder block (%(default)s)")
    add("--mlp", type=positive, default=LLAMA.mlp, help="features inside its perceptron (%(default)s)")
    add("--heads", type=positive, default=LLAMA.heads, help="a quarter of them have keys (%(default)s)")
    add("--batches", type=positive, default=16, help="of calibration (%(default)s)")
    add("--tokens", type=positive, default=4096, help="of such a batch (%(default)s)")
    add("--step-tokens", type=positive, default=8192, help="of a training step (%(default)s)")
    add("--block", type=positive, default=64, help="rows and columns of a block (%(default)s)")
    add("--density", type=float, default=0.5, help="of blocks (%(default)s)")
    add("--repetitions", type=positive, default=20, help="of a step (%(default)s)")
    add("--seed", type=int, default=0, help="of weights, patterns and data (%(default)s)")
    add("--commit", help="of the sources (default: ask git)")
    arguments = parsed(parser, argv)
    return run_benchmark(arguments, _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    for section, (measure, name, values) in SECTIONS.items():
        case: dict[str, Any] = {"case": section, "results": []}
        document["cases"].append(case)
        for value in values:
            result = {name: value}
            case["results"].append(result)
            with recording(result, section):
                result |= measure(value, arguments)
            print(f"  {section}: {result}", flush=True)
            write_json(arguments.output, document)


def _pruned(method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds to prune the seven linear layers of a block that was trained on nothing."""
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.mlp,
        num_attention_heads=arguments.heads,
        num_key_value_heads=max(1, arguments.heads // 4),
        num_hidden_layers=1,
        vocab_size=32,
    )
    options = {"device": arguments.device, "dtype": DTYPES[arguments.device]}
    model = LlamaModel(config).to(**options)
    shape = 1, arguments.tokens, arguments.hidden
    batches = [
        {"inputs_embeds": torch.randn(shape, **options), "use_cache": False} for _ in range(arguments.batches)
    ]
    others = _reset_peak(arguments)
    start = time.perf_counter()
    report = prune_model(
        model, batches, density=arguments.density, block_shape=arguments.block, **METHODS[method]
    )
    synchronize(torch.device(arguments.device))
    return {
        "seconds": round(time.perf_counter() - start, 3),
        "layers": len(report.layers),
        "tokens": arguments.batches * arguments.tokens,
        "error": sum(layer.error for layer in report.layers) / len(report.layers),
        "peak_bytes": _peak(arguments, others),
    }


def _rewired(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a training step that rewires, and of one that does not."""
    plain, moving = (_step(arguments, method) for method in (None, SCHEDULES[name]))
    timer = _timer(arguments)
    times = steady_times(moving, plain, timer, arguments.repetitions)
    step = sum(times.dense_us) / 2
    return {
        "rewiring_us": times.sparse_us - step,
        "step_us": step,
        "share": (times.sparse_us - step) / (EVERY * step),
        "every": EVERY,
        "host_us": _host_microseconds(moving, arguments),
        "step_host_us": _host_microseconds(plain, arguments),
        "unsteady": times.unsteady,
    }


def _host_microseconds(call: Callable[[], Tensor], arguments: argparse.Namespace) -> float:
    """Median time until a call returns that begins on an idle GPU."""
    times = []
    for _ in range(arguments.repetitions):
        synchronize(torch.device(arguments.device))
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def _step(arguments: argparse.Namespace, schedule: dict[str, Any] | None) -> Callable[[], Tensor]:
    """One step of a layer with the fused AdamW, which rewires where there is a schedule."""
    torch.manual_seed(arguments.seed)
    options = {"device": arguments.device, "dtype": DTYPES[arguments.device]}
    shape = {"density": arguments.density, "block_shape": arguments.block}
    layer = BlockSparseLinear(arguments.hidden, arguments.mlp, bias=False, **shape, **options)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, fused=True)
    patterns = None if schedule is None else PatternSchedule(layer, optimizer, every=1, **schedule)
    x = torch.randn(arguments.step_tokens, arguments.hidden, requires_grad=True, **options)
    gradient = torch.randn(arguments.step_tokens, arguments.mlp, **options)

    def step() -> Tensor:
        layer(x).backward(gradient)
        optimizer.step()
        if patterns is not None:
            patterns.step()
        optimizer.zero_grad()
        x.grad = None
        return layer.weight

    return step


def _normed(norm: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of norms of all blocks of a dense gradient, and of the dense gradient."""
    torch.manual_seed(arguments.seed)
    options = {"device": arguments.device, "dtype": DTYPES[arguments.device]}
    dy, x = (torch.randn(arguments.step_tokens, n, **options) for n in (arguments.mlp, arguments.hidden))
    times = steady_times(
        lambda: block_gradient_norms(dy, x, arguments.block, norm=norm),
        lambda: dy.T @ x,
        _timer(arguments),
        arguments.repetitions,
    )
    others = _reset_peak(arguments)
    block_gradient_norms(dy, x, arguments.block, norm=norm)
    return {
        "norms_us": times.sparse_us,
        "dense_gradient_us": sum(times.dense_us) / 2,
        "unsteady": times.unsteady,
        "peak_bytes": _peak(arguments, others),
        "dense_gradient_bytes": dy.shape[1] * x.shape[1] * x.itemsize,
    }


def _timer(arguments: argparse.Namespace) -> CudaTimer | HostTimer:
    return CudaTimer(launch_seconds=LAUNCH_SECONDS) if arguments.device == "cuda" else HostTimer()


def _reset_peak(arguments: argparse.Namespace) -> int:
    """Bytes that are in use, beside which `_peak` counts."""
    if arguments.device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(arguments: argparse.Namespace, others: int) -> int | None:
    return torch.cuda.max_memory_allocated() - others if arguments.device == "cuda" else None


Measure = Callable[[Any, argparse.Namespace], dict[str, Any]]
SECTIONS: dict[str, tuple[Measure, str, Iterable[Any]]] = {  # what is measured, and of which arguments
    "pruning": (_pruned, "method", METHODS),
    "rewiring": (_rewired, "schedule", SCHEDULES),
    "norms": (_normed, "norm", (1, 2)),
}


if __name__ == "__main__":
    sys.exit(main())
