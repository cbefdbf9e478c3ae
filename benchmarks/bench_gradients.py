"""Gradients that come with others: in float32, of biases and of activations, against kernels of their own.

    python benchmarks/bench_gradients.py --output gradients.json

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import (
    CudaTimer,
    HostTimer,
    block_list,
    density_list,
    parsed,
    positive,
    recording,
    relative_error,
    run_benchmark,
    steady_times,
    write_json,
)
from torch import Tensor

from tilesparse import BlockPattern, BlockSparseLinear, BlockSparseMLP
from tilesparse.functional import sdd

WRONG = 1e-4  # relative Frobenius norm of the difference between what the two ways have added, in float32


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if a result was wrong or the GPU gave up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("gradients.json"), help="as JSON (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script (%(default)s)")
    add("--out-features", type=positive, default=14336, help="(%(default)s)")
    add("--in-features", type=positive, default=4096, help="(%(default)s)")
    add("--tokens", type=positive, nargs="+", default=[512, 2048, 8192], help="of a batch (%(default)s)")
    add("--blocks", type=block_list, default="16,32,64,128", help="(%(default)s)")
    add("--densities", type=density_list, default="0.5,0.25,0.1", help="(%(default)s)")
    add("--repetitions", type=positive, default=20, help="at least (%(default)s)")
    add("--seed", type=int, default=0, help="of patterns and data (%(default)s)")
    add("--commit", help="of the sources (default: ask git)")
    arguments = parsed(parser, argv)
    return run_benchmark(arguments, _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    for block_shape, density, tokens in product(arguments.blocks, arguments.densities, arguments.tokens):
        result: dict[str, Any] = {"tokens": tokens}
        case = {"block_shape": block_shape, "density": density, "results": [result]}
        document["cases"].append(case)
        with recording(result, str(block_shape)):
            result |= _measure(arguments, block_shape, density, tokens)
        print(f"  {block_shape}, density {density}: {result}", flush=True)
        write_json(arguments.output, document)


def _measure(
    arguments: argparse.Namespace, block_shape: tuple[int, int], density: float, tokens: int
) -> dict[str, Any]:
    """Microseconds of every way."""
    torch.manual_seed(arguments.seed)
    features = arguments.out_features, arguments.in_features
    pattern = BlockPattern.random(features, block_shape=block_shape, density=density).to(arguments.device)
    y, x = (torch.randn(tokens, n, dtype=torch.bfloat16, device=arguments.device) for n in features)
    sums = torch.zeros(pattern.nnz, *block_shape, device=arguments.device)
    index = pattern.index_on(x.device)
    up, down = (
        BlockSparseLinear(ins, outs, density=density, block_shape=block_shape, device=x.device, dtype=x.dtype)
        for ins, outs in (features[::-1], features)
    )
    mlp, inputs = BlockSparseMLP(up, down), x.clone().requires_grad_()
    parameters = [inputs, *mlp.parameters()]

    def step(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(inputs), parameters, x)

    ways: dict[str, Callable[[], Any]] = {
        "stored_us": lambda: sdd(y, x, pattern),
        "written_us": lambda: sdd(y, x, pattern, out=sums),
        "with_bias_us": lambda: torch.ops.tilesparse.sdd_tn_with_bias(y, x, *index),
        "bias_apart_us": lambda: (sdd(y, x, pattern), y.sum(0)),
        "step_us": lambda: step(mlp),
        "step_apart_us": lambda: step(lambda x: down(torch.nn.functional.gelu(up(x)))),
    }

    def added() -> Tensor:
        return sdd(y, x, pattern, out=sums, accumulate=True)

    def added_apart() -> Tensor:
        return sums.add_(sdd(y, x, pattern))

    sums.zero_()
    together = added().clone()
    sums.zero_()
    error = relative_error(together.bfloat16().float(), added_apart())
    timer = CudaTimer() if arguments.device == "cuda" else HostTimer()
    times = steady_times(added, added_apart, timer, arguments.repetitions, **ways)
    apart = sum(times.dense_us) / 2
    return {
        "added_us": times.sparse_us,
        "added_apart_us": apart,
        **{name: sum(times.beside[name]) / 2 for name in ways},
        "speedup": apart / times.sparse_us,
        "unsteady": times.unsteady,
        "wrong": error is None or error > WRONG,
    }


if __name__ == "__main__":
    sys.exit(main())
