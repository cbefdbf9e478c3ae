"""What every benchmark needs: the environment of a result, its file, and a GPU timer."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilesparse import _C

FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU
LAUNCH_SECONDS = 250e-6  # the host needs less than this to issue one repetition of anything measured
CYCLES_PER_SECOND = 2e9  # a little more than GPUs run at, so that a delay is not too short
HOST_CALLS = 200  # in a row; fewer than the launches that fit into a stream's queue

_cuda: Any = torch.cuda  # parts of it have no types


def environment(commit: str | None = None) -> dict[str, Any]:
    """Machine and versions a result belongs to; ``commit`` where the sources are not in a repository."""
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "tilesparse": _C.version(),
        "architectures": _C.architectures(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _C.device_info(0).name,
        "cpus": os.cpu_count(),
    }
    if torch.cuda.is_available():
        query = ("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader", "--id=0")
        driver, _, power_limit = (_output(*query) or "").partition(", ")
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": driver or None,
            "power_limit": power_limit or None,
            "cuda": torch.version.cuda,
            "triton": _installed("triton"),
            "stk": _installed("stanford-stk"),
        }
    return found


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replaces the file in one step, so that an interrupted run leaves the results it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


class CudaTimer:
    """Times of GPU work alone, with a cold L2 cache."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def microseconds(self, call: Callable[[], Tensor], repetitions: int) -> float:
        """Median time of a call between two events.

        A delay ahead of the repetitions lets the host issue them all before the first one runs:
        otherwise short calls would be timed at the speed of the host.
        """
        events = [
            (_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(repetitions)
        ]
        torch.cuda.synchronize()
        _cuda._sleep(int(repetitions * LAUNCH_SECONDS * CYCLES_PER_SECOND))
        for start, end in events:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return 1e3 * float(statistics.median(start.elapsed_time(end) for start, end in events))


def host_microseconds(call: Callable[[], Tensor], batches: int = 9) -> float:
    """Median time in which the host issues one call; the GPU's work must be shorter than that."""
    return statistics.median(_host_batch(call) for _ in range(batches))


def _host_batch(call: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / HOST_CALLS


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
