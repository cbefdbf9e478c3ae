"""Draws the figures of docs/concepts.md. Needs matplotlib.

python docs/figures/concepts.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from svg import write

from tilesparse import BlockPattern

SHAPE, BLOCK = (128, 192), 32
BLOCKS = [
    (0, 1),
    (0, 4),
    (1, 0),
    (2, 2),
    (2, 3),
    (2, 5),
    (3, 1),
    (3, 5),
]  # by slot; those of docs/concepts.md
MOVED, GOAL = 2, (3, 3)
KEPT, LEFT, ABSENT, MARKED = "#56b4e9", "#f5c98c", "#f2f2f2", "#e69f00"
EDGE = "#606060"


def main() -> None:
    for name, figure in (
        ("concepts-pattern", pattern()),
        ("concepts-slots", slots()),
        ("concepts-storages", storages()),
        ("concepts-plan", plan()),
    ):
        write(figure, name)


def kept() -> BlockPattern:
    return BlockPattern.from_blocks(BLOCKS, shape=SHAPE, block_shape=BLOCK)


def pattern() -> Figure:
    """W in blocks, the values of the kept ones, and the three arrays that say where these lie."""
    figure, panel = drawing(9.6, 3.3)
    matrix(panel, (0, 0), places(kept()))
    label(panel, (3, -0.45), "W [128, 192]: 4 × 6 blocks of 32 × 32, 8 kept")
    values(panel, (8.2, 0), range(len(BLOCKS)), "values [8, 32, 32]: what is stored, by slot")
    rows = (("crow_indices", kept().crow_indices), ("col_indices", kept().col_indices), ("slot", kept().slot))
    for line, (name, array) in enumerate(rows):
        row(panel, (9.5, 1.75 + 0.8 * line), name, [str(number) for number in array.tolist()])
    return finished(figure, panel, (-0.3, 18.6), (-0.8, 4.2))


def slots() -> Figure:
    """A block that moves: its place changes, its slot and its weights stay."""
    figure, panel = drawing(9.6, 2.9)
    before, after = kept(), kept()
    after.move_blocks_([MOVED], [GOAL])
    matrix(panel, (0, 0), places(before), {BLOCKS[MOVED]: MARKED})
    matrix(panel, (8.4, 0), places(after), {BLOCKS[MOVED]: LEFT, GOAL: MARKED})
    label(panel, (3, -0.45), "before")
    label(panel, (11.4, -0.45), f"after move_blocks_([{MOVED}], [{GOAL}])")
    arrow(panel, (6.3, 2), (8.1, 2))
    values(panel, (15.2, 1.5), range(len(BLOCKS)), "values: the same", {MOVED: MARKED}, per_row=4)
    return finished(figure, panel, (-0.3, 19.5), (-0.8, 4.2))


def storages() -> Figure:
    """One row of eight weights of a block, as each storage has it."""
    figure, panel = drawing(9.6, 2.6)
    weights = [0.9, -0.1, 0.2, -0.7, 0.3, 0.8, -0.6, 0.1]
    chosen = [0, 3, 5, 6]
    written = [f"{weight:g}" for weight in weights]
    row(panel, (6.2, 0), "plain", written)
    row(panel, (6.2, 1), "plain, nm=(2, 4)", written, dim=set(range(8)) - set(chosen))
    row(panel, (14.7, 1), "mask", ["1" if place in chosen else "0" for place in range(8)], width=0.5)
    row(panel, (6.2, 2), "compressed", [written[place] for place in chosen])
    row(panel, (14.7, 2), "metadata", ["0 3", "1 2"])
    row(panel, (6.2, 3), "int8", [f"{round(weight / 0.9 * 127)}" for weight in weights])
    row(panel, (14.7, 3), "scale", [".9 / 127"], width=2)
    return finished(figure, panel, (1.5, 19), (-0.3, 3.9))


def plan() -> Figure:
    """Block rows that share columns make a tile, which walks the columns that any of them has."""
    figure, panel = drawing(9.6, 3.3)
    matrix(panel, (0, 0), places(kept()), {place: MARKED for place in BLOCKS if place[0] in (0, 3)})
    label(panel, (3, -0.45), "block rows 0 and 3 share columns")
    arrow(panel, (6.4, 2), (8, 2))
    place = {(row, col): slot for slot, (row, col) in enumerate(BLOCKS)}
    for top, rows in ((0.4, (0, 3)), (2.6, (1, 2))):
        columns = sorted({col for row_, col in BLOCKS if row_ in rows})
        text(panel, (8.3, top + 0.5), f"tile of\nrows {rows[0]}, {rows[1]}", align="left")
        for step, column in enumerate(columns):
            label(panel, (10.9 + 1.2 * step, top - 0.25), f"k {column}")
            for line, row_ in enumerate(rows):
                slot = place.get((row_, column))
                colour = ABSENT if slot is None else MARKED if rows == (0, 3) else KEPT
                cell(
                    panel,
                    (10.4 + 1.2 * step, top + 0.75 * line),
                    "" if slot is None else str(slot),
                    colour,
                    1,
                    0.75,
                )
    label(panel, (13, 4.5), "steps of k: x is loaded once for both rows; empty places are skipped or zeros")
    return finished(figure, panel, (-0.3, 18.6), (-0.8, 4.9))


def drawing(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), facecolor="white")
    return figure, figure.add_axes((0, 0, 1, 1))


def finished(figure: Figure, panel: Axes, x: tuple[float, float], y: tuple[float, float]) -> Figure:
    panel.set(xlim=x, ylim=y[::-1], aspect="equal")
    panel.axis("off")
    return figure


def places(drawn: BlockPattern) -> dict[tuple[int, int], int]:
    """Slots by block row and column."""
    rows, columns = (indices.tolist() for indices in drawn.block_indices())
    return {(rows[slot], columns[slot]): slot for slot in range(drawn.nnz)}


def matrix(
    panel: Axes,
    corner: tuple[float, float],
    slots: Mapping[tuple[int, int], int],
    marked: Mapping[tuple[int, int], str] | None = None,
) -> None:
    for row_ in range(SHAPE[0] // BLOCK):
        for column in range(SHAPE[1] // BLOCK):
            slot = slots.get((row_, column))
            colour = (marked or {}).get((row_, column), ABSENT if slot is None else KEPT)
            cell(panel, (corner[0] + column, corner[1] + row_), "" if slot is None else str(slot), colour)


def values(
    panel: Axes,
    corner: tuple[float, float],
    numbers: Iterable[int],
    title: str,
    marked: Mapping[int, str] | None = None,
    per_row: int = 8,
) -> None:
    for slot in numbers:
        place = corner[0] + slot % per_row, corner[1] + slot // per_row
        cell(panel, place, str(slot), (marked or {}).get(slot, KEPT))
    label(panel, (corner[0] + per_row / 2, corner[1] - 0.45), title)


def row(
    panel: Axes,
    corner: tuple[float, float],
    name: str,
    entries: Sequence[str],
    dim: Iterable[int] = (),
    width: float = 0.9,
) -> None:
    text(panel, (corner[0] - 0.2, corner[1] + 0.3), name, align="right")
    for place, entry in enumerate(entries):
        colour = ABSENT if place in set(dim) else "white"
        cell(panel, (corner[0] + width * place, corner[1]), entry, colour, width, 0.6)


def cell(
    panel: Axes, corner: tuple[float, float], entry: str, colour: str, width: float = 1, height: float = 1
) -> None:
    panel.add_patch(Rectangle(corner, width, height, facecolor=colour, edgecolor=EDGE, linewidth=0.8))
    text(panel, (corner[0] + width / 2, corner[1] + height / 2), entry)


def arrow(panel: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    panel.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": EDGE})


def label(panel: Axes, place: tuple[float, float], words: str) -> None:
    text(panel, place, words)


def text(panel: Axes, place: tuple[float, float], words: str, align: str = "center") -> None:
    panel.text(*place, words, ha=align, va="center", fontsize=9)


if __name__ == "__main__":
    main()
