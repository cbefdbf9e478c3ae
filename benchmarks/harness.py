"""Shared parts of the benchmarks: arguments, the timer, and results as JSON with what they depend on."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import tilesparse
from tilesparse import _C
from tilesparse._checks import BLOCK_SIZES
from tilesparse.tuning.measure import milliseconds

LAUNCH_SECONDS = 250e-6  # the host needs less than this to issue one repetition of most that is measured
HOST_CALLS = 200  # in a row; fewer than the launches that fit into a stream's queue
STEADY = 0.05  # by how much the dense times before and after a contender may differ
ATTEMPTS = 3  # at a steady measurement
MOST_REPETITIONS = 100
FILL_US = 20_000  # short calls on a GPU are repeated more often, up to about this time
WARM_UP_SECONDS = 1.0
WARM_UP_CALLS = 3  # before a CUDA graph captures one

Item = TypeVar("Item")


def environment(commit: str | None = None) -> dict[str, Any]:
    """Machine and versions a result belongs to; ``commit`` where the sources are not in a repository."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "tilesparse": tilesparse.__version__,
        "architectures": _C.architectures(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": tilesparse.tuning.Device.find("cpu").name,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        query = ("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader", "--id=0")
        driver, _, power_limit = (_output(*query) or "").partition(", ")
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": driver or None,
            "power_limit": power_limit or None,
            "cuda": torch.version.cuda,
            "triton": _installed("triton"),
            "stk": _installed("stanford-stk"),
        }
        if limits := os.environ.get("TILESPARSE_DEVICE_LIMITS"):
            found["limits"] = limits  # of a smaller GPU, as which the library used this one
    return found


def described(arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return a document without cases that says what results depend on: environment, arguments, and more."""
    given = {name: str(value) for name, value in vars(arguments).items() if name != "output"}
    return {"environment": environment(arguments.commit), "arguments": given, **more, "cases": []}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace the file in one step, so that an interrupted run leaves the results it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


class ContextLostError(Exception):
    """The GPU refuses all further work of this process."""


def result_parser(
    description: str | None,
    output: str | None,
    budget: float | None = None,
    *,
    device: bool = False,
    repetitions: int | None = None,
    seed: bool = False,
) -> argparse.ArgumentParser:
    """Make the parser of a script that writes results, and starts no case after a budget of seconds.

    The others are options that many scripts have.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=output, help="results as JSON (%(default)s)")
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    if budget is not None:
        help = "no case starts later (%(default)s)"
        parser.add_argument("--budget", type=float, default=budget, metavar="SECONDS", help=help)
    if device:
        help = "cpu only tries most of the scripts (%(default)s)"
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=help)
    if repetitions is not None:
        help = "at least (%(default)s)"
        parser.add_argument("--repetitions", type=positive, default=repetitions, help=help)
    if seed:
        help = "of weights, patterns and data (%(default)s)"
        parser.add_argument("--seed", type=int, default=0, help=help)
    return parser


def add_names(
    parser: argparse.ArgumentParser, option: str, names: Collection[str], default: Collection[str] = ()
) -> None:
    """Add an option that lists some of these names; all of them by default."""
    help = f"of {','.join(names)} ({','.join(default) or 'all'})"
    parser.add_argument(option, type=subset(names), default=tuple(default or names), help=help)


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; exits where a GPU is needed, unless they name another device, and is not there."""
    arguments = parser.parse_args(argv)
    if getattr(arguments, "device", "cuda") == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device")
    return arguments


def within_budget(
    cases: Sequence[Item], arguments: argparse.Namespace, document: dict[str, Any], start: float
) -> Iterator[Item]:
    """The cases, each printed, until the budget is spent, which the document says; ``start``: monotonic."""
    for number, case in enumerate(cases, 1):
        seconds = time.monotonic() - start
        if seconds > arguments.budget:
            document["stopped"] = (
                f"budget of {arguments.budget:g} s spent before case {number} of {len(cases)}"
            )
            return
        print(f"[{number}/{len(cases)}, {seconds:.0f} s] {case}", flush=True)
        yield case


def run_benchmark(
    arguments: argparse.Namespace, run: Callable[[argparse.Namespace, dict[str, Any]], None]
) -> int:
    """Lets ``run`` fill a document and writes it; exit status 1 if an output was wrong, the GPU gave up or
    nothing could be measured.

    The document describes the machine and the arguments and has empty "cases", each of which shall have
    "results".
    """
    document = described(arguments)
    lost = False
    try:
        run(arguments, document)
    except ContextLostError as error:
        lost = True
        document["stopped"] = f"the GPU gave up: {error}"
    write_json(arguments.output, document)
    results = [result for case in document["cases"] for result in case["results"]]
    wrong = sum(bool(result.get("wrong")) for result in results)
    missing = sum("unavailable" in record for record in (*document["cases"], *results))
    print(
        f"wrote {arguments.output}: {len(document['cases'])} cases, {len(results)} results, {wrong} wrong, "
        f"{missing} unavailable"
    )
    print(document.get("stopped", "all cases done"))
    nothing = bool(results) and all("unavailable" in result for result in results)
    return int(lost or wrong > 0 or nothing)


class Unavailable(Exception):
    """Something that cannot be measured, by its nature and not for a failure."""


@contextmanager
def recording(record: dict[str, Any], name: str) -> Iterator[None]:
    """Turns a failure into the record's ``unavailable``, unless the GPU does not recover from it."""
    try:
        yield
    except ContextLostError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
        record["unavailable"] = reason
        print(f"  {name:24} unavailable: {reason.strip().splitlines()[0]}", flush=True)
        if torch.cuda.is_available():
            _check_gpu(reason)


@contextmanager
def measuring(record: dict[str, Any], **first: str) -> Iterator[dict[str, Any]]:
    """Add a result with this field to a record, to be filled; a failure becomes its ``unavailable``."""
    result: dict[str, Any] = {**first}
    record["results"].append(result)
    with recording(result, *first.values()):
        yield result


def _check_gpu(reason: str) -> None:
    try:
        torch.cuda.synchronize()
    except Exception as lost:
        raise ContextLostError(reason) from lost


class Timer:
    """The timer of `tilesparse.tuning`, for one call at a time.

    ``launch_seconds`` is what the host needs at most for one repetition: the GPU begins only when all are
    issued. With None every call begins on an idle GPU and its time includes what it waits for the host.
    """

    def __init__(self, device: torch.device | str, launch_seconds: float | None = LAUNCH_SECONDS) -> None:
        self.device = torch.device(device)
        self._launch_seconds = launch_seconds

    def microseconds(self, call: Callable[[], Tensor], repetitions: int) -> float:
        """Median time of a call with a cold L2 cache on a GPU, least time on the CPU."""
        return self.of_all([call], repetitions)[0]

    def of_all(self, calls: Sequence[Callable[[], Any]], repetitions: int) -> list[float]:
        """Microseconds of each call; they take turns."""
        head_start = None if self._launch_seconds is None else repetitions * self._launch_seconds
        times = milliseconds(calls, self.device, repetitions, head_start=head_start)
        return [1e3 * time_ms for time_ms in times]


class Times(NamedTuple):
    """Medians of a call, and of those it is compared with, before and after it."""

    sparse_us: float
    beside: dict[str, tuple[float, float]]
    repetitions: int

    @property
    def dense_us(self) -> tuple[float, float]:
        return self.beside["dense"]

    @property
    def speedup(self) -> float:
        return self.speedup_over("dense")

    def speedup_over(self, name: str) -> float:
        return sum(self.beside[name]) / 2 / self.sparse_us

    @property
    def drift(self) -> float:
        return max(abs(before - after) / min(before, after) for before, after in self.beside.values())

    @property
    def unsteady(self) -> bool:
        return self.drift > STEADY

    def record(self) -> dict[str, Any]:
        """Return what most results say of times."""
        beside = {f"{name}_us": [round(us, 2) for us in pair] for name, pair in self.beside.items()}
        own = {"t_us": round(self.sparse_us, 2), **beside, "unsteady": self.unsteady}
        return {**own, "speedup": round(self.speedup, 4), "repetitions": self.repetitions}


def print_result(name: str, result: dict[str, Any], *notes: str) -> None:
    """Print a line about a result that has `Times.record`, and perhaps what `judged` returns."""
    flags = [flag.upper() for flag in ("expanded", "unsteady", "wrong") if result.get(flag)]
    error = f"error {result['error']:.1e}" if result.get("error") is not None else ""
    t_us, speedup = result["t_us"], result["speedup"]
    print(
        f"  {name:24}{t_us:12.1f} us {speedup:6.2f}x dense  {error}  {'  '.join((*notes, *flags))}",
        flush=True,
    )


def steady_times(
    sparse: Callable[[], Tensor],
    dense: Callable[[], Tensor],
    timer: Timer,
    repetitions: int,
    **others: Callable[[], Tensor],
) -> Times:
    """Times of the steadiest attempt, of at least so many repetitions."""
    compared = {"dense": dense, **others}
    for call in (sparse, *compared.values()):
        call()
    if timer.device.type == "cuda":
        repetitions = max(repetitions, min(MOST_REPETITIONS, int(FILL_US / timer.microseconds(sparse, 3))))

    def beside() -> dict[str, float]:
        return {name: timer.microseconds(call, repetitions) for name, call in compared.items()}

    attempts: list[Times] = []
    for _ in range(ATTEMPTS):
        before, sparse_us, after = beside(), timer.microseconds(sparse, repetitions), beside()
        around = {name: (before[name], after[name]) for name in compared}
        attempts.append(Times(sparse_us, around, repetitions))
        if not attempts[-1].unsteady:
            break
    return min(attempts, key=lambda attempt: attempt.drift)


class CapturedCall:
    """A call in a CUDA graph; it is kept because it holds the memory that the graph uses."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, stream=stream):
            self._result = call()

    def __call__(self) -> Any:
        self._graph.replay()
        return self._result


def poisoned(call: Callable[[], Tensor]) -> Tensor:
    """The result where all memory that is allocated uninitialised holds NaN: PyTorch's deterministic mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)


def warm_up() -> None:
    """Lets the GPU reach the clocks it keeps under load."""
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    end = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < end:
        matrix @ matrix
        torch.cuda.synchronize()


def relative_error(result: Tensor, exact: Tensor) -> float | None:
    """Frobenius norm of the difference over that of the exact result; None if it is not finite."""
    error = float((result.double() - exact).norm() / exact.norm())
    return error if math.isfinite(error) else None


def judged(error: float | None, tolerance: float) -> dict[str, Any]:
    """Return what a result says of its error."""
    return {"error": error, "wrong": error is None or error > tolerance}


def host_batch(call: Callable[[], object]) -> float:
    """Microseconds of the host for one of many calls in a row."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / HOST_CALLS


ANSWER = "ANSWER "  # begins the lines of a worker that are its own


class Worker:
    """A contender in a process of its own, which waits while others are timed."""

    def __init__(self, *command: str) -> None:
        self._process: Any = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.answer()

    def ask(self, turn: Any) -> Any:
        """Return the answer to a turn."""
        print(json.dumps(turn), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """Return the next thing that the process says."""
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise SystemExit(f"{self._process.args} ended with status {self._process.wait()}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def answer_turns(answer: Callable[[Any], Any]) -> None:
    """Answer the turns that a `Worker` is asked for; once it is ready."""
    print(f"{ANSWER}0", flush=True)
    for line in sys.stdin:
        print(f"{ANSWER}{json.dumps(answer(json.loads(line)))}", flush=True)


def subset(allowed: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of an argument that lists some of these names."""

    def parse(text: str) -> tuple[str, ...]:
        names = name_list(text)
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(allowed)}")
        return names

    return parse


def name_list(text: str) -> tuple[str, ...]:
    """The names in an argument like ``a,b``."""
    return tuple(part for part in text.split(",") if part)


def sizes(text: str, names: str) -> tuple[int, ...]:
    """The sizes in an argument like ``8x1024``, of which there are names like ``out x in``."""
    parts = text.split("x")
    if len(parts) != len(names.split(" x ")) or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is neither a known name nor {names}")
    return tuple(map(int, parts))


def block_list(text: str) -> tuple[tuple[int, int], ...]:
    """The block shapes in an argument like ``64,128x32``."""
    return tuple(_block(part) for part in name_list(text))


def _block(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    allowed = [str(size) for size in BLOCK_SIZES]
    if rows not in allowed or (cols or rows) not in allowed:
        raise argparse.ArgumentTypeError(f"{text} is not made of {', '.join(allowed)}")
    return int(rows), int(cols or rows)


def density_list(text: str) -> tuple[float, ...]:
    """The densities in an argument like ``.5,.25``."""
    densities = tuple(float(part) for part in name_list(text))
    for density in densities:
        if not 0 < density <= 1:
            raise argparse.ArgumentTypeError(f"{density} is not above 0 and at most 1")
    return densities


def positive(text: str) -> int:
    """An argument that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
