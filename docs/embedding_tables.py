"""The tables of embeddings on a CPU; ``docs/tables.py`` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from table_parts import cases, document, short, table

SPEED, COMPILED = "cpu_embeddings.json#speed", "cpu_embeddings.json#compiled"
QUALITY = "cpu_embeddings.json#quality"
RECOVERED = (
    "embeddings_recovered.json#h100_50",
    "embeddings_recovered.json#h100_75",
    "embeddings_recovered.json#h100_25",
    "embeddings_recovered.json#h100_25_728s",
    "embeddings_recovered.json#h100_50_420s",
    "embeddings_recovered.json#h200",
)
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


def quality() -> str:
    """Cosines to float32 and passages found first, of dense contenders on each kind of text."""
    found = cases(QUALITY)
    kinds = list(found[0]["quality"])
    lines = [
        [
            case["contender"],
            *(f"{case['quality'][kind]['cosine']:.4f}" for kind in kinds),
            *(f"{case['quality'][kind]['first_1']:.3f}" for kind in kinds),
        ]
        for case in found
    ]
    heads = [*(f"cosine, {kind}" for kind in kinds), *(f"first, {kind}" for kind in kinds)]
    return table(["", *heads], lines)


def recovered() -> str:
    """Cosines to the dense model and passages found first, before and after recovery, by kind of text."""
    documents = [document(run) for run in RECOVERED]
    of_dense = documents[0]["dense"]
    unseen = [kind for kind in of_dense if not kind.startswith(("of ", "validation"))]
    firsts = [f"{of_dense[kind]['first_1']:.2f}" for kind in unseen]
    lines = [["dense", "", "", *("1" for _ in unseen), "1", *firsts]]
    found = [case for document in documents for case in document["cases"]]
    begun = set[float]()  # densities of which the first point is shown
    for case in sorted(found, key=lambda case: (-case["density"], case["seconds"])):
        # The first point of a case that goes on from a higher density is of that one.
        first = case["start"] == case["density"] and case["density"] not in begun
        begun.add(case["density"])
        for point in (*case["curve"][: int(first)], case["curve"][-1]):
            quality = point["quality"]
            seen = statistics.fmean(one["cosine"] for kind, one in quality.items() if kind.startswith("of "))
            lines.append(
                [
                    short(case["density"]),
                    f"{point['seconds']:.0f}",
                    str(point["steps"]),
                    *(f"{quality[kind]['cosine']:.3f}" for kind in unseen),
                    f"{seen:.3f}",
                    *(f"{quality[kind]['first_1']:.2f}" for kind in unseen),
                ]
            )
    heads = [
        *(f"cosine, {kind}" for kind in unseen),
        "kinds it learned",
        *(f"first, {kind}" for kind in unseen),
    ]
    return table(["density", "seconds", "steps", *heads], lines)


EMBEDDING_TABLES: dict[str, Callable[[], str]] = {
    "embeddings-speed": speed,
    "embeddings-gains": gains,
    "embeddings-compiled": partial(speed, COMPILED),
    "embeddings-compiled-gains": partial(gains, COMPILED),
    "embeddings-quality": quality,
    "embeddings-recovered": recovered,
}
