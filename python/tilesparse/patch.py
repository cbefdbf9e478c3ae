"""Make the linear layers of whole models block-sparse, chosen by regular expressions on their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .errors import InvalidArgumentError, TileSparseError
from .linear import BlockSparseLinear, PseudoBlockSparseLinear
from .pattern import BLOCK_SIZES

DEFAULT_OPTIONS: Mapping[str, Any] = {
    "density": 0.5,
    "block_shape": (32, 32),
    "expand": False,
    "pseudo_linear": False,
    "untie": False,
}

_Replacement: TypeAlias = BlockSparseLinear | PseudoBlockSparseLinear


@dataclass(frozen=True)
class Size:
    """Numbers of parameters and of bytes (of parameters and buffers); a shared tensor counts once."""

    parameters: int
    bytes: int


@dataclass(frozen=True)
class PatchedLayer:
    """One replaced layer; `shape` is (out_features, in_features)."""

    name: str
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    density: float
    before: Size
    after: Size


@dataclass(frozen=True)
class SkippedLayer:
    """A module that a pattern matched and that was left alone, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class PatchReport:
    """What `BlockSparseModelPatcher.patch_model` did, or would do; ``str()`` makes a table of it.

    `before` and `after` are sizes of the whole model. `unmatched` lists the patterns that no name
    of the model matches.
    """

    layers: list[PatchedLayer]
    skipped: list[SkippedLayer]
    unmatched: list[str]
    before: Size
    after: Size

    def __str__(self) -> str:
        rows = [("layer", "shape", "block", "density", "parameters", "after", "bytes", "after")]
        for layer in self.layers:
            shape, block = (f"{rows}x{cols}" for rows, cols in (layer.shape, layer.block_shape))
            rows.append(
                (layer.name, shape, block, f"{layer.density:.3f}", *_sizes(layer.before, layer.after))
            )
        rows.append(("whole model", "", "", "", *_sizes(self.before, self.after)))
        lines = _aligned(rows)
        lines += [f"skipped {text}" for text in self._skipped_by_reason()]
        lines += [f"no layer matches {regex!r}" for regex in self.unmatched]
        return "\n".join(lines)

    def _skipped_by_reason(self) -> Iterator[str]:
        names: dict[str, list[str]] = {}
        for layer in self.skipped:
            names.setdefault(layer.reason, []).append(layer.name or "(the model)")
        for reason, (first, *others) in names.items():
            yield f"{first}{f' and {len(others)} more' if others else ''}: {reason}"


@dataclass(frozen=True)
class _Rule:
    """One pattern of the user, with a value for every option."""

    regex: re.Pattern[str]
    fullmatch: bool
    options: dict[str, Any]

    def matches(self, names: Iterable[str]) -> bool:
        match = self.regex.fullmatch if self.fullmatch else self.regex.match
        return any(match(name) for name in names)


@dataclass(frozen=True)
class _Target:
    """A module to replace, all names it is registered under, and its replacement."""

    names: list[str]
    module: nn.Module
    replacement: _Replacement


class BlockSparseModelPatcher:
    """Replaces `torch.nn.Linear` layers of a model by `BlockSparseLinear`, in place.

    >>> patcher = BlockSparseModelPatcher()
    >>> patcher.add_pattern(r"encoder\\.layer\\.\\d+\\.intermediate", {"density": 0.25})
    >>> report = patcher.patch_model(model)
    >>> print(report)

    The blocks of largest Frobenius norm are kept, with their values. To train from scratch, call
    `reset_parameters` on the new layers, which scales their weights to the smaller fan-in. Build
    the optimizer after patching: the layers have new parameters.

    Only `torch.nn.Linear` itself is replaced. Its subclasses and Transformers' ``Conv1D`` (which
    stores the transposed weight) are reported as skipped; override `is_patchable` and
    `new_child_module` to handle such layers.

    The patcher keeps the modules it replaces, and so their memory, until `undo` or until it is
    dropped itself.
    """

    def __init__(self) -> None:
        self._rules: list[_Rule] = []
        self._originals: MutableMapping[nn.Module, dict[str, nn.Module]] = WeakKeyDictionary()

    def add_pattern(
        self, regex: str, options: Mapping[str, Any] | None = None, *, fullmatch: bool = False
    ) -> None:
        """Says how layers whose qualified name matches `regex` are patched; the first match wins.

        Args:
            regex: matched against the start of the names of ``model.named_modules()`` (`re.match`).
            options: any of ``density`` (kept fraction; 0.5), ``block_shape`` ((bn, bk); (32, 32)),
                ``expand`` (compute with the weight written out dense; False), ``pseudo_linear`` (use
                `PseudoBlockSparseLinear`; False) and ``untie`` (patch a layer even if it shares a
                parameter with another module, which then keeps the dense one; False).
            fullmatch: the whole name has to match (`re.fullmatch`).

        Raises:
            InvalidArgumentError: `regex` is no regular expression, or an option is unknown or wrong.
        """
        try:
            compiled = re.compile(regex)
        except (re.error, TypeError) as error:
            raise InvalidArgumentError(
                f"regex: a regular expression expected, got {regex!r}: {error}"
            ) from error
        self._rules.append(_Rule(compiled, fullmatch, _checked_options(options or {})))

    def is_patchable(self, name: str, module: nn.Module) -> bool:
        """Whether `new_child_module` can replace a module of this kind. Override to change it."""
        return type(module) is nn.Linear

    def new_child_module(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> _Replacement:
        """Makes the replacement of one layer. `options` has a value for every option."""
        layer = BlockSparseLinear.from_linear(
            module, options["density"], block_shape=options["block_shape"], expand=options["expand"]
        )
        return PseudoBlockSparseLinear(layer) if options["pseudo_linear"] else layer

    def get_patchable_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """The layers of `model` that patterns can apply to, by qualified name."""
        return {name: module for name, module in model.named_modules() if self.is_patchable(name, module)}

    def patch_model(self, model: nn.Module, *, dry_run: bool = False) -> PatchReport:
        """Replaces every layer that a pattern matches; on an error, none.

        A module registered under several names is replaced by one module under all of them.

        Args:
            model: changed in place.
            dry_run: only report what would be done.

        Raises:
            InvalidArgumentError: a matched layer cannot be cut into blocks of its ``block_shape``.
        """
        names = _names_of_modules(model)
        targets, skipped = self._plan(model, names)
        unmatched = [rule.regex.pattern for rule in self._rules if not any(map(rule.matches, names.values()))]
        report = _report(names, targets, skipped, unmatched)
        if not dry_run:
            self._replace(model, targets)
        return report

    def undo(self, model: nn.Module) -> None:
        """Puts back the very modules that this patcher has replaced in `model`.

        Raises:
            InvalidArgumentError: this patcher has not patched `model`; a copy of a patched model is
                another model.
        """
        if model not in self._originals:
            raise InvalidArgumentError("model: not patched by this patcher, or already undone")
        for name, module in self._originals.pop(model).items():
            _set_submodule(model, name, module)

    def _plan(
        self, model: nn.Module, names: Mapping[nn.Module, list[str]]
    ) -> tuple[list[_Target], list[SkippedLayer]]:
        """Everything that can fail; the model is only read."""
        owners = _owners_of_parameters(names)
        targets, skipped = [], []
        for module, aliases in names.items():
            rule = next((rule for rule in self._rules if rule.matches(aliases)), None)
            if rule is None:
                continue
            reason = self._reason_to_skip(model, module, aliases)
            if reason is None and not rule.options["untie"]:
                reason = _tie(module, names, owners)
            if reason is None:
                targets.append(_Target(aliases, module, self._build(aliases[0], module, rule.options)))
            else:
                skipped.append(SkippedLayer(aliases[0], reason))
        return targets, skipped

    def _reason_to_skip(self, model: nn.Module, module: nn.Module, aliases: list[str]) -> str | None:
        if isinstance(module, _Replacement):
            return "already block-sparse"
        if not self.is_patchable(aliases[0], module):
            kind = type(module)
            return "is_patchable refuses it" if kind is nn.Linear else f"{kind.__name__} is not nn.Linear"
        if module is model:
            return "the model itself cannot be replaced in place"
        parents = (model.get_submodule(name.rpartition(".")[0]) for name in aliases)
        if torch.backends.mha.get_fastpath_enabled() and any(
            isinstance(parent, nn.TransformerEncoderLayer) for parent in parents
        ):
            return (
                "nn.TransformerEncoderLayer reads its weight directly in inference; call "
                "torch.backends.mha.set_fastpath_enabled(False) first"
            )
        return None

    def _build(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> _Replacement:
        try:
            return self.new_child_module(name, module, options)
        except TileSparseError as error:
            raise type(error)(f"layer {name!r}: {error}") from error

    def _replace(self, model: nn.Module, targets: Sequence[_Target]) -> None:
        originals = self._originals.setdefault(model, {})
        for target in targets:
            for name in target.names:
                _set_submodule(model, name, target.replacement)
                originals[name] = target.module


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(options) - set(DEFAULT_OPTIONS))
    if unknown:
        raise InvalidArgumentError(f"options: names from {sorted(DEFAULT_OPTIONS)} expected, got {unknown}")
    checked = {**DEFAULT_OPTIONS, **options}
    density, block_shape = checked["density"], checked["block_shape"]
    if not isinstance(density, int | float) or not 0 <= density <= 1:
        raise InvalidArgumentError(f"density: a number from 0 to 1 expected, got {density!r}")
    if (
        not isinstance(block_shape, Sequence)
        or len(block_shape) != 2
        or any(size not in BLOCK_SIZES for size in block_shape)
    ):
        raise InvalidArgumentError(
            f"block_shape: (bn, bk) with sizes from {BLOCK_SIZES} expected, got {block_shape!r}"
        )
    for name in ("expand", "pseudo_linear", "untie"):
        if not isinstance(checked[name], bool):
            raise InvalidArgumentError(f"{name}: True or False expected, got {checked[name]!r}")
    return checked


def _names_of_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _owners_of_parameters(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[nn.Module]]:
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return owners


def _tie(
    module: nn.Module,
    names: Mapping[nn.Module, list[str]],
    owners: Mapping[nn.Parameter, list[nn.Module]],
) -> str | None:
    for name, parameter in module.named_parameters(recurse=False):
        others = [names[owner][0] for owner in owners[parameter] if owner is not module]
        if others:
            return f"{name} is shared with {', '.join(others)}; the option untie patches it all the same"
    return None


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _size(modules: Iterable[nn.Module]) -> Size:
    parameters: set[torch.Tensor] = set()
    buffers: set[torch.Tensor] = set()
    for module in modules:
        parameters.update(module.parameters(recurse=False))
        buffers.update(module.buffers(recurse=False))
    return Size(
        sum(parameter.numel() for parameter in parameters),
        sum(tensor.nbytes for tensor in parameters | buffers),
    )


def _report(
    names: Mapping[nn.Module, list[str]],
    targets: Sequence[_Target],
    skipped: list[SkippedLayer],
    unmatched: list[str],
) -> PatchReport:
    replaced = {target.module: target.replacement for target in targets}
    layers = [
        PatchedLayer(
            target.names[0],
            (target.replacement.out_features, target.replacement.in_features),
            target.replacement.block_shape,
            target.replacement.density,
            _size([target.module]),
            _size([target.replacement]),
        )
        for target in targets
    ]
    after = _size(replaced.get(module, module) for module in names)
    return PatchReport(layers, skipped, unmatched, _size(names), after)


def _sizes(before: Size, after: Size) -> tuple[str, str, str, str]:
    numbers = (before.parameters, after.parameters, before.bytes, after.bytes)
    return tuple(f"{number:,}" for number in numbers)  # type: ignore[return-value]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        name.ljust(first) + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]
