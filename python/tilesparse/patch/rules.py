"""Patterns of the user: the names that they match, and their options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from .._checks import check_block_shape, check_policy
from ..config import check_nm, check_nm_blocks, check_storage
from ..errors import InvalidArgumentError
from ..pattern.block_pattern import BlockPattern
from ..pattern.choosing import check_parts_beside

DEFAULT_OPTIONS: Mapping[str, Any] = {
    "density": 0.5,
    "block_shape": (32, 32),
    "pattern": None,
    "parts": (1, 1),
    "policy": "sparse",
    "nm": None,
    "transposable": False,
    "storage": "plain",
    "pseudo_linear": False,
    "untie": False,
}


@dataclass(frozen=True)
class Rule:
    """One pattern of the user, with a value for every option."""

    regex: re.Pattern[str]
    fullmatch: bool
    options: dict[str, Any]

    def matches(self, names: Iterable[str]) -> bool:
        """Return True if the pattern matches one of a module's names."""
        match = self.regex.fullmatch if self.fullmatch else self.regex.match
        return any(match(name) for name in names)

    def spells(self, names: Iterable[str]) -> bool:
        """Whether the last part of a name is written out, rather than met by a wildcard."""
        text = re.sub(r"\\[A-Za-z]", " ", self.regex.pattern)
        return any(re.search(rf"(?<!\w){re.escape(name.rpartition('.')[2])}(?!\w)", text) for name in names)


def compiled_pattern(regex: str) -> re.Pattern[str]:
    """Compile a regular expression, or raise InvalidArgumentError."""
    try:
        return re.compile(regex)
    except (re.error, TypeError) as error:
        raise InvalidArgumentError(f"regex: a regular expression expected, got {regex!r}: {error}") from error


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with a value for every option, or raise InvalidArgumentError."""
    if not isinstance(options, Mapping):
        raise InvalidArgumentError(
            f"options: a mapping such as {{'density': 0.25}} expected, got {options!r}"
        )
    unknown = sorted(set(options) - set(DEFAULT_OPTIONS))
    if unknown:
        raise InvalidArgumentError(f"options: names from {sorted(DEFAULT_OPTIONS)} expected, got {unknown}")
    checked = {**DEFAULT_OPTIONS, **options}
    density, block_shape = checked["density"], checked["block_shape"]
    if not isinstance(density, Real) or not 0 <= float(density) <= 1:
        raise InvalidArgumentError(f"density: a number from 0 to 1 expected, got {density!r}")
    checked["block_shape"] = check_block_shape(block_shape)
    if not isinstance(checked["pattern"], BlockPattern | None):
        raise InvalidArgumentError(
            f"pattern: a BlockPattern expected, got {type(checked['pattern']).__name__}"
        )
    checked["parts"] = check_parts_beside(checked["pattern"], checked["parts"])
    check_policy(checked["policy"])
    for name in ("transposable", "pseudo_linear", "untie"):
        if not isinstance(checked[name], bool):
            raise InvalidArgumentError(f"{name}: True or False expected, got {checked[name]!r}")
    _check_storage_options(checked)
    return checked


def _check_storage_options(options: Mapping[str, Any]) -> None:
    nm, transposable, pattern = options["nm"], options["transposable"], options["pattern"]
    check_nm(nm, transposable)
    check_storage(options["storage"], nm)
    check_nm_blocks(nm, transposable, options["block_shape"] if pattern is None else pattern.block_shape)
