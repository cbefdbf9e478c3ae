"""Check that Python files, native module and library have one version; imported before all other modules."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import TracebackType

VERSION = "0.1.0"  # of these Python files; that of the library is in tilesparse.h

_AGAIN = "install the package again: pip install --force-reinstall --no-deps tilesparse"
_HERE = Path(__file__).parent

try:
    from . import _C
except ImportError as error:
    if error.name is None:
        raise  # the module's own check, which says what to do
    raise ImportError(
        f"tilesparse: the native module in {_HERE} cannot be loaded: {error}. If it is missing, the source "
        "tree comes before the installed package: leave that folder. If a symbol is, another libtilesparse "
        f"comes before the package's own: see LD_LIBRARY_PATH. Otherwise {_AGAIN}"
    ) from error


def check_version() -> None:
    """Raise ImportError if the native module is older or newer than these files."""
    if _C.version() != VERSION:
        raise ImportError(
            f"tilesparse: the Python files in {_HERE} are version {VERSION}, and the native module "
            f"{_C.__file__} is {_C.version()}; {_AGAIN}"
        )


def check_copies() -> None:
    """Raise ImportError if this process has imported another copy of the package.

    PyTorch has one namespace for operators. A second library, which has settings of its own, gives a warning.
    """
    torch = sys.modules.get("torch")
    registered = torch is not None and hasattr(torch.ops.tilesparse, "dds_nt")
    if registered or any(type(finder).__module__ == f"{__package__}._hooks" for finder in sys.meta_path):
        raise ImportError(
            f"tilesparse: this process has already imported a copy of the package, and now another one from "
            f"{_HERE}; a process can have one: leave one on sys.path and start it anew"
        )
    libraries = _C.libraries()
    if len(libraries) > 1:
        warnings.warn(
            f"this process has loaded {len(libraries)} copies of the TileSparse library: "
            f"{', '.join(libraries)}; each has settings and measurements of its own: link the program to the "
            "one in the Python package",
            RuntimeWarning,
            stacklevel=3,
        )


check_version()
check_copies()


STATUS = 130  # as shells have it of what SIGINT ends


def say() -> int:
    """Print that the command was interrupted; return its exit status."""
    print("\ninterrupted", file=sys.stderr, flush=True)
    return STATUS


def _is_command() -> bool:
    """Return True if this process is the command, or ``python -m tilesparse``, which has no name yet."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return name == __package__ or (name == "-m" and __package__ in sys.orig_argv)


def _except_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        os._exit(say())  # Python would send itself the signal once more, and C++ libraries are half loaded
    sys.__excepthook__(kind, error, trace)


if _is_command():
    sys.excepthook = _except_hook
