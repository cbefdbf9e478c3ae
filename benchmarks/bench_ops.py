"""Times block-sparse products on a GPU against dense cuBLAS, PyTorch's Triton BSR and STK.

    python benchmarks/bench_ops.py --output results.json
    python benchmarks/report.py results.json

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import contenders
import torch
from contenders import Prepare, Prepared, Unavailable
from harness import CudaTimer, environment, host_microseconds, write_json
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
from torch import Tensor

from tilesparse.pattern import BLOCK_SIZES

STEADY = 0.05  # by how much the dense times before and after a contender may differ
ATTEMPTS = 3  # at a steady measurement
MOST_REPETITIONS = 100
FILL_US = 20_000  # short calls are repeated more often, up to about this time
WARM_UP_SECONDS = 1.0
HOST_SHAPE = Shape("tiny", 16, 256, 256)


class ContextLostError(Exception):
    """The GPU refuses all further work of this process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if an output was wrong or the GPU gave up."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device")
    document: dict[str, Any] = {
        "environment": environment(arguments.commit),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "host": [],
        "cases": [],
    }
    lost = False
    try:
        with torch.no_grad():
            _run(arguments, document)
    except ContextLostError as error:
        lost = True
        document["stopped"] = f"the GPU gave up: {error}"
    write_json(arguments.output, document)
    wrong = [result for case in document["cases"] for result in case["results"] if result.get("wrong")]
    print(f"wrote {arguments.output}: {len(document['cases'])} cases, {len(wrong)} wrong results")
    print(document.get("stopped", "all cases done"))
    return int(lost or bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("ops.json"), help="results as JSON, kept up to date (%(default)s)"
    )
    parser.add_argument(
        "--budget", type=float, default=540.0, metavar="SECONDS", help="no case starts later (%(default)s)"
    )
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    parser.add_argument("--ops", type=_subset(OPS), default=OPS, help=f"of {','.join(OPS)} (all)")
    parser.add_argument(
        "--dtypes", type=_subset(PRECISIONS), default=("bf16",), help=f"of {','.join(PRECISIONS)} (bf16)"
    )
    parser.add_argument(
        "--shapes",
        type=_shapes,
        default=(*LAYERS.values(), *DECODE.values()),
        help=f"of {','.join(LAYERS)},decode, or tokens x out x in as 8192x4096x1024 (all the named)",
    )
    parser.add_argument(
        "--blocks", type=_blocks, default=_blocks("32,64,128,16"), help="as 32 or 128x32 (32,64,128,16)"
    )
    parser.add_argument("--densities", type=_densities, default=(0.25, 0.5, 0.1), help="(.25,.5,.1)")
    parser.add_argument("--pattern", choices=PATTERNS, default="random", help="(%(default)s)")
    parser.add_argument(
        "--x-layout", choices=LAYOUTS, default="row", help="major order of the activations read (%(default)s)"
    )
    parser.add_argument(
        "--contenders",
        type=_subset(contenders.CONTENDERS),
        default=tuple(contenders.CONTENDERS),
        help=f"of {','.join(contenders.CONTENDERS)}; dense always runs (all)",
    )
    parser.add_argument(
        "--kernels",
        type=_names,
        default=(),
        metavar="PREFIXES",
        help="measure this library also with the kernels whose names begin so, as sm80,sm90",
    )
    parser.add_argument("--repetitions", type=_repetitions, default=20, help="at least (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of patterns and data (%(default)s)")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _subset(allowed: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = _names(text)
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(allowed)}")
        return names

    return parse


def _shapes(text: str) -> tuple[Shape, ...]:
    shapes: list[Shape] = []
    for name in _names(text):
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


def _blocks(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(_block(part) for part in _names(text))


def _block(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    allowed = [str(size) for size in BLOCK_SIZES]
    if rows not in allowed or (cols or rows) not in allowed:
        raise argparse.ArgumentTypeError(f"{text} is not made of {', '.join(allowed)}")
    return int(rows), int(cols or rows)


def _densities(text: str) -> tuple[float, ...]:
    densities = tuple(float(part) for part in _names(text))
    for density in densities:
        if not 0 < density <= 1:
            raise argparse.ArgumentTypeError(f"{density} is not above 0 and at most 1")
    return densities


def _repetitions(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    start = time.monotonic()
    timer = CudaTimer()
    prepares = contenders.contenders(arguments.contenders, arguments.kernels)
    _warm_up()
    document["host"] = _host_costs(prepares, timer, arguments.seed)
    cases = _cases(arguments)
    for number, case in enumerate(cases, 1):
        seconds = time.monotonic() - start
        if seconds > arguments.budget:
            document["stopped"] = (
                f"budget of {arguments.budget:g} s spent before case {number} of {len(cases)}"
            )
            return
        print(f"[{number}/{len(cases)}, {seconds:.0f} s] {case}", flush=True)
        record = _description(case)
        document["cases"].append(record)
        _measure_case(case, record, prepares, timer, arguments)
        write_json(arguments.output, document)


def _cases(arguments: argparse.Namespace) -> list[Case]:
    """In the order of the arguments, forward first; block and density vary fastest."""
    cases = [
        Case(op, dtype, shape, block, density, arguments.pattern, arguments.x_layout)
        for dtype in arguments.dtypes
        for op in arguments.ops
        for shape in arguments.shapes
        for block in arguments.blocks
        for density in arguments.densities
    ]
    return [case for case in cases if case.op == "dds_nt" or case.shape.name not in DECODE]


def _warm_up() -> None:
    """Lets the GPU reach the clocks it keeps under load."""
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    end = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < end:
        matrix @ matrix
        torch.cuda.synchronize()


def _host_costs(prepares: dict[str, Prepare], timer: CudaTimer, seed: int) -> list[dict[str, Any]]:
    """Microseconds the host spends in one eager call, by a layer whose GPU time is shorter."""
    records: list[dict[str, Any]] = []
    for op in OPS:
        problem = Problem(Case(op, "bf16", HOST_SHAPE, (32, 32), 0.5, "random", "row"), seed)
        for name, prepare in ({"dense": _prepare_dense} | prepares).items():
            record: dict[str, Any] = {"op": op, "contender": name}
            with _recording(record):
                call = prepare(problem, timer).call
                call()
                record["host_us"] = round(host_microseconds(call), 2)
                print(f"  host {op} {name:24} {record['host_us']:8.2f} us a call", flush=True)
            records.append(record)
    return records


def _prepare_dense(problem: Problem, timer: CudaTimer) -> Prepared:
    return Prepared(contenders.dense(problem), {})


def _description(case: Case) -> dict[str, Any]:
    return {
        "op": case.op,
        "dtype": case.precision,
        "shape": case.shape.name,
        "tokens": case.shape.tokens,
        "out_features": case.shape.out_features,
        "in_features": case.shape.in_features,
        "block_shape": list(case.block_shape),
        "requested_density": case.density,
        "pattern": case.pattern,
        "x_layout": case.x_layout,
        "results": [],
    }


def _measure_case(
    case: Case,
    record: dict[str, Any],
    prepares: dict[str, Prepare],
    timer: CudaTimer,
    arguments: argparse.Namespace,
) -> None:
    with _recording(record), float32_precision(PRECISIONS[case.precision].float32):
        problem = Problem(case, arguments.seed)
        record |= {"density": problem.pattern.density, "bytes": problem.bytes()}
        for name, prepare in prepares.items():
            result: dict[str, Any] = {"contender": name}
            record["results"].append(result)
            with _recording(result):
                result |= _measure(problem, prepare, timer, arguments.repetitions)
                _print_result(result)


@contextmanager
def _recording(record: dict[str, Any]) -> Iterator[None]:
    """Turns a failure into the record's ``unavailable``, unless the GPU does not recover from it."""
    try:
        yield
    except ContextLostError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
        record["unavailable"] = reason
        print(
            f"  {record.get('contender', 'case'):24} unavailable: {reason.strip().splitlines()[0]}",
            flush=True,
        )
        try:
            torch.cuda.synchronize()
        except Exception as lost:
            raise ContextLostError(reason) from lost


def _measure(problem: Problem, prepare: Prepare, timer: CudaTimer, repetitions: int) -> dict[str, Any]:
    prepared = prepare(problem, timer)
    error = _relative_error(_poisoned(prepared.call), problem.exact)
    sparse_us, dense_us, repetitions = _steady_times(
        prepared.call, contenders.dense(problem), timer, repetitions
    )
    before, after = dense_us
    mean = (before + after) / 2
    return {
        "t_us": round(sparse_us, 2),
        "dense_us": [round(before, 2), round(after, 2)],
        "unsteady": _drift(dense_us) > STEADY,
        "efficiency": round(mean * problem.pattern.density / sparse_us, 4),
        "speedup": round(mean / sparse_us, 4),
        "tflops": round(problem.flops() / sparse_us / 1e6, 1),
        "gb_per_s": round(problem.bytes() / sparse_us / 1e3, 1),
        "error": error,
        "wrong": error is None or error > PRECISIONS[problem.case.precision].tolerance,
        "repetitions": repetitions,
        **prepared.details,
    }


def _steady_times(
    sparse: Callable[[], Tensor], dense: Callable[[], Tensor], timer: CudaTimer, repetitions: int
) -> tuple[float, tuple[float, float], int]:
    """Times of the sparse product and of the dense one before and after it, of the steadiest attempt."""
    for call in (sparse, dense):
        call()
    estimate = timer.microseconds(sparse, 3)
    repetitions = max(repetitions, min(MOST_REPETITIONS, int(FILL_US / estimate)))
    attempts: list[tuple[float, tuple[float, float]]] = []
    for _ in range(ATTEMPTS):
        before = timer.microseconds(dense, repetitions)
        time_us = timer.microseconds(sparse, repetitions)
        attempts.append((time_us, (before, timer.microseconds(dense, repetitions))))
        if _drift(attempts[-1][1]) <= STEADY:
            break
    time_us, dense_us = min(attempts, key=lambda attempt: _drift(attempt[1]))
    return time_us, dense_us, repetitions


def _drift(times: tuple[float, float]) -> float:
    return abs(times[0] - times[1]) / min(times)


def _poisoned(call: Callable[[], Tensor]) -> Tensor:
    """The result where all memory that is allocated uninitialised holds NaN: PyTorch's deterministic mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)


def _relative_error(result: Tensor, exact: Tensor) -> float | None:
    """Frobenius norm of the difference over that of the exact result; None if it is not finite."""
    error = float((result.float() - exact).norm() / exact.norm())
    return error if math.isfinite(error) else None


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
