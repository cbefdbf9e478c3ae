"""Kernels that products are asked to run on, or that they prefer."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Lock

from .. import _C
from ..errors import InvalidArgumentError

# The kernel that products run on: 0 the best one; k the kernel k - 1 of ``_C.kernels()`` and no other; -k
# kernels whose names begin with ``_preferences[k - 1]``, where one of them computes the product. One for the
# process, not for a thread: backward passes run in PyTorch's threads.
asked_kernel = 0
_asked: dict[object, int] = {}  # all that are in force; the last one counts
_asking = Lock()
_preferences: list[str] = []


@contextmanager
def ask_for(kernel: int) -> Iterator[None]:
    """Run products in this context on what the number stands for, see above.

    Of several contexts the one entered last counts, whichever is left first: threads do not wait for others.
    """
    global asked_kernel
    own = object()
    with _asking:
        _asked[own] = asked_kernel = kernel
    try:
        yield
    finally:
        with _asking:
            del _asked[own]
            asked_kernel = next(reversed(_asked.values()), 0)


def use_kernel(name: str) -> AbstractContextManager[None]:
    """Run every product in this context on the named kernel of ``_C.kernels()``, or raise."""
    names = [kernel.name for kernel in known_kernels()]
    if name not in names:
        raise InvalidArgumentError(f"name must be one of {names}, got {name!r}")
    return ask_for(names.index(name) + 1)


def prefer_kernels(prefix: str) -> AbstractContextManager[None]:
    """Run products in this context on kernels with this prefix, where one of them computes the product."""
    if prefix not in _preferences:
        _preferences.append(prefix)
    return ask_for(-1 - _preferences.index(prefix))


def preference() -> str:
    """Return the prefix of the kernels that are preferred now; empty if none are."""
    return preferred(asked_kernel)


def preferred(kernel: int) -> str:
    """Return the prefix that a number given to `ask_for` stands for."""
    return _preferences[-1 - kernel] if kernel < 0 else ""


@cache
def known_kernels() -> list[_C.KernelInfo]:
    """List the kernels of the library."""
    return _C.kernels()
