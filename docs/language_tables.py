"""The tables of language models, and of whole models in four columns; ``docs/tables.py`` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from table_parts import cases, runs, short, table

Point = tuple[float, float]  # size and loss, both better if smaller
LAYERS = {"all": "all layers", "mlp": "MLPs alone"}
MODELS = {
    "vit": "ViT-H/14, 64 pictures",
    "llama-prefill": "a Llama 3 8B block, 8192 tokens",
    "llama-decode1": "a Llama 3 8B block, one token after 8192",
    "roberta": "RoBERTa base, 16 × 512 tokens",
}


def front(points: Sequence[Point]) -> list[bool]:
    """Return which points no other one beats in both numbers."""
    return [
        not any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in points)
        for point in points
    ]


def named(case: dict[str, Any]) -> str:
    density = f", density {short(case['density'])}" if case["density"] < 1 else ", dense"
    return f"{case['width']}{density}"


def ladder() -> str:
    """Losses of all models; those on the front of size and loss are in bold."""
    models = sorted(cases("ladder.json#models"), key=lambda case: (case["width"], -case["density"]))
    forms = {case["name"]: case["results"] for case in cases("ladder.json#times")}
    best = front([(case["parameters"], case["loss"]) for case in models])
    lines = []
    for case, is_best in zip(models, best, strict=True):
        loss = f"**{case['loss']:.3f}**" if is_best else f"{case['loss']:.3f}"
        pruned = f"{case['loss_pruned']:.3f}" if "loss_pruned" in case else ""
        parameters = f"{case['parameters'] / 1e6:.0f} M"
        times = [fastest(forms[case["name"]], of) for of in ("batch_ms", "one_byte_ms")]
        training = f"{case['seconds']:.0f} s, {case['steps']} steps"
        lines.append([named(case), parameters, training, pruned, loss, *times])
    header = ["width", "parameters", "training", "loss when pruned", "loss", "a batch", "one byte"]
    return table(header, lines)


def fastest(forms: Sequence[dict[str, Any]], of: str) -> str:
    """Return the milliseconds of the fastest form, and its name if it is not bfloat16."""
    best = min((form for form in forms if form[of] is not None), key=lambda form: float(form[of]))
    name = "" if best["form"] == "bfloat16" else f", {best['form']}"
    return f"{best[of]:.3g} ms{name}"


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


def columns() -> str:
    """Milliseconds of dense models in bfloat16 and float8, and what sparse ones gain over them."""
    lines = []
    for case in cases("h100_columns.json"):
        for density in dict.fromkeys(result["density"] for result in case["results"]):
            lines.append(["H100", MODELS[case["model"]], short(density), *_four(case, density)])
    header = [
        "GPU",
        "",
        "density",
        "dense bf16, ms",
        "dense float8, ms",
        "sparse bf16, ms",
        "sparse float8, ms",
    ]
    return table([*header, "best sparse over best dense"], lines)


def _four(case: dict[str, Any], density: float) -> list[str]:
    times: dict[str, float] = {}
    beside: dict[str, list[float]] = {}
    for result in case["results"]:
        if result["density"] == density and "t_us" in result:
            times[result["form"]] = result["t_us"]
            for name, both in result["beside_us"].items():
                beside.setdefault(name, []).extend(both)
    dense = {name: statistics.mean(all_of) for name, all_of in beside.items()}
    if len(times) < 2:
        return ["-"] * 5
    float8 = min(dense["float8"], dense["float8_compiled"])
    four = [dense["dense"], float8, times["bfloat16"], times["float8"]]
    return [*(f"{us / 1e3:.3g}" for us in four), f"{min(four[:2]) / min(four[2:]):.2f}×"]


LANGUAGE_TABLES: dict[str, Callable[[], str]] = {
    "ladder": ladder,
    "kinds": kinds,
    "columns": columns,
}
