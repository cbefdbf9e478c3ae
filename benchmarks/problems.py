"""The products that are measured: shapes, patterns, operands and their exact results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesparse import BlockPattern, BlockSparseMatrix

OPS = ("dds_nt", "dds_nn", "sdd_tn")  # forward, dgrad, wgrad, numbered as in ts_matmul_desc.op
LAYOUTS = ("row", "feature")  # numbered as in ts_matmul_desc.x_layout


class Shape(NamedTuple):
    """A layer and the number of tokens it is applied to."""

    name: str
    tokens: int
    out_features: int
    in_features: int


LAYERS = {
    shape.name: shape
    for shape in (
        Shape("up", 8192, 14336, 4096),
        Shape("down", 8192, 4096, 14336),
        Shape("vith", 16384, 5120, 1280),
        Shape("bert", 8192, 3072, 768),
    )
}
DECODE = {
    f"decode{out_features}-m{tokens}": Shape(
        f"decode{out_features}-m{tokens}", tokens, out_features, in_features
    )
    for out_features, in_features in ((14336, 4096), (28672, 8192))
    for tokens in (1, 16, 64)
}


class Precision(NamedTuple):
    """A precision, and the relative Frobenius error above which a result is wrong."""

    dtype: torch.dtype
    float32: str  # PyTorch's setting for float32 products
    tolerance: float


PRECISIONS = {
    "bf16": Precision(torch.bfloat16, "highest", 1e-2),
    "fp16": Precision(torch.float16, "highest", 2e-3),
    "tf32": Precision(torch.float32, "high", 2e-3),
    "fp32": Precision(torch.float32, "highest", 2e-5),
    "fp64": Precision(torch.float64, "highest", 1e-13),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One product to measure."""

    op: str
    precision: str
    shape: Shape
    block_shape: tuple[int, int]
    density: float
    pattern: str
    x_layout: str

    def __str__(self) -> str:
        bn, bk = self.block_shape
        layout = "" if self.x_layout == "row" else f" {self.x_layout}-major x"
        return (
            f"{self.op} {self.precision} {self.shape.name:16} {f'{bn}x{bk}':7} "
            f"{self.pattern} {self.density:<4g}{layout}"
        )

    def record(self) -> dict[str, Any]:
        """Return the record of the case, with results to come."""
        return {
            "op": self.op,
            "dtype": self.precision,
            "shape": self.shape.name,
            "tokens": self.shape.tokens,
            "out_features": self.shape.out_features,
            "in_features": self.shape.in_features,
            "block_shape": list(self.block_shape),
            "requested_density": self.density,
            "pattern": self.pattern,
            "x_layout": self.x_layout,
            "results": [],
        }


class Problem:
    """Operands of a case on the GPU; normal numbers everywhere, in the dense weight too.

    x [tokens, in_features] and y [tokens, out_features] have the case's layout, ``values`` is
    [nnz, bn, bk], and ``weight`` [out_features, in_features] is what a dense layer would hold.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.pattern = make_pattern(case, torch.Generator().manual_seed(seed))
        generator = torch.Generator("cuda").manual_seed(seed)
        dtype = PRECISIONS[case.precision].dtype

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=dtype, device="cuda")

        def activations(features: int) -> Tensor:
            tokens = case.shape.tokens
            return randn(tokens, features) if case.x_layout == "row" else randn(features, tokens).t()

        self.x = activations(case.shape.in_features)
        self.y = activations(case.shape.out_features)
        self.values = randn(self.pattern.nnz, *case.block_shape)
        self.weight = randn(*self.pattern.shape)

    @functools.cached_property
    def exact(self) -> Tensor:
        """The result in float32, or float64 where operands are in that."""
        wide = torch.float64 if self.values.dtype == torch.float64 else torch.float32
        x, y, values = (operand.to(wide) for operand in (self.x, self.y, self.values))
        with float32_precision("highest"):
            if self.case.op == "sdd_tn":
                return BlockSparseMatrix.from_dense(y.t() @ x, self.pattern).values
            weight = BlockSparseMatrix(values, self.pattern).to_dense()
            return x @ weight.t() if self.case.op == "dds_nt" else y @ weight

    def flops(self) -> int:
        """Multiplications and additions with kept weights."""
        return 2 * self.case.shape.tokens * self.values.numel()

    def bytes(self) -> int:
        """Bytes that must be moved at least: values and column indices, and both activations."""
        indices = self.pattern.nnz * self.pattern.col_indices.itemsize
        elements = self.values.numel() + self.x.numel() + self.y.numel()
        return elements * self.values.itemsize + indices


@contextmanager
def float32_precision(setting: str) -> Iterator[None]:
    """PyTorch's setting for float32 products within a block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_pattern(case: Case, generator: torch.Generator) -> BlockPattern:
    """The best-scored blocks under the named rule."""
    (bn, bk), shape = case.block_shape, case.shape
    if shape.out_features % bn or shape.in_features % bk:
        raise ValueError(
            f"{shape.out_features} x {shape.in_features} is not a multiple of blocks {bn} x {bk}"
        )
    rows, cols = shape.out_features // bn, shape.in_features // bk
    if round(case.density * rows * cols) == 0:
        raise ValueError(f"density {case.density:g} of {rows} x {cols} blocks keeps none")
    scores = PATTERNS[case.pattern](rows, cols, case.density, generator)
    return BlockPattern.from_scores(scores, block_shape=case.block_shape, density=case.density)


def _random(rows: int, cols: int, density: float, generator: torch.Generator) -> Tensor:
    return torch.rand(rows, cols, generator=generator)


def _banded(rows: int, cols: int, density: float, generator: torch.Generator) -> Tensor:
    """A band about the main diagonal."""
    row, col = _positions(rows, cols)
    return -((row + 0.5) / rows - (col + 0.5) / cols).abs()


def _diagonal(rows: int, cols: int, density: float, generator: torch.Generator) -> Tensor:
    """Single diagonals at equal distances."""
    row, col = _positions(rows, cols)
    return ((row + col) % round(1 / density) == 0) + torch.rand(rows, cols, generator=generator)


def _power(rows: int, cols: int, density: float, generator: torch.Generator) -> Tensor:
    """Rows whose numbers of blocks follow a power law, in random order.

    Weighted sampling without replacement: Efraimidis and Spirakis, "Weighted random sampling with a
    reservoir" (Information Processing Letters, 2006).
    """
    rank = torch.randperm(rows, generator=generator) + 1
    return torch.rand(rows, cols, generator=generator).log() * rank[:, None]


def _power_columns(rows: int, cols: int, density: float, generator: torch.Generator) -> Tensor:
    """Columns whose numbers of blocks follow a power law with exponent -0.7, in random order, likewise."""
    rank = torch.randperm(cols, generator=generator) + 1
    return torch.rand(rows, cols, generator=generator).log() * rank**0.7


def _columns(rows: int, cols: int, density: float, generator: torch.Generator) -> Tensor:
    """The same columns in every row."""
    return torch.rand(1, cols, generator=generator).expand(rows, cols)


def _even(rows: int, cols: int, density: float, generator: torch.Generator) -> Tensor:
    """As many blocks in every row, at random."""
    order = torch.rand(rows, cols, generator=generator).argsort(1)
    return -order.argsort(1).float()


def _blockdiag(rows: int, cols: int, density: float, generator: torch.Generator) -> Tensor:
    """Dense squares along the diagonal, as of groups of features that do not mix."""
    row, col = _positions(rows, cols)
    groups = round(1 / density)
    same = row * groups // rows == col * groups // cols
    return same + torch.rand(rows, cols, generator=generator)


def _positions(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[:, None], torch.arange(cols)[None]


PATTERNS: dict[str, Callable[[int, int, float, torch.Generator], Tensor]] = {
    "random": _random,
    "banded": _banded,
    "diagonal": _diagonal,
    "power": _power,
    "power-columns": _power_columns,
    "columns": _columns,
    "even": _even,
    "blockdiag": _blockdiag,
}
