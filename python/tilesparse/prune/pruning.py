"""Layers of a model pruned on calibration data and replaced, with a report."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import BLOCK_SIZES
from .._listeners import check_can_change
from .._replay.batches import chosen_device, observing
from .._reports import empty_of
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..patch.modules import Replacement
from ..patch.patcher import BlockSparseModelPatcher
from ..patch.reports import PatchReport, SkippedLayer, warn_of_empty
from ..pattern.block_pattern import BlockPattern
from ._checks import check_numbers, checked_path, collected
from .calibration import Calibration, Forward, Loss, call_model
from .experts import LinearExperts, check_configs_of, expanded, joined, place_in, tokens_of_projections
from .gradients import gradient_scores
from .layer import GRADIENT_METHODS, Pruner, Solution, built
from .report import PrunedLayer, PruneReport, warn_of_dense, warn_of_few_tokens
from .resume import Progress
from .run import Run
from .targets import STAYS_DENSE, reasons


class PruneOptions(NamedTuple):
    """Arguments of `prune_` that do not say which layers become what."""

    method: str
    refit: bool
    damping: float
    forward: Forward | None
    loss: Loss | None
    device: torch.device | str | int | None
    folder: str | os.PathLike[str] | None
    strict: bool

    def check(self) -> None:
        """Raise InvalidArgumentError for a value that is not allowed."""
        check_numbers(self.method, self.damping, self.refit)


def prune_targets(
    model: nn.Module,
    batches: Iterable[Any],
    choose: Callable[[], tuple[dict[str, BlockSparseConfig], list[SkippedLayer]]],
    patterns: Mapping[str, BlockPattern] | None,
    options: PruneOptions,
    all_layers: bool = False,
) -> PruneReport:
    """Prune layers; `all_layers` says that no argument names them.

    ``choose`` returns them with those that are skipped, by the names that layers have while experts are
    linear layers, see `expanded`.
    """
    with expanded(model) as experts:
        targets, skipped = choose()
        # As a plan may want.
        all_stay_dense = bool(skipped) and all(one.reason == STAYS_DENSE for one in skipped)
        if not targets and not all_stay_dense and options.strict:
            raise InvalidArgumentError(f"model: no layer is left to prune; {reasons(skipped)}")
        made: dict[str, Any] = {}
        solutions: dict[str, Solution] = {}
        stack = None
        if targets:
            check_configs_of(experts, targets)
            data = collected(batches)
            check_can_change(model)
            run, solutions = _solutions(model, data, targets, patterns, options)
            layers = {name: built(run.layer(name), found, targets[name]) for name, found in solutions.items()}
            made, stack = joined(experts, layers, targets), run.stack
    done = _Replacer(made).patch_model(model, strict=bool(made), dry_run=not made)
    method = options.method if patterns is None else "given patterns"
    report = _report(targets, solutions, skipped, stack, method if made else options.method, done, experts)
    if made and (options.refit or method == "obs"):
        tokens = {layer.name: layer.tokens for layer in report.layers}
        warn_of_few_tokens(model, tokens_of_projections(experts, tokens))
    if made and patterns is None:
        warn_of_empty(layer for layer in report.layers if place_in(experts, layer.name) is None)
    if made and all_layers:
        warn_of_dense(model, report.dense)
    return report


def _solutions(
    model: nn.Module,
    data: Sequence[Any],
    targets: Mapping[str, BlockSparseConfig],
    patterns: Mapping[str, BlockPattern] | None,
    options: PruneOptions,
) -> tuple[Run, dict[str, Solution]]:
    """Return what each layer becomes, and the run that found it."""
    method, refit, damping, forward, loss, device, folder, _ = options
    device = chosen_device(model, device)
    progress = None
    if folder is not None:
        arguments: dict[str, Any] = {
            "method": method,
            "refit": refit,
            "damping": float(damping),
            "configs": targets,
            "patterns": {name: _indices(pattern) for name, pattern in (patterns or {}).items()},
        }
        progress = Progress(checked_path(folder), model, data, arguments)
    with observing(model):
        block_scores: Mapping[str, Tensor] = {}
        if patterns is None and method in GRADIENT_METHODS:
            block_scores = gradient_scores(model, data, targets, method, forward, loss)
        calibration = Calibration(model, data, forward or call_model, list(targets), device, compare=refit)
        run = Run(model, calibration, targets, damping, progress)

        def solution(name: str, pruner: Pruner) -> Solution:
            return pruner.prune(
                targets[name],
                method,
                refit=refit,
                pattern=None if patterns is None else patterns[name],
                block_scores=block_scores.get(name),
            )[0]

        return run, run.solutions(solution)


class _Replacer(BlockSparseModelPatcher):
    """Patcher that puts layers into a model that are made already."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        super().__init__()
        self._made = made
        for name, layer in made.items():
            linear = isinstance(layer, BlockSparseLinear)
            options = (
                {"pattern": layer.pattern} if linear else {"density": 1, "block_shape": min(BLOCK_SIZES)}
            )
            self.add_pattern(re.escape(name), options, fullmatch=True)

    def new_child_module(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> Replacement:
        made: Replacement = self._made[name]
        return made


def _indices(pattern: BlockPattern) -> list[list[int]]:
    return [pattern.crow_indices.tolist(), pattern.col_indices.tolist(), pattern.slot.tolist()]


def _report(
    targets: Mapping[str, BlockSparseConfig],
    solutions: Mapping[str, Solution],
    skipped: list[SkippedLayer],
    stack: str | None,
    method: str,
    done: PatchReport,
    experts: Mapping[str, LinearExperts],
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
            None if place_in(experts, name) is None else name.rpartition(".")[0],
        )
        for name, found in solutions.items()
    ]
    return PruneReport(layers, skipped, stack, method, done.before, done.after, done.dense)
