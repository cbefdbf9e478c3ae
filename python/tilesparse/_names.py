"""Names of modules, and the names and regular expressions by which users choose them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ._arguments import shown
from .errors import InvalidArgumentError

# A name has no character of regular expressions but dots, which separate its components.
_COMPONENT = r"[^.^$*+?{}()|\[\]\\]+"
_NAME = re.compile(rf"{_COMPONENT}(\.{_COMPONENT})*")


@dataclass(frozen=True)
class NamePattern:
    r"""A name or a regular expression that stands for modules of a model.

    A name stands for the modules whose last components equal it, and for everything inside them: "mlp.up"
    matches "layers.0.mlp.up" and "layers.0.mlp.up.base", "l1" does not match "l10". A text with special
    characters of regular expressions other than dots, such as r"layers\.\d+", is matched against the start of
    names (`re.match`). With `fullmatch` both have to match the whole name.
    """

    text: str
    match: Callable[[str], object]

    @classmethod
    def parse(cls, text: str, *, fullmatch: bool = False, argument: str = "regex") -> NamePattern:
        """Return the pattern that a text means.

        Raises:
            InvalidArgumentError: `text`, which is that `argument` of the caller, is no regular expression.
        """
        try:
            compiled, is_name = re.compile(text), _NAME.fullmatch(text)
        except (re.error, TypeError) as error:
            raise InvalidArgumentError(
                f"{argument} must be a name or a regular expression, got {shown(text)}: {error}"
            ) from error
        if is_name:
            inside = "" if fullmatch else r"(.*\.)?", "" if fullmatch else r"(\..*)?"
            return cls(text, re.compile(re.escape(text).join(inside)).fullmatch)
        return cls(text, compiled.fullmatch if fullmatch else compiled.match)

    def matches(self, names: Iterable[str]) -> bool:
        """Return True if the pattern matches one of a module's names."""
        return any(self.match(name) for name in names)

    def spells(self, names: Iterable[str]) -> bool:
        """Return True if the last component of a name is written out, rather than met by a wildcard."""
        text = re.sub(r"\\[A-Za-z]", " ", self.text)
        return any(re.search(rf"(?<!\w){re.escape(name.rpartition('.')[2])}(?!\w)", text) for name in names)
