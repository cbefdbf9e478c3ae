"""Times of tilesparse.jax beside PyTorch's call of the same kernels, dense products of both, and BCOO of JAX.

    python benchmarks/bench_jax.py --output jax.json

Calls follow each other until the device is idle again, so that a time is the host's or the device's,
whichever is longer: also that of a call of JAX, which products within a program do not have; "in a program"
is an eighth of one with eight. All take turns; medians of the turns. "traced" has its pattern as an argument,
and plans it in every call; "gradients" computes y and the gradients of values and x. Results are compared
with the dense product.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch
import torch.utils.dlpack
from harness import parsed, positive, recording, result_parser, run_benchmark, warm_up
from jax.experimental import sparse

import tilesparse.functional
import tilesparse.jax
from tilesparse import BlockPattern

SIZES = {"cuda": (8192, 4096, 4096), "cpu": (1024, 1024, 1024)}  # tokens, out and in features
CASES = {  # dtype, block size, density
    "cuda": (("bfloat16", 64, 0.25), ("bfloat16", 64, 0.1), ("float32", 64, 0.25)),
    "cpu": (("float32", 64, 0.25), ("float64", 32, 0.1)),
}
IN_A_ROW = 8
SPARSEST = 0.1  # where BCOO is measured, too, once
ERRORS = {"bfloat16": 1e-2, "float32": 2e-3, "float64": 1e-12}  # of the largest result
FILL = 0.04  # seconds of calls in a row


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if a result was wrong or the GPU gave up."""
    parser = result_parser(__doc__, "jax.json", device=True)
    parser.add_argument("--rounds", type=positive, default=9, help="turns of each (%(default)s)")
    return run_benchmark(parsed(parser, argv), _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    jax.config.update("jax_enable_x64", True)
    torch.set_float32_matmul_precision("high")  # TF32, as JAX has it
    document["environment"]["jax"] = jax.__version__
    if arguments.device == "cuda":
        warm_up()
    for dtype, block, density in CASES[arguments.device]:
        case: dict[str, Any] = {"dtype": dtype, "block": block, "density": density, "results": []}
        document["cases"].append(case)
        with recording(case, f"{dtype} b{block} at {density}"):
            case["results"] += _measure(arguments, dtype, block, density)


def _measure(arguments: argparse.Namespace, dtype: str, block: int, density: float) -> list[dict[str, Any]]:
    tokens, rows, cols = SIZES[arguments.device]
    generator = torch.Generator().manual_seed(0)
    pattern = BlockPattern.random((rows, cols), block_shape=block, density=density, generator=generator)
    options: dict[str, Any] = {"device": arguments.device, "dtype": getattr(torch, dtype)}
    values = torch.randn(pattern.nnz, block, block, **options) / (density * cols) ** 0.5  # y as large as x
    x = torch.randn(tokens, cols, **options)
    pattern = pattern.to(arguments.device)
    dense = tilesparse.BlockSparseMatrix(values, pattern).to_dense()

    indptr, indices = (one.cpu().numpy() for one in (pattern.crow_indices, pattern.col_indices))
    form: dict[str, Any] = {"shape": (rows, cols), "block_shape": block}
    own = tilesparse.jax.BlockSparse(jnp.from_dlpack(values), tilesparse.jax.Pattern(indptr, indices, **form))
    arrays = jnp.asarray(indptr), jnp.asarray(indices)
    traced = tilesparse.jax.BlockSparse(own.values, tilesparse.jax.Pattern(*arrays, **form))
    of_jax, dense_of_jax = jnp.from_dlpack(x), jnp.from_dlpack(dense)
    product = jax.jit(lambda matrix, x: x @ matrix.T)

    def both(values: Any, x: Any, g: Any) -> Any:
        y, pull = jax.vjp(lambda values, x: x @ tilesparse.jax.BlockSparse(values, own.pattern).T, values, x)
        return y, pull(g)

    gradients = jax.jit(both)
    g = torch.randn(tokens, rows, **options)
    of_g = jnp.from_dlpack(g)
    bcoo = sparse.bcoo_fromdense(dense_of_jax, nse=int((dense != 0).sum())) if density == SPARSEST else None
    times_bcoo = jax.jit(lambda matrix, x: (matrix @ x.T).T)
    in_a_row = jax.jit(lambda matrix, x: functools.reduce(lambda x, _: x @ matrix.T, range(IN_A_ROW), x))
    times_dense = jax.jit(lambda x, w: x @ w.T)
    leaf, of_x = values.clone().requires_grad_(), x.clone().requires_grad_()

    def gradients_of_torch() -> Any:
        y = tilesparse.functional.linear(of_x, leaf, pattern)
        return y, torch.autograd.grad(y, (leaf, of_x), g)

    calls: dict[str, Callable[[], Any]] = {
        "torch": lambda: tilesparse.functional.linear(x, values, pattern),
        "jax": lambda: product(own, of_jax),
        "jax, in a program": lambda: in_a_row(own, of_jax),
        "jax, traced": lambda: product(traced, of_jax),
        "torch, gradients": gradients_of_torch,
        "jax, gradients": lambda: gradients(own.values, of_jax, of_g),
        "torch, dense": lambda: x @ dense.t(),
        "jax, dense": lambda: times_dense(of_jax, dense_of_jax),
    }
    if density == SPARSEST:  # seconds a call
        calls["jax, BCOO"] = lambda: times_bcoo(bcoo, of_jax)
    exact = x.double() @ dense.double().t()
    results = []
    for name, call in calls.items():
        result: dict[str, Any] = {"contender": name}
        results.append(result)
        with recording(result, name):
            if name in ("jax, in a program", "torch, gradients", "jax, gradients"):
                call()
            else:
                y = call()
                y = y if isinstance(y, torch.Tensor) else torch.utils.dlpack.from_dlpack(y)
                error = float((y.double() - exact).abs().max() / exact.abs().max())
                result |= {"error": error, "wrong": not error <= ERRORS[dtype]}
            result["times"] = []
    usable = [(calls[result["contender"]], result) for result in results if "unavailable" not in result]
    for turn in range(arguments.rounds):
        for call, result in usable[:: 1 if turn % 2 else -1]:
            if result["contender"] != "jax, BCOO" or turn == 0:
                result["times"].append(_microseconds(call, arguments.device))
    for _, result in usable:
        count = IN_A_ROW if result["contender"] == "jax, in a program" else 1
        result["us"] = statistics.median(result.pop("times")) / count
        print(f"  {result['contender']:24} {result['us']:12.1f} us", flush=True)
    return results


def _microseconds(call: Callable[[], Any], device: str) -> float:
    """Time of a call among as many as fill some time; two at least."""

    def several(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        _wait(result, device)
        return (time.perf_counter() - start) / count

    once = several(1)
    return 1e6 * (once if once > FILL else several(max(2, int(FILL / once))))


def _wait(result: Any, device: str) -> None:
    jax.block_until_ready(result if not isinstance(result, torch.Tensor) else ())
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
