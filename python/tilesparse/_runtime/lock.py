"""The lock under which patterns are derived, updated and, on CUDA devices, launched with."""

import os
from contextlib import AbstractContextManager
from threading import RLock

# Held while something is derived from a pattern or its tensors are written to here, and, on CUDA devices,
# from the resolution of a kernel's operands until its launch. So a thread sees the pattern from before an
# update or from after it. Finalizers, which may run anywhere, do not take it.
_lock = RLock()


def exclusive() -> AbstractContextManager[object]:
    """Return the lock that keeps other threads from updating patterns and from reading their tensors."""
    return _lock


def _renew_lock() -> None:
    """Free the lock in a forked process, where the thread that may have held it does not exist."""
    global _lock
    _lock = RLock()


os.register_at_fork(after_in_child=_renew_lock)
