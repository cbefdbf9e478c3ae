"""Neurons that are off: thresholds of what the last layer of an MLP multiplies, chosen on data.

As TEAL does, Liu et al., "Training-Free Activation Sparsity in Large Language Models" (2024).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import as_number, shown
from .._runtime.launch import thresholded
from ..calibrate.calibration import check_model, collected
from ..calibrate.stream import call_apart, first_of, mask_of
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..nn.experts import BlockSparseExperts, ExpertsLinear, projections_of
from ..nn.linear import BlockSparseLinear, dense_weight, evaluating, is_conv1d
from ..nn.mlp import BlockSparseMLP, down_of
from .match import SkippedLayer, is_linear, names_of_modules
from .replace import sparsify_
from .report import Report

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


def sparsify_activations_(model: nn.Module, batches: Iterable[Any], fraction: float = 0.5) -> Report:
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
            what the others write, and an activation; and each `BlockSparseMLP` and `BlockSparseExperts`.
        batches: what the model is called with, as for `prune_`; hundreds of tokens suffice.
        fraction: of the neurons that are off, in the mean over layers, by their weights' sizes.

    Returns:
        For each layer its threshold, the fraction that is off and the error with all thresholds in force; and
        MLPs that stay as they are, with the reason.
    """
    number = as_number(fraction)
    if not 0 <= number < 1:
        raise InvalidArgumentError(f"fraction must be a number from 0 to below 1, got {shown(fraction)}")
    check_model(model)
    data = collected(batches)
    layers, skipped = _layers_of_mlps(model)
    with evaluating(model), _without_thresholds(layers):
        _run(model, data, layers, _Layer.sample)
        for layer in [layer for layer in layers if not layer.rows]:
            kind = type(layer.module).__name__
            skipped.append(SkippedLayer(layer.name, kind, "the batches do not call it"))
            layers.remove(layer)
        for layer in layers:
            layer.rank()
        _weigh(model, data[0], layers, number)
        _allocate(layers, number)
        _run(model, data, layers, _Layer.measure, {layer: layer.threshold for layer in layers})
    skipped += _set(model, {layer.name: layer.threshold for layer in layers})
    left = {one.name for one in skipped}
    records = [layer.record() for layer in layers if layer.name not in left]
    mean = sum(layer.size * layer.off for layer in layers) / max(1, sum(layer.size for layer in layers))
    notes = [f"{mean:.1%} of neurons are off"] if records else []
    return Report("sparsify_activations_", records, skipped, notes=notes, facts={"off": mean})


def _layers_of_mlps(model: nn.Module) -> tuple[list[_Layer], list[SkippedLayer]]:
    """Return the last layers of MLPs, and the modules that are named so and stay."""
    names = names_of_modules(model)
    found: dict[nn.Module, None] = {}
    skipped = []
    for module, (name, *_) in names.items():
        kind = type(module).__name__
        if projections_of(module) is not None and not isinstance(module, BlockSparseExperts):
            reason = "its experts are dense; make them block-sparse first, if need be of density 1"
            skipped.append(SkippedLayer(name, kind, reason))
            continue
        down = _down_of(module)
        if down is None:
            if re.search("mlp|feedforward", kind, re.IGNORECASE) and any(map(_is_layer, module.children())):
                skipped.append(SkippedLayer(name, kind, "its layers are not those of an MLP"))
        elif isinstance(module, BlockSparseExperts) and not isinstance(down, ExpertsLinear):
            skipped.append(SkippedLayer(name, kind, "down has an adapter"))
        elif getattr(down, "_shard", None) is not None:
            skipped.append(SkippedLayer(name, kind, "its weight is sharded"))
        else:
            found[down] = None
    return [_Layer(names[layer][0], layer) for layer in found], skipped


def _down_of(module: nn.Module) -> nn.Module | None:
    """Return the layer of an MLP that multiplies its neurons, or None."""
    if isinstance(module, BlockSparseMLP):
        return down_of(module)  # type: ignore[no-any-return]
    if isinstance(module, BlockSparseExperts):
        return module._modules["down"]
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


def _errors(y: Tensor, other: Tensor) -> Tensor:
    """Return the squared relative error of each token; few tokens are much larger than all others."""
    size = y.square().sum(-1)
    return ((y - other).square().sum(-1) / size.where(size > 0, 1)).nan_to_num(0.0, 0.0)


class _Level(NamedTuple):
    """A threshold of a layer, the fraction that is off and the squared relative error on a sample."""

    threshold: float
    off: float
    error: float


class Rows(NamedTuple):
    """Tokens that enter a layer, and the number of the expert of each where there are experts."""

    x: Tensor
    expert: Tensor | None = None

    def thresholded(self, threshold: float) -> Rows:
        """Return them with zeros in the place of numbers up to a magnitude."""
        return self._replace(x=thresholded(self.x, threshold))


class _Layer:
    """The last layer of an MLP, and what thresholds do to it."""

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module
        self.size = math.prod(_shape(module))
        self.rows: list[Rows] = []  # a sample
        self.levels: list[_Level] = []  # by rising fractions that are off
        self.place = 0  # of the level that is chosen
        self.effect = 1.0  # squared relative error of the model's results, over that of this layer
        self.zeros = self.numbers = self.tokens = 0
        self.errors = 0.0

    @property
    def threshold(self) -> float:
        return self.levels[self.place].threshold

    @property
    def off(self) -> float:
        """Fraction of the numbers that `measure` has met."""
        return self.zeros / max(1, self.numbers)

    def sample(self, rows: Rows) -> None:
        room = _TOKENS - sum(len(one.x) for one in self.rows)
        if room > 0:
            step = max(1, len(rows.x) // room)
            self.rows.append(
                Rows(*(None if one is None else one[::step][:room].clone() for one in rows))  # type: ignore[arg-type]
            )

    def rank(self) -> None:
        """Measure what thresholds cost on the sample."""
        xs, experts = zip(*self.rows, strict=True)
        rows = Rows(torch.cat(xs), None if experts[0] is None else torch.cat(experts))
        magnitudes, y = rows.x.abs().flatten().float(), self._product(rows)
        ordered = magnitudes[magnitudes.isfinite()].sort().values
        for level in range(round(_MOST / _STEP) + 1):
            place = int(level * _STEP * len(ordered))
            threshold = 0.0 if place == 0 else float(ordered[place - 1])
            off = float((magnitudes <= threshold).float().mean())
            if not self.levels or off > self.levels[-1].off:
                errors = _errors(y, self._product(rows.thresholded(threshold)))
                self.levels.append(_Level(threshold, off, float(errors.mean())))

    def measure(self, rows: Rows) -> None:
        """Count what the threshold of the chosen level does to these inputs."""
        zeroed = rows.thresholded(self.threshold)
        self.zeros += int((zeroed.x == 0).sum())
        self.numbers += rows.x.numel()
        self.errors += float(_errors(self._product(rows), self._product(zeroed)).sum())
        self.tokens += len(rows.x)

    def record(self) -> ThresholdedLayer:
        error = (self.errors / max(1, self.tokens)) ** 0.5
        return ThresholdedLayer(self.name, self.threshold, self.off, error)

    @torch.no_grad()
    def _product(self, rows: Rows) -> Tensor:
        """Return x Wᵀ in float32."""
        x, expert = rows
        if expert is not None:
            expert, order = expert.sort(stable=True)
            numbers = torch.arange(self.module.experts + 1, device=x.device)
            offsets = torch.searchsorted(expert, numbers, out_int32=True)
            y, bias = (self.module.forward(one, offsets) for one in (x[order], torch.zeros_like(x)))
            return torch.empty_like(y, dtype=torch.float32).index_copy_(0, order, (y - bias).float())
        if isinstance(self.module, BlockSparseLinear):
            y = self.module.forward(x) - self.module.forward(torch.zeros_like(x[:1]))  # without hooks
            return y.float()
        return nn.functional.linear(x, dense_weight(self.module)).float()


@contextmanager
def _without_thresholds(layers: Iterable[_Layer]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (layer.module for layer in layers):
            if isinstance(module, BlockSparseLinear):
                stack.callback(setattr, module, "threshold", module.threshold)
                module.threshold = None
        yield


def _run(
    model: nn.Module,
    data: list[Any],
    layers: Iterable[_Layer],
    tell: Callable[[_Layer, Rows], None] | None,
    limits: Mapping[_Layer, float] = MappingProxyType({}),
) -> None:
    """Call the model with each batch, with these thresholds; tell what enters layers, but for padding."""
    mask: Tensor | None = None

    def look(layer: _Layer, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x: Tensor = args[0].detach()
        keep = mask if mask is not None and mask.shape == x.shape[:-1] else None
        rows = x.reshape(-1, x.shape[-1]) if keep is None else x[keep.to(x.device)]
        if tell is not None and len(rows):
            tell(layer, Rows(rows, _experts_of(*args[1:])))
        limit = limits.get(layer)
        return None if limit is None else (thresholded(args[0], limit), *args[1:])

    with ExitStack() as stack, torch.no_grad():
        for layer in layers:
            stack.callback(layer.module.register_forward_pre_hook(partial(look, layer)).remove)
        for batch in data:
            given = mask_of(batch)
            mask = None if given is None else given != 0
            call_apart(model, batch)


def _experts_of(offsets: Tensor | None = None) -> Tensor | None:
    """Return the expert of each row, where ``offsets`` say where those of each begin."""
    if offsets is None:
        return None
    return torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())


def _weigh(model: nn.Module, batch: Any, layers: Iterable[_Layer], fraction: float) -> None:
    """Measure the effect of each layer's error on the model's results."""
    before, effects = _results(model, batch, {}), {}
    for layer in layers:
        threshold, _, error = min(layer.levels, key=lambda level: abs(level.off - fraction))
        after = before if before is None else _results(model, batch, {layer: threshold})
        change = 0.0 if before is None or after is None else float(_errors(before, after).mean())
        effects[layer] = change / error if error > 0 else 0.0
    if any(effects.values()):
        for layer, effect in effects.items():
            layer.effect = effect


def _results(model: nn.Module, batch: Any, limits: Mapping[_Layer, float]) -> Tensor | None:
    """Return the model's results [tokens, features], in float32, where layers have these thresholds."""
    found: list[Any] = []
    hook = model.register_forward_hook(lambda *call: found.append(first_of(call[-1])))
    try:
        _run(model, [batch], limits, None, limits)
    finally:
        hook.remove()
    y = found[0]
    return y.float().flatten(0, -2) if isinstance(y, Tensor) and y.dim() > 1 else None


def _allocate(layers: Sequence[_Layer], fraction: float) -> None:
    """Choose levels: that layer is raised next which costs least for what it turns off."""
    whole = sum(layer.size for layer in layers)

    def price(layer: _Layer) -> float:
        now, then = layer.levels[layer.place : layer.place + 2]
        return layer.effect * max(0.0, then.error - now.error) / (layer.size * (then.off - now.off))

    while layers and sum(one.size * one.levels[one.place].off for one in layers) / whole < fraction:
        rising = [layer for layer in layers if layer.place + 1 < len(layer.levels)]
        if not rising:
            break
        min(rising, key=price).place += 1


def _set(model: nn.Module, thresholds: Mapping[str, float]) -> list[SkippedLayer]:
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
