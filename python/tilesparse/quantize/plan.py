"""Parts of both plans: the layers that are quantized, and their change at the end."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._reports import Progress
from ..calibrate.calibration import Calibration, Forward, naming_layer
from ..config import BlockSparseConfig
from ..matrix import BlockSparseMatrix
from ..nn.linear import BlockSparseLinear
from ..nn.weight import dense_blocks
from ..storage.formats import QuantizedStorage, storage_of


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer that has 8 or 4 bits now.

    Attributes:
        name: in the model.
        shape: (out_features, in_features).
        block_shape: of its weight.
        density: kept fraction of the blocks.
        storage: of the weight.
        error_before: ‖Y - Ŷ‖² / ‖Y‖² of the layer's product Y = X Wᵀ on the calibration data, as `to_storage`
            stores the layer. Each row of X is divided by the norm of what all layers with this input give for
            it, so that a few tokens with large activations do not decide alone. Of experts ‖W - Ŵ‖² / ‖W‖².
        error: likewise, as the layer is now.
        tokens: of the calibration data that the layer has met; 0 of experts, whose tokens are not looked at.
        activations: as of `BlockSparseConfig`; None where the weight alone is quantized.
        clipped: fraction of the scales, each of an output feature, or with weights alone of a row of a block,
            that clip the largest weights.
        smoothed_by: the module that took the inverse of the scales of the layer's input, or None.
        alpha: strength of the migration from activations into weights; None without.
        reason: why its input could not be smoothed, or None; None with weights alone.
        nearest: fraction of the output features whose weights are each rounded to the nearest. 1 with 8-bit
            activations; with weights alone those where no other rounding was better.
    """

    name: str
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    density: float
    storage: str
    error_before: float
    error: float
    tokens: int
    activations: str | None = None
    clipped: float = 0.0
    smoothed_by: str | None = None
    alpha: float | None = None
    reason: str | None = None
    nearest: float = 1.0

    def row(self) -> dict[str, str]:
        """Return the cells of a table, by column."""
        return {
            "layer": self.name,
            "shape": "{}x{}".format(*self.shape),
            "block": "{}x{}".format(*self.block_shape),
            "density": f"{self.density:.3f}",
            "storage": storage_of(self.storage).describe(None, self.activations),
            "smoothed by": self.smoothed_by or "",
            "alpha": "" if self.alpha is None else f"{self.alpha:g}",
            "nearest": f"{self.nearest:.0%}",
            "clipped": f"{self.clipped:.0%}",
            "tokens": f"{self.tokens:,}" if self.tokens else "",
            "error before": f"{self.error_before:.2g}",
            "error": f"{self.error:.2g}",
        }


class Task(NamedTuple):
    """The layers that a plan quantizes, and the arguments of `quantize_`."""

    model: nn.Module  # in evaluation mode; plans only read it
    configs: Mapping[str, BlockSparseConfig]  # of the layers afterwards, by their names
    data: Sequence[Any]
    forward: Forward
    device: torch.device
    smooth: bool
    clip: bool
    fixed: Container[str] = ()  # layers that other plans quantize, and whose weights nothing may scale

    def layer(self, name: str) -> Any:
        """Return a module of the model."""
        return self.model.get_submodule(name)

    def storage(self, name: str) -> QuantizedStorage:
        """Return the storage of a layer afterwards."""
        storage = storage_of(self.configs[name].storage)
        assert isinstance(storage, QuantizedStorage)
        return storage

    def calibration(self, layers: Sequence[str]) -> Calibration:
        """Return the data before the first block, where layers are of interest."""
        return Calibration(self.model, self.data, self.forward, layers, self.device)

    def weight(self, name: str) -> Tensor:
        """Return a float32 copy of a layer's W [out_features, in_features] on the device."""
        layer = self.layer(name)
        dense = BlockSparseMatrix(dense_blocks(layer), layer.pattern).to_dense()
        return dense.to(self.device, torch.float32)


class Plan:
    """The layers of a task as they are to become; the model stays as it is."""

    stack: str | None = None  # of blocks that the data go through

    def __init__(self, task: Task) -> None:
        self._task = task
        self.layers: list[QuantizedLayer] = []
        self._progress = Progress(len(task.configs))

    def stored(self) -> list[tuple[BlockSparseLinear, BlockSparseLinear]]:
        """Return the layers, each with one of the same tensors that is stored as it is to become."""
        return [(self._task.layer(name), self._stored(name)) for name in self._task.configs]

    def scaled(self) -> dict[str, Tensor]:
        """Return new parameters of modules that are not quantized, by their names in the model."""
        return {}

    def _stored(self, name: str) -> BlockSparseLinear:
        return self._copy(name)

    def _copy(
        self, name: str, parameters: Mapping[str, Tensor] | None = None, **options: Any
    ) -> BlockSparseLinear:
        """Return a layer of the same tensors, but for some parameters, in its new storage.

        ``options`` are other arguments of `BlockSparseLinear.to_storage`.
        """
        layer, config = self._task.layer(name), self._task.configs[name]
        other: BlockSparseLinear = copy(layer)
        own = other.__dict__
        own["_parameters"], own["_buffers"] = dict(own["_parameters"]), dict(own["_buffers"])
        for parameter, tensor in (parameters or {}).items():
            setattr(other, parameter, nn.Parameter(tensor, layer.get_parameter(parameter).requires_grad))
        with naming_layer(name):
            return other.to_storage(config.storage, activations=config.activations, **options)

    def _note(self, name: str, error_before: float, error: float, tokens: int, **found: Any) -> None:
        """Add a layer to the report."""
        layer, config = self._task.layer(name), self._task.configs[name]
        form = layer.spec.shape, layer.block_shape, layer.density, self._task.storage(name).name
        found["activations"] = config.activations
        self.layers.append(QuantizedLayer(name, *form, error_before, error, tokens, **found))
        self._progress.show(len(self.layers), f"layers quantized, {name} the last")


class ExpertsPlan(Plan):
    """Projections of experts, stored as `to_storage` does."""

    @torch.no_grad()
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        for name in task.configs:
            error = self._stored(name).storage_error ** 2
            self._note(name, error, error, 0)


def inverse_norms(outputs: Tensor) -> Tensor:
    """Return 1 / ‖y‖ [..., 1] of outputs [..., features], by which tokens count alike; 0 where y = 0.

    Language models have a few tokens whose activations are a thousand times those of others. Sums of squares
    would be about these alone.
    """
    norms = torch.linalg.vector_norm(outputs, dim=-1, keepdim=True)
    return torch.where(norms > 0, 1 / norms, 0)
