"""Times the quantization of activations, against a copy of the same memory and PyTorch's own operations.

    python benchmarks/bench_quantize.py --output quantize.json

Bandwidth counts what has to be read and written once: x, the values and a scale for each token. Calls are
replayed in a CUDA graph, whose replay of an empty kernel is measured as well, and find a cold L2 cache.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from harness import CudaTimer, budgeted_parser, parsed, recording, run_benchmark, warm_up, within_budget

from tilesparse import functional

SHAPES = ((1, 4096), (16, 4096), (64, 4096), (512, 768), (2048, 4096), (8192, 4096), (8192, 14336))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
QUANTIZED = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
REPETITIONS = 31


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if the GPU gave up."""
    arguments = parsed(budgeted_parser(__doc__, "quantize.json", 60.0), argv)
    with torch.no_grad():
        return run_benchmark(arguments, _run)


def _run(arguments: Any, document: dict[str, Any]) -> None:
    start, timer = time.monotonic(), CudaTimer()
    warm_up()
    empty = torch.zeros(1, device="cuda")
    document["empty_us"] = _time(lambda: empty.add_(0), timer)
    for case in within_budget([*product(SHAPES, DTYPES, QUANTIZED)], arguments, document, start):
        (tokens, features), source, quantized = case
        result: dict[str, Any] = {"contender": "tilesparse"}
        record = {"tokens": tokens, "features": features, "dtype": source, "quantized": quantized}
        document["cases"].append({**record, "results": [result]})
        with recording(result, str(case)):
            x = torch.randn(tokens, features, dtype=DTYPES[source], device="cuda")
            result |= _measure(x, QUANTIZED[quantized], timer)
            print(f"    {result}", flush=True)


def _measure(x: torch.Tensor, dtype: torch.dtype, timer: CudaTimer) -> dict[str, Any]:
    moved = x.numel() * (x.itemsize + 1) + 4 * x.shape[0]
    # A copy that moves as many bytes, half of them read.
    memory = torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda")
    times = {
        "quantize_us": _time(lambda: functional.quantize(x, dtype), timer),
        "copy_us": _time(lambda: memory[0].copy_(memory[1]), timer),
        "pytorch_us": _time(lambda: _in_pytorch(x, dtype), timer),
    }
    speed = {name.replace("_us", "_gb_s"): round(moved / 1e3 / us, 1) for name, us in times.items()}
    return times | speed


def _in_pytorch(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scales = x.float().abs().amax(-1, keepdim=True) / LARGEST[dtype]
    scaled = x.float() / scales
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def _time(call: Callable[[], Any], timer: CudaTimer) -> float:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return round(timer.microseconds(graph.replay, REPETITIONS), 2)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
