"""Arguments that do not fit: a typed error that names the argument, and nothing written."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEVICES, make_pattern, randn, random_values
from torch import Tensor, nn

import tilesparse
from tilesparse import BlockPattern, BlockSparseConfig, BlockSparseLinear, errors, functional, train
from tilesparse.errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError, TileSparseError

SHAPE, BLOCK_SHAPE = (48, 64), (16, 32)
IN_BLOCKS: Any = {"block_shape": BLOCK_SHAPE}
OF_SHAPE: Any = {"shape": SHAPE, **IN_BLOCKS}


def pattern_of(**changes: Any) -> BlockPattern:
    """A valid pattern with some arguments replaced: blocks (0, 0), (0, 1), (2, 1)."""
    arguments = {"crow_indices": [0, 2, 2, 3], "col_indices": [0, 1, 1], "slot": [0, 1, 2]}
    return BlockPattern(**{**arguments, **OF_SHAPE, **changes})


SHAPES: list[tuple[str, Any, str]] = [
    *(("shape", shape, "out_features") for shape in ((4.0, 64), (0, 64), (-48, 64))),
    *(("shape", shape, "in_features") for shape in ((48, True), (48, 2**31))),
    *(("shape", shape, "shape") for shape in ((48,), (48, 64, 64))),
    *(("block_shape", sizes, "block_shape") for sizes in ((16, 1), (256, 16), (16,), (0, 16))),
    *(("block_shape", sizes, f"block_shape.*{sizes}") for sizes in (129, 16.0, True, "16")),
]
ARRAYS: list[tuple[str, Any, str]] = [
    ("crow_indices", [0, 2, 3], "4 entries"),
    *(("crow_indices", crow, "") for crow in ([1, 2, 2, 3], [0, 2, 1, 3], [0, 2, 2, 2], [0, 2, 2, 4])),
    *(("crow_indices", crow, "") for crow in ([0, 9, 2, 3], [0, -1, 2, 3], [0, 2, 2, 2**32 + 3])),
    ("crow_indices", torch.tensor([0.0, 2, 2, 3]), "integers"),
    ("crow_indices", torch.tensor([[0, 2, 2, 3]]), "1-D"),
    *(("col_indices", col, "") for col in ([1, 0, 1], [1, 1, 1], [0, 2, 1], [0, -1, 1], [0, 2**32 + 1, 1])),
    ("col_indices", torch.tensor([True, True, True]), "integers"),
    *(("slot", slot, "") for slot in ([0, 1], [0, 1, 1], [0, 1, 3], [0, -1, 2])),
]


@pytest.mark.parametrize(("argument", "value", "named"), SHAPES)
def test_shapes(argument: str, value: Any, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        pattern_of(**{argument: value})


@pytest.mark.parametrize(("argument", "value", "named"), ARRAYS)
def test_pattern_arrays(argument: str, value: Any, named: str) -> None:
    with pytest.raises(InvalidPatternError, match=f"{argument}.*{named}"):
        pattern_of(**{argument: value})


@pytest.mark.parametrize("density", [-0.1, 1.0001, 2, -1e-9, math.nan, math.inf])
def test_density(density: float) -> None:
    for make in (
        lambda: BlockPattern.random(**OF_SHAPE, density=density),
        lambda: BlockPattern.from_scores(torch.ones(3, 2), **IN_BLOCKS, density=density),
        lambda: BlockPattern.from_dense(torch.ones(SHAPE), **IN_BLOCKS, density=density),
    ):
        with pytest.raises(InvalidArgumentError, match="density"):
            make()


CONSTRUCTORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: BlockPattern.random(**OF_SHAPE), "density and nnz"),
    (lambda: BlockPattern.random(**OF_SHAPE, density=0.5, nnz=3), "density and nnz"),
    (lambda: BlockPattern.random(**OF_SHAPE, nnz=-1), "nnz"),
    (lambda: BlockPattern.random(**OF_SHAPE, nnz=7), "nnz"),
    (lambda: BlockPattern.from_blocks([(3, 0)], **OF_SHAPE), r"blocks.*\(3, 0\)"),
    (lambda: BlockPattern.from_blocks([(0, -1)], **OF_SHAPE), "blocks"),
    (lambda: BlockPattern.from_blocks([(1, 1), (0, 0), (1, 1)], **OF_SHAPE), r"blocks.*\(1, 1\).*twice"),
    (lambda: BlockPattern.from_blocks({(0, 0)}, **OF_SHAPE), "blocks.*set"),  # type: ignore[arg-type]
    (lambda: BlockPattern.from_blocks([(0, 0), (1,)], **OF_SHAPE), "blocks"),  # type: ignore[list-item]
    (lambda: BlockPattern.from_blocks([(0, 2**70)], **OF_SHAPE), "blocks"),
    (lambda: BlockPattern.from_blocks(torch.ones(2, 3).long(), **OF_SHAPE), "blocks"),
    (lambda: BlockPattern.from_blocks(torch.ones(2, 2), **OF_SHAPE), "blocks.*float32"),
    (
        lambda: BlockPattern.from_block_mask(torch.ones(3, 2), **IN_BLOCKS, shape=(48, 65)),
        "mask.*3 x 3.*3, 2",
    ),
    (lambda: BlockPattern.from_mask(torch.ones(48), **IN_BLOCKS), "mask"),
    (lambda: BlockPattern.from_block_mask(torch.ones(3), **IN_BLOCKS), "mask"),
    (lambda: BlockPattern.from_block_mask(torch.ones(0, 3), **IN_BLOCKS), "out_features"),
    (lambda: BlockPattern.from_scores(torch.ones(6), **IN_BLOCKS, nnz=1), "scores"),
    (lambda: BlockPattern.from_scores(torch.tensor([[math.nan, 1]]), **IN_BLOCKS, nnz=1), "scores.*NaN"),
    (lambda: BlockPattern.from_scores(torch.ones(3, 2), **IN_BLOCKS, nnz=1, shape=(49, 64)), "scores.*4 x 2"),
    (lambda: pattern_of().update_(BlockPattern.full((48, 64), block_shape=(16, 16))), "other"),
    (lambda: pattern_of().update_(BlockPattern.full((64, 64), block_shape=(16, 32))), "other"),
]


@pytest.mark.parametrize(("make", "named"), CONSTRUCTORS)
def test_pattern_constructors(make: Callable[[], BlockPattern], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        make()


class Call:
    """The operands of one product each, to be changed."""

    def __init__(self, device: str = "cpu") -> None:
        like: Any = {"dtype": torch.float32, "device": device}
        self.pattern = make_pattern("random 50%", (3, 4), BLOCK_SHAPE)
        self.x, self.y = (
            randn(8, self.pattern.in_features, **like),
            randn(8, self.pattern.out_features, **like),
        )
        self.values, self.bias = random_values(self.pattern, **like), randn(self.pattern.out_features, **like)
        self.residual = randn(8, self.pattern.out_features, **like, seed=1)

    def linear(self, **options: Any) -> Tensor:
        return functional.linear(self.x, self.values, self.pattern, self.bias, **options)

    def added(self) -> Tensor:
        return functional.linear(self.x, self.values, self.pattern, residual=self.residual)

    def activated(self) -> Tensor:
        values = self.values.requires_grad_()
        return functional.linear(self.x, values, self.pattern, activation="relu", residual=self.residual)

    def expanded(self) -> Tensor:
        return self.linear(residual=self.residual, policy="dense")

    def dds(self) -> Tensor:
        return functional.dds(self.y, self.values, self.pattern, transpose=False)

    def dsd(self) -> Tensor:
        return functional.dsd(self.values, self.pattern, self.x.t())

    def sdd(self) -> Tensor:
        return functional.sdd(self.y, self.x, self.pattern)


BAD_OPERANDS: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("linear expanded sdd", "x", lambda x: x[:, :-1], "x.*128.*127"),
    ("linear expanded sdd", "x", lambda x: x.sum(), "x.*128"),
    ("linear expanded dsd sdd", "x", lambda x: x.int(), "x.*dtype.*int32"),
    ("linear expanded dsd sdd", "x", lambda x: x.to(torch.complex64), "x.*dtype.*complex64"),
    ("linear expanded dsd", "x", lambda x: x.half(), "x.*float32 like values.*float16"),
    ("sdd", "x", lambda x: x.half(), "y.*dtype.*float16"),
    ("sdd", "x", lambda x: x[:7], "y.*leading.*7.*8"),
    ("sdd", "x", lambda x: x[None], "y.*leading"),
    ("dds sdd", "y", lambda y: y[:, 1:], "y.*48"),
    ("dds", "y", lambda y: y.double(), "y.*float32 like values.*float64"),
    ("sdd", "y", lambda y: y.double(), "y.*dtype"),
    ("linear expanded dds dsd", "values", lambda v: v[1:], "values.*nnz"),
    ("linear expanded dds dsd", "values", lambda v: v.transpose(1, 2), "values"),
    ("linear expanded dds dsd", "values", lambda v: v.flatten(), "values"),
    ("linear expanded dds", "values", lambda v: v.mT.contiguous().mT, "values.*contiguous.*strides"),
    ("linear expanded dds", "values", lambda v: torch.cat([v, v], 2)[..., ::2], "values.*contiguous"),
    ("linear expanded", "bias", lambda b: b[1:], "bias.*48.*47"),
    ("linear expanded", "bias", lambda b: b[None], "bias"),
    ("linear expanded", "bias", lambda b: b.double(), "bias.*dtype"),
    ("added activated expanded", "residual", lambda r: r[1:], r"residual.*\(8, 48\).*\(7, 48\)"),
    ("added activated expanded", "residual", lambda r: r[:1], r"residual.*\(8, 48\).*\(1, 48\)"),
    ("added activated expanded", "residual", lambda r: r[:, :1], r"residual.*\(8, 48\).*\(8, 1\)"),
    ("added activated expanded", "residual", lambda r: r[None], r"residual.*\(8, 48\).*\(1, 8, 48\)"),
    ("added activated expanded", "residual", lambda r: r.half(), "residual.*dtype.*float16"),
]


@pytest.mark.parametrize(
    ("product", "operand", "change", "named"),
    [(product, *rest) for products, *rest in BAD_OPERANDS for product in products.split()],
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


@pytest.mark.parametrize("product", ["linear", "added", "expanded", "dds", "dsd", "sdd"])
def test_operands_are_checked_when_compiling(product: str) -> None:
    """The same errors reach users of fake and meta tensors, as under torch.compile."""
    call = Call("meta")
    call.residual = call.residual[:7]
    if product != "added":
        call.x, call.y = call.x[:, :16], call.y[:, :16]
    with pytest.raises(InvalidArgumentError, match=r"residual" if product == "added" else r"x|y"):
        getattr(call, product)()


MIXED = "linear:x linear:values linear:bias added:residual expanded:values dds:y sdd:x sdd:y"


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", MIXED.split())
def test_mixed_devices(mixed: str) -> None:
    (product, operand), call = mixed.split(":"), Call("cuda")
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


def endless(call: Call) -> Tensor:
    """More tokens than kernels can count."""
    call.x = torch.zeros(1, 1).expand(2**31, call.pattern.in_features)
    return call.linear()


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda call: functional.dsd(call.values, call.pattern, call.x.mT[None]), r"b.*2-D"),
        (lambda call: call.linear(activation="tanh"), r"activation.*relu.*'tanh'"),
        (lambda call: call.linear(policy="fast"), r"policy.*'dense'.*'fast'"),
        (endless, r"x.*tokens"),
        (
            lambda call: torch.ops.tilesparse.expand(
                call.values[1:], *call.pattern.index_on(torch.device("cpu"))
            ),
            "nnz",
        ),
    ],
)
def test_options(use: Callable[[Call], Any], named: str) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match=named):
        use(Call())


BAD_PATTERNS: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
    ("crow_indices", lambda crow: crow[:-1], InvalidPatternError, "crow_indices.*4 entries.*3"),
    ("crow_indices", lambda crow: crow.long(), InvalidPatternError, "crow_indices.*int32.*int64"),
    ("col_indices", lambda col: col[None], InvalidPatternError, "col_indices.*1-D"),
    ("col_indices", lambda col: col.float(), InvalidPatternError, "col_indices.*int32.*float32"),
    ("slot", lambda slot: slot[1:], InvalidPatternError, "slot.*entries"),
    ("slot", lambda slot: torch.stack([slot, slot], 1)[:, 0], InvalidPatternError, "slot.*contiguous"),
    ("shape", lambda shape: (0, 128), InvalidArgumentError, "out_features.*0"),
    ("shape", lambda shape: (64, 128), InvalidPatternError, "crow_indices.*5 entries"),
    ("block_shape", lambda block_shape: (16, 1), InvalidArgumentError, "block_shape.*1"),
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
    ):
        with pytest.raises(error, match=named):
            operator()


def test_operators_check_what_patterns_on_the_cpu_hold_and_where_they_are() -> None:
    call, ops = Call(), torch.ops.tilesparse
    index = call.pattern.index_on(call.values.device)
    for field in ("crow_indices", "col_indices", "slot"):
        wrong: dict[str, Any] = {field: torch.full_like(getattr(index, field), 9)}
        with pytest.raises(InvalidPatternError, match=field):
            ops.dds_nt(call.x, call.values, *index._replace(**wrong))
    with pytest.raises(InvalidArgumentError, match=r"dense.*\(48, 128\).*\(128, 48\)"):
        ops.gather(torch.ones(128, 48), *index)
    index = call.pattern.index_on(torch.device("meta"))
    with pytest.raises(InvalidArgumentError, match=r"values.*meta like the pattern.*cpu"):
        ops.dds_nt(call.x, call.values, *index)
    with pytest.raises(InvalidPatternError, match=r"slot.*meta like col_indices.*cpu"):
        ops.dds_nt(call.x, call.values, *index._replace(slot=call.pattern.slot))


NO_TENSORS: dict[str, Any] = {
    r"\[1.0\]": [1.0],
    "None": None,
    "numpy.ndarray": np.ones(32, np.float32),
    "a torch.sparse_coo tensor": torch.eye(32).to_sparse(),
    "a torch.sparse_csr tensor": torch.eye(32).to_sparse_csr(),
}


@pytest.mark.parametrize("said", NO_TENSORS)
@pytest.mark.parametrize("policy", ["sparse", "auto", "dense"])
@pytest.mark.parametrize("nm", [None, (2, 4)])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_layers_name_what_is_no_tensor(said: str, policy: str, nm: Any) -> None:
    """However they compute; the error is the one of Python for wrong types, and for wrong values."""
    layer = BlockSparseLinear(32, 32, density=1.0, policy=policy, nm=nm, block_shape=32)
    refused: Any = pytest.raises(InvalidTypeError, match=f"input must be a dense tensor, got {said}")
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), refused:
            layer(NO_TENSORS[said])
    assert issubclass(InvalidTypeError, TypeError) and issubclass(InvalidTypeError, ValueError)


def test_sizes_of_layers_stay() -> None:
    layer = BlockSparseLinear(64, 32, block_shape=32)
    for name in ("in_features", "out_features"):
        with pytest.raises(AttributeError, match=name):
            setattr(layer, name, 32)
    assert (layer.in_features, layer.out_features) == (64, 32)
    for name in ("pattern", "policy"):
        with pytest.raises(InvalidArgumentError, match=name):
            setattr(layer, name, torch.nn.Linear(64, 32))
    assert not list(layer.children())


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_errors_are_also_the_built_in_ones(name: str) -> None:
    error = getattr(errors, name)
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


@pytest.mark.parametrize(
    "use",
    [
        lambda model: tilesparse.sparsify_(model, BlockSparseConfig()),
        lambda model: tilesparse.prune_(model, BlockSparseConfig(), [torch.ones(1)]),
        lambda model: tilesparse.quantize_(model, BlockSparseConfig.w8a8(), [torch.ones(1)]),
        lambda model: tilesparse.distill_(model, nn.Identity(), [torch.ones(1)], lr=1.0),
        lambda model: tilesparse.reconstruct_(model, nn.Identity(), [torch.ones(1)] * 2),
        lambda model: tilesparse.advise(model, torch.ones(1)),
        tilesparse.summary,
        tilesparse.densify_,
        tilesparse.prepare_for_inference_,
        train.BlockGates,
        train.snapshot,
    ],
)
def test_what_is_no_model_is_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"model must be a torch\.nn\.Module, got str"):
        use("model")
