"""Times products of int8 on a CPU, quantizing x included, against dense int8 products.

    OMP_NUM_THREADS=2 python benchmarks/bench_cpu_eight_bits.py --output eight_bits.json

Dense are PyTorch's dynamically quantized linear layers, with every engine that it has, and ONNX Runtime's
MatMulInteger where onnxruntime and onnx are installed; the fastest one counts. The same patterns in float32
and bfloat16 are timed, too. All products of a layer take turns, and of each the least time counts, since
others share the machine.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from bench_cpu import keep_memory
from harness import Timer, described, result_parser, write_json
from torch.ao.quantization import quantize_dynamic

from tilesparse import BlockPattern, functional
from tilesparse.tuning import Product, choose

SHAPES = ((768, 3072), (3072, 768), (4096, 4096))  # in_features, out_features
OWN = (torch.bfloat16, torch.float32)  # in which the same patterns are multiplied


def dense_calls(x: torch.Tensor, out_features: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Dense products of int8 by their names; x is quantized in every call."""
    layer = torch.nn.Linear(x.shape[1], out_features)
    for engine in torch.backends.quantized.supported_engines:
        if engine not in ("fbgemm", "x86", "onednn"):
            continue
        torch.backends.quantized.engine = engine
        quantized = quantize_dynamic(torch.nn.Sequential(layer), {torch.nn.Linear})
        yield engine, functools.partial(quantized, x)
    try:
        yield "onnxruntime", onnx_call(x, layer.weight.detach())
    except ImportError:
        return


def onnx_call(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
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


def sparse_calls(x: torch.Tensor, product: Product) -> list[Callable[[], torch.Tensor]]:
    """Products of a random pattern: in int8, which quantizes x in every call, and in the other dtypes."""
    shape = (product.out_features, product.in_features)
    pattern = BlockPattern.random(shape, block_shape=product.block_shape, density=product.density)
    values = torch.randint(-127, 128, (pattern.nnz, *pattern.block_shape), dtype=torch.int8)
    scales = torch.rand(product.out_features)
    return [
        lambda: functional.quantized_linear(x, values, pattern, scales),
        *(functools.partial(functional.linear, x.to(dtype), values.to(dtype), pattern) for dtype in OWN),
    ]


def measure(x: torch.Tensor, out_features: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases of one layer and number of tokens."""
    tokens, in_features = x.shape
    like = functools.partial(Product, in_features, out_features, tokens, storage="int8", activations="int8")
    sizes = [(density, block) for density in options.densities for block in options.blocks]
    products = [like(density, block_shape=block) for density, block in sizes]
    dense = dict(dense_calls(x, out_features))
    calls = [call for product in products for call in sparse_calls(x, product)]
    with torch.inference_mode():
        times = iter(Timer("cpu").of_all((*dense.values(), *calls), options.repetitions))
    dense_us = {name: round(next(times), 1) for name in dense}
    cases = []
    for product, (density, block) in zip(products, sizes, strict=True):
        int8_us = next(times)
        case = {
            "tokens": tokens,
            "in_features": in_features,
            "out_features": out_features,
            "density": density,
            "block": block,
            "kernel": choose(product, "cpu").kernel,
            "int8_us": round(int8_us, 1),
            "own_us": {str(dtype).removeprefix("torch."): round(next(times), 1) for dtype in OWN},
            "dense_us": dense_us,
            "speedup": round(min(dense_us.values()) / int8_us, 3),
        }
        cases.append(case)
    return cases


def main(arguments: Sequence[str] | None = None) -> None:
    parser = result_parser(__doc__, None, repetitions=20, seed=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=(512,))
    parser.add_argument("--blocks", type=int, nargs="+", default=(16, 32, 64, 128))
    parser.add_argument("--densities", type=float, nargs="+", default=(0.5, 0.25, 0.1))
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.manual_seed(options.seed)
    keep_memory()
    document = described(options)
    print(f"{torch.get_num_threads()} threads, int8, results in float32, µs")
    print("| layer | tokens | density | blocks | kernel | int8 | bfloat16 | best dense int8 | speedup |")
    print("| --- " * 9 + "|")
    for in_features, out_features in SHAPES:
        for tokens in options.tokens:
            cases = measure(torch.randn(tokens, in_features), out_features, options)
            for case in cases:
                print(f"| {' | '.join(cells_of(case))} |", flush=True)
            document["cases"] += cases
            if options.output:
                write_json(options.output, document)


def cells_of(case: dict[str, Any]) -> list[str]:
    """A line of the table."""
    best, name = min((time, name) for name, time in case["dense_us"].items())
    layer = f"{case['in_features']} → {case['out_features']}"
    counts = (str(case[name]) for name in ("tokens", "density", "block", "kernel"))
    times = f"{case['int8_us']:.0f}", f"{case['own_us']['bfloat16']:.0f}", f"{best:.0f} ({name})"
    return [layer, *counts, *times, f"{case['speedup']:.2f}×"]


if __name__ == "__main__":
    main()
