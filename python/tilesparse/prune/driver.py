"""Whole models pruned: which layers, in which order, by what data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .._arguments import checked, shown
from .._checks import check_policy
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..patch.reports import SkippedLayer
from ..pattern.block_pattern import BlockPattern
from ._checks import check_model, checked_config
from .calibration import Forward, Loss
from .compensation import DAMPING
from .pruning import PruneOptions, prune_targets
from .report import PruneReport
from .targets import check_shapes_of, config_of, targets_matching, targets_named


@checked
def prune_(
    model: nn.Module,
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    batches: Iterable[Any],
    *,
    method: str = "obs",
    layers: str | Sequence[str] | None = None,
    refit: bool = True,
    damping: float = DAMPING,
    forward: Forward | None = None,
    loss: Loss | None = None,
    device: torch.device | str | int | None = None,
    folder: str | os.PathLike[str] | None = None,
    strict: bool = True,
) -> PruneReport:
    """Prune the linear layers of a trained model in place, so that their outputs change least.

    This is `prune_model` with a config in place of ``density``, ``block_shape``, ``nm``, ``storage``,
    ``policy`` and ``configs``.

    Args:
        model: as of `prune_model`.
        config: how layers are stored; or a config for each layer, by names in the model, where None leaves a
            layer dense, as `allocate` gives them.
        batches: calibration data, as of `prune_model`.
        method: as of `prune_model`.
        layers: regular expressions of names, as of `prune_model`; None where a mapping names the layers.
        refit: as of `prune_model`.
        damping: as of `prune_model`.
        forward: as of `prune_model`.
        loss: as of `prune_model`.
        device: as of `prune_model`.
        folder: as of `prune_model`.
        strict: as of `prune_model`.

    Warns:
        UserWarning: as `prune_model`.

    Raises:
        InvalidArgumentError: as `prune_model`.
        CheckpointError: a file in ``folder`` is damaged.

    Examples:
        >>> config = tilesparse.config.BlockSparseConfig(density=0.5, block_shape=64)
        >>> report = tilesparse.prune.prune_(model, config, batches)
    """
    options = PruneOptions(method, refit, damping, forward, loss, device, folder, strict)
    options.check()
    check_model(model)
    if isinstance(config, BlockSparseConfig):
        one = checked_config("config", config)
        chosen = partial(targets_matching, model, layers, one, strict)
        return prune_targets(model, batches, chosen, None, options, all_layers=layers is None)
    _check_unnamed(layers, "config")
    return prune_targets(model, batches, partial(targets_named, model, config, "config"), None, options)


@checked
def prune_model(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    density: float | None = None,
    block_shape: int | Sequence[int] | None = None,
    method: str = "obs",
    layers: str | Sequence[str] | None = None,
    nm: Sequence[int] | None = None,
    storage: str | None = None,
    policy: str | None = None,
    configs: Mapping[str, BlockSparseConfig | None] | None = None,
    patterns: Mapping[str, BlockPattern] | None = None,
    refit: bool = True,
    damping: float = DAMPING,
    forward: Forward | None = None,
    loss: Loss | None = None,
    device: torch.device | str | int | None = None,
    folder: str | os.PathLike[str] | None = None,
    strict: bool = True,
) -> PruneReport:
    """Prune the linear layers of a trained model in place, so that their outputs change least.

    Layers are pruned by their inputs on calibration data, see `tilesparse.prune.compensation`. A model with a
    stack of blocks, such as the layers of a transformer, is pruned block by block, and the inputs of each
    block come from the pruned blocks before it; only one block is on ``device`` at a time. Layers outside
    the stack come last. Within a block, layers are pruned in the order in which they run, those with the same
    input together. Each is fitted to its output in the dense model, from its inputs in the pruned one.

    The model computes as in evaluation, without dropout, and is changed only at the very end: after an error
    or an interruption it is as it was. Build optimizers afterwards: the layers have new parameters.

    Args:
        model: any module; Transformers' models are saved by ``save_pretrained`` afterwards.
        batches: calibration data: an iterable, read once and kept in memory. A mapping gives keyword
            arguments of the model, a tuple or list positional ones, anything else is its one argument. Where
            a mapping has a two-dimensional ``attention_mask``, tokens that it masks do not count.
        density: kept fraction of the blocks of every layer, above 0 and at most 1. None is 0.5.
        block_shape: (bn, bk), or one number for both. None is (64, 64), as in `BlockSparseConfig`.
        method: how blocks are chosen. "obs" by what their removal costs when the others make up for it, one
            after the other; "wanda", "magnitude", "taylor" and "movement" by scores, see
            `tilesparse.prune.scores`, the last two by gradients of ``loss``.
        layers: regular expressions, matched against the start of names of layers. None is every linear layer
            that `BlockSparseModelPatcher` takes and that can be cut into such blocks: output embeddings and
            tied layers stay dense, and the report says so. A layer that cannot be cut is an error where one
            writes out the last part of its name.
        nm: (2, 4) for 2:4 inside the blocks, or None. The two of four are chosen after the blocks, by what
            each alone costs, and the refit is exact for them as well.
        storage: "plain", "compressed" (of 2:4 alone), "int8", "float8_e4m3fn" or "int4". None is "plain".
        policy: how the layers compute, see `BlockSparseLinear`, in place of their configs' policies. None
            leaves these, or is "sparse".
        configs: by names of layers, in place of ``density``, ``block_shape``, ``nm``, ``storage`` and
            ``layers``; None stays dense, as do layers that it does not name. Where all are None nothing
            changes.
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
        InvalidArgumentError: an argument is not allowed or stands beside one that it cannot stand beside, no
            layer is left to prune, one that was asked for cannot be, the calibration data are none, never run
            a layer, or have NaN or infinities at a layer, or ``folder`` belongs to another pruning.
        CheckpointError: a file in ``folder`` is damaged.

    Examples:
        >>> report = tilesparse.prune.prune_model(model, batches, density=0.5, block_shape=64)
        >>> print(report)
    """
    options = PruneOptions(method, refit, damping, forward, loss, device, folder, strict)
    options.check()
    if policy is not None:
        check_policy(policy)
    if configs is not None and patterns is not None:
        raise InvalidArgumentError("configs must be None beside patterns, got both")
    by_name = "configs" if configs is not None else "patterns" if patterns is not None else None
    if by_name is not None:
        _check_unnamed(layers, by_name)
        alone: dict[str, Any] = {"density": density, "block_shape": block_shape}
        if configs is not None:
            alone |= {"nm": nm, "storage": storage}
        for name, value in alone.items():
            if value is not None:
                raise InvalidArgumentError(
                    f"{name} must be None beside {by_name}, which say it for each layer, got {shown(value)}"
                )
    check_model(model)
    stored = _given(nm=nm, storage=storage, policy=policy)
    if patterns is not None:
        named = {name: config_of(name, pattern, **stored) for name, pattern in patterns.items()}

        def with_patterns() -> tuple[dict[str, BlockSparseConfig], list[SkippedLayer]]:
            chosen = targets_named(model, named, "patterns")
            check_shapes_of(model, patterns)
            return chosen

        return prune_targets(model, batches, with_patterns, patterns, options)
    if configs is not None:

        def with_configs() -> tuple[dict[str, BlockSparseConfig], list[SkippedLayer]]:
            targets, skipped = targets_named(model, configs, "configs")
            if policy is not None:
                targets = {name: replace(config, policy=policy) for name, config in targets.items()}
            return targets, skipped

        return prune_targets(model, batches, with_configs, None, options)
    config = BlockSparseConfig(**_given(density=density, block_shape=block_shape), **stored)
    chosen = partial(targets_matching, model, layers, checked_config("config", config), strict)
    return prune_targets(model, batches, chosen, None, options, all_layers=layers is None)


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _check_unnamed(layers: object, argument: str) -> None:
    if layers is not None:
        raise InvalidArgumentError(
            f"layers must be None beside {argument}, which names the layers, got {shown(layers)}"
        )
