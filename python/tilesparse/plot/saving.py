"""Files of figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._arguments import checked
from .._checks import check_writable
from ..errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


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
    check_matplotlib()
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


def check_matplotlib() -> None:
    """Refuse to draw where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("plot: matplotlib is needed; pip install matplotlib") from error
