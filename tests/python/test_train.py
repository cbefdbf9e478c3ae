"""Masks of 2:4 are chosen when they should be, and masked weights decay as the papers say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICES, same, state_of
from torch import Tensor
from training import backward, loss_of, sparse, train
from training import make as made

from tilesparse.errors import UnsupportedError
from tilesparse.storage import two_of_four
from tilesparse.train import MaskSchedule

RATE, DECAY = 0.1, 0.25
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, foreach=False),
    "sgd foreach": lambda model: torch.optim.SGD(model.parameters(), lr=RATE, foreach=True),
    "sgd fused": lambda model: torch.optim.SGD(model.parameters(), lr=RATE, fused=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False),
    "adamw foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, fused=True),
    "adamw of groups": lambda model: torch.optim.AdamW(
        [{"params": list(model[i].parameters()), "lr": rate} for i, rate in ((0, RATE), (2, RATE / 2))]
    ),
    "adamw, rate in a tensor": lambda model: torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(RATE), foreach=False
    ),
}


def make(transposable: bool = False, **options: Any) -> Any:
    options = {"block_shape": 32, "nm": (2, 4), "dtype": torch.float64, **options}
    return made(transposable=transposable, **options)


def masks_of(model: Any) -> list[Tensor]:
    return [layer.mask.clone() for layer in sparse(model)]


@pytest.mark.parametrize("transposable", [False, True])
def test_masks_are_chosen_every_few_steps(transposable: bool) -> None:
    model = make(transposable)
    optimizer = OPTIMIZERS["adamw"](model)
    schedule = MaskSchedule(model, optimizer, every=3, decay=DECAY)
    before = masks_of(model)
    for step in range(1, 8):
        train(model, optimizer, steps=range(step, step + 1))
        chosen = [two_of_four(layer.weight.abs(), transposable=transposable) for layer in sparse(model)]
        if step % 3 == 0:
            assert any(not torch.equal(one, other) for one, other in zip(chosen, before, strict=True))
            before = chosen
        assert same(masks_of(model), before)
    assert schedule.steps == 7


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_is_that_of_the_papers(name: str) -> None:
    model = make()
    twin = copy.deepcopy(model)
    optimizer, reference = OPTIMIZERS[name](model), OPTIMIZERS[name](twin)
    MaskSchedule(model, optimizer, every=2, decay=DECAY)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        reference.zero_grad()
        backward(twin, step)
        for layer in sparse(twin):
            layer.weight.grad += DECAY * (~layer.mask).double() * layer.weight.detach()
        reference.step()
        if step % 2:
            for layer in sparse(twin):
                layer.mask.copy_(two_of_four(layer.weight.abs()))

        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
        assert same(masks_of(model), masks_of(twin))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients(fused: bool, device: str) -> None:
    """As without a scaler, but for a step that the scaler leaves out."""
    model = make(dtype=torch.float32, device=device)
    twin = copy.deepcopy(model)
    optimizer, reference = (
        torch.optim.AdamW(m.parameters(), lr=RATE, fused=fused, foreach=False) for m in (model, twin)
    )
    schedule = MaskSchedule(model, optimizer, every=10, decay=DECAY)
    MaskSchedule(twin, reference, every=10, decay=DECAY)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        before = copy.deepcopy(model.state_dict())
        if step == 1:
            model[0].weight.grad[0, 0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert same(list(before.values()), list(model.state_dict().values()))
        else:
            train(twin, reference, steps=range(step, step + 1))
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert schedule.steps == (3 if fused else 2)


def test_decay_calms_masks() -> None:
    """Hu et al.: masked weights that decay flip back less often."""
    rates = []
    for decay in (0.0, 30.0):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
        schedule = MaskSchedule(model, optimizer, every=1, decay=decay)
        train(model, optimizer, steps=range(19))
        before = masks_of(model)
        train(model, optimizer, steps=range(19, 20))
        changed = zip(before, masks_of(model), strict=True)
        rates.append(sum(int((one != other).sum()) for one, other in changed))
        assert schedule.steps == 20
    assert rates[1] < 0.5 * rates[0]


def test_back_to_plain_blocks_and_to_masks_again() -> None:
    model = make()
    optimizer = OPTIMIZERS["adamw"](model)
    schedule = MaskSchedule(model, optimizer, every=1, decay=DECAY)
    train(model, optimizer, steps=range(3))
    before = [tensor.clone() for tensor in state_of(model, optimizer) if tensor.dtype != torch.bool]
    for layer in sparse(model):
        layer.set_nm(None)
    assert same(before, state_of(model, optimizer))
    twin = make(nm=None)
    twin.load_state_dict(model.state_dict())
    reference = OPTIMIZERS["adamw"](twin)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, steps=range(3, 5))  # as if there had never been a mask
    train(twin, reference, steps=range(3, 5))
    assert same(state_of(model, optimizer), state_of(twin, reference)) and schedule.steps == 5
    for layer in sparse(model):
        layer.set_nm((2, 4), transposable=True)
    train(model, optimizer, steps=range(5, 6))
    assert same(masks_of(model), [two_of_four(one.weight.abs(), transposable=True) for one in sparse(model)])
    with pytest.raises(UnsupportedError, match="without a closure"):
        optimizer.step(lambda: 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("transposable", [False, True])
def test_the_host_does_not_wait(transposable: bool) -> None:
    model = make(transposable, dtype=torch.bfloat16, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    MaskSchedule(model, optimizer, every=1, decay=DECAY)
    train(model, optimizer, steps=range(1))
    optimizer.zero_grad()
    backward(model)
    before = masks_of(model)
    for parameter in model.parameters():
        parameter.grad.neg_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not same(before, masks_of(model))
