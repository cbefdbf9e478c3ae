"""Neurons that are off: thresholds of what the last layer of an MLP multiplies, chosen on data.

As TEAL does, Liu et al., "Training-Free Activation Sparsity in Large Language Models" (2024).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import as_number, shown
from .._runtime.launch import thresholded
from ..calibrate.calibration import call_model, check_model, collected
from ..calibrate.stream import first_of, mask_of
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..nn.dense import dense_weight, is_conv1d
from ..nn.experts import ExpertsLinear, projections_of
from ..nn.linear import BlockSparseLinear, evaluating
from ..nn.mlp import BlockSparseMLP, down_of
from .modules import is_linear, names_of_modules
from .replace import sparsify_
from .report import Report, SkippedLayer

_TOKENS = 512  # of each layer that its threshold is chosen by
_STEP = 0.05  # by which the fraction of a layer changes at a time
_MOST = 0.95
_BLOCKS = (128, 64, 32, 16)  # of dense layers, which keep all of them
_ACTIVATIONS = "act", "act_fn", "activation", "activation_fn", "nonlinearity", "intermediate_act_fn"


@dataclass(frozen=True)
class ThresholdedLayer:
    """One layer with a threshold.

    Attributes:
        name: of the layer.
        threshold: magnitude up to which its inputs count as zero.
        off: fraction of them that does, over the batches.
        error: norm of the change of a token's results over that of these, without their bias: the root of
            the mean square over tokens.
    """

    name: str
    threshold: float
    off: float
    error: float

    def row(self) -> dict[str, str]:
        """Return the cells of a table, by column."""
        return {
            "layer": self.name,
            "threshold": f"{self.threshold:.4g}",
            "off": f"{self.off:.3f}",
            "error": f"{self.error:.3g}",
        }


def sparsify_activations_(
    model: nn.Module, batches: Iterable[Any], fraction: float = 0.5, *, dry_run: bool = False
) -> Report:
    """Turn off neurons of MLPs: give the layers that multiply them a threshold, without training.

    Numbers that enter ``down_proj`` of an MLP, or whatever it is called, count as zero up to the threshold of
    the layer, token by token. One or two tokens then read only weights of neurons that are on. They share
    the fraction by its price: that is raised next which adds least to the error of the model's results. This
    is the layer's own error, times what a run of the first batch with the threshold of this layer alone shows
    to come of it. Exact zeros, as ReLU makes them, cost nothing: they are off.

    Dense layers become `BlockSparseLinear` that keep every block, with ``policy="auto"``. The thresholds are
    attributes of the layers (`BlockSparseLinear.threshold`), part of checkpoints, and can be changed.

    Args:
        model: changed in place. MLPs are modules with two or three linear layers, of which the last one reads
            what the others write, and an activation; and each `BlockSparseMLP`.
        batches: what the model is called with, as for `prune_`; hundreds of tokens suffice.
        fraction: of the neurons that are off, in the mean over layers, by their weights' sizes.
        dry_run: only report; thresholds stay as they are.

    Returns:
        For each layer its threshold, the fraction that is off and the error with all thresholds in force; and
        MLPs that stay as they are, with the reason.
    """
    number = as_number(fraction)
    if not 0 <= number < 1:
        raise InvalidArgumentError(f"fraction must be a number from 0 to below 1, got {shown(fraction)}")
    check_model(model)
    data = collected(batches)
    names, (found, skipped) = names_of_modules(model), _layers_of_mlps(model)
    samples = {layer: _Sample(layer) for layer in found}
    with evaluating(model):
        _run(model, data, {layer: sample.add for layer, sample in samples.items()})
        for layer in [layer for layer, sample in samples.items() if not sample.rows]:
            skipped.append(SkippedLayer(names[layer][0], type(layer).__name__, "the batches do not call it"))
            del samples[layer]
        levels = {layer: sample.levels() for layer, sample in samples.items()}
        thresholds = _allocated(samples, levels, _effects(model, data[0], levels, number), number)
        measures = {layer: _Measure(layer, thresholds[layer]) for layer in samples}
        _run(model, data, {layer: measure.add for layer, measure in measures.items()}, thresholds)
    records = {names[layer][0]: measure.record(names[layer][0]) for layer, measure in measures.items()}
    if not dry_run:
        skipped += _set(model, {name: record.threshold for name, record in records.items()}, names)
    left = {one.name for one in skipped}
    layers = [record for name, record in records.items() if name not in left]
    mean = _mean({name: one.off for name, one in records.items()}, {names[one][0]: one for one in measures})
    notes = [f"{mean:.1%} of neurons are off"] if layers else []
    return Report("sparsify_activations_", layers, skipped, notes=notes, facts={"off": mean})


def _layers_of_mlps(model: nn.Module) -> tuple[list[Any], list[SkippedLayer]]:
    """Return the last layers of MLPs, and the modules that are named so and stay."""
    found: dict[nn.Module, None] = {}
    skipped = []
    for module, (name, *_) in names_of_modules(model).items():
        kind = type(module).__name__
        if projections_of(module) is not None or isinstance(module, ExpertsLinear):
            if not isinstance(module, ExpertsLinear):
                skipped.append(SkippedLayer(name, kind, "experts have no threshold"))
            continue
        down = _down_of(module)
        if down is None:
            if re.search("mlp|feedforward", kind, re.IGNORECASE) and any(map(_is_layer, module.children())):
                skipped.append(SkippedLayer(name, kind, "its layers are not those of an MLP"))
        elif getattr(down, "_shard", None) is not None:
            skipped.append(SkippedLayer(name, kind, "its weight is sharded"))
        else:
            found[down] = None
    return list(found), skipped


def _down_of(module: nn.Module) -> nn.Module | None:
    """Return the layer of an MLP that multiplies its neurons, or None."""
    if isinstance(module, BlockSparseMLP):
        return down_of(module)  # type: ignore[no-any-return]
    children = dict(module.named_children())
    layers = [child for child in children.values() if _is_layer(child)]
    others = [child for child in children.values() if not _is_layer(child)]
    activates = any(callable(getattr(module, name, None)) for name in _ACTIVATIONS)
    if not 2 <= len(layers) <= 3 or not (activates or (isinstance(module, nn.Sequential) and others)):
        return None
    *ups, down = sorted(layers, key=lambda layer: _shape(layer)[1])
    (out_features, hidden), of_ups = _shape(down), [_shape(up) for up in ups]
    if out_features >= hidden or any(shape != of_ups[0] for shape in of_ups):
        return None
    sizes = (hidden,) if len(ups) == 2 else (hidden, 2 * hidden)
    return down if of_ups[0][0] in sizes and of_ups[0][1] < hidden else None


def _is_layer(module: nn.Module) -> bool:
    return is_linear(module) or type(module) is BlockSparseLinear


def _shape(layer: Any) -> tuple[int, int]:
    """Return (out_features, in_features)."""
    if is_conv1d(layer):
        return tuple(layer.weight.shape[::-1])
    return layer.out_features, layer.in_features


@torch.no_grad()
def _product(layer: Any, x: Tensor) -> Tensor:
    """Return x Wᵀ in float32."""
    if isinstance(layer, BlockSparseLinear):
        zeros = torch.zeros_like(x[:1])
        y: Tensor = layer.forward(x) - layer.forward(zeros)  # without hooks
        return y.float()
    return nn.functional.linear(x, dense_weight(layer)).float()


def _run(
    model: nn.Module,
    data: list[Any],
    adds: Mapping[nn.Module, Any],
    limits: Mapping[nn.Module, float] = MappingProxyType({}),
) -> None:
    """Call the model with each batch, with these thresholds; tell what enters layers, but for padding."""
    mask: Tensor | None = None

    def look(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x: Tensor = args[0].detach()
        keep = mask if mask is not None and mask.shape == x.shape[:-1] else None
        rows = x.reshape(-1, x.shape[-1]) if keep is None else x[keep.to(x.device)]
        if len(rows):
            adds[layer](rows)
        limit = limits.get(layer)
        return None if limit is None else (thresholded(args[0], limit), *args[1:])

    with ExitStack() as stack, torch.no_grad():
        for layer in adds:
            stack.callback(layer.register_forward_pre_hook(look).remove)
            if isinstance(layer, BlockSparseLinear):
                stack.callback(setattr, layer, "threshold", layer.threshold)
                layer.threshold = None
        for batch in data:
            given = mask_of(batch)
            mask = None if given is None else given != 0
            call_model(model, batch)


def _errors(y: Tensor, other: Tensor) -> Tensor:
    """Return the squared relative error of each token; few tokens are much larger than all others."""
    size = y.square().sum(-1)
    return ((y - other).square().sum(-1) / size.where(size > 0, 1)).nan_to_num(0.0, 0.0)


class _Sample:
    """Inputs of some tokens of a layer, and what thresholds cost there."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.rows: list[Tensor] = []
        self.weight = _shape(layer)[0] * _shape(layer)[1]

    def add(self, x: Tensor) -> None:
        room = _TOKENS - sum(map(len, self.rows))
        if room > 0:
            step = max(1, len(x) // room)
            self.rows.append(x[::step][:room].clone())

    def levels(self) -> list[tuple[float, float, float]]:
        """Return (threshold, fraction that is off, squared relative error), by rising fractions."""
        x = torch.cat(self.rows)
        before = getattr(self.layer, "threshold", None)
        if before is not None:
            self.layer.threshold = None
        magnitudes = x.abs().flatten().float()
        ordered = magnitudes[magnitudes.isfinite()].sort().values
        of_all = _product(self.layer, x)
        found: list[tuple[float, float, float]] = []
        for level in range(round(_MOST / _STEP) + 1):
            place = int(level * _STEP * len(ordered))
            threshold = 0.0 if place == 0 else float(ordered[place - 1])
            off = float((magnitudes <= threshold).float().mean())
            if found and off <= found[-1][1]:
                continue
            errors = _errors(of_all, _product(self.layer, thresholded(x, threshold)))
            found.append((threshold, off, float(errors.mean())))
        if before is not None:
            self.layer.threshold = before
        return found


_Levels = Mapping[Any, list[tuple[float, float, float]]]  # see `_Sample.levels`


def _effects(model: nn.Module, batch: Any, levels: _Levels, fraction: float) -> dict[Any, float]:
    """Return what the squared relative error of each layer does to that of the model's results.

    Where these are no tensor, or nothing comes of it, all layers count alike.
    """
    before = _results(model, batch, levels, {})
    found = {}
    for layer, own in levels.items():
        threshold, _, error = min(own, key=lambda level: abs(level[1] - fraction))
        after = before if before is None else _results(model, batch, levels, {layer: threshold})
        change = 0.0 if before is None or after is None else float(_errors(before, after).mean())
        found[layer] = change / error if error > 0 else 0.0
    return found if any(found.values()) else dict.fromkeys(levels, 1.0)


def _results(
    model: nn.Module, batch: Any, layers: Iterable[nn.Module], limits: Mapping[nn.Module, float]
) -> Tensor | None:
    """Return the model's results [tokens, features], in float32, where these layers have these thresholds."""
    found: list[Any] = []
    hook = model.register_forward_hook(lambda *call: found.append(first_of(call[-1])))
    try:
        _run(model, [batch], dict.fromkeys(layers, lambda _: None), limits)
    finally:
        hook.remove()
    y = found[0]
    return y.float().flatten(0, -2) if isinstance(y, Tensor) and y.dim() > 1 else None


def _allocated(
    samples: Mapping[Any, _Sample], levels: _Levels, effects: Mapping[Any, float], fraction: float
) -> dict[Any, float]:
    """Return a threshold for each layer: that is raised next which costs least for what it turns off."""
    at = dict.fromkeys(levels, 0)
    weights = {layer: sample.weight for layer, sample in samples.items()}
    whole = sum(weights.values())

    def off() -> float:
        return sum(weights[layer] * levels[layer][at[layer]][1] for layer in at) / whole

    def price(layer: Any) -> float:
        (_, before, error), (_, after, next_error) = levels[layer][at[layer] : at[layer] + 2]
        return effects[layer] * max(0.0, next_error - error) / (weights[layer] * (after - before))

    while at and off() < fraction:
        rising = [layer for layer in at if at[layer] + 1 < len(levels[layer])]
        if not rising:
            break
        at[min(rising, key=price)] += 1
    return {layer: levels[layer][at[layer]][0] for layer in at}


class _Measure:
    """The effect of a threshold on the layer that has it, over all tokens."""

    def __init__(self, layer: Any, threshold: float) -> None:
        self.layer, self.threshold = layer, threshold
        self.off = self.count = 0
        self.errors, self.tokens = 0.0, 0

    def add(self, x: Tensor) -> None:
        zeroed = thresholded(x, self.threshold)
        self.off += int((zeroed == 0).sum())
        self.count += x.numel()
        y = _product(self.layer, x)
        self.errors += float(_errors(y, _product(self.layer, zeroed)).sum())
        self.tokens += len(x)

    def record(self, name: str) -> ThresholdedLayer:
        error = (self.errors / max(1, self.tokens)) ** 0.5
        return ThresholdedLayer(name, self.threshold, self.off / max(1, self.count), error)


def _mean(off: Mapping[str, float], layers: Mapping[str, Any]) -> float:
    sizes = {name: _shape(layer)[0] * _shape(layer)[1] for name, layer in layers.items()}
    return sum(sizes[name] * off[name] for name in off) / max(1, sum(sizes.values()))


def _set(
    model: nn.Module, thresholds: Mapping[str, float], names: Mapping[nn.Module, list[str]]
) -> list[SkippedLayer]:
    """Give layers their thresholds, dense ones as block-sparse ones; return those that cannot have one."""
    rules, skipped = {}, []
    for name in thresholds:
        layer = model.get_submodule(name)
        if isinstance(layer, BlockSparseLinear):
            continue
        blocks = [next((b for b in _BLOCKS if size % b == 0), 0) for size in _shape(layer)]
        if all(blocks):
            rules[f"^{re.escape(name)}$"] = BlockSparseConfig(1.0, tuple(blocks), policy="auto")
        else:
            reason = f"its {_shape(layer)} features are no multiples of {_BLOCKS[-1]}"
            skipped.append(SkippedLayer(name, type(layer).__name__, reason))
    if rules:
        skipped += [one for one in sparsify_(model, rules).skipped if one.name in thresholds]
    for name, threshold in thresholds.items():
        layer = model.get_submodule(name)
        if isinstance(layer, BlockSparseLinear):
            layer.threshold = threshold
    return skipped
