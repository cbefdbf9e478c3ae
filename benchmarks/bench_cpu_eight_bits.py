"""Times products of int8 on a CPU, quantizing x included, against dense int8 products.

    OMP_NUM_THREADS=2 python benchmarks/bench_cpu_eight_bits.py --output eight_bits.json

Dense are PyTorch's dynamically quantized linear layers, with every engine that it has, and ONNX Runtime's
MatMulInteger where onnxruntime and onnx are installed; the fastest one counts. The same patterns in float32
and bfloat16 are timed, too. All products of a layer take turns, and of each the least time counts, since
others share the machine. --processor measures the processor time of one thread, which does not count the
time that others take.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from bench_cpu import KEPT_BYTES
from harness import environment, result_parser, write_json
from torch.ao.quantization import quantize_dynamic

from tilesparse import _C, BlockPattern, functional
from tilesparse._checks import DTYPES
from tilesparse._runtime.device import DDS_NT
from tilesparse._runtime.pattern_cache import prepared

SHAPES = ((768, 3072), (3072, 768), (4096, 4096))  # in_features, out_features
OWN = (torch.bfloat16, torch.float32)  # in which the same patterns are multiplied
CPU, INT8, SCALES_PER_FEATURE = 0, 5, 3


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


class Sparse:
    """y = x W^T in int8: each call quantizes x and multiplies."""

    def __init__(self, x: torch.Tensor, out_features: int, density: float, block: int) -> None:
        shape = (out_features, x.shape[1])
        pattern = BlockPattern.random(shape, block_shape=block, density=density)
        self.x, self.block, self.density = x, block, density
        self._pattern = pattern
        self._index = prepared(pattern.index_on(torch.device("cpu")))
        self._values = torch.randint(-127, 128, (pattern.nnz, block, block), dtype=torch.int8)
        self._scales = torch.rand(out_features)
        self._product = _C.Product(
            self._index.descriptor,
            DDS_NT,
            INT8,
            CPU,
            len(x),
            ldx=shape[1],
            ldy=shape[0],
            granularity=SCALES_PER_FEATURE,
            result_dtype=DTYPES[torch.float32],
        )
        self.kernel = _C.kernels()[self._product.resolve()[0]].name
        self._workspace = torch.empty(self._product.workspace_size() + 256, dtype=torch.uint8)

    def __call__(self) -> torch.Tensor:
        q, x_scales = functional.quantize_activations(self.x, torch.int8)
        y = torch.empty(len(q), len(self._scales))
        workspace = self._workspace.data_ptr()
        self._product.run(
            q.data_ptr(),
            y.data_ptr(),
            self._values.data_ptr(),
            0,
            0,
            workspace + -workspace % 256,
            0,
            scales=self._scales.data_ptr(),
            x_scales=x_scales.data_ptr(),
        )
        return y

    def in_dtype(self, dtype: torch.dtype) -> Callable[[], object]:
        """The product of the same pattern in another dtype."""
        x, values = self.x.to(dtype), self._values.to(dtype)
        return functools.partial(functional.linear, x, values, self._pattern)


def least_times(
    calls: Sequence[Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> list[float]:
    """Microseconds of each."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own in zip(calls, times, strict=True):
            call()  # whose operands are in the cache then, as far as they fit
            start = clock()
            call()
            own.append(clock() - start)
    return [min(own) * 1e6 for own in times]


def measure(
    x: torch.Tensor, out_features: int, options: argparse.Namespace, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """The cases of one layer and number of tokens."""
    dense = dict(dense_calls(x, out_features))
    sparse = [
        Sparse(x, out_features, density, block) for density in options.densities for block in options.blocks
    ]
    own = [one.in_dtype(dtype) for one in sparse for dtype in OWN]
    with torch.inference_mode():
        times = iter(least_times((*dense.values(), *sparse, *own), options.rounds, clock))
    dense_us = {name: round(next(times), 1) for name in dense}
    sparse_us = [next(times) for _ in sparse]
    best = min(dense_us.values())
    return [
        {
            "tokens": len(x),
            "in_features": x.shape[1],
            "out_features": out_features,
            "density": one.density,
            "block": one.block,
            "kernel": one.kernel,
            "int8_us": round(time_of_int8, 1),
            "own_us": {str(dtype).removeprefix("torch."): round(next(times), 1) for dtype in OWN},
            "dense_us": dense_us,
            "speedup": round(best / time_of_int8, 3),
        }
        for one, time_of_int8 in zip(sparse, sparse_us, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = result_parser(__doc__, None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, nargs="+", default=(512,))
    parser.add_argument("--blocks", type=int, nargs="+", default=(16, 32, 64, 128))
    parser.add_argument("--densities", type=float, nargs="+", default=(0.5, 0.25, 0.1))
    parser.add_argument("--processor", action="store_true", help="processor time instead of time")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.empty(KEPT_BYTES, dtype=torch.uint8)  # see bench_cpu
    clock = time.process_time if options.processor else time.perf_counter
    document: dict[str, Any] = {
        "environment": environment(options.commit) | {"threads": torch.get_num_threads()},
        "arguments": {"rounds": options.rounds, "processor_time": options.processor},
        "cases": [],
    }
    print(f"{torch.get_num_threads()} threads, int8, results in float32, µs")
    print("| layer | tokens | density | blocks | kernel | int8 | bfloat16 | best dense int8 | speedup |")
    print("| --- " * 9 + "|")
    for in_features, out_features in SHAPES:
        for tokens in options.tokens:
            cases = measure(torch.randn(tokens, in_features), out_features, options, clock)
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
