"""Texts of reports and warnings: tables, and short lists of many modules' names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

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
