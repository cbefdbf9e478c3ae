"""Times layers whose values take fewer bytes, 2:4, 8 and 4 bits, against plain blocks and dense cuBLAS.

    python benchmarks/bench_storages.py --output storages.json
    python benchmarks/report.py storages.json

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import problems
import torch
from harness import (
    Timer,
    Unavailable,
    add_names,
    judged,
    measuring,
    parsed,
    poisoned,
    print_result,
    recording,
    relative_error,
    result_parser,
    run_benchmark,
    steady_times,
    warm_up,
    within_budget,
    write_json,
)
from kernel_cases import Stored, stored
from problems import LAYERS, Shape
from torch import Tensor
from torch.nn import functional as F

from tilesparse import BlockSparseMatrix, functional, storage
from tilesparse.tuning import Product, choose

DTYPE = torch.bfloat16
TOLERANCE = problems.PRECISIONS["bf16"].tolerance
TOKENS = (1, 8, 16, 32, 64)
BITS = ("int8", "float8_e4m3fn")
STORED = ("2:4", *BITS, *(f"2:4 {name}" for name in BITS))
FOUR_BITS = "int4"
TINYGEMM, TINYGEMM_GROUP = "dense int4 (tinygemm)", 128  # k to a scale


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer in square blocks, and what is timed beside its plain blocks."""

    section: str
    shape: Shape
    block: int
    density: float
    contenders: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.section:14} {self.shape.name:16} {self.block}x{self.block} {self.density:g}"


def _few_tokens() -> Iterator[Case]:
    for block in (32, 64, 128):
        for tokens in TOKENS:
            yield Case("few tokens", Shape(f"decode-m{tokens}", tokens, 28672, 8192), block, 0.25, STORED)


def _four_bits() -> Iterator[Case]:
    for block in (32, 64, 128):
        for density in (1.0, 0.5, 0.25):
            for tokens in (1, 16, 64):
                shape = Shape(f"decode-m{tokens}", tokens, 28672, 8192)
                contenders = ("int8", FOUR_BITS) if density < 1 else ("int8", FOUR_BITS, TINYGEMM)
                yield Case("four bits", shape, block, density, contenders)


def _wide(block: int, contenders: tuple[str, ...]) -> Iterator[Case]:
    for name in ("up", "down"):
        for density in (0.5, 0.25):
            yield Case("forward", LAYERS[name], block, density, contenders)


CASES = (
    *_wide(128, ("2:4", *BITS)),
    *_wide(64, ("2:4",)),
    *_wide(32, ("2:4",)),
    *_few_tokens(),
    *_four_bits(),
)
SECTIONS = tuple(dict.fromkeys(case.section for case in CASES))


class Layer:
    """A random pattern with normal weights, and with these in every storage that was asked for."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        block_shape = (case.block, case.block)
        like = problems.Case("dds_nt", "bf16", case.shape, block_shape, case.density, "random", "row")
        self.pattern = problems.make_pattern(like, torch.Generator().manual_seed(seed))
        generator = torch.Generator(device).manual_seed(seed)
        self.values = _randn(self.pattern.nnz, *block_shape, generator=generator)
        self.weight = _randn(*self.pattern.shape, generator=generator)  # of the dense layer
        self.mask = storage.two_of_four(self.values.abs(), transposable=True)
        self._stored: dict[str, Stored] = {}

    def masked(self) -> Tensor:
        """Plain values of 2:4."""
        return torch.where(self.mask, self.values, 0)

    def stored(self, name: str) -> Stored:
        """Values, metadata and scales."""
        if name not in self._stored:
            plain, kind = self._plain(name)
            mask = self.mask if name.startswith("2:4") else None
            self._stored[name] = stored(plain, self.pattern, kind, mask)
        return self._stored[name]

    def multiplied(self, name: str) -> Tensor:
        """The weight [out_features, in_features] in float32, without what expands or compresses values."""
        plain, kind = self._plain(name)
        if kind == FOUR_BITS:
            plain = storage.dequantize(*self.stored(name), DTYPE)
        elif kind in BITS:
            values, scales = storage.quantize_weights(plain, getattr(torch, kind))
            plain = (values.float() * scales[:, :, None]).to(DTYPE)
        return BlockSparseMatrix(plain, self.pattern).to_dense().float()

    def _plain(self, name: str) -> tuple[Tensor, str]:
        """Plain values, and the storage of `tilesparse.storage`."""
        plain = self.masked() if name.startswith("2:4") else self.values
        return plain, name.removeprefix("2:4").strip() or "compressed"

    def stored_bytes(self, name: str) -> int:
        """Bytes of values, metadata and scales."""
        return sum(tensor.nbytes for tensor in self.stored(name) if tensor is not None)

    def kernel(self, tokens: int, name: str) -> dict[str, Any]:
        """Return which one the library chooses, and whether it is given expanded values."""
        (rows, columns), block_shape = self.pattern.shape, self.pattern.block_shape
        nm = (2, 4) if name.startswith("2:4") else None
        options: dict[str, Any] = {"dtype": DTYPE, "storage": self._plain(name)[1], "nm": nm}
        product = Product(columns, rows, tokens, self.pattern.density, block_shape, **options)
        choice = choose(product, self.values.device)
        return {"kernel": choice.kernel, "expanded": choice.dequantizes}


class Contender(NamedTuple):
    """A call, what computes its exact result, and what to record about it."""

    call: Callable[[], Tensor]
    exact: Callable[[], Tensor]
    details: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if an output was wrong or the GPU gave up."""
    parser = result_parser(__doc__, "storages.json", 140.0, device=True, repetitions=20, seed=True)
    add_names(parser, "--sections", SECTIONS)
    arguments = parsed(parser, argv)
    with torch.no_grad():
        return run_benchmark(arguments, _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    device = torch.device(arguments.device)
    if device.type == "cuda":
        warm_up()
    start = time.monotonic()
    cases = [case for case in CASES if case.section in arguments.sections]
    layer_of = functools.lru_cache(1)(functools.partial(Layer, device=device, seed=arguments.seed))
    for case in within_budget(cases, arguments, document, start):
        record = _description(case)
        document["cases"].append(record)
        with recording(record, "case"):
            layer = layer_of(_of_any_tokens(case))
            record["density"] = layer.pattern.density
            _measure(case, layer, Timer(device), record, arguments)
        write_json(arguments.output, document)


def _of_any_tokens(case: Case) -> Case:
    """Cases of one layer with different numbers of tokens have this in common."""
    _, _, out_features, in_features = case.shape
    return dataclasses.replace(case, section="", shape=Shape("", 0, out_features, in_features), contenders=())


def _description(case: Case) -> dict[str, Any]:
    return {
        "section": case.section,
        "shape": case.shape.name,
        "tokens": case.shape.tokens,
        "out_features": case.shape.out_features,
        "in_features": case.shape.in_features,
        "block_shape": [case.block, case.block],
        "requested_density": case.density,
        "results": [],
    }


def _measure(
    case: Case, layer: Layer, timer: Timer, record: dict[str, Any], arguments: argparse.Namespace
) -> None:
    generator = torch.Generator(timer.device).manual_seed(arguments.seed)
    x = _randn(case.shape.tokens, layer.pattern.in_features, generator=generator)
    plain = _forward(layer, x)
    for name in case.contenders:
        with measuring(record, contender=name) as result:
            contender = _tinygemm(layer, x) if name == TINYGEMM else _stored(layer, x, name)
            error = relative_error(poisoned(contender.call), contender.exact())
            times = steady_times(
                contender.call, lambda: F.linear(x, layer.weight), timer, arguments.repetitions, plain=plain
            )
            result |= {
                **times.record(),
                "speedup_over_plain": round(times.speedup_over("plain"), 4),
                **judged(error, TOLERANCE),
                **contender.details,
            }
            notes = [f"{result['speedup_over_plain']:.2f}x plain", result.get("kernel", "")]
            print_result(name, result, *notes)


def _stored(layer: Layer, x: Tensor, name: str) -> Contender:
    details = layer.kernel(len(x), name) | {"stored_bytes": layer.stored_bytes(name)}
    return Contender(_forward(layer, x, name), lambda: x.float() @ layer.multiplied(name).t(), details)


def _forward(layer: Layer, x: Tensor, name: str | None = None) -> Callable[[], Tensor]:
    """x Wᵀ of plain values, or of those of a storage."""
    values, metadata, scales = (layer.values, None, None) if name is None else layer.stored(name)
    return lambda: functional.linear(x, values, layer.pattern, metadata=metadata, scales=scales)


def _tinygemm(layer: Layer, x: Tensor) -> Contender:
    """A dense weight of int4 as PyTorch multiplies it, with random numbers."""
    (rows, columns), generator = layer.pattern.shape, torch.Generator(x.device).manual_seed(1)
    random = functools.partial(torch.randint, generator=generator, device=x.device)
    numbers = random(0, 16, (rows, columns), dtype=torch.uint8)
    scales = (1 + torch.rand(columns // TINYGEMM_GROUP, rows, generator=generator, device=x.device)).to(DTYPE)
    with_zeros = torch.stack((scales, torch.zeros_like(scales)), -1)
    try:
        pairs = numbers[:, ::2] << 4 | numbers[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        torch.ops.aten._weight_int4pack_mm(x, packed, TINYGEMM_GROUP, with_zeros)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise Unavailable(f"PyTorch does not compute it here: {error}") from error

    def exact() -> Tensor:
        weight = (numbers.float() - 8) * scales.float().repeat_interleave(TINYGEMM_GROUP, 0).t()
        return x.float() @ weight.t()

    return Contender(
        lambda: torch.ops.aten._weight_int4pack_mm(x, packed, TINYGEMM_GROUP, with_zeros),
        exact,
        {"stored_bytes": packed.nbytes + with_zeros.nbytes},
    )


def _randn(*size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator, dtype=DTYPE, device=generator.device)


if __name__ == "__main__":
    sys.exit(main())
