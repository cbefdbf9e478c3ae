"""Inputs of layers whose features may be scaled, found by what scaling does to the model.

A layer gives the same where feature j of its input is divided by s_j and column j of its weight multiplied by
it. What divides the input is the module before the layer: a norm whose weight is divided, or a linear layer
whose rows are, as up_proj in front of down_proj, v_proj in front of o_proj, or one with a ReLU behind it.

Which module that is does not follow from names. Rows of a candidate are multiplied by powers of two, and each
feature of the layer's input is multiplied by one of them, exactly, or the candidate is none. The exponents
are digits of the row's number, so a few runs tell of every feature where it comes from, as where several
heads of queries share the values of one. A group counts only if factors of the candidate and of all layers
with this input leave the output of the block the same: nothing else, such as a residual connection, reads it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..calibrate.calibration import Calibration, Unit
from ..calibrate.stream import Input, differences
from .parameters import is_linear, is_norm, scaled_parameters, sizes_of

_PARTS = (1, 2, 3)  # a producer's rows count as a whole, in halves and in thirds, as of fused layers
_BASES = {torch.float16: 4}  # of digits, whose number bounds the powers of two; 16 for other dtypes
_DIFFERENCE = 4  # of outputs that count as equal, relative, over the rounding unit of their dtype


@dataclass(frozen=True)
class ScaleGroup:
    """Layers with the same input, and where its features come from.

    Attributes:
        layers: names of the linear layers with this input, in the order in which they run.
        producer: the name of the module whose rows are the features, or None.
        start: the first of these rows.
        source: [in_features] of integers on the CPU: which row, counted from start, a feature comes from; -1
            where the feature is always 0. None without a producer.
        reason: why there is no producer, or None.
    """

    layers: tuple[str, ...]
    producer: str | None = None
    start: int = 0
    source: Tensor | None = None
    reason: str | None = None

    def rows(self, of_features: Tensor) -> Tensor:
        """Return [rows] of factors for the producer, from those of features; 1 for rows without features."""
        assert self.source is not None
        known = self.source >= 0
        rows = torch.ones(int(self.source.max()) + 1, device="cpu")
        rows[self.source[known]] = of_features.cpu()[known]
        return rows


class GroupFinder:
    """Search for the scale groups of one unit of a model.

    Args:
        model: in evaluation mode; only read.
        calibration: stands before the unit. Its first batch is what the unit runs on.
        unit: with the names of its linear layers and norms.
        against: why modules cannot be scaled, by names.
    """

    def __init__(
        self, model: nn.Module, calibration: Calibration, unit: Unit, against: Mapping[str, str]
    ) -> None:
        self._model, self._calibration, self._unit, self._against = model, calibration, unit, against
        self._inputs: dict[str, Tensor] = {}  # of the first call, in the order of these
        self._calls: dict[str, list[Input]] = {}
        self._output = calibration.trial(unit, unit.layers, self._note)

    def _note(self, name: str, x: Tensor) -> None:
        if name not in self._inputs:
            self._inputs[name] = x.detach().clone()
        self._calls.setdefault(name, []).append(Input.of(x))

    def groups(self, targets: Container[str], search: bool) -> Iterator[ScaleGroup]:
        """Yield the inputs of target layers that run; `search` for modules that may take their scales."""
        alike: dict[object, list[str]] = {}
        for name, calls in self._calls.items():
            if is_linear(self._model.get_submodule(name)):
                alike.setdefault(tuple(call.key for call in calls), []).append(name)
        for layers in alike.values():
            if not any(name in targets for name in layers):
                continue
            yield self._found(tuple(layers)) if search else ScaleGroup(tuple(layers))

    def _found(self, layers: tuple[str, ...]) -> ScaleGroup:
        for name in layers:
            if name in self._against:
                return ScaleGroup(layers, reason=f"{name}: {self._against[name]}")
        seen: list[str] = []
        refused: list[str] = []
        for producer, start, stop in self._candidates(layers[0]):
            if producer in self._against:
                refused.append(producer)
                continue
            source = self._source(producer, start, stop, layers[0])
            if source is None:
                continue
            group = ScaleGroup(layers, producer, start, source)
            if self._keeps_output(group):
                return group
            seen.append(producer)
        reason = "no module before it can take its scales"
        if seen:
            reason = f"something else reads what {seen[0]} gives"
        elif refused:
            reason += f"; {refused[0]} cannot: {self._against[refused[0]]}"
        return ScaleGroup(layers, reason=reason)

    def _candidates(self, layer: str) -> Iterator[tuple[str, int, int]]:
        """Yield modules that run before a layer, the last one first, and which of their rows may count."""
        features = sizes_of(self._model.get_submodule(layer))[1]
        before = list(self._inputs)[: list(self._inputs).index(layer)]
        for name in reversed(before):
            module = self._model.get_submodule(name)
            rows = sizes_of(module)[0]
            for parts in _PARTS if is_linear(module) else _PARTS[:1]:
                size, rest = divmod(rows, parts)
                if not rest and size and features % size == 0 and (parts == 1 or size == features):
                    for part in reversed(range(parts)):
                        yield name, part * size, (part + 1) * size

    def _source(self, producer: str, start: int, stop: int, layer: str) -> Tensor | None:
        """Return the row that each feature of a layer's input comes from, or None if it is not so."""
        x = self._inputs[layer]
        numbers, base = torch.arange(1, stop - start + 1, device="cpu"), _BASES.get(x.dtype, 16)
        found, place = torch.zeros(x.shape[-1], dtype=torch.long, device="cpu"), 1
        while place <= stop - start:
            digits = numbers // place % base  # 0 is that of what comes from elsewhere
            factors = self._whole(producer, start, 0.5**digits)
            seen = self._digits(layer, self._parameters(producer, rows=factors), base)
            if seen is None:
                return None
            found, place = found + seen * place, place * base
        live = _norms(x).cpu() > 0
        if not bool(live.any()) or not bool(((found > 0) & (found <= stop - start))[live].all()):
            return None
        return torch.where(live, found - 1, -1)

    def _whole(self, producer: str, start: int, factors: Tensor) -> Tensor:
        rows = torch.ones(sizes_of(self._model.get_submodule(producer))[0], device="cpu")
        rows[start : start + len(factors)] = factors
        return rows

    def _digits(self, layer: str, parameters: Mapping[str, Tensor], base: int) -> Tensor | None:
        """Return by which powers of 1/2 a layer's input is multiplied; None if it changes in another way."""
        inputs: list[Tensor] = []
        self._calibration.trial(
            self._unit, [layer], lambda _, x: inputs.append(x.detach()), parameters, until=layer
        )
        before = self._inputs[layer]
        if not inputs or inputs[0].shape != before.shape:
            return None
        norms = _norms(before)
        digits = (norms / _norms(inputs[0])).log2().round().nan_to_num(0).clamp(0, base - 1)
        expected = before * (0.5**digits).to(before.dtype)
        same = _norms(inputs[0] - expected) <= torch.finfo(before.dtype).eps / 2 * norms * 0.5**digits
        return digits.long().cpu() if bool(same.all()) else None

    def _keeps_output(self, group: ScaleGroup) -> bool:
        """Return True if factors of a group leave what the unit gives the same, but for rounding."""
        assert group.producer is not None and group.source is not None
        generator = torch.Generator().manual_seed(0)
        rows = int(group.source.max()) + 1
        factors = 2.0 ** torch.randint(-1, 2, (rows,), generator=generator, device="cpu")
        columns = torch.where(group.source >= 0, 1 / factors[group.source.clamp(min=0)], 1.0)
        parameters = self._parameters(group.producer, rows=self._whole(group.producer, group.start, factors))
        for name in group.layers:
            parameters |= self._parameters(name, columns=columns)
        output = self._calibration.trial(self._unit, [], lambda *_: None, parameters)
        return _same(output, self._output)

    def _parameters(self, name: str, **factors: Tensor) -> dict[str, Tensor]:
        scaled = scaled_parameters(self._model.get_submodule(name), **factors)
        return {f"{name}.{own}": tensor for own, tensor in scaled.items()}


def scalable(model: nn.Module) -> Sequence[str]:
    """Return the names of a model's linear layers and norms."""
    return [name for name, module in model.named_modules() if is_linear(module) or is_norm(module)]


def _norms(x: Tensor) -> Tensor:
    """Return the norm of each feature [features] of x [..., features], in float64."""
    norms: Tensor = torch.linalg.vector_norm(x.reshape(-1, x.shape[-1]), dim=0, dtype=torch.float64)
    return norms


def _same(output: Any, expected: Any) -> bool:
    found = differences(output, expected)
    return all(each <= _DIFFERENCE * torch.finfo(dtype).eps for dtype, each in found)
