"""Results of examples as JSON, with the machine and the versions they belong to; and time that is given."""

from __future__ import annotations

import datetime
import json
import subprocess
import time
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

    def progress(self) -> float:
        """Return what part of the time has passed, 1 or more at the end."""
        return self.seconds() / self._limit


def environment(commit: str | None) -> dict[str, Any]:
    """Return what results depend on; ``commit`` where the sources are not in a repository."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "tilesparse": tilesparse.__version__,
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        found |= {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda}
    return found


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
