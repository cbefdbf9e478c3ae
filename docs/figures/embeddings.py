"""Draw the figure of docs/embeddings.md: quality over time of a sentence encoder on a CPU. Needs matplotlib.

python docs/figures/embeddings.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from svg import write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from embedding_tables import Contender, measured, named, qualities

CASES = {"32 × 64": 0, "32 × 8 to 128": 1}  # texts × tokens, and panels
OURS, OTHERS = "#0072b2", "#707070"


def main() -> None:
    write(drawn(), "embeddings")


def drawn() -> Figure:
    """A panel for each case: the mean cosine to the dense model over the time of a call."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    panels = figure.subplots(1, len(CASES), sharey=True)
    times, quality = measured("ms"), qualities()
    for case, number in CASES.items():
        panel = panels[number]
        points: list[tuple[Contender, float, float]] = [
            (contender, times[contender]["minilm", case], quality[contender])
            for contender in times
            if contender in quality
        ]
        for contender, x, y in points:
            is_ours = contender[1] is not None
            panel.plot(x, y, "o" if is_ours else "s", color=OURS if is_ours else OTHERS)
            label = named(contender).removeprefix("tilesparse int8, ")
            panel.annotate(label, (x, y), xytext=(5, -3), textcoords="offset points", fontsize=7)
        panel.set(xscale="log", xlabel="ms of a call", title=f"{case} tokens")
        panel.margins(x=0.35, y=0.12)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("cosine to the dense model")
    return figure


if __name__ == "__main__":
    main()
