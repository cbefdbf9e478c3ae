"""Names of what a model saves, and of the folder it is saved in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from .._runtime.tensor_files import shown
from ..errors import InvalidArgumentError

_OF_MODULES = frozenset(vars(nn.Module()))


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of its own, by their attributes."""
    for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and attribute not in module._non_persistent_buffers_set:
            yield attribute, tensor


def joined(prefix: str, attribute: str) -> str:
    """Join the name of a module and an attribute's."""
    return f"{prefix}.{attribute}" if prefix else attribute


def references(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Modules and tensors in plain attributes of modules, also inside of lists and mappings, by their names.

    Of a module that the model does not have otherwise, all modules and tensors.
    """
    modules = set(model.modules())
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OF_MODULES:
                yield from _inside(joined(name, attribute), value, modules, set())


def _inside(
    name: str, value: object, modules: set[nn.Module], seen: set[int]
) -> Iterator[tuple[str, object]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, Tensor | nn.Module):
        yield name, value
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        items = enumerate(value)
    elif isinstance(value, nn.Module) and value not in modules:
        for own, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{own}", tensor
        for own, module in value.named_modules(prefix=name):
            yield own, module
    for key, item in items:
        yield from _inside(f"{name}[{key!r}]", item, modules, seen)


def checked_folder(path: object) -> Path:
    """What is given as the path of a checkpoint, which may be missing yet."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"path must be the path of a folder, got {shown(path)}")
    folder = Path(path)
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise InvalidArgumentError(
                f"path must be the path of a folder, got {str(folder)!r}, where {str(place)!r} is a file"
            )
    return folder
