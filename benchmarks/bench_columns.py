"""Times whole models on a GPU, compiled and in CUDA graphs: dense and sparse, in bfloat16 and in float8.

    python benchmarks/bench_columns.py --output columns.json

Four columns: what a user has, what a user would pick instead, and both with block-sparse layers. Dense float8
is timed twice: its inputs are rounded by this library's kernel, or by PyTorch's code, compiled with the rest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench_models import COMPILED_MODELS, TOLERANCE, Bench, Group, Prepared, free_memory
from harness import (
    block_list,
    budgeted_parser,
    density_list,
    parsed,
    positive,
    recording,
    run_benchmark,
    steady_times,
    subset,
    warm_up,
    write_json,
)
from models import MODELS, make_float8
from torch import Tensor

FLOAT8 = "float8_e4m3fn"
TOLERANCE_FLOAT8 = 0.15  # relative, Frobenius norm; every layer rounds weights and inputs to 8 bits
DEFAULT_MODELS = ("llama-prefill", "llama-decode1", "roberta", "vit")


class CompiledBench(Bench):
    """Whose dense model rounds in code that is compiled with the model."""

    def dense(self, group: Group) -> Prepared:
        return self._prepared(group, lambda: make_float8(self._build(group), compiled=True))


class Columns:
    """Dense models of one architecture, and sparse ones to be timed against all of them."""

    def __init__(self, group: Group, arguments: argparse.Namespace) -> None:
        self.group, self._repetitions = group, arguments.repetitions
        device = torch.device(arguments.device)
        settings = (device, arguments.repetitions, arguments.seed)
        self._sparse = {"bfloat16": Bench(*settings), "float8": Bench(*settings, FLOAT8)}
        dense = {
            "dense": self._sparse["bfloat16"],
            "float8": self._sparse["float8"],
            "float8_compiled": CompiledBench(*settings, FLOAT8),
        }
        self._dense: dict[str, Callable[[], Tensor]] = {}
        for name, bench in dense.items():
            self._dense[name] = bench.dense(group).call
            torch.compiler.reset()

    def result(self, form: str, density: float, block_shape: tuple[int, int]) -> dict[str, Any]:
        """The times of a sparse model in bfloat16 or float8, and of the dense ones around it, in us."""
        bench = self._sparse[form]
        sparse = bench.sparse(self.group, density, block_shape).call
        error = bench.error(self.group, density, block_shape, sparse)
        tolerance = TOLERANCE if form == "bfloat16" else TOLERANCE_FLOAT8
        times = steady_times(sparse, timer=bench.timer, repetitions=self._repetitions, **self._dense)
        torch.compiler.reset()
        return {
            "t_us": round(times.sparse_us, 2),
            "beside_us": {name: [round(t, 2) for t in both] for name, both in times.beside.items()},
            "unsteady": times.unsteady,
            "repetitions": times.repetitions,
            "error": error,
            "wrong": error is None or error > tolerance,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if an output was wrong or the GPU gave up."""
    parser = budgeted_parser(__doc__, "columns.json", 540.0)
    parser.add_argument(
        "--models", type=subset(MODELS), default=DEFAULT_MODELS, help=f"of {','.join(MODELS)} (some)"
    )
    parser.add_argument("--densities", type=density_list, default=(0.5, 0.25), help="(.5,.25)")
    parser.add_argument("--blocks", type=block_list, default=((128, 128),), help="as 32 or 128x32 (128)")
    for name in ("layers", "batch", "tokens"):
        parser.add_argument(f"--{name}", type=positive, help="(the model's)")
    parser.add_argument("--repetitions", type=positive, default=10, help="at least (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, patterns and data (%(default)s)")
    parser.add_argument("--device", choices=("cuda",), default="cuda", help="(%(default)s)")
    return run_benchmark(parsed(parser, argv), _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    torch._dynamo.config.cache_size_limit = COMPILED_MODELS
    warm_up()
    deadline = time.monotonic() + arguments.budget
    sizes = {name: getattr(arguments, name) for name in ("layers", "batch", "tokens")}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    for name in arguments.models:
        group = Group(name, MODELS[name].with_sizes(**sizes), "inference", "compile-graph")
        if time.monotonic() > deadline:
            document["stopped"] = f"budget of {arguments.budget:g} s spent before {name}"
            return
        case: dict[str, Any] = {"model": name, "mode": group.mode, "results": []}
        document["cases"].append(case)
        with recording(case, name):
            columns = Columns(group, arguments)
            for block_shape in arguments.blocks:
                for density in arguments.densities:
                    for form in ("bfloat16", "float8"):
                        if time.monotonic() > deadline:
                            document["stopped"] = f"budget of {arguments.budget:g} s spent within {name}"
                            return
                        result = {"form": form, "density": density, "block_shape": list(block_shape)}
                        case["results"].append(result)
                        with recording(result, f"{name} {form} {density:g}"):
                            result |= columns.result(form, density, block_shape)
                            print(name, result, flush=True)
                        write_json(arguments.output, document)
        free_memory()


if __name__ == "__main__":
    sys.exit(main())
