"""Times every kernel of the library that computes a product, for layers and tokens of many sizes.

    python benchmarks/bench_kernels.py --output kernels.json
    python benchmarks/check_estimates.py kernels.json

The library chooses kernels by estimates, which are fitted to such results.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import contenders
import torch
from harness import (
    CudaTimer,
    block_list,
    budgeted_parser,
    density_list,
    name_list,
    parsed,
    poisoned,
    positive,
    recording,
    relative_error,
    run_benchmark,
    subset,
    warm_up,
    within_budget,
)
from problems import OPS, PRECISIONS, Case, Problem, Shape

from tilesparse import Product, choose, prefer, selection

TOKENS = "128,200,256,512,768,1024,1500,2048,3000,4096,6144"
LAYERS = "768x3072,3072x768,896x4864,1280x5120,5120x1280,3072x3072,4096x4096,2048x8192,14336x4096,4096x14336"
DTYPE = "bf16"
REPETITIONS = 9


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if an output was wrong or the GPU gave up."""
    arguments = parsed(_parser(), argv)
    with torch.no_grad():
        return run_benchmark(arguments, _run)


def _parser() -> argparse.ArgumentParser:
    parser = budgeted_parser(__doc__, "kernels.json", 540.0)
    parser.add_argument("--ops", type=subset(OPS), default=("dds_nt",), help=f"of {','.join(OPS)} (dds_nt)")
    parser.add_argument("--tokens", type=_tokens, default=_tokens(TOKENS), help=f"({TOKENS})")
    parser.add_argument("--layers", type=_layers, default=_layers(LAYERS), help=f"out x in ({LAYERS})")
    parser.add_argument(
        "--blocks", type=block_list, default=block_list("32,64,128,16"), help="as 32 or 128x32 (32,64,128,16)"
    )
    parser.add_argument("--densities", type=density_list, default=(0.25, 0.1), help="(.25,.1)")
    parser.add_argument("--seed", type=int, default=0, help="of patterns and data (%(default)s)")
    return parser


def _tokens(text: str) -> tuple[int, ...]:
    return tuple(map(positive, name_list(text)))


def _layers(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(map(_layer, name_list(text)))


def _layer(text: str) -> tuple[int, int]:
    out_features, separator, in_features = text.partition("x")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text} is not out x in")
    return positive(out_features), positive(in_features)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    start = time.monotonic()
    timer = CudaTimer()
    warm_up()
    for case in within_budget(_cases(arguments), arguments, document, start):
        record, result = case.record(), {"contender": "tilesparse"}
        record["results"].append(result)
        document["cases"].append(record)
        with recording(result, str(case)):
            problem = Problem(case, arguments.seed)
            record["density"] = problem.pattern.density
            result |= _measure(problem, timer)
            _print(result)


def _cases(arguments: argparse.Namespace) -> list[Case]:
    """Block and density vary fastest."""
    shapes = [
        Shape(f"{tokens}x{out_features}x{in_features}", tokens, out_features, in_features)
        for tokens, (out_features, in_features) in product(arguments.tokens, arguments.layers)
    ]
    return [
        Case(op, DTYPE, shape, block, density, "random", "row")
        for op, shape, block, density in product(arguments.ops, shapes, arguments.blocks, arguments.densities)
    ]


def _measure(problem: Problem, timer: CudaTimer) -> dict[str, Any]:
    """Microseconds of every kernel, and the largest of their errors."""
    call = contenders.tilesparse_call(problem)
    times, errors = {}, []
    for name in _kernels(problem):
        with prefer(name):
            error = relative_error(poisoned(call), problem.exact)
            errors.append(math.inf if error is None else error)
            times[name] = round(timer.microseconds(call, REPETITIONS), 2)
    largest = max(errors)
    return {
        "dense_us": round(timer.microseconds(contenders.dense(problem), REPETITIONS), 2),
        "kernels_us": times,
        "error": largest if largest < math.inf else None,
        "wrong": largest > PRECISIONS[DTYPE].tolerance,
    }


def _kernels(problem: Problem) -> list[str]:
    """Names of all that compute it on the GPU."""
    case, shape = problem.case, problem.case.shape
    asked = Product(
        shape.in_features,
        shape.out_features,
        shape.tokens,
        problem.pattern.density,
        case.block_shape,
        PRECISIONS[DTYPE].dtype,
        selection.OPS[OPS.index(case.op)],
    )
    return [candidate.kernel for candidate in choose(asked, "cuda").candidates]


def _print(result: dict[str, Any]) -> None:
    times = result["kernels_us"]
    best = min(times, key=lambda name: times[name])
    print(f"  dense {result['dense_us']:.1f} us, {best} {times[best]:.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
