"""Whole models pruned: a pass of data through the model, with each layer's solution, and a report."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_flag, checked_number, shown
from .._files import checksum, read_header, read_json, read_tensor, replacing, write_json, write_tensors
from .._hooks import check_can_change, layers_changed
from .._reports import Progress, empty_of, listed, warn_user
from ..calibrate.calibration import (
    Calibration,
    Forward,
    Loss,
    call_model,
    check_model,
    collected,
    naming_layer,
    warn_of_few_tokens,
)
from ..calibrate.experts import check_configs_of, expanded, joined, projection_of, tokens_of_projections
from ..calibrate.moments import DAMPING, Moments
from ..calibrate.stream import chosen_device, observing
from ..config import BlockSparseConfig
from ..errors import CheckpointError, InvalidArgumentError, InvalidTypeError
from ..model.match import STAYS_DENSE
from ..model.modules import Target, hidden_attribute, names_of_modules
from ..model.replace import replace_modules
from ..model.report import DenseParameter, Report, patch_report, warn_of_empty
from ..model.targets import (
    Filter,
    block_shape_of,
    checked_config,
    chosen_layers,
    reasons,
    reasons_against_experts,
    shape_of,
)
from ..nn.dense import is_conv1d
from ..nn.weight import INDEX_NAMES
from ..pattern import BlockPattern
from ..storage.formats import storage_of
from .obs import METHODS, Pruner, Solution, built
from .scores import GRADIENT_METHODS, gradient_scores


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
    patterns: Mapping[str, BlockPattern] | None = None,
    refit: bool = True,
    damping: float = DAMPING,
    forward: Forward | None = None,
    loss: Loss | None = None,
    device: torch.device | str | int | None = None,
    folder: str | os.PathLike[str] | None = None,
    strict: bool = True,
) -> Report:
    """Prune the linear layers of a trained model in place, so that their outputs change least.

    Layers are pruned by their inputs on calibration data, see `tilesparse.prune.obs`. A model with a stack of
    blocks, such as the layers of a transformer, is pruned block by block, and the inputs of each block come
    from the pruned blocks before it; only one block is on ``device`` at a time. Layers outside the stack come
    last. Within a block, layers are pruned in the order in which they run, those with the same input
    together. The model computes as in evaluation, and is changed only at the very end: after an error or an
    interruption it is as it was. Build optimizers afterwards: the layers have new parameters.

    Args:
        model: any module.
        config: how layers are stored; or a config for each name or regular expression of layers, of which
            the first that matches a layer counts, and None leaves it dense, as `allocate` gives them. With
            ``nm=(2, 4)`` the two of four are chosen after the blocks, and the refit is exact for them, too.
        batches: calibration data: an iterable, read once and kept in memory. A mapping gives keyword
            arguments of the model, a tuple or list positional ones, anything else is its one argument. Where
            a mapping has a two-dimensional ``attention_mask``, tokens that it masks do not count.
        layers: names or regular expressions, as of `sparsify_`. None is every linear layer that `sparsify_`
            takes and that can be cut into such blocks, and each expert of a mixture. A layer that cannot be
            cut is an error where one writes out the last part of its name.
        exclude: likewise, of layers that stay dense.
        filter_fn: takes a linear layer and its name, and returns True to prune it.
        method: how blocks are chosen. "obs" by what their removal costs when the others make up for it, one
            after the other; "wanda", "magnitude", "taylor" and "movement" by scores, see
            `tilesparse.prune.scores`, the last two by gradients of ``loss``.
        patterns: blocks chosen elsewhere, by full names of layers, in place of ``layers`` and ``method``, and
            of density and block shape in ``config``: only the refit remains.
        refit: whether the kept weights make up for the others.
        damping: of the second moment of the inputs, over the mean of its diagonal.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        loss: ``loss(model, batch)`` gives a scalar to "taylor" and "movement". None is the ``loss`` of what
            the model gives, as of Transformers' models for batches with labels.
        device: where blocks of the stack and all matrices are computed; None is that of the model's first
            parameter.
        folder: for progress: layers that are done are kept there, and a run with the same model, data and
            arguments goes on behind them. On one CPU the result is the same bit for bit.
        strict: raise where a name or expression prunes no layer, or all of them none.

    Warns:
        UserWarning: layers have met fewer tokens than they have inputs, so that weights fit these tokens
            alone and errors are too small; or chosen blocks leave block rows or columns empty; or without
            ``layers`` most parameters are in no linear layer and stay dense.

    Raises:
        InvalidArgumentError: an argument is not allowed or stands beside one that it cannot stand beside, no
            layer is left to prune, one that was asked for cannot be, the calibration data are none, never run
            a layer, or have NaN or infinities at a layer, or ``folder`` belongs to another pruning.
        CheckpointError: a file in ``folder`` is damaged.

    Examples:
        >>> config = tilesparse.BlockSparseConfig(density=0.5, block_shape=64)
        >>> report = tilesparse.prune_(model, config, batches)
        >>> print(report)
    """
    check_numbers(method, damping, refit)
    check_model(model)
    all_layers = isinstance(config, BlockSparseConfig) and layers is None and patterns is None
    if patterns is not None:
        config = _configs_of(patterns, config, layers=layers, exclude=exclude, filter_fn=filter_fn)
    elif isinstance(config, BlockSparseConfig):
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
        if patterns is not None:
            _check_patterns(model, patterns, targets)
        if targets:
            check_configs_of(experts, targets)
            data = collected(batches)
            check_can_change(model)
            device = chosen_device(model, device)
            saved = None
            if folder is not None:
                indices = {
                    name: [getattr(pattern, own).tolist() for own in INDEX_NAMES]
                    for name, pattern in (patterns or {}).items()
                }
                arguments = {"method": method, "refit": refit, "damping": float(damping)}
                arguments |= {"configs": targets, "patterns": indices}
                saved = SavedSolutions(Path(folder), model, data, arguments)
            with observing(model):
                block_scores: Mapping[str, Tensor] = {}
                if patterns is None and method in GRADIENT_METHODS:
                    block_scores = gradient_scores(model, data, targets, method, forward, loss)
                calibration = Calibration(model, data, forward or call_model, list(targets), device, refit)

                def solve(name: str, moments: Moments) -> Solution:
                    pattern = None if patterns is None else patterns[name]
                    pruner, scores = (
                        Pruner(model.get_submodule(name), moments, damping),
                        block_scores.get(name),
                    )
                    return pruner.prune(
                        targets[name], method, refit=refit, pattern=pattern, block_scores=scores
                    )

                solutions = _solutions(model, calibration, targets, solve, saved)
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
    method = method if patterns is None or not made else "given patterns"
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
    if made and patterns is None:
        warn_of_empty(layer for layer in pruned if layer.projection is None)
    if made and all_layers:
        _warn_of_dense(model, report.dense)
    return report


def _solutions(
    model: nn.Module,
    calibration: Calibration,
    targets: Mapping[str, BlockSparseConfig],
    solve: Callable[[str, Moments], Solution],
    saved: SavedSolutions | None,
) -> dict[str, Solution]:
    """Return the solutions of all layers, each by its inputs behind those that were pruned before."""
    solutions: dict[str, Solution] = {}
    progress = Progress(len(targets))

    def changed(layers: Sequence[str]) -> dict[str, Tensor]:
        return _parameters(model, targets, {name: solutions[name] for name in layers})

    for group in calibration.groups(changed):
        for name in group:
            shape = shape_of(model.get_submodule(name))
            known = None if saved is None else saved.load(name, block_shape_of(targets[name]), shape)
            if known is not None:
                solutions[name] = known
                progress.skip(1)
        for name, moments in calibration.moments([name for name in group if name not in solutions]):
            with naming_layer(name):
                solutions[name] = solve(name, moments)
            if saved is not None:
                saved.save(name, solutions[name])
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


def check_numbers(method: str, damping: float, refit: bool) -> None:
    """Raise InvalidArgumentError for a method, damping or refit that is not allowed."""
    if method not in METHODS:
        raise InvalidArgumentError(f"method must be one of {list(METHODS)}, got {shown(method)}")
    checked_number("damping", damping)
    check_flag("refit", refit)


def _configs_of(
    patterns: Mapping[str, BlockPattern],
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    **others: object,
) -> dict[str, BlockSparseConfig | None]:
    """Return how layers with given patterns are stored."""
    if not isinstance(config, BlockSparseConfig):
        raise InvalidArgumentError(
            f"config must be a BlockSparseConfig beside patterns, which name the layers, got {shown(config)}"
        )
    for argument, value in others.items():
        if value is not None:
            raise InvalidArgumentError(
                f"{argument} must be None beside patterns, which name the layers, got {shown(value)}"
            )
    if not patterns:
        raise InvalidArgumentError("patterns must have a pattern for the name of a layer, got {}")
    configs: dict[str, BlockSparseConfig | None] = {}
    for name, pattern in patterns.items():
        own = replace(config, density=pattern.density, block_shape=pattern.block_shape)
        configs[name] = checked_config(f"patterns[{name!r}]", own)
    return configs


def _check_patterns(
    model: nn.Module, patterns: Mapping[str, BlockPattern], targets: Mapping[str, BlockSparseConfig]
) -> None:
    """Raise InvalidArgumentError unless each pattern has the name and the shape of a layer."""
    for name in dict.fromkeys((*patterns, *targets)):
        if name not in targets or name not in patterns:
            raise InvalidArgumentError(f"patterns must have the full names of layers, not so of {name!r}")
        shape = shape_of(model.get_submodule(name))
        if patterns[name].shape != shape:
            raise InvalidArgumentError(
                f"patterns[{name!r}] must have shape {shape}, got {patterns[name].shape}"
            )


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


_FILE = "pruning.json"
_NUMBERS = ("error_before", "error", "damping", "tokens")


class SavedSolutions:
    """Solutions of layers in files, one for each; a folder belongs to one model, data and arguments.

    Tensors of model and batches are compared by their checksums.

    Raises:
        InvalidArgumentError: the folder belongs to something else; or batches hold what cannot be compared.
    """

    def __init__(
        self, folder: Path, model: nn.Module, batches: Sequence[Any], arguments: Mapping[str, Any]
    ) -> None:
        if folder.exists() and not folder.is_dir():
            raise InvalidArgumentError(f"folder must be a folder, got the file {str(folder)!r}")
        self._folder = folder
        marks = {
            "version": 1,
            "torch": torch.__version__,
            "model": _hash("model", dict(model.state_dict())),
            "batches": _hash("batches", list(batches)),
            **{name: repr(value) for name, value in arguments.items()},
        }
        file = folder / _FILE
        if file.exists():
            known, _ = read_json(file)
            for name in marks:
                if known.get(name) != marks[name]:
                    raise InvalidArgumentError(
                        f"folder: {str(folder)!r} holds the progress of a pruning with another {name}; "
                        "give another folder"
                    )
            return
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            write_json(partial, marks)

    def load(self, name: str, block_shape: tuple[int, int], shape: tuple[int, int]) -> Solution | None:
        """Return the saved solution of a layer, or None.

        Raises:
            CheckpointError: its file is damaged.
        """
        file = self._file(name)
        if not file.exists():
            return None
        stored = {own: read_tensor(tensor) for own, tensor in read_header(file)[0].items()}
        try:
            crow, col, slot = (stored[own] for own in INDEX_NAMES)
            pattern = BlockPattern(crow, col, shape=shape, block_shape=block_shape, slot=slot)
            numbers = dict(zip(_NUMBERS, stored["numbers"].tolist(), strict=True))
            values = stored["values"]
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{file.name}: no saved layer, or of another shape: {error}") from error
        numbers["tokens"] = int(numbers["tokens"])
        return Solution(pattern, values, stored.get("mask"), stored.get("bias"), **numbers)

    def save(self, name: str, solution: Solution) -> None:
        """Write a layer's solution; if that is interrupted it counts as not written."""
        numbers = [float(getattr(solution, own)) for own in _NUMBERS]
        tensors = {own: getattr(solution.pattern, own) for own in INDEX_NAMES}
        tensors |= {own: tensor for own in ("mask", "bias") if (tensor := getattr(solution, own)) is not None}
        tensors["values"] = solution.values
        tensors["numbers"] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with replacing(self._file(name)) as partial:
            write_tensors(partial, tensors)

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"


def _hash(argument: str, value: Any) -> str:
    digest = hashlib.sha256()
    for text in _texts(argument, value):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _texts(argument: str, value: Any) -> Iterator[str]:
    """Yield texts that only equal nested values have."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {checksum(value)}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from _texts(argument, item)
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} of {len(value)}"
        for item in value:
            yield from _texts(argument, item)
    elif value is None or isinstance(value, str | int | float | bool):
        yield repr(value)
    else:
        raise InvalidArgumentError(
            f"{argument} must be tensors, numbers and texts in tuples, lists and mappings beside folder, "
            f"which is for the same {argument} only, got {type(value).__name__}"
        )
