"""Threads: a call sees the pattern from before an update or from after it, whatever others do."""

from __future__ import annotations

import copy
import operator
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn, seeded
from torch import Tensor

from tilesparse import BlockPattern, BlockSparseLinear, InvalidArgumentError, InvalidPatternError
from tilesparse._runtime.lock import exclusive

SIZE = 512
pytestmark = pytest.mark.usefixtures("one_thread")


def patterns() -> list[BlockPattern]:
    return [
        BlockPattern.random((SIZE, SIZE), block_shape=16, density=0.3, generator=seeded(seed))
        for seed in (1, 2)
    ]


def in_threads(functions: list[Callable[[], Any]]) -> None:
    """Run all of them at once; the first error of each is raised here."""
    start, errors = threading.Barrier(len(functions)), list[BaseException]()

    def run(function: Callable[[], Any]) -> None:
        start.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def on_a_stream(device: str, function: Callable[[], Any]) -> None:
    """Run it on a stream of its own, as threads of a server do."""
    if device == "cpu":
        function()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        function()
    stream.synchronize()


@pytest.mark.parametrize("device", DEVICES)
def test_threads_may_use_a_layer_first_at_the_same_time(device: str) -> None:
    for seed in range(30):
        layer: Any = BlockSparseLinear(
            256, 256, density=0.3, block_shape=16, generator=seeded(seed), device=device
        )
        x = randn(64, 256, dtype=torch.float32, device=device)
        results: list[tuple[Tensor, Tensor]] = []

        def use(layer: Any = layer, x: Tensor = x, results: list[Any] = results) -> None:
            own = x.clone().requires_grad_()
            y = layer(own)
            (gradient,) = torch.autograd.grad(y.sum(), own)
            results.append((y, gradient))

        in_threads([lambda use=use: on_a_stream(device, use)] * 4)
        for y, gradient in results:
            assert torch.equal(y, results[0][0]) and torch.equal(gradient, results[0][1])


def updates(layer: BlockSparseLinear) -> dict[str, Callable[[int], Any]]:
    """Ways to give a layer one of two patterns."""
    both = patterns()
    states = []
    for pattern in both:
        layer.pattern = pattern
        states.append({name: tensor.clone() for name, tensor in layer.state_dict().items()})
    return {
        "assign": lambda i: setattr(layer, "pattern", both[i]),
        "update_": lambda i: layer.pattern.update_(both[i]),
        "load_state_dict": lambda i: layer.load_state_dict(states[i]),
    }


WAYS = [
    ("assign", 1),
    ("assign", 2),
    ("update_", 1),
    ("update_", 2),
    ("load_state_dict", 1),  # of two at once, some tensors are of the one and some of the other
]


@pytest.mark.parametrize(("way", "writers"), WAYS)
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_sees_the_old_pattern_or_the_new_one(
    device: str, readers: int, way: str, writers: int
) -> None:
    layer: Any = BlockSparseLinear(SIZE, SIZE, pattern=patterns()[0], device=device)
    update = updates(layer)[way]
    x, results, left = randn(64, SIZE, dtype=torch.float32, device=device), list[Tensor](), [readers]
    allowed = []
    with torch.no_grad():
        for i in range(2):
            update(i)
            allowed.append(layer(x))

    def read() -> None:
        with torch.no_grad():
            for _ in range(200 // readers):
                results.append(layer(x))
        left[0] -= 1

    def write() -> None:
        i = 0
        while left[0] > 0:
            update(i % 2)
            i += 1

    try:
        reading = [lambda: on_a_stream(device, read)] * readers
        in_threads([*reading, *[lambda: on_a_stream(device, write)] * writers])
    finally:
        left[0] = 0
    assert len(results) >= 200 // readers * readers
    for y in results:
        assert any(torch.equal(y, one) for one in allowed)


@pytest.mark.parametrize("storage", ["plain", "int8", "int4", "W8A8"])
def test_a_call_beside_a_load_of_another_number_of_blocks_is_right_or_raises(storage: str) -> None:
    makes = []
    for seed, density in enumerate((0.25, 0.5, 0.75)):
        layer = BlockSparseLinear(SIZE, SIZE, density=density, block_shape=32, generator=seeded(seed))
        torch.nn.init.zeros_(layer.bias)
        if storage != "plain":
            eight = "int8" if storage == "W8A8" else None
            layer.to_storage(eight or storage, activations=eight)
        makes.append(layer)
    layer, states = copy.deepcopy(makes[0]), [copy.deepcopy(made.state_dict()) for made in makes]
    x, results, loading = randn(16, SIZE, dtype=torch.float32), list[Tensor](), [True]
    allowed, calls = [made(x).detach() for made in makes], [0, 0, 0]

    def read(number: int) -> None:
        try:
            with torch.no_grad():
                while loading:
                    try:
                        results.append(layer(x))
                    except (InvalidArgumentError, InvalidPatternError) as error:  # they do not fit each other
                        assert not re.search(r"\d{9}", str(error)), error
                    calls[number] += 1
        finally:
            loading.clear()

    def write() -> None:
        for i in range(50):
            layer.load_state_dict(states[i % 3])
            _ = [torch.full_like(made.weight, -1) for made in makes]  # where memory was freed
            seen = list(calls)
            while loading and any(map(operator.eq, calls, seen)):  # one load in each call at most
                time.sleep(0)
        loading.clear()

    in_threads([write, *[lambda number=number: read(number) for number in range(3)]])
    assert all(any(torch.equal(y, one) for one in allowed) for y in results)


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent() -> None:
    layer, x = BlockSparseLinear(64, 64, block_shape=16), torch.ones(2, 64)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive():
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        layer(x)
        os._exit(0)
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
