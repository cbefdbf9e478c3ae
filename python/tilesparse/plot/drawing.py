"""Maps of layers and curves of their patterns, drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .sources import Map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

PANELS = 24  # layers in one figure
COLUMNS = 4  # panels beside each other
CELLS = 128  # on a side of a panel; of larger layers a cell is the mean of several blocks
FEW = 7  # layers or labels that have a legend within the panel
# Okabe and Ito's colours, which people who see colours differently can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LEFT = "#f5c98c"  # places that blocks have left
GREY = "#b0b0b0"


def map_pages(maps: Sequence[Map], title: str, label: str, largest: float) -> list[Figure]:
    """Draw a panel for each layer, with one scale of shades for all."""
    return [
        _page(maps[start : start + PANELS], title, label, largest) for start in range(0, len(maps), PANELS)
    ]


def _page(maps: Sequence[Map], title: str, label: str, largest: float) -> Figure:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.patches import Patch

    from .figure import ShownFigure

    columns = min(COLUMNS, len(maps))
    rows = math.ceil(len(maps) / columns)
    figure = ShownFigure(figsize=(max(2.5 * columns, 4.8), 2.6 * rows + 1.2), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    # No shade is so light that a kept block looks absent.
    shades = ScalarMappable(
        Normalize(0, largest), LinearSegmentedColormap.from_list("kept", ["#b9d7ea", "#0072b2", "#08264a"])
    )
    for panel, drawn in zip(panels, maps, strict=False):
        _draw_map(panel, drawn, shades)
    for panel in panels[len(maps) :]:
        panel.remove()
    figure.suptitle(f"{title} (rows: outputs, columns: inputs)", fontsize="medium")
    drawn_on = list(panels[: len(maps)])
    figure.colorbar(shades, ax=drawn_on, label=label, location="bottom", aspect=50, shrink=0.7, panchor=False)
    if any(drawn.left is not None and bool(drawn.left.any()) for drawn in maps):
        patch = Patch(color=LEFT, label="kept earlier, not now")
        figure.legend(handles=[patch], loc="outside lower center", fontsize="small", frameon=False)
    return figure


def _draw_map(panel: Axes, drawn: Map, shades: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    blocks = drawn.kept.shape
    group = math.ceil(max(blocks) / CELLS)
    kept, values = _cells(drawn.kept, group), _cells(drawn.shades, group)
    # "none" keeps one pixel for each cell in vector formats, where others draw at 72 dots per inch.
    placed: dict[str, Any] = {
        "extent": (0, group * kept.shape[1], group * kept.shape[0], 0),
        "interpolation": "none",
    }
    if drawn.left is not None:
        left = _cells(drawn.left, group).numpy()
        panel.imshow(
            left, LinearSegmentedColormap.from_list("left", ["white", LEFT]), vmin=0, vmax=1, **placed
        )
    # Absent blocks are NaN, which is not drawn.
    image = torch.where(kept > 0, values, torch.nan).numpy()
    panel.imshow(image, shades.cmap, shades.norm, **placed)
    cell = "" if group == 1 else f"\na cell: {group} x {group} blocks"
    panel.set_title(
        f"{_shortened(drawn.name)}\n{drawn.caption}{cell}", fontsize="x-small", pad=4, parse_math=False
    )
    panel.set(xticks=[], yticks=[], aspect="auto", xlim=(0, blocks[1]), ylim=(blocks[0], 0), anchor="N")
    panel.set_box_aspect(min(max(drawn.aspect, 0.25), 4.0))
    of_rows, of_cols = (drawn.kept.float().mean(side).numpy() for side in (1, 0))
    right = panel.inset_axes((1.02, 0, 0.12, 1), sharey=panel)
    right.stairs(of_rows, range(blocks[0] + 1), orientation="horizontal", fill=True, color=GREY)
    right.set_xlim(0, 1)
    above = panel.inset_axes((0, 1.02, 1, 0.12), sharex=panel)
    above.stairs(of_cols, range(blocks[1] + 1), fill=True, color=GREY)
    above.set_ylim(0, 1)
    for margin in (right, above):
        margin.set_axis_off()


def _cells(blocks: Tensor, group: int) -> Tensor:
    """Return the means of blocks [R, C] over cells of group x group, which are smaller at the ends."""
    return torch.nn.functional.avg_pool2d(blocks.float()[None], group, ceil_mode=True)[0]


def draw_history(steps: Sequence[int], layers: Mapping[str, Tensor]) -> Figure:
    """Draw the density, the new and the remaining blocks of layers [T, R, C] against the step."""
    from .figure import ShownFigure

    figure = ShownFigure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    curves = {name: _fractions(history) for name, history in layers.items()}
    mean = [torch.stack(of_layers).mean(0) for of_layers in zip(*curves.values(), strict=True)]
    is_few = len(layers) <= FEW
    for number, (name, own) in enumerate(curves.items()):
        colour = COLOURS[number] if is_few else GREY
        label = legend_label(_shortened(name)) if is_few else ""
        _draw_curves(panels, steps, own, colour, label, 1.2 if is_few else 0.5)
    if not is_few:
        _draw_curves(panels, steps, mean, COLOURS[0], f"mean of {len(layers)} layers", 2)
    panels[0].plot([], [], color="grey", label="kept")
    panels[0].plot([], [], "--", color="grey", label="ever kept")
    panels[0].legend(fontsize="small")
    titles = "density", "new blocks / kept blocks", "blocks of the first snapshot still kept"
    for panel, title in zip(panels, titles, strict=True):
        panel.set(xlabel="step", xlim=(steps[0], steps[-1]))
        panel.set_title(title, fontsize="medium")
        panel.set_ylim(bottom=0)
        panel.grid(color="#e5e5e5", linewidth=0.6)
    handles, labels = panels[1].get_legend_handles_labels()
    as_plain_text(figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small"))
    return figure


def _fractions(history: Tensor) -> list[Tensor]:
    """Return fractions of a history [T, R, C]: kept, ever kept, new [T - 1], and remaining of the first."""
    blocks = history.flatten(1)
    ever = blocks.cummax(0).values
    kept = blocks.sum(1)
    new = (blocks[1:] & ~blocks[:-1]).sum(1) / kept[1:].clamp(min=1)
    remaining = (blocks & blocks[0]).sum(1) / kept[0].clamp(min=1)
    return [blocks.float().mean(1), ever.float().mean(1), new, remaining]


def _draw_curves(
    panels: Sequence[Axes], steps: Sequence[int], own: Sequence[Tensor], colour: str, label: str, width: float
) -> None:
    kept, ever, new, remaining = (curve.numpy() for curve in own)
    style: dict[str, Any] = {"color": colour, "linewidth": width}
    panels[0].plot(steps, kept, **style)
    panels[0].plot(steps, ever, "--", **style)
    panels[1].plot(steps[1:], new, label=label, **style)
    panels[2].plot(steps, remaining, **style)


def _shortened(name: str) -> str:
    name = name or "the model"
    return name if len(name) <= 40 else f"…{name[-39:]}"


def legend_label(label: str) -> str:
    """Return a label for a legend, which would leave out one that begins with an underscore."""
    return f" {label}" if label.startswith("_") else label


def as_plain_text(legend: Legend) -> None:
    """Show dollar signs in labels as they are, not as formulas."""
    for text in legend.get_texts():
        text.set_parse_math(False)
