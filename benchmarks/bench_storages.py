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
    recording,
    relative_error,
    result_parser,
    run_benchmark,
    steady_times,
    warm_up,
    within_budget,
    write_json,
)
from problems import LAYERS, Shape
from torch import Tensor
from torch.nn import functional as F

from tilesparse import BlockSparseMatrix, functional, storage
from tilesparse.config import LayerSpec
from tilesparse.storage import formats
from tilesparse.tuning import Product, choose, prefer

DTYPE = torch.bfloat16
TOLERANCE = problems.PRECISIONS["bf16"].tolerance
TOKENS = (1, 8, 16, 32, 64)
SM80 = "sm80_"  # begins the names of kernels for compute capability 8.0
BITS = ("int8", "float8_e4m3fn")
STORED = ("2:4", *BITS, *(f"2:4 {name}" for name in BITS))
FOUR_BITS = "int4"
TINYGEMM, TINYGEMM_GROUP = "dense int4 (tinygemm)", 128  # k to a scale
TRANSPOSED, EXPANDED = "2:4, transposed values", "2:4, expanded values"


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


def _wide(section: str, block: int, contenders: tuple[str, ...]) -> Iterator[Case]:
    for name in ("up", "down"):
        for density in (0.5, 0.25):
            yield Case(section, LAYERS[name], block, density, contenders)


CASES = (
    *_wide("forward", 128, ("2:4", *BITS)),
    *_wide("forward", 64, ("2:4",)),
    *_wide("forward", 32, ("2:4",)),
    *_few_tokens(),
    *_four_bits(),
    *_wide("gradient of x", 128, (TRANSPOSED, EXPANDED)),
    *_wide("sm80", 128, ("2:4",)),
    Case(
        "masks", LAYERS["up"], 128, 1.0, ("choice", "transposable choice", "compress", "compress transposed")
    ),
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
        self.index = self.pattern.index_on(device)
        self._stored: dict[str, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    def masked(self) -> Tensor:
        """Plain values of 2:4."""
        return torch.where(self.mask, self.values, 0)

    def stored(self, name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values, metadata and scales."""
        if name not in self._stored:
            plain, kind = self._plain(name)
            mask = self.mask if name.startswith("2:4") else None
            spec = LayerSpec(
                shape=self.pattern.shape,
                block_shape=self.pattern.block_shape,
                nnz=self.pattern.nnz,
                dtype=plain.dtype,
                nm=None if mask is None else (2, 4),
            ).with_storage(kind)
            tensors = formats.storage_of(kind).store(plain, mask, spec)
            self._stored[name] = tensors["weight"], tensors.get("metadata"), tensors.get("scales")
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

    def kernel(self, op: str, tokens: int, name: str | None) -> dict[str, Any]:
        """Return which one the library chooses, and whether it is given expanded values."""
        shape, block_shape = self.pattern.shape, self.pattern.block_shape
        if name == TRANSPOSED:
            op, name, shape, block_shape = "forward", "2:4", shape[::-1], block_shape[::-1]
        kind = "plain" if name is None else self._plain(name)[1]
        nm = (2, 4) if (name or "").startswith("2:4") else None
        options: dict[str, Any] = {"dtype": DTYPE, "op": op, "storage": kind, "nm": nm}
        product = Product(shape[1], shape[0], tokens, self.pattern.density, block_shape, **options)
        choice = choose(product, self.values.device)
        return {"kernel": choice.kernel, "expanded": choice.dequantizes}


class Contender(NamedTuple):
    """A call, what computes its exact result, and what to record about it."""

    call: Callable[[], Tensor]
    exact: Callable[[], Tensor]
    details: dict[str, Any]


class Comparison(NamedTuple):
    """Reference of the contenders, and how each of them is made."""

    dense: Callable[[], Tensor]
    plain: Callable[[], Tensor]
    contender: Callable[[str], Contender]


class Bench(NamedTuple):
    """Device, timer and repetitions of a measurement."""

    device: torch.device
    timer: Timer
    repetitions: int
    seed: int


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
            bench = Bench(device, Timer(device), arguments.repetitions, arguments.seed)
            measure = _measure_masks if case.section == "masks" else _measure_products
            measure(case, layer, bench, record)
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


# ---- products ----


def _measure_products(case: Case, layer: Layer, bench: Bench, record: dict[str, Any]) -> None:
    generator = torch.Generator(bench.device).manual_seed(bench.seed)
    features = layer.pattern.shape[0 if case.section == "gradient of x" else 1]
    activations = _randn(case.shape.tokens, features, generator=generator)
    compare = {"gradient of x": _compare_gradient, "sm80": _compare_sm80}.get(case.section, _compare_forward)
    comparison = compare(layer, activations, bench.timer)
    for name in case.contenders:
        with measuring(record, contender=name) as result:
            result |= _measure(comparison, name, bench)
            _print_result(result)


def _compare_forward(layer: Layer, x: Tensor, timer: Timer) -> Comparison:
    def contender(name: str) -> Contender:
        if name == TINYGEMM:
            return _tinygemm(layer, x)
        details = layer.kernel("forward", len(x), name) | {"stored_bytes": layer.stored_bytes(name)}
        return Contender(_forward(layer, x, name), lambda: x.float() @ layer.multiplied(name).t(), details)

    return Comparison(lambda: F.linear(x, layer.weight), _forward(layer, x), contender)


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


def _compare_gradient(layer: Layer, y: Tensor, timer: Timer) -> Comparison:
    def contender(name: str) -> Contender:
        values, metadata, _ = layer.stored("2:4")
        if name == TRANSPOSED:
            values, metadata = storage.compress(layer.values, layer.mask, transposed=True)
        stored = metadata, None, name == TRANSPOSED
        return Contender(
            lambda: torch.ops.tilesparse.dds_nn(y, values, *layer.index, False, *stored),
            lambda: y.float() @ layer.multiplied("2:4"),
            layer.kernel("dgrad", len(y), name if name == TRANSPOSED else "2:4"),
        )

    return Comparison(
        lambda: y @ layer.weight,
        lambda: functional.dds(y, layer.values, layer.pattern, transpose=False),
        contender,
    )


def _compare_sm80(layer: Layer, x: Tensor, timer: Timer) -> Comparison:
    """The kernels for compute capability 8.0, whatever the device would choose."""

    def forced(name: str | None) -> tuple[Callable[[], Tensor], dict[str, Any]]:
        forward = _forward(layer, x, name)
        with prefer(SM80):
            details = layer.kernel("forward", len(x), name)
        if not details["kernel"].startswith(SM80):
            raise Unavailable("no kernel for compute capability 8.0 computes this here")

        def call() -> Tensor:
            with prefer(SM80):
                return forward()

        return call, details

    plain, of_plain = forced(None)

    def contender(name: str) -> Contender:
        call, details = forced(name)
        details["plain_kernel"] = of_plain["kernel"]
        return Contender(call, lambda: x.float() @ layer.multiplied(name).t(), details)

    return Comparison(lambda: F.linear(x, layer.weight), plain, contender)


def _measure(comparison: Comparison, name: str, bench: Bench) -> dict[str, Any]:
    contender = comparison.contender(name)
    error = relative_error(poisoned(contender.call), contender.exact())
    times = steady_times(
        contender.call, comparison.dense, bench.timer, bench.repetitions, plain=comparison.plain
    )
    return {
        **times.record(),
        "speedup_over_plain": round(times.speedup_over("plain"), 4),
        **judged(error, TOLERANCE),
        **contender.details,
    }


def _print_result(result: dict[str, Any]) -> None:
    notes = [result["kernel"]] if "kernel" in result else []
    notes += [flag.upper() for flag in ("expanded", "unsteady", "wrong") if result.get(flag)]
    if "stored_bytes" in result:
        notes.append(f"{result['stored_bytes'] / result['t_us'] / 1e6:.2f} TB/s of stored bytes")
    error = "not finite" if result["error"] is None else f"{result['error']:.1e}"
    print(
        f"  {result['contender']:24}{result['t_us']:10.1f} us  {result['speedup_over_plain']:6.2f}x plain  "
        f"{result['speedup']:6.2f}x dense  error {error}  {' '.join(notes)}",
        flush=True,
    )


# ---- masks ----


def _measure_masks(case: Case, layer: Layer, bench: Bench, record: dict[str, Any]) -> None:
    """Times of choosing two of four and of compressing, and whether what results is right."""
    jobs = _mask_jobs(layer)
    for name in case.contenders:
        with measuring(record, contender=name) as result:
            call, is_right = jobs[name]
            wrong = not is_right(call())
            t_us = bench.timer.microseconds(call, bench.repetitions)
            result |= {"t_us": round(t_us, 2), "unsteady": False, "wrong": wrong}
            print(f"  {name:24}{t_us:10.1f} us{'  WRONG' if wrong else ''}", flush=True)


def _mask_jobs(layer: Layer) -> dict[str, tuple[Callable[[], Any], Callable[[Any], bool]]]:
    """Calls by name, and what says whether a result is right."""
    values, mask, masked, scores = layer.values, layer.mask, layer.masked(), layer.values.abs()
    return {
        "choice": (lambda: storage.two_of_four(scores), _is_two_of_four),
        "transposable choice": (
            lambda: storage.two_of_four(scores, transposable=True),
            lambda kept: _is_two_of_four(kept) and _is_two_of_four(kept.transpose(1, 2)),
        ),
        "compress": (
            lambda: storage.compress(values, mask),
            lambda kept: torch.equal(storage.dequantize(*kept), masked),
        ),
        "compress transposed": (
            lambda: storage.compress(values, mask, transposed=True),
            lambda kept: torch.equal(storage.dequantize(*kept).transpose(1, 2), masked),
        ),
    }


def _is_two_of_four(mask: Tensor) -> bool:
    return bool((mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all())


def _randn(*size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator, dtype=DTYPE, device=generator.device)


if __name__ == "__main__":
    sys.exit(main())
