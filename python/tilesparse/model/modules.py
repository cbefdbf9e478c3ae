"""Modules of a model: their names, references to them, replacing them, and reads of their weights."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, MethodType
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .._checks import shown
from ..errors import InvalidArgumentError
from ..nn.dense import is_conv1d, is_stored_otherwise
from ..nn.experts import BlockSparseExperts
from ..nn.linear import BlockSparseLinear
from ..nn.reference import ReferenceBlockSparseLinear
from ..storage.formats import Storage

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
    """Let the replacement of a module have its hooks, and attributes that someone has given to it."""
    share_hooks(source, receiver)
    if not is_linear(source):
        return
    vars(receiver).update(own_attributes(source))
    for name, parameter in source._parameters.items():
        taker = receiver._parameters.get(name)
        if parameter is not None and taker is not None:
            vars(taker).update(vars(parameter))


def share_hooks(source: nn.Module, receiver: nn.Module) -> None:
    """Let `receiver` have the very hooks of `source`."""
    for attribute in _HOOKS:
        setattr(receiver, attribute, getattr(source, attribute))


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


_Path: TypeAlias = tuple[str, ...]  # ("layers", "*", "fc") of self.layers[i].fc
_ANY = "*"
_HARMLESS = {"device", "grad", "is_cuda", "is_meta", "requires_grad"}  # alike in sparse weights
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_CALLS = {"getattr": getattr, "hasattr": hasattr}  # in conditions that are evaluated
# They read weights in their fast path for inference alone, which patching asks for by itself.
_EXCEPTIONS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


class Read(NamedTuple):
    """The class that reads a layer's weight, or its dtype.

    Attributes:
        reader: reads the numbers; empty if none does.
        called: whether other branches also call the layer.
        caster: casts to the dtype; empty if none does.
        spared: the dtypes by their names that it compares with before, and so knows.
    """

    reader: str
    called: bool
    caster: str
    spared: frozenset[str]

    def reason_not(self, storage: Storage) -> str | None:
        """Say why the layer cannot be stored so, or return None."""
        if not self.caster or storage.dtype is None or str(storage.dtype) in self.spared:
            return None
        return (
            f"{self.caster} casts to the dtype of its weight, {storage.dtype} in the storage {storage.name!r}"
        )


def weight_reads(model: nn.Module) -> dict[nn.Module, Read]:
    """Return the modules of a model whose ``weight``, or its dtype, others read in their forward pass."""
    readers: dict[nn.Module, str] = {}
    casters: dict[nn.Module, tuple[str, frozenset[str]]] = {}
    for module in model.modules():
        if isinstance(module, _EXCEPTIONS):
            continue
        uses, kind = _uses(type(module)), type(module).__name__
        for found in _read_by(module, uses.weights):
            readers.setdefault(found, kind)
        for use in uses.dtypes:
            spared = frozenset(dtype for path, dtype in uses.compared if path == use.path)
            for found in _read_by(module, {use}):
                casters.setdefault(found, (kind, spared))
    called = _called(model) if readers else set()
    return {
        module: Read(readers.get(module, ""), module in called, *casters.get(module, ("", frozenset())))
        for module in (readers | casters)
    }


def _read_by(module: nn.Module, uses: set[_Use]) -> Iterator[nn.Module]:
    for use in uses:
        for found, rest in _resolved(module, use):
            if not rest and found is not module:
                yield found


def _called(model: nn.Module) -> set[nn.Module]:
    """Return modules that may be called: those that a forward pass mentions without reading an attribute."""
    found: set[nn.Module] = set()
    for module in model.modules():
        for use in _uses(type(module)).mentions:
            for one, rest in _resolved(module, use):
                if one is not module and (not rest or rest[0] in ("forward", "__call__")):
                    found.add(one)
        if isinstance(module, nn.Sequential) or (isinstance(module, _CONTAINERS) and module in found):
            found.update(module.children())
    return found


class _Use(NamedTuple):
    """A path from ``self`` in a forward pass, and the conditions of its branch with their required values."""

    path: _Path
    conditions: tuple[tuple[CodeType, bool], ...]


class _Uses(NamedTuple):
    """Uses in the forward pass of a class: reads of weights, of their dtypes, and all others.

    `compared` has the paths of weights whose dtypes are compared with others, and the names of these.
    """

    weights: set[_Use]
    mentions: set[_Use]
    dtypes: set[_Use]
    compared: set[tuple[_Path, str]]


def _resolved(module: nn.Module, use: _Use) -> Iterator[tuple[nn.Module, _Path]]:
    """Yield the modules that a path leads to, each with the rest of the path; none in an excluded branch."""
    for condition, wanted in use.conditions:
        try:
            found = bool(eval(condition, {"__builtins__": _CALLS}, {"self": module}))
        except Exception:  # it depends on more than the module
            continue
        if found is not wanted:
            return
    yield from _followed_reads(module, use.path)


def _followed_reads(module: nn.Module, path: _Path) -> Iterator[tuple[nn.Module, _Path]]:
    first, rest = path[:1], path[1:]
    if first == (_ANY,) and isinstance(module, _CONTAINERS):
        inner = list(module.children())
    else:
        inner = [child for child in map(module._modules.get, first) if child is not None]
    if not inner:
        yield module, path
    for child in inner:
        yield from _followed_reads(child, rest)


_KNOWN: MutableMapping[type[nn.Module], _Uses] = WeakKeyDictionary()


def _uses(cls: type[nn.Module]) -> _Uses:
    if cls not in _KNOWN:
        _KNOWN[cls] = _read(cls)
    return _KNOWN[cls]


def _read(cls: type[nn.Module]) -> _Uses:
    reader, done = _Reader(), set()
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        for function in _functions(cls, name):
            if function in done:
                continue
            done.add(function)
            reader.read(function)
            waiting += [use.path[0] for use in reader.uses.mentions if use.path]
    return reader.uses


def _functions(cls: type[nn.Module], name: str) -> Iterator[Callable[..., Any]]:
    """Yield the method or property of a name, and the ones it overrides if it uses ``super``."""
    for owner in cls.__mro__:
        if owner is nn.Module:
            return
        found = vars(owner).get(name)
        if isinstance(found, property):
            found = found.fget
        if not inspect.isfunction(found):
            continue
        function = inspect.unwrap(found)
        yield function
        if "super" not in function.__code__.co_names:
            return


class _Reader(ast.NodeVisitor):
    """Collector of the uses in functions."""

    def __init__(self) -> None:
        self.uses = _Uses(set(), set(), set(), set())
        self._aliases: dict[str, _Path] = {}
        self._conditions: tuple[tuple[CodeType, bool], ...] = ()

    def read(self, function: Callable[..., Any]) -> None:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):  # there is none, as in an interactive session
            return
        (definition,) = tree.body
        if isinstance(definition, ast.FunctionDef) and definition.args.args:
            self._aliases = {definition.args.args[0].arg: ()}
            for statement in definition.body:
                self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        self._branch(node.test, node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._branch(node.test, [node.body], [node.orelse])

    def _branch(self, test: ast.expr, body: Sequence[ast.AST], orelse: Sequence[ast.AST]) -> None:
        self.visit(test)
        before, condition = self._conditions, _condition(test)
        for branch, wanted in ((body, True), (orelse, False)):
            self._conditions = before if condition is None else (*before, (condition, wanted))
            for node in branch:
                self.visit(node)
        self._conditions = before

    def visit_Assign(self, node: ast.Assign) -> None:
        self._bind(node.targets[0], node.value)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, ast.Subscript(node.iter, ast.Constant(0), ast.Load()))
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        """Follow another name for a module; visit anything else."""
        path = self._path(value)
        if isinstance(target, ast.Name):
            self._aliases.pop(target.id, None)
            if path and "weight" not in path:
                self._aliases[target.id] = path
                return
        self.visit(value)
        self.visit(target)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "hasattr"):
            return
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        paths = [path[:-2] for path in map(self._path, sides) if path and path[-2:] == ("weight", "dtype")]
        self.uses.compared.update((path, ast.unparse(side)) for path in paths for side in sides)
        if paths:
            return
        if not all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._use(node)

    def _use(self, node: ast.Name | ast.Attribute | ast.Subscript) -> None:
        path = self._path(node)
        if path is None:
            self.generic_visit(node)
            return
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute | ast.Subscript):
            if isinstance(inner, ast.Subscript):
                self.visit(inner.slice)
            inner = inner.value
        if "weight" not in path:
            self.uses.mentions.add(_Use(path, self._conditions))
            return
        at = path.index("weight")
        rest = path[at + 1 :]
        if rest[:1] == ("dtype",):
            self.uses.dtypes.add(_Use(path[:at], self._conditions))
        elif isinstance(node.ctx, ast.Load) and not (rest and rest[0] in _HARMLESS):
            self.uses.weights.add(_Use(path[:at], self._conditions))

    def _path(self, node: ast.expr) -> _Path | None:
        """Return the path from ``self``, or None for anything else."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            inner = self._path(node.value)
            return None if inner is None else (*inner, node.attr)
        if isinstance(node, ast.Subscript):
            inner = self._path(node.value)
            return None if inner is None else (*inner, _ANY)
        return None


def _condition(test: ast.expr) -> CodeType | None:
    """Return the code of a condition without side effects that does not depend on the mode, or None."""
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute) and node.attr == "training":
            return None
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _CALLS):
            return None
    return compile(ast.Expression(test), "<condition>", "eval")
