"""Whole models pruned: a pass of data through the model, with each layer's solution, and a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_flag, checked_number, shown
from .._hooks import check_can_change, layers_changed
from .._reports import Progress, empty_of, listed, warn_user
from ..calibrate.calibration import (
    DAMPING,
    Calibration,
    Forward,
    Moments,
    call_model,
    check_configs_of,
    check_model,
    collected,
    expanded,
    joined,
    projection_of,
    tokens_of_projections,
    warn_of_few_tokens,
)
from ..calibrate.stream import chosen_device, observing
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, InvalidTypeError
from ..model.match import (
    STAYS_DENSE,
    Filter,
    block_shape_of,
    checked_config,
    chosen_layers,
    naming_layer,
    reasons,
    reasons_against_experts,
)
from ..model.modules import Target, hidden_attribute, names_of_modules, replace_modules
from ..model.report import DenseParameter, Report, patch_report, warn_of_empty
from ..nn.dense import is_conv1d
from ..storage.formats import storage_of
from .obs import METHODS, Pruner, Solution, built


@dataclass(frozen=True)
class PrunedLayer:
    """One pruned layer.

    Attributes:
        name: in the model.
        shape: (out_features, in_features).
        config: how it is stored. Its density is what was asked for.
        density: kept fraction of the blocks.
        error_before: ‖y - ŷ‖² / ‖X Wᵀ‖² of the kept blocks with their dense weights, where X are the
            inputs in the pruned model, and W is the dense weight that comes closest with them to the layer's
            output in the dense model. For the first layer that is its own.
        error: likewise, of the layer as it is now, also stored in 8 or 4 bits.
        damping: of the second moment of the inputs, over the mean of its diagonal; more than was asked for
            where that was too weak.
        tokens: of the calibration data that the layer has met.
        empty_rows: block rows without a block, whose outputs are the bias alone.
        empty_columns: block columns without a block, whose inputs nothing reads.
        projection: of an expert, the name of the projection of all of them, which are one row of the table.
    """

    name: str
    shape: tuple[int, int]
    config: BlockSparseConfig
    density: float
    error_before: float
    error: float
    damping: float
    tokens: int
    empty_rows: int
    empty_columns: int
    projection: str | None = None

    def row(self, *others: PrunedLayer) -> dict[str, str]:
        """Return the cells of a table, by column.

        The experts of a projection share them: means, and the largest damping.
        """
        layers = (self, *others)
        least, most = (function(layer.tokens for layer in layers) for function in (min, max))
        return {
            "layer": f"{self.projection}.* ({len(layers)})" if others else self.name,
            "shape": "{}x{}".format(*self.shape),
            "block": "{}x{}".format(*block_shape_of(self.config)),
            "density": f"{fmean(layer.density for layer in layers):.3f}",
            "storage": storage_of(self.config.storage).describe(self.config.nm, self.config.activations),
            "tokens": f"{least:,} to {most:,}" if others else f"{least:,}",
            "damping": f"{max(layer.damping for layer in layers):.2g}",
            "error before": f"{fmean(layer.error_before for layer in layers):.4f}",
            "error": f"{fmean(layer.error for layer in layers):.4f}",
        }


def prune_(
    model: nn.Module,
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    batches: Iterable[Any],
    *,
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Filter | None = None,
    method: str = "obs",
    refit: bool = True,
    damping: float = DAMPING,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
    strict: bool = True,
) -> Report:
    """Prune the linear layers of a trained model in place, so that their outputs change least.

    Layers are pruned by their inputs on calibration data, see `tilesparse.prune.obs`. A model with a stack of
    blocks, such as the layers of a transformer, is pruned block by block, and the inputs of each block come
    from the pruned blocks before it; only one block is on ``device`` at a time. Layers outside the stack come
    last. The model computes as in evaluation, and is changed only at the very end: after an error or an
    interruption it is as it was. Build optimizers afterwards: the layers have new parameters.

    Args:
        model: any module.
        config: how layers are stored; or a config for each name or regular expression of layers, of which
            the first that matches a layer counts, and None leaves it dense, as `allocate` gives them.
        batches: calibration data, read once and kept in memory. A mapping gives keyword arguments of the
            model, a tuple or list positional ones, anything else is its one argument. Tokens that a
            two-dimensional ``attention_mask`` of a mapping masks do not count.
        layers: names or regular expressions, as of `sparsify_`; None is every linear layer that `sparsify_`
            takes and that fits such blocks, and each expert of a mixture.
        exclude: likewise, of layers that stay dense.
        filter_fn: takes a linear layer and its name, and returns True to prune it.
        method: how blocks are chosen. "obs" by what their removal costs when the others make up for it, one
            after the other; "wanda" by the sum of |W| · ‖X‖; "magnitude" by their norm.
        refit: whether the kept weights make up for the others.
        damping: of the second moment of the inputs, over the mean of its diagonal.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        device: where blocks of the stack and all matrices are computed; None is that of the model.
        strict: raise where a name or expression prunes no layer, or all of them none.

    Warns:
        UserWarning: layers have met fewer tokens than they have inputs; chosen blocks leave block rows or
            columns empty; or, without ``layers``, most parameters are in no linear layer.

    Examples:
        >>> config = tilesparse.BlockSparseConfig(density=0.5, block_shape=64)
        >>> print(tilesparse.prune_(model, config, batches))
    """
    if method not in METHODS:
        raise InvalidArgumentError(f"method must be one of {list(METHODS)}, got {shown(method)}")
    checked_number("damping", damping)
    check_flag("refit", refit)
    check_model(model)
    all_layers = isinstance(config, BlockSparseConfig) and layers is None
    if isinstance(config, BlockSparseConfig):
        config = checked_config("config", config)
    elif isinstance(config, Mapping):
        config = {
            name: None if own is None else checked_config(f"config[{name!r}]", own)
            for name, own in config.items()
        }
    else:
        raise InvalidTypeError(f"config must be a BlockSparseConfig or a mapping, got {shown(config)}")
    refused = reasons_against_experts(model)
    solutions: dict[str, Solution] = {}
    made: dict[str, Any] = {}
    stack = None
    with expanded(model) as experts:
        targets, skipped = chosen_layers(
            model, config, layers, exclude, filter_fn, strict=strict, refused=refused
        )
        all_stay_dense = bool(skipped) and all(one.reason == STAYS_DENSE for one in skipped)  # as planned
        if not targets and not all_stay_dense and strict:
            raise InvalidArgumentError(f"model: no layer is left to prune; {reasons(skipped)}")
        if targets:
            check_configs_of(experts, targets)
            data = collected(batches)
            check_can_change(model)
            device = chosen_device(model, device)
            with observing(model):
                calibration = Calibration(model, data, forward or call_model, list(targets), device, refit)

                def solve(name: str, moments: Moments) -> Solution:
                    pruner = Pruner(model.get_submodule(name), moments, damping)
                    return pruner.prune(targets[name], method, refit=refit)

                solutions = _solutions(model, calibration, targets, solve)
            sparse = {
                name: built(model.get_submodule(name), solution, targets[name])
                for name, solution in solutions.items()
            }
            made, stack = joined(experts, sparse, targets), calibration.stack
    names = names_of_modules(model)
    replaced = []
    for name, layer in made.items():
        module = model.get_submodule(name)
        hidden = hidden_attribute(module, layer)
        if hidden is not None:
            raise InvalidArgumentError(f"layer {name!r}: {hidden}")
        replaced.append(Target(names[module], module, layer))
    sizes = patch_report("prune_", names, replaced, [])
    if made:
        replace_modules(model, replaced)
        layers_changed(model)
    pruned = [
        PrunedLayer(
            name,
            solution.pattern.shape,
            targets[name],
            solution.pattern.density,
            solution.error_before,
            solution.error,
            solution.damping,
            solution.tokens,
            *empty_of(solution.pattern.block_indices(), solution.pattern.shape, solution.pattern.block_shape),
            projection_of(experts, name),
        )
        for name, solution in solutions.items()
    ]
    order = f"block by block of {stack!r}" if stack is not None else "all layers at once"
    report = replace(
        sizes,
        layers=pruned,
        skipped=skipped,
        notes=[f"{order}, by {method}"],
        facts={"method": method, "stack": stack},
    )
    if made and (refit or method == "obs"):
        tokens = {layer.name: layer.tokens for layer in pruned}
        warn_of_few_tokens(model, tokens_of_projections(experts, tokens))
    if made:
        warn_of_empty(layer for layer in pruned if layer.projection is None)
    if made and all_layers:
        _warn_of_dense(model, report.dense)
    return report


def _solutions(
    model: nn.Module,
    calibration: Calibration,
    targets: Mapping[str, BlockSparseConfig],
    solve: Callable[[str, Moments], Solution],
) -> dict[str, Solution]:
    """Return the solutions of all layers, each by its inputs behind those that were pruned before."""
    solutions: dict[str, Solution] = {}
    progress = Progress(len(targets))

    def changed(layers: Sequence[str]) -> dict[str, Tensor]:
        return _parameters(model, targets, {name: solutions[name] for name in layers})

    for group in calibration.groups(changed):
        for name, moments in calibration.moments(group):
            with naming_layer(name):
                solutions[name] = solve(name, moments)
            progress.show(len(solutions), f"layers pruned, {name} the last")
    return solutions


def _parameters(
    model: nn.Module, targets: Mapping[str, BlockSparseConfig], solutions: Mapping[str, Solution]
) -> dict[str, Tensor]:
    """Return the parameters with which dense layers compute as pruned ones, by their names in the model."""
    found: dict[str, Tensor] = {}
    for name, solution in solutions.items():
        linear = model.get_submodule(name)
        layer = built(linear, solution, targets[name])
        weight = layer.to_linear().weight.detach()
        found[f"{name}.weight"] = weight.T if is_conv1d(linear) else weight
        if layer.bias is not None:
            found[f"{name}.bias"] = layer.bias.detach()
    return found


def _warn_of_dense(model: nn.Module, dense: Sequence[DenseParameter]) -> None:
    """Warn where most of a model is no linear layer, as with experts stacked in one parameter."""
    usual = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
    others = [one for one in dense if not isinstance(model.get_submodule(one.name.rpartition(".")[0]), usual)]
    share = sum(one.share for one in others)
    if share > 0.5:
        warn_user(
            f"{share:.0%} of the parameters are in no linear layer and stay dense: "
            f"{listed(one.name for one in others)}"
        )
