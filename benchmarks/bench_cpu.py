"""Times block-sparse products on a CPU against dense PyTorch, and in int8 against ONNX Runtime as well.

    python benchmarks/bench_cpu.py --output benchmarks/results/cpu.json
    OMP_NUM_THREADS=2 python benchmarks/bench_cpu.py --dtypes int8 --output eight_bits.json

Forward, gradient of x and gradient of W, by PyTorch's threads, on normal random numbers. The dense
product and the sparse ones of all densities and blocks take turns, so that they meet the same state of
the machine; the least times count. Results are checked against dense products of the expanded weight.
In int8, x is quantized in every call. Dense are then PyTorch's dynamically quantized linear layers, with
every engine that it has, and MatMulInteger where onnxruntime and onnx are installed; the fastest one counts.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from harness import Timer, described, judged, relative_error, result_parser, write_json
from torch import Tensor
from torch.ao.quantization import quantize_dynamic

from tilesparse import BlockPattern, BlockSparseMatrix
from tilesparse.functional import dds, linear, quantized_linear, sdd
from tilesparse.tuning import Product, choose

OPS = ("forward", "dgrad", "wgrad")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3, "int8": 2e-2}  # Frobenius norm, relative
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

        self.product = product

        self.x = randn(product.tokens, product.in_features)
        self.y = randn(product.tokens, product.out_features)
        self.weight = randn(product.out_features, product.in_features)

    def dense(self) -> dict[str, Callable[[], object]]:
        """Return dense products by what computes them."""
        op = self.product.op
        if self.product.activations is not None:
            return dict(dense_in_int8(self.x, self.product.out_features))
        if op == "forward":
            return {"torch": lambda: torch.nn.functional.linear(self.x, self.weight)}
        return {"torch": lambda: self.y @ self.weight if op == "dgrad" else self.y.t() @ self.x}


class Contender:
    """One sparse product, of the activations that the others multiply too."""

    def __init__(self, product: Product, operands: Operands) -> None:
        self.product, self.x, self.y = product, operands.x, operands.y
        shape = (product.out_features, product.in_features)
        self.pattern = BlockPattern.random(shape, block_shape=product.block_shape, density=product.density)
        self.values = torch.randn(self.pattern.nnz, *self.pattern.block_shape).to(product.dtype)
        self.scales = None
        if product.activations is not None:
            self.scales = torch.rand(product.out_features)
            self.values = torch.randint_like(self.values, -127, 128, dtype=torch.int8)

    def __call__(self) -> Tensor:
        if self.scales is not None:
            return quantized_linear(self.x, self.values, self.pattern, self.scales)
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
            expected = expected if self.scales is None else expected * self.scales
        return relative_error(self(), expected)


def dense_in_int8(x: Tensor, out_features: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Dense products of int8 by their names; x is quantized in every call."""
    layer = torch.nn.Linear(x.shape[1], out_features)
    for engine in torch.backends.quantized.supported_engines:
        if engine not in ("fbgemm", "x86", "onednn"):
            continue
        torch.backends.quantized.engine = engine
        quantized = quantize_dynamic(torch.nn.Sequential(layer), {torch.nn.Linear})
        yield engine, partial(quantized, x)
    try:
        yield "onnxruntime", onnx_call(x, layer.weight.detach())
    except ImportError:
        return


def onnx_call(x: Tensor, weight: Tensor) -> Callable[[], object]:
    """ONNX Runtime's MatMulInteger."""
    onnxruntime = importlib.import_module("onnxruntime")
    onnx = importlib.import_module("onnx")
    helper = onnx.helper

    scale = weight.abs().max() / 127
    constants = {"w": (weight.t() / scale).round().to(torch.int8).contiguous(), "w_scale": scale}
    nodes: tuple[Any, ...] = (
        ("DynamicQuantizeLinear", ["x"], ["q", "x_scale", "x_zero"], {}),
        ("MatMulInteger", ["q", "w", "x_zero"], ["sums"], {}),
        ("Cast", ["sums"], ["floats"], {"to": onnx.TensorProto.FLOAT}),
        ("Mul", ["x_scale", "w_scale"], ["scale"], {}),
        ("Mul", ["floats", "scale"], ["y"], {}),
    )
    graph = helper.make_graph(
        [helper.make_node(op, inputs, outputs, **options) for op, inputs, outputs, options in nodes],
        "linear",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [x.shape[0], weight.shape[0]])],
        [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Its threads would go on to take processors from the others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, {"x": x.numpy()})


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
    warnings.simplefilter("ignore")
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
        options: dict[str, Any] = {"dtype": DTYPES[name]}
        ops: tuple[str, ...] = OPS
        if name == "int8":
            options, ops = {"dtype": torch.float32, "storage": name, "activations": name}, OPS[:1]
        for layer in LAYERS:
            for op, tokens in (*((op, 512) for op in ops), *(("forward", few) for few in FEW_TOKENS)):
                yield [
                    Product(*layer, tokens, density, block, op=op, **options)
                    for block in BLOCKS
                    for density in DENSITIES
                ]


def _measure(products: Sequence[Product], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    one = products[0]
    dtype = one.activations or str(one.dtype).removeprefix("torch.")
    print(f"{one.op} {dtype}, {one.tokens} x {one.in_features} -> {one.out_features}", flush=True)
    operands = Operands(one)
    contenders = [Contender(product, operands) for product in products]
    others = operands.dense()
    found = Timer("cpu").of_all([*others.values(), *contenders], arguments.repetitions)
    dense, times = min(found[: len(others)]), found[len(others) :]
    cases = []
    for contender, time_us in zip(contenders, times, strict=True):
        case = {
            "op": one.op,
            "dtype": dtype,
            "tokens": one.tokens,
            "in_features": one.in_features,
            "out_features": one.out_features,
            "block": contender.pattern.block_shape[0],
            "density": contender.pattern.density,
            "kernel": choose(contender.product, "cpu").kernel,
            "ms": round(time_us / 1e3, 4),
            "dense_ms": round(dense / 1e3, 4),
            "speedup": round(dense / time_us, 3),
            **judged(contender.error(), TOLERANCES[dtype]),
            **({"dense_by": min(zip(found, others, strict=False))[1]} if len(others) > 1 else {}),
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
