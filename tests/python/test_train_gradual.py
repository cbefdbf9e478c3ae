"""Blocks go when they should and as they should, and what is left trains on."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn, seeded
from test_docs import ROOT, executed
from torch import Tensor, nn
from torch.nn import functional as F
from training import BLOCK, IN, RATE, backward, train
from training import make as made

from tilesparse import BlockPattern, BlockSparseLinear
from tilesparse.errors import InvalidArgumentError, PatternChangedError, UnsupportedError
from tilesparse.nn.weight import keep_blocks
from tilesparse.train import BlockGates, Gradual, GroupLasso, PatternSchedule, compact_, snapshot

pytestmark = pytest.mark.usefixtures("one_thread")


def make(density: float = 1.0, **options: Any) -> Any:
    return made(density, **options)


# ---- gradual ----


@pytest.mark.parametrize("device", DEVICES)
def test_density_falls_as_zhu_and_gupta_say(device: str) -> None:
    model = make(device=device, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = Gradual(model, optimizer, density=0.25, steps=40, events=5)
    counts = train(model, optimizer, schedule, range(40))
    expected = [24]
    for step in range(1, 41):
        event = {14: 1, 18: 2, 22: 3, 26: 4, 30: 5}.get(step)
        expected.append(expected[-1] if event is None else 6 + round(18 * (1 - event / 5) ** 3))
    assert counts == expected[1:] and counts[12] == 24 and counts[-1] == 6
    assert [layer.density for layer in (model[0], model[2])] == [0.25, 0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nm", [None, (2, 4)])
def test_what_goes_and_what_is_left(dtype: torch.dtype, nm: Any) -> None:
    """The smallest blocks go; weights, gradients, states and masks of the others stay as they were."""
    model = make(dtype=dtype, nm=nm, block_shape=32 if nm else BLOCK)
    layer = model[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = Gradual(model[:1], optimizer, density=0.5, steps=2, begin=0, end=1, events=1)
    train(model, optimizer, schedule, range(1))
    backward(model)
    weight, memory = layer.weight, layer.weight.data_ptr()
    with torch.no_grad():
        weight[1] = weight[0]
    before, gradient = layer.weight.detach().clone(), layer.weight.grad.clone()
    mask = None if nm is None else layer.mask.clone()
    moment = optimizer.state[weight]["exp_avg"].clone()
    places = torch.stack(layer.pattern.block_indices(), 1)
    assert schedule.step()
    worth = before.abs().sum((1, 2), dtype=torch.float32)
    left = worth.argsort(descending=True, stable=True)[: len(worth) // 2].sort().values
    assert layer.weight is weight and weight.data_ptr() != memory
    assert torch.equal(weight, before[left]) and torch.equal(weight.grad, gradient[left])
    assert torch.equal(optimizer.state[weight]["exp_avg"], moment[left])
    assert torch.equal(torch.stack(layer.pattern.block_indices(), 1), places[left])
    assert mask is None or torch.equal(layer.mask, mask[left])
    assert model[2].density == 1
    train(model, optimizer, schedule, range(3))
    assert weight.isfinite().all()


def test_a_loss_that_is_kept_does_not_disturb() -> None:
    """PyTorch takes a weight to have the shape of the last step as long as its graph lives."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    schedule = Gradual(model, optimizer, density=0.5, steps=4, begin=0, end=1, events=4)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        losses.append(backward(model, step))
        optimizer.step()
        schedule.step()
    x = randn(2, IN, dtype=torch.float32)
    y = model(x)
    keep_blocks(model[0], torch.arange(3))
    with pytest.raises(PatternChangedError):
        y.sum().backward()


def test_movement_keeps_what_grows() -> None:
    model = make(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = Gradual(model, optimizer, density=0.5, steps=4, begin=0.2, end=1, events=1, score="movement")
    scores = torch.zeros(24, dtype=torch.float64)
    places = torch.stack(model[0].pattern.block_indices(), 1)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        scores -= (model[0].weight.detach() * model[0].weight.grad).sum((1, 2))
        optimizer.step()
        schedule.step()
    left = scores.argsort(descending=True)[:12].sort().values
    assert torch.equal(torch.stack(model[0].pattern.block_indices(), 1), places[left])


# ---- compact, gates ----


@pytest.mark.parametrize("device", DEVICES)
def test_compact_removes_zero_blocks_and_nothing_else(device: str) -> None:
    model = make(0.5, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    backward(model)
    optimizer.step()
    with torch.no_grad():
        model[0].weight[[2, 5, 6]] = 0
        model[0].weight[3, 1:] = 0
        model[2].weight.zero_()
    model[2].weight.requires_grad_(False)
    x = randn(4, IN, dtype=torch.float32, device=device)
    y = model(x).detach()
    assert compact_(model, optimizer) == {"0": 3, "2": 12}
    assert torch.equal(model(x), y)
    assert model[0].weight.shape[0] == 9 and model[2].density == 0
    assert optimizer.state[model[0].weight]["momentum_buffer"].shape == model[0].weight.shape
    assert compact_(model, optimizer) == {"0": 0, "2": 0}
    for wrong in (nn.Tanh(), nn.Sequential(BlockSparseLinear(64, 64, storage="int8", block_shape=32))):
        with pytest.raises(InvalidArgumentError, match=r"^model: no BlockSparseLinear"):
            compact_(wrong)


def test_gates_have_the_hard_concrete_distribution() -> None:
    """Louizos et al.: how often gates are open, their value in evaluation, and the penalty's gradient."""
    layer = BlockSparseLinear(64, 64, density=1, block_shape=16, generator=seeded())
    model = nn.Sequential(layer)
    weight = layer.weight.detach().clone()
    gates = BlockGates(model, keep=0.3)
    assert math.isclose(float(gates.density()), 0.3, rel_tol=1e-5)
    torch.manual_seed(0)
    samples = torch.stack([(layer.weight / weight)[:, 0, 0].detach() for _ in range(500)])
    assert abs(float((samples > 0).double().mean()) - 0.3) < 0.02
    assert float(samples.min()) >= 0 and float(samples.max()) <= 1 and (samples == 1).any()
    (log_alpha,) = gates.parameters()
    with torch.no_grad():
        log_alpha.copy_(torch.linspace(-4, 4, 16))
    model.eval()
    value = (log_alpha.sigmoid() * 1.2 - 0.1).clamp(0, 1)
    torch.testing.assert_close(layer.weight, weight * value[:, None, None])
    gates.density().backward()
    open_ = (log_alpha - 2 / 3 * math.log(0.1 / 1.1)).sigmoid().detach()
    torch.testing.assert_close(log_alpha.grad, open_ * (1 - open_) / 16)
    with pytest.raises(UnsupportedError, match="parametrized"):
        BlockGates(model)
    for keep in (0, 1, 1.5):
        with pytest.raises(InvalidArgumentError, match=r"^keep must "):
            BlockGates(make(), keep=keep)
    with pytest.raises(InvalidArgumentError, match=r"^model must"):
        BlockGates(nn.Tanh())


def test_gates_end_in_a_smaller_model() -> None:
    model = make(0.5)
    weights = [model[0].weight, model[2].weight]
    gates = BlockGates(model, keep=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        backward(model, step)
        (0.5 * gates.density()).backward()
        optimizer.step()
    model.eval()
    x = randn(4, IN, dtype=torch.float32)
    y = model(x).detach()
    model.train()
    with pytest.raises(InvalidArgumentError, match=r"^optimizer(: | must )"):
        gates.compact("AdamW")  # type: ignore[arg-type]
    removed = gates.compact(optimizer)
    with pytest.raises(InvalidArgumentError, match=r"^model must have layers with gates"):
        gates.compact(optimizer)
    torch.testing.assert_close(model(x), y)
    assert [model[0].weight, model[2].weight] == weights and sum(removed.values()) > 0
    assert type(model[0]) is BlockSparseLinear and model.training
    assert not [name for name in model.state_dict() if "log_alpha" in name]
    for weight in weights:
        assert optimizer.state[weight]["exp_avg"].shape == weight.shape
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_the_page_on_training_runs() -> None:
    names = executed("training.md")
    first, *_, last = names["history"]
    assert first["0"].sum() == last["0"].sum() and not torch.equal(first["0"], last["0"])
    assert names["dense"][0].density == 0.25
    assert names["lost"].keys() == {"0"}
    assert names["half"][0].weight.dtype == torch.bfloat16


def test_the_language_model_of_the_benchmark_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example: Any = runpy.run_path(str(ROOT / "benchmarks/train_lm.py"))
    text = torch.randint(256, (4096,), generator=seeded(), dtype=torch.uint8)
    monkeypatch.setitem(example["main"].__globals__, "sources", lambda most: (text, text))
    output = tmp_path / "results.json"
    sizes = "--width 64 --dense-width 32 --layers 1 --context 16 --batch 2 --block 16 --seconds 0.3"
    contenders = "dense,rigl:0.25,gradual:0.25"
    run = f"--device cpu --no-compile {sizes} --contenders {contenders} --output {output}"
    example["main"](run.split())
    cases = json.loads(output.read_text())["cases"]
    assert [case["contender"] for case in cases] == contenders.split(",")
    assert all(case["results"][-1]["loss"] < 8 for case in cases)
    assert cases[1]["parameters"] == cases[1]["parameters_at_first"]
    assert cases[2]["parameters"] < cases[2]["parameters_at_first"]
    assert cases[0]["densities"] == [] and cases[1]["densities"] == [0.25]
    for name in ("rigl", "rigl:many", "gradual:0", "best:0.5"):
        with pytest.raises(SystemExit, match=f"^--contenders must be .* got '{name}'"):
            example["check_contender"](name)


# ---- what methods reach ----


MIXED, PART = 512, 16  # inputs, of which three parts say something
TELLING = (3, 14, 27)


def needles(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(x [count, MIXED], labels [count])."""
    generator = seeded(seed)
    labels = torch.randint(10, (count,), generator=generator)
    x = torch.randn(count, MIXED, generator=generator)
    signs = torch.randn(10, len(TELLING) * PART, generator=seeded(5))[labels]
    for part, sign in zip(TELLING, signs.split(PART, 1), strict=True):
        x[:, part * PART : (part + 1) * PART] += sign
    return x, labels


# The schedule, the density at first, and the least and the most of the inputs that are told apart.
HAYSTACK: dict[str, tuple[Callable[..., Any], float, float, float]] = {
    "static": (lambda m, o: None, 0.1, 0.0, 0.3),
    "set": (lambda m, o: PatternSchedule(m, o, every=10), 0.1, 0.5, 1.0),
    "rigl": (lambda m, o: PatternSchedule(m, o, every=10, grow="gradient"), 0.1, 0.95, 1.0),
    "movement": (
        lambda m, o: PatternSchedule(m, o, every=10, grow="gradient", drop="movement"),
        0.1,
        0.95,
        1.0,
    ),
    "gradual": (lambda m, o: Gradual(m, o, density=0.1, steps=200, events=8), 1.0, 0.95, 1.0),
}


def haystack(density: float) -> Any:
    torch.manual_seed(0)
    chance = seeded(1)  # which misses all telling inputs, as drawing uniformly often does
    mask = torch.zeros(64 // PART, MIXED // PART, dtype=torch.bool)
    mask.view(-1)[torch.randperm(mask.numel(), generator=chance)[: round(density * mask.numel())]] = True
    pattern = BlockPattern.from_block_mask(mask, block_shape=PART)
    first = BlockSparseLinear(MIXED, 64, pattern=pattern, generator=chance)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(64, 10))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, labels = needles(64, step)
    return F.cross_entropy(model(x), labels)


def found(model: nn.Module) -> float:
    x, labels = needles(1000, 10**6)
    return float((model.eval()(x).argmax(-1) == labels).float().mean())


@pytest.mark.parametrize("name", HAYSTACK)
def test_telling_inputs_are_found(name: str) -> None:
    """A tenth of the blocks of a random pattern misses what tells digits apart; one that moves does not."""
    method, density, least, most = HAYSTACK[name]
    model = haystack(density)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = method(model, optimizer)
    for step in range(200):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    assert least <= found(model) <= most
    assert abs(model[0].density - 0.1) < 0.01


@pytest.mark.parametrize("name", ["group lasso", "gates"])
def test_nothing_but_telling_inputs_is_left(name: str) -> None:
    model = haystack(1.0)
    weights = list(model.parameters())
    gates = BlockGates(model) if name == "gates" else None
    groups: list[dict[str, Any]] = [{"params": weights}]
    if gates is not None:
        groups.append({"params": gates.parameters(), "lr": 0.1, "weight_decay": 0})
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    if gates is None:
        GroupLasso(model, optimizer, strength=0.3)
    for step in range(150):
        optimizer.zero_grad()
        (loss_of(model, step) + (0 if gates is None else 0.3 * gates.density())).backward()
        optimizer.step()
    if gates is None:
        compact_(model, optimizer)
    else:
        gates.compact(optimizer)
    left = snapshot(model)["0"].any(0).nonzero().flatten().tolist()
    assert left == list(TELLING) and found(model) >= 0.95
