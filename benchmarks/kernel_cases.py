"""The products that all kernels are timed for, drawn at random, and the calls that compute them."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from problems import LAYOUTS, OPS, PATTERNS, PRECISIONS, Shape
from torch import Tensor
from torch.nn import functional as F

from tilesparse import _C, BlockPattern, functional, storage
from tilesparse._checks import DTYPES, QUANTIZED, Operands
from tilesparse._runtime import launch
from tilesparse._runtime.device import SCALES_PER_BLOCK, SCALES_PER_FEATURE
from tilesparse._runtime.launch import dds, sdd
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.config import LayerSpec
from tilesparse.storage.formats import storage_of
from tilesparse.tuning.product import GPUS

LAYERS = (
    (768, 768),
    (3072, 768),
    (768, 3072),
    (896, 4864),
    (5120, 1280),
    (1280, 5120),
    (4096, 4096),
    (2048, 8192),
    (11008, 4096),
    (14336, 4096),
    (4096, 14336),
    (28672, 8192),
)
EXPERTS = ((8, 14336, 4096), (8, 28672, 4096), (64, 1408, 2048), (128, 1536, 2048), (32, 2880, 2880))
MOST = 8192 * 14336 * 4096  # tokens x out_features x in_features
FEW = (1, 2, 4, 8, 16, 32, 48, 64)
MANY = (96, 128, 192, 256, 384, 512, 768, 1024, 1500, 2048, 3000, 4096, 6144, 8192, 12288, 16384)
SQUARE = ((16, 16), (32, 32), (64, 64), (128, 128))
OTHER = ((128, 32), (32, 128), (128, 64), (64, 128), (16, 64), (64, 16), (128, 16), (16, 128))
EIGHT_BITS = (*SQUARE, (128, 64), (64, 128))
DENSITIES = (0.05, 0.1, 0.25, 0.5, 0.75)
Stored = tuple[Tensor, Tensor | None, Tensor | None]  # values, metadata and scales
DRAWN_PATTERNS = ("random",) * 7 + ("banded", "power", "power-columns")


class Kind(NamedTuple):
    """Products that have kernels in common, and how often they are drawn."""

    share: int
    ops: tuple[str, ...] = OPS
    dtype: str = "bf16"
    storage: str = "plain"
    blocks: tuple[tuple[int, int], ...] = SQUARE
    tokens: tuple[int, ...] = FEW + MANY
    nm: bool = False
    activations: str | None = None  # in 8 bits
    x_layout: str = "row"
    grouped: bool = False
    inside: bool = False  # scales of 8 bits are inside of the sums
    fast: bool = False  # sums of float8


FORWARD, WIDE = OPS[:1], SQUARE[1:]
INT8 = Kind(8, FORWARD, storage="int8", activations="int8", blocks=EIGHT_BITS, tokens=MANY)
FLOAT8 = INT8._replace(storage="float8_e4m3fn", activations="float8")
SCALED = FLOAT8._replace(share=2, blocks=SQUARE[3:], inside=True)
KINDS = {
    "decode": Kind(12, OPS[:2], tokens=FEW),
    "bf16": Kind(60, tokens=MANY),
    "rectangles": Kind(10, blocks=OTHER),
    "column-major": Kind(6, x_layout="feature", tokens=MANY),
    "tf32": Kind(6, dtype="tf32"),
    "fp32": Kind(5, dtype="fp32"),
    "fp64": Kind(5, dtype="fp64"),
    "2:4": Kind(9, FORWARD, storage="compressed", nm=True, blocks=WIDE),
    "int8": Kind(4, FORWARD, storage="int8"),
    "float8": Kind(2, FORWARD, storage="float8_e4m3fn"),
    "int4": Kind(4, FORWARD, storage="int4", blocks=WIDE),
    "2:4 int8": Kind(2, FORWARD, storage="int8", nm=True, blocks=WIDE),
    "int8 x int8": INT8,
    "float8 x float8": FLOAT8,
    "float8 fast": FLOAT8._replace(share=4, fast=True),
    "float8 scaled": SCALED,
    "2:4 int8 x int8": INT8._replace(share=3, nm=True, blocks=WIDE),
    "2:4 float8 x float8": FLOAT8._replace(share=3, nm=True, blocks=WIDE),
    "int8 to fp32": INT8._replace(share=1, dtype="fp32"),
    "float8 to fp32": FLOAT8._replace(share=1, dtype="fp32"),
    "float8 scaled to fp32": SCALED._replace(share=1, dtype="fp32"),
    "grouped": Kind(10, grouped=True, blocks=WIDE),
    "grouped int8": INT8._replace(share=3, grouped=True, blocks=WIDE),
    "grouped float8": FLOAT8._replace(share=3, grouped=True, blocks=WIDE),
    "grouped float8 fast": FLOAT8._replace(share=1, grouped=True, blocks=WIDE, fast=True),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One product; of groups, out_features are those of all of them."""

    kind: str
    op: str
    tokens: int
    out_features: int
    in_features: int
    block_shape: tuple[int, int]
    density: float
    pattern: str
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def __str__(self) -> str:
        bn, bk = self.block_shape
        return (
            f"{self.kind} {self.op} {self.tokens}x{self.out_features}x{self.in_features} {bn}x{bk} "
            f"{self.pattern} {self.density:g}"
        )

    def record(self) -> dict[str, Any]:
        """Return what is written of it, with results to come."""
        kind = KINDS[self.kind]
        shape = f"{self.tokens}x{self.out_features}x{self.in_features}"
        fields: dict[str, Any] = {
            "dtype": kind.dtype,
            "storage": kind.storage,
            "nm": kind.nm,
            "activations": kind.activations,
        }
        fields |= {name: True for name in ("inside", "fast") if getattr(kind, name)}
        own = dataclasses.asdict(self) | {"block_shape": list(self.block_shape)}
        return {"shape": shape, **own, **fields, "x_layout": kind.x_layout, "results": []}


def _named() -> Iterator[Drawn]:
    """Yield products that aims were set for, each in several densities."""
    random, most = "random", (0.5, 0.25, 0.1)
    shapes = Shape("", 1, 28672, 8192), Shape("", 1, 4096, 4096), Shape("", 8192, 14336, 4096)
    for kind in ("decode", "int8", "int4"):
        for size, density in ((0, 0.5), (0, 0.25), (1, 0.25)):
            yield Drawn(kind, "dds_nt", *shapes[size][1:], (64, 64), density, random)
    for tokens, kind in product((32, 64, 128), ("bf16", "int8", "int4", "int8 x int8", "float8 x float8")):
        for layer in shapes[:2]:
            yield Drawn(kind, "dds_nt", tokens, *layer[2:], (64, 64), 0.25, random)
    for density, block in product(most, (16, 32, 64, 128)):
        yield Drawn("bf16", "sdd_tn", 16384, 4096, 4096, (block, block), density, random)
    for density, pattern in product(most, ("power", "power-columns")):
        yield Drawn("bf16", "dds_nt", *shapes[2][1:], (32, 32), density, pattern)
    for op, block in product(("dds_nt", "dds_nn"), (64, 128)):
        yield Drawn("bf16", op, *shapes[2][1:], (block, block), 0.1, random)
    for kind, density in product(("bf16", "int8 x int8", "float8 x float8"), most):
        yield Drawn(kind, "dds_nt", 512, 14336, 4096, (128, 128), density, random)
        yield Drawn(kind, "dds_nt", 16384, 5120, 1280, (128, 128), density, random)
    eight = product(("int8 x int8", "float8 x float8", "float8 fast"), (64, 128))
    for (kind, block), density in product((*eight, ("float8 scaled", 128)), most):
        for sides in ((14336, 4096), (4096, 14336), (4096, 4096)):
            yield Drawn(kind, "dds_nt", 8192, *sides, (block, block), density, random)
    for density, block in product(most[:2], (64, 128)):
        yield Drawn("grouped", "dds_nn", 16384, 8 * 28672, 4096, (block, block), density, random, 8)
        for kind in ("grouped", "grouped float8", "grouped int8"):
            yield Drawn(kind, "dds_nt", 65536, 128 * 1536, 2048, (block, block), density, random, 128)


NAMED = tuple(_named())


def draw(
    chance: random.Random,
    kinds: Sequence[str],
    ops: Sequence[str] = OPS,
    layers: Sequence[tuple[int, int]] = (),
    blocks: Sequence[tuple[int, int]] = (),
) -> Drawn:
    """Draw a product of one of the kinds and operations, of one of the layers and blocks or else of many."""
    while True:
        (name,) = chance.choices(kinds, [KINDS[kind].share for kind in kinds])
        kind = KINDS[name]
        groups, shape = 1, chance.choice(layers or LAYERS)
        if kind.grouped:
            groups, *sizes = chance.choice(EXPERTS)
            shape = groups * sizes[0], sizes[1]
        case = Drawn(
            name,
            chance.choice(kind.ops),
            chance.choice(kind.tokens),
            *shape,
            chance.choice(kind.blocks),
            chance.choice(DENSITIES),
            chance.choice(DRAWN_PATTERNS),
            groups,
        )
        fits = case.tokens * case.out_features * case.in_features <= MOST * groups
        divides = all(
            size % block == 0
            for size, block in zip((shape[0] // groups, shape[1]), case.block_shape, strict=True)
        )
        if fits and divides and case.op in ops and (not blocks or case.block_shape in blocks):
            return case


def product_of(case: Mapping[str, Any], nnz: int | None = None) -> _C.Product:
    """Describe a case of any benchmark to the library; by default with the blocks that its density says."""
    op, layout = OPS.index(case["op"]), LAYOUTS.index(case["x_layout"])
    dtype = DTYPES[PRECISIONS[case["dtype"]].dtype] if case["dtype"] in PRECISIONS else DTYPES[torch.float64]
    precision, groups = int(case["dtype"] == "tf32"), case.get("groups", 1)
    shape = case["out_features"], case["in_features"]
    options: dict[str, Any] = {}
    activations = case.get("activations")
    if activations is not None:
        eight = QUANTIZED[torch.int8 if activations == "int8" else torch.float8_e4m3fn]
        inside = case.get("inside", False)
        granularity = SCALES_PER_BLOCK if inside else SCALES_PER_FEATURE
        options = {"values_dtype": eight, "granularity": granularity, "result_dtype": dtype}
        if inside:
            options["x_scales_ld"] = case["tokens"]
        options["storage"] = int(case["nm"])
        dtype, precision = eight, int(case.get("fast", False))
    elif case.get("storage", "plain") != "plain":
        options = storage_of(case["storage"]).product_fields((2, 4) if case["nm"] else None)
    bn, bk = case["block_shape"]
    if nnz is None:
        nnz = round(case["density"] * (shape[0] // bn) * (shape[1] // bk))
    return _C.Product(
        _C.Pattern(bn, bk, *shape, nnz, 0, 0, 0, groups=groups),
        op,
        dtype,
        1,
        case["tokens"],
        precision=precision,
        x_layout=layout if op != 1 else 0,
        y_layout=layout if op != 0 else 0,
        grouped=groups > 1,
        **options,
    )


def gpu_of(name: str) -> str | None:
    """Return the library's name of a GPU, given the driver's; None for one that it does not know."""
    known = [gpu for gpu in GPUS if re.search(rf"\b{re.escape(gpu)}\b", name)]
    return max(known, key=len, default=None)


class Calls:
    """Operands of a case on the GPU, of normal numbers, and calls of the products alone.

    They pass over what looks for writes to patterns.

    ``sparse`` runs the kernel that is preferred; ``dense`` multiplies by a dense weight and ``expanded``
    writes that weight first, as the policy "dense" does; None where there is no such product.
    """

    dense: Callable[[], Tensor] | None = None
    expanded: Callable[[], Tensor] | None = None

    def __init__(self, case: Drawn, seed: int, device: str = "cuda") -> None:
        kind = KINDS[case.kind]
        precision = PRECISIONS[kind.dtype]
        torch.set_float32_matmul_precision(precision.float32)
        self._device = torch.device(device)
        self.pattern = self._pattern(case, torch.Generator().manual_seed(seed))
        self._kept = prepared(self.pattern.index_on(self._device))
        self._dtype = precision.dtype

        def activations(features: int) -> Tensor:
            if kind.x_layout == "row":
                return self._randn(case.tokens, features)
            return self._randn(features, case.tokens).t()

        x = activations(case.in_features)
        y = activations(case.out_features // case.groups)
        values = self._randn(self.pattern.nnz, *case.block_shape)
        offsets = self._offsets(case) if case.groups > 1 else None
        if kind.activations is not None:
            self.sparse = self._eight_bits(kind, x, values, offsets)
        elif offsets is not None:
            self.sparse = self._grouped(case, x, y, values, offsets)
        else:
            self.sparse = self._product(case.op, x, y, values, kind)

    def _pattern(self, case: Drawn, generator: torch.Generator) -> BlockPattern:
        """Return what `problems.make_pattern` makes, sorted by the device and so in a tenth of the time."""
        rows, cols = (size // block for size, block in zip(case.shape, case.block_shape, strict=True))
        scores = PATTERNS[case.pattern](rows, cols, case.density, generator).flatten()
        mask = torch.zeros(len(scores), dtype=torch.bool)
        mask[scores.to(self._device).topk(round(case.density * len(scores))).indices.cpu()] = True
        return BlockPattern.from_block_mask(mask.view(rows, cols), block_shape=case.block_shape)

    def _randn(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=self._dtype, device=self._device)

    def _product(self, op: str, x: Tensor, y: Tensor, values: Tensor, kind: Kind) -> Callable[[], Tensor]:
        weight = self._randn(*self.pattern.shape)
        if op == "sdd_tn":
            self.dense = lambda: y.t() @ x
            self.expanded = lambda: launch.gather(y.t() @ x, self._kept)
            return lambda: sdd(y, x, self._kept)
        forward, source = op == "dds_nt", x if op == "dds_nt" else y

        def multiply(weight: Tensor) -> Tensor:
            return F.linear(source, weight) if forward else source @ weight

        tensors: Stored = values, None, None
        blocks: Callable[[], Tensor] = lambda: values  # noqa: E731
        if kind.storage != "plain":
            mask = None
            if kind.nm:
                mask = two_neighbours(values)
                values = values * mask
            tensors = stored(values, self.pattern, kind.storage, mask)
            blocks = partial(storage.dequantize, *tensors, values.dtype)
        self.dense = partial(multiply, weight)
        self.expanded = lambda: multiply(launch.expand(blocks(), self._kept))
        number = OPS.index(op)
        operands = Operands(*tensors[1:])
        return lambda: dds(number, source, tensors[0], self._kept, operands=operands)

    def _eight_bits(
        self, kind: Kind, x: Tensor, values: Tensor, offsets: Tensor | None
    ) -> Callable[[], Tensor]:
        dtype = torch.int8 if kind.activations == "int8" else torch.float8_e4m3fn
        per, of_x = ("block", "group") if kind.inside else ("feature", "token")
        pattern = None if kind.inside else self.pattern
        mask = two_neighbours(values) if kind.nm else None
        if mask is not None:
            values = values * mask
        blocks, scales = storage.quantize_weights(values, dtype, granularity=per, pattern=pattern)
        blocks, metadata = (blocks, None) if mask is None else storage.compress(blocks, mask)
        quantized, of_tokens = functional.quantize_activations(x, dtype, granularity=of_x)
        operands = Operands(
            metadata,
            scales[:, None] if kind.inside else scales,
            offsets,
            fast=kind.fast,
            x_values=quantized,
            x_scales=of_tokens,
        )
        return lambda: dds(OPS.index("dds_nt"), x, blocks, self._kept, operands=operands)

    def _offsets(self, case: Drawn) -> Tensor:
        experts = torch.randint(case.groups, (case.tokens,), generator=torch.Generator().manual_seed(0))
        ends = torch.bincount(experts, minlength=case.groups).cumsum(0)
        return F.pad(ends, (1, 0)).to(self._device, torch.int32)

    def _grouped(
        self, case: Drawn, x: Tensor, y: Tensor, values: Tensor, offsets: Tensor
    ) -> Callable[[], Tensor]:
        operands = Operands(offsets=offsets)
        if case.op == "sdd_tn":
            return lambda: sdd(y, x, self._kept, operands=operands)
        op, source = OPS.index(case.op), x if case.op == "dds_nt" else y
        return lambda: dds(op, source, values, self._kept, operands=operands)


def two_neighbours(values: Tensor) -> Tensor:
    """Return a mask of two of four along rows and columns."""
    row, column = (torch.arange(size, device=values.device) for size in values.shape[1:])
    return ((row[:, None] + column) % 4 < 2).expand_as(values).contiguous()


def stored(values: Tensor, pattern: BlockPattern, name: str, mask: Tensor | None) -> Stored:
    """Return values, of which a mask keeps two of four, in a storage."""
    spec = LayerSpec(
        shape=pattern.shape,
        block_shape=pattern.block_shape,
        nnz=pattern.nnz,
        dtype=values.dtype,
        nm=None if mask is None else (2, 4),
    )
    tensors = storage_of(name).store(values, mask, spec.with_storage(name))
    return tensors["weight"], tensors.get("metadata"), tensors.get("scales")
