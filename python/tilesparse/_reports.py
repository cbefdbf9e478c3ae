"""Words for users: tables and short lists in reports and warnings, and progress on stderr.

Messages go through the logger "tilesparse", so a program can silence or redirect them. It writes to stderr by
default: long steps say how far they are without being asked.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from tqdm import tqdm

MOST = 8  # groups of names in a warning


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table whose first column is text."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        name.ljust(first) + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]


def without_numbers(name: str) -> str:
    """Return a name as "model.layers.*.mlp", which all layers share."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def listed(names: Iterable[str]) -> str:
    """Join names as "model.layers.*.mlp.up_proj (32), pooler.dense": numbers in names do not count."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name), []).append(name or "the model")
    texts = [own[0] if len(own) == 1 else f"{group} ({len(own)})" for group, own in groups.items()]
    return ", ".join(texts[:MOST] + ["…"] * (len(texts) > MOST))


def empty_of(
    places: tuple[Tensor, Tensor], shape: tuple[int, int], block_shape: tuple[int, int]
) -> tuple[int, int]:
    """Count block rows and columns of a weight without a block at these places; 0 on the meta device."""
    if places[0].is_meta:
        return 0, 0
    rows, columns = (
        int(at.bincount(minlength=size // block).eq(0).sum())
        for at, size, block in zip(places, shape, block_shape, strict=True)
    )
    return rows, columns


def empty_texts(layers: Iterable[Any]) -> list[str]:
    """Describe the layers of a report that have block rows or columns without a block."""
    layers = list(layers)
    kinds = {
        "empty_rows": "empty block rows, whose outputs are the bias alone",
        "empty_columns": "empty block columns, whose inputs nothing reads",
    }
    texts = []
    for attribute, what in kinds.items():
        counts = {layer.name: getattr(layer, attribute) for layer in layers if hasattr(layer, attribute)}
        own = [name for name, count in counts.items() if count]
        if own:
            texts.append(f"{what}: {sum(counts.values())} in {listed(own)}")
    return texts


def warn_user(text: str) -> None:
    """Warn at the line outside of this package that led here."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


SECONDS = 5.0  # between two lines, and before a bar appears

logger = logging.getLogger("tilesparse")


class _Stderr(logging.Handler):
    """Write messages as lines on what is stderr at that moment, above a bar that is shown there."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


logger.addHandler(_Stderr())
logger.setLevel(logging.INFO)
logger.propagate = False  # handlers of the program would write each line again


class Progress:
    """A bar on a terminal, and a message every few seconds elsewhere, so that logs stay readable."""

    def __init__(self, total: int) -> None:
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(total=total, delay=SECONDS, file=sys.stderr) if on_terminal else None
        self._total = total
        self._said = self._began = time.monotonic()

    def show(self, done: int, text: str) -> None:
        """Show that ``done`` of all steps are done, with ``text`` about them."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            if done >= self._total:
                self._bar.close()
        elif time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            logger.info("%d/%d  %s%s", done, self._total, text, self._left(done))

    def _left(self, done: int) -> str:
        """Estimate the time left from the steps of this run; return nothing at the end."""
        if not 0 < done < self._total:
            return ""
        seconds = (time.monotonic() - self._began) * (self._total - done) / done
        return f", about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Round a time for reading: "12 s", "3 min", "2 h 10 min"."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
