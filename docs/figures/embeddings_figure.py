"""Draws the figure of docs/embeddings.md: quality against latency of embeddings. Needs matplotlib.

python docs/figures/embeddings_figure.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from svg import write

sys.path.append(str(Path(__file__).resolve().parents[1]))
from embedding_tables import QUALITY, SPEED, milliseconds
from table_parts import cases

SETTINGS = ((2, 1, 32), (2, 32, 64))  # threads, texts, tokens
COLORS = {"torch": "#0072b2", "onnxruntime": "#009e73", "openvino": "#cc79a7", "tilesparse": "#d55e00"}
STYLES = {"bfloat16": "--", "int8 bfloat16": "-"}


def main() -> None:
    write(drawn(cases(SPEED), cases(QUALITY)), "embeddings")


def drawn(speed: list[dict[str, Any]], judged: list[dict[str, Any]]) -> Figure:
    """Time to the right, cosine upwards; lines are sparse models, whose cosine is not known."""
    quality = {
        case["contender"]: statistics.mean(one["cosine"] for one in case["quality"].values())
        for case in judged
    }
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, setting in zip(figure.subplots(1, 2, sharey=True), SETTINGS, strict=True):
        for case in speed:
            library, _, variant = case["contender"].partition(" ")
            ms = milliseconds(case)[setting]
            if case["density"] == 1:
                axes.plot(ms, quality[case["contender"]], "o", color=COLORS[library])
                axes.annotate(
                    variant or "float32",
                    (ms, quality[case["contender"]]),
                    xytext=(0, -10),
                    textcoords="offset points",
                    fontsize=7,
                )
            elif case["block"] == 64:
                axes.axvline(
                    ms, color=COLORS[library], linestyle=STYLES[variant], linewidth=0.5 + case["density"]
                )
        threads, batch, tokens = setting
        axes.set_xlim(left=0)
        axes.set(xlabel=f"ms for {batch} × {tokens} tokens, {threads} threads")
    figure.axes[0].set_ylabel("mean cosine to float32, kinds held out")
    for library, color in list(COLORS.items())[:-1]:
        figure.axes[1].plot([], [], "o", color=color, label=f"{library}, dense")
    for variant, style in STYLES.items():
        for density in (0.5, 0.25):
            label = f"tilesparse {variant}, density {density:g}"
            figure.axes[1].plot(
                [], [], style, color=COLORS["tilesparse"], linewidth=0.5 + density, label=label
            )
    figure.axes[1].legend(fontsize=7)
    return figure


if __name__ == "__main__":
    main()
