"""Wrong values of public arguments: a sentence that names the argument, in an error of this package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilesparse
from tilesparse import BlockSparseConfig, BlockSparseLinear, prune, train, tuning
from tilesparse.errors import InvalidArgumentError, TileSparseError
from tilesparse.recover import DistillationLoss

NAN, CONFIG, PRODUCT = float("nan"), BlockSparseConfig(0.5, 32), tuning.Product(64, 64, 8, block_shape=32)
BATCHES = [torch.ones(80, 64)] * 2


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def sparse(**options: Any) -> nn.Module:
    return nn.Sequential(BlockSparseLinear(64, 64, block_shape=32, **options), nn.ReLU(), nn.Linear(64, 64))


def scheduled(kind: Any, **options: Any) -> Callable[..., Any]:
    model = sparse(nm=(2, 4) if kind is train.MaskSchedule else None)
    return partial(kind, model, torch.optim.SGD(model.parameters(), 0.1), **options)


def of_model(verb: Callable[..., Any], make: Callable[[], nn.Module], **options: Any) -> Callable[..., Any]:
    return lambda **own: verb(**{"model": make(), **options, **own})


SIZES, FRACTIONS, RATES = [0, -32, 64.5, "64", True], [-0.1, 1.5, NAN, "half"], [-1, "x", NAN]
LAYER: dict[str, list[Any]] = {
    "density": [*FRACTIONS, True],
    "block_shape": [0, 24, (32,), "32", (32, 32, 32)],
    "nm": [(1, 2), (2, 3), 4, "2:4"],
    "storage": ["int9", 3],
    "activations": ["int9", 7],
    "policy": ["fast", 3, None],
    "transposable": [2],
}
CHOSEN: dict[str, list[Any]] = {"layers": [3, [3]], "exclude": [3, "("], "filter_fn": [3, "x"]}
CALIBRATED: dict[str, list[Any]] = {
    "model": [3],
    "batches": [3, []],
    "device": ["moon", 2**80],
    "forward": [3, 0],
}
# The call of each verb with what it requires, and wrong values of its arguments.
CASES: dict[str, tuple[Callable[..., Any], dict[str, list[Any]]]] = {
    "BlockSparseLinear": (
        lambda **own: BlockSparseLinear(
            **{"in_features": 64, "out_features": 64, "block_shape": 32, "bias": True, **own}
        ),
        {**LAYER, "in_features": SIZES, "out_features": SIZES, "dtype": [torch.int8], "pattern": ["x"]},
    ),
    "BlockSparseConfig": (BlockSparseConfig, {**LAYER, "granularity": ["column", 2]}),
    "from_linear": (
        lambda **own: BlockSparseLinear.from_linear(
            **{"linear": nn.Linear(64, 64), "block_shape": 32, **own}
        ),
        {"linear": [3, nn.ReLU()], "density": FRACTIONS, "scores": [3, torch.ones(3, 3)], "pattern": [3]},
    ),
    "sparsify_": (
        of_model(tilesparse.sparsify_, dense, config=CONFIG),
        {
            "model": [3, None],
            "config": [3, {"0": 3}, {3: CONFIG}],
            "dry_run": [2],
            "strict": [None],
            **CHOSEN,
            "layers": [3, [], [3], "("],
        },
    ),
    "densify_": (of_model(tilesparse.densify_, sparse), {"model": [3], **CHOSEN, "layers": [3, "nothing"]}),
    "prepare_for_inference_": (
        of_model(tilesparse.prepare_for_inference_, sparse),
        {"model": [3, dense()], "batch": [3, "x"]},
    ),
    "sparsify_activations_": (
        of_model(tilesparse.sparsify_activations_, sparse, batches=BATCHES),
        {"model": [3], "batches": [3, []], "fraction": FRACTIONS},
    ),
    "prune_": (
        of_model(tilesparse.prune_, dense, config=CONFIG, batches=BATCHES),
        {**CALIBRATED, **CHOSEN, "config": [3, None, {}], "method": ["best", 3, []], "refit": ["x"]},
    ),
    "quantize_": (
        of_model(tilesparse.quantize_, sparse, config=BlockSparseConfig.w8a8(), batches=BATCHES),
        {**CALIBRATED, **CHOSEN, "config": [3, None], "layers": [3, "nothing"]},
    ),
    "distill_": (
        of_model(
            tilesparse.distill_,
            sparse,
            teacher=dense(),
            batches=BATCHES,
            lr=0.1,
            loss=DistillationLoss(logits=1.0),
        ),
        {
            "model": [3],
            "teacher": [3],
            "batches": [3, []],
            "lr": RATES,
            "optimizer": [3],
            "loss": [3],
            "forward": [3],
            "callback": [3],
            "graph": ["x", 1],
            "accumulate": [0, 1.5],
            "clip": [-1, "x"],
            "autocast": [3, torch.int8],
        },
    ),
    "reconstruct_": (
        of_model(tilesparse.reconstruct_, sparse, teacher=dense(), batches=BATCHES),
        {**CALIBRATED, "teacher": [3], "epochs": [0, 1.5, "x"], "lr": RATES, "autocast": [torch.int8]},
    ),
    "advise": (
        of_model(tilesparse.advise, dense, batch=BATCHES[0]),
        {
            "model": [3],
            "batch": [3],
            "densities": [3, [], [2.0], ["x"]],
            "block_shapes": [3, []],
            "layers": [3],
        },
    ),
    "save": (
        of_model(tilesparse.save, sparse, path="saved"),
        {"model": [3], "path": [3, None], "max_shard_size": [0, -1, "x", 1.5], "state_dict": [3]},
    ),
    "load": (
        lambda **own: tilesparse.load(**{"model_or_class": sparse, "path": "saved", **own}),
        {"model_or_class": [3, None], "path": [3, None]},
    ),
    "convert": (
        partial(tilesparse.convert, "x.pt", None),
        {"dtype": [[], torch.int8], "max_shard_size": [0]},
    ),
    "measure_errors": (
        of_model(prune.measure_errors, dense, batches=BATCHES, configs=[CONFIG]),
        {**CALIBRATED, "layers": [3], "configs": [3, [], [3]]},
    ),
    "permute_": (
        of_model(
            prune.permute_,
            dense,
            config=CONFIG,
            batches=BATCHES,
            groups=[prune.PermutationGroup(("0",), "2")],
        ),
        {**CALIBRATED, "config": [3], "groups": [3, [3]]},
    ),
    "PatternSchedule": (
        scheduled(train.PatternSchedule, every=2),
        {"every": [0, 1.5, "x"], "fraction": FRACTIONS, "drop": ["x"], "grow": ["x"], "seed": ["x", 1.5]},
    ),
    "MaskSchedule": (scheduled(train.MaskSchedule, every=2, decay=0.1), {"every": [0, "x"], "decay": RATES}),
    "Gradual": (
        scheduled(train.Gradual, density=0.25, steps=10),
        dict.fromkeys(("density", "begin", "end"), FRACTIONS)
        | {"steps": [0, 1.5], "events": [0, 1.5], "score": ["x"]},
    ),
    "GroupLasso": (scheduled(train.GroupLasso, strength=0.1), {"strength": RATES}),
    "BlockGates": (of_model(train.BlockGates, sparse), {"model": [3, dense()], "keep": [0, 1.5, "x", NAN]}),
    "parameter_groups": (of_model(train.parameter_groups, sparse, lr=0.1), {"model": [3], "lr": RATES}),
    "tune": (
        partial(tuning.tune, [PRODUCT]),
        {"candidates": [0, 1.5], "repetitions": [0, "x"], "device": ["moon"]},
    ),
    "choose": (
        lambda **own: tuning.choose(**{"product": PRODUCT, **own}),
        {"product": [3], "policy": ["fast"], "device": ["moon", 3.5]},
    ),
    "tuning.load": (tuning.load, {"path": [3]}),
    "allocate": (
        of_model(prune.allocate, dense, profiles={"0": {CONFIG: 0.1}}, bytes=10**6),
        {"profiles": [3, {}], "model": [3], "bytes": [-1, "x"], "milliseconds": [-1, "x"], "report": [3]},
    ),
}
WRONG = [(verb, name, value) for verb, (_, own) in CASES.items() for name in own for value in own[name]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("verb", "name", "value"), WRONG)
def test_wrong_values_are_refused_by_name(
    verb: str, name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TileSparseError, match=name) as caught:
        CASES[verb][0](**{name: value})
    assert isinstance(caught.value, InvalidArgumentError) and not list(tmp_path.iterdir())
