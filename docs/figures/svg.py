"""Write figures of the documentation, equal ones as equal files."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def write(figure: Figure, name: str) -> None:
    """Write one figure beside this file."""
    file = Path(__file__).with_name(f"{name}.svg")
    with matplotlib.rc_context({"svg.hashsalt": "tilesparse"}):
        figure.savefig(file, metadata={"Date": None})
    print(f"wrote {file}, {file.stat().st_size >> 10} KiB")
