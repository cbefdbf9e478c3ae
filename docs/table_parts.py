"""What all makers of tables need: results as they were measured, and Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@cache
def cases(file: str) -> list[dict[str, Any]]:
    """Return those of one file of results."""
    found: list[dict[str, Any]] = json.loads((RESULTS / file).read_text())["cases"]
    return found


def times(speedups: Iterable[float]) -> str:
    """Return the mean, or a dash without measurements."""
    found = list(speedups)
    return f"{statistics.mean(found):.1f}×" if found else "-"


def short(density: float) -> str:
    """Return a density without its leading zero."""
    return f"{density:g}".removeprefix("0")


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).replace("|  |", "| |")
