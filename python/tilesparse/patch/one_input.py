"""Find layers that a module calls with one x, one after the other, such as q, k and v.

They are found in the source of ``forward``: calls ``self.q_proj(x)`` in statements of one list, with nothing
between them that could write to x or make the name another tensor. Without source nothing is found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, MutableMapping
from weakref import WeakKeyDictionary

from torch import nn

_READ = {"shape", "size", "dim", "ndim", "dtype", "device"}  # attributes of x that leave it as it is
_Groups = list[tuple[str, ...]]
_KNOWN: MutableMapping[type[nn.Module], _Groups] = WeakKeyDictionary()


def called_with_one_input(module: nn.Module) -> _Groups:
    """Return groups of names of attributes that a module's class calls with one x, in their order."""
    cls = type(module)
    if "forward" in vars(module):
        return []
    if cls not in _KNOWN:
        _KNOWN[cls] = list(_groups(cls))
    return _KNOWN[cls]


def _groups(cls: type[nn.Module]) -> Iterator[tuple[str, ...]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError):  # there is none, as in an interactive session
        return
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return
    owner = definition.args.args[0].arg
    for node in ast.walk(definition):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                yield from _of_statements(statements, owner)


def _of_statements(statements: list[ast.stmt], owner: str) -> Iterator[tuple[str, ...]]:
    """Yield the groups in statements that are executed one after the other, or none of them."""
    groups: dict[str, list[str]] = {}  # by the name of x
    for statement in statements:
        use = _Use(owner)
        use.visit(statement)
        for layer, x in use.calls:
            groups.setdefault(x, []).append(layer)
        for x in list(groups) if use.writes else use.others & groups.keys():
            yield from _group(groups.pop(x))
    for layers in groups.values():
        yield from _group(layers)


def _group(layers: list[str]) -> Iterator[tuple[str, ...]]:
    if len(layers) > 1 and len(set(layers)) == len(layers):
        yield tuple(layers)


class _Use(ast.NodeVisitor):
    """What a statement does with names.

    Attributes:
        calls: the name of a layer and that of its x, in their order, of each call that is always made.
        others: names that are used otherwise.
        writes: True if the statement writes to a tensor, whichever it is.
    """

    _SOMETIMES = (
        *(ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef),
        *(ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    )

    def __init__(self, owner: str) -> None:
        self.calls: list[tuple[str, str]] = []
        self.others: set[str] = set()
        self.writes = False
        self._owner, self._sometimes = owner, False

    def visit(self, node: ast.AST) -> None:
        before = self._sometimes
        self._sometimes |= isinstance(node, self._SOMETIMES)
        self.writes |= isinstance(node, ast.AugAssign)
        super().visit(node)
        self._sometimes = before

    def visit_Call(self, node: ast.Call) -> None:
        layer = self._layer(node)
        if layer is None:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            self.writes |= name.endswith("_") and not name.endswith("__")
            self.generic_visit(node)
        elif isinstance(x := node.args[0], ast.Name):
            self.calls.append((layer, x.id))

    def _layer(self, node: ast.Call) -> str | None:
        """Return the name of a layer that is called with a variable alone."""
        of, alone = node.func, len(node.args) == 1 and not node.keywords and not self._sometimes
        if not (alone and isinstance(node.args[0], ast.Name) and isinstance(of, ast.Attribute)):
            return None
        return of.attr if isinstance(of.value, ast.Name) and of.value.id == self._owner else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (isinstance(node.value, ast.Name) and node.attr in _READ):
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.writes |= isinstance(node.ctx, ast.Store)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id != self._owner:
            self.others.add(node.id)
