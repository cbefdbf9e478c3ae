"""Times a layer's forward product under each policy, to see what "auto" gains and loses.

    python benchmarks/bench_policy.py --output policy.json

Calls are replayed in CUDA graphs. The summary has, for "sparse" and "auto", the time above that of the better
of sparse and dense.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import contenders
import torch
from harness import (
    CudaTimer,
    budgeted_parser,
    parsed,
    recording,
    run_benchmark,
    warm_up,
    within_budget,
)
from problems import Case, Problem, Shape

from tilesparse import functional

POLICIES = ("sparse", "dense", "auto")
TOKENS = (1, 64, 512, 2048, 8192)
LAYERS = ((768, 3072), (4096, 4096), (14336, 4096), (4096, 14336))
BLOCKS = ((32, 32), (64, 64), (128, 128))
DENSITIES = (0.25, 0.5, 0.75, 0.9, 1.0)
REPETITIONS = 15


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if the GPU gave up."""
    arguments = parsed(budgeted_parser(__doc__, "policy.json", 240.0), argv)
    with torch.no_grad():
        return run_benchmark(arguments, _run)


def _run(arguments: Any, document: dict[str, Any]) -> None:
    start, timer = time.monotonic(), CudaTimer()
    warm_up()
    for case in within_budget(_cases(), arguments, document, start):
        record, result = case.record(), {"contender": "tilesparse"}
        record["results"].append(result)
        document["cases"].append(record)
        with recording(result, str(case)):
            result |= _measure(Problem(case, 0), timer)
    document["summary"] = _summary([case["results"][0] for case in document["cases"]])
    for policy, row in document["summary"].items():
        print(f"{policy:7} above the better of the two: {row}")


def _cases() -> list[Case]:
    """Density varies fastest."""
    shapes = [Shape(f"{m}x{n}x{k}", m, n, k) for m, (n, k) in product(TOKENS, LAYERS)]
    return [
        Case("dds_nt", "bf16", shape, block, density, "random", "row")
        for shape, block, density in product(shapes, BLOCKS, DENSITIES)
    ]


def _measure(problem: Problem, timer: CudaTimer) -> dict[str, Any]:
    x, values, pattern = problem.x, problem.values, problem.pattern
    times = {}
    for policy in POLICIES:
        times[f"{policy}_us"] = _time(lambda p=policy: functional.linear(x, values, pattern, policy=p), timer)
    return times | {"cublas_us": _time(contenders.dense(problem), timer)}


def _time(call: Any, timer: CudaTimer) -> float:
    call()
    graph = torch.cuda.CUDAGraph()  # or several kernels would be timed at the speed of the host
    with torch.cuda.graph(graph):
        call()
    return round(timer.microseconds(graph.replay, REPETITIONS), 2)  # type: ignore[arg-type]


def _summary(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For "sparse" and "auto": the mean and the largest loss, and the part of cases that lose over 2 %."""
    summary = {}
    for policy in ("sparse", "auto"):
        losses = [
            result[f"{policy}_us"] / min(result["sparse_us"], result["dense_us"]) - 1
            for result in results
            if "unavailable" not in result
        ]
        summary[policy] = {
            "mean": round(statistics.fmean(losses), 4),
            "largest": round(max(losses), 4),
            "above_2_percent": round(sum(loss > 0.02 for loss in losses) / len(losses), 4),
        }
    return summary


if __name__ == "__main__":
    sys.exit(main())
