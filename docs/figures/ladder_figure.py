"""Draws the figure of docs/language-models.md: losses of byte models against times. Needs matplotlib.

python docs/figures/ladder_figure.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tilesparse import plot

sys.path.append(str(Path(__file__).resolve().parents[1]))
from language_tables import TIMES, found, front

FOLDER = Path(__file__).parent

COLORS = {"bfloat16": "#0072b2", "float8": "#d55e00"}
MARKS = {1.0: "o", 0.5: "s", 0.25: "^"}


def main() -> None:
    (document,) = found("*_ladder.json")
    (file,) = plot.save(drawn(document), FOLDER / "ladder.svg")
    print(f"wrote {file}, {file.stat().st_size >> 10} KiB")


def drawn(document: dict[str, Any]) -> Figure:
    """Time to the right, loss upwards: a line joins the models that none beats in both."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    rows = [(case, result) for case in document["cases"] for result in case["results"]]
    for axes, (time, title) in zip(figure.subplots(1, 2, sharey=True), TIMES.items(), strict=True):
        points = [(result[time], result["loss"]) for _, result in rows]
        best = sorted(point for point, is_best in zip(points, front(points), strict=True) if is_best)
        axes.plot(*zip(*best, strict=True), color="#999999", zorder=0)
        for (case, result), (x, y) in zip(rows, points, strict=True):
            axes.plot(x, y, MARKS[case["density"]], color=COLORS[result["form"]])
            axes.annotate(str(case["width"]), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
        axes.set(xscale="log", xlabel=f"{title}, ms")
    figure.axes[0].set_ylabel("loss, nats per byte")
    for form, color in COLORS.items():
        figure.axes[1].plot([], [], "o", color=color, label=form)
    for density, mark in MARKS.items():
        name = "dense" if density == 1 else f"density {density:g}"
        figure.axes[1].plot([], [], mark, color="#555555", label=name)
    figure.axes[1].legend(fontsize=7)
    return figure


if __name__ == "__main__":
    main()
