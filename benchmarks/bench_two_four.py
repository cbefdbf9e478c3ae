"""Times 2:4 with every block kept against cuSPARSELt, which has no blocks to drop, and a dense product.

    python benchmarks/bench_two_four.py --output two_four.json

cuSPARSELt is measured as PyTorch calls it, and with the fastest of all its algorithms, split along k or
not, which are timed first. In 8 bits every product is given x in 8 bits. cuSPARSELt's has no scales of
tokens then, while the others multiply by those of tokens and features.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, product
from typing import Any

import torch
from bench_eight_bits import QUANTIZED, SHAPES, row_calls
from harness import (
    Timer,
    Unavailable,
    add_names,
    judged,
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
from problems import Shape
from torch import Tensor
from torch.nn import functional as F

from tilesparse import BlockPattern, functional, storage
from tilesparse._checks import Operands
from tilesparse._runtime.device import DDS_NT
from tilesparse._runtime.launch import dds
from tilesparse._runtime.pattern_cache import prepared

BLOCK = 128
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **{name: QUANTIZED[name] for name in ("int8", "float8")},
}
OURS, DEFAULT, BEST = CONTENDERS = ("2:4", "cuSPARSELt", "cuSPARSELt, best")
CALL_SECONDS = 1e-3  # the host needs less than this for one call of cuSPARSELt
REPETITIONS = 20
PARTS = ((2, 0), (2, 1), (4, 0), (4, 1))  # of k, and in one kernel or in two
SETTINGS = ("alg_id", "split_k", "split_k_mode")
TRIED = 3  # algorithms that are tried in parts, too
TOLERANCE = 4e-3  # against a product in float32, bfloat16's rounding included


class Layer:
    """A 2:4 weight in blocks and in one piece, and x, as all contenders multiply them."""

    def __init__(self, shape: Shape, name: str, device: torch.device, seed: int) -> None:
        self.dtype, self.quantized = DTYPES[name], name in QUANTIZED
        self.result = torch.bfloat16 if self.quantized else self.dtype
        generator = torch.Generator(device).manual_seed(seed)
        randn = partial(torch.randn, generator=generator, device=device, dtype=self.result)
        self.pattern = BlockPattern.full((shape.out_features, shape.in_features), block_shape=BLOCK)
        self.given = self.x = randn(shape.tokens, shape.in_features)
        values = randn(self.pattern.nnz, BLOCK, BLOCK)
        mask = storage.two_of_four(values.abs())
        values = torch.where(mask, values, 0)
        self.scales = self.x_scales = None
        if self.quantized:
            self.x, self.x_scales = functional.quantize_activations(self.given, self.dtype)
            values, self.scales = storage.quantize_weights(
                values, self.dtype, granularity="feature", pattern=self.pattern
            )
        blocks = values.view(*self.pattern.grid, BLOCK, BLOCK).transpose(1, 2)
        self.weight = blocks.reshape(self.pattern.shape).contiguous()
        self.values, self.metadata = storage.compress(values, mask)

    def ours(self) -> Tensor:
        given: dict[str, Any] = (
            {"x_values": self.x, "x_scales": self.x_scales, "fast": True} if self.quantized else {}
        )
        pattern = prepared(self.pattern.index_on(self.x.device))
        operands = Operands(self.metadata, self.scales, **given)
        return dds(DDS_NT, self.given, self.values, pattern, operands=operands)

    def dense(self) -> Callable[[], Tensor]:
        """PyTorch's fastest product of a dense weight; in 8 bits, one of float8."""
        if not self.quantized or not self.x.is_cuda:
            weight = self.weight.to(self.result)
            return lambda: F.linear(self.given, weight)
        return row_calls(self.given, torch.randn_like(self.weight, dtype=self.result))["dense"]

    def exact(self) -> Tensor:
        """The product in float32, of tokens and features without their scales."""
        return self.x.float() @ self.weight.float().t()

    def scaled(self, exact: Tensor) -> Tensor:
        if self.scales is None or self.x_scales is None:
            return exact
        return exact * self.x_scales[:, None] * self.scales

    def cusparselt(self) -> Callable[..., Tensor]:
        """A function of the algorithm, and of how it splits k."""
        if not torch.backends.cusparselt.is_available() or not self.x.is_cuda:
            raise Unavailable("PyTorch has no cuSPARSELt here")
        packed, x = torch._cslt_compress(self.weight), self.x.t()
        out_dtype = self.result if self.quantized else None  # refused in 16 bits
        return partial(torch._cslt_sparse_mm, packed, x, out_dtype=out_dtype, transpose_result=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if an output was wrong or the GPU gave up."""
    parser = result_parser(__doc__, "two_four.json", 120.0, device=True, seed=True)
    add_names(parser, "--dtypes", DTYPES)
    add_names(parser, "--shapes", SHAPES, ("up", "down", "square", "up-m2048"))
    arguments = parsed(parser, argv)
    with torch.no_grad():
        return run_benchmark(arguments, _run)


def _run(arguments: Any, document: dict[str, Any]) -> None:
    start, device = time.monotonic(), torch.device(arguments.device)
    timer = Timer(device, CALL_SECONDS)
    if device.type == "cuda":
        warm_up()
        document["environment"]["cusparselt"] = torch.backends.cusparselt.version()
    cases = [*product(arguments.shapes, arguments.dtypes)]
    for name, dtype in within_budget(cases, arguments, document, start):
        shape = SHAPES[name]
        record: dict[str, Any] = {
            "shape": name,
            "tokens": shape.tokens,
            "out_features": shape.out_features,
            "in_features": shape.in_features,
            "block_shape": [BLOCK, BLOCK],
            "dtype": dtype,
            "results": [],
        }
        document["cases"].append(record)
        layer = Layer(shape, dtype, device, arguments.seed)
        exact, dense = layer.exact(), layer.dense()
        for contender in CONTENDERS:
            with measuring(record, contender=contender) as result:
                result |= _measure(layer, contender, exact, dense, timer)
                print(f"    {result}", flush=True)


def _measure(
    layer: Layer, contender: str, exact: Tensor, dense: Callable[[], Tensor], timer: Timer
) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if contender == OURS:
        call, exact = layer.ours, layer.scaled(exact)
    else:
        multiply = layer.cusparselt()
        if contender == BEST:
            details = _fastest(multiply, timer)
        call = partial(multiply, **details.get("settings", {}))
    error = relative_error(poisoned(call), exact)
    times = steady_times(call, dense, timer, REPETITIONS)
    return {**times.record(), **judged(error, TOLERANCE), **details}


def _fastest(multiply: Callable[..., Tensor], timer: Timer) -> dict[str, Any]:
    """The settings that are fastest, and how many algorithms there are."""
    times = dict(_times(multiply, ((number,) for number in count()), timer))
    algorithms = len(times)
    best = sorted(times, key=times.__getitem__)[:TRIED]
    for settings in ((*one, *parts) for one in best for parts in PARTS):
        times.update(_times(multiply, iter([settings]), timer))
    fastest = sorted(times, key=times.__getitem__)[:TRIED]
    again = dict(_times(multiply, iter(fastest), timer, REPETITIONS))
    return {"settings": _named(min(again, key=again.__getitem__)), "algorithms": algorithms}


def _named(settings: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(SETTINGS, settings, strict=False))  # those of splitting may be left out


def _times(
    multiply: Callable[..., Tensor], settings: Iterator[tuple[int, ...]], timer: Timer, repetitions: int = 5
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Microseconds of settings, up to the first that cuSPARSELt refuses."""
    for one in settings:
        call = partial(multiply, **_named(one))
        try:
            call()
        except RuntimeError:
            return
        yield one, timer.microseconds(call, repetitions)


if __name__ == "__main__":
    sys.exit(main())
