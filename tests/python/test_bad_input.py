"""Arguments that do not fit: a typed error that names the argument, and nothing written."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers import DEVICES, make_pattern, randn, random_values
from torch import Tensor

import tilesparse
from tilesparse import BlockPattern, TileSparseError, functional
from tilesparse.errors import InvalidArgumentError, InvalidPatternError

SHAPE, BLOCK_SHAPE = (48, 64), (16, 32)


def pattern_of(**changes: Any) -> BlockPattern:
    """A valid pattern with some arguments replaced: blocks (0, 0), (0, 1), (2, 1)."""
    arguments = {
        "crow_indices": [0, 2, 2, 3],
        "col_indices": [0, 1, 1],
        "slot": [0, 1, 2],
        "shape": SHAPE,
        "block_shape": BLOCK_SHAPE,
    }
    return BlockPattern(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"shape": (40, 64)}, "out_features.*multiple.*16.*40"),
        ({"shape": (48, 63)}, "in_features.*63"),
        ({"shape": (0, 64)}, "out_features"),
        ({"shape": (-48, 64)}, "out_features"),
        ({"shape": (48, 2**31)}, "in_features"),
        ({"shape": (48,)}, "shape"),
        ({"shape": (48, 64, 64)}, "shape"),
        ({"block_shape": (16, 24)}, "block_shape.*24"),
        ({"block_shape": (256, 16)}, "block_shape"),
        ({"block_shape": (16,)}, "block_shape"),
        ({"block_shape": (0, 16)}, "block_shape"),
        ({"block_shape": 24}, "block_shape.*24"),
        ({"block_shape": 16.0}, "block_shape.*16.0"),
        ({"block_shape": True}, "block_shape.*True"),
        ({"block_shape": "16"}, "block_shape.*16"),
    ],
)
def test_shapes(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        pattern_of(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"crow_indices": [0, 2, 3]}, "crow_indices.*4 entries"),
        ({"crow_indices": [1, 2, 2, 3]}, "crow_indices"),
        ({"crow_indices": [0, 2, 1, 3]}, "crow_indices"),
        ({"crow_indices": [0, 2, 2, 2]}, "crow_indices"),
        ({"crow_indices": [0, 2, 2, 4]}, "crow_indices"),
        ({"crow_indices": [0, 9, 2, 3]}, "crow_indices"),
        ({"crow_indices": [0, -1, 2, 3]}, "crow_indices"),
        ({"crow_indices": [0, 2, 2, 2**32 + 3]}, "crow_indices"),
        ({"crow_indices": torch.tensor([0.0, 2, 2, 3])}, "crow_indices.*integers"),
        ({"crow_indices": torch.tensor([[0, 2, 2, 3]])}, "crow_indices.*1-D"),
        ({"col_indices": [1, 0, 1]}, "col_indices"),
        ({"col_indices": [1, 1, 1]}, "col_indices"),
        ({"col_indices": [0, 2, 1]}, "col_indices"),
        ({"col_indices": [0, -1, 1]}, "col_indices"),
        ({"col_indices": [0, 2**32 + 1, 1]}, "col_indices"),
        ({"col_indices": torch.tensor([True, True, True])}, "col_indices.*integers"),
        ({"slot": [0, 1]}, "slot.*3 entries"),
        ({"slot": [0, 1, 1]}, "slot"),
        ({"slot": [0, 1, 3]}, "slot"),
        ({"slot": [0, -1, 2]}, "slot"),
    ],
)
def test_pattern_arrays(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidPatternError, match=named):
        pattern_of(**changes)


@pytest.mark.parametrize("density", [-0.1, 1.0001, 2, -1e-9, math.nan, math.inf])
def test_density(density: float) -> None:
    for make in (
        lambda: BlockPattern.random(SHAPE, block_shape=BLOCK_SHAPE, density=density),
        lambda: BlockPattern.from_scores(torch.ones(3, 2), block_shape=BLOCK_SHAPE, density=density),
        lambda: BlockPattern.from_dense(torch.ones(SHAPE), block_shape=BLOCK_SHAPE, density=density),
    ):
        with pytest.raises(InvalidArgumentError, match="density"):
            make()


@pytest.mark.parametrize("arguments", [{}, {"density": 0.5, "nnz": 3}])
def test_density_or_nnz(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="density and nnz"):
        BlockPattern.random(SHAPE, block_shape=BLOCK_SHAPE, **arguments)


@pytest.mark.parametrize("nnz", [-1, 7])
def test_nnz(nnz: int) -> None:
    with pytest.raises(InvalidArgumentError, match="nnz"):
        BlockPattern.random(SHAPE, block_shape=BLOCK_SHAPE, nnz=nnz)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: BlockPattern.from_blocks([(3, 0)], shape=SHAPE, block_shape=BLOCK_SHAPE),
            r"blocks.*\(3, 0\)",
        ),
        (lambda: BlockPattern.from_blocks([(0, -1)], shape=SHAPE, block_shape=BLOCK_SHAPE), "blocks"),
        (
            lambda: BlockPattern.from_blocks([(1, 1), (0, 0), (1, 1)], shape=SHAPE, block_shape=BLOCK_SHAPE),
            r"blocks.*\(1, 1\).*twice",
        ),
        (
            lambda: BlockPattern.from_blocks(torch.ones(2, 3).long(), shape=SHAPE, block_shape=BLOCK_SHAPE),
            "blocks",
        ),
        (
            lambda: BlockPattern.from_blocks(torch.ones(2, 2), shape=SHAPE, block_shape=BLOCK_SHAPE),
            "blocks.*float32",
        ),
        (lambda: BlockPattern.from_mask(torch.ones(48, 63), block_shape=BLOCK_SHAPE), "in_features.*63"),
        (lambda: BlockPattern.from_mask(torch.ones(48), block_shape=BLOCK_SHAPE), "mask"),
        (lambda: BlockPattern.from_block_mask(torch.ones(3), block_shape=BLOCK_SHAPE), "mask"),
        (lambda: BlockPattern.from_block_mask(torch.ones(0, 3), block_shape=BLOCK_SHAPE), "out_features"),
        (lambda: BlockPattern.from_scores(torch.ones(6), block_shape=BLOCK_SHAPE, nnz=1), "scores"),
        (
            lambda: BlockPattern.from_scores(torch.tensor([[math.nan, 1]]), block_shape=BLOCK_SHAPE, nnz=1),
            "scores.*NaN",
        ),
        (lambda: BlockPattern.from_dense(torch.ones(48, 60), block_shape=BLOCK_SHAPE, nnz=1), "in_features"),
        (lambda: BlockPattern.from_bsr(torch.ones(48, 64)), "matrix"),
        (lambda: BlockPattern.from_bsr(torch.ones(48, 64).to_sparse_bsr((8, 32))), "block_shape.*8"),
        (lambda: BlockPattern.from_scipy(scipy.sparse.csr_array((48, 64))), "block_shape"),
        (
            lambda: BlockPattern.from_scipy(scipy.sparse.csr_array((48, 60)), block_shape=BLOCK_SHAPE),
            "in_features",
        ),
        (lambda: pattern_of().update_(BlockPattern.full((48, 64), block_shape=(16, 16))), "other"),
        (lambda: pattern_of().update_(BlockPattern.full((64, 64), block_shape=(16, 32))), "other"),
    ],
)
def test_pattern_constructors(make: Callable[[], BlockPattern], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        make()


class Call:
    """The operands of one product each, to be changed."""

    def __init__(self, device: str = "cpu") -> None:
        self.pattern = make_pattern("random 50%", (3, 4), BLOCK_SHAPE)
        self.x = randn(8, self.pattern.in_features, dtype=torch.float32, device=device)
        self.y = randn(8, self.pattern.out_features, dtype=torch.float32, device=device)
        self.values = random_values(self.pattern, dtype=torch.float32, device=device)
        self.bias = randn(self.pattern.out_features, dtype=torch.float32, device=device)
        self.residual = randn(8, self.pattern.out_features, dtype=torch.float32, device=device, seed=1)

    def linear(self) -> Tensor:
        return functional.linear(self.x, self.values, self.pattern, self.bias)

    def added(self) -> Tensor:
        return functional.linear(self.x, self.values, self.pattern, residual=self.residual)

    def activated(self) -> Tensor:
        values = self.values.requires_grad_()
        return functional.linear(self.x, values, self.pattern, activation="relu", residual=self.residual)

    def expanded(self) -> Tensor:
        tensors = (self.x, self.values, self.pattern, self.bias)
        return functional.linear(*tensors, residual=self.residual, policy="dense")

    def dds(self) -> Tensor:
        return functional.dds(self.y, self.values, self.pattern, transpose=False)

    def dsd(self) -> Tensor:
        return functional.dsd(self.values, self.pattern, self.x.t())

    def sdd(self) -> Tensor:
        return functional.sdd(self.y, self.x, self.pattern)

    def sdd_out(self) -> Tensor:
        return functional.sdd(self.y, self.x, self.pattern, out=self.values, accumulate=True)


BAD_OPERANDS: list[tuple[list[str], str, Callable[[Tensor], Tensor], str]] = [
    (["linear", "expanded", "sdd", "sdd_out"], "x", lambda x: x[:, :-1], "x.*128.*127"),
    (["linear", "expanded", "sdd", "sdd_out"], "x", lambda x: x.sum(), "x.*128"),
    (["linear", "expanded", "dsd", "sdd"], "x", lambda x: x.int(), "x.*dtype.*int32"),
    (["linear", "expanded", "dsd", "sdd"], "x", lambda x: x.to(torch.complex64), "x.*dtype.*complex64"),
    (["linear", "expanded", "dsd"], "x", lambda x: x.half(), "x.*float32 like values.*float16"),
    (["sdd", "sdd_out"], "x", lambda x: x.half(), "y.*dtype.*float16"),
    (["sdd", "sdd_out"], "x", lambda x: x[:7], "y.*leading.*7.*8"),
    (["sdd"], "x", lambda x: x[None], "y.*leading"),
    (["dds", "sdd"], "y", lambda y: y[:, 1:], "y.*48"),
    (["dds"], "y", lambda y: y.double(), "y.*float32 like values.*float64"),
    (["sdd"], "y", lambda y: y.double(), "y.*dtype"),
    (["linear", "expanded", "dds", "dsd"], "values", lambda v: v[1:], "values.*nnz"),
    (["linear", "expanded", "dds", "dsd"], "values", lambda v: v.transpose(1, 2), "values"),
    (["linear", "expanded", "dds", "dsd"], "values", lambda v: v.flatten(), "values"),
    (["linear", "expanded", "dds"], "values", lambda v: v.mT.contiguous().mT, "values.*contiguous.*strides"),
    (
        ["linear", "expanded", "dds"],
        "values",
        lambda v: torch.cat([v, v], 2)[..., ::2],
        "values.*contiguous.*strides",
    ),
    (["sdd_out"], "values", lambda v: v.mT.contiguous().mT, "out.*contiguous"),
    (["sdd_out"], "values", lambda v: v[:-1], "out.*nnz"),
    (["sdd_out"], "values", lambda v: v.double(), "out.*dtype"),
    (["linear", "expanded"], "bias", lambda b: b[1:], "bias.*48.*47"),
    (["linear", "expanded"], "bias", lambda b: b[None], "bias"),
    (["linear", "expanded"], "bias", lambda b: b.double(), "bias.*dtype"),
    (["added", "activated", "expanded"], "residual", lambda r: r[1:], r"residual.*\(8, 48\).*\(7, 48\)"),
    (["added", "activated", "expanded"], "residual", lambda r: r[:1], r"residual.*\(8, 48\).*\(1, 48\)"),
    (["added", "activated", "expanded"], "residual", lambda r: r[:, :1], r"residual.*\(8, 48\).*\(8, 1\)"),
    (["added", "activated", "expanded"], "residual", lambda r: r[None], r"residual.*\(8, 48\).*\(1, 8, 48\)"),
    (["added", "activated", "expanded"], "residual", lambda r: r.half(), "residual.*dtype.*float16"),
]


@pytest.mark.parametrize(
    ("product", "operand", "change", "named"),
    [(product, *rest) for products, *rest in BAD_OPERANDS for product in products],
)
@pytest.mark.parametrize("device", DEVICES)
def test_operands(
    device: str, product: str, operand: str, change: Callable[[Tensor], Tensor], named: str
) -> None:
    call = Call(device)
    good = Call(device).linear()
    setattr(call, operand, change(getattr(call, operand)))
    before = {name: getattr(call, name).clone() for name in ("x", "y", "values", "bias", "residual")}
    with pytest.raises(InvalidArgumentError, match=named):
        getattr(call, product)()
    assert all(torch.equal(getattr(call, name), saved) for name, saved in before.items())
    assert torch.equal(Call(device).linear(), good)


@pytest.mark.parametrize("product", ["linear", "added", "expanded", "dds", "dsd", "sdd", "sdd_out"])
def test_operands_are_checked_when_compiling(product: str) -> None:
    """The same errors reach users of fake and meta tensors, as under torch.compile."""
    call = Call("meta")
    call.residual = call.residual[:7]
    if product != "added":
        call.x, call.y = call.x[:, :16], call.y[:, :16]
    with pytest.raises(InvalidArgumentError, match=r"residual" if product == "added" else r"x|y"):
        getattr(call, product)()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("product", "operand"),
    [
        ("linear", "x"),
        ("linear", "values"),
        ("linear", "bias"),
        ("added", "residual"),
        ("expanded", "values"),
        ("dds", "y"),
        ("sdd", "x"),
        ("sdd", "y"),
        ("sdd_out", "values"),
    ],
)
def test_mixed_devices(product: str, operand: str) -> None:
    call = Call("cuda")
    good = call.linear()
    setattr(call, operand, getattr(call, operand).cpu())
    with pytest.raises(InvalidArgumentError, match=r"must be on (cpu|cuda:0) like .*, got (cpu|cuda:0)"):
        getattr(call, product)()
    assert torch.equal(Call("cuda").linear(), good)


def test_mixed_devices_without_a_gpu() -> None:
    call = Call()
    call.residual = call.residual.to("meta")
    with pytest.raises(InvalidArgumentError, match=r"residual.*cpu like x.*meta"):
        call.added()
    call.values = call.values.to("meta")
    for product in (call.linear, call.expanded):
        with pytest.raises(InvalidArgumentError, match=r"x.*meta like values.*cpu"):
            product()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operand", ["x", "y"])
def test_overlapping_memory(operand: str, device: str) -> None:
    call = Call(device)
    tokens, features = getattr(call, operand).shape
    size = call.values.numel()
    storage = randn(size + tokens * features, dtype=torch.float32, device=device)
    call.values = storage[:size].view_as(call.values)
    setattr(call, operand, storage[size - 4 :][: tokens * features].view(tokens, features))
    before = storage.clone()
    with pytest.raises(InvalidArgumentError, match=f"out.*share memory with {operand}"):
        call.sdd_out()
    assert torch.equal(storage, before)
    setattr(call, operand, storage[size:].view(tokens, features))  # side by side is fine
    call.sdd_out()
    assert not torch.equal(storage, before)


def test_out_is_not_differentiable() -> None:
    for operand in ("x", "y", "values"):
        call = Call()
        getattr(call, operand).requires_grad_()
        before = call.values.detach().clone()
        with pytest.raises(InvalidArgumentError, match=r"out.*gradient"):
            call.sdd_out()
        assert torch.equal(call.values, before)
        with torch.no_grad():
            call.sdd_out()


def test_accumulate_needs_out() -> None:
    call = Call()
    with pytest.raises(InvalidArgumentError, match="out"):
        functional.sdd(call.y, call.x, call.pattern, accumulate=True)


def test_dsd_takes_matrices() -> None:
    call = Call()
    with pytest.raises(InvalidArgumentError, match=r"b.*2-D"):
        functional.dsd(call.values, call.pattern, call.x.mT[None])


def test_activation() -> None:
    call = Call()
    with pytest.raises(InvalidArgumentError, match=r"activation.*relu.*'tanh'"):
        functional.linear(call.x, call.values, call.pattern, activation="tanh")


def test_more_tokens_than_kernels_can_count() -> None:
    call = Call()
    endless = torch.zeros(1, 1).expand(2**31, call.pattern.in_features)
    with pytest.raises(InvalidArgumentError, match=r"x.*tokens"):
        functional.linear(endless, call.values, call.pattern)


def test_policy() -> None:
    call = Call()
    with pytest.raises(InvalidArgumentError, match=r"policy.*'dense'.*'fast'"):
        functional.linear(call.x, call.values, call.pattern, policy="fast")


BAD_PATTERNS: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
    ("crow_indices", lambda crow: crow[:-1], InvalidPatternError, "crow_indices.*4 entries.*3"),
    ("crow_indices", lambda crow: crow.long(), InvalidPatternError, "crow_indices.*int32.*int64"),
    ("col_indices", lambda col: col[None], InvalidPatternError, "col_indices.*1-D"),
    ("col_indices", lambda col: col.float(), InvalidPatternError, "col_indices.*int32.*float32"),
    ("slot", lambda slot: slot[1:], InvalidPatternError, "slot.*entries"),
    ("slot", lambda slot: torch.stack([slot, slot], 1)[:, 0], InvalidPatternError, "slot.*contiguous"),
    ("shape", lambda shape: (40, 128), InvalidArgumentError, "out_features.*multiple.*16.*40"),
    ("shape", lambda shape: (64, 128), InvalidPatternError, "crow_indices.*5 entries"),
    ("block_shape", lambda block_shape: (16, 24), InvalidArgumentError, "block_shape.*24"),
]


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize(("field", "change", "error", "named"), BAD_PATTERNS)
def test_operators_check_the_form_of_patterns(
    field: str, change: Callable[[Any], Any], error: type[Exception], named: str, device: str
) -> None:
    call, ops = Call(device), torch.ops.tilesparse
    index = call.pattern.index_on(call.values.device)
    bad = index._replace(**{field: change(getattr(index, field))})
    for operator in (
        lambda: ops.dds_nt(call.x, call.values, *bad),
        lambda: ops.dds_nn(call.y, call.values, *bad),
        lambda: ops.sdd_tn(call.y, call.x, *bad),
        lambda: ops.sdd_tn_into(call.y, call.x, *bad, call.values, True),
    ):
        with pytest.raises(error, match=named):
            operator()


def test_operators_check_what_patterns_on_the_cpu_hold() -> None:
    call, dds_nt = Call(), torch.ops.tilesparse.dds_nt
    for field in ("crow_indices", "col_indices", "slot"):
        index = call.pattern.index_on(call.values.device)
        wrong: dict[str, Any] = {field: torch.full_like(getattr(index, field), 9)}
        index = index._replace(**wrong)
        with pytest.raises(InvalidPatternError, match=field):
            dds_nt(call.x, call.values, *index)


def test_operators_take_patterns_where_the_values_are() -> None:
    call = Call()
    index = call.pattern.index_on(torch.device("meta"))
    with pytest.raises(InvalidArgumentError, match=r"values.*meta like the pattern.*cpu"):
        torch.ops.tilesparse.dds_nt(call.x, call.values, *index)
    mixed = index._replace(slot=call.pattern.slot)
    with pytest.raises(InvalidPatternError, match=r"slot.*meta like col_indices.*cpu"):
        torch.ops.tilesparse.dds_nt(call.x, call.values, *mixed)


def test_operators_between_values_and_dense_matrices() -> None:
    call, ops = Call(), torch.ops.tilesparse
    index = call.pattern.index_on(call.values.device)
    with pytest.raises(InvalidArgumentError, match=r"values.*nnz"):
        ops.expand(call.values[1:], *index)
    with pytest.raises(InvalidArgumentError, match=r"dense.*\(48, 128\).*\(128, 48\)"):
        ops.gather(torch.ones(128, 48), *index)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ([1.0], r"input must be a dense tensor, got \[1.0\]"),
        (None, "input must be a dense tensor, got None"),
        (np.ones(32, np.float32), "input must be a dense tensor, got numpy.ndarray"),
        (torch.eye(32).to_sparse(), "input must be a dense tensor, got a torch.sparse_coo tensor"),
        (torch.eye(32).to_sparse_csr(), "input must be a dense tensor, got a torch.sparse_csr tensor"),
    ],
)
@pytest.mark.parametrize("policy", ["sparse", "auto", "dense"])
@pytest.mark.parametrize("nm", [None, (2, 4)])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_layers_name_what_is_no_tensor(x: Any, said: str, policy: str, nm: Any) -> None:
    """However they compute; the error is the one of Python for wrong types, and for wrong values."""
    layer = tilesparse.BlockSparseLinear(32, 32, density=1.0, policy=policy, nm=nm, block_shape=32)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for error in (TypeError, ValueError, tilesparse.errors.InvalidTypeError):
                with pytest.raises(error, match=said):
                    layer(x)


def test_sizes_of_layers_stay() -> None:
    layer = tilesparse.BlockSparseLinear(64, 32, block_shape=32)
    layer.in_features, layer.out_features = 64, 32  # as they are
    with pytest.raises(InvalidArgumentError, match=r"in_features must stay 64, .* got 32"):
        layer.in_features = 32
    with pytest.raises(InvalidArgumentError, match="out_features must stay 32"):
        layer.out_features = torch.tensor(32)  # type: ignore[assignment]
    assert (layer.in_features, layer.out_features) == (64, 32)
    for name in ("pattern", "policy"):
        with pytest.raises(InvalidArgumentError, match=name):
            setattr(layer, name, torch.nn.Linear(64, 32))
    assert not list(layer.children())


@pytest.mark.parametrize("name", [name for name in tilesparse.__all__ if name.endswith("Error")])
def test_errors_are_also_the_built_in_ones(name: str) -> None:
    error = getattr(tilesparse, name)
    assert issubclass(error, TileSparseError)
    builtin = {
        "TileSparseError": Exception,
        "InvalidArgumentError": ValueError,
        "InvalidPatternError": ValueError,
        "InvalidTypeError": TypeError,
        "UnsupportedError": NotImplementedError,
        "CheckpointError": ValueError,
        "CheckpointNotFoundError": FileNotFoundError,
        "TuneFileError": OSError,
    }.get(name, RuntimeError)
    assert issubclass(error, builtin)
    assert str(pickle.loads(pickle.dumps(error("text")))) == "text"
