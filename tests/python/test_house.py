"""The layout of the package: no import circles, private names stay in their package, classes stay small.

Everything is read from the sources; nothing is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "tilesparse"

# Imports within functions that close a circle, and why that is right.
DEFERRED = {
    ("tilesparse.integrations.hooks", "tilesparse.integrations.peft"): "PEFT is optional",
}

# Attributes of other libraries that have no public name.
FOREIGN = {
    "_asdict": "public in NamedTuple",
    "_fields": "public in NamedTuple",
    "_make": "public in NamedTuple",
    "_replace": "public in NamedTuple",
    "_version": "PyTorch's counter of a tensor's writes",
    "_apply_gate": "experts of Transformers",
    "_parameters": "torch.nn.Module",
    "_buffers": "torch.nn.Module",
    "_modules": "torch.nn.Module",
    "_non_persistent_buffers_set": "torch.nn.Module",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_backward_hooks": "torch.nn.Module",
    "_backward_pre_hooks": "torch.nn.Module",
    "_is_full_backward_hook": "torch.nn.Module",
    "_post_accumulate_grad_hooks": "torch.Tensor",
    "_ConvNd": "torch.nn.modules.conv",
    "_exit": "os",
    "_getframe": "sys",
}

PRIVATE = "tilesparse._runtime.torch_private"  # the one module for what is not public in PyTorch


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(file.read_text())
    return found


def is_package(module: str) -> bool:
    return (PACKAGE.parent / Path(*module.split("."))).is_dir()


def imported(module: str, node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for what an import statement takes from this package; no name for a module."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names if alias.name in modules())
    elif isinstance(node, ast.ImportFrom):
        above = module.split(".")[: None if is_package(module) else -1]
        base = above[: len(above) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            if f"{source}.{alias.name}" in modules():
                yield f"{source}.{alias.name}", ""
            elif source in modules() and alias.name != "_C":
                yield source, alias.name


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports, also within functions and for type checkers alone."""
    return {
        module: {source for node in ast.walk(tree) for source, _ in imported(module, node)} - {module}
        for module, tree in modules().items()
    }


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Return the nodes that can be reached from themselves."""

    def reached(node: str) -> set[str]:
        seen: set[str] = set()
        waiting = [node]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    return {node for node in graph if node in reached(node)}


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {
        module: {source for source in sources if (module, source) not in DEFERRED}
        for module, sources in imports().items()
    }
    circle = in_circles(graph)
    assert not circle, sorted(circle)


def test_deferred_imports_are_still_needed() -> None:
    assert {pair for pair in DEFERRED if pair[1] not in imports().get(pair[0], ())} == set()


def test_examples_run_without_the_benchmarks() -> None:
    """A user may take them along; benchmarks may use what examples have."""
    benchmarks = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    for file in (ROOT / "examples").glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not found & benchmarks, file.name


def package_of(module: str) -> str:
    return module if is_package(module) else module.rpartition(".")[0]


def test_private_names_are_imported_within_their_package_alone() -> None:
    found = [
        f"{module}: {source}.{name}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        for source, name in imported(module, node)
        if name.startswith("_") and not name.startswith("__") and package_of(module) != package_of(source)
    ]
    assert not found, "\n".join(found)


# Public attributes that a class defines itself. These have more than others may, and may not get more.
ATTRIBUTES = 20


def public_attributes(cls: ast.ClassDef) -> set[str]:
    found = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and owner(node) == "self":
            found.add(node.attr)
    for node in cls.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def test_classes_have_few_public_attributes() -> None:
    classes = [
        node for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    found = {cls.name: len(own) for cls in classes if len(own := public_attributes(cls)) > ATTRIBUTES}
    assert not found


def defined(tree: ast.Module) -> set[str]:
    """Names that a module defines: functions, classes, variables and attributes it assigns to its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and owner(node) == "self":
            found.add(node.attr)
    return found


@cache
def defined_in(package: str) -> set[str]:
    return {
        name for module, tree in modules().items() if package_of(module) == package for name in defined(tree)
    }


def owner(node: ast.Attribute) -> str:
    """Return what an attribute is read from, as it is written; `super()` counts as self."""
    text = ast.unparse(node.value)
    return "self" if text in ("self", "cls", "super()") else text


def is_of_torch(text: str) -> bool:
    return text.split(".")[0] == "torch"


def test_private_attributes_of_other_packages_are_not_used() -> None:
    found = [
        f"{module}:{node.lineno}: {owner(node)}.{node.attr}"
        for module, tree in modules().items()
        if module != PRIVATE
        for own in [defined_in(package_of(module))]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and owner(node) != "self"
        and not is_of_torch(owner(node))
        and node.attr not in own | FOREIGN.keys()
    ]
    assert not found, "\n".join(found)
