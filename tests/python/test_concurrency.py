"""Threads: a call sees the pattern from before an update or from after it, whatever others do."""

from __future__ import annotations

import copy
import math
import operator
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn, seeded
from torch import Tensor

from tilesparse import _C, BlockPattern, BlockSparseLinear
from tilesparse._files import read_json, replacing, write_json
from tilesparse._runtime import pattern_cache
from tilesparse._runtime.device import TENSORS, exclusive
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.errors import InvalidArgumentError, InvalidPatternError

SIZE = 512
pytestmark = pytest.mark.usefixtures("one_thread", "no_interval")


@pytest.fixture
def no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every call on a GPU compare all patterns with their copies, or ask for the answer."""
    monkeypatch.setattr(pattern_cache, "INTERVAL", 0.0)
    monkeypatch.setattr(pattern_cache, "PAUSE", 0.0)


def patterns() -> list[BlockPattern]:
    return [
        BlockPattern.random((SIZE, SIZE), block_shape=16, density=0.3, generator=seeded(seed))
        for seed in (1, 2)
    ]


def in_threads(functions: list[Callable[[], Any]]) -> None:
    """Run all of them at once; the first error is raised here."""
    start = threading.Barrier(len(functions))
    with ThreadPoolExecutor(len(functions)) as threads:
        for done in [threads.submit(lambda run=run: (start.wait(), run())) for run in functions]:
            done.result()


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
    x = randn(64, 256, dtype=torch.float32, device=device)
    for seed in range(30):
        options: Any = {"density": 0.3, "block_shape": 16, "generator": seeded(seed), "device": device}
        layer, results = BlockSparseLinear(256, 256, **options), list[tuple[Tensor, Tensor]]()

        def use(layer: Any = layer, results: Any = results) -> None:
            own = x.clone().requires_grad_()
            y = layer(own)
            results.append((y, *torch.autograd.grad(y.sum(), own)))

        in_threads([lambda use=use: on_a_stream(device, use)] * 4)
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


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


# One thread loads states: two that are loaded at once may each give some of the tensors.
WAYS = [("assign", 1), ("assign", 2), ("update_", 1), ("update_", 2), ("load_state_dict", 1)]


@pytest.mark.parametrize(("way", "writers"), WAYS)
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_call_sees_the_old_pattern_or_the_new_one(
    device: str, readers: int, way: str, writers: int
) -> None:
    layer: Any = BlockSparseLinear(SIZE, SIZE, pattern=patterns()[0], device=device)
    update = updates(layer)[way]
    x, results, left = randn(64, SIZE, dtype=torch.float32, device=device), list[Tensor](), [readers]
    allowed = [(update(i), layer(x))[1] for i in range(2)]

    @torch.no_grad()
    def read() -> None:
        try:
            for _ in range(200 // readers):
                results.append(layer(x))
        finally:
            left[0] -= 1

    def write() -> None:
        for i in count():
            if left[0] <= 0:
                return
            update(i % 2)

    in_threads([lambda: on_a_stream(device, read)] * readers + [lambda: on_a_stream(device, write)] * writers)
    assert len(results) >= 200 // readers * readers
    assert all(any(torch.equal(y, one) for one in allowed) for y in results)


@pytest.mark.skipif(not TENSORS.enabled, reason="PyTorch 2.10 reads tensors natively")
def test_a_known_pattern_is_found_until_its_clock_says_so() -> None:
    pattern = patterns()[0]
    index = pattern.index_on(torch.device("cpu"))
    entry, clock, known = prepared(index), _C.Clock(), _C.Known(TENSORS)
    use = _C.Use(clock)
    known.keep(index, entry, entry._copies_at(), use)
    clock.due = math.inf
    before = time.monotonic()
    assert known.find(index, True) is entry and before <= use.last <= time.monotonic()
    clock.due = use.last = 1.0
    assert known.find(index, True) is None and use.last == 1.0
    assert known.find(index, False) is entry and use.last == 1.0
    known.keep(index, entry, entry._copies_at(), None)
    assert known.find(index, True) is entry


@pytest.mark.parametrize("storage", ["plain", "int8", "int4", "W8A8"])
def test_a_call_beside_a_load_of_another_number_of_blocks_is_right_or_raises(storage: str) -> None:
    makes = []
    for seed, density in enumerate((0.25, 0.5, 0.75)):
        layer = BlockSparseLinear(SIZE, SIZE, density=density, block_shape=32, generator=seeded(seed))
        torch.nn.init.zeros_(layer.get_parameter("bias"))
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


def test_files_that_threads_write_at_the_same_time_are_whole(tmp_path: Path) -> None:
    """Whoever reads meanwhile finds one of them, and nothing else is left."""
    path = tmp_path / "file.json"

    def save() -> None:
        with replacing(path) as file:
            write_json(file, {"numbers": [*range(10_000)]})

    save()
    in_threads([lambda use=use: [use() for _ in range(20)] for use in (save, save, lambda: read_json(path))])
    assert [file.name for file in tmp_path.rglob("*")] == [path.name]
