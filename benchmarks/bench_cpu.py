"""Times block-sparse products on a CPU against dense PyTorch.

    python benchmarks/bench_cpu.py --output benchmarks/results/cpu.json

Forward, gradient of x and gradient of W, by PyTorch's threads, on normal random numbers. The dense
product and the sparse ones of all densities and blocks take turns, so that they meet the same state of
the machine; the least times count. Results are checked against dense products of the expanded weight.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from harness import Timer, described, judged, relative_error, result_parser, write_json
from torch import Tensor

from tilesparse import BlockPattern, BlockSparseMatrix
from tilesparse.functional import dds, linear, sdd
from tilesparse.tuning import Product, choose

OPS = ("forward", "dgrad", "wgrad")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative, Frobenius norm
LAYERS = ((768, 3072), (4096, 4096))  # in_features, out_features
BLOCKS = (16, 32, 64)
DENSITIES = (0.25, 0.5)
FEW_TOKENS = (8, 1)
KEPT_BYTES = 30 << 20  # below the 32 MiB up to which glibc learns


class Operands:
    """x [tokens, in_features], y [tokens, out_features] and a dense weight [out_features, in_features]."""

    def __init__(self, product: Product) -> None:
        def randn(*size: int) -> Tensor:
            return torch.randn(size).to(product.dtype)

        self.x = randn(product.tokens, product.in_features)
        self.y = randn(product.tokens, product.out_features)
        self.weight = randn(product.out_features, product.in_features)

    def dense(self, op: str) -> Tensor:
        if op == "forward":
            return torch.nn.functional.linear(self.x, self.weight)
        return self.y @ self.weight if op == "dgrad" else self.y.t() @ self.x


class Contender:
    """One sparse product, of the activations that the others multiply too."""

    def __init__(self, product: Product, operands: Operands) -> None:
        self.product, self.x, self.y = product, operands.x, operands.y
        shape = (product.out_features, product.in_features)
        self.pattern = BlockPattern.random(shape, block_shape=product.block_shape, density=product.density)
        self.values = torch.randn(self.pattern.nnz, *self.pattern.block_shape).to(product.dtype)

    def __call__(self) -> Tensor:
        if self.product.op == "forward":
            return linear(self.x, self.values, self.pattern)
        if self.product.op == "dgrad":
            return dds(self.y, self.values, self.pattern, transpose=False)
        return sdd(self.y, self.x, self.pattern)

    def error(self) -> float | None:
        """Return the relative error of the result against the dense product."""
        weight = BlockSparseMatrix(self.values.float(), self.pattern).to_dense()
        x, y = self.x.float(), self.y.float()
        if self.product.op == "wgrad":
            expected = BlockSparseMatrix.from_dense(y.t() @ x, self.pattern).values
        else:
            expected = x @ weight.t() if self.product.op == "forward" else y @ weight
        return relative_error(self(), expected)


def keep_memory() -> None:
    """Have glibc keep the memory of results, whose page faults would be timed with whatever comes first.

    A freed block this large teaches it so.
    """
    torch.empty(KEPT_BYTES, dtype=torch.uint8)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if a result was wrong."""
    parser = result_parser(__doc__, None, repetitions=41, seed=True)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=("float32", "bfloat16"))
    arguments = parser.parse_args(argv)
    torch.manual_seed(arguments.seed)
    keep_memory()
    document = described(arguments)
    with torch.inference_mode():
        for products in _groups(arguments.dtypes):
            document["cases"] += _measure(products, arguments)
            if arguments.output:
                write_json(arguments.output, document)
    wrong = sum(case["wrong"] for case in document["cases"])
    print(f"{len(document['cases'])} cases, {wrong} wrong results")
    return int(wrong > 0)


def _groups(dtypes: Sequence[str]) -> Iterator[list[Product]]:
    """Every product of many tokens and the forward one of few, each in all blocks and densities."""
    for name in dtypes:
        for layer in LAYERS:
            for op, tokens in (*((op, 512) for op in OPS), *(("forward", few) for few in FEW_TOKENS)):
                like = partial(Product, *layer, tokens, dtype=DTYPES[name], op=op)
                yield [like(density, block_shape=block) for block in BLOCKS for density in DENSITIES]


def _measure(products: Sequence[Product], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    one = products[0]
    print(f"{one.op} {one.dtype}, {one.tokens} x {one.in_features} -> {one.out_features}", flush=True)
    operands = Operands(one)
    contenders = [Contender(product, operands) for product in products]
    dense, *times = Timer("cpu").of_all([lambda: operands.dense(one.op), *contenders], arguments.repetitions)
    cases = []
    for contender, time_us in zip(contenders, times, strict=True):
        case = {
            "op": one.op,
            "dtype": str(one.dtype).removeprefix("torch."),
            "tokens": one.tokens,
            "in_features": one.in_features,
            "out_features": one.out_features,
            "block": contender.pattern.block_shape[0],
            "density": contender.pattern.density,
            "kernel": choose(contender.product, "cpu").kernel,
            "ms": round(time_us / 1e3, 4),
            "dense_ms": round(dense / 1e3, 4),
            "speedup": round(dense / time_us, 3),
            **judged(contender.error(), TOLERANCES[one.dtype]),
        }
        cases.append(case)
        print(
            f"  block {case['block']:3} density {case['density']:.2f}  {case['ms']:8.3f} ms"
            f"  dense {case['dense_ms']:8.3f} ms  {case['speedup']:5.2f}x  {case['kernel']}"
            + ("  WRONG" if case["wrong"] else ""),
            flush=True,
        )
    return cases


if __name__ == "__main__":
    sys.exit(main())
