"""Whole models pruned: which layers, in which order, by what data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import _progress
from .._arguments import checked
from .._replay.batches import chosen_device, evaluating
from .._reports import empty_of
from ..errors import InvalidArgumentError, TileSparseError
from ..integrations.transformers_hooks import check_can_follow
from ..nn.linear import BlockSparseLinear, dense_weight, is_conv1d
from ..patch.matching import CannotBeCutError, check_blocks_can_be_chosen
from ..patch.modules import names_of_modules
from ..patch.patcher import BlockSparseModelPatcher
from ..patch.reports import PatchReport, SkippedLayer, warn_of_empty
from ..patch.weight_reads import Read, weight_reads
from ..pattern.block_pattern import BlockPattern
from ._checks import (
    check_model,
    check_numbers,
    checked_choice,
    checked_moments,
    checked_path,
    collected,
)
from .calibration import Calibration, Forward, Loss, Unit, call_model, own_loss
from .choice import Choice, ErrorCurves
from .compensation import DAMPING
from .layer import GRADIENT_METHODS, Pruner, Solution, built, dense_parameters
from .report import PrunedLayer, PruneReport, warn_of_dense, warn_of_few_tokens
from .resume import Progress


@checked
def prune_model(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    density: float | None = None,
    block_shape: int | Sequence[int] = 64,
    method: str = "obs",
    layers: str | Sequence[str] | None = None,
    nm: Sequence[int] | None = None,
    storage: str = "plain",
    policy: str = "sparse",
    choices: Mapping[str, Choice | None] | None = None,
    patterns: Mapping[str, BlockPattern] | None = None,
    refit: bool = True,
    damping: float = DAMPING,
    forward: Forward | None = None,
    loss: Loss | None = None,
    device: torch.device | str | int | None = None,
    folder: str | os.PathLike[str] | None = None,
    strict: bool = True,
) -> PruneReport:
    """Makes the linear layers of a trained model block-sparse, in place, so that their outputs change least.

    Layers are pruned by their inputs on calibration data, see `tilesparse.prune.compensation`. Where the
    model has a stack of blocks, such as the layers of a transformer, it goes block by block, and the inputs
    of each come from the pruned blocks before it; only one block is on ``device`` at a time. Layers outside
    the stack come last. Within a block they are pruned in the order in which they run, those together that
    have the same input, and each is fitted to the output that it has in the dense model, from the inputs that
    it has in the pruned one.

    The model computes as in evaluation, without dropout, and is changed only at the very end: if anything
    fails before, or is interrupted, it is as it was. Build optimizers afterwards: the layers have new
    parameters.

    Args:
        model: any module; Transformers' models are saved by ``save_pretrained`` afterwards.
        batches: calibration data: an iterable, gone through once and kept in memory. A mapping gives keyword
            arguments of the model, a tuple or list positional ones, anything else is its one argument. Where
            a mapping has a two-dimensional ``attention_mask``, tokens that it masks do not count.
        density: kept fraction of the blocks of every layer, above 0 and at most 1; 0.5 where neither it nor
            ``choices`` nor ``patterns`` is given, which it cannot stand beside.
        block_shape: (bn, bk), or one number for both.
        method: how blocks are chosen. "obs" by what their removal costs when the others make up for it, one
            after the other; "wanda", "magnitude", "taylor" and "movement" by scores, see
            `tilesparse.prune.scores`, the last two by gradients of ``loss``.
        layers: regular expressions, matched against the start of names of layers. None is every linear layer
            that `BlockSparseModelPatcher` takes and that can be cut into such blocks: output embeddings and
            tied layers stay dense, and the report says so. A layer that cannot be cut is an error where one
            writes out the last part of its name.
        nm: (2, 4) for 2:4 inside the blocks, or None. The two of four are chosen after the blocks, by what
            each alone costs, and the refit is exact for them as well.
        storage: "plain", "compressed" (of 2:4 alone), "int8" or "float8_e4m3fn".
        policy: how the layers compute, see `BlockSparseLinear`.
        choices: by names of layers, in place of ``density``, ``block_shape``, ``nm``, ``storage`` and
            ``layers``; None stays dense, as do layers that are not in it. Where all are None nothing changes.
        patterns: blocks chosen elsewhere, by names of layers, in place of ``density``, ``block_shape``,
            ``layers`` and ``method``: only the refit remains.
        refit: whether the kept weights make up for the others.
        damping: of the second moment of the inputs, over the mean of its diagonal.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        loss: ``loss(model, batch)`` gives a scalar to "taylor" and "movement". None is the ``loss`` of what
            the model gives, as of Transformers' models for batches with labels.
        device: where blocks of the stack and all matrices are computed; None is that of the model's first
            parameter. What is outside the stack runs where it is.
        folder: for progress: layers that are done are kept there, and a run with the same model, data and
            arguments goes on behind them. On one CPU the result is the same bit for bit. Delete it yourself.
        strict: raise where an expression of ``layers`` prunes no layer, or all of them none. False leaves
            that to the report.

    Warns:
        UserWarning: layers have met fewer tokens than they have inputs (and one more with a bias), without
            which XᵀX cannot have full rank, so that weights fit these tokens alone and errors are too small;
            or chosen blocks leave block rows or columns of layers empty; or with ``layers=None`` most
            parameters are in no linear layer and stay dense.

    Raises:
        InvalidArgumentError: an argument is not allowed, no layer is left to prune, one that was asked for
            cannot be, the calibration data are none, never run a layer, or have NaN or infinities at a layer,
            or ``folder`` belongs to another pruning.
        CheckpointError: a file in ``folder`` is damaged.

    Examples:
        >>> report = tilesparse.prune.prune_model(model, batches, density=0.5, block_shape=64)
        >>> print(report)
    """
    check_numbers(method, damping, refit, policy)
    if choices is not None and patterns is not None:
        raise InvalidArgumentError("choices, patterns: at most one of them expected")
    if layers is not None and (choices is not None or patterns is not None):
        raise InvalidArgumentError("layers: None expected beside choices or patterns, which name the layers")
    if density is not None and (choices is not None or patterns is not None):
        argument = "patterns" if choices is None else "choices"
        raise InvalidArgumentError(
            f"density must be None beside {argument}, which say it for each layer, got {density!r}"
        )
    check_model(model)
    if choices is None and patterns is None:
        uniform = Choice(0.5 if density is None else density, block_shape, nm, storage)  # type: ignore[arg-type]
        targets, skipped = _matched(model, layers, uniform, strict)
    elif patterns is None:
        targets, skipped = _named(model, choices or {}, "choices")
    else:
        named = {name: _choice_of(name, pattern, nm, storage) for name, pattern in patterns.items()}
        targets, skipped = _named(model, named, "patterns")
        _check_shapes_of(model, patterns)
    # With choices all are None: a plan that has found room for all layers.
    if not targets and (choices or not strict):
        unchanged = _Replacer({}).patch_model(model, dry_run=True, strict=False)
        return _report({}, {}, skipped, None, method, unchanged)
    if not targets:
        raise InvalidArgumentError(f"model: no layer is left to prune; {_why(skipped)}")
    data = collected(batches)
    device = chosen_device(model, device)
    check_can_follow(model)
    progress = None
    if folder is not None:
        arguments: dict[str, Any] = {
            "method": method,
            "refit": refit,
            "damping": float(damping),
            "choices": targets,
            "patterns": {name: _indices(pattern) for name, pattern in (patterns or {}).items()},
        }
        progress = Progress(checked_path(folder), model, data, arguments)
    with evaluating(model):
        block_scores: Mapping[str, Tensor] = {}
        if patterns is None and method in GRADIENT_METHODS:
            block_scores = _gradient_scores(model, data, targets, method, forward, loss)
        calibration = Calibration(model, data, forward or call_model, list(targets), device, compare=refit)
        run = _Run(model, calibration, targets, damping, progress)

        def solution(name: str, pruner: Pruner) -> Solution:
            return pruner.prune(
                targets[name],
                method,
                refit=refit,
                pattern=None if patterns is None else patterns[name],
                block_scores=block_scores.get(name),
            )[0]

        solutions = run.solutions(solution)
    made = {name: built(run.layer(name), found, targets[name], policy) for name, found in solutions.items()}
    done = _Replacer(made).patch_model(model)
    report = _report(targets, solutions, skipped, calibration.stack, _method(method, patterns), done)
    if refit or (method == "obs" and patterns is None):
        warn_of_few_tokens(model, {layer.name: layer.tokens for layer in report.layers})
    if patterns is None:
        warn_of_empty(report.layers)
    if layers is None and choices is None and patterns is None:
        warn_of_dense(model, report.dense)
    return report


@checked
def measure_errors(
    model: nn.Module,
    batches: Iterable[Any],
    choices: Sequence[Choice],
    *,
    layers: str | Sequence[str] | None = None,
    method: str = "obs",
    refit: bool = True,
    damping: float = DAMPING,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
) -> ErrorCurves:
    """What each choice would do to the output of each layer, of the dense model; nothing changes.

    Inputs are those of the dense model, gathered block by block as in `prune_model`. With "obs" the order in
    which blocks go is found once for each block shape, and serves all densities.

    Args:
        model: dense; only read.
        batches: calibration data, as of `prune_model`.
        choices: ways to store a layer. A layer that cannot be cut into some blocks, or of which a density
            rounds to no block, has no entries for these.
        layers: regular expressions of names, or None, as of `prune_model`.
        method: as of `prune_model`, one that needs no gradient.
        refit: whether the kept weights make up for the others.
        damping: as of `prune_model`.
        forward: as of `prune_model`.
        device: where blocks of the stack and all matrices are computed, as of `prune_model`.

    Returns:
        By layer and choice ‖y - ŷ‖² / ‖X Wᵀ‖², of the layer as it would be stored.

    Warns:
        UserWarning: of too few tokens, as `prune_model`.

    Raises:
        InvalidArgumentError: as of `prune_model`.
    """
    check_numbers(method, damping, refit, "sparse")
    if method in GRADIENT_METHODS:
        raise InvalidArgumentError(f"method: one that needs no gradient expected, got {method!r}")
    if not isinstance(choices, Iterable):
        raise InvalidArgumentError(f"choices: a list of Choice expected, got {choices!r}")
    checked = [checked_choice(choice, "choices: ") for choice in choices]
    if not checked:
        raise InvalidArgumentError("choices: at least one expected, got none")
    check_model(model)
    fitting: dict[str, list[Choice]] = {}
    reasons: list[SkippedLayer] = []
    for choice in dict.fromkeys(checked):
        targets, skipped = _matched(model, layers, choice, strict=False, cut=False)
        reasons += skipped
        for name in targets:
            fitting.setdefault(name, []).append(choice)
    if not fitting:
        raise InvalidArgumentError(f"model: no layer is left to measure; {_why(reasons)}")
    order = [name for name, _ in model.named_modules() if name in fitting]
    data, device = collected(batches), chosen_device(model, device)
    curves: dict[str, dict[Choice, float]] = {}
    tokens: dict[str, int] = {}
    with evaluating(model):
        calibration = Calibration(model, data, forward or call_model, order, device, compare=False)
        run = _Run(model, calibration, fitting, damping)
        for name, pruner in run.pruners():
            tokens[name] = pruner.tokens
            curves[name] = {
                choice: pruner.prune(choice, method, refit=refit)[0].error for choice in fitting[name]
            }
    if refit or method == "obs":
        warn_of_few_tokens(model, tokens)
    return curves


class _Run:
    """The way of the data through the model, with what becomes of layers on it."""

    def __init__(
        self,
        model: nn.Module,
        calibration: Calibration,
        targets: Mapping[str, Any],
        damping: float,
        progress: Progress | None = None,
    ) -> None:
        self._model, self._calibration, self._targets = model, calibration, targets
        self._damping, self._progress = damping, progress
        self._said = _progress.Progress(len(targets))
        self._done = 0

    def layer(self, name: str) -> Any:
        return self._model.get_submodule(name)

    def pruners(self) -> Iterator[tuple[str, Pruner]]:
        """Of all layers, by the inputs that they have in the dense model."""
        for unit in self._calibration.units():
            for group in self._calibration.groups(unit):
                yield from self._of(unit, group, {})
            self._calibration.advance(unit, {})

    def solutions(self, solve: Callable[[str, Pruner], Solution]) -> dict[str, Solution]:
        """Of all layers, by the inputs that they have behind pruned blocks."""
        solutions: dict[str, Solution] = {}
        for unit in self._calibration.units():
            solutions |= self._saved(unit)
            # Layers outside the stack come last, and run with everything before them pruned.
            before = (
                [] if unit.number is not None else [name for name in solutions if name not in unit.layers]
            )
            parameters = self._parameters(before, solutions)
            for group in self._calibration.groups(unit):
                missing = [name for name in group if name not in solutions]
                for name, pruner in self._of(unit, missing, parameters):
                    with _about(name):
                        solutions[name] = solve(name, pruner)
                    if self._progress is not None:
                        self._progress.save(name, solutions[name])
                parameters |= self._parameters(group, solutions)
            self._calibration.advance(unit, parameters)
        return solutions

    def _saved(self, unit: Unit) -> dict[str, Solution]:
        if self._progress is None:
            return {}
        found = {}
        for name in unit.layers:
            shape = dense_weight(self.layer(name)).shape
            solution = self._progress.load(name, self._targets[name].block_shape, (shape[0], shape[1]))
            if solution is not None:
                found[name] = solution
        self._done += len(found)
        self._said.skip(len(found))
        return found

    def _of(
        self, unit: Unit, names: list[str], parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Pruner]]:
        """Of layers that have the same input."""
        if not names:
            return
        moments = checked_moments(names[0], self._calibration.moments(unit, names[0], parameters))
        for name in names:
            with _about(name):
                pruner = Pruner(self.layer(name), moments, self._damping)
            yield name, pruner
            self._done += 1
            self._said.show(self._done, f"layers pruned, {name} the last")

    def _parameters(self, names: Iterable[str], solutions: Mapping[str, Solution]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            layer = built(self.layer(name), solutions[name], self._targets[name])
            found |= dense_parameters(name, self.layer(name), layer)
        return found


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Says in errors which layer they are about."""
    try:
        yield
    except TileSparseError as error:
        raise type(error)(f"layer {name!r}: {error}") from error


class _Replacer(BlockSparseModelPatcher):
    """Patches a model with layers that are there already."""

    def __init__(self, made: Mapping[str, BlockSparseLinear]) -> None:
        super().__init__()
        self._made = made
        for name, layer in made.items():
            self.add_pattern(re.escape(name), {"pattern": layer.pattern}, fullmatch=True)

    def new_child_module(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> BlockSparseLinear:
        return self._made[name]


# Which layers.


def _matched(
    model: nn.Module,
    layers: str | Sequence[str] | None,
    choice: Choice,
    strict: bool = True,
    cut: bool = True,
    reads: Mapping[nn.Module, Read] | None = None,
) -> tuple[dict[str, Choice], list[SkippedLayer]]:
    """Layers that a choice is for, and linear ones that stay dense.

    Args:
        model: only read.
        layers: regular expressions, or None for all.
        choice: for all of them.
        strict: each expression has to find a layer.
        cut: one that is named has to fit the blocks.
        reads: `weight_reads` of the model, where it is known.
    """
    patcher = BlockSparseModelPatcher()
    regexes = [".*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    for regex in regexes:
        try:
            patcher.add_pattern(regex, _options(choice))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"layers: {error}") from error
    names = names_of_modules(model)
    matched, others = patcher._match(model, names, weight_reads(model) if reads is None else reads)
    targets: dict[str, Choice] = {}
    for module, aliases, _, named in matched:
        try:
            with _about(aliases[0]):
                check_blocks_can_be_chosen(module, choice.block_shape)
        except CannotBeCutError as error:
            if cut and named:
                raise
            others.append(SkippedLayer(aliases[0], type(module).__name__, str(error.__cause__)))
        else:
            targets[aliases[0]] = choice
    if strict and layers is not None and targets:
        patcher._check_rules(names, {model.get_submodule(name) for name in targets}, others)
    return targets, [layer for layer in others if _is_linear(model, layer.name)]


def _named(
    model: nn.Module, choices: Mapping[str, Choice | None], argument: str
) -> tuple[dict[str, Choice], list[SkippedLayer]]:
    """Layers with a choice each, in the order of the model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    reads = weight_reads(model)
    targets: dict[str, Choice] = {}
    skipped: list[SkippedLayer] = []
    for name, choice in choices.items():
        if name not in modules:
            raise InvalidArgumentError(f"{argument}: names of layers expected, got {name!r}")
        if choice is None:
            skipped.append(SkippedLayer(name, type(modules[name]).__name__, "choices say None"))
            continue
        choice = checked_choice(choice, f"{argument}: layer {name!r}: ")
        found, refused = _matched(model, f"{re.escape(name)}$", choice, strict=False, reads=reads)
        if not found:
            reason = refused[0].reason if refused else "not nn.Linear"
            raise InvalidArgumentError(f"{argument}: layer {name!r} cannot be pruned: {reason}")
        first = next(iter(found))
        if first != name:
            raise InvalidArgumentError(f"{argument}: {name!r} is another name of {first!r}; use that one")
        targets[first] = choice
    return {name: targets[name] for name, _ in model.named_modules() if name in targets}, skipped


def _options(choice: Choice) -> dict[str, Any]:
    return {
        "density": choice.density,
        "block_shape": choice.block_shape,
        "nm": choice.nm,
        "storage": choice.storage,
    }


def _is_linear(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name)
    return isinstance(module, nn.Linear | BlockSparseLinear) or is_conv1d(module)


def _choice_of(name: str, pattern: BlockPattern, nm: Any, storage: str) -> Choice:
    if pattern.nnz == 0:
        raise InvalidArgumentError(
            f"patterns: a BlockPattern with blocks expected for {name!r}, got {pattern!r}"
        )
    return Choice(pattern.density, pattern.block_shape, nm, storage)


def _check_shapes_of(model: nn.Module, patterns: Mapping[str, BlockPattern]) -> None:
    for name, pattern in patterns.items():
        shape = tuple(dense_weight(model.get_submodule(name)).shape)
        if pattern.shape != shape:
            raise InvalidArgumentError(
                f"patterns: layer {name!r}: shape {shape} expected, got {pattern.shape}"
            )


def _why(skipped: Sequence[SkippedLayer]) -> str:
    if not skipped:
        return "no linear layer is named so"
    return "; ".join(dict.fromkeys(f"{layer.name!r}: {layer.reason}" for layer in skipped[:3]))


# Gradients.


def _gradient_scores(
    model: nn.Module,
    batches: Sequence[Any],
    targets: Mapping[str, Choice],
    method: str,
    forward: Forward | None,
    loss: Loss | None,
) -> dict[str, Tensor]:
    """Scores of blocks by "taylor" and "movement", added up over the batches."""
    score = GRADIENT_METHODS[method]
    weights = [model.get_submodule(name).get_parameter("weight") for name in targets]
    frozen = [weight for weight in weights if not weight.requires_grad]
    found: dict[str, Tensor] = {}
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        for number, batch in enumerate(batches):
            with torch.enable_grad():
                value = loss(model, batch) if loss else own_loss((forward or call_model)(model, batch))
                if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                    raise InvalidArgumentError(
                        "loss: a tensor with one number that depends on the weights expected, got "
                        f"{type(value).__name__ if not isinstance(value, Tensor) else tuple(value.shape)}"
                    )
                gradients = torch.autograd.grad(value, weights, allow_unused=True)
            for (name, choice), gradient in zip(targets.items(), gradients, strict=True):
                layer = model.get_submodule(name)
                if gradient is None:
                    continue
                gradient = gradient.T if is_conv1d(layer) else gradient
                scores = score(dense_weight(layer), gradient, choice.block_shape)
                if not bool(scores.isfinite().all()):
                    raise InvalidArgumentError(
                        f"loss: batch {number} (counted from 0) gives layer {name!r} a gradient with NaN or "
                        "infinities"
                    )
                found[name] = found[name] + scores if name in found else scores
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
    without = [name for name in targets if name not in found]
    if without:
        raise InvalidArgumentError(f"loss: does not depend on layer {without[0]!r}")
    return found


# Reports.


def _indices(pattern: BlockPattern) -> list[list[int]]:
    return [pattern.crow_indices.tolist(), pattern.col_indices.tolist(), pattern.slot.tolist()]


def _method(method: str, patterns: object) -> str:
    return method if patterns is None else "given patterns"


def _report(
    targets: Mapping[str, Choice],
    solutions: Mapping[str, Solution],
    skipped: list[SkippedLayer],
    stack: str | None,
    method: str,
    done: PatchReport,
) -> PruneReport:
    layers = [
        PrunedLayer(
            name,
            found.pattern.shape,
            targets[name],
            found.pattern.density,
            found.error_before_refit,
            found.error,
            found.damping,
            found.tokens,
            *empty_of(found.pattern.block_indices(), found.pattern.shape, found.pattern.block_shape),
        )
        for name, found in solutions.items()
    ]
    return PruneReport(layers, skipped, stack, method, done.before, done.after, done.dense)
