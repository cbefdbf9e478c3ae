"""The plan of what becomes of each layer of a model, found block by block and applied at the end."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._progress import Progress
from ..calibrate.calibration import Calibration, Forward, Unit, check_inputs, naming_layer
from ..calibrate.stream import differences
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..storage.quantized import QuantizedStorage
from .groups import GroupFinder, ScaleGroup, scalable
from .parameters import dense_of, reasons_against_scaling, scaled_parameters, sizes_of
from .report import QuantizedLayer
from .samples import Samples
from .search import Found, Search

# Relative differences of outputs that count as equal. Factors are powers of two: only float16 rounds anew.
_LIMITS = {2: 3e-2, 4: 1e-4, 8: 1e-6}  # by bytes of a number

_Scaled: TypeAlias = tuple[ScaleGroup, Tensor]  # and the factors of its columns


class Plan:
    """Scales and limits for the layers of a model, which stays as it is until `apply`.

    Args:
        model: in evaluation mode.
        targets: names of the layers to quantize.
        data: calibration data.
        forward: calls the model with a batch.
        device: where blocks run and errors are computed.
        storage: of the layers afterwards, and of their activations.
        smooth: whether inputs are scaled.
        clip: whether weights are clipped.

    Attributes:
        layers: what was found, in the order in which layers run.
        stack: the stack of blocks that the data go through, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[str],
        data: Sequence[Any],
        forward: Forward,
        device: torch.device,
        storage: QuantizedStorage,
        smooth: bool,
        clip: bool,
    ) -> None:
        self._model, self._targets, self._device = model, dict.fromkeys(targets), device
        self._storage, self._smooth, self._clip = storage, smooth, clip
        self._names = scalable(model)
        self._calibrated = partial(Calibration, model, data, forward, self._names, device, compare=False)
        self._against = reasons_against_scaling(model, self._names)
        self._refused: dict[tuple[str, ...], ScaleGroup] = {}  # by their layers
        self._rows: dict[str, Tensor] = {}
        self._columns: dict[str, Tensor] = {}

    @torch.no_grad()
    def make(self) -> None:
        """Find the scales and limits of all layers.

        Raises:
            InvalidArgumentError: the batches do not run a layer, or give it no token that counts, or NaN or
                infinities.
        """
        self._make_all()
        while harmful := self._harmful(self._scaled):
            for group, reason in harmful:
                self._refused[group.layers] = ScaleGroup(group.layers, reason=reason)
            self._make_all()
        self._rows, self._columns = self._factors(self._scaled)

    def _make_all(self) -> None:
        self._calibration = self._calibrated()
        self.stack = self._calibration.stack
        self._limits: dict[str, Tensor] = {}
        self._scaled: list[_Scaled] = []
        self._progress = Progress(len(self._targets))
        self.layers: list[QuantizedLayer] = []
        for unit in self._calibration.units():
            self._make(unit)
            self._calibration.advance(unit, {})
        missing = [name for name in self._targets if name not in self._limits]
        if missing:
            raise InvalidArgumentError(f"batches must run layer {missing[0]!r}, or layers must leave it out")

    def _make(self, unit: Unit) -> None:
        if self._targets.keys().isdisjoint(unit.layers):
            return
        finder = GroupFinder(self._model, self._calibration, unit, self._against)
        found = finder.groups(self._targets, self._smooth)
        groups = [self._refused.get(group.layers, group) for group in found]
        samples = {group.layers[0]: Samples(self._device) for group in groups}
        self._calibration.visit(
            unit, list(samples), lambda name, x, number, keep: samples[name].add(x, number, keep)
        )
        for group in groups:
            own = samples[group.layers[0]]
            check_inputs(group.layers[0], own.tokens, own.not_finite())
            self._solve(group, own)

    def _solve(self, group: ScaleGroup, samples: Samples) -> None:
        own = [name for name in group.layers if name in self._targets]
        weights = {name: dense_of(self._model.get_submodule(name), self._device) for name in own}
        search = Search(samples, weights, self._storage)
        found = search.best(group.source, clip=self._clip)
        if found.columns is not None and group.producer is not None:
            self._scaled.append((group, found.columns))
        self._limits |= found.limits
        for name in own:
            self.layers.append(self._described(name, group, found, weights[name], samples.tokens))
            self._progress.show(len(self.layers), f"layers quantized, {name} the last")

    def _described(
        self, name: str, group: ScaleGroup, found: Found, weight: Tensor, tokens: int
    ) -> QuantizedLayer:
        layer = self._module(name)
        scaled = weight if found.columns is None else weight * found.columns
        clipped = found.limits[name] < scaled.abs().amax(-1)
        return QuantizedLayer(
            name,
            layer.spec.shape,
            layer.density,
            None if found.columns is None else group.producer,
            found.alpha,
            float(clipped.float().mean()),
            found.before[name],
            found.after[name],
            tokens,
            group.reason if self._smooth else None,
        )

    def _factors(self, groups: Sequence[_Scaled]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the factors of rows and of columns of modules, by name, where these groups are scaled."""
        rows: dict[str, Tensor] = {}
        columns: dict[str, Tensor] = {}
        for group, factors in groups:
            assert group.producer is not None
            columns |= dict.fromkeys(group.layers, factors)
            size = sizes_of(self._module(group.producer))[0]
            own = rows.setdefault(group.producer, torch.ones(size, device="cpu"))
            inverse = group.rows(1 / factors)
            own[group.start : group.start + len(inverse)] *= inverse
        return rows, columns

    def _harmful(self, groups: Sequence[_Scaled]) -> list[tuple[ScaleGroup, str]]:
        """Return the groups whose scales change what the whole model gives for any batch, and why.

        A group was found in one block on one batch: something outside of the block, or a branch that other
        batches take, may read its input, too.
        """
        if not groups or self._keeps_outputs(groups):
            return []
        if not self._keeps_outputs([]):
            reason = "the model's outputs cannot be compared: two runs give different tensors, or none"
            return [(group, reason) for group, _ in groups]
        return [
            (group, f"the model's outputs change where {group.producer} takes its scales")
            for group, _ in self._harmful_of(groups)
        ]

    def _harmful_of(self, groups: Sequence[_Scaled]) -> list[_Scaled]:
        """Return those of some groups, which change outputs together, that do so alone, or else all."""
        half = len(groups) // 2
        halves = [part for part in (groups[:half], groups[half:]) if part]
        changing = [part for part in halves if len(groups) > 1 and not self._keeps_outputs(part)]
        return [group for part in changing for group in self._harmful_of(part)] or list(groups)

    def _keeps_outputs(self, groups: Sequence[_Scaled]) -> bool:
        """Return True if the model gives the same for all batches where these groups are scaled."""
        rows, columns = self._factors(groups)
        parameters = {
            f"{name}.{own}": tensor
            for name in {**rows, **columns}
            for own, tensor in scaled_parameters(
                self._module(name), rows.get(name), columns.get(name)
            ).items()
        }
        outputs = zip(self._calibration.outputs(parameters), self._calibration.outputs({}), strict=True)
        found = (differences(output, expected) for output, expected in outputs)
        return all(each <= _LIMITS[dtype.itemsize] for of_batch in found for dtype, each in of_batch)

    def _module(self, name: str) -> Any:
        return self._model.get_submodule(name)

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self) -> None:
        """Change the model; everything that can fail comes before the first change."""
        others = [name for name in {**self._rows, **self._columns} if name not in self._targets]
        scaled = [(self._module(name), self._parameters(name)) for name in others]
        made = [(self._module(name), self._made(name)) for name in self._targets]
        for module, parameters in scaled:
            for own, tensor in parameters.items():
                module.get_parameter(own).copy_(tensor)
        for layer, other in made:
            layer.take_over(other)

    def _parameters(self, name: str) -> dict[str, Tensor]:
        return scaled_parameters(self._module(name), self._rows.get(name), self._columns.get(name))

    def _made(self, name: str) -> BlockSparseLinear:
        """Return a layer as one is to become; the pattern and a bias that stays are the same tensors."""
        layer = self._module(name)
        other: BlockSparseLinear = copy(layer)
        own = other.__dict__
        own["_parameters"], own["_buffers"] = dict(layer._parameters), dict(layer._buffers)
        for parameter, tensor in self._parameters(name).items():
            old = layer.get_parameter(parameter)
            setattr(other, parameter, nn.Parameter(tensor, old.requires_grad))
        with naming_layer(name):
            limits = self._limits[name] * self._row_factors(name)
            own_name = self._storage.name
            return other.to_storage(own_name, activations=own_name, limits=limits)

    def _row_factors(self, name: str) -> Tensor | float:
        rows = self._rows.get(name)
        return 1.0 if rows is None else rows.to(self._device)
