"""Error profiles: what each way to store a layer would do to its output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from .._arguments import checked
from ..calibrate.calibration import (
    Calibration,
    Forward,
    call_model,
    check_model,
    collected,
    warn_of_few_tokens,
)
from ..calibrate.experts import expanded, tokens_of_projections
from ..calibrate.moments import DAMPING
from ..calibrate.stream import chosen_device, observing
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..patch.reports import SkippedLayer
from ..patch.targets import Filter, checked_config, chosen_layers, reasons
from ..patch.weight_reads import weight_reads
from .driver import Run, check_numbers
from .scores import GRADIENT_METHODS

# By layer and config: ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖² on the calibration data, in Frobenius norms; 0 is dense.
ErrorProfiles: TypeAlias = Mapping[str, Mapping[BlockSparseConfig, float]]


@checked
def measure_errors(
    model: nn.Module,
    batches: Iterable[Any],
    configs: Sequence[BlockSparseConfig],
    *,
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Filter | None = None,
    method: str = "obs",
    refit: bool = True,
    damping: float = DAMPING,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
) -> ErrorProfiles:
    """Measure the error of each layer's output by each config, in the dense model; nothing changes.

    Inputs are those of the dense model, gathered block by block as in `prune_`. With "obs" the order in
    which blocks go is found once for each block shape, and serves all densities.

    Args:
        model: dense; only read.
        batches: calibration data, as of `prune_`.
        configs: ways to store a layer. A layer that cannot be cut into some blocks, or of which a density
            rounds to no block, has no entries for these.
        layers: names or regular expressions, or None, as of `prune_`.
        exclude: likewise, of layers that are left out.
        filter_fn: takes a linear layer and its name, and returns True to measure it.
        method: as of `prune_`, one that needs no gradient.
        refit: whether the kept weights make up for the others.
        damping: as of `prune_`.
        forward: as of `prune_`.
        device: where blocks of the stack and all matrices are computed, as of `prune_`.

    Returns:
        By layer and config ‖y - ŷ‖² / ‖X Wᵀ‖², of the layer as it would be stored.

    Warns:
        UserWarning: of too few tokens, as `prune_`.

    Raises:
        InvalidArgumentError: as of `prune_`.
    """
    check_numbers(method, damping, refit)
    if method in GRADIENT_METHODS:
        raise InvalidArgumentError(f"method must need no gradient, got {method!r}")
    checked = [checked_config("configs", config) for config in configs]
    if not checked:
        raise InvalidArgumentError("configs must have at least one config, got none")
    check_model(model)
    reads = weight_reads(model)
    with expanded(model) as experts:
        fitting: dict[str, list[BlockSparseConfig]] = {}
        others: list[SkippedLayer] = []
        for config in dict.fromkeys(checked):
            targets, skipped = chosen_layers(
                model, config, layers, exclude, filter_fn, strict=False, cut=False, reads=reads
            )
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
