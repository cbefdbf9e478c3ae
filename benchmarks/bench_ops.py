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
from contenders import Prepare, Prepared
from harness import (
    Timer,
    add_names,
    block_list,
    density_list,
    host_microseconds,
    judged,
    measuring,
    name_list,
    parsed,
    poisoned,
    recording,
    relative_error,
    result_parser,
    run_benchmark,
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

HOST_SHAPE = Shape("tiny", 16, 256, 256)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if an output was wrong or the GPU gave up."""
    arguments = parsed(_parser(), argv)
    with torch.no_grad():
        return run_benchmark(arguments, _run, host=[])


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
            shapes.append(_custom_shape(name))
    return tuple(shapes)


def _custom_shape(text: str) -> Shape:
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text} is neither a named shape nor tokens x out x in")
    tokens, out_features, in_features = map(int, sizes)
    return Shape(text, tokens, out_features, in_features)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    start = time.monotonic()
    timer = Timer("cuda")
    prepares = {name: contenders.CONTENDERS[name] for name in arguments.contenders}
    warm_up()
    document["host"] = _host_costs(prepares, timer, arguments.seed)
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


def _host_costs(prepares: dict[str, Prepare], timer: Timer, seed: int) -> list[dict[str, Any]]:
    """Microseconds the host spends in one eager call, by a layer whose GPU time is shorter."""
    records: list[dict[str, Any]] = []
    for op in OPS:
        problem = Problem(Case(op, "bf16", HOST_SHAPE, (32, 32), 0.5, "random", "row"), seed)
        for name, prepare in ({"dense": _prepare_dense} | prepares).items():
            record: dict[str, Any] = {"op": op, "contender": name}
            with recording(record, name):
                call = prepare(problem, timer).call
                call()
                record["host_us"] = round(host_microseconds(call), 2)
                print(f"  host {op} {name:24} {record['host_us']:8.2f} us a call", flush=True)
            records.append(record)
    return records


def _prepare_dense(problem: Problem, timer: Timer) -> Prepared:
    return Prepared(contenders.dense(problem), {})


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
                _print_result(result)


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


def _print_result(result: dict[str, Any]) -> None:
    notes = [str(result[key]) for key in ("kernel", "meta") if key in result]
    error = "not finite" if result["error"] is None else f"{result['error']:.1e}"
    notes += [flag.upper() for flag in ("unsteady", "wrong") if result[flag]]
    print(
        f"  {result['contender']:24}{result['t_us']:10.1f} us  eta {result['efficiency']:.2f}  "
        f"{result['speedup']:6.2f}x dense  {result['tflops']:6.1f} TFLOP/s  {result['gb_per_s']:7.1f} GB/s  "
        f"error {error}  {' '.join(notes)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
