"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a file to write to that takes the place of ``path`` once it is complete, or is removed.

    Its name is unique, so that processes and threads which write to one path do not meet: the last one wins.
    A link stays a link. What is no regular file, such as a pipe, is yielded itself.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    if target.exists() and not os.access(target, os.W_OK):  # which a rename would not ask about
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    # Not of tempfile, whose files nobody else may read.
    temporary = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
