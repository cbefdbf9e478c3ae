"""Pictures of block-sparse models: which blocks are kept, how patterns change, and what quality costs.

Needs matplotlib (``pip install matplotlib``), which is imported when a picture is drawn. Figures are
`matplotlib.figure.Figure` objects that pyplot does not know of, so that none has to be closed; `save` writes
them. ``tilesparse plot`` does the same on the command line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._checks import check_text, check_writable
from ..errors import InvalidArgumentError, UnsupportedError
from .sources import (
    Map,
    Snapshots,
    ages,
    block_norms,
    checked_points,
    chosen,
    histories,
    layers_of,
    load_snapshots,
    save_snapshots,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

__all__ = ["evolution", "load_snapshots", "patterns", "save", "save_snapshots", "tradeoff"]

FORMATS = (".png", ".svg", ".pdf")
PANELS = 24  # layers in one figure
COLUMNS = 4  # panels beside each other
CELLS = 128  # on a side of a panel; of larger layers a cell is the mean of several blocks
FEW = 7  # layers or labels that have a legend within the panel

# Okabe and Ito's colours, which people who see colours differently can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v")
LEFT = "#f5c98c"  # places that blocks have left
GREY = "#b0b0b0"


@checked
def patterns(source: nn.Module | str | os.PathLike[str], *, layers: str | None = None) -> list[Figure]:
    """Draws the kept blocks of each layer, shaded by the root mean square of their weights.

    Shades are relative to the largest of the layer: the darkest block has 1. Beside each map are the kept
    fractions of every block row (right) and block column (above). What 2:4 leaves out inside of a block
    counts as zero. A layer with more than 128 blocks on a side is drawn in cells of several blocks, whose
    shade is the mean over them; its caption says so.

    Args:
        source: a model, or the folder of a checkpoint that `tilesparse.save` or ``save_pretrained`` has
            written, of which only the tensors of the layers that are drawn are read, one layer at a time.
        layers: a regular expression that the start of a layer's name has to match (`re.match`); None draws
            all.

    Returns:
        One figure for every 24 layers.

    Raises:
        InvalidArgumentError: there is no block-sparse layer, none matches, or a weight is not finite.
        CheckpointError: the folder holds no such checkpoint, or a damaged one.
        UnsupportedError: matplotlib is missing, or a weight is sharded.
    """
    _check_matplotlib()
    found = layers_of(source)
    maps = [block_norms(name, found[name]()) for name in chosen(found, layers)]
    return _pages(maps, "kept blocks", "root mean square of a block / largest of the layer", 1.0)


@checked
def evolution(snapshots: Snapshots, *, layers: str | None = None) -> list[Figure]:
    """Draws how patterns changed while they were trained.

    The first figure has, against the step: the density, and dashed the fraction of all blocks that were ever
    kept; the blocks that each snapshot has and the one before had not, as a fraction of what it keeps; and
    the fraction of the first snapshot's blocks that are still kept. Up to seven layers have a colour each;
    of more all are grey, with their mean. The other figures map the last snapshot, one for every 24 layers:
    the steps for which each block has been kept without a break, and the places that blocks have left. What
    comes and goes between two snapshots is not seen.

    Args:
        snapshots: (step, masks) by ascending steps, where masks has for each layer's name a bool tensor
            [R, C], True for kept blocks, as `BlockPattern.to_block_mask` makes it.
        layers: a regular expression that the start of a layer's name has to match (`re.match`); None draws
            all.

    Raises:
        InvalidArgumentError: there are fewer than two snapshots, steps do not ascend, layers or sizes differ
            between snapshots, masks are not bool [R, C], or no layer matches.
        UnsupportedError: matplotlib is missing.
    """
    _check_matplotlib()
    steps, all_layers = histories(snapshots)
    drawn = {name: all_layers[name] for name in chosen(all_layers, layers)}
    maps = [ages(name, steps, history) for name, history in drawn.items()]
    pages = _pages(
        maps, f"age of blocks at step {steps[-1]}", "steps since a block has been kept", steps[-1] - steps[0]
    )
    return [_curves(steps, drawn), *pages]


@checked
def tradeoff(
    points: Iterable[Mapping[str, Any]], *, x: str, y: str, log_x: bool = False, log_y: bool = False
) -> Figure:
    """Draws quality against time or density: a line for each label, through its points by ascending x.

    Args:
        points: each with "label", "x" and "y", and optionally "spread", half the height of a bar at the
            point, and "note", a short text beside it.
        x: what the horizontal axis says, with its unit: "ms for a batch of 32".
        y: likewise, "perplexity".
        log_x: whether that axis is logarithmic.
        log_y: likewise.

    Raises:
        InvalidArgumentError: there are no points, one lacks a key, has others or a wrong value, or is not
            above 0 on a logarithmic axis; or there are more than 35 labels.
        UnsupportedError: matplotlib is missing.
    """
    check_text("x", x)
    check_text("y", y)
    _check_matplotlib()
    from .figure import ShownFigure

    checked = checked_points(points)
    for axis, is_log in (("x", log_x), ("y", log_y)):
        if is_log and (least := min(point[axis] for point in checked)) <= 0:
            raise InvalidArgumentError(
                f"points: {axis} above 0 expected on a logarithmic axis, got {least:g}"
            )
    labels = list(dict.fromkeys(point["label"] for point in checked))
    if len(labels) > (most := math.lcm(len(COLOURS), len(MARKERS))):
        raise InvalidArgumentError(f"points: at most {most} labels expected, got {len(labels)}")
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
            label=_listed(label),
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
    _as_plain_text(legend)
    return figure


@checked
def save(figures: Figure | Sequence[Figure], path: str | os.PathLike[str]) -> list[Path]:
    """Writes figures as PNG, SVG or PDF, whatever the name of the file ends in.

    A PDF has all of them as its pages. Of several figures in another format each has a file of its own:
    NAME-1.png, NAME-2.png and so on. Equal figures give equal files.

    Args:
        figures: one, or several.
        path: of the file; its folder has to exist, and a file that is there is replaced.

    Returns:
        The files.

    Raises:
        InvalidArgumentError: the name ends in something else, there is no figure, or writing fails.
        UnsupportedError: matplotlib is missing.
    """
    _check_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    pages = list(figures) if isinstance(figures, Sequence) else [figures]
    path = check_file(path)
    if not pages:
        raise InvalidArgumentError("figures: at least one expected, got none")
    for page in pages:
        if not isinstance(page, Figure):
            raise InvalidArgumentError(f"figures: figures expected, got {type(page).__name__}")
    files = [path]
    if len(pages) > 1 and path.suffix != ".pdf":
        files = [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, len(pages) + 1)]
    try:
        if path.suffix == ".pdf":
            with PdfPages(path, metadata={"CreationDate": None}) as document:
                for page in pages:
                    page.savefig(document, format="pdf")
        else:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            with matplotlib.rc_context({"svg.hashsalt": "tilesparse"}):
                for file, page in zip(files, pages, strict=True):
                    page.savefig(file, dpi=150, metadata=metadata)
    except OSError as error:
        raise InvalidArgumentError(f"path: {str(path)!r} cannot be written: {error}") from error
    return files


def check_file(path: str | os.PathLike[str]) -> Path:
    """A path that `save` can write to."""
    checked = Path(path)
    if checked.suffix not in FORMATS:
        raise InvalidArgumentError(
            f"path: a name that ends in {', '.join(FORMATS)} expected, got {str(path)!r}"
        )
    if not checked.parent.is_dir():
        raise InvalidArgumentError(f"path: there is no folder {str(checked.parent)!r}")
    if checked.is_dir():
        raise InvalidArgumentError(f"path must be a file, got the folder {str(path)!r}")
    check_writable("path", checked if checked.exists() else checked.parent)
    return checked


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("plot: matplotlib is needed; pip install matplotlib") from error


# Maps of layers.


def _pages(maps: Sequence[Map], title: str, label: str, largest: float) -> list[Figure]:
    """Figures with a panel for each layer, and one scale of shades for all."""
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
    """[R, C] as means over group x group of them, which are fewer at the ends."""
    return torch.nn.functional.avg_pool2d(blocks.float()[None], group, ceil_mode=True)[0]


def _shortened(name: str) -> str:
    name = name or "the model"
    return name if len(name) <= 40 else f"…{name[-39:]}"


def _listed(label: str) -> str:
    """As legends list it, which leave out what begins with an underscore, such as compiled models."""
    return f" {label}" if label.startswith("_") else label


def _as_plain_text(legend: Legend) -> None:
    """Dollar signs in labels are no formulas."""
    for text in legend.get_texts():
        text.set_parse_math(False)


# Curves.


def _curves(steps: Sequence[int], layers: Mapping[str, Tensor]) -> Figure:
    from .figure import ShownFigure

    figure = ShownFigure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    curves = {name: _fractions(history) for name, history in layers.items()}
    mean = [torch.stack(of_layers).mean(0) for of_layers in zip(*curves.values(), strict=True)]
    is_few = len(layers) <= FEW
    for number, (name, own) in enumerate(curves.items()):
        colour = COLOURS[number] if is_few else GREY
        label = _listed(_shortened(name)) if is_few else ""
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
    _as_plain_text(figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small"))
    return figure


def _fractions(history: Tensor) -> list[Tensor]:
    """Of [T, R, C]: kept [T], ever kept [T], new [T - 1] and remaining of the first [T]."""
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
