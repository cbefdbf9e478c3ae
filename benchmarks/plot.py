"""Draws results of bench_ops.py: η against density, and a roofline. Needs matplotlib.

    python benchmarks/plot.py results.json [more.json ...] --output docs/figures

Writes eta-OP.svg for each product and roofline.svg.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import stored
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import OPS, Row, rows_of

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "tilesparse"  # equal results give equal files

LINES = {"tilesparse": "-o", "triton": "--s", "stk": ":^"}  # by contender; others are dash-dotted
COLOURS = {"16x16": "tab:red", "32x32": "tab:orange", "64x64": "tab:green", "128x128": "tab:blue"}
MARKERS = {"dds_nt": "o", "dds_nn": "s", "sdd_tn": "^"}


def main(argv: Sequence[str] | None = None) -> int:
    """Draws every product of the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", help="written by bench_ops.py")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder (%(default)s)")
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=4.25,
        metavar="TB/s",
        help="of copies, for the roofline (%(default)s)",
    )
    arguments = parser.parse_args(argv)
    rows = rows_of(run for file in arguments.results for run in stored.documents(file).values())
    arguments.output.mkdir(parents=True, exist_ok=True)
    for op in OPS:
        draw_efficiency([row for row in rows if row.case["op"] == op], arguments.output / f"eta-{op}.svg")
    draw_roofline(rows, arguments.bandwidth, arguments.output / "roofline.svg")
    return 0


def draw_efficiency(rows: Sequence[Row], path: Path) -> None:
    """One panel for each layer, one line for each block and contender."""
    layers = list(dict.fromkeys(row.case["shape"] for row in rows if not row.is_small_batch))
    if not layers:
        return
    figure, panels = pyplot.subplots(
        1, len(layers), figsize=(3.2 * len(layers), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, layer in zip(panels[0], layers, strict=True):
        _draw_layer(panel, [row for row in rows if row.case["shape"] == layer])
        panel.set_title(layer)
    panels[0][0].set_ylabel("η = t_dense · density / t")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(OPS[rows[0].case["op"]])
    _save(figure, path)


def _draw_layer(panel: Axes, rows: Iterable[Row]) -> None:
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        points[row.block, row.result["contender"]].append((row.density, row.result["efficiency"]))
    for (block, contender), measured in points.items():
        densities, efficiencies = zip(*sorted(measured), strict=True)
        label = f"{block} {contender}"
        panel.plot(
            densities, efficiencies, LINES.get(contender, "-.x"), color=COLOURS.get(block), label=label
        )
    panel.axhline(1.0, color="grey", linewidth=0.8)
    panel.set_xlabel("density")
    panel.set_ylim(0, 1.15)


def draw_roofline(rows: Sequence[Row], bandwidth: float, path: Path) -> None:
    """TFLOP/s on kept weights against the operations for each byte that has to move."""
    rows = [row for row in rows if row.result["contender"] == "tilesparse" and row.result["gb_per_s"] > 0]
    if not rows:
        return
    figure, panel = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for row in rows:
        intensity = 1e3 * row.result["tflops"] / row.result["gb_per_s"]
        panel.plot(
            intensity,
            row.result["tflops"],
            MARKERS[row.case["op"]],
            color=COLOURS.get(row.block, "grey"),
            ms=4,
        )
    dense = max(row.dense_tflops for row in rows)
    edge = dense / bandwidth
    panel.plot([1, edge, 1e4], [bandwidth, dense, dense], color="black", linewidth=1)
    panel.annotate(f"copy {bandwidth:g} TB/s", (2, 2.6 * bandwidth), rotation=35)
    panel.annotate(f"dense cuBLAS {dense:.0f} TFLOP/s", (1.1 * edge, 1.06 * dense))
    for block, colour in COLOURS.items():
        panel.plot([], [], "o", color=colour, label=block)
    for op, marker in MARKERS.items():
        panel.plot([], [], marker, color="grey", label=OPS[op])
    panel.set(
        xscale="log", yscale="log", xlabel="operations with kept weights for each byte", ylabel="TFLOP/s"
    )
    panel.legend(fontsize="small", loc="lower right")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
