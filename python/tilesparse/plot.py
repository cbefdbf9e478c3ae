"""Figures of block-sparse models, for notebooks: kept blocks, and how patterns changed in training.

They need matplotlib (``pip install matplotlib``), which is imported when a figure is drawn. Figures are
`matplotlib.figure.Figure` objects that pyplot does not manage: no figure has to be closed, and
``figure.savefig(path)`` writes one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ._checks import as_integer, shown
from ._files import few
from .errors import InvalidArgumentError, UnsupportedError
from .model.match import NamePattern
from .nn.linear import BlockSparseLinear
from .nn.weight import dense_blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["evolution", "patterns"]

Snapshots: TypeAlias = Sequence[tuple[int, Mapping[str, Tensor]]]  # by step, then by layer: bool [R, C]

PANELS, COLUMNS = 24, 4  # layers in one figure, and beside each other
CELLS = 128  # on a side of a panel; of larger layers a cell is the mean of several blocks
FEW = 7  # layers or labels that have a legend within the panel
# Okabe and Ito's colours, which people who see colours differently can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LEFT = "#f5c98c"  # places that blocks have left
GREY = "#b0b0b0"


class Map(NamedTuple):
    """Data of one layer's map, block by block."""

    name: str
    caption: str
    aspect: float  # height over width of W
    kept: Tensor  # [R, C] bool
    shades: Tensor  # [R, C] float32, zero where no block is kept
    left: Tensor | None = None  # [R, C] bool: kept once, and not now


def patterns(source: nn.Module, *, layers: str | None = None) -> list[Figure]:
    """Draw the kept blocks of each layer, shaded by the root mean square of their weights.

    Shades are relative to the largest of the layer: the darkest block has 1. Beside each map are the kept
    fractions of every block row (right) and block column (above). What 2:4 leaves out inside of a block
    counts as zero. A layer with more than 128 blocks on a side is drawn in cells of several blocks, whose
    shade is the mean over them; its caption says so.

    Args:
        source: a model.
        layers: a name or regular expression that layers match, as in the patcher; None draws all.

    Returns:
        One figure for every 24 layers.

    Raises:
        InvalidArgumentError: there is no block-sparse layer, none matches, or a weight is not finite.
        UnsupportedError: matplotlib is missing, or a weight is sharded.
    """
    _check_matplotlib()
    found = {name: one for name, one in source.named_modules() if isinstance(one, BlockSparseLinear)}
    if not found:
        raise InvalidArgumentError("source must have block-sparse layers, got none")
    maps = [_block_norms(name, found[name]) for name in _chosen(found, layers)]
    return _map_pages(maps, "kept blocks", "root mean square of a block / largest of the layer", 1.0)


def evolution(snapshots: Snapshots, *, layers: str | None = None) -> list[Figure]:
    """Draw how patterns changed in training.

    The first figure has, against the step: the density, and dashed the fraction of all blocks that were ever
    kept; the blocks that each snapshot has and the one before had not, as a fraction of what it keeps; and
    the fraction of the first snapshot's blocks that are still kept. Up to seven layers have a colour each;
    of more all are grey, with their mean. The other figures map the last snapshot, one for every 24 layers:
    the steps for which each block has been kept without a break, and the places that blocks have left. What
    comes and goes between two snapshots is not seen.

    Args:
        snapshots: (step, masks) by ascending steps; masks are those of `tilesparse.train.snapshot`: by layer,
            bool [R, C], True for kept blocks.
        layers: a name or regular expression that layers match, as in the patcher; None draws all.

    Raises:
        InvalidArgumentError: there are fewer than two snapshots, they do not fit, or no layer matches.
        UnsupportedError: matplotlib is missing.
    """
    _check_matplotlib()
    steps, all_layers = _histories(snapshots)
    drawn = {name: all_layers[name] for name in _chosen(all_layers, layers)}
    maps = [_ages(name, steps, history) for name, history in drawn.items()]
    pages = _map_pages(
        maps, f"age of blocks at step {steps[-1]}", "steps since a block has been kept", steps[-1] - steps[0]
    )
    return [_draw_history(steps, drawn), *pages]


def _chosen(names: Iterable[str], layers: str | None) -> list[str]:
    """Return the names that a name or regular expression matches, in their order."""
    names = list(names)
    if layers is None:
        return names
    pattern = NamePattern.parse(layers, argument="layers")
    found = [name for name in names if pattern.match(name)]
    if not found:
        raise InvalidArgumentError(f"layers: {layers!r} matches none of {few(names)}")
    return found


def _block_norms(name: str, layer: BlockSparseLinear) -> Map:
    """Map the root mean square of each block's weights, relative to the largest."""
    if layer.weight.is_meta:
        raise InvalidArgumentError(f"source must have weights, but those of {name!r} are on the meta device")
    pattern, values = layer.pattern, dense_blocks(layer)
    dtype = torch.promote_types(values.dtype, torch.float32)
    norms = torch.linalg.vector_norm(values, dim=(-2, -1), dtype=dtype)
    if not bool(norms.isfinite().all()):
        raise InvalidArgumentError(f"source must have finite weights, but some of {name!r} are not")
    shades = torch.zeros(pattern.grid, device="cpu")
    if pattern.nnz:
        rows, cols = (index.cpu() for index in pattern.block_indices())
        shades[rows, cols] = (norms / norms.max().clamp(min=torch.finfo(dtype).tiny)).float().cpu()
    (out_features, in_features), (bn, bk) = pattern.shape, pattern.block_shape
    caption = f"{out_features} x {in_features} in {bn} x {bk}, density {pattern.density:.3g}"
    return Map(name, caption, out_features / in_features, pattern.to_block_mask().cpu(), shades)


def _histories(snapshots: Snapshots) -> tuple[list[int], dict[str, Tensor]]:
    """Return the steps, and the masks of each layer as one bool tensor [T, R, C] on the host."""
    try:
        steps, first = [as_integer(step) for step, _ in snapshots], snapshots[0][1]
        every = [[masks[name].detach().cpu() for _, masks in snapshots] for name in first]
        stacks = dict(zip(first, map(torch.stack, every), strict=True))
        alike = all(masks.keys() == first.keys() for _, masks in snapshots)
        are_masks = all(stack.dim() == 3 and stack.dtype == torch.bool for stack in stacks.values())
        fits = len(steps) > 1 and alike and are_masks and all(before < now for before, now in pairwise(steps))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        fits = False
    if not fits or not stacks:
        raise InvalidArgumentError(
            "snapshots must be two or more (step, masks) by ascending steps, with a bool mask [R, C] of each "
            f"of the same layers, got {shown(snapshots)}"
        )
    return steps, stacks


def _ages(name: str, steps: Sequence[int], history: Tensor) -> Map:
    """Map for how many steps each block of the last snapshot has been kept, and the blocks that left."""
    kept = history[-1]
    # The snapshots, from the last one back, in which a block has been kept without a break.
    unbroken = history.flip(0).long().cumprod(0).sum(0)
    since = torch.tensor(steps, device="cpu")[(len(steps) - unbroken).clamp(max=len(steps) - 1)]
    shades = torch.where(kept, (steps[-1] - since).float(), 0.0)
    rows, cols = kept.shape
    caption = f"{rows} x {cols} blocks, density {kept.float().mean().item():.3g}"
    return Map(name, caption, rows / cols, kept, shades, left=history.any(0) & ~kept)


def _map_pages(maps: Sequence[Map], title: str, label: str, largest: float) -> list[Figure]:
    """Draw a panel for each layer, with one scale of shades for all."""
    return [
        _page(maps[start : start + PANELS], title, label, largest) for start in range(0, len(maps), PANELS)
    ]


def _page(maps: Sequence[Map], title: str, label: str, largest: float) -> Figure:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.patches import Patch

    columns = min(COLUMNS, len(maps))
    rows = math.ceil(len(maps) / columns)
    figure = _new_figure(figsize=(max(2.5 * columns, 4.8), 2.6 * rows + 1.2), layout="constrained")
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


def _draw_history(steps: Sequence[int], layers: Mapping[str, Tensor]) -> Figure:
    """Draw the density, the new and the remaining blocks of layers [T, R, C] against the step."""
    figure = _new_figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    curves = {name: _fractions(history) for name, history in layers.items()}
    mean = [torch.stack(of_layers).mean(0) for of_layers in zip(*curves.values(), strict=True)]
    is_few = len(layers) <= FEW
    for number, (name, own) in enumerate(curves.items()):
        colour = COLOURS[number] if is_few else GREY
        label = _legend_label(_shortened(name)) if is_few else ""
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
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    for text in legend.get_texts():  # a dollar sign is no formula
        text.set_parse_math(False)
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


def _legend_label(label: str) -> str:
    """Return a label for a legend, which would leave out one that begins with an underscore."""
    return f" {label}" if label.startswith("_") else label


def _new_figure(**options: Any) -> Figure:
    """Return a figure that notebooks show, also those that do not import pyplot."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            stream = io.BytesIO()
            self.savefig(stream, format="png", bbox_inches="tight")
            return stream.getvalue()

    return ShownFigure(**options)


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("plot needs matplotlib: pip install matplotlib") from error
