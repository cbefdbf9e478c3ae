"""Registration with libraries that are optional: done once they are imported, and never importing them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Calls ``callback(module)`` once the module of this full name has been imported: now, if it is already.

    What the callback raises goes to whoever imports the module, so it should raise for nothing but mistakes.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    _WATCHED.setdefault(name, []).append(callback)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    """Finds watched modules as the other finders do, and lets their loader call back."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _WATCHED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _call_after(spec)
        return spec


def _call_after(spec: ModuleSpec) -> None:
    """Lets the loader run what waits for the module.

    The loader stays the same object, since resources and sources are asked of it later, and is as it was once
    the module is there. Some are shared by modules, and some specs are only looked at: hence the name.
    """
    loader = spec.loader
    assert loader is not None
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if module.__name__ == spec.name:
            loader.__dict__.pop("exec_module", None)
            for callback in _WATCHED.pop(spec.name, ()):
                callback(sys.modules[spec.name])  # some modules put another one in their place

    loader.exec_module = exec_module  # type: ignore[method-assign]


_WATCHED: dict[str, list[Callback]] = {}
_FINDER = _Finder()
