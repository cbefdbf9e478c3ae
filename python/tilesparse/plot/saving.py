"""Files of figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._arguments import checked
from .._checks import check_writable
from .._files import replacing
from ..errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


@checked
def save(figures: Figure | Sequence[Figure], path: str | os.PathLike[str]) -> list[Path]:
    """Write figures as PNG, SVG or PDF, according to the suffix of the file.

    A PDF has one page per figure. In other formats each of several figures has a file of its own: NAME-1.png,
    NAME-2.png and so on. Equal figures give equal files.

    Args:
        figures: one figure or several.
        path: path of the file; its folder must exist, and an existing file is replaced.

    Returns:
        The files.

    Raises:
        InvalidArgumentError: the suffix is another one, there is no figure, or writing fails.
        UnsupportedError: matplotlib is missing.
    """
    check_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    pages = list(figures) if isinstance(figures, Sequence) else [figures]
    path = check_file(path)
    if not pages:
        raise InvalidArgumentError("figures must be at least one, got none")
    for page in pages:
        if not isinstance(page, Figure):
            raise InvalidArgumentError(f"figures must be figures of matplotlib, got {type(page).__name__}")
    files = [path]
    if len(pages) > 1 and path.suffix != ".pdf":
        files = [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, len(pages) + 1)]
    try:
        if path.suffix == ".pdf":
            with replacing(path) as file, PdfPages(file, metadata={"CreationDate": None}) as document:
                for page in pages:
                    page.savefig(document, format="pdf")
        else:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            with matplotlib.rc_context({"svg.hashsalt": "tilesparse"}):
                for file, page in zip(files, pages, strict=True):
                    with replacing(file) as partial:
                        page.savefig(partial, format=path.suffix[1:], dpi=150, metadata=metadata)
    except OSError as error:
        raise InvalidArgumentError(f"path: {str(path)!r} cannot be written: {error}") from error
    return files


def check_file(path: str | os.PathLike[str]) -> Path:
    """Return a path that `save` can write to."""
    checked = Path(path)
    if checked.suffix not in FORMATS:
        raise InvalidArgumentError(f"path must end in {', '.join(FORMATS)}, got {str(path)!r}")
    if not checked.parent.is_dir():
        raise InvalidArgumentError(f"path must be in a folder that exists, got {str(checked.parent)!r}")
    if checked.is_dir():
        raise InvalidArgumentError(f"path must be a file, got the folder {str(path)!r}")
    check_writable("path", checked)
    return checked


def check_matplotlib() -> None:
    """Refuse to draw without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("plot needs matplotlib: pip install matplotlib") from error
