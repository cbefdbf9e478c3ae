"""The tables of embeddings on a CPU; ``docs/tables.py`` writes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from table_parts import cases, short, table

SPEED, COMPILED = "cpu_embeddings.json#speed", "cpu_embeddings.json#compiled"
Setting = tuple[int, int, int]  # threads, batch, tokens


def milliseconds(case: dict[str, Any]) -> dict[Setting, float]:
    return {(one["threads"], one["batch"], one["tokens"]): one["ms"] for one in case["results"]}


def named(case: dict[str, Any]) -> str:
    if case["density"] == 1:
        return str(case["contender"])
    return f"{case['contender']}, density {short(case['density'])}, blocks of {case['block']}"


def shown(ms: float) -> str:
    """Return three digits, or all before the point."""
    return f"{ms:.3g}" if ms < 999 else f"{ms:.0f}"


def speed(file: str = SPEED) -> str:
    """Milliseconds of all contenders, the least of a column in bold."""
    found = cases(file)
    settings = list(milliseconds(found[0]))
    least = {setting: min(milliseconds(case)[setting] for case in found) for setting in settings}
    lines = []
    for case in found:
        times = milliseconds(case)
        numbers = [
            f"**{shown(times[one])}**" if times[one] == least[one] else shown(times[one]) for one in settings
        ]
        lines.append([named(case), *numbers])
    heads = [
        f"{batch} × {tokens}, {threads} thread{'s' if threads > 1 else ''}"
        for threads, batch, tokens in settings
    ]
    return table(["", *heads], lines)


def gains(file: str = SPEED) -> str:
    """The best dense contender's time over that of the best sparse one, by density."""
    found = cases(file)
    lines = []
    for setting in milliseconds(found[0]):
        dense = min(
            (case for case in found if case["density"] == 1), key=lambda one: milliseconds(one)[setting]
        )
        threads, batch, tokens = setting
        line = [f"{batch} × {tokens}, {threads} thread{'s' if threads > 1 else ''}", named(dense)]
        for density in sorted({case["density"] for case in found} - {1.0}, reverse=True):
            some = [case for case in found if case["density"] == density]
            sparse = min(some, key=lambda one: milliseconds(one)[setting])
            gain = milliseconds(dense)[setting] / milliseconds(sparse)[setting]
            line.append(f"{gain:.2f}×, {sparse['contender'].partition(' ')[2]}, blocks of {sparse['block']}")
        lines.append(line)
    densities = sorted({case["density"] for case in found} - {1.0}, reverse=True)
    return table(["", "best dense", *(f"density {short(density)}" for density in densities)], lines)


EMBEDDING_TABLES: dict[str, Callable[[], str]] = {
    "embeddings-speed": speed,
    "embeddings-gains": gains,
    "embeddings-compiled": partial(speed, COMPILED),
    "embeddings-compiled-gains": partial(gains, COMPILED),
}
