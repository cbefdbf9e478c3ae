"""Imports: modules of packages once they are asked for, callbacks once optional libraries are imported."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], Any]


def when_imported(name: str, callback: Callback, otherwise: str) -> None:
    """Call ``callback(module)`` once the module of this full name has been imported: now, if it is already.

    Whoever imports the module never sees an error of the callback: a warning says what follows from it, which
    is the clause ``otherwise``.
    """
    module = sys.modules.get(name)
    if module is not None:
        _call(callback, module, otherwise)
        return
    _WATCHED.setdefault(name, []).append((callback, otherwise))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports modules, and names by their modules, once asked."""

    def find(name: str) -> Any:
        if name in modules:
            value = getattr(importlib.import_module(f".{modules[name]}", package), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("_"):
            try:
                return importlib.import_module(f".{name}", package)
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def adapt(owner: Any, name: str, adaptation: Callable[..., Any]) -> None:
    """Have calls of a function of a module or class become ``adaptation(function, *args, **kwargs)``.

    Raises:
        AttributeError: there is none of that name.
    """
    before, function = inspect.getattr_static(owner, name), getattr(owner, name)

    @wraps(function)
    def adapted(*args: Any, **kwargs: Any) -> Any:
        return adaptation(function, *args, **kwargs)

    is_bound = isinstance(before, staticmethod | classmethod)
    setattr(owner, name, staticmethod(adapted) if is_bound else adapted)


class _Finder(MetaPathFinder):
    """Finder of watched modules, which finds the other finders do, and lets their loader call back."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _WATCHED:
            return None
        # importlib, too, skips finders that have none.
        found = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        specs = (find(fullname, path, target) for find in found if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _call_after(spec)
        return spec


def _call_after(spec: ModuleSpec) -> None:
    """Have the loader run what waits for the module.

    The loader stays the same object, since resources and sources are asked of it later, and is as it was once
    the module is there. Some are shared by modules, and some specs are only looked at: hence the name.
    """
    loader: Any = spec.loader

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if module.__name__ == spec.name:
            loader.__dict__.pop("exec_module", None)
            for callback, otherwise in _WATCHED.pop(spec.name, ()):
                # Some modules put another one in their place.
                _call(callback, sys.modules[spec.name], otherwise)

    execute = loader.exec_module
    loader.exec_module = exec_module


def _call(callback: Callback, module: ModuleType, otherwise: str) -> None:
    try:
        callback(module)
    except Exception as error:  # which library and release it is decides what may be missing
        text = f"tilesparse does not know this release of {module.__name__}: {otherwise} ({error})"
        warnings.warn(text, stacklevel=2)


_WATCHED: dict[str, list[tuple[Callback, str]]] = {}
_FINDER = _Finder()
