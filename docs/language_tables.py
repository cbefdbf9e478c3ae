"""The table of language models by kind of text; ``docs/tables.py`` writes it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from table_parts import cases, document, runs, short, table

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
    for run in documents:
        (case,) = run["cases"]
        for result in case["results"][1:]:
            ratios = {kind: result["perplexity"][kind] / of_dense[kind] for kind in (*seen, *unseen)}
            name = f"{LAYERS[case['layers']]}, {result['stage']} at {short(result['density'])}"
            if result["density"] != case["density"]:
                name += f", on the way to {short(case['density'])}"
            ours = f"{statistics.geometric_mean(ratios[kind] for kind in seen):.2f}×"
            line = [name, f"{result['seconds']:.0f}", ours]
            lines.append(line + [f"{ratios[kind]:.2f}×" for kind in unseen])
    return table(["", "seconds", "kinds of training", *unseen], lines)


def equal() -> str:
    """Perplexity over that of dense SmolLM2 in forms that were distilled for as long, and their times."""
    run, ms = document("h200_recover.json#smollm2"), document("h200_recover.json#smollm2_ms")["ms"]
    found = {case["form"]: case for case in run["cases"]}
    whole, known = found["dense"]["perplexity"], sum(run["tokens"].values())
    lines = [["dense, perplexity", f"{ms['dense']:.1f}", "", *[""] * (len(whole) + 1)]]
    lines[0] += [f"{perplexity:.1f}" for perplexity in whole.values()]
    for form in ms:
        if form == "dense":
            continue
        case, speedup = found[form], f"{ms['dense'] / ms[form]:.2f}×"
        line = [form, f"{ms[form]:.1f}", speedup, f"{case['tokens'] / known:.2f}"]
        for one in (found[f"{form}, not distilled"], case):
            line += [f"{one['perplexity'][kind] / whole[kind]:.2f}×" for kind in whole]
        lines.append(line)
    kinds = [f"{stage} {kind}" for stage in ("pruned:", "distilled:") for kind in whole]
    return table(["", "ms", "speedup", "passes over the text", *kinds], lines)


def activations() -> str:
    """Perplexity by the fraction of neurons that is off, and the time of the MLPs over that without."""
    found = {case["contender"]: case for case in cases("cpu_activations.json")}
    base, lines = found["dense"]["perplexity"], []
    for name, case in sorted(found.items(), key=lambda pair: pair[1]["off"]):
        if not case["off"]:
            continue
        without = found["all of all inputs" if name.endswith("inputs") else "all"]["results"]
        pairs = zip(without, case["results"], strict=True)
        speedups = [f"{one['cpu_us'] / other['cpu_us']:.2f}×" for one, other in pairs]
        line = [name.removesuffix(" off"), f"{case['off']:.0%}", f"{case['perplexity'] / base - 1:+.1%}"]
        lines.append([*line, *speedups])
    dtypes = [one["dtype"] for one in found["all"]["results"]]
    return table(["fraction", "off", "perplexity", *(f"MLPs, {dtype}" for dtype in dtypes)], lines)


STORED = {"plain": "bf16", "int8": "int8", "int4": "int4"}


def _activation_cases(run: str) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Return cases of a run with the microseconds of each contender."""
    found = cases(f"h200_activations.json#{run}")
    return [(case, {one["contender"]: one["us"] for one in case["results"]}) for case in found]


def activations_gpu() -> str:
    """Speedups of a Llama 3 8B MLP over the same without thresholds, in the last column over dense bf16."""
    lines = []
    for case, us in _activation_cases("mlp"):
        if case["off"] not in (0.5, 0.9):
            continue
        density = "dense" if case["density"] == 1 else f"{case['block']} at {short(case['density'])}"
        line = [f"{STORED[case['storage']]}, {density}", str(case["tokens"]), short(case["off"])]
        ratios = [f"{us['all'] / us[name]:.2f}×" for name in ("down", "gate", "inputs")]
        lines.append([*line, f"{us['all']:.0f} us", *ratios, f"{us['dense'] / us['inputs']:.2f}×"])
    header = [
        "weights",
        "tokens",
        "off",
        "without",
        "`down`",
        "gate",
        "all inputs",
        "all inputs over dense bf16",
    ]
    return table(header, lines)


def activations_training() -> str:
    """Speedups of products with h in blocks over dense ones."""
    found = _activation_cases("training")
    (dense,) = (us for case, us in found if case["way"] == "dense")
    by_block = {(case["block"], case["density"]): us for case, us in found if case["way"] == "blocks"}
    blocks, densities = dict.fromkeys(key[0] for key in by_block), sorted({key[1] for key in by_block})
    lines = []
    for name in ("down", "gradients"):
        for block in blocks:
            ratios = [f"{dense[name] / by_block[block, density][name]:.2f}×" for density in densities]
            lines.append([f"{name}, {dense[name] / 1e3:.2f} ms dense", f"{block} × {block}", *ratios])
    return table(["", "blocks", *(f"{density:.0%} not zero" for density in densities)], lines)


def activations_experts() -> str:
    """Speedups of experts over PyTorch's grouped products of dense weights."""
    lines = []
    for case, us in _activation_cases("experts"):
        density = "dense" if case["density"] == 1 else f"{case['block']} at {short(case['density'])}"
        ratios = [f"{us['grouped'] / us[name]:.2f}×" for name in ("all", "down", "inputs")]
        lines.append([density, str(case["tokens"]), f"{us['grouped']:.0f} us", *ratios])
    return table(["weights", "tokens", "grouped", "without", "`down`", "all inputs"], lines)


def activations_lm() -> str:
    """Perplexity and time of models trained with ReLU² and with experts, by the fraction that is off."""
    lines: list[list[str]] = []
    for run, model in {"relu2": "ReLU²", "mixture": "experts, SwiGLU"}.items():
        found = {case["contender"]: case for case in document(f"h200_activations.json#{run}")["cases"]}
        base = found.pop("all")
        known = set()
        for contender, case in found.items():
            off = f"{case['off']:.0%}"
            if off in known:
                continue  # no more are off than for the fraction before
            known.add(off)
            change = math.exp(case["loss"] - base["loss"]) - 1
            cells = [off, f"{max(case['errors']):.3f}", f"{change:+.1%}"]
            lines.append([model, contender, *cells, f"{base['mlps_us'] / case['mlps_us']:.2f}×"])
    return table(["", "fraction", "off", "largest error", "perplexity", "MLPs, bf16"], lines)


def activation_blocks() -> str:
    """Blocks of (tokens × neurons) with a number other than zero, of each layer of the ReLU² model."""
    lines = []
    for layer in document("h200_activations.json#relu2")["structure"]:
        orders = [layer[order] for order in ("text", "neurons", "clusters")]
        kinds = [f"{order[block]:.0%}" for order in orders for block in BLOCKS]
        lines.append([str(layer["layer"]), f"{layer['zero']:.1%}", f"{layer['never_on']:.0%}", *kinds])
    heads = [f"{order} {block}" for order in ("text", "neurons", "both") for block in BLOCKS]
    return table(["layer", "zero", "never on", *heads], lines)


BLOCKS = "16x16", "64x64"
LANGUAGE_TABLES: dict[str, Callable[[], str]] = {
    "kinds": kinds,
    "equal": equal,
    "activations": activations,
    "activations_gpu": activations_gpu,
    "activations_experts": activations_experts,
    "activations_training": activations_training,
    "activations_lm": activations_lm,
    "activation_blocks": activation_blocks,
}
