"""The plan of what becomes of each layer of a model whose weights alone are quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from .._progress import Progress
from ..calibrate.calibration import Calibration, Forward, Unit, checked_moments, naming_layer
from ..calibrate.moments import Moments, damped, exact_products
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..storage.quantized import QuantizedStorage
from .parameters import dense_of
from .report import QuantizedLayer
from .rounding import RoundedWeight, round_weight
from .samples import inverse_norms

# Of the mean of the diagonal. On tokens that were not calibrated on a tenth was better than a hundredth, and
# much better with few tokens, where a hundredth was worse than rounding to the nearest.
_DAMPING = 0.1


class WeightPlan:
    """Rounded weights for the layers of a model, which stays as it is until `apply`.

    Layers are rounded in the order in which they run, each by its inputs behind those before.

    Args:
        model: in evaluation mode.
        targets: names of the layers to quantize.
        data: calibration data.
        forward: calls the model with a batch.
        device: where blocks run and weights are rounded.
        storage: of the layers afterwards.
        clip: whether scales are chosen by the error of the output.

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
        clip: bool,
    ) -> None:
        self._model, self._device, self._storage, self._clip = model, device, storage, clip
        self._calibration = Calibration(model, data, forward, targets, device, compare=False)
        self._rounded: dict[str, RoundedWeight] = {}
        self._progress = Progress(len(targets))
        self.layers: list[QuantizedLayer] = []
        self.stack = self._calibration.stack

    @torch.no_grad()
    def make(self) -> None:
        """Round all weights.

        Raises:
            InvalidArgumentError: the batches do not run a layer, or give it NaN or infinities.
        """
        for unit in self._calibration.units():
            self._make(unit)

    def _make(self, unit: Unit) -> None:
        # Layers outside the stack come last, and run with everything before them rounded.
        parameters = {} if unit.number is not None else self._parameters(self._rounded)
        for group in self._calibration.groups(unit):
            weights = {name: self._weight(name) for name in group}
            moments = checked_moments(group[0], self._moments(unit, weights, parameters))
            for name, weight in weights.items():
                self._round(name, weight, moments)
            parameters |= self._parameters({name: self._rounded[name] for name in group})
        self._calibration.advance(unit, parameters)

    def _weight(self, name: str) -> Tensor:
        weight = dense_of(self._module(name), self._device)
        if not bool(weight.isfinite().all()):
            raise InvalidArgumentError(f"layer {name!r}: weight must be finite, got NaN or infinities")
        return weight

    def _moments(
        self, unit: Unit, weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> Moments | None:
        """Return the moments of the input of some layers, each token over the norm of its outputs."""
        found: list[Moments] = []
        together = torch.cat(list(weights.values()))

        def note(_: str, x: Tensor, number: int, keep: Tensor | None) -> None:
            if not found:
                found.append(Moments(x.shape[-1], self._device, compare=False))
            x = x.detach().to(self._device, torch.float32)
            with exact_products(self._device):
                sizes = inverse_norms(x @ together.T)
            found[0].add(x * sizes, None, number, keep)

        self._calibration.visit(unit, list(weights)[:1], note, parameters)
        return found[0] if found else None

    def _round(self, name: str, weight: Tensor, moments: Moments) -> None:
        layer, second = self._module(name), moments.second()
        pattern = layer.pattern.to(self._device)
        found = round_weight(weight, pattern, second, damped(second, _DAMPING), self._storage, self._clip)
        self._rounded[name] = found
        self.layers.append(
            QuantizedLayer(
                name,
                layer.spec.shape,
                layer.density,
                None,
                None,
                found.clipped,
                found.error_before,
                found.error,
                moments.tokens(),
                None,
                float(found.nearest.float().mean()),
            )
        )
        self._progress.show(len(self.layers), f"layers quantized, {name} the last")

    def _parameters(self, rounded: Mapping[str, RoundedWeight]) -> dict[str, Tensor]:
        """Return parameters with which layers compute as quantized ones, by names in the model."""
        found = {}
        for name, each in rounded.items():
            weight = self._model.get_parameter(f"{name}.weight")
            found[f"{name}.weight"] = each.values.to(weight.device, weight.dtype)
        return found

    def _module(self, name: str) -> Any:
        return self._model.get_submodule(name)

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self) -> None:
        """Change the model; everything that can fail comes before the first change."""
        made = [(self._module(name), self._made(name)) for name in self._rounded]
        for layer, other in made:
            layer.take_over(other)

    def _made(self, name: str) -> BlockSparseLinear:
        """Return a layer as one is to become; the pattern and the bias are the same tensors."""
        other, found = _copied(self._module(name)), self._rounded[name]
        with naming_layer(name):
            return other.to_storage(self._storage.name, limits=found.limits, values=found.values)


@torch.no_grad()
def rounded_experts(
    model: nn.Module, names: Sequence[str], storage: str
) -> tuple[list[tuple[BlockSparseLinear, BlockSparseLinear]], list[QuantizedLayer]]:
    """Return projections of experts, each with what it is to become, and their errors."""
    made, described = [], []
    for name in names:
        layer: Any = model.get_submodule(name)
        with naming_layer(name):
            made.append((layer, _copied(layer).to_storage(storage)))
        error = made[-1][1].storage_error ** 2
        described.append(
            QuantizedLayer(name, layer.spec.shape, layer.density, None, None, 0.0, error, error, 0, None)
        )
    return made, described


def _copied(layer: Any) -> BlockSparseLinear:
    """Return a layer of the same tensors, which may be stored otherwise."""
    other: BlockSparseLinear = copy(layer)
    own = other.__dict__
    own["_parameters"], own["_buffers"] = dict(own["_parameters"]), dict(own["_buffers"])
    return other
