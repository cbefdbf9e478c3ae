"""The plan of what becomes of each layer of a model, found block by block and applied at the end."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from .._progress import Progress
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..prune.calibration import Calibration, Forward, Unit
from ..prune.targets import naming_layer
from ..storage.quantized import QuantizedStorage
from .groups import GroupFinder, ScaleGroup, scalable
from .parameters import dense_of, reasons_against_scaling, scaled_parameters, sizes_of
from .report import QuantizedLayer
from .samples import Samples
from .search import Found, Search


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
        names = scalable(model)
        self._calibration = Calibration(model, data, forward, names, device, compare=False)
        self._against = reasons_against_scaling(model, names)
        self._rows: dict[str, Tensor] = {}
        self._columns: dict[str, Tensor] = {}
        self._limits: dict[str, Tensor] = {}
        self._progress = Progress(len(targets))
        self.layers: list[QuantizedLayer] = []
        self.stack = self._calibration.stack

    @torch.no_grad()
    def make(self) -> None:
        """Find the scales and limits of all layers.

        Raises:
            InvalidArgumentError: the batches do not run a layer, or give it NaN or infinities.
        """
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
        groups = list(finder.groups(self._targets, self._smooth))
        samples = {group.layers[0]: Samples(self._device) for group in groups}
        self._calibration.visit(
            unit, list(samples), lambda name, x, number, keep: samples[name].add(x, number, keep)
        )
        for group in groups:
            own = samples[group.layers[0]]
            number = own.not_finite()
            if number is not None:
                raise InvalidArgumentError(
                    f"batches must be finite at every layer: batch {number} (counted from 0) gives layer "
                    f"{group.layers[0]!r} inputs with NaN or infinities"
                )
            self._solve(group, own)

    def _solve(self, group: ScaleGroup, samples: Samples) -> None:
        own = [name for name in group.layers if name in self._targets]
        weights = {name: dense_of(self._model.get_submodule(name), self._device) for name in own}
        search = Search(samples, weights, self._storage)
        found = search.best(group.source, clip=self._clip)
        if found.columns is not None and group.producer is not None:
            self._columns |= dict.fromkeys(group.layers, found.columns)
            rows = self._rows.setdefault(
                group.producer, torch.ones(sizes_of(self._module(group.producer))[0], device="cpu")
            )
            factors = group.rows(1 / found.columns)
            rows[group.start : group.start + len(factors)] *= factors
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

    def _module(self, name: str) -> Any:
        return self._model.get_submodule(name)

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self) -> None:
        """Change the model; everything that can fail comes before the first change."""
        others = [name for name in {**self._rows, **self._columns} if name not in self._targets]
        scaled = [(self._module(name), self._scaled(name)) for name in others]
        made = [(self._module(name), self._made(name)) for name in self._targets]
        for module, parameters in scaled:
            for own, tensor in parameters.items():
                module.get_parameter(own).copy_(tensor)
        for layer, other in made:
            layer.take_over(other)

    def _scaled(self, name: str) -> dict[str, Tensor]:
        return scaled_parameters(self._module(name), self._rows.get(name), self._columns.get(name))

    def _made(self, name: str) -> BlockSparseLinear:
        """Return a layer as one is to become; the pattern and a bias that stays are the same tensors."""
        layer = self._module(name)
        other: BlockSparseLinear = copy(layer)
        own = other.__dict__
        own["_parameters"], own["_buffers"] = dict(layer._parameters), dict(layer._buffers)
        for parameter, tensor in self._scaled(name).items():
            old = layer.get_parameter(parameter)
            setattr(other, parameter, nn.Parameter(tensor, old.requires_grad))
        with naming_layer(name):
            limits = self._limits[name] * self._row_factors(name)
            own_name = self._storage.name
            return other.to_storage(own_name, activations=own_name, limits=limits)

    def _row_factors(self, name: str) -> Tensor | float:
        rows = self._rows.get(name)
        return 1.0 if rows is None else rows.to(self._device)
