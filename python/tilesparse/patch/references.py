"""References to modules and parameters in plain attributes of a model, which registration does not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from .._arguments import shown


class Reference(NamedTuple):
    """A place where a model holds a module or a parameter, and whether `follow` can put another there."""

    place: str
    can_follow: bool


_OF_MODULES = {*vars(nn.Module()), "_compiled_call_impl"}


def references(names: Mapping[nn.Module, list[str]]) -> dict[nn.Module | nn.Parameter, Reference]:
    """Return what attributes, lists, tuples, dicts, sets, partial functions and bound methods hold.

    Args:
        names: `names_of_modules` of the model.
    """
    found: dict[nn.Module | nn.Parameter, Reference] = {}
    seen: set[int] = set()
    for module, aliases in names.items():
        for attribute, value in vars(module).items():
            if attribute not in _OF_MODULES:
                place = f"{aliases[0]}.{attribute}".removeprefix(".")
                for held, reference in _held(value, place, True, seen):
                    if held not in found or not reference.can_follow:
                        found[held] = reference
    return found


def follow(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put other modules in the place of some wherever attributes, lists, tuples and dicts hold these."""
    seen: set[int] = set()
    for module in model.modules():
        own = vars(module)
        for attribute in own.keys() - _OF_MODULES:
            own[attribute] = _followed(own[attribute], new, seen)


def _held(
    value: Any, place: str, can_follow: bool, seen: set[int]
) -> Iterator[tuple[nn.Module | nn.Parameter, Reference]]:
    if isinstance(value, nn.Module | nn.Parameter):
        yield value, Reference(place, can_follow and isinstance(value, nn.Module))
        return
    parts: list[tuple[Any, str, bool]] = []
    if isinstance(value, list | tuple):
        parts = [(part, f"{place}[{number}]", can_follow) for number, part in enumerate(value)]
    elif isinstance(value, dict):
        parts = [(part, f"{place}[{shown(key)}]", can_follow) for key, part in value.items()]
        parts += [(key, f"a key of {place}", False) for key in value]
    elif isinstance(value, set | frozenset):
        parts = [(part, place, False) for part in value]
    elif isinstance(value, partial):
        parts = [(part, place, False) for part in (value.func, value.args, value.keywords)]
    elif isinstance(value, MethodType):
        parts = [(value.__self__, place, False)]
    if parts and id(value) not in seen:
        seen.add(id(value))
        for part in parts:
            yield from _held(*part, seen)


def _followed(value: Any, new: Mapping[nn.Module, nn.Module], seen: set[int]) -> Any:
    """Return what takes the place of a value: itself, changed in place, unless it is a module or a tuple."""
    if isinstance(value, nn.Module):
        return new.get(value, value)
    if isinstance(value, tuple):
        parts = [_followed(part, new, seen) for part in value]
        if all(part is old for part, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list | dict) and id(value) not in seen:
        seen.add(id(value))
        for place, part in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
            other = _followed(part, new, seen)
            if other is not part:
                value[place] = other
    return value
