"""Arguments that programs have in common."""

from __future__ import annotations

import argparse

from tilesparse._checks import BLOCK_SIZES


def name_list(text: str) -> tuple[str, ...]:
    """The names in an argument like ``a,b``."""
    return tuple(part for part in text.split(",") if part)


def block_list(text: str) -> tuple[tuple[int, int], ...]:
    """The block shapes in an argument like ``64,128x32``."""
    return tuple(_block(part) for part in name_list(text))


def _block(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    allowed = [str(size) for size in BLOCK_SIZES]
    if rows not in allowed or (cols or rows) not in allowed:
        raise argparse.ArgumentTypeError(f"{text} is not made of {', '.join(allowed)}")
    return int(rows), int(cols or rows)


def density_list(text: str) -> tuple[float, ...]:
    """The densities in an argument like ``.5,.25``."""
    densities = tuple(float(part) for part in name_list(text))
    for density in densities:
        if not 0 < density <= 1:
            raise argparse.ArgumentTypeError(f"{density} is not above 0 and at most 1")
    return densities


def positive(text: str) -> int:
    """An argument that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
