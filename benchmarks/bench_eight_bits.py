"""Times products whose both factors have 8 bits, against dense products in 8 bits and in bfloat16.

    python benchmarks/bench_eight_bits.py --output eight_bits.json

η is measured against PyTorch's fastest dense product in 8 bits: `torch._scaled_mm` of float8 with a scale
for each row and fast accumulation. Products of this library are given x in 8 bits, as that one is; what
quantizing x takes is a result of its own, and so is the product of a weight that keeps two of each four
values of its blocks. `float8_scaled` has scales inside of the sums, of 128 k of a token
and of blocks of 128 x 128, and so has the dense product that it is measured against.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from harness import (
    Timer,
    add_names,
    block_list,
    density_list,
    measuring,
    parsed,
    poisoned,
    relative_error,
    result_parser,
    run_benchmark,
    steady_times,
    warm_up,
    within_budget,
)
from problems import LAYERS, Case, Shape, make_pattern
from torch import Tensor
from torch.nn import functional as F

from tilesparse import BlockSparseMatrix, functional, storage
from tilesparse._checks import Operands
from tilesparse._runtime.device import DDS_NT
from tilesparse._runtime.launch import dds
from tilesparse._runtime.pattern_cache import prepared

SHAPES = {
    shape.name: shape
    for shape in (
        *LAYERS.values(),
        Shape("square", 8192, 4096, 4096),
        Shape("up-m2048", 2048, 14336, 4096),
        Shape("up-m512", 512, 14336, 4096),
        Shape("up-m128", 128, 14336, 4096),
    )
}
QUANTIZED = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "float8_scaled": torch.float8_e4m3fn}
GROUP = 128  # features of x, and sides of a block, that have one scale inside of the sums
LEAST_COLUMNS = 64  # of blocks that kernels for 2:4 in 8 bits multiply
REPETITIONS = 20
TOLERANCE = {"int8": 3e-3, "float8": 3e-3, "float8 fast": 4e-3, "float8_scaled": 3e-3}
TOLERANCE |= {f"{name} 2:4": TOLERANCE[name] for name in ("int8", "float8")}  # all in bfloat16


class Layer:
    """Activations and weights of a case, in bfloat16 and in 8 bits."""

    def __init__(self, case: Case, seed: int) -> None:
        self.pattern = make_pattern(case, torch.Generator().manual_seed(seed))
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.bfloat16, device="cuda")

        self.dtype = QUANTIZED[case.precision]
        self.x, self.blocks = (
            randn(case.shape.tokens, case.shape.in_features),
            randn(self.pattern.nnz, *case.block_shape),
        )
        self.inside = case.precision == "float8_scaled"  # scales of the sums
        self.quantized = self.quantize()
        self.weight = randn(*self.pattern.shape)  # of the dense layer
        granularity, pattern = ("block", None) if self.inside else ("feature", self.pattern)
        self.values, scales = storage.quantize_weights(
            self.blocks, self.dtype, granularity=granularity, pattern=pattern
        )
        self.scales = scales[:, None] if self.inside else scales
        self.compressible = not self.inside and case.block_shape[1] >= LEAST_COLUMNS
        if self.compressible:
            kept = torch.zeros_like(self.values, dtype=torch.bool)
            kept[:, :, ::2] = True
            self.compressed = storage.compress(self.values, kept)

    def quantize(self) -> tuple[Tensor, Tensor]:
        return functional.quantize_activations(
            self.x, self.dtype, granularity="group" if self.inside else "token"
        )

    def sparse(self, fast: bool = False) -> Tensor:
        """Multiply x that is there in 8 bits."""
        return self._product(self.values, None, fast)

    def sparse_2_4(self) -> Tensor:
        """Multiply by the first and the third of each four values of a row."""
        return self._product(*self.compressed, False)

    def _product(self, values: Tensor, metadata: Tensor | None, fast: bool) -> Tensor:
        pattern, (x_values, x_scales) = prepared(self.pattern.index_on(self.x.device)), self.quantized
        operands = Operands(metadata, self.scales, fast=fast, x_values=x_values, x_scales=x_scales)
        return dds(DDS_NT, self.x, values, pattern, operands=operands)

    def sparse_bf16(self) -> Tensor:
        return functional.linear(self.x, self.blocks, self.pattern)

    def dense_bf16(self) -> Tensor:
        return F.linear(self.x, self.weight)

    def exact(self, every: int = 1) -> Tensor:
        """The product of the quantized factors in float32; only one of so many values of a row counts."""
        values, scales = self.quantized
        kept = torch.arange(self.pattern.block_shape[1], device="cuda") % every == 0
        blocks = self.values.float() * kept * (self.scales[:, None] if self.inside else 1)
        weight = BlockSparseMatrix(blocks, self.pattern).to_dense()
        if self.inside:
            return (values.float() * scales.repeat_interleave(GROUP, 1)) @ weight.t()
        return (values.float() * scales[:, None]) @ (weight * self.scales[:, None]).t()


def dense_calls(layer: Layer) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's products in 8 bits of a dense weight, by what they multiply."""
    if layer.inside:
        return {"dense": scaled_call(layer), "dense_by_row": row_calls(layer.x, layer.weight)["dense"]}
    return row_calls(layer.x, layer.weight)


def scaled_call(layer: Layer) -> Callable[[], Tensor]:
    """PyTorch's product with scales inside of the sums."""
    x, of_x = layer.quantized
    out_features, in_features = layer.weight.shape
    tiles = layer.weight.view(out_features // GROUP, GROUP, in_features // GROUP, GROUP).transpose(1, 2)
    stored, of_w = storage.quantize_weights(tiles.reshape(-1, GROUP, GROUP), layer.dtype, granularity="block")
    w = stored.view(tiles.shape).transpose(1, 2).reshape(layer.weight.shape)
    of_w = of_w.view(tiles.shape[:2])
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return partial(F.scaled_mm, x, w.t(), of_x, recipes[0], of_w.t(), recipes[1])


def row_calls(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's products in float8 with a scale for each row of both factors."""
    x, of_x = functional.quantize_activations(x, torch.float8_e4m3fn)
    w, of_w = functional.quantize_activations(weight, torch.float8_e4m3fn)
    factors = x, w.t(), of_x[:, None], of_w[None]
    multiply = partial(torch._scaled_mm, *factors, out_dtype=torch.bfloat16)
    return {
        "dense": partial(multiply, use_fast_accum=True),
        "dense_exact": partial(multiply, use_fast_accum=False),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if an output was wrong or the GPU gave up."""
    parser = result_parser(__doc__, "eight_bits.json", 540.0, seed=True)
    add_names(parser, "--dtypes", QUANTIZED)
    add_names(parser, "--shapes", SHAPES)
    parser.add_argument("--blocks", type=block_list, default=block_list("128,64,32"), help="(128,64,32)")
    parser.add_argument("--densities", type=density_list, default=(0.5, 0.25, 0.1), help="(.5,.25,.1)")
    arguments = parsed(parser, argv)
    with torch.no_grad():
        return run_benchmark(arguments, _run)


def _run(arguments: Any, document: dict[str, Any]) -> None:
    start, timer = time.monotonic(), Timer("cuda")
    warm_up()
    shapes = [SHAPES[name] for name in arguments.shapes]
    cases = [
        Case("dds_nt", *one, "random", "row")
        for one in product(arguments.dtypes, shapes, arguments.blocks, arguments.densities)
        if one[0] != "float8_scaled" or one[2] == (GROUP, GROUP)
    ]
    for case in within_budget(cases, arguments, document, start):
        record = case.record()
        document["cases"].append(record)
        with measuring(record, contender="tilesparse") as result:
            result |= _measure(Layer(case, arguments.seed), case, timer)
            print(f"    {result}", flush=True)


def _measure(layer: Layer, case: Case, timer: Timer) -> dict[str, Any]:
    """Microseconds of ours and of those that users would pick instead, and errors of ours."""
    exact = layer.exact()
    errors = {case.precision: relative_error(poisoned(layer.sparse), exact)}
    calls = dense_calls(layer)
    dense = calls.pop("dense")
    others = {**calls, "dense_bf16": layer.dense_bf16, "sparse_bf16": layer.sparse_bf16}
    others["quantize"] = lambda: layer.quantize()[0]
    if case.precision == "float8":
        fast = partial(layer.sparse, True)
        errors["float8 fast"] = relative_error(poisoned(fast), exact)
        others["fast"] = fast
    del exact
    if layer.compressible:
        errors[f"{case.precision} 2:4"] = relative_error(poisoned(layer.sparse_2_4), layer.exact(every=2))
        others["two_four"] = layer.sparse_2_4
    times = steady_times(layer.sparse, dense, timer, REPETITIONS)
    found = {f"{name}_us": round(timer.microseconds(call, REPETITIONS), 2) for name, call in others.items()}
    dense_us = sum(times.dense_us) / 2
    return {
        "sparse_us": round(times.sparse_us, 2),
        "dense_us": [round(us, 2) for us in times.dense_us],
        **found,
        "eta": round(dense_us * layer.pattern.density / times.sparse_us, 3),
        "speedup": round(dense_us / times.sparse_us, 3),
        "unsteady": times.unsteady,
        "errors": errors,
        "wrong": any(error is None or error > TOLERANCE[name] for name, error in errors.items()),
    }


if __name__ == "__main__":
    sys.exit(main())
