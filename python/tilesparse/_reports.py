"""Text of reports and warnings: tables, and names of many modules in few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST = 8  # groups of names in a warning


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table, whose first column is text."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        name.ljust(first) + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]


def without_numbers(name: str) -> str:
    """A name as "model.layers.*.mlp", which it has in common with those of other layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def listed(names: Iterable[str]) -> str:
    """Names as "model.layers.*.mlp.up_proj (32), pooler.dense, …": those that differ in numbers are one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name), []).append(name or "the model")
    texts = [own[0] if len(own) == 1 else f"{group} ({len(own)})" for group, own in groups.items()]
    return ", ".join(texts[:MOST] + ["…"] * (len(texts) > MOST))
