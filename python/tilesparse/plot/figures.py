"""Figures of block-sparse models: kept blocks, changes of patterns, and quality against time.

They need matplotlib (``pip install matplotlib``), which is imported when a figure is drawn. Figures are
`matplotlib.figure.Figure` objects that pyplot does not manage, so none has to be closed; `save` writes them.
``tilesparse plot`` does the same on the command line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from .._arguments import checked
from .._checks import check_text
from ..errors import InvalidArgumentError
from .drawing import COLOURS, FEW, as_plain_text, draw_history, legend_label, map_pages
from .saving import check_matplotlib
from .sources import (
    Snapshots,
    ages,
    block_norms,
    checked_points,
    chosen,
    histories,
    layers_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MARKERS = ("o", "s", "^", "D", "v")


@checked
def patterns(source: nn.Module | str | os.PathLike[str], *, layers: str | None = None) -> list[Figure]:
    """Draw the kept blocks of each layer, shaded by the root mean square of their weights.

    Shades are relative to the largest of the layer: the darkest block has 1. Beside each map are the kept
    fractions of every block row (right) and block column (above). What 2:4 leaves out inside of a block
    counts as zero. A layer with more than 128 blocks on a side is drawn in cells of several blocks, whose
    shade is the mean over them; its caption says so.

    Args:
        source: a model, or the folder of a checkpoint that `tilesparse.save` or ``save_pretrained`` has
            written, of which only the tensors of the layers that are drawn are read, one layer at a time.
        layers: a name or regular expression that layers match as in `BlockSparseModelPatcher`; None draws
            all.

    Returns:
        One figure for every 24 layers.

    Raises:
        InvalidArgumentError: there is no block-sparse layer, none matches, or a weight is not finite.
        CheckpointError: the folder holds no such checkpoint, or a damaged one.
        UnsupportedError: matplotlib is missing, or a weight is sharded.
    """
    check_matplotlib()
    found = layers_of(source)
    maps = [block_norms(name, found[name]()) for name in chosen(found, layers)]
    return map_pages(maps, "kept blocks", "root mean square of a block / largest of the layer", 1.0)


@checked
def evolution(snapshots: Snapshots, *, layers: str | None = None) -> list[Figure]:
    """Draw how patterns changed in training.

    The first figure has, against the step: the density, and dashed the fraction of all blocks that were ever
    kept; the blocks that each snapshot has and the one before had not, as a fraction of what it keeps; and
    the fraction of the first snapshot's blocks that are still kept. Up to seven layers have a colour each;
    of more all are grey, with their mean. The other figures map the last snapshot, one for every 24 layers:
    the steps for which each block has been kept without a break, and the places that blocks have left. What
    comes and goes between two snapshots is not seen.

    Args:
        snapshots: (step, masks) by ascending steps, where masks has for each layer's name a bool tensor
            [R, C], True for kept blocks, as `BlockPattern.to_block_mask` makes it.
        layers: a name or regular expression that layers match as in `BlockSparseModelPatcher`; None draws
            all.

    Raises:
        InvalidArgumentError: there are fewer than two snapshots, steps do not ascend, layers or sizes differ
            between snapshots, masks are not bool [R, C], or no layer matches.
        UnsupportedError: matplotlib is missing.
    """
    check_matplotlib()
    steps, all_layers = histories(snapshots)
    drawn = {name: all_layers[name] for name in chosen(all_layers, layers)}
    maps = [ages(name, steps, history) for name, history in drawn.items()]
    pages = map_pages(
        maps, f"age of blocks at step {steps[-1]}", "steps since a block has been kept", steps[-1] - steps[0]
    )
    return [draw_history(steps, drawn), *pages]


@checked
def tradeoff(
    points: Iterable[Mapping[str, Any]], *, x: str, y: str, log_x: bool = False, log_y: bool = False
) -> Figure:
    """Draw quality against time or density: a line for each label, through its points by ascending x.

    Args:
        points: each with "label", "x" and "y", and optionally "spread", half the height of a bar at the
            point, and "note", a short text beside it.
        x: label of the horizontal axis, with its unit: "ms for a batch of 32".
        y: label of the vertical axis: "perplexity".
        log_x: make the horizontal axis logarithmic.
        log_y: make the vertical axis logarithmic.

    Raises:
        InvalidArgumentError: there are no points, one lacks a key, has others or a wrong value, or is not
            above 0 on a logarithmic axis; or there are more than 35 labels.
        UnsupportedError: matplotlib is missing.
    """
    check_text("x", x)
    check_text("y", y)
    check_matplotlib()
    from .figure import ShownFigure

    checked = checked_points(points)
    for axis, is_log in (("x", log_x), ("y", log_y)):
        if is_log and (least := min(point[axis] for point in checked)) <= 0:
            raise InvalidArgumentError(
                f"points must have {axis} above 0 on a logarithmic axis, got {least:g}"
            )
    labels = list(dict.fromkeys(point["label"] for point in checked))
    if len(labels) > (most := math.lcm(len(COLOURS), len(MARKERS))):
        raise InvalidArgumentError(f"points must have at most {most} labels, got {len(labels)}")
    figure = ShownFigure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    for number, label in enumerate(labels):
        own = sorted((point for point in checked if point["label"] == label), key=lambda point: point["x"])
        spreads = [point["spread"] for point in own]
        panel.errorbar(
            [point["x"] for point in own],
            [point["y"] for point in own],
            yerr=spreads if any(spreads) else None,
            fmt=MARKERS[number % len(MARKERS)] + "-",
            color=COLOURS[number % len(COLOURS)],
            markersize=5,
            linewidth=1.2,
            capsize=2,
            label=legend_label(label),
        )
        for point in own:
            place = point["x"], point["y"]
            panel.annotate(
                point["note"],
                place,
                (4, 4),
                textcoords="offset points",
                fontsize="x-small",
                parse_math=False,
            )
    panel.set(xlabel=x, ylabel=y, xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
    panel.grid(color="#e5e5e5", linewidth=0.6)
    panel.set_axisbelow(True)
    if len(labels) <= FEW:
        legend = panel.legend(fontsize="small")
    else:
        legend = figure.legend(loc="outside right upper", fontsize="small")
    as_plain_text(legend)
    return figure
