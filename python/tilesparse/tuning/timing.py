"""Time calls on the device at hand; all that this package measures is measured here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

FLUSH_BYTES = 512 << 20  # several L2 caches of any GPU; reading them takes it longer than the host a call
WARM_UP = 3  # calls
ROUND_SECONDS = 2e-3  # of calls in a row on the CPU, for one reading of the clock
CYCLES_PER_SECOND = 2e9  # a little more than GPUs run at, so that a delay is not too short

Call = Callable[[], Any]

_cuda: Any = torch.cuda  # parts of it have no types


def milliseconds(
    calls: Sequence[Call], device: torch.device, repetitions: int, *, head_start: float | None = 0.0
) -> list[float]:
    """Return the milliseconds of each call; the calls take turns.

    On CUDA devices this is the median of the GPU's times between two events, with a cold L2 cache. The cache
    is flushed by reading, so that no call has to write back what a flush left there, and for longer than the
    host needs for a call: the time of the host is not part of it. On the CPU it is the least of the
    wall-clock times, as other programs may use it, too; weights may be in the caches.

    With a `head_start` the GPU sleeps so many seconds first, for calls that take the host longer than a
    flush. None has every call begin on an idle GPU, and what it waits for the host is part of its time.
    """
    for call in calls:
        for _ in range(WARM_UP):
            call()
    if device.type == "cuda":
        return _on_cuda(calls, device, repetitions, head_start)
    return _on_cpu(calls, repetitions)


def own_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Keep random numbers drawn in this context from changing those of the program."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _on_cuda(
    calls: Sequence[Call], device: torch.device, repetitions: int, head_start: float | None
) -> list[float]:
    events = [
        [(_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(repetitions)]
        for _ in calls
    ]
    with torch.cuda.device(device):
        flush = torch.zeros(FLUSH_BYTES >> 2, dtype=torch.float32, device=device)
        torch.cuda.synchronize()
        if head_start:
            torch.cuda._sleep(int(head_start * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        for turn in range(repetitions):
            for call, of_call in zip(calls, events, strict=True):
                start, end = of_call[turn]
                flush.sum()
                if head_start is None:
                    torch.cuda.synchronize()
                start.record()
                call()
                end.record()
        torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in of_call) for of_call in events]


def _on_cpu(calls: Sequence[Call], repetitions: int) -> list[float]:
    in_a_row = [max(1, round(ROUND_SECONDS / _seconds(call, 1))) for call in calls]
    rounds = [
        [_seconds(call, count) for call, count in zip(calls, in_a_row, strict=True)]
        for _ in range(repetitions)
    ]
    return [1e3 * min(seconds) for seconds in zip(*rounds, strict=True)]


def _seconds(call: Call, count: int) -> float:
    """Return the mean time of so many calls in a row."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
