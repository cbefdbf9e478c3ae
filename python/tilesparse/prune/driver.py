"""Whole models pruned: which layers, in which order, by what data."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._replay.batches import chosen_device, evaluating
from .._reports import empty_of
from ..errors import InvalidArgumentError
from ..integrations.transformers_hooks import check_can_follow
from ..nn.linear import BlockSparseLinear
from ..patch.patcher import BlockSparseModelPatcher
from ..patch.reports import PatchReport, SkippedLayer, warn_of_empty
from ..pattern.block_pattern import BlockPattern
from ._checks import check_model, check_numbers, checked_path, collected
from .calibration import Calibration, Forward, Loss, call_model
from .choice import Choice
from .compensation import DAMPING
from .gradients import gradient_scores
from .layer import GRADIENT_METHODS, Pruner, Solution, built
from .report import PrunedLayer, PruneReport, warn_of_dense, warn_of_few_tokens
from .resume import Progress
from .run import Run
from .targets import check_shapes_of, choice_of, reasons, targets_matching, targets_named


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
        targets, skipped = targets_matching(model, layers, uniform, strict)
    elif patterns is None:
        targets, skipped = targets_named(model, choices or {}, "choices")
    else:
        named = {name: choice_of(name, pattern, nm, storage) for name, pattern in patterns.items()}
        targets, skipped = targets_named(model, named, "patterns")
        check_shapes_of(model, patterns)
    # With choices all are None: a plan that has found room for all layers.
    if not targets and (choices or not strict):
        unchanged = _Replacer({}).patch_model(model, dry_run=True, strict=False)
        return _report({}, {}, skipped, None, method, unchanged)
    if not targets:
        raise InvalidArgumentError(f"model: no layer is left to prune; {reasons(skipped)}")
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


class _Replacer(BlockSparseModelPatcher):
    """Patches a model with layers that are there already."""

    def __init__(self, made: Mapping[str, BlockSparseLinear]) -> None:
        super().__init__()
        self._made = made
        for name, layer in made.items():
            self.add_pattern(re.escape(name), {"pattern": layer.pattern}, fullmatch=True)

    def new_child_module(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> BlockSparseLinear:
        return self._made[name]


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
