"""Matching of rules to the modules of a model, and reasons why others stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.nn.utils import parametrize

from .._checks import check_block_shape, check_flag, shown
from ..config import BlockSparseConfig, check_of_experts
from ..errors import InvalidArgumentError, InvalidTypeError
from ..nn.dense import is_conv1d, is_stored_otherwise, reason_not_dense
from ..nn.experts import projections_of, reason_not_known, stacked_parameters
from ..pattern import BlockPattern, check_parts_beside
from .modules import (
    NamePattern,
    Reference,
    Replacement,
    is_linear,
    matching,
    output_embeddings,
    owners_of_parameters,
    parsed,
    reason_from_parents,
    references,
    tie_of,
    what_would_be_lost,
)
from .report import SkippedLayer, by_reason


@dataclass(frozen=True)
class LayerOptions:
    """Options by which the layers of a rule become block-sparse.

    Attributes:
        config: how they are stored.
        pattern: the blocks to keep, whose density and block shape `config` has; None chooses blocks.
        parts: (r, c), the parts of block rows and columns that keep equally many of the chosen blocks.
        reference_layers: use `ReferenceBlockSparseLinear`.
        untie: replace layers that share a parameter with another module, too.
    """

    config: BlockSparseConfig = field(default_factory=BlockSparseConfig)
    pattern: BlockPattern | None = None
    parts: tuple[int, int] = (1, 1)
    reference_layers: bool = False
    untie: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.config, BlockSparseConfig):
            raise InvalidTypeError(f"config must be a BlockSparseConfig, got {shown(self.config)}")
        if not isinstance(self.pattern, BlockPattern | None):
            raise InvalidArgumentError(f"pattern must be a BlockPattern, got {type(self.pattern).__name__}")
        object.__setattr__(self, "parts", check_parts_beside(self.pattern, self.parts))
        for name in ("reference_layers", "untie"):
            check_flag(name, getattr(self, name))

    @classmethod
    def parse(cls, options: Mapping[str, Any] | BlockSparseConfig | None) -> LayerOptions:
        """Return the options of a user's mapping or config, with defaults for what it leaves out."""
        if isinstance(options, BlockSparseConfig):
            return cls(options)
        if options is not None and not isinstance(options, Mapping):
            raise InvalidTypeError(f"options must be a mapping or a BlockSparseConfig, got {shown(options)}")
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
    """Return the rules that two arguments mean: a config and its layers, or a config by names of layers."""
    if isinstance(config, BlockSparseConfig):
        patterns = parsed("layers", ".*" if layers is None else layers)
        return [Rule(pattern, LayerOptions(config)) for pattern in patterns]
    if layers is not None:
        raise InvalidArgumentError(
            f"layers must be None beside a mapping in config, which names the layers, got {shown(layers)}"
        )
    if not isinstance(config, Mapping):
        raise InvalidTypeError(
            f"config must be a BlockSparseConfig or a mapping of them, got {shown(config)}"
        )
    if not config:
        raise InvalidArgumentError("config must have a config for a name or regular expression, got {}")
    return [
        Rule(NamePattern.parse(name, argument="config"), None if own is None else LayerOptions(own))
        for name, own in config.items()
    ]


NOT_LINEAR = "not nn.Linear"
STAYS_DENSE = "its config is None"

Refusal: TypeAlias = Callable[[str, nn.Module], str | None]  # by name: why a module is not replaced, or None


class Match(NamedTuple):
    """A layer to replace, all its names, the options for it, and whether a rule writes its name out."""

    module: nn.Module
    names: list[str]
    options: LayerOptions
    named: bool


def match_modules(
    model: nn.Module,
    names: Mapping[nn.Module, list[str]],
    rules: Sequence[Rule],
    refusal: Refusal,
    *,
    reads: Mapping[nn.Module, str] | None = None,
    spare_outputs: bool = True,
) -> tuple[list[Match], list[SkippedLayer]]:
    """Return the layers that rules replace, and the modules that they match and that stay, with the reason.

    The first rule that matches a layer counts. With `spare_outputs` it leaves output embeddings alone unless
    it writes out the last part of their name. `names` and `reads` are `names_of_modules` and `weight_reads`
    of the model.
    """
    owners = owners_of_parameters(names)
    outputs = output_embeddings(names) if spare_outputs else set()
    held = references(names)
    places = matching([rule.layers for rule in rules], names)
    matched: list[Match] = []
    skipped: list[SkippedLayer] = []
    heard: set[int] = set()  # ids of rules that decide about a layer
    overruled: list[tuple[Rule, Rule]] = []  # each with the one that decides in its place
    for module, aliases in names.items():
        own = [rules[place] for place in places[module]]
        naming = [rule for rule in own if rule.layers.spells(aliases)] if module in outputs else own
        if not own:
            continue
        rule = (naming or own)[0]
        options = rule.options
        reason = _reason_to_skip(model, module, aliases, options, refusal)
        if reason != NOT_LINEAR:
            heard.add(id(rule))
            overruled += [(other, rule) for other in own if other.options != rule.options]
        if reason is None and not naming:
            reason = "output embedding; a pattern that names it patches it"
        if reason is None and options is not None and not options.untie:
            reason = tie_of(module, names, owners) or _reason_from(module.parameters(recurse=False), held)
        if reason is None:
            reason = _reason_from([module], held)
        if reason is None and reads is not None and module in reads:
            reason = f"{reads[module]} reads its weight itself"
        if reason is None and options is not None:
            matched.append(Match(module, aliases, options, rule.layers.spells(aliases)))
        else:
            skipped.append(SkippedLayer(aliases[0], type(module).__name__, reason or STAYS_DENSE))
    for rule, first in overruled:
        if id(rule) not in heard:
            raise InvalidArgumentError(
                f"patterns must each decide about a layer, got {rule.layers.text!r} after "
                f"{first.layers.text!r}, which matches its layers as well, and the first one counts; put "
                f"{rule.layers.text!r} before it"
            )
    return matched, skipped


def _reason_from(
    held: Iterable[nn.Module | nn.Parameter], places: Mapping[nn.Module | nn.Parameter, Reference]
) -> str | None:
    """Say which attribute of the model would go on holding a dense layer or its parameter, or return None."""
    for one in held:
        if one in places and not places[one].can_follow:
            kind = "it" if isinstance(one, nn.Module) else "a parameter of it, which untie=True leaves there,"
            return f"{places[one].place} holds {kind} and cannot be changed to hold the sparse one"
    return None


def check_rules(
    rules: Sequence[Rule],
    names: Mapping[nn.Module, list[str]],
    converted: Container[nn.Module],
    skipped: Iterable[SkippedLayer],
) -> None:
    """Raise InvalidArgumentError for rules by which no layer is block-sparse, and if there are none."""
    if not rules:
        raise InvalidArgumentError("patterns must be added before a model is patched, got none")
    reasons = {layer.name: layer for layer in skipped}
    useful: set[int] = set()  # places of rules
    left: dict[int, list[SkippedLayer]] = {}
    for module, places in matching([rule.layers for rule in rules], names).items():
        layer = reasons.get(names[module][0])
        if module in converted or isinstance(module, Replacement):
            useful.update(places)
        elif layer is not None:
            useful.update(place for place in places if rules[place].options is None)
            for place in places:
                left.setdefault(place, []).append(layer)
    for place, rule in enumerate(rules):
        if place in useful:
            continue
        own = left.get(place, [])
        own = [layer for layer in own if layer.reason != NOT_LINEAR] or own
        why = "; ".join([*by_reason(own)][:3]) or "it matches no name"
        raise InvalidArgumentError(
            f"patterns must each make a layer block-sparse, got {rule.layers.text!r} ({why}); "
            "strict=False goes on without"
        )


def refusal_of(
    names: Mapping[nn.Module, list[str]],
    reason_not: Callable[[nn.Module], str | None],
    exclude: str | Sequence[str] | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> Refusal:
    """Return why modules are not replaced: for a reason of their own, or for what the user leaves out."""
    patterns = [] if exclude is None else parsed("exclude", exclude)
    places = matching(patterns, names) if patterns else {}
    used = {place for own in places.values() for place in own}
    for place, pattern in enumerate(patterns):
        if place not in used:
            raise InvalidArgumentError(f"exclude must match modules of the model, got {pattern.text!r}")

    def refusal(name: str, module: nn.Module) -> str | None:
        reason = reason_not(module)
        if reason is None and places.get(module):
            return f"exclude has {patterns[places[module][0]].text!r}"
        if reason is None and filter_fn is not None and not filter_fn(module, name):
            return "filter_fn refuses it"
        return reason

    return refusal


def reason_not_patchable(module: nn.Module) -> str | None:
    """Say why a module is neither a linear layer nor experts that can be replaced, or return None."""
    return None if projections_of(module) is not None else reason_not_linear(module)


def reason_not_linear(module: nn.Module) -> str | None:
    """Say why a module is no linear layer that can be replaced, or return None."""
    if is_linear(module):
        return None
    if isinstance(module, nn.LazyLinear):
        return "not initialised yet; pass a batch through the model first"
    if isinstance(module, nn.Linear) and parametrize.is_parametrized(module):
        return "parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if isinstance(module, nn.Linear):
        return "a subclass of nn.Linear, which may compute something else; override is_patchable to patch it"
    if projections_of(module) is not None:
        return reason_not_known(module) or "its experts are no linear layers"
    stacked = stacked_parameters(module)
    if stacked:
        return f"it has 3-D {' and '.join(stacked)}, but not the interface of Transformers' experts"
    return NOT_LINEAR


def _reason_to_skip(
    model: nn.Module, module: nn.Module, aliases: list[str], options: LayerOptions | None, refusal: Refusal
) -> str | None:
    if isinstance(module, Replacement):
        return "already block-sparse"
    reason = refusal(aliases[0], module)
    if reason is not None:
        return reason
    if options is None:
        return STAYS_DENSE
    if module is model:
        return "the model itself cannot be replaced in place"
    reason = reason_from_parents(model, aliases) or what_would_be_lost(module)
    if reason is None and is_linear(module):
        reason = _reason_not_sparse(module, options)
    elif reason is None and projections_of(module) is not None:
        reason = _reason_not_sparse_experts(module, options)
    return reason


def _reason_not_sparse(module: Any, options: LayerOptions) -> str | None:
    """Say what keeps a dense layer with these options from becoming a sparse one that is of use."""
    own = sorted({*module._parameters, *module._buffers, *module._modules})
    if own != ["bias", "weight"]:
        return f"it holds {', '.join(own)} in place of weight and bias (remove weight_norm, pruning, … first)"
    reason = reason_not_dense(module.weight)
    if reason is not None:
        return reason
    if module.weight.numel() == 0:
        return "its weight is empty"
    bn, bk = check_block_shape(options.config.block_shape)
    density = options.config.density
    out_features, in_features = module.weight.T.shape if is_conv1d(module) else module.weight.shape
    fits = out_features % bn == 0 and in_features % bk == 0  # another reason otherwise, which comes later
    blocks = (out_features // bn) * (in_features // bk)
    if options.pattern is None and fits and density > 0 and round(density * blocks) == 0:
        return f"density {density:g} of its {blocks} blocks in {bn}x{bk} rounds to none"
    return None


def _reason_not_sparse_experts(module: nn.Module, options: LayerOptions) -> str | None:
    """Say what keeps dense experts with these options from becoming sparse ones that are of use."""
    reason, config = reason_not_known(module), options.config
    if reason is not None:
        return reason
    found = projections_of(module)
    assert found is not None
    for name in found.names():
        weight = module.get_parameter(name)
        if is_stored_otherwise(weight):
            return reason_not_dense(weight) or f"its {name} is {weight.dtype} of layout {weight.layout}"
    for name, value, only in (
        ("pattern", options.pattern, None),
        ("reference_layers", options.reference_layers, False),
    ):
        if value != only:
            return f"experts need {name}={only!r}"
    try:
        check_of_experts(config.policy, config.activations, config.granularity)
    except InvalidArgumentError as error:
        return str(error)
    block = math.prod(check_block_shape(config.block_shape))
    for name in found.names():
        blocks = module.get_parameter(name)[0].numel() // block
        if config.density > 0 and round(config.density * blocks) == 0:
            return f"density {config.density:g} of {blocks} blocks of each expert's {name} rounds to none"
    return None
