"""Make the linear layers of whole models block-sparse, chosen by regular expressions on their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .errors import InvalidArgumentError
from .linear import BlockSparseLinear, PseudoBlockSparseLinear
from .pattern import BlockPattern

DEFAULT_OPTIONS: Mapping[str, Any] = {
    "density": 0.5,
    "block_shape": (32, 32),
    "pseudo_linear": False,
    "untie": False,
}


@dataclass(frozen=True)
class PatchedLayer:
    """One replaced layer: sizes in numbers (parameters) and bytes (parameters and buffers)."""

    name: str
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    density: float
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class SkippedLayer:
    """A module that a pattern matched and that was left alone, and why."""

    name: str
    reason: str


@dataclass
class PatchReport:
    """What `BlockSparseModelPatcher.patch_model` did, or would do; ``str()`` makes a table of it.

    `parameters_before` and the like are of the whole model, every tied tensor counted once.
    """

    layers: list[PatchedLayer] = field(default_factory=list)
    skipped: list[SkippedLayer] = field(default_factory=list)
    unmatched_patterns: list[str] = field(default_factory=list)
    parameters_before: int = 0
    parameters_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        rows = [("layer", "shape", "block", "density", "parameters", "after", "bytes", "after")]
        rows += [_layer_row(layer) for layer in self.layers]
        rows.append(("patched layers", "", "", "", *_totals(self.layers)))
        rows.append(("whole model", "", "", "", *_totals([self])))
        lines = _align(rows)
        lines += [f"skipped: {text}" for text in self._skipped_by_reason()]
        lines += [f"matched nothing: {regex}" for regex in self.unmatched_patterns]
        return "\n".join(lines)

    def _skipped_by_reason(self) -> Iterator[str]:
        for reason, count in Counter(layer.reason for layer in self.skipped).items():
            first = next(layer.name for layer in self.skipped if layer.reason == reason)
            others = f" and {count - 1} more" if count > 1 else ""
            yield f"{first or '(the model)'}{others}: {reason}"


@dataclass(frozen=True)
class _Rule:
    """One pattern of the user with its complete options."""

    regex: re.Pattern[str]
    fullmatch: bool
    options: dict[str, Any]

    def matches(self, name: str) -> bool:
        match = self.regex.fullmatch if self.fullmatch else self.regex.match
        return match(name) is not None


@dataclass(frozen=True)
class _Target:
    """A module to replace: all the names it is registered under, and the options that apply."""

    names: list[str]
    module: nn.Linear
    options: dict[str, Any]


class BlockSparseModelPatcher:
    """Replaces `torch.nn.Linear` layers of a model by `BlockSparseLinear`, in place.

    >>> patcher = BlockSparseModelPatcher()
    >>> patcher.add_pattern(r"encoder\\.layer\\.\\d+\\.intermediate", {"density": 0.25})
    >>> report = patcher.patch_model(model)
    >>> print(report)

    The weights kept are the blocks of largest Frobenius norm, with their values; to train from
    scratch, call `BlockSparseLinear.reset_parameters` on the new layers, which scales them to their
    smaller fan-in. Build the optimizer after patching: the layers have new parameters.

    Only `torch.nn.Linear` itself is replaced. Its subclasses and Transformers' ``Conv1D`` (whose
    weight is transposed) are reported as skipped; override `is_patchable` and `new_child_module` to
    handle such layers.

    The patcher keeps the modules it replaces, for `undo`, until it is dropped itself.
    """

    def __init__(self) -> None:
        self._rules: list[_Rule] = []
        self._originals: MutableMapping[nn.Module, dict[str, nn.Module]] = WeakKeyDictionary()

    def add_pattern(
        self, regex: str, options: Mapping[str, Any] | None = None, *, fullmatch: bool = False
    ) -> None:
        """Says how layers whose qualified name matches `regex` are patched; the first match wins.

        Args:
            regex: matched against the start of names as in ``model.named_modules()`` (`re.match`).
            options: any of ``density`` (kept fraction, 0.5), ``block_shape`` ((bn, bk), (32, 32)),
                ``pseudo_linear`` (use `PseudoBlockSparseLinear`, False) and ``untie`` (patch a layer
                even if its parameters are shared with another module, which keeps the dense ones,
                False).
            fullmatch: the whole name has to match (`re.fullmatch`).

        Raises:
            InvalidArgumentError: `regex` is no regular expression, or an option is unknown or wrong.
        """
        try:
            compiled = re.compile(regex)
        except (re.error, TypeError) as error:
            raise InvalidArgumentError(f"regex {regex!r} is not a regular expression: {error}") from error
        self._rules.append(_Rule(compiled, fullmatch, _checked_options(options or {})))

    def is_patchable(self, name: str, module: nn.Module) -> bool:
        """Whether a module is of a kind that `new_child_module` can replace. Override to change it."""
        return type(module) is nn.Linear

    def new_child_module(self, name: str, module: nn.Linear, options: Mapping[str, Any]) -> nn.Module:
        """Makes the replacement of one layer. `options` has a value for every option."""
        layer = BlockSparseLinear.from_linear(
            module, options["density"], block_shape=options["block_shape"]
        )
        return PseudoBlockSparseLinear(layer) if options["pseudo_linear"] else layer

    def get_patchable_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """The layers of `model` that patterns can apply to, by qualified name."""
        return {name: module for name, module in model.named_modules() if self.is_patchable(name, module)}

    def patch_model(self, model: nn.Module, *, dry_run: bool = False) -> PatchReport:
        """Replaces every layer that a pattern matches, all or, on any error, none.

        A module registered under several names is replaced by one module under all of them.

        Args:
            model: changed in place.
            dry_run: report what would be done, and leave `model` as it is.

        Raises:
            InvalidArgumentError: a matched layer cannot be cut into its ``block_shape``.
        """
        names = _names_by_module(model)
        report = PatchReport(unmatched_patterns=self._unmatched(names.values()))
        targets = self._targets(model, names, report)
        replacements = {id(target.module): self._build(target) for target in targets}
        _fill_report(report, model, targets, replacements)
        if not dry_run:
            originals = self._originals.setdefault(model, {})
            for target in targets:
                for name in target.names:
                    _set_submodule(model, name, replacements[id(target.module)])
                    originals[name] = target.module
        return report

    def undo(self, model: nn.Module) -> None:
        """Puts back the very modules that this patcher replaced in `model`.

        Raises:
            InvalidArgumentError: this patcher has not patched `model` (a copy of a patched model is
                another model).
        """
        if model not in self._originals:
            raise InvalidArgumentError("model has not been patched by this patcher, or was already undone")
        for name, module in self._originals.pop(model).items():
            _set_submodule(model, name, module)

    def _unmatched(self, names: Iterable[list[str]]) -> list[str]:
        every = [name for group in names for name in group]
        return [rule.regex.pattern for rule in self._rules if not any(map(rule.matches, every))]

    def _rule_for(self, names: list[str]) -> _Rule | None:
        return next((rule for rule in self._rules if any(map(rule.matches, names))), None)

    def _targets(
        self, model: nn.Module, names: dict[nn.Module, list[str]], report: PatchReport
    ) -> list[_Target]:
        owners = _parameter_owners(names)
        targets = []
        for module, aliases in names.items():
            rule = self._rule_for(aliases)
            if rule is None:
                continue
            reason = self._reason_to_skip(model, module, aliases, rule.options, owners)
            if reason is not None:
                report.skipped.append(SkippedLayer(aliases[0], reason))
                continue
            assert isinstance(module, nn.Module)
            targets.append(_Target(aliases, module, rule.options))
        return targets
