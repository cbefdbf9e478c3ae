"""Times block-sparse products on a CPU against dense PyTorch.

    python benchmarks/bench_cpu.py --output benchmarks/results/cpu.json

Forward, gradient of x and gradient of W, by PyTorch's threads, on normal random numbers. The dense
product and the sparse ones of all densities and blocks take turns, so that they meet the same state of
the machine; they share activations, but find neither weights nor results in a cache. Times are medians.
Results are checked against dense products of the expanded weight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import environment, result_parser, write_json
from torch import Tensor

from tilesparse import _C, BlockPattern, BlockSparseMatrix
from tilesparse._checks import DTYPES as CODES
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.functional import dds, linear, sdd

OPS = ("forward", "dgrad", "wgrad")  # numbered as in ts_matmul_desc.op
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative, Frobenius norm
LAYERS = ((768, 3072), (4096, 4096))  # in_features, out_features
BLOCKS = (16, 32, 64)
DENSITIES = (0.25, 0.5)
FEW_TOKENS = (8, 1)
KEPT_BYTES = 30 << 20  # below the 32 MiB up to which glibc learns


@dataclass(frozen=True)
class Task:
    """A dense product that sparse ones are compared with."""

    op: str
    dtype: torch.dtype
    tokens: int
    in_features: int
    out_features: int


class Operands:
    """x [tokens, in_features], y [tokens, out_features] and a dense weight [out_features, in_features]."""

    def __init__(self, task: Task) -> None:
        def randn(*size: int) -> Tensor:
            return torch.randn(size).to(task.dtype)

        self.x = randn(task.tokens, task.in_features)
        self.y = randn(task.tokens, task.out_features)
        self.weight = randn(task.out_features, task.in_features)

    def dense(self, op: str) -> Tensor:
        if op == "forward":
            return torch.nn.functional.linear(self.x, self.weight)
        return self.y @ self.weight if op == "dgrad" else self.y.t() @ self.x


class Contender:
    """One sparse product of a task, of the activations that the others multiply too."""

    def __init__(self, task: Task, operands: Operands, block: int, density: float) -> None:
        self.task, self.block = task, block
        self.x, self.y = operands.x, operands.y
        shape = (task.out_features, task.in_features)
        self.pattern = BlockPattern.random(shape, block_shape=(block, block), density=density)
        self.values = torch.randn(self.pattern.nnz, block, block).to(task.dtype)

    def __call__(self) -> Tensor:
        if self.task.op == "forward":
            return linear(self.x, self.values, self.pattern)
        if self.task.op == "dgrad":
            return dds(self.y, self.values, self.pattern, transpose=False)
        return sdd(self.y, self.x, self.pattern)

    def error(self) -> float:
        """Frobenius norm of the difference from the dense product over that of the result."""
        weight = BlockSparseMatrix(self.values.float(), self.pattern).to_dense()
        x, y = self.x.float(), self.y.float()
        if self.task.op == "wgrad":
            expected = BlockSparseMatrix.from_dense(y.t() @ x, self.pattern).values
        else:
            expected = x @ weight.t() if self.task.op == "forward" else y @ weight
        return float((self().float() - expected).norm() / expected.norm())

    def kernel(self) -> str:
        descriptor = prepared(self.pattern.index_on(self.values.device)).descriptor
        op, dtype = OPS.index(self.task.op), CODES[self.task.dtype]
        index, _ = _C.Product(descriptor, op, dtype, 0, self.task.tokens).select(_C.device_info(0))
        return _C.kernels()[index].name


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if a result was wrong."""
    arguments = _parser().parse_args(argv)
    torch.manual_seed(arguments.seed)
    # A freed block this large teaches glibc to keep the memory of results instead of returning it to the
    # system, whose page faults would be timed with whatever comes first.
    torch.empty(KEPT_BYTES, dtype=torch.uint8)
    document: dict[str, Any] = {
        "environment": environment(arguments.commit) | {"threads": torch.get_num_threads()},
        "repetitions": arguments.repetitions,
        "cases": [],
    }
    with torch.inference_mode():
        for task in _tasks(arguments.dtypes):
            document["cases"] += _measure(task, arguments.repetitions)
            if arguments.output:
                write_json(arguments.output, document)
    wrong = [case for case in document["cases"] if case["wrong"]]
    print(f"{len(document['cases'])} cases, {len(wrong)} wrong results")
    return int(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = result_parser(__doc__, None)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=("float32", "bfloat16"))
    parser.add_argument("--repetitions", type=int, default=41, help="of every product (%(default)s)")
    parser.add_argument("--quick", dest="repetitions", action="store_const", const=7, help="7 repetitions")
    parser.add_argument("--seed", type=int, default=0, help="of patterns and data (%(default)s)")
    return parser


def _tasks(dtypes: Sequence[str]) -> Iterator[Task]:
    """Every product of many tokens, and the forward one of few."""
    for name in dtypes:
        for in_features, out_features in LAYERS:
            for op in OPS:
                yield Task(op, DTYPES[name], 512, in_features, out_features)
            for tokens in FEW_TOKENS:
                yield Task("forward", DTYPES[name], tokens, in_features, out_features)


def _measure(task: Task, repetitions: int) -> list[dict[str, Any]]:
    print(f"{task.op} {task.dtype}, {task.tokens} x {task.in_features} -> {task.out_features}", flush=True)
    operands = Operands(task)
    contenders = [Contender(task, operands, block, density) for block in BLOCKS for density in DENSITIES]
    dense, *times = _medians([lambda: operands.dense(task.op), *contenders], repetitions)
    cases = []
    for contender, median in zip(contenders, times, strict=True):
        error = contender.error()
        case = {
            "op": task.op,
            "dtype": str(task.dtype).removeprefix("torch."),
            "tokens": task.tokens,
            "in_features": task.in_features,
            "out_features": task.out_features,
            "block": contender.block,
            "density": contender.pattern.density,
            "kernel": contender.kernel(),
            "ms": round(1e3 * median, 4),
            "dense_ms": round(1e3 * dense, 4),
            "speedup": round(dense / median, 3),
            "error": error,
            "wrong": not error < TOLERANCES[task.dtype],
        }
        cases.append(case)
        print(
            f"  block {case['block']:3} density {case['density']:.2f}  {case['ms']:8.3f} ms"
            f"  dense {case['dense_ms']:8.3f} ms  {case['speedup']:5.2f}x  {case['kernel']}"
            + ("  WRONG" if case["wrong"] else ""),
            flush=True,
        )
    return cases


def _medians(calls: Sequence[Callable[[], Tensor]], repetitions: int) -> list[float]:
    """Median seconds of each call; they take turns, each round beginning with another one."""
    for call in calls:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    for repetition in range(repetitions):
        for position in range(len(calls)):
            index = (repetition + position) % len(calls)
            start = time.perf_counter()
            calls[index]()
            seconds[index].append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


if __name__ == "__main__":
    sys.exit(main())
