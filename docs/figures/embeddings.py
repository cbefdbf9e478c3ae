"""Draw the figure of docs/embeddings.md: quality over time of a sentence encoder on a CPU. Needs matplotlib.

python docs/figures/embeddings.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from svg import write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from embedding_tables import measured, named, qualities

CASES = {"32 × 64": 0, "32 × 8 to 128": 1}  # texts × tokens, and panels
# Cosines of sparse models, the least and most of kinds of text, as docs/quality.md has them.
RECOVERED = {0.5: (0.93, 0.96), 0.25: (0.88, 0.93)}
HIGH = 0.98  # from which labels stand, as there are many
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
        for contender, times_of in times.items():
            x, density = times_of["minilm", case], contender[1]
            ends = RECOVERED.get(density or 0) or (quality[contender], quality[contender])
            colour, y = OTHERS if density is None else OURS, sum(ends) / 2
            panel.plot([x, x], ends, "-", color=colour, linewidth=3)
            if ends[0] == ends[1]:
                panel.plot(x, y, "o", color=colour)
            label = named(contender).removeprefix("tilesparse int8, ")
            place: dict[str, Any] = {"xytext": (-2, 5), "rotation": 60} if y > HIGH else {"xytext": (6, -3)}
            panel.annotate(label, (x, y), textcoords="offset points", fontsize=6.5, **place)
        panel.set(xscale="log", xlabel="ms of a call", title=f"{case} tokens")
        panel.set_xticks([25, 50, 100, 200, 400], ["25", "50", "100", "200", "400"], minor=False)
        panel.minorticks_off()
        panel.set(ylim=(0.87, 1.11), yticks=[0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 1])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("cosine to the dense model")
    return figure


if __name__ == "__main__":
    main()
