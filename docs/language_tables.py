"""The table of language models by kind of text; ``docs/tables.py`` writes it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from table_parts import runs, short, table

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


LANGUAGE_TABLES: dict[str, Callable[[], str]] = {
    "kinds": kinds,
}
