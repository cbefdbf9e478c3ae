"""Results as JSON, with the machine and versions they belong to."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilesparse


class Course:
    """Progress of something that ends after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._limit, self._start = seconds, time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since the beginning."""
        return time.perf_counter() - self._start

    def leave_out(self, seconds: float) -> None:
        """Not count so many of the seconds that have passed."""
        self._start += seconds

    def progress(self) -> float:
        """Return what part of the time has passed, 1 or more at the end."""
        return self.seconds() / self._limit


def environment(commit: str | None) -> dict[str, Any]:
    """Return what results depend on; ``commit`` where the sources are not in a repository."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "tilesparse": tilesparse.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": tilesparse.tuning.Device.find("cpu").name,
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
        }
    return found


def described(arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return a document without cases that says what results depend on: environment, arguments, and more."""
    given = {name: str(value) for name, value in vars(arguments).items() if name != "output"}
    return {"environment": environment(arguments.commit), "arguments": given, **more, "cases": []}


def recorded(arguments: argparse.Namespace, run: Callable[[argparse.Namespace, dict[str, Any]], None]) -> int:
    """Let ``run`` add cases to a document, write it to ``arguments.output``, and return the exit status 0."""
    document = described(arguments)
    run(arguments, document)
    write_json(arguments.output, document)
    print(f"wrote {arguments.output}")
    return 0


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace the file in one step, so that an interrupted run leaves the results it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
