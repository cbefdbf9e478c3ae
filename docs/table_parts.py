"""Shared by all makers of tables: results as they were measured, and Markdown."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import stored as stored  # for other makers of tables, too

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@cache
def document(name: str) -> dict[str, Any]:
    """Return one run, named FILE or FILE#RUN."""
    return stored.document(RESULTS / name)


def runs(file: str) -> list[dict[str, Any]]:
    """Return all runs of a file."""
    return [*stored.documents(RESULTS / file).values()]


def cases(name: str) -> list[dict[str, Any]]:
    """Return the cases of one run."""
    found: list[dict[str, Any]] = document(name)["cases"]
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
