"""Grouped products of block-sparse experts, and whole layers, against dense grouped ones and dense loops.

    python benchmarks/bench_experts.py --output experts.json

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from harness import (
    Timer,
    add_names,
    block_list,
    density_list,
    judged,
    measuring,
    name_list,
    parsed,
    poisoned,
    positive,
    recording,
    relative_error,
    result_parser,
    run_benchmark,
    sizes,
    steady_times,
    subset,
    warm_up,
    within_budget,
    write_json,
)
from torch import Tensor, nn

from tilesparse import BlockPattern, BlockSparseExperts, BlockSparseMatrix, functional, storage
from tilesparse import _checks as products
from tilesparse._runtime.device import DDS_NT
from tilesparse._runtime.launch import dds
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.functional import linear

OPS = ("forward", "dx", "dw")
SECTIONS = ("products", "layer")
LAYER = {  # Qwen3-30B-A3B
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
ROUTINGS = ("even", "zipf")
EIGHT = {"int8": torch.int8, "float8": torch.float8_e4m3fn}  # of both factors; all else is in bfloat16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, **dict.fromkeys(EIGHT, torch.bfloat16)}
WRONG = {
    "bf16": 1e-2,
    "fp32": 2e-5,
    "int8": 1e-2,
    "float8": 1e-2,
}  # relative Frobenius norm of the difference
WRONG_LAYER = WRONG | dict.fromkeys(EIGHT, 8e-2)  # beside a layer whose activations are not rounded
WARM_UP_CALLS = 3


class Shape(NamedTuple):
    """The projection of gate and up of all experts, and the tokens that each goes to ``top_k`` of them."""

    name: str
    experts: int
    out_features: int
    in_features: int
    top_k: int
    tokens: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("many-8192", 128, 1536, 2048, 8, 8192),  # Qwen3-30B-A3B
        Shape("many-64", 128, 1536, 2048, 8, 64),
        Shape("few-8192", 8, 28672, 4096, 2, 8192),  # Mixtral 8x7B
        Shape("few-512", 8, 28672, 4096, 2, 512),
    )
}


@dataclass(frozen=True)
class Case:
    """One pattern and routing; all its products are measured together."""

    shape: Shape
    block_shape: tuple[int, int]
    density: float
    dtype: str
    routing: str

    def __str__(self) -> str:
        bn, bk = self.block_shape
        return f"{self.shape.name:10} {f'{bn}x{bk}':7} {self.density:<4g} {self.dtype} {self.routing}"

    def record(self) -> dict[str, Any]:
        """Return what is written of it, with results to come."""
        own = {"block_shape": list(self.block_shape), "density": self.density}
        own |= {"dtype": self.dtype, "routing": self.routing}
        return {"shape": self.shape.name, **self.shape._asdict(), **own, "results": []}


class Operands:
    """Operands of a case: normal numbers in the blocks, their dense weight [E, out, in], tokens.

    Tokens are sorted by expert; ``offsets`` [E + 1] and the counts that the host knows say where they change.
    """

    def __init__(self, case: Case, device: str, seed: int) -> None:
        shape, dtype = case.shape, DTYPES[case.dtype]
        generator = torch.Generator().manual_seed(seed)
        self.pattern = BlockPattern.random(
            (shape.experts * shape.out_features, shape.in_features),
            block_shape=case.block_shape,
            density=case.density,
            parts=(shape.experts, 1),
            generator=generator,
        ).to(device)
        counts = torch.bincount(_chosen_experts(case, generator), minlength=shape.experts)
        self.counts: list[int] = counts.tolist()
        ends = counts.cumsum(0)
        self.offsets = torch.cat((ends.new_zeros(1), ends)).to(device, torch.int32)
        torch.manual_seed(seed)
        rows = sum(self.counts)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device)

        self.values = randn(self.pattern.nnz, *case.block_shape)
        self.x = randn(rows, shape.in_features)
        self.dy = randn(rows, shape.out_features)
        self.weight = self.dense(case)

    def dense(self, case: Case) -> Tensor:
        """[E, out, in] of the same values, so that the dense products check the sparse ones."""
        whole = BlockSparseMatrix(self.values, self.pattern).to_dense()
        return whole.view(case.shape.experts, case.shape.out_features, case.shape.in_features)

    def randomize_weight(self) -> None:
        """Leave no zeros in the dense weight: GPUs multiply them faster."""
        self.weight.normal_()


def _chosen_experts(case: Case, generator: torch.Generator) -> Tensor:
    """[tokens * top_k]: each token draws its experts without replacement (Gumbel top-k; Kool et al., 2019).

    "even": all are equally likely, "zipf": in proportion to 1 / rank.
    """
    shape = case.shape
    likely = torch.zeros(shape.experts)
    if case.routing == "zipf":
        likely = -torch.arange(1, shape.experts + 1).log()
    uniform = torch.rand(shape.tokens, shape.experts, generator=generator).clamp_(1e-9, 1 - 1e-7)
    return (likely - (-uniform.log()).log()).topk(shape.top_k).indices.flatten()


@dataclass(frozen=True)
class LayerCase:
    """A whole Qwen3-MoE layer: router, sorting, experts, and the sum of their results."""

    tokens: int
    block_shape: tuple[int, int]
    density: float
    dtype: str

    def __str__(self) -> str:
        bn, bk = self.block_shape
        return f"layer, {self.tokens} tokens {f'{bn}x{bk}':7} {self.density:<4g} {self.dtype}"

    def record(self) -> dict[str, Any]:
        """Return what is written of it, with results to come."""
        own = {"tokens": self.tokens, "block_shape": list(self.block_shape), "density": self.density}
        own["dtype"] = self.dtype
        return {"shape": "layer", **LAYER, **own, "results": []}

    def make(self, device: str) -> tuple[nn.Module, nn.Module]:
        """Return the dense layer, by grouped products, and the sparse one with its best blocks."""
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(**LAYER)
        config._experts_implementation = "grouped_mm"
        with torch.device(device):
            dense = Qwen3MoeSparseMoeBlock(config).to(DTYPES[self.dtype])
        for parameter in dense.parameters():
            nn.init.normal_(parameter, std=0.02)
        sparse = copy.deepcopy(dense)
        stored: dict[str, Any] = {}
        if self.dtype in EIGHT:
            name = str(EIGHT[self.dtype]).removeprefix("torch.")
            stored = {"storage": name, "activations": name}
        sparse.experts = BlockSparseExperts.from_experts(
            dense.experts, self.density, block_shape=self.block_shape, **stored
        )
        return dense, sparse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if a result was wrong or the GPU gave up."""
    arguments = parsed(_parser(), argv)
    on_gpu = arguments.device == "cuda"
    # Not the default stream, which no graph captures: gradients run where their forward pass ran.
    with torch.cuda.stream(torch.cuda.Stream() if on_gpu else None):
        return run_benchmark(arguments, _run)


def _parser() -> argparse.ArgumentParser:
    parser = result_parser(__doc__, "experts.json", 540.0, device=True, repetitions=20, seed=True)
    for option, names in (("--ops", OPS), ("--sections", SECTIONS), ("--routings", ROUTINGS)):
        add_names(parser, option, names)
    add, dtypes = parser.add_argument, ",".join(DTYPES)
    add("--dtypes", type=subset(DTYPES), default=(), help=f"of {dtypes} (bf16 on a GPU, fp32 on a CPU)")
    add(
        "--shapes",
        type=_shapes,
        default=tuple(SHAPES.values()),
        help=f"of {','.join(SHAPES)}, or experts x out x in x top_k x tokens as 8x1024x512x2x512 (all named)",
    )
    add("--layer-tokens", type=positive, nargs="+", default=[8192], help="of a whole layer (%(default)s)")
    add("--blocks", type=block_list, default=block_list("128,64"), help="as 32 or 128x32 (128,64)")
    add("--densities", type=density_list, default=(0.25, 0.5, 1.0), help="(.25,.5,1)")
    return parser


def _shapes(text: str) -> tuple[Shape, ...]:
    names = "experts x out x in x top_k x tokens"
    return tuple(SHAPES.get(name) or Shape(name, *sizes(name, names)) for name in name_list(text))


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    start = time.monotonic()
    on_gpu = arguments.device == "cuda"
    timer = Timer(arguments.device)
    if on_gpu:
        warm_up()
    else:
        document["environment"]["threads"] = torch.get_num_threads()
    axes = arguments.blocks, arguments.densities, arguments.dtypes or ("bf16" if on_gpu else "fp32",)
    cases: list[Case | LayerCase] = []
    if "products" in arguments.sections:
        cases += [Case(*parts) for parts in product(arguments.shapes, *axes, arguments.routings)]
    if "layer" in arguments.sections:
        cases += [LayerCase(*parts) for parts in product(arguments.layer_tokens, *axes)]
    for case in within_budget(cases, arguments, document, start):
        record = case.record()
        document["cases"].append(record)
        with recording(record, "case"):
            if isinstance(case, Case):
                _measure_case(case, record, timer, arguments)
            else:
                _measure_layer(case, record, timer, arguments)
        write_json(arguments.output, document)


def _measure_case(case: Case, record: dict[str, Any], timer: Timer, arguments: argparse.Namespace) -> None:
    operands = Operands(case, arguments.device, arguments.seed)
    record |= {"rows": len(operands.x), "most_rows": max(operands.counts)}
    if case.dtype in EIGHT:
        with measuring(record, op="forward") as result, torch.no_grad():
            result |= _measure_in_8_bits(case, operands, timer, arguments.repetitions)
            print(f"  {result}", flush=True)
        return
    calls = {op: _sparse(op, operands) for op in arguments.ops}
    errors = {op: relative_error(poisoned(calls[op]), _exact(op, operands)) for op in arguments.ops}
    operands.randomize_weight()
    for op in arguments.ops:
        with measuring(record, op=op) as result:
            result |= _measure(op, calls[op], operands, timer, arguments.repetitions)
            result |= judged(errors[op], WRONG[case.dtype])
            print(f"  {op:8} {result}", flush=True)


def _measure(
    op: str, sparse: Callable[[], Tensor], operands: Operands, timer: Timer, repetitions: int
) -> dict[str, Any]:
    """Microseconds of the sparse product and of the dense ways."""
    loop = captured(_loop(op, operands))
    grouped = loop if not operands.x.is_cuda else captured(_grouped(op, operands))
    times = steady_times(captured(sparse), grouped, timer, repetitions, loop=loop)
    dense = {name: sum(around) / 2 for name, around in times.beside.items()}
    return {
        "t_us": round(times.sparse_us, 2),
        "grouped_us": round(dense["dense"], 2) if operands.x.is_cuda else None,
        "loop_us": round(dense["loop"], 2),
        "speedup": round(min(dense.values()) / times.sparse_us, 4),
        "unsteady": times.unsteady,
    }


def _measure_in_8_bits(case: Case, operands: Operands, timer: Timer, repetitions: int) -> dict[str, Any]:
    """Microseconds of the product of factors in 8 bits, and of what users would pick instead.

    "grouped" is PyTorch's product of float8 with a scale for each row and fast accumulation, as ``fast_us``
    has it; ``whole_us`` quantizes x as well.
    """
    dtype, x, pattern = EIGHT[case.dtype], operands.x, operands.pattern
    values, scales = storage.quantize_weights(operands.values, dtype, granularity="feature", pattern=pattern)
    x_values, x_scales = functional.quantize_activations(x, dtype)
    stored = products.Operands(
        scales=scales, offsets=operands.offsets, fast=False, x_values=x_values, x_scales=x_scales
    )
    kept = prepared(pattern.index_on(x.device))

    def sparse(stored: products.Operands = stored) -> Tensor:
        return dds(DDS_NT, x, values, kept, operands=stored)

    rows, _ = (index.to(x.device) for index in pattern.block_indices())
    operands.values = values.float() * scales.view(-1, values.shape[1])[rows][:, :, None]
    operands.weight = operands.weight.new_empty(0)
    exact = [
        tokens @ weight.T
        for tokens, weight in zip(
            (x_values.float() * x_scales[:, None]).split(operands.counts), operands.dense(case), strict=True
        )
    ]
    error = relative_error(poisoned(sparse), torch.cat(exact))
    del exact
    operands.values = operands.values.bfloat16()
    operands.weight = torch.randn(
        case.shape.experts,
        case.shape.out_features,
        case.shape.in_features,
        dtype=x.dtype,
        device=x.device,
    )
    x8, of_x = functional.quantize_activations(x, EIGHT["float8"])
    w8, of_w = functional.quantize_activations(operands.weight, EIGHT["float8"])
    ends = operands.offsets[1:]

    def grouped() -> Tensor:
        options: dict[str, Any] = {"offs": ends, "out_dtype": x.dtype, "use_fast_accum": True}
        return torch._scaled_grouped_mm(x8, w8.mT, of_x, of_w, **options)

    def whole() -> Tensor:
        return functional.quantized_linear(x, values, pattern, scales, offsets=operands.offsets)

    others = {
        "whole": whole,
        "quantize": lambda: functional.quantize_activations(x, dtype)[0],
        "grouped_bf16": _grouped("forward", operands),
        "sparse_bf16": _sparse("forward", operands),
    }
    if case.dtype == "float8":
        others["fast"] = partial(sparse, stored._replace(fast=True))
    times = steady_times(captured(sparse), captured(grouped), timer, repetitions)
    grouped_us = sum(times.dense_us) / 2
    found = {
        f"{name}_us": round(timer.microseconds(captured(call), repetitions), 2)
        for name, call in others.items()
    }
    return {
        "t_us": round(times.sparse_us, 2),
        "grouped_us": round(grouped_us, 2),
        **found,
        "speedup": round(grouped_us / times.sparse_us, 4),
        "unsteady": times.unsteady,
        **judged(error, WRONG[case.dtype]),
    }


def _measure_layer(
    case: LayerCase, record: dict[str, Any], timer: Timer, arguments: argparse.Namespace
) -> None:
    torch.manual_seed(arguments.seed)
    dense, sparse = case.make(arguments.device)
    size = 1, case.tokens, LAYER["hidden_size"]
    x, dy = (torch.randn(size, dtype=DTYPES[case.dtype], device=arguments.device) for _ in range(2))
    error = _error_of_layer(dense, sparse, x)
    calls = {"layer forward": _forward_of, "layer step": _step_of}
    if case.dtype in EIGHT:
        del calls["layer step"]  # their weights have no gradient
    for op, call in calls.items():
        with measuring(record, op=op) as result:
            sparse_call, dense_call = (captured(call(layer, x, dy)) for layer in (sparse, dense))
            times = steady_times(sparse_call, dense_call, timer, arguments.repetitions)
            result |= {
                "t_us": round(times.sparse_us, 2),
                "grouped_us": round(sum(times.dense_us) / 2, 2),
                "speedup": round(times.speedup, 4),
                "unsteady": times.unsteady,
                **judged(error, WRONG_LAYER[case.dtype]),
            }
            print(f"  {op:8} {result}", flush=True)


@torch.no_grad()
def _error_of_layer(dense: Any, sparse: Any, x: Tensor) -> float | None:
    """Compare with the dense layer of the same weights, whose routing is the same."""
    same = copy.deepcopy(dense)
    for name, tensor in sparse.experts.to_dense().items():
        same.experts.get_parameter(name).copy_(tensor)
    return relative_error(sparse(x), same(x).float())


def _forward_of(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], Tensor]:
    return torch.no_grad()(lambda: layer(x))


def _step_of(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], Tensor]:
    """Forward, and the gradients of x and of all parameters."""
    wanted = [x.detach().requires_grad_(), *layer.parameters()]
    return lambda: torch.autograd.grad(layer(wanted[0]), wanted, dy)[0]


def _sparse(op: str, operands: Operands) -> Callable[[], Tensor]:
    """The product, or a gradient alone of a forward pass that happened before."""
    x, values = operands.x.detach(), operands.values.detach()
    if op == "forward":
        return lambda: linear(x, values, operands.pattern, offsets=operands.offsets)
    wanted = (x if op == "dx" else values).requires_grad_()
    y = linear(x, values, operands.pattern, offsets=operands.offsets)
    return lambda: torch.autograd.grad(y, wanted, operands.dy, retain_graph=True)[0]


def _grouped(op: str, operands: Operands) -> Callable[[], Tensor]:
    """PyTorch's grouped product."""
    x, dy, weight, ends = operands.x, operands.dy, operands.weight, operands.offsets[1:]
    if op == "forward":
        return lambda: torch._grouped_mm(x, weight.mT, offs=ends)
    if op == "dx":
        return lambda: torch._grouped_mm(dy, weight, offs=ends)
    return lambda: torch._grouped_mm(dy.T, x, offs=ends)


def _loop(op: str, operands: Operands) -> Callable[[], Tensor]:
    """One dense product for each expert that has tokens; the host knows their numbers.

    Results are new in each call, as those of the other ways are: on a CPU memory that is new costs time.
    """
    counts, weight = operands.counts, operands.weight

    def products(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
        result = torch.empty_like(like)
        for x, w, out in zip(left.split(counts), right, result.split(counts), strict=True):
            if len(x):
                torch.mm(x, w, out=out)
        return result

    def gradient_of_weight() -> Tensor:
        result = torch.empty_like(weight)
        for dy, x, out in zip(operands.dy.split(counts), operands.x.split(counts), result, strict=True):
            torch.mm(dy.T, x, out=out)  # zeros without tokens
        return result

    def forward() -> Tensor:
        return products(operands.x, weight.mT, operands.dy)

    def gradient_of_x() -> Tensor:
        return products(operands.dy, weight, operands.x)

    return {"forward": forward, "dx": gradient_of_x, "dw": gradient_of_weight}[op]


def _exact(op: str, operands: Operands) -> Tensor:
    """The result in float32, expert by expert; of the gradient of W the kept blocks, in the values' order."""
    parts = [tensor.split(operands.counts) for tensor in (operands.x, operands.dy)]
    results = []
    for weight, x, dy in zip(operands.weight, *parts, strict=True):
        left, right = {"forward": (x, weight.T), "dx": (dy, weight), "dw": (dy.T, x)}[op]
        results.append(left.float() @ right.float())
    if op != "dw":
        return torch.cat(results)
    return BlockSparseMatrix.from_dense(torch.cat(results), operands.pattern).values


def captured(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the replay of a CUDA graph of a call, so that the host's time does not count."""
    if not call().is_cuda:
        return call
    graph = torch.cuda.CUDAGraph()
    for _ in range(WARM_UP_CALLS):
        call()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


if __name__ == "__main__":
    sys.exit(main())
