"""Modules of a model: their names, references to them, replacing them, and reads of their weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._checks import check_module, shown
from ..calibrate.stream import call_apart, observing, tensors_in
from ..errors import InvalidArgumentError, InvalidTypeError
from ..nn.dense import is_conv1d, is_stored_otherwise
from ..nn.experts import BlockSparseExperts
from ..nn.linear import BlockSparseLinear
from ..nn.reference import ReferenceBlockSparseLinear

Replacement: TypeAlias = BlockSparseLinear | ReferenceBlockSparseLinear | BlockSparseExperts

# What `torch.nn.Module` keeps of the hooks of a call. A new layer shares the containers, so that the
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
    """A module to replace: all its names, its replacement, and whether blocks were chosen for that."""

    names: list[str]
    module: nn.Module
    replacement: nn.Module
    chosen: bool = False


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
            return f"{name} is shared with {', '.join(others)}; the option untie patches it all the same"
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
    names (`re.match`). With `fullmatch` both have to match the whole name. In a model that has a module of
    that very name, a name stands for this module alone, and for everything inside it: see `matching`.
    """

    text: str
    expression: re.Pattern[str] | None  # None of a name
    fullmatch: bool

    @classmethod
    def parse(cls, text: str, *, fullmatch: bool = False, argument: str = "regex") -> NamePattern:
        """Return the pattern that a text means."""
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

    Names are looked up rather than tried, so that thousands of them take time in proportion to the modules. A
    pattern that is the whole name of a module stands for that module alone.
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
    """Return what attributes, lists, tuples, dicts, sets, partial functions and bound methods hold."""
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
        # Of attributes those count that are other views of the numbers, or their shape.
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
    """Call a model; return the linear layers whose weight others use themselves, and the class that does.

    Without a batch nothing is called or found.
    """
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
