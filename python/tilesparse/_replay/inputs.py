"""Layers that are called with one tensor, found by running them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._runtime.private import version


class Input(NamedTuple):
    """A tensor as a layer was called with it: kept alive, so that no other one has its identity."""

    tensor: Tensor
    written: int
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> Input:
        """Return a tensor as it is now."""
        return cls(tensor, version(tensor), tensor.data_ptr())

    @property
    def key(self) -> tuple[int, int, int]:
        """What only the same tensor has, as long as nothing has written to it."""
        return id(self.tensor), self.written, self.address


@contextmanager
def recording(
    children: Mapping[nn.Module, Iterable[str]],
) -> Iterator[dict[nn.Module, dict[str, list[object]]]]:
    """Record with what modules call their children.

    Args:
        children: names of children, by the module that has them.

    Yields:
        Of each module and each child an entry for every call of the module: equal for children that it called
        once, with the same tensor as their only argument; None for a child that it did not call. Children
        are in the order of their first calls; one that was called in any other way is left out.
    """
    found: dict[nn.Module, dict[str, list[object]]] = {}
    handles = []
    for module, names in children.items():
        record = _Record(list(names))
        found[module] = record.entries
        handles += record.watch(module)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class _Record:
    """The calls of a module under way, and what each of its children was called with in all of them."""

    def __init__(self, names: list[str]) -> None:
        self.entries: dict[str, list[object]] = {name: [] for name in names}
        self._calls: list[dict[str, Input]] = []
        self._number = 0

    def watch(self, module: nn.Module) -> list[Any]:
        """Return the handles of hooks of a module and its children."""
        handles = [
            module.register_forward_pre_hook(lambda *_: self._calls.append({}), prepend=True),
            module.register_forward_hook(lambda *_: self._end(), always_call=True),
        ]
        for name in self.entries:
            child = module.get_submodule(name)
            hook = child.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self._note(name, args, kwargs), with_kwargs=True
            )
            handles.append(hook)
        return handles

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in self.entries and not any(self.entries[name]):
            self.entries[name] = self.entries.pop(name)  # in the order of first calls
        alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if alone and self._calls and name not in self._calls[-1]:
            self._calls[-1][name] = Input.of(args[0])
        else:
            self.entries.pop(name, None)

    def _end(self) -> None:
        call = self._calls.pop()
        self._number += 1
        for name, entries in self.entries.items():
            entries.append((self._number, call[name].key) if name in call else None)
