"""Modules by their names, and the names and regular expressions by which users choose them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from ._arguments import shown
from .errors import InvalidArgumentError

# A name has no character of regular expressions but dots, which separate its components.
_COMPONENT = r"[^.^$*+?{}()|\[\]\\]+"
_NAME = re.compile(rf"{_COMPONENT}(\.{_COMPONENT})*")

Module = TypeVar("Module", bound=Hashable)


@dataclass(frozen=True)
class NamePattern:
    r"""A name or a regular expression that stands for modules of a model.

    A name stands for the modules whose last components equal it, and for everything inside them: "mlp.up"
    matches "layers.0.mlp.up" and "layers.0.mlp.up.base", "l1" does not match "l10". A text with special
    characters of regular expressions other than dots, such as r"layers\.\d+", is matched against the start of
    names (`re.match`). With `fullmatch` both have to match the whole name. In a model that has a module of
    that very name, a name stands for this module alone, and for everything inside it: see `matching`.
    """

    text: str
    expression: re.Pattern[str] | None  # None of a name
    fullmatch: bool

    @classmethod
    def parse(cls, text: str, *, fullmatch: bool = False, argument: str = "regex") -> NamePattern:
        """Return the pattern that a text means.

        Raises:
            InvalidArgumentError: `text`, which is that `argument` of the caller, is no regular expression.
        """
        try:
            expression = None if _NAME.fullmatch(text) else re.compile(text)
        except (re.error, TypeError) as error:
            raise InvalidArgumentError(
                f"{argument} must be a name or a regular expression, got {shown(text)}: {error}"
            ) from error
        return cls(text, expression, fullmatch)

    def match(self, name: str) -> bool:
        """Return True if the pattern matches a name, whatever other names there are."""
        if self.expression is not None:
            matched = self.expression.fullmatch if self.fullmatch else self.expression.match
            return matched(name) is not None
        return name == self.text if self.fullmatch else f".{self.text}." in f".{name}."

    def spells(self, names: Iterable[str]) -> bool:
        """Return True if the last component of a name is written out, rather than met by a wildcard."""
        text = re.sub(r"\\[A-Za-z]", " ", self.text)
        return any(
            last in text and re.search(rf"(?<!\w){re.escape(last)}(?!\w)", text)
            for last in (name.rpartition(".")[2] for name in names)
        )


def parsed(argument: str, texts: str | Sequence[str]) -> list[NamePattern]:
    """Return the patterns of an argument that is one name or regular expression, or several."""
    return [
        NamePattern.parse(text, argument=argument) for text in ([texts] if isinstance(texts, str) else texts)
    ]


def matching(
    patterns: Sequence[NamePattern], names: Mapping[Module, Iterable[str]]
) -> dict[Module, list[int]]:
    """Return the places of the patterns that match a module, in ascending order, for all modules of a model.

    Names are looked up rather than tried, so that thousands of them take time in proportion to the modules.

    Args:
        patterns: any.
        names: all names of each module. A pattern that is one of them stands for that module alone.
    """
    known = {name for aliases in names.values() for name in aliases}
    whole: dict[str, list[int]] = {}
    inside: dict[str, list[int]] = {}
    anywhere: dict[str, list[int]] = {}
    expressions = []
    for place, pattern in enumerate(patterns):
        if pattern.expression is not None:
            expressions.append((place, pattern))
            continue
        found = whole if pattern.fullmatch else inside if pattern.text in known else anywhere
        found.setdefault(pattern.text, []).append(place)
    lengths = sorted({text.count(".") + 1 for text in anywhere})
    result: dict[Module, list[int]] = {}
    for module, aliases in names.items():
        own: set[int] = set()
        for name in aliases:
            own.update(whole.get(name, ()))
            own.update(place for place, pattern in expressions if pattern.match(name))
            parts = name.split(".") if inside or anywhere else []
            for stop in range(1, len(parts) + 1) if inside else ():
                own.update(inside.get(".".join(parts[:stop]), ()))
            for length in lengths:
                for start in range(len(parts) - length + 1):
                    own.update(anywhere.get(".".join(parts[start : start + length]), ()))
        result[module] = sorted(own)
    return result


def names_of_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Map each module of a model to all of its names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one with this name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
