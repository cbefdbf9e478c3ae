"""Rules of the user: which layers become block-sparse, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .._arguments import shown
from .._names import NamePattern, parsed
from ..config import BlockSparseConfig, check_flag
from ..errors import InvalidArgumentError
from ..pattern.block_pattern import BlockPattern
from ..pattern.choosing import check_parts_beside


@dataclass(frozen=True)
class LayerOptions:
    """How the layers of a rule become block-sparse.

    Attributes:
        config: how they are stored.
        pattern: the blocks to keep, whose density and block shape `config` has; None chooses blocks.
        parts: (r, c), the parts of block rows and columns that keep equally many of the chosen blocks.
        pseudo_linear: use `PseudoBlockSparseLinear`.
        untie: replace layers that share a parameter with another module, too.

    Raises:
        InvalidArgumentError: a value is not allowed, or does not fit the others.
    """

    config: BlockSparseConfig = field(default_factory=BlockSparseConfig)
    pattern: BlockPattern | None = None
    parts: tuple[int, int] = (1, 1)
    pseudo_linear: bool = False
    untie: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, BlockPattern | None):
            raise InvalidArgumentError(f"pattern must be a BlockPattern, got {type(self.pattern).__name__}")
        object.__setattr__(self, "parts", check_parts_beside(self.pattern, self.parts))
        for name in ("pseudo_linear", "untie"):
            check_flag(name, getattr(self, name))

    @classmethod
    def parse(cls, options: Mapping[str, Any] | BlockSparseConfig | None) -> LayerOptions:
        """Return the options of a user's mapping or config, with defaults for what it leaves out."""
        if isinstance(options, BlockSparseConfig):
            return cls(options)
        own = {} if options is None else dict(options)
        unknown = sorted(map(str, own.keys() - DEFAULT_OPTIONS.keys()))
        if unknown:
            raise InvalidArgumentError(f"options must be from {sorted(DEFAULT_OPTIONS)}, got {unknown}")
        stored = {name: own.pop(name) for name in _STORED if name in own}
        pattern = own.get("pattern")
        if isinstance(pattern, BlockPattern):
            ranked = ("density", "block_shape")  # checked, although the pattern has its own
            BlockSparseConfig(**{name: stored[name] for name in ranked if name in stored})
            stored |= {name: getattr(pattern, name) for name in ranked}
        return cls(BlockSparseConfig(**stored), **own)

    def to_mapping(self) -> dict[str, Any]:
        """Return the mapping of the public methods, with a value for every option."""
        own = {name: getattr(self.config, name) for name in _STORED}
        return own | {one.name: getattr(self, one.name) for one in fields(self) if one.name != "config"}


_STORED = [one.name for one in fields(BlockSparseConfig)]
DEFAULT_OPTIONS: Mapping[str, Any] = LayerOptions().to_mapping()


@dataclass(frozen=True)
class Rule:
    """The layers that a pattern of names matches, and what becomes of them; None leaves them as they are."""

    layers: NamePattern
    options: LayerOptions | None


def rules_of(
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None], layers: str | Sequence[str] | None
) -> list[Rule]:
    """Return the rules that two arguments mean: a config and its layers, or a config by names of layers.

    Raises:
        InvalidArgumentError: both name layers, a mapping names none, or a text is no regular expression.
    """
    if isinstance(config, BlockSparseConfig):
        patterns = parsed("layers", ".*" if layers is None else layers)
        return [Rule(pattern, LayerOptions(config)) for pattern in patterns]
    if layers is not None:
        raise InvalidArgumentError(
            f"layers must be None beside a mapping in config, which names the layers, got {shown(layers)}"
        )
    if not config:
        raise InvalidArgumentError("config must have a config for a name or regular expression, got {}")
    return [
        Rule(NamePattern.parse(name, argument="config"), None if own is None else LayerOptions(own))
        for name, own in config.items()
    ]
