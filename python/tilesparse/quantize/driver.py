"""Whole models quantized: weights in 8 or 4 bits, and perhaps activations in 8, by calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._checks import check_kind
from ..calibrate.calibration import check_model, collected, warn_of_few_tokens
from ..calibrate.stream import caller, chosen_device, observing
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..model.match import (
    STAYS_DENSE,
    SkippedLayer,
    by_reason,
    check_can_change,
    layers_changed,
    matching,
    names_of_modules,
    owners_of_parameters,
    refusal_of,
    rules_of,
)
from ..model.report import Report
from ..nn.experts import ExpertsLinear, stacked_parameters
from ..nn.linear import BlockSparseLinear
from ..nn.weight import check_whole, take_over
from ..storage.formats import QuantizedStorage, storage_of
from .plan import Task, round_weights
from .smooth import is_linear, smooth


def quantize_(
    model: nn.Module,
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    batches: Iterable[Any],
    *,
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    device: torch.device | str | int | None = None,
) -> Report:
    """Store block-sparse layers in 8 or 4 bits, in place, by what that does to outputs on calibration data.

    With 8-bit activations this chooses scales. **Smoothing** divides features of activations that are much
    larger than others by a scale, and multiplies the weights that read them (SmoothQuant; Xiao et al.,
    arXiv:2211.10438); the module before takes the inverse. It is found by what scaling does to the model.
    Scales are powers of two, so the model computes the same before it is quantized; those that change what it
    gives for any batch are left out, and the report says so. **Clipping** cuts the largest weights of an
    output feature.

    With weights alone it rounds them one column after the other, and those behind make up for the error, as
    in GPTQ (Frantar et al., arXiv:2210.17323), within the kept blocks of each row, whose scales are those
    that cost least. Output features whose error would grow are rounded to the nearest, as `to_storage` does;
    so are experts.

    Dense layers stay as they are; `sparsify_` with density 1 makes them block-sparse. The model runs as in
    evaluation and is changed only at the very end: after an error it is as it was. Build optimizers
    afterwards.

    Args:
        model: with `BlockSparseLinear` in the storage "plain".
        config: storage and activations of the layers, such as ``BlockSparseConfig.w8a8()``; or a config for
            each name or regular expression of layers, of which the first that matches counts, and None leaves
            layers as they are. Its other fields are not looked at: layers keep their blocks.
        batches: calibration data, as of `prune_`. With 8-bit activations a few thousand tokens do; weights
            alone want several tokens for each of a layer's in_features.
        layers: names or regular expressions, as of `sparsify_`. None is all block-sparse layers.
        exclude: likewise, of layers that stay as they are.
        filter_fn: takes a layer and its name, and returns True to quantize it.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        device: where blocks of the model run and errors are computed; None is that of the model.

    Raises:
        UnsupportedError: a layer is sharded.

    Examples:
        >>> tilesparse.sparsify_(model, tilesparse.BlockSparseConfig(density=1.0, block_shape=64))
        >>> print(tilesparse.quantize_(model, tilesparse.BlockSparseConfig.w8a8(), batches))
    """
    check_model(model)
    data = collected(batches)
    targets, skipped = _targets(model, config, layers, exclude, filter_fn)
    check_can_change(model)
    experts = [name for name in targets if isinstance(model.get_submodule(name), ExpertsLinear)]
    others = [name for name in targets if name not in experts]
    weights = [name for name in others if targets[name].activations is None]
    eight_bits = [name for name in others if name not in weights]
    task = Task(model, targets, data, caller(forward), chosen_device(model, device))
    with observing(model), torch.no_grad():
        if eight_bits:
            smooth(task, eight_bits, weights)
        if weights:
            round_weights(task, weights)
        for name in experts:
            error = task.store(name).storage_error ** 2
            task.layers.append(task.note(name, error, error))
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in task.scaled.items():
                model.get_parameter(name).copy_(tensor)
            for name, other in task.stored.items():
                take_over(task.layer(name), other)
    layers_changed(model)
    warn_of_few_tokens(model, {layer.name: layer.tokens for layer in task.layers if layer.name in weights})
    rough = [
        SkippedLayer(layer.name, "BlockSparseLinear", layer.reason)
        for layer in task.layers
        if layer.reason is not None
    ]
    notes = [f"not smoothed: {text}" for text in by_reason(rough)]
    return Report("quantize_", task.layers, skipped, notes=notes, facts={"stack": task.stack})


def _targets(
    model: nn.Module,
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    layers: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> tuple[dict[str, BlockSparseConfig], list[SkippedLayer]]:
    """Return the layers to quantize with their configs, and the linear ones that stay as they are."""
    for each in config.values() if isinstance(config, Mapping) else [config]:
        if each is not None:
            _check_config(each)
    rules, names = rules_of(config, layers), names_of_modules(model)
    owners = owners_of_parameters(names)
    configs: dict[nn.Module, Any] = {}  # by which a module is quantized, or None
    refusal = refusal_of(
        names, lambda module: _reason_to_skip(module, owners, configs[module]), exclude, filter_fn
    )
    targets: dict[str, BlockSparseConfig] = {}
    skipped: list[SkippedLayer] = []
    used: set[int] = set()  # places of rules that decide about a layer
    for module, places in matching([rule.layers for rule in rules], names).items():
        if not places or not (is_linear(module) or _stacked(module)):
            continue
        name, own = names[module][0], rules[places[0]].config
        configs[module] = own
        reason = STAYS_DENSE if own is None else refusal(name, module)
        if own is not None and reason is None:
            targets[name] = own
        else:
            skipped.append(SkippedLayer(name, type(module).__name__, reason or STAYS_DENSE))
        if own is None or reason is None:
            used.update(place for place in places if rules[place].config == own)
    unused = [rule.layers.text for place, rule in enumerate(rules) if place not in used]
    why = "; ".join([*by_reason(skipped)][:3]) or "none is block-sparse"
    if unused and (layers is not None or isinstance(config, Mapping)):
        argument = "config" if layers is None else "layers"
        raise InvalidArgumentError(
            f"{argument} must each name a layer to quantize, got {unused[0]!r} ({why})"
        )
    if not targets:
        raise InvalidArgumentError(f"model: no layer is left to quantize ({why})")
    return targets, skipped


def _check_config(config: Any) -> None:
    check_kind("config", config, BlockSparseConfig)
    if not isinstance(storage_of(config.storage), QuantizedStorage):
        raise InvalidArgumentError(f"config must have a storage of 8 or 4 bits, got {config.storage!r}")
    if config.granularity == "block":
        raise InvalidArgumentError(
            "config must not have granularity 'block': scales that calibration data choose are of rows"
        )


def _stacked(module: nn.Module) -> Sequence[str]:
    return [] if isinstance(module, BlockSparseLinear) else stacked_parameters(module)


def _reason_to_skip(
    module: nn.Module, owners: Mapping[nn.Parameter, Sequence[nn.Module]], config: BlockSparseConfig
) -> str | None:
    if stacked := _stacked(module):
        return f"dense 3-D {' and '.join(stacked)}; sparsify_ makes those of experts block-sparse"
    if not isinstance(module, BlockSparseLinear):
        return "dense; sparsify_ with density=1 makes it block-sparse with all of its blocks"
    check_whole(module, "quantize_")
    if not storage_of(module.storage).trainable:
        stored = storage_of(module.storage).describe(module.nm, module.activations)
        return f"already stored as {stored}; to_storage('plain') makes it dense blocks again"
    if "weight" not in module._parameters:
        return "its weight is computed in every call"
    if len(owners[module.weight]) > 1:
        return "its weight is shared with another module"
    if module.weight.dtype == torch.float64 and config.activations is not None:
        return "its weight is float64, which has no products in 8 bits"
    if module.nm is not None and config.activations is None and storage_of(config.storage).allows_nm:
        return f"2:4, whose weights are rounded one by one, by to_storage({config.storage!r})"
    try:
        module.spec.with_storage(config.storage, activations=config.activations)
    except InvalidArgumentError as error:
        return str(error)
    return None
