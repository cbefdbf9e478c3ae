"""Error profiles: what each way to store a layer would do to its output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .._arguments import checked
from .._replay.batches import chosen_device, observing
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..patch.reports import SkippedLayer
from ._checks import check_model, check_numbers, checked_config, collected
from .calibration import Calibration, Forward, call_model
from .compensation import DAMPING
from .configs import ErrorProfiles
from .experts import expanded, tokens_of_projections
from .layer import GRADIENT_METHODS
from .report import warn_of_few_tokens
from .run import Run
from .targets import reasons, targets_matching


@checked
def measure_errors(
    model: nn.Module,
    batches: Iterable[Any],
    configs: Sequence[BlockSparseConfig],
    *,
    layers: str | Sequence[str] | None = None,
    method: str = "obs",
    refit: bool = True,
    damping: float = DAMPING,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
) -> ErrorProfiles:
    """Measure the error of each layer's output by each config, in the dense model; nothing changes.

    Inputs are those of the dense model, gathered block by block as in `prune_model`. With "obs" the order in
    which blocks go is found once for each block shape, and serves all densities.

    Args:
        model: dense; only read.
        batches: calibration data, as of `prune_model`.
        configs: ways to store a layer. A layer that cannot be cut into some blocks, or of which a density
            rounds to no block, has no entries for these.
        layers: regular expressions of names, or None, as of `prune_model`.
        method: as of `prune_model`, one that needs no gradient.
        refit: whether the kept weights make up for the others.
        damping: as of `prune_model`.
        forward: as of `prune_model`.
        device: where blocks of the stack and all matrices are computed, as of `prune_model`.

    Returns:
        By layer and config ‖y - ŷ‖² / ‖X Wᵀ‖², of the layer as it would be stored.

    Warns:
        UserWarning: of too few tokens, as `prune_model`.

    Raises:
        InvalidArgumentError: as of `prune_model`.
    """
    check_numbers(method, damping, refit)
    if method in GRADIENT_METHODS:
        raise InvalidArgumentError(f"method must need no gradient, got {method!r}")
    checked = [checked_config("configs", config) for config in configs]
    if not checked:
        raise InvalidArgumentError("configs must have at least one config, got none")
    check_model(model)
    with expanded(model) as experts:
        fitting: dict[str, list[BlockSparseConfig]] = {}
        others: list[SkippedLayer] = []
        for config in dict.fromkeys(checked):
            targets, skipped = targets_matching(model, layers, config, strict=False, cut=False)
            others += skipped
            for name in targets:
                fitting.setdefault(name, []).append(config)
        if not fitting:
            raise InvalidArgumentError(f"model: no layer is left to measure; {reasons(others)}")
        order = [name for name, _ in model.named_modules() if name in fitting]
        data, device = collected(batches), chosen_device(model, device)
        profiles: dict[str, dict[BlockSparseConfig, float]] = {}
        tokens: dict[str, int] = {}
        with observing(model):
            calibration = Calibration(model, data, forward or call_model, order, device, compare=False)
            run = Run(model, calibration, fitting, damping)
            for name, pruner in run.pruners():
                tokens[name] = pruner.tokens
                profiles[name] = {
                    config: pruner.prune(config, method, refit=refit)[0].error for config in fitting[name]
                }
        if refit or method == "obs":
            warn_of_few_tokens(model, tokens_of_projections(experts, tokens))
        return profiles
