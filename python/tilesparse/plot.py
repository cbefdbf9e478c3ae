"""Pictures of the blocks that a model keeps; they need matplotlib (``pip install matplotlib``)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import InvalidArgumentError, UnsupportedError
from .model.match import NamePattern
from .nn.linear import BlockSparseLinear
from .nn.weight import dense_blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["patterns"]

PANELS, COLUMNS = 24, 4  # layers in one figure, and beside each other
CELLS = 128  # on a side of a panel; of larger layers a cell is the mean of several blocks


class _Map(NamedTuple):
    """One layer's map, block by block: [R, C] floats, of shades and of what is kept."""

    caption: str
    aspect: float  # height over width of W
    kept: Tensor
    shades: Tensor


def patterns(source: nn.Module, *, layers: str | None = None) -> list[Figure]:
    """Draw the kept blocks of each layer, shaded by the root mean square of their weights.

    Shades are relative to the largest of the layer: the darkest block has 1. Beside each map are the kept
    fractions of every block row (right) and block column (above). A layer with more than 128 blocks on a side
    is drawn in cells of several blocks, whose shade is the mean over them; its caption says so.

    Args:
        source: a model.
        layers: a name or regular expression that layers match; None draws all.

    Returns:
        One figure for every 24 layers, which pyplot does not manage.

    Raises:
        InvalidArgumentError: no block-sparse layer matches, or a weight is not finite.
        UnsupportedError: matplotlib is missing, or a weight is sharded.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("plot needs matplotlib: pip install matplotlib") from error
    pattern = NamePattern.parse(layers or ".*", argument="layers")
    maps = [
        _map_of(name, layer)
        for name, layer in source.named_modules()
        if isinstance(layer, BlockSparseLinear) and pattern.match(name)
    ]
    if not maps:
        raise InvalidArgumentError(f"source must have block-sparse layers that match {layers!r}, got none")
    return [_page(maps[start : start + PANELS]) for start in range(0, len(maps), PANELS)]


def _map_of(name: str, layer: BlockSparseLinear) -> _Map:
    pattern, values = layer.pattern, dense_blocks(layer)
    norms = torch.linalg.vector_norm(values.double(), dim=(-2, -1))
    if norms.is_meta or not bool(norms.isfinite().all()):
        raise InvalidArgumentError(f"source must have finite weights, but some of {name!r} are not")
    shades = torch.zeros(pattern.grid, device="cpu")
    if pattern.nnz:
        rows, columns = (index.cpu() for index in pattern.block_indices())
        shades[rows, columns] = (norms / norms.max().clamp(min=1e-300)).float().cpu()
    (out_features, in_features), (bn, bk) = pattern.shape, pattern.block_shape
    name = name if len(name) <= 40 else f"…{name[-39:]}"
    form = f"{out_features} x {in_features} in {bn} x {bk}, density {pattern.density:.3g}"
    caption = f"{name or 'the model'}\n{form}"
    return _Map(caption, out_features / in_features, pattern.to_block_mask().cpu().float(), shades)


def _page(maps: Sequence[_Map]) -> Figure:
    """Draw a panel for each layer, with one scale of shades for all."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:  # for notebooks, also those that do not import pyplot
            stream = io.BytesIO()
            self.savefig(stream, format="png", bbox_inches="tight")
            return stream.getvalue()

    columns = min(COLUMNS, len(maps))
    rows = math.ceil(len(maps) / columns)
    figure = ShownFigure(figsize=(max(2.5 * columns, 4.8), 2.6 * rows + 1.2), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flatten())
    # No shade is so light that a kept block looks absent.
    colours = LinearSegmentedColormap.from_list("kept", ["#b9d7ea", "#0072b2", "#08264a"])
    shades = ScalarMappable(Normalize(0, 1), colours)
    for panel, drawn in zip(panels, maps, strict=False):
        _draw(panel, drawn, shades)
    for panel in panels[len(maps) :]:
        panel.remove()
    figure.suptitle("kept blocks (rows: outputs, columns: inputs)", fontsize="medium")
    label = "root mean square of a block / largest of the layer"
    figure.colorbar(shades, ax=panels[: len(maps)], label=label, location="bottom", aspect=50, shrink=0.7)
    return figure


def _draw(panel: Axes, drawn: _Map, shades: Any) -> None:
    blocks = drawn.kept.shape
    group = math.ceil(max(blocks) / CELLS)
    kept, values = (
        nn.functional.avg_pool2d(each[None], group, ceil_mode=True)[0] for each in (drawn.kept, drawn.shades)
    )
    # Absent blocks are NaN, which is not drawn. "none" keeps one pixel for each cell in vector formats.
    image = torch.where(kept > 0, values, torch.nan).numpy()
    extent = (0, group * kept.shape[1], group * kept.shape[0], 0)
    panel.imshow(image, shades.cmap, shades.norm, extent=extent, interpolation="none")
    cell = "" if group == 1 else f"\na cell: {group} x {group} blocks"
    panel.set_title(drawn.caption + cell, fontsize="x-small", pad=4, parse_math=False)
    panel.set(xticks=[], yticks=[], aspect="auto", xlim=(0, blocks[1]), ylim=(blocks[0], 0), anchor="N")
    panel.set_box_aspect(min(max(drawn.aspect, 0.25), 4.0))
    right = panel.inset_axes((1.02, 0, 0.12, 1), sharey=panel)
    above = panel.inset_axes((0, 1.02, 1, 0.12), sharex=panel)
    margins: Any = (right, 1, "horizontal"), (above, 0, "vertical")
    for margin, side, orientation in margins:
        fractions, edges = drawn.kept.mean(side).numpy(), range(blocks[1 - side] + 1)
        margin.stairs(fractions, edges, orientation=orientation, fill=True, color="#b0b0b0")
        (margin.set_xlim if side else margin.set_ylim)(0, 1)
        margin.set_axis_off()
