"""Times block-sparse products on a GPU against dense cuBLAS, PyTorch's Triton BSR and STK.

    python benchmarks/bench_ops.py --output results.json
    python benchmarks/report.py results.json

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import contenders
import torch
from contenders import Prepare
from harness import (
    Timer,
    add_names,
    block_list,
    density_list,
    judged,
    measuring,
    name_list,
    parsed,
    poisoned,
    print_result,
    recording,
    relative_error,
    result_parser,
    run_benchmark,
    sizes,
    steady_times,
    warm_up,
    within_budget,
    write_json,
)
from problems import (
    DECODE,
    LAYERS,
    LAYOUTS,
    OPS,
    PATTERNS,
    PRECISIONS,
    Case,
    Problem,
    Shape,
    float32_precision,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if an output was wrong or the GPU gave up."""
    arguments = parsed(_parser(), argv)
    with torch.no_grad():
        return run_benchmark(arguments, _run)


def _parser() -> argparse.ArgumentParser:
    parser = result_parser(__doc__, "ops.json", 540.0, repetitions=20, seed=True)
    add_names(parser, "--ops", OPS)
    add_names(parser, "--dtypes", PRECISIONS, ("bf16",))
    add_names(parser, "--patterns", PATTERNS, ("random",))
    add_names(parser, "--x-layouts", LAYOUTS, ("row",))  # major order of the activations read
    add_names(parser, "--contenders", contenders.CONTENDERS)  # dense always runs
    parser.add_argument(
        "--shapes",
        type=_shapes,
        default=(*LAYERS.values(), *DECODE.values()),
        help=f"of {','.join(LAYERS)},decode, or tokens x out x in as 8192x4096x1024 (all the named)",
    )
    parser.add_argument(
        "--blocks", type=block_list, default=block_list("32,64,128,16"), help="as 32 or 128x32 (32,64,128,16)"
    )
    parser.add_argument("--densities", type=density_list, default=(0.25, 0.5, 0.1), help="(.25,.5,.1)")
    return parser


def _shapes(text: str) -> tuple[Shape, ...]:
    shapes: list[Shape] = []
    for name in name_list(text):
        if name == "decode":
            shapes += DECODE.values()
        elif name in LAYERS or name in DECODE:
            shapes.append((LAYERS | DECODE)[name])
        else:
            shapes.append(Shape(name, *sizes(name, "tokens x out x in")))
    return tuple(shapes)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    start = time.monotonic()
    timer = Timer("cuda")
    prepares = {name: contenders.CONTENDERS[name] for name in arguments.contenders}
    warm_up()
    for case in within_budget(_cases(arguments), arguments, document, start):
        record = case.record()
        document["cases"].append(record)
        _measure_case(case, record, prepares, timer, arguments)
        write_json(arguments.output, document)


def _cases(arguments: argparse.Namespace) -> list[Case]:
    """In the order of the arguments, forward first; block and density vary fastest."""
    cases = [
        Case(op, dtype, shape, block, density, pattern, x_layout)
        for dtype in arguments.dtypes
        for pattern in arguments.patterns
        for x_layout in arguments.x_layouts
        for op in arguments.ops
        for shape in arguments.shapes
        for block in arguments.blocks
        for density in arguments.densities
    ]
    return [case for case in cases if case.op == "dds_nt" or case.shape.name not in DECODE]


def _measure_case(
    case: Case,
    record: dict[str, Any],
    prepares: dict[str, Prepare],
    timer: Timer,
    arguments: argparse.Namespace,
) -> None:
    with recording(record, "case"), float32_precision(PRECISIONS[case.precision].float32):
        problem = Problem(case, arguments.seed)
        record |= {"density": problem.pattern.density, "bytes": problem.bytes()}
        for name, prepare in prepares.items():
            with measuring(record, contender=name) as result:
                result |= _measure(problem, prepare, timer, arguments.repetitions)
                notes = (str(result[key]) for key in ("kernel", "meta") if key in result)
                print_result(name, result, f"eta {result['efficiency']:.2f}", *notes)


def _measure(problem: Problem, prepare: Prepare, timer: Timer, repetitions: int) -> dict[str, Any]:
    prepared = prepare(problem, timer)
    error = relative_error(poisoned(prepared.call), problem.exact)
    times = steady_times(prepared.call, contenders.dense(problem), timer, repetitions)
    return {
        **times.record(),
        "efficiency": round(times.speedup * problem.pattern.density, 4),
        "tflops": round(problem.flops() / times.sparse_us / 1e6, 1),
        "gb_per_s": round(problem.bytes() / times.sparse_us / 1e3, 1),
        **judged(error, PRECISIONS[problem.case.precision].tolerance),
        **prepared.details,
    }


if __name__ == "__main__":
    sys.exit(main())
