"""The table of language models by kind of text; ``docs/tables.py`` writes it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from table_parts import cases, runs, short, table

LAYERS = {"all": "all layers", "mlp": "MLPs alone"}


def kinds() -> str:
    """Perplexity over that of the dense model on all kinds, those that were never seen last.

    What the model wrote itself is left out: each run has other windows of it.
    """
    documents = runs("h100_kinds.json")
    of_dense = documents[0]["cases"][0]["results"][0]["perplexity"]
    seen = [kind for kind in of_dense if kind.startswith("of ") and kind != "of written"]
    unseen = [kind for kind in of_dense if not kind.startswith("of ")]
    lines = [["dense, perplexity", "", f"{statistics.geometric_mean(of_dense[k] for k in seen):.1f}"]]
    lines[0] += [f"{of_dense[kind]:.1f}" for kind in unseen]
    for document in documents:
        (case,) = document["cases"]
        for result in case["results"][1:]:
            ratios = {kind: result["perplexity"][kind] / of_dense[kind] for kind in (*seen, *unseen)}
            name = f"{LAYERS[case['layers']]}, {result['stage']} at {short(result['density'])}"
            if result["density"] != case["density"]:
                name += f", on the way to {short(case['density'])}"
            ours = f"{statistics.geometric_mean(ratios[kind] for kind in seen):.2f}×"
            line = [name, f"{result['seconds']:.0f}", ours]
            lines.append(line + [f"{ratios[kind]:.2f}×" for kind in unseen])
    return table(["", "seconds", "kinds of training", *unseen], lines)


def activations() -> str:
    """Perplexity by the fraction of neurons that is off, and the time of the MLPs over that without."""
    found = {case["contender"]: case for case in cases("cpu_activations.json")}
    without = {one["dtype"]: one["cpu_us"] for one in found["all"]["results"]}
    base, lines = found["dense"]["perplexity"], []
    for name, case in sorted(found.items(), key=lambda pair: pair[1]["off"]):
        if not case["off"]:
            continue
        times = {one["dtype"]: one["cpu_us"] for one in case["results"]}
        speedups = [f"{without[dtype] / times[dtype]:.2f}×" for dtype in without]
        line = [name.removesuffix(" off"), f"{case['off']:.0%}", f"{case['perplexity'] / base - 1:+.1%}"]
        lines.append([*line, *speedups])
    return table(["fraction", "off", "perplexity", *(f"MLPs, {dtype}" for dtype in without)], lines)


STORED = {"plain": "bf16", "int8": "int8", "int4": "int4"}


def activations_gpu() -> str:
    """Speedups of a Llama 3 8B MLP over the same without thresholds, in the last column over dense bf16."""
    lines = []
    for case in cases("h200_activations.json"):
        us = {one["contender"]: one["us"] for one in case["results"]}
        if case["off"] not in (0.5, 0.9):
            continue
        density = "dense" if case["density"] == 1 else f"{case['block']} at {short(case['density'])}"
        line = [f"{STORED[case['storage']]}, {density}", str(case["tokens"]), short(case["off"])]
        line += [
            f"{us['all']:.0f} us",
            *(f"{us['all'] / us[name]:.2f}×" for name in ("down", "gate", "inputs")),
        ]
        lines.append([*line, f"{us['dense'] / us['gate']:.2f}×"])
    header = ["weights", "tokens", "off", "without", "`down`", "gate", "all inputs", "gate over dense bf16"]
    return table(header, lines)


LANGUAGE_TABLES: dict[str, Callable[[], str]] = {
    "kinds": kinds,
    "activations": activations,
    "activations_gpu": activations_gpu,
}
