"""The tables of encoders on a CPU; ``docs/tables.py`` writes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from table_parts import cases, runs, short, table

FILE, QUALITY = "cpu_embeddings.json", "cpu_encoder_quality.json"
WITH_AVX2 = "cpu_embeddings_avx2.json"
Case = tuple[str, str]  # model, and texts × tokens or images
Contender = tuple[str, float | None]  # with its density


def measured(what: str, file: str = FILE) -> dict[Contender, dict[Case, float]]:
    """Milliseconds or MiB of a call, by contender and case."""
    found: dict[Contender, dict[Case, float]] = {}
    for one in cases(file):
        own = found.setdefault((one["contender"], one["density"]), {})
        own.update({(one["model"], result["case"]): result[what] for result in one["results"]})
    return found


def named(contender: Contender) -> str:
    name, density = contender
    return name if density is None else f"{name}, density {short(density)}"


def shown(number: float) -> str:
    """Return three digits, or all before the point."""
    return f"{number:.3g}" if number < 999 else f"{number:.0f}"


def titled(case: Case) -> str:
    return f"ViT-B/16, {case[1]}" if case[0] == "vit" else case[1]


def contenders(what: str = "ms", file: str = FILE) -> str:
    """Milliseconds or MiB of all contenders, the least of a column in bold."""
    found = measured(what, file)
    columns = list(next(iter(found.values())))
    lines = []
    for contender, numbers in found.items():
        least = {case: min(others[case] for others in found.values()) for case in columns}
        cells = [(shown(numbers[case]), numbers[case] == least[case]) for case in columns]
        lines.append([named(contender), *(f"**{text}**" if is_least else text for text, is_least in cells)])
    return table(["", *map(titled, columns)], lines)


def gains() -> str:
    """The best other runtime's time over that of this library, by density."""
    found = measured("ms")
    ours = [contender for contender in found if contender[1] is not None]
    lines = []
    for case in next(iter(found.values())):
        best = min((one for one in found if one not in ours), key=lambda one: found[one][case])
        speedups = [f"{found[best][case] / found[one][case]:.2f}×" for one in ours]
        lines.append([titled(case), f"{named(best)}, {shown(found[best][case])} ms", *speedups])
    return table(["", "best other", *(f"density {short(density or 0)}" for _, density in ours)], lines)


# Stages of runs that were judged, and their names in measurements of speed.
JUDGED: dict[str, list[str]] = {
    "dense": ["torch", "torch compiled", "openvino"],
    "torch bfloat16": ["torch bfloat16 compiled"],
    "onnxruntime int8": ["onnxruntime int8"],
    "openvino int8": ["openvino int8"],
    "int8": ["tilesparse int8"],
}


def judged() -> dict[Contender, dict[str, Any]]:
    """Return what was measured of each contender's quality, dense ones first.

    Sparse models were recovered for about a minute: only what int8 does to them counts.
    """
    found: dict[Contender, dict[str, Any]] = {}
    for run in runs(QUALITY):
        is_sparse = run["arguments"]["others"] == "None"
        density = float(run["arguments"]["density"]) if is_sparse else 1.0
        for result in run["cases"][0]["results"]:
            for name in JUDGED.get(result["stage"], ()):
                found[name, density if result["stage"] == "int8" else None] = result
    return dict(sorted(found.items(), key=lambda item: -(item[0][1] or 2)))


def mean(kinds: dict[str, dict[str, float]], what: str) -> float:
    return sum(kind[what] for kind in kinds.values()) / len(kinds)


def qualities() -> dict[Contender, float]:
    """Return the mean cosine to the dense model over all kinds of text."""
    return {one: mean(of["kinds"], "cosine") for one, of in judged().items() if "to_float32" not in of}


def quality() -> str:
    """Cosines to the dense model in float32 by kind of text; of sparse models to themselves in float32."""
    rows = {}
    for one, of in judged().items():
        if "to_float32" in of:
            rows[f"{named(one)}, to the same model in float32"] = of["to_float32"]["kinds"]
        elif one[0] not in JUDGED["dense"]:
            rows[named(one)] = of["kinds"]
    kinds = list(next(iter(rows.values())))
    lines = [
        [name, *(f"{of[kind]['cosine']:.4f}".lstrip("0") for kind in kinds)] for name, of in rows.items()
    ]
    return table(["", *kinds], lines)


EMBEDDING_TABLES: dict[str, Callable[[], str]] = {
    "embeddings-gains": gains,
    "embeddings-speed": contenders,
    "embeddings-memory": partial(contenders, "mib"),
    "embeddings-avx2": partial(contenders, file=WITH_AVX2),
    "embeddings-quality": quality,
}
