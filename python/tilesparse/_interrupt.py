"""Ctrl-C in the commands: one line and status 130, even while PyTorch is being imported.

Nothing is imported here that takes time, so the line is printed rather than logged.
"""

import os
import sys
from types import TracebackType

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
