"""Averages of weights belong to the blocks whose weights they are, wherever these lie."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn, seeded
from torch import Tensor, nn
from torch.optim import swa_utils

from tilesparse import BlockPattern, BlockSparseLinear
from tilesparse.errors import InvalidPatternError
from tilesparse.train import AveragedModel, Gradual

IN, OUT = 96, 64
DECAY = 0.9
FUNCTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(DECAY)},
}


def make(seed: int = 0, density: float = 0.5, **options: Any) -> Any:
    return nn.Sequential(
        BlockSparseLinear(
            IN, OUT, density=density, block_shape=16, generator=seeded(seed), dtype=torch.float64, **options
        ),
        nn.BatchNorm1d(OUT, dtype=torch.float64, device=options.get("device")),
    )


def dense(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.to_linear().weight.detach().clone(), layer.pattern.to_mask()


def write(layer: Any, seed: int) -> None:
    with torch.no_grad():
        layer.weight.copy_(randn(*layer.weight.shape, dtype=torch.float64, seed=seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_block_keeps_its_average_and_a_new_one_starts_from_its_weight(name: str, device: str) -> None:
    model = make(device=device)
    layer, average = model[0], AveragedModel(model, **FUNCTIONS[name])
    averaged: Any = average.module[0]
    wanted, kept = dense(layer)
    first, second = (make(seed)[0].pattern for seed in (1, 2))
    for step, pattern in enumerate([None, None, first, second, None, first]):
        write(layer, step)
        if pattern is not None:
            layer.pattern = pattern
        average.update_parameters(model)
        now, there = dense(layer)
        rate = 1 - DECAY if name != "mean" else 1 / (step + 1)
        rate = 1 if step == 0 else rate
        wanted = torch.where(kept, wanted + rate * (now - wanted), now) * there
        kept = there
        assert averaged.pattern == layer.pattern
        # PyTorch's mean divides by its count in float32 on a GPU.
        torch.testing.assert_close(dense(averaged)[0], wanted, rtol=1e-6, atol=1e-6)
    x = randn(5, IN, dtype=torch.float64, device=device)
    expected = nn.functional.linear(x, dense(averaged)[0], averaged.bias)
    torch.testing.assert_close(averaged(x), expected)


def test_blocks_that_go_leave_the_average_and_those_that_come_join_it() -> None:
    model = make(density=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradual = Gradual(model, optimizer, density=0.25, steps=4, begin=0, end=1, events=4)
    average = AveragedModel(model, **FUNCTIONS["ema"])
    averaged: Any = average.module[0]
    wanted = dense(model[0])[0]
    for step in range(4):
        write(model[0], step)
        gradual.step()
        average.update_parameters(model)
        now, there = dense(model[0])
        wanted = (now if step == 0 else wanted + (1 - DECAY) * (now - wanted)) * there
        torch.testing.assert_close(dense(averaged)[0], wanted)
    assert averaged.density == 0.25
    before = copy.deepcopy(averaged)
    model.load_state_dict(make(3, density=0.75).state_dict())
    average.update_parameters(model)
    stays = before.pattern.to_mask() & model[0].pattern.to_mask()
    now = dense(model[0])[0]
    wanted = torch.where(stays, DECAY * dense(before)[0] + (1 - DECAY) * now, now)
    torch.testing.assert_close(dense(averaged)[0], wanted)


def test_averaged_indices_are_refused_with_the_layer() -> None:
    model = make()
    for indices in (model[0].col_indices, model[0].slot):
        indices.copy_(indices * 0.999)  # as an average of all buffers gives
    with pytest.raises(
        InvalidPatternError, match=r"BlockSparseLinear\(in_features=96, .*\): averages of .*use_buffers=False"
    ):
        model(randn(5, IN, dtype=torch.float64))


def with_few_blocks(device: str) -> Any:
    """A layer whose pattern is one again when its last column is the one before."""
    blocks = torch.tensor([[0, 0], [0, 5], [0, 11]])
    pattern = BlockPattern.from_blocks(blocks, shape=(16, 192), block_shape=16)
    return nn.Sequential(BlockSparseLinear(192, 16, pattern=pattern)).to(device)


class AverageOfStates:
    """Averages everything in a state dict, or copies integers, as timm's ModelEmaV2 and ModelEmaV3 do."""

    def __init__(self, model: nn.Module, decay: float, *, integers: bool) -> None:
        self.module = copy.deepcopy(model).eval()
        self.module.to(next(model.parameters()).device)
        self.decay, self.integers = decay, integers

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for average, now in pairs:
            averaged = self.integers or average.is_floating_point()
            average.copy_(self.decay * average + (1 - self.decay) * now if averaged else now)


OTHERS: dict[str, Any] = {
    "states": partial(AverageOfStates, integers=True),
    "floating point": partial(AverageOfStates, integers=False),
    "buffers": lambda model, decay: swa_utils.AveragedModel(
        model, model.device, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(decay), use_buffers=True
    ),
    "buffers one by one": lambda model, decay: swa_utils.AveragedModel(
        model, avg_fn=swa_utils.get_ema_avg_fn(decay), use_buffers=True
    ),
    "parameters": lambda model, decay: swa_utils.AveragedModel(model, avg_fn=swa_utils.get_ema_avg_fn(decay)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decay", [0.9, 0.999, 0.9999])
@pytest.mark.parametrize("name", OTHERS)
def test_an_average_of_patterns_is_refused(name: str, decay: float, device: str) -> None:
    """Also where it is a pattern; others are as before, and go on."""
    model = with_few_blocks(device)
    model.device = torch.device(device)
    average = OTHERS[name](model, decay)
    x = randn(5, 192, dtype=torch.float32, device=device)
    refused = name in ("states", "buffers", "buffers one by one") and decay != 0.999
    expected = pytest.raises(InvalidPatternError, match="use_buffers=False") if refused else nullcontext()
    with expected:
        for _ in range(3):
            average.update_parameters(model)
        average.module(x)
    if refused:
        for use in (average.module.state_dict, partial(average.module, x)):
            with pytest.raises(InvalidPatternError, match=r"averaged; .*tilesparse\.train\.AveragedModel"):
                use()
        average.module.load_state_dict(model.state_dict())
    assert average.module[0].pattern == model[0].pattern
    torch.testing.assert_close(average.module(x), model(x))


def test_copies_may_be_written_to_and_trained() -> None:
    """By anything that is no average: other patterns, at any time, and one column less in training."""
    layer = copy.deepcopy(with_few_blocks("cpu")[0]).eval()
    x = randn(5, 192, dtype=torch.float32)
    for columns in ([1, 3, 9], [1, 4, 10], [0, 5, 11]):
        layer.col_indices.copy_(torch.tensor(columns))
        dense = layer.to_linear()
        torch.testing.assert_close(layer(x), dense(x))
        assert layer.state_dict()["col_indices"].tolist() == columns
    layer.train()(x)
    layer.col_indices.copy_(torch.tensor([0, 5, 10]))
    torch.testing.assert_close(layer(x), layer.to_linear()(x))


def test_an_empty_pattern_is_averaged() -> None:
    model = make(density=0)
    average = AveragedModel(model)
    model.load_state_dict(make(density=0.25).state_dict())
    average.update_parameters(model)
    averaged: Any = average.module[0]
    assert torch.equal(averaged.weight, model[0].weight)
