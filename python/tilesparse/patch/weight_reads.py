"""Find linear layers whose weight other modules read instead of calling the layer.

A module that does so, such as Mamba's mixer with ``self.dt_proj.weight @ x``, cannot compute with blocks. One
that casts to the dtype of a weight, as T5 does, cannot call a layer that stores values in 8 or 4 bits. The
reads are found in the source of its ``forward`` and of the methods that ``forward`` uses, except for branches
that the module's attributes exclude, such as ``if self.pretraining_tp > 1``. Without source nothing is found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from torch import nn

from ..storage.base import Storage

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
    yield from _followed(module, use.path)


def _followed(module: nn.Module, path: _Path) -> Iterator[tuple[nn.Module, _Path]]:
    first, rest = path[:1], path[1:]
    if first == (_ANY,) and isinstance(module, _CONTAINERS):
        inner = list(module.children())
    else:
        inner = [child for child in map(module._modules.get, first) if child is not None]
    if not inner:
        yield module, path
    for child in inner:
        yield from _followed(child, rest)


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
