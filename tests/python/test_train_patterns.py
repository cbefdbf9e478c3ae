"""Patterns move as the papers say, optimizers forget what moved, and runs are repeatable everywhere."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import DEVICES, dense_weight, here, randn, same, seeded, state_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from training import BLOCK, IN, OUT, RATE, backward, make, slots_of, sparse, train

from tilesparse import BlockPattern, BlockSparseLinear
from tilesparse.distributed import synchronize_patterns
from tilesparse.errors import InvalidArgumentError, UnsupportedError, UnsynchronizedPatternError
from tilesparse.nn.weight import layer_index
from tilesparse.train import (
    BlockGates,
    Gradual,
    GroupLasso,
    MaskSchedule,
    PatternSchedule,
    learning_rate_factor,
    parameter_groups,
)
from tilesparse.train import patterns as gradients

METHODS: dict[str, dict[str, Any]] = {
    "set": {},
    "rigl": {"grow": "gradient"},
    "movement": {"grow": "gradient", "drop": "movement"},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=RATE, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=RATE, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=RATE, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=RATE),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=RATE, momentum=0.9),
}


pytestmark = pytest.mark.usefixtures("one_thread")


# ---- norms of gradient blocks ----


def dense_gradient_norms(dy: Tensor, x: Tensor) -> Tensor:
    """By the definition, of what autograd computes."""
    weight = torch.zeros(dy.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device, requires_grad=True)
    nn.functional.linear(x, weight).backward(dy)
    blocks = weight.grad.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK).flatten(2)
    return torch.linalg.vector_norm(blocks.double(), 1, dim=-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, 3 * BLOCK * IN * 4, 1 << 30])
def test_norms_are_those_of_the_dense_gradient(
    device: str, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "CHUNK_BYTES", chunk)
    dy, x = (randn(3, 5, size, dtype=dtype, device=device, seed=size) for size in (OUT, IN))
    norms = gradients.gradient_norms(dy, x, (BLOCK, BLOCK))
    assert norms.shape == (OUT // BLOCK, IN // BLOCK) and norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), dense_gradient_norms(dy, x), rtol=1e-3, atol=1e-3)
    assert gradients.gradient_norms(dy[:0], x[:0], (BLOCK, BLOCK)).eq(0).all()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


def observed(model: nn.Module, run: Callable[[], Any], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The norms that a schedule has after a backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = PatternSchedule(model, optimizer, every=1, grow="gradient", fraction=0.0)
    run()
    norms = schedule._norms.taken()
    schedule.remove()
    return norms


def test_norms_that_a_schedule_sees() -> None:
    """As dense layers have them, with checkpoints, under autocast, beside evaluations and compiled."""
    model = make()
    dense = nn.Sequential(*(m.to_linear() if isinstance(m, BlockSparseLinear) else nn.ReLU() for m in model))
    backward(dense)

    def blocks(weight: Any) -> Tensor:
        return weight.grad.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK).abs().sum((2, 3))

    expected = {name: blocks(dense[int(name)].weight) for name in ("0", "2")}

    def check(model: nn.Module, run: Callable[[], Any], tolerance: float = 1e-4) -> None:
        for name, norms in observed(model, run).items():
            reference = expected[name.split(".")[-1]]
            torch.testing.assert_close(norms, reference, rtol=tolerance, atol=tolerance)

    check(model, lambda: backward(model))
    for reentrant in (False, True):
        wrapped = Checkpointed(model, reentrant)
        check(wrapped, lambda wrapped=wrapped: backward(wrapped))

    def with_evaluations() -> None:
        with torch.no_grad():
            model(torch.ones(4, IN))
        model(torch.ones(4, IN))  # whose gradient nobody asks for
        backward(model)

    check(model, with_evaluations)

    def under_autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            backward(model)

    check(model, under_autocast, 0.1)
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        check(model, lambda compiled=compiled: backward(compiled))


def test_norms_of_several_calls_are_added_up() -> None:
    layer = BlockSparseLinear(IN, IN, block_shape=BLOCK, generator=seeded())
    model = nn.Sequential(layer, nn.Tanh(), layer)
    xs, dys = [], []

    def run() -> None:
        def note(module: nn.Module, inputs: Any, y: Tensor) -> None:
            xs.append(inputs[0].detach())
            y.register_hook(dys.append)

        handle = layer.register_forward_hook(note)
        for step in (0, 1):
            backward(model, step)
        handle.remove()

    norms = observed(model, run)["0"]
    dys = [dys[i] for i in (1, 0, 3, 2)]  # gradients come last call first
    parts = [gradients.gradient_norms(dy, x, (BLOCK, BLOCK)) for dy, x in zip(dys, xs, strict=True)]
    torch.testing.assert_close(norms, torch.stack(parts).sum(0))


# ---- which blocks move ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_the_worst_blocks_go_where_the_method_says(device: str, method: str) -> None:
    model = make(device=device)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    schedule = PatternSchedule(model, optimizer, fraction=0.3, every=2, **METHODS[method])
    layer, moved = model[0], {}
    score = torch.zeros(layer.weight.shape[0], device=device)
    for step in (1, 2):
        optimizer.zero_grad()
        dys: list[Tensor] = []
        handle = layer.register_forward_hook(lambda m, i, y, dys=dys: moved.update(x=i[0], y=y))
        hook = model[1].register_full_backward_hook(lambda m, before, after, dys=dys: dys.append(before[0]))
        model[1].inplace = False
        backward(model, step)
        handle.remove(), hook.remove()
        norms = gradients.gradient_norms(dys[0], moved["x"], (BLOCK, BLOCK))
        score -= (layer.weight.detach() * layer.weight.grad).sum((1, 2))
        optimizer.step()
        before = slots_of(layer)
        magnitude = layer.weight.detach().abs().sum((1, 2))
        schedule.step()
        if step == 1:
            assert slots_of(layer) == before and schedule.moved == {}
    after = slots_of(layer)
    changed = [slot for slot in range(len(after)) if after[slot] != before[slot]]
    count = int(0.3 * len(before))
    assert len(changed) == count == int(schedule.moved["0"]) and len(set(after)) == len(after)
    worth = score if method == "movement" else magnitude
    assert sorted(changed) == sorted(worth.argsort()[:count].tolist())
    grown = {after[slot] for slot in changed}
    assert grown.isdisjoint(before)
    if method != "set":
        free = [(r, c) for r in range(OUT // BLOCK) for c in range(IN // BLOCK) if (r, c) not in set(before)]
        assert grown == set(sorted(free, key=lambda place: -float(norms[place]))[:count])
    assert layer.weight[changed].eq(0).all()
    kept = [slot for slot in range(len(after)) if slot not in changed]
    torch.testing.assert_close(layer.weight.detach()[kept].abs().sum((1, 2)), magnitude[kept])
    torch.testing.assert_close(
        layer.to_linear().weight.detach().cpu().double(), dense_weight(layer.weight, layer.pattern)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_forget_moved_blocks(name: str) -> None:
    model = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = PatternSchedule(model, optimizer, every=2)
    train(model, optimizer, schedule, range(1))
    backward(model, 1)
    optimizer.step()
    layer = model[0]
    states = {
        key: state.clone()
        for key, state in optimizer.state[layer.weight].items()
        if isinstance(state, Tensor) and state.dim()
    }
    before = slots_of(layer)
    schedule.step()
    changed = [slot for slot, place in enumerate(slots_of(layer)) if place != before[slot]]
    kept = [slot for slot in range(len(before)) if slot not in changed]
    assert changed and states
    for key, state in states.items():
        now = optimizer.state[layer.weight][key]
        assert torch.equal(now[kept], state[kept])
        assert torch.equal(now[changed], 0 * state[changed])
    assert float(optimizer.state[layer.weight].get("step", 2)) == 2
    train(model, optimizer, schedule, range(2, 5))
    assert all(weight.isfinite().all() for weight in model.parameters())


class Opaque(torch.optim.SGD):
    """Keeps something of which nobody knows what it is of."""

    def __init__(self, parameters: Any, state: Any) -> None:
        super().__init__(parameters, lr=RATE)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["secret"] = state


@pytest.mark.parametrize("state", [torch.ones(7), torch.ones(16, 16), [torch.ones(1)]])
def test_states_that_nobody_understands_are_refused_by_name(state: Any) -> None:
    model = make()
    optimizer = Opaque(model.parameters(), state)
    schedule = PatternSchedule(model, optimizer, every=1)
    backward(model)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with pytest.raises(UnsupportedError, match=r"^optimizer: Opaque keeps a state 'secret' .* layer '0'"):
        schedule.step()
    assert schedule.steps == 0 and same(before, list(model.state_dict().values()))


def test_fractions_are_clipped_to_what_is_free() -> None:
    for density, moves in ((1.0, 0), (23 / 24, 1), (0.0, 0)):
        model = make(density)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        schedule = PatternSchedule(model, optimizer, fraction=1.0, every=1)
        backward(model)
        optimizer.step()
        schedule.step()
        assert [int(moved) for moved in schedule.moved.values()] == [moves, moves]


def test_layers_without_useful_norms_stay_as_they_are() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    schedule = PatternSchedule(model, optimizer, every=1, grow="gradient")
    before = [slots_of(layer) for layer in sparse(model)]
    with pytest.raises(InvalidArgumentError, match=r"^grow by gradients needs a backward pass"):
        schedule.step()
    model[2](torch.ones(2, OUT)).square().sum().backward()  # one layer alone
    schedule.step()
    assert schedule.moved["0"] == 0 and schedule.moved["2"] > 0 and slots_of(model[0]) == before[0]
    before = [slots_of(layer) for layer in sparse(model)]
    for factor in (0.0, float("inf")):  # a loss that is 0, a scaled loss that overflows
        optimizer.zero_grad()
        (model(torch.ones(2, IN)).sum() * factor).backward()
        optimizer.step()
        weight = model[0].weight.clone()
        schedule.step()
        assert [slots_of(layer) for layer in sparse(model)] == before and schedule.moved["0"] == 0
        assert torch.equal(model[0].weight.nan_to_num(), weight.nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_models_may_be_converted_and_moved_on_the_way(method: str, device: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = PatternSchedule(model, optimizer, every=2, **METHODS[method])
    for step, dtype in enumerate((torch.float64, torch.float64, torch.float32, torch.bfloat16)):
        model.to(device, dtype)
        train(model, optimizer, schedule, range(step, step + 1))
    assert int(schedule.moved["0"]) > 0 and schedule.moved["0"].device.type == device


def test_learning_rate_schedulers_drive_the_fractions_of_schedules() -> None:
    """Each of a part of the model: what is in none stays as it is, and may be frozen."""
    model = make()
    model.append(make()[0])
    model[3].weight.requires_grad_(False)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(InvalidArgumentError, match="layer '3': its weight is frozen"):
        PatternSchedule(model, optimizer, every=1)
    parts = [PatternSchedule(model[:1], optimizer, fraction=0.5, every=1)]
    parts += [PatternSchedule(model[2], optimizer, fraction=0.25, every=1)]
    scheduler, frozen, counts = LambdaLR(parts[0], lambda step: 1 - step / 2), slots_of(model[3]), []
    for step in range(3):
        optimizer.zero_grad()
        backward(model[:3], step)
        optimizer.step()
        for one in (*parts, scheduler):
            one.step()
        counts.append([int(moved) for part in parts for moved in part.moved.values()])
    assert counts == [[6, 3], [3, 3], [0, 3]] and slots_of(model[3]) == frozen
    parts[0].param_groups[0]["lr"] = 1.5
    with pytest.raises(InvalidArgumentError, match=r"^lr must "):
        parts[0].step()


def test_masks_of_2_to_4_stay_at_their_slots() -> None:
    model = make(block_shape=32, nm=(2, 4))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    MaskSchedule(model, optimizer, every=2, decay=1e-4)
    schedule = PatternSchedule(model, optimizer, every=2, grow="gradient")
    train(model, optimizer, schedule, range(6))
    for layer in sparse(model):
        assert layer.mask.view(-1, 4).sum(-1).eq(2).all()


# ---- resumed, scaled, compiled, several processes ----


# The options of a layer, and the schedule that trains it.
SCHEDULES: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    **{
        name: (
            {},
            partial(*(PatternSchedule,), every=3, seed=4, fraction=0.5, **method),
        )
        for name, method in METHODS.items()
    },
    **{
        f"gradual {score}": (
            {"density": 1.0},
            partial(Gradual, density=0.25, steps=11, events=5, score=score),
        )
        for score in ("magnitude", "movement")
    },
    "masks": (
        {"block_shape": 32, "nm": (2, 4), "transposable": True},
        partial(MaskSchedule, every=3, decay=0.25),
    ),
}


def begin(name: str) -> Any:
    options, schedule = SCHEDULES[name]
    model = make(**options)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    parts = model, optimizer, schedule(model, optimizer)
    moves = isinstance(parts[2], PatternSchedule)
    return (*parts, LambdaLR(parts[2], lambda step: 1 / (1 + step))) if moves else parts


@pytest.mark.parametrize("name", SCHEDULES)
def test_resumed_training_is_the_same_bit_for_bit(name: str) -> None:
    def go(parts: Any, steps: range) -> None:
        train(*parts[:3], steps, *parts[3:])

    parts, resumed = begin(name), begin(name)
    go(parts, range(5))
    saved = copy.deepcopy([part.state_dict() for part in parts])
    go(parts, range(5, 11))
    if isinstance(parts[2], PatternSchedule):
        saved[2]["averages"] = {}  # of which earlier versions wrote none without growth by momentum
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    go(resumed, range(5, 11))
    assert same(state_of(*parts[:2]), state_of(*resumed[:2])) and resumed[2].steps == 11
    assert str(resumed[2].state_dict()) == str(parts[2].state_dict())


WRONG_LR = [{"lr": 7.0, "layers": ["0", "2"]}]
WRONG_STATES: dict[str, list[dict[str, Any]]] = {
    "movement": [{"movement": {"0": torch.ones(3), "2": torch.ones(3)}}, {"movement": None}],
    "set": [
        {"seed": "x"},
        {"seed": None},
        {"param_groups": []},
        {"param_groups": None},
        {"param_groups": WRONG_LR},
    ],
    "gradual magnitude": [{"first": {"0": 24}}, {"first": None}, {"movement": {"0": torch.ones(3)}}],
    "masks": [{"steps": True}],
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_states_of_something_else_are_refused(name: str) -> None:
    schedule = begin(name)[2]
    before = schedule.state_dict()
    wrongs = [
        before | changed for changed in (*WRONG_STATES[name], {"steps": -1}, {"steps": 1.5}, {"more": 1})
    ]
    for wrong in (*wrongs, {}, None):
        with pytest.raises(InvalidArgumentError, match=r"state_dict|seed"):
            schedule.load_state_dict(wrong)
        assert str(schedule.state_dict()) == str(before)


def test_movement_divides_by_the_scale_and_leaves_out_overflows() -> None:
    model = make()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=RATE, fused=True) for m in (model, twin)]
    schedules = [
        PatternSchedule(m, optimizer, every=9, drop="movement")
        for m, optimizer in zip((model, twin), optimizers, strict=True)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizers[0].zero_grad()
        x = randn(8, IN, dtype=torch.float32, seed=step)
        scaler.scale((model(x) - x.roll(1, -1)).square().mean()).backward()
        if step == 1:
            model[0].weight.grad[0, 0, 0] = torch.inf
        scaler.step(optimizers[0])
        scaler.update()
        schedules[0].step()
        if step != 1:
            train(twin, optimizers[1], schedules[1], range(step, step + 1))
    one, other = (schedule.state_dict()["movement"]["0"] for schedule in schedules)
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    with pytest.raises(UnsupportedError, match="without a closure"):
        optimizers[0].step(lambda: 0.0)
    optimizers[0].step(None)


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_compiled_training_goes_on_without_recompiling(grow: str) -> None:
    torch.compiler.reset()
    model = make()
    twin = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, twin)]
    schedules = [
        PatternSchedule(m, optimizer, every=3, grow=grow)
        for m, optimizer in zip((model, twin), optimizers, strict=True)
    ]
    train(compiled, optimizers[0], schedules[0], range(12))
    train(twin, optimizers[1], schedules[1], range(12))
    assert counter.frame_count == (1 if grow == "random" else 2)
    for one, other in zip(sparse(model), sparse(twin), strict=True):
        assert slots_of(one) == slots_of(other)
        torch.testing.assert_close(one.weight, other.weight)


class Wrapper(torch.optim.Optimizer):
    """As Accelerate wraps an optimizer: its own constructor is not called."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_wrapped_optimizers_are_looked_into() -> None:
    model = make()
    inner = OPTIMIZERS["adamw"](model.parameters())
    wrapper = Wrapper(inner)
    schedule = PatternSchedule(model, wrapper, every=1, drop="movement")
    lasso = GroupLasso(model, wrapper, strength=0.0)
    backward(model)
    wrapper.step()
    assert schedule.state_dict()["movement"]["0"].any()
    schedule.step()
    lasso.remove()
    assert not inner.state[model[0].weight]["exp_avg"].all((1, 2)).all()


ANY = [("model", nn.Linear(4, 4)), ("model", make()), ("optimizer", 3)]
COUNTS = [("every", 0), ("every", 2.0), ("every", True)]
WRONG: dict[str, list[tuple[str, Any]]] = {
    "set": [
        *COUNTS,
        *(("drop", "best"), ("drop", ["magnitude"]), ("grow", "best"), ("grow", torch.ones(2))),
        *(("seed", 1.5), ("fraction", 1.1), ("fraction", {"0": 0.1})),
    ],
    "gradual magnitude": [
        *(("density", 1.2), ("density", 0.0), ("density", 0.01), ("begin", 0.8), ("end", 2)),
        *(("steps", 0), ("events", 0), ("score", "beauty")),
    ],
    "masks": [
        *COUNTS,
        *(("model", make(block_shape=32)), ("model", make(block_shape=32, nm=(2, 4), storage="compressed"))),
        *(("decay", wrong) for wrong in (-1.0, math.nan, math.inf, "1", True)),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit_are_named(name: str) -> None:
    options, schedule = SCHEDULES[name]
    model = make(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for argument, wrong in (*ANY, *WRONG[name]):
        given = {"model": model, "optimizer": optimizer, argument: wrong}
        text = "model|optimizer" if argument == "model" else argument
        with pytest.raises(InvalidArgumentError, match=f"^({text})( must|: | of layer)"):
            schedule(given.pop("model"), given.pop("optimizer"), **given)
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        assert model[0]._observe is None


def test_layers_whose_blocks_cannot_move_are_named() -> None:
    stored = nn.Sequential(BlockSparseLinear(IN, OUT, storage="int8", block_shape=32))
    parametrized = make()
    nn.utils.parametrizations.weight_norm(parametrized[0])
    tied = make()
    pattern = BlockPattern(*layer_index(tied[0])[:2], shape=(OUT, IN), block_shape=BLOCK)
    tied.append(BlockSparseLinear(IN, OUT, pattern=pattern))
    tied[3].weight = tied[0].weight
    for model, error, text in (
        (stored, UnsupportedError, "layer '0': the storage must be 'plain'"),
        (parametrized, UnsupportedError, "layer '0': .* parametrized"),
        (tied, InvalidArgumentError, "layers '0' and '3' share one weight"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with pytest.raises(error, match=text):
            PatternSchedule(model, optimizer, every=1)


# ---- what each of two processes does ----


def moving_together(rank: int) -> None:
    for method in (METHODS["set"], METHODS["movement"]):
        model = make(device=here())
        wrapped = DistributedDataParallel(model)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        schedule = PatternSchedule(wrapped, optimizer, every=2, **method)
        for step in range(6):
            optimizer.zero_grad()
            backward(wrapped, 10 * step + rank)
            optimizer.step()
            schedule.step()
        everyone: list[Any] = [None, None]
        mine = [slots_of(layer) for layer in sparse(model)], [p.tolist() for p in model.parameters()]
        dist.all_gather_object(everyone, mine)
        assert everyone[0] == everyone[1]
        assert all(int(moved) > 0 for moved in schedule.moved.values())


def norms_are_averaged(rank: int) -> None:
    model = make(device=here())
    synchronize_patterns(model)
    norms = observed(model, lambda: backward(model, rank))
    alone = []
    for other in range(2):
        dense = nn.Sequential(model[0].to_linear(), nn.ReLU(), model[2].to_linear())
        backward(dense, other)
        alone.append(dense[0].weight.grad.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK).abs().sum((2, 3)))
    torch.testing.assert_close(norms["0"], (alone[0] + alone[1]) / 2, rtol=1e-4, atol=1e-6)


def gates_end_alike(rank: int) -> None:
    torch.manual_seed(0)
    model = make(device=here())
    synchronize_patterns(model)
    gates = BlockGates(model, keep=0.5)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    for step in range(3):
        backward(wrapped, 10 * step + rank)
        gates.density().backward()  # equal in all processes
        optimizer.step()
        optimizer.zero_grad()
    removed: list[Any] = [None, None]
    dist.all_gather_object(removed, gates.compact(optimizer))
    assert removed[0] == removed[1] and removed[0]["0"] > 0
    with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
        BlockGates(wrapped).compact()


def different_arguments(rank: int) -> None:
    model = make(device=here())
    for changed in ({"seed": rank}, {"fraction": 0.1 * rank}):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        schedule = PatternSchedule(model, optimizer, every=3, **changed)
        with pytest.raises(UnsynchronizedPatternError, match=r"^seed"):
            schedule.step()
        schedule.remove()


def sharded(rank: int) -> None:
    model = fully_shard(make(device=here()), mesh=init_device_mesh(torch.device(here()).type, (2,)))
    with pytest.raises(UnsupportedError, match="layer '0': the weight must be a plain tensor, got DTensor"):
        PatternSchedule(model, torch.optim.SGD(model.parameters(), lr=RATE), every=1)


# Played with those of test_distributed: starting processes takes longer than all of them.
SCENES = (
    *(moving_together, norms_are_averaged, gates_end_alike, different_arguments),
    sharded,
)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_the_host_does_not_wait(method: str) -> None:
    model = make(device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = PatternSchedule(model, optimizer, every=1, **METHODS[method])
    train(model, optimizer, schedule, range(2))
    optimizer.zero_grad()
    backward(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        schedule.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(int(moved) > 0 for moved in schedule.moved.values())


# ---- learning rates ----


def test_learning_rates_by_density() -> None:
    assert learning_rate_factor(1.0) == 1
    assert 3.7 < learning_rate_factor(0.25) < 3.9 and 6.3 < learning_rate_factor(0.1) < 6.5
    model = nn.Sequential(*make(0.25), *make(0.5), nn.Linear(IN, 4), *make(0.0))
    groups = parameter_groups(model, 0.01)
    assert [group["lr"] for group in groups] == [
        0.01,
        0.01 * learning_rate_factor(0.25),
        0.01 * learning_rate_factor(0.5),
    ]
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}
    assert model[0].weight in set(groups[1]["params"]) and model[0].bias in set(groups[0]["params"])
    torch.optim.AdamW(groups)
    with pytest.raises(InvalidArgumentError, match=r"^lr must "):
        parameter_groups(model, -1.0)
    with pytest.raises(InvalidArgumentError, match=r"^density must "):
        learning_rate_factor(0.0)


def test_group_lasso_is_the_proximal_step() -> None:
    model = make(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    twin = copy.deepcopy(model)
    GroupLasso(model, optimizer, strength=0.05)
    backward(model)
    backward(twin)
    optimizer.step()
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    for one, other in zip(sparse(model), sparse(twin), strict=True):
        for block, plain in zip(one.weight.detach(), other.weight.detach(), strict=True):
            left = max(0.0, 1 - 0.5 * 0.05 * BLOCK / float(plain.norm()))
            torch.testing.assert_close(block, left * plain)
        torch.testing.assert_close(one.bias, other.bias)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    with pytest.raises(InvalidArgumentError, match=r"^optimizer: the weight of layer '2'"):
        optimizer.step()


def test_what_is_removed_ends_and_what_has_hooks_is_not_copied() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    patterns = PatternSchedule(model, optimizer, every=1, grow="gradient", drop="movement")
    gradual = Gradual(model, optimizer, density=0.25, steps=4, begin=0, score="movement")
    lasso = GroupLasso(model, optimizer, strength=0.1)
    for one, copied in product((patterns, gradual, lasso), (copy.deepcopy, pickle.dumps)):
        with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
            copied(one)
    with pytest.raises(UnsupportedError, match=r"^param_group must"):
        patterns.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    state = patterns.state_dict()
    for schedule in (patterns, gradual):
        schedule.remove()
        with pytest.raises(InvalidArgumentError, match=r"must not be used after remove\(\)"):
            schedule.step()
    with pytest.raises(InvalidArgumentError, match=r"must not be used after remove\(\)"):
        patterns.load_state_dict(state)
