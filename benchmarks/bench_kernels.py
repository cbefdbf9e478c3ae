"""Times every kernel of the library that computes a product, for products of many kinds drawn at random.

    python benchmarks/bench_kernels.py --output kernels.json
    python benchmarks/fit_estimates.py kernels.json

With --named those are timed first that aims were set for. The library chooses kernels by estimates, which
are fitted to such results. Cases are drawn one after another from all kinds, so that a run of any length
covers them all. Most kernels that are estimated to take long can be left out, with --within.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from harness import (
    Timer,
    add_names,
    block_list,
    measuring,
    name_list,
    parsed,
    relative_error,
    result_parser,
    run_benchmark,
    sizes,
    warm_up,
    within_budget,
)
from kernel_cases import KINDS, NAMED, Calls, Drawn, draw, product_of
from problems import OPS
from torch import Tensor

from tilesparse import _C
from tilesparse._runtime.launch import ask_for, known_kernels
from tilesparse.errors import UnsupportedError

LEAST, MOST = 3, 7  # repetitions
FILL_US = 1000.0  # of each kernel's
LEFT_OUT = 0.5  # share of the kernels that are estimated to take longer
SAMPLE = 17  # of so many numbers of a result one is compared
LAUNCH_SECONDS = 120e-6  # products alone
TOLERANCE = 2e-2  # of kernels beside each other, whose results are rounded in different places


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if kernels disagree or the GPU gave up."""
    arguments = parsed(_parser(), argv)
    with torch.no_grad():
        return run_benchmark(arguments, _run)


def _parser() -> argparse.ArgumentParser:
    parser = result_parser(__doc__, "kernels.json", 540.0, seed=True)
    parser.add_argument("--cases", type=int, default=100_000, help="drawn at most (%(default)s)")
    parser.add_argument("--named", action="store_true", help="first those that aims were set for")
    help = "times the least estimate (%(default)s)"
    parser.add_argument("--within", type=float, default=math.inf, help=help)
    add_names(parser, "--kinds", KINDS)
    add_names(parser, "--ops", OPS)
    parser.add_argument("--kernels", type=name_list, default=("",), help="whose names begin so (all)")
    parser.add_argument("--layers", type=_layers, default=(), help="out x in, as 768x3072,4096x4096 (many)")
    parser.add_argument("--blocks", type=block_list, default=(), help="as 128x64,64 (all)")
    return parser


def _layers(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((out, inner) for out, inner in (sizes(layer, "out x in") for layer in name_list(text)))


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    start = time.monotonic()
    timer = Timer("cuda", LAUNCH_SECONDS)
    warm_up()
    chance = random.Random(arguments.seed)
    kinds, ops = arguments.kinds, arguments.ops
    cases = [case for case in NAMED if arguments.named and case.kind in kinds and case.op in ops]
    of = arguments.layers, arguments.blocks
    cases += [draw(chance, kinds, ops, *of) for _ in range(arguments.cases)]
    for case in within_budget(cases, arguments, document, start):
        record = case.record()
        document["cases"].append(record)
        with measuring(record, contender="tilesparse") as result:
            calls = Calls(case, arguments.seed)
            record["density"] = calls.pattern.density
            kernels = _kernels(case, calls, tuple(arguments.kernels))
            least = min(kernels.values())
            near = [
                number
                for number, estimate in kernels.items()
                if estimate <= arguments.within * least or chance.random() > LEFT_OUT
            ]
            result |= _measure(calls, near, timer, max(LEAST, min(MOST, int(FILL_US / least))))
            _print(result)


def _measure(calls: Calls, kernels: Sequence[int], timer: Timer, repetitions: int) -> dict[str, Any]:
    """Microseconds of kernels, which take turns, and of dense, and by how much results differ."""

    def run(kernel: int) -> Tensor:
        with ask_for(1 + kernel):
            return calls.sparse()

    errors: dict[int, float | None] = {}
    first = None
    for kernel in kernels:
        try:
            result = run(kernel).flatten()[::SAMPLE].float()
        except UnsupportedError:
            continue  # operands in this layout
        first = result if first is None else first
        errors[kernel] = relative_error(result, first)
    timed: list[Callable[[], Tensor]] = [partial(run, kernel) for kernel in errors]
    if calls.expanded is not None:
        calls.expanded()
        timed.append(calls.expanded)
    times = [round(time, 2) for time in timer.of_all(timed, repetitions)]
    names = [known_kernels()[kernel].name for kernel in errors]
    measured = {
        "kernels_us": dict(zip(names, times, strict=False)),
        "wrong": any(error is None or error > TOLERANCE for error in errors.values()),
    }
    return measured if calls.expanded is None else measured | {"expanded_us": times[-1]}


def _kernels(case: Drawn, calls: Calls, prefixes: tuple[str, ...]) -> dict[int, float]:
    """Estimates of all that compute it on the GPU, and whose names begin with one of some prefixes."""
    info, found = _C.device_info(1), {}
    asked = product_of(case.record(), calls.pattern.nnz)
    for number, kernel in enumerate(known_kernels()):
        if kernel.device != info.device or not kernel.name.startswith(prefixes):
            continue
        try:
            found[number] = asked.estimate(info, number)
        except UnsupportedError:
            continue
    return found


def _print(result: dict[str, Any]) -> None:
    times = result["kernels_us"]
    best = min(times, key=lambda name: times[name])
    print(f"  {len(times)} kernels, {best} {times[best]:.1f} us{' WRONG' * result['wrong']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
