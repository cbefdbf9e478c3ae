"""Kernels that products are asked to run on, or that they prefer."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Lock

from .. import _C
from ..errors import InvalidArgumentError

# What products are to run on: 0 whichever is best; k the kernel k - 1 of ``_C.kernels()`` and no other; -k
# those whose names begin with ``_preferences[k - 1]``, where one of them computes the product. One for the
# process, not for a thread: backward passes run in threads of PyTorch's.
asked_kernel = 0
_asked: dict[object, int] = {}  # all that are in force; the last one counts
_asking = Lock()
_preferences: list[str] = []


@contextmanager
def ask_for(kernel: int) -> Iterator[None]:
    """Within it products run on what the number stands for.

    Of several the last one that was entered counts, whichever is left first: threads do not wait for others.
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
    """Within it every product runs on the named kernel of ``_C.kernels()``, or raises."""
    names = [kernel.name for kernel in known_kernels()]
    if name not in names:
        raise InvalidArgumentError(f"name: one of {names} expected, got {name!r}")
    return ask_for(names.index(name) + 1)


def prefer_kernels(prefix: str) -> AbstractContextManager[None]:
    """Within it products run on kernels whose names begin so, where these compute them."""
    if prefix not in _preferences:
        _preferences.append(prefix)
    return ask_for(-1 - _preferences.index(prefix))


def preference() -> str:
    """What kernels' names are to begin with, or nothing."""
    return preferred(asked_kernel)


def preferred(kernel: int) -> str:
    return _preferences[-1 - kernel] if kernel < 0 else ""


@cache
def known_kernels() -> list[_C.KernelInfo]:
    return _C.kernels()
