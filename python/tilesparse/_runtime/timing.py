"""Time calls on the device at hand: medians of calls that take turns."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

FLUSH_BYTES = 512 << 20  # several L2 caches of any GPU; clearing them takes it longer than the host a call
WARM_UP = 3  # calls
ROUND_SECONDS = 2e-3  # of calls in a row on the CPU, for one reading of the clock

Call = Callable[[], Any]

_cuda: Any = torch.cuda  # parts of it have no types


def medians(calls: Sequence[Call], device: torch.device, repetitions: int) -> list[float]:
    """Return the median milliseconds of each call; the calls take turns.

    On CUDA devices this is the GPU's time between two events, with a cold L2 cache: clearing the cache takes
    longer than the host needs for a call, so the time of the host is not part of it. On the CPU it is the
    wall-clock time of a call, and weights may be in the caches.
    """
    return [1e3 * statistics.median(seconds) for seconds in _times(calls, device, repetitions)]


def undisturbed(calls: Sequence[Call], device: torch.device, repetitions: int) -> list[float]:
    """Return milliseconds as `medians` does, but on the CPU the least: other programs may use it, too."""
    of = statistics.median if device.type == "cuda" else min
    return [1e3 * of(seconds) for seconds in _times(calls, device, repetitions)]


def own_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Keep random numbers drawn in this context from changing those of the program."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def name_of(device: torch.device) -> str:
    """Return the marketing name of a device, e.g. 'NVIDIA H200'."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else name_of_cpu()


def name_of_cpu() -> str:
    """Return the name of the CPU that Linux gives, or at least its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _times(calls: Sequence[Call], device: torch.device, repetitions: int) -> list[list[float]]:
    for call in calls:
        for _ in range(WARM_UP):
            call()
    return (_on_cuda if device.type == "cuda" else _on_cpu)(calls, device, repetitions)


def _on_cuda(calls: Sequence[Call], device: torch.device, repetitions: int) -> list[list[float]]:
    with torch.cuda.device(device):
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        events: list[list[tuple[Any, Any]]] = [[] for _ in calls]
        for _ in range(repetitions):
            for call, of in zip(calls, events, strict=True):
                of.append((_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)))
                flush.zero_()
                of[-1][0].record()
                call()
                of[-1][1].record()
        torch.cuda.synchronize()
    return [[1e-3 * start.elapsed_time(end) for start, end in of] for of in events]


def _on_cpu(calls: Sequence[Call], device: torch.device, repetitions: int) -> list[list[float]]:
    in_a_row = [max(1, round(ROUND_SECONDS / _clocked(call, 1))) for call in calls]
    rounds = [
        [_clocked(call, count) for call, count in zip(calls, in_a_row, strict=True)]
        for _ in range(repetitions)
    ]
    return [list(seconds) for seconds in zip(*rounds, strict=True)]


def _clocked(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
