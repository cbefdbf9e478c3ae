"""The tables of one GPU beside another; ``docs/tables.py`` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from table_parts import cases, runs, short, table

SETS = {
    "bf16": "random patterns in square blocks",
    "unequal": "rows or columns of unequal length",
    "rectangular": "rectangular blocks",
    "patterns": "bands, diagonals, columns",
}
OPS = {"dds_nt": "forward", "dds_nn": "gradient of x", "sdd_tn": "gradient of W"}
WORST = 8
LESS_MEMORY = "h100_99kib.json.gz"
WITH_THREE_STAGES = ("dds_nt", "64x128"), ("dds_nn", "64x128"), ("sdd_tn", "64x128"), ("sdd_tn", "128x128")
CLEARLY = 0.97


def _known(case: dict[str, Any]) -> tuple[Any, ...]:
    names = ("op", "shape", "requested_density", "pattern", "x_layout")
    return (*(case[name] for name in names), *case["block_shape"])


def _pairs(name: str) -> list[tuple[float, dict[str, Any], dict[str, Any]]]:
    """η on an H100 over that on an H200, and both cases, in order."""
    others = {_known(case): case for case in cases(f"h200_fit.json.gz#pair_{name}")}
    pairs = [(case, others[_known(case)]) for case in cases(f"h100_fit.json.gz#pair_{name}")]
    found = [(_eta(one) / _eta(other), one, other) for one, other in pairs]
    return sorted(found, key=lambda pair: pair[0])


def _eta(case: dict[str, Any]) -> float:
    return float(case["results"][0]["efficiency"])


def both_gpus() -> str:
    """Return the part of the efficiency on one GPU that the other one keeps."""
    lines = []
    for name, text in SETS.items():
        ratios = [ratio for ratio, *_ in _pairs(name)]
        below = sum(ratio < 0.9 for ratio in ratios)
        middle = statistics.median(ratios)
        lines.append([text, str(len(ratios)), f"{middle:.2f}", f"{ratios[0]:.2f}", str(below)])
    return table(["", "cases", "median", "worst", "below .90"], lines)


def worst_on_one_gpu() -> str:
    """The cases whose efficiency differs most."""
    pairs = sorted((pair for name in SETS for pair in _pairs(name)), key=lambda pair: pair[0])
    lines = []
    for ratio, one, other in pairs[:WORST]:
        block, density = "×".join(map(str, one["block_shape"])), short(one["requested_density"])
        what = f"{OPS[one['op']]}, {one['shape']}, {block}, {density}, {one['pattern']}"
        times = [f"{case['results'][0]['t_us']:.0f}" for case in (one, other)]
        lines.append([what, *times, f"{_eta(one):.2f}", f"{_eta(other):.2f}", f"{ratio:.2f}"])
    return table(["", "H100, µs", "H200, µs", "η, H100", "η, H200", "ratio"], lines)


def less_memory() -> str:
    """Tiles with three stages or more in 99 KiB, by the best of those with two."""
    lines = []
    for op, tile in WITH_THREE_STAGES:
        of_block: dict[int, list[float]] = {}
        for case in (one for one in cases(LESS_MEMORY) if one["op"] == op):
            ratios = of_block.setdefault(case["block_shape"][0], [])
            ratios += [
                found for one in case["results"] if (found := _over_others(one["kernels_us"], op, tile))
            ]
        for block, ratios in sorted(of_block.items()):
            if ratios:
                always = statistics.geometric_mean(ratios)
                faster = sum(ratio < CLEARLY for ratio in ratios) / len(ratios)
                best = statistics.geometric_mean(min(ratio, 1.0) for ratio in ratios)
                what = [f"{OPS[op]}, {tile.replace('x', ' × ')}", str(block), str(len(ratios))]
                lines.append([*what, f"{always:.2f}", f"{faster:.0%}", f"{best:.2f}"])
    return table(["", "block", "products", "time of all", "faster by 3 %", "time where faster"], lines)


def _over_others(times: dict[str, float], op: str, tile: str) -> float | None:
    """Return the time of a tile over that of the best kernel whose tile is not of these."""
    new = [f"sm80_{of}_bf16_{one}" for of, one in WITH_THREE_STAGES]
    others = [time for name, time in times.items() if name not in new]
    own = times.get(f"sm80_{op}_bf16_{tile}")
    return own / min(others) if own and others else None


SERVED = "h200_served.json"
OF_SERVED = {
    "prefill": ("prefill of 8192", "dense float8"),
    "decode 1": ("decode of 1", "dense bfloat16"),
    "decode 16": ("decode of 16", "dense bfloat16"),
    "decode 64": ("decode of 64", "dense bfloat16"),
}


def served() -> str:
    """A Llama of Transformers in every form: milliseconds, and the speedup over dense in the same run."""
    lines: dict[str, list[str]] = {}
    for run in runs(SERVED):
        times = served_times(run)
        for form, of in times.items():
            if form not in lines:
                lines[form] = []
                for what, (_, dense) in OF_SERVED.items():
                    lines[form] += [f"{of[what]:.2f}", _over(times[dense], of, what)]
    header = ["weights"]
    for label, dense in OF_SERVED.values():
        header += [f"{label}, ms", f"over {dense}"]
    return table(header, ([name, *cells] for name, cells in lines.items()))


def served_times(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return ms by form and by what was measured."""
    return {
        case["form"]: {one["what"]: one["ms"] for one in case["results"] if "ms" in one}
        for case in run["cases"]
    }


def _over(dense: dict[str, float], ours: dict[str, float], what: str) -> str:
    return f"{dense[what] / ours[what]:.2f}×"


GPU_TABLES: dict[str, Callable[[], str]] = {
    "both_gpus": both_gpus,
    "worst_on_one_gpu": worst_on_one_gpu,
    "less_memory": less_memory,
    "served": served,
}
