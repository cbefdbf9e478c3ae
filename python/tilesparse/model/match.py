"""Modules of a model: names, references, which of them rules replace, and reasons why others stay."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from .._checks import (
    BLOCK_SIZES,
    check_block_shape,
    check_callable,
    check_kind,
    check_module,
    check_shapes,
    items_of,
    shown,
)
from ..calibrate.stream import call_apart, observing, tensors_in
from ..config import BlockSparseConfig, check_of_experts
from ..errors import InvalidArgumentError, InvalidTypeError, TileSparseError
from ..nn.experts import BlockSparseExperts, projections_of, reason_not_known, stacked_parameters
from ..nn.linear import BlockSparseLinear, dense_weight, is_conv1d, is_stored_otherwise, reason_not_dense
from ..storage.formats import storage_of

Replacement: TypeAlias = BlockSparseLinear | BlockSparseExperts

# Attributes of `torch.nn.Module` with the hooks of a call. A new layer shares the containers, so that the
# handles that were given out still remove their hooks.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
_OF_LINEAR = {*vars(nn.Linear(1, 1, device="meta")), "nf", "nx"}  # the last two of Conv1D
_STATE_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class Target:
    """A module to replace, with all its names."""

    names: list[str]
    module: nn.Module
    replacement: nn.Module


def layers_in(name: str, module: nn.Module) -> dict[str, Any]:
    """Return the sparse layers that a replacement of this name stands for: of experts their projections."""
    if not isinstance(module, BlockSparseExperts):
        return {name: module}
    return {f"{name}.{own}".lstrip("."): layer for own, layer in module.projections().items()}


def owners_of_parameters(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[nn.Module]]:
    """Map each parameter to the modules that hold it directly."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return owners


def output_embeddings(names: Mapping[nn.Module, list[str]]) -> set[nn.Module]:
    """Return layers named lm_head, and those that models of Transformers declare."""
    found = {
        module
        for module, aliases in names.items()
        if any(alias.rpartition(".")[2] == "lm_head" for alias in aliases)
    }
    for module in names:
        get = getattr(module, "get_output_embeddings", None)
        try:
            output = get() if callable(get) else None
        except NotImplementedError:  # a model without any
            continue
        if isinstance(output, nn.Module):
            found.add(output)
    return found


def is_linear(module: nn.Module) -> bool:
    """Return True for `torch.nn.Linear` itself and Transformers' ``Conv1D``."""
    return type(module) is nn.Linear or is_conv1d(module)


def reason_from_parents(model: nn.Module, aliases: Iterable[str]) -> str | None:
    """Say what in the modules around a layer keeps it from being replaced, or return None."""
    parents = (model.get_submodule(name.rpartition(".")[0]) for name in aliases)
    if torch.backends.mha.get_fastpath_enabled() and any(
        isinstance(parent, nn.TransformerEncoderLayer) for parent in parents
    ):
        return (
            "nn.TransformerEncoderLayer reads its weight directly in inference; call "
            "torch.backends.mha.set_fastpath_enabled(False) first"
        )
    return None


def what_would_be_lost(module: nn.Module) -> str | None:
    """Say what a module has that its replacement could not keep, or return None."""
    parameters = module.parameters(recurse=False)
    if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters):
        return "a hook on a parameter cannot move to the new parameter; remove it first"
    if any(getattr(module, attribute) for attribute in _STATE_HOOKS):
        return "a hook of its state dict cannot move to a sparse layer; remove it first"
    if module._backward_hooks and not module._is_full_backward_hook:
        return "a hook of register_backward_hook cannot move; use register_full_backward_hook"
    if "forward" in vars(module):
        return "its forward was replaced by another function, which would be lost"
    if vars(module).get("_compiled_call_impl") is not None:
        return "it is compiled by itself; compile it afterwards"
    weight = module._parameters.get("weight")
    of_weight = {} if weight is None or is_stored_otherwise(weight) else vars(weight)
    for attribute, value in of_weight.items():
        if isinstance(value, Tensor):
            return f"its weight has an attribute {attribute}, a tensor that fits the dense weight alone"
    return None


def tie_of(
    module: nn.Module,
    names: Mapping[nn.Module, list[str]],
    owners: Mapping[nn.Parameter, list[nn.Module]],
) -> str | None:
    """Say with which other modules a module shares a parameter, or return None."""
    for name, parameter in module.named_parameters(recurse=False):
        others = [names[owner][0] for owner in owners[parameter] if owner is not module]
        if others:
            return f"{name} is shared with {', '.join(others)}; give it a parameter of its own first"
    return None


def own_attributes(linear: nn.Module) -> dict[str, object]:
    """Return the attributes that someone has given to a linear layer."""
    return {name: value for name, value in vars(linear).items() if name not in _OF_LINEAR}


def hidden_attribute(module: nn.Module, replacement: nn.Module) -> str | None:
    """Say which attribute that someone has given to a layer would hide one of its replacement, or None."""
    if not is_linear(module):
        return None
    hidden = {*dir(replacement), *vars(replacement)} & own_attributes(module).keys()
    return f"its attribute {min(hidden)} would hide that of a sparse layer; rename it" if hidden else None


def hand_over(source: nn.Module, receiver: nn.Module) -> None:
    """Let the replacement of a module have its very hooks, and attributes that someone has given to it."""
    for attribute in _HOOKS:
        setattr(receiver, attribute, getattr(source, attribute))
    if not is_linear(source):
        return
    vars(receiver).update(own_attributes(source))
    for name, parameter in source._parameters.items():
        taker = receiver._parameters.get(name)
        if parameter is not None and taker is not None:
            vars(taker).update(vars(parameter))


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
    names (`re.match`). In a model that has a module of that very name, a name stands for this module alone,
    and for everything inside it: see `matching`.
    """

    text: str
    expression: re.Pattern[str] | None  # None of a name

    @classmethod
    def parse(cls, text: str, argument: str) -> NamePattern:
        """Return the pattern that a text means."""
        try:
            expression = None if _NAME.fullmatch(text) else re.compile(text)
        except (re.error, TypeError) as error:
            raise InvalidArgumentError(
                f"{argument} must be a name or a regular expression, got {shown(text)}: {error}"
            ) from error
        return cls(text, expression)

    def match(self, name: str) -> bool:
        """Return True if the pattern matches a name, whatever other names there are."""
        if self.expression is not None:
            return self.expression.match(name) is not None
        return f".{self.text}." in f".{name}."

    def spells(self, names: Iterable[str]) -> bool:
        """Return True if the last component of a name is written out, rather than met by a wildcard."""
        text = re.sub(r"\\[A-Za-z]", " ", self.text)
        return any(
            last in text and re.search(rf"(?<!\w){re.escape(last)}(?!\w)", text)
            for last in (name.rpartition(".")[2] for name in names)
        )


def parsed(argument: str, texts: str | Sequence[str]) -> list[NamePattern]:
    """Return the patterns of an argument that is one name or regular expression, or several."""
    own = [texts] if isinstance(texts, str) else items_of(argument, texts, "names or regular expressions")
    return [NamePattern.parse(text, argument) for text in own]


def matching(
    patterns: Sequence[NamePattern], names: Mapping[Module, Iterable[str]]
) -> dict[Module, list[int]]:
    """Return the places of the patterns that match each module of a model, in ascending order."""
    known = {name for aliases in names.values() for name in aliases}
    inside: dict[str, list[int]] = {}
    anywhere: dict[str, list[int]] = {}
    expressions = []
    for place, pattern in enumerate(patterns):
        if pattern.expression is not None:
            expressions.append((place, pattern))
            continue
        found = inside if pattern.text in known else anywhere
        found.setdefault(pattern.text, []).append(place)
    lengths = sorted({text.count(".") + 1 for text in anywhere})
    result: dict[Module, list[int]] = {}
    for module, aliases in names.items():
        own: set[int] = set()
        for name in aliases:
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
    check_module(model)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one with this name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


class Reference(NamedTuple):
    """A place where a model holds a module or a tensor, and whether `follow` can put another there."""

    place: str
    can_follow: bool


_OF_MODULES = {*vars(nn.Module()), "_compiled_call_impl"}


def references(names: Mapping[nn.Module, list[str]]) -> dict[nn.Module | Tensor, Reference]:
    """Return what attributes, lists, tuples, dicts, sets, functions and objects of other classes hold."""
    found: dict[nn.Module | Tensor, Reference] = {}
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
) -> Iterator[tuple[nn.Module | Tensor, Reference]]:
    if isinstance(value, nn.Module | Tensor):
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
        parts = [(part, place, False) for part in (value.__self__, value.__func__)]
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        parts = [(part, place, False) for part in (*cells, value.__defaults__, value.__kwdefaults__)]
    elif can_follow and _is_foreign(value):
        parts = [(part, f"{place}.{name}", False) for name, part in vars(value).items()]
    if parts and id(value) not in seen:
        seen.add(id(value))
        for part in parts:
            yield from _held(*part, seen)


def _is_foreign(value: Any) -> bool:
    """Return True for an object that may hold modules, and is none of this package, which knows its own."""
    ours = type(value).__module__.startswith(f"{__name__.partition('.')[0]}.")
    return hasattr(value, "__dict__") and not isinstance(value, type | ModuleType) and not ours


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


def replace_modules(model: nn.Module, targets: Iterable[Target]) -> None:
    """Put replacements into a model, wherever it holds the modules they replace, with all that these have."""
    new = {}
    for target in targets:
        new[target.module] = target.replacement
        hand_over(target.module, target.replacement)
        for name in target.names:
            set_submodule(model, name, target.replacement)
    follow(model, new)


def check_batch(batch: Any) -> None:
    """Raise InvalidTypeError unless a batch has a tensor."""
    if next(tensors_in(batch), None) is None:
        raise InvalidTypeError(
            f"batch must be a tensor, or a mapping, tuple or list of tensors, got {shown(batch)}"
        )


class _WeightReads(TorchFunctionMode):
    """Records the classes that use watched weights while the layers that own them are not called."""

    def __init__(self, weights: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self._weights = weights  # by id
        self.calling: list[nn.Module] = []
        self.readers: dict[nn.Module, str] = {}

    def enter(self, module: nn.Module, _: Any) -> None:
        self.calling.append(module)

    def leave(self, *_: Any) -> None:
        self.calling.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Only attributes that are other views of the numbers, or their shape, count.
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute not in _ALIKE:
            for tensor in tensors_in((args, kwargs)):
                layer = self._weights.get(id(tensor))
                if layer is not None and layer not in self.calling:
                    reader = self.calling[-1] if self.calling else self
                    self.readers.setdefault(layer, type(reader).__name__)
        return func(*args, **(kwargs or {}))


_ALIKE = {"device", "dtype", "grad", "is_cuda", "is_meta", "layout", "requires_grad"}  # in sparse weights


def weight_reads(model: nn.Module, batch: Any) -> dict[nn.Module, str]:
    """Call a model; return the linear layers whose weight others use themselves, and the class that does."""
    if batch is None:
        return {}
    modules = list(model.modules())
    owners = owners_of_parameters(modules)  # a weight that others have, too, is a tie
    reads = _WeightReads(
        {
            id(weight): own[0]
            for weight, own in owners.items()
            if len(own) == 1 and is_linear(own[0]) and own[0].weight is weight
        }
    )
    with ExitStack() as stack:
        for module in modules:
            before = module.register_forward_pre_hook(reads.enter)
            after = module.register_forward_hook(reads.leave, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(observing(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(reads)
        call_apart(model, batch)
    return reads.readers


_LISTENERS: list[tuple[Callable[[nn.Module], None], Callable[[nn.Module], None]]] = []


def add_listener(check: Callable[[nn.Module], None], describe: Callable[[nn.Module], None]) -> None:
    """Have a library describe models anew when their layers change; ``check`` raises where that would."""
    _LISTENERS.append((check, describe))


def check_can_change(model: nn.Module) -> None:
    """Raise where `layers_changed` would; the model is only read."""
    for check, _ in _LISTENERS:
        check(model)


def layers_changed(model: nn.Module) -> None:
    """Tell the listeners that layers of a model were replaced, or are stored in another way."""
    for _, describe in _LISTENERS:
        describe(model)


@dataclass(frozen=True)
class Rule:
    """The layers that a pattern of names matches, and what becomes of them; None leaves them as they are."""

    layers: NamePattern
    config: BlockSparseConfig | None


def rules_of(
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None], layers: str | Sequence[str] | None
) -> list[Rule]:
    """Return the rules that two arguments mean: a config and its layers, or a config by names of layers."""
    if isinstance(config, BlockSparseConfig):
        patterns = parsed("layers", ".*" if layers is None else layers)
        return [Rule(pattern, config) for pattern in patterns]
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
    for name, own in config.items():
        if own is not None:
            check_kind(f"config[{name!r}]", own, BlockSparseConfig)
    return [Rule(NamePattern.parse(name, "config"), own) for name, own in config.items()]


@dataclass(frozen=True)
class SkippedLayer:
    """A module that was to be changed and stays as it is: its name, its class and the reason."""

    name: str
    kind: str
    reason: str


def by_reason(skipped: Iterable[SkippedLayer]) -> Iterator[str]:
    """Yield a line for each reason: how many layers of which kinds, and why."""
    groups: dict[str, list[SkippedLayer]] = {}
    for layer in skipped:
        groups.setdefault(layer.reason, []).append(layer)
    for reason, group in groups.items():
        first, counts = group[0], Counter(layer.kind for layer in group)
        name = first.name or "the model"
        if len(group) == 1:
            text = f"{name} ({first.kind})"
        else:
            text = ", ".join(f"{count} {kind}" for kind, count in counts.items()) + f" ({name}, …)"
        yield f"{text}: {reason}"


NOT_LINEAR = "not nn.Linear"
STAYS_DENSE = "its config is None"

Refusal: TypeAlias = Callable[[str, nn.Module], str | None]  # by name: why a module is not replaced, or None


class Match(NamedTuple):
    """A layer to replace, all its names, the config for it, and whether a rule writes its name out."""

    module: nn.Module
    names: list[str]
    config: BlockSparseConfig
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
    """Return the layers that rules replace, and the matched modules that stay, with the reason."""
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
        reason = _reason_to_skip(model, module, aliases, rule.config, refusal)
        if reason != NOT_LINEAR:
            heard.add(id(rule))
            overruled += [(other, rule) for other in own if other.config != rule.config]
        if reason is None and not naming:
            reason = "output embedding; a pattern that names it patches it"
        if reason is None:
            reason = tie_of(module, names, owners) or reason_from_holders(module, held)
        if reason is None and reads is not None and module in reads:
            reason = f"{reads[module]} reads its weight itself"
        if reason is None and rule.config is not None:
            matched.append(Match(module, aliases, rule.config, rule.layers.spells(aliases)))
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


def reason_from_holders(module: nn.Module, places: Mapping[nn.Module | Tensor, Reference]) -> str | None:
    """Say which attribute of the model would go on holding a layer or its parameter, or return None."""
    own: list[nn.Module | Tensor] = [*module.parameters(recurse=False), module]
    for one in own:
        if one in places and not places[one].can_follow:
            kind = "it" if one is module else "a parameter of it"
            return f"{places[one].place} holds {kind} and cannot be changed to hold the new one"
    return None


def check_rules(
    rules: Sequence[Rule],
    names: Mapping[nn.Module, list[str]],
    converted: Container[nn.Module],
    skipped: Iterable[SkippedLayer],
) -> None:
    """Raise InvalidArgumentError for rules by which no layer is block-sparse."""
    if not rules:
        raise InvalidArgumentError("layers must have a name or regular expression, got none")
    reasons = {layer.name: layer for layer in skipped}
    useful: set[int] = set()  # places of rules
    left: dict[int, list[SkippedLayer]] = {}
    for module, places in matching([rule.layers for rule in rules], names).items():
        layer = reasons.get(names[module][0])
        if module in converted or isinstance(module, Replacement):
            useful.update(places)
        elif layer is not None:
            useful.update(place for place in places if rules[place].config is None)
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
            "sparsify_ goes on without it where strict=False"
        )


def refusal_of(
    names: Mapping[nn.Module, list[str]],
    reason_not: Callable[[nn.Module], str | None],
    exclude: str | Sequence[str] | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> Refusal:
    """Return why modules are not replaced: for a reason of their own, or for what the user leaves out."""
    check_callable("filter_fn", filter_fn)
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


class CannotBeCutError(InvalidArgumentError):
    """A weight's shape is no multiple of the block shape."""


def check_blocks_can_be_chosen(module: Any, block_shape: Sequence[int]) -> None:
    """Raise CannotBeCutError unless the blocks of a dense layer can be ranked."""
    check_can_be_cut(dense_weight(module).shape, block_shape)
    check_can_be_ranked(dense_weight(module))


def check_can_be_cut(shape: Sequence[int], block_shape: Sequence[int]) -> None:
    """Raise CannotBeCutError unless blocks divide a weight."""
    for name, size, block in zip(("out_features", "in_features"), shape, block_shape, strict=True):
        if size % block:
            raise CannotBeCutError(
                f"block_shape must divide the weight, got {tuple(block_shape)}: {name} is {size}, "
                f"no multiple of {block}"
            )


def check_can_be_ranked(weight: Tensor) -> None:
    """Raise InvalidArgumentError for weights without numbers."""
    if weight.is_meta:
        raise InvalidArgumentError(
            "its weight must not be on the meta device, where there is nothing to rank blocks by"
        )
    if bool(weight.isnan().any()):
        raise InvalidArgumentError("its weight must not have NaN, which cannot be ranked")


@contextlib.contextmanager
def naming_layer(name: str) -> Iterator[None]:
    """Add the name of a layer to errors."""
    try:
        yield
    except TileSparseError as error:
        raise type(error)(f"layer {name!r}: {error}") from error


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
        return "a subclass of nn.Linear, which may compute something else; replace it by from_linear"
    if projections_of(module) is not None:
        return reason_not_known(module) or "its experts are no linear layers"
    stacked = stacked_parameters(module)
    if stacked:
        return f"it has 3-D {' and '.join(stacked)}, but not the interface of Transformers' experts"
    return NOT_LINEAR


def _reason_to_skip(
    model: nn.Module,
    module: nn.Module,
    aliases: list[str],
    config: BlockSparseConfig | None,
    refusal: Refusal,
) -> str | None:
    if isinstance(module, Replacement):
        return "already block-sparse"
    reason = refusal(aliases[0], module)
    if reason is not None:
        return reason
    if config is None:
        return STAYS_DENSE
    if module is model:
        return "the model itself cannot be replaced in place"
    reason = reason_from_parents(model, aliases) or what_would_be_lost(module)
    if reason is None and is_linear(module):
        reason = _reason_not_sparse(module, config)
    elif reason is None and projections_of(module) is not None:
        reason = _reason_not_sparse_experts(module, config)
    return reason


def _reason_not_sparse(module: Any, config: BlockSparseConfig) -> str | None:
    """Say what keeps a dense layer from becoming a sparse one that is of use."""
    own = sorted({*module._parameters, *module._buffers, *module._modules})
    if own != ["bias", "weight"]:
        return f"it holds {', '.join(own)} in place of weight and bias (remove weight_norm, pruning, … first)"
    reason = reason_not_dense(module.weight)
    if reason is not None:
        return reason
    if module.weight.numel() == 0:
        return "its weight is empty"
    (bn, bk), density = block_shape_of(config), config.density
    out_features, in_features = module.weight.T.shape if is_conv1d(module) else module.weight.shape
    fits = out_features % bn == 0 and in_features % bk == 0  # another reason otherwise, which comes later
    blocks = (out_features // bn) * (in_features // bk)
    if fits and density > 0 and round(density * blocks) == 0:
        return f"density {density:g} of its {blocks} blocks in {bn}x{bk} rounds to none"
    return None


def _reason_not_sparse_experts(module: nn.Module, config: BlockSparseConfig) -> str | None:
    """Say what keeps dense experts from becoming sparse ones that are of use."""
    reason = reason_not_known(module)
    if reason is not None:
        return reason
    found = projections_of(module)
    assert found is not None
    for name in found.names():
        weight = module.get_parameter(name)
        if is_stored_otherwise(weight):
            return reason_not_dense(weight) or f"its {name} is {weight.dtype} of layout {weight.layout}"
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


Filter: TypeAlias = Callable[[nn.Module, str], bool]


def chosen_layers(
    model: nn.Module,
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Filter | None = None,
    *,
    strict: bool = True,
    cut: bool = True,
    refused: Mapping[str, str] | None = None,
) -> tuple[dict[str, BlockSparseConfig], list[SkippedLayer]]:
    """Return the linear layers that a config is for, each with its own, and those that stay dense."""
    names, rules = names_of_modules(model), rules_of(config, layers)
    refusal = refusal_of(names, reason_not_linear, exclude, filter_fn)

    def refusal_in_experts(name: str, module: nn.Module) -> str | None:
        home = name.rpartition(".")[0].rpartition(".")[0]
        return refusal(name, module) or (refused or {}).get(home)

    spare_outputs = filter_fn is None
    matched, skipped = match_modules(model, names, rules, refusal_in_experts, spare_outputs=spare_outputs)
    targets: dict[str, BlockSparseConfig] = {}
    found: set[nn.Module] = set()
    for module, aliases, own, named in matched:
        try:
            with naming_layer(aliases[0]):
                check_blocks_can_be_chosen(module, block_shape_of(own))
        except CannotBeCutError as error:
            if cut and named:
                raise
            skipped.append(SkippedLayer(aliases[0], type(module).__name__, str(error.__cause__)))
        else:
            targets[aliases[0]] = own
            found.add(module)
    named_by_mapping = not isinstance(config, BlockSparseConfig)
    if strict and (named_by_mapping or (layers is not None and targets)):
        check_rules(rules, names, found, skipped)
    return targets, [layer for layer in skipped if _has_weights(model.get_submodule(layer.name))]


def reasons_against_experts(model: nn.Module) -> dict[str, str]:
    """Say of modules of experts, by name, why sparse ones cannot take their places."""

    def refusal(name: str, module: nn.Module) -> str | None:
        return NOT_LINEAR if projections_of(module) is None else reason_not_known(module)

    names = names_of_modules(model)
    experts = {module: aliases for module, aliases in names.items() if projections_of(module) is not None}
    if not experts:
        return {}
    dense = Rule(NamePattern.parse(".*", "layers"), BlockSparseConfig(1.0, min(BLOCK_SIZES)))
    skipped = match_modules(model, names, [dense], refusal)[1]
    own = {aliases[0] for aliases in experts.values()}
    return {layer.name: layer.reason for layer in skipped if layer.name in own}


def _has_weights(module: nn.Module) -> bool:
    """Return True for what reports name where it stays dense: linear layers, and 3-D weights."""
    linear = isinstance(module, nn.Linear | BlockSparseLinear) or is_conv1d(module)
    return linear or bool(stacked_parameters(module))


def reasons(skipped: Sequence[SkippedLayer]) -> str:
    """Say why layers were skipped, of the first three."""
    if not skipped:
        return "no linear layer is named so"
    return "; ".join(dict.fromkeys(f"{layer.name!r}: {layer.reason}" for layer in skipped[:3]))


def checked_config(where: str, config: Any) -> BlockSparseConfig:
    """Return a config that keeps some blocks; `where` names the argument in messages."""
    check_kind(where, config, BlockSparseConfig)
    if not config.density:
        raise InvalidArgumentError(f"{where}: density must be a number above 0 and at most 1, got 0")
    if config.transposable:
        raise InvalidArgumentError(
            f"{where}: transposable must be False: pruning chooses two of four weights in rows alone"
        )
    return config  # type: ignore[no-any-return]


def block_shape_of(config: BlockSparseConfig) -> tuple[int, int]:
    """Return (bn, bk) of a config, as which it keeps one number, too."""
    return check_block_shape(config.block_shape)


def shape_of(layer: Any) -> tuple[int, int]:
    """Return (out_features, in_features) of a dense layer."""
    out_features, in_features = dense_weight(layer).shape
    return out_features, in_features


def kept_blocks(config: BlockSparseConfig, shape: tuple[int, int]) -> int:
    """Return how many blocks a config keeps of a weight; raise where it cannot be stored so."""
    rows, columns = check_shapes(shape, block_shape_of(config))[2]
    kept = round(config.density * rows * columns)
    if kept == 0:
        raise InvalidArgumentError(f"density: {config.density:g} of {rows * columns} blocks rounds to none")
    return kept


def checked_configs(
    argument: str, name: str, configs: Iterable[BlockSparseConfig], shape: tuple[int, int]
) -> list[BlockSparseConfig]:
    """Return the configs, after checking that a layer of this shape can become each of them."""
    try:
        checked = [checked_config("config", config) for config in configs]
        for config in checked:
            kept_blocks(config, shape)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{argument}: layer {name!r}: {error}") from error
    return checked


def described(config: BlockSparseConfig | None) -> tuple[str, str, str]:
    """Return density, block and storage as tables show them."""
    if config is None:
        return "dense", "", ""
    bn, bk = block_shape_of(config)
    storage = storage_of(config.storage).describe(config.nm, config.activations)
    return f"{config.density:.4g}", f"{bn}x{bk}", storage
