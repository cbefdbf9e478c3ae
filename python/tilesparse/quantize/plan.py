"""Plans of quantization: what becomes of the layers; and the one for weights alone.

Weights are rounded column by column, as in GPTQ.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import Progress
from ..calibrate.calibration import (
    Calibration,
    Damped,
    Forward,
    Moments,
    checked_moments,
    damped,
    exact_products,
    supports,
)
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..model.match import naming_layer
from ..nn.linear import BlockSparseLinear
from ..nn.weight import dense_blocks
from ..pattern import BlockPattern, kept_blocks, with_blocks
from ..storage.formats import QuantizedStorage, storage_of
from ..storage.quantize import CLIP_RATIOS


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
        dense = with_blocks(dense_blocks(layer), layer.pattern)
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


# A share of the mean of the diagonal. On tokens not calibrated on a tenth was better than a hundredth, and
# much better with few tokens, where a hundredth was worse than rounding to the nearest.
_DAMPING = 0.1


class WeightPlan(Plan):
    """Rounded weights of layers, in the order in which they run, each by its inputs behind those before."""

    @torch.no_grad()
    def __init__(self, task: Task) -> None:
        """Round all weights."""
        super().__init__(task)
        calibration = task.calibration([*task.configs])
        self._rounded: dict[str, RoundedWeight] = {}
        self.stack = calibration.stack
        for group in calibration.groups(self._parameters):
            weights = {name: self._weight(name) for name in group}
            moments = checked_moments(group[0], self._moments(calibration, weights))
            for name, weight in weights.items():
                self._round(name, weight, moments)

    def _weight(self, name: str) -> Tensor:
        weight = self._task.weight(name)
        if not bool(weight.isfinite().all()):
            raise InvalidArgumentError(f"layer {name!r}: weight must be finite, got NaN or infinities")
        return weight

    def _moments(self, calibration: Calibration, weights: Mapping[str, Tensor]) -> Moments | None:
        """Return the moments of the input of some layers, each token over the norm of its outputs."""
        found: list[Moments] = []
        together, device = torch.cat(list(weights.values())), self._task.device

        def note(_: str, x: Tensor, number: int, keep: Tensor | None) -> None:
            if not found:
                found.append(Moments(x.shape[-1], device))
            x = x.detach().to(device, torch.float32)
            with exact_products(device):
                sizes = inverse_norms(x @ together.T)
            found[0].add(x * sizes, None, number, keep)

        calibration.visit(list(weights)[:1], note)
        return found[0] if found else None

    def _round(self, name: str, weight: Tensor, moments: Moments) -> None:
        second, storage = moments.second(), self._task.storage(name)
        pattern = self._task.layer(name).pattern.to(self._task.device)
        found = round_weight(weight, pattern, second, damped(second, _DAMPING), storage)
        self._rounded[name] = found
        nearest = float(found.nearest.float().mean())
        errors = found.error_before, found.error
        self._note(name, *errors, moments.tokens(), clipped=found.clipped, nearest=nearest)

    def _parameters(self, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return parameters with which layers compute as quantized ones, by names in the model."""
        weights = {name: self._task.model.get_parameter(f"{name}.weight") for name in layers}
        return {
            f"{name}.weight": self._rounded[name].values.to(weight.device, weight.dtype)
            for name, weight in weights.items()
        }

    def _stored(self, name: str) -> BlockSparseLinear:
        found = self._rounded[name]
        return self._copy(name, limits=found.limits, values=found.values)


class RoundedWeight(NamedTuple):
    """A weight as a storage holds it, with a scale for each row of a block.

    Errors are ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖², 0 where all of X Wᵀ is.
    """

    values: Tensor  # [nnz, bn, bk] float32, rounded
    limits: Tensor  # [nnz, bn] float32, the magnitudes at which values are clipped
    clipped: float  # fraction of the limits that are below the largest magnitude
    nearest: Tensor  # [out_features] bools: rows that are rounded to the nearest, as that was better
    error_before: float  # of all rows rounded to the nearest
    error: float


class _Rounded(NamedTuple):
    values: Tensor  # [nnz, bn, bk] float32
    limits: Tensor  # [nnz, bn] float32
    clipped: Tensor  # [nnz, bn] bools: limits below the largest magnitude


def round_weight(
    weight: Tensor,
    pattern: BlockPattern,
    second: Tensor,
    moment: Damped,
    storage: QuantizedStorage,
) -> RoundedWeight:
    """Round a weight W [out_features, in_features] float32 by the moments of its inputs, XᵀX / tokens.

    Errors are measured by ``second``; ``moment`` is the same, damped, by which columns make up for others. No
    row is worse than rounded to the nearest.
    """
    blocks = kept_blocks(weight, pattern)
    limits = storage.limits_of(blocks)
    plain = _Rounded(storage.rounded(blocks, limits), limits, limits < blocks.abs().amax(-1))
    with exact_products(weight.device):
        found = _in_order(weight, pattern, moment, storage)
        before, after = (_errors(weight, each.values, pattern, second) for each in (plain, found))
        size = float(_output(weight, second).sum())
    nearest = before < after
    of_blocks = nearest.view(-1, pattern.block_shape[0])[pattern.block_indices()[0].to(weight.device)]
    clipped = torch.where(of_blocks, plain.clipped, found.clipped)
    return RoundedWeight(
        torch.where(of_blocks[:, :, None], plain.values, found.values),
        torch.where(of_blocks, plain.limits, found.limits),
        float(clipped.float().mean()) if len(clipped) else 0.0,
        nearest,
        _over(float(before.sum()), size),
        _over(float(torch.minimum(before, after).sum()), size),
    )


def _in_order(weight: Tensor, pattern: BlockPattern, moment: Damped, storage: QuantizedStorage) -> _Rounded:
    """Return the weight rounded column by column."""
    bk = pattern.block_shape[1]
    rounded = torch.zeros_like(weight)
    limits, largest = weight.new_zeros(2, len(weight), weight.shape[1] // bk)
    for rows, kept in supports(pattern, weight.device):
        columns = _largest_first(kept.view(-1, bk), moment.matrix.diagonal())
        matrix = moment.matrix[columns][:, columns]
        root = torch.linalg.cholesky(matrix.flip(0, 1)).flip(0, 1)
        inverse = torch.linalg.solve_triangular(root, torch.eye(len(root), device="cpu").to(root), upper=True)
        left = weight[rows, columns].double()
        for start in range(0, len(columns), bk):
            own, behind = slice(start, start + bk), slice(start + bk, None)
            group, number = left[:, own], int(columns[start]) // bk
            of_rows = group.abs().amax(1).float()
            tried = torch.stack([of_rows * ratio for ratio in CLIP_RATIOS])
            stored, errors, chosen = _best_of(group, tried, root[own, own], storage)
            rounded[rows, columns[own]] = stored
            largest[rows, number], limits[rows, number] = of_rows[:, None], chosen[:, None]
            left[:, behind] -= errors @ inverse[own, behind]
    blocks = kept_blocks(rounded, pattern)
    limits, largest = _of_blocks(limits, pattern), _of_blocks(largest, pattern)
    return _Rounded(blocks, limits, limits < largest)


def _largest_first(blocks: Tensor, sizes: Tensor) -> Tensor:
    """Return columns [C · bk] of blocks [C, bk], block by block, those of the largest size first."""
    of_blocks = sizes[blocks]
    order = of_blocks.argsort(dim=1, descending=True, stable=True)
    return blocks.gather(1, order)[of_blocks.sum(1).argsort(descending=True, stable=True)].flatten()


def _best_of(
    group: Tensor, limits: Tensor, root: Tensor, storage: QuantizedStorage
) -> tuple[Tensor, Tensor, Tensor]:
    """Round the rows of a block [n, bk] by each of some limits [tried, n]; keep for each what costs least.

    Returns rounded rows float32 [n, bk], (w - ŵ) R_jj [n, bk] of each column as it was when it was rounded,
    and limits [n]. ``root`` is R of these columns [bk, bk].
    """
    tried, (n, bk) = len(limits), group.shape
    left, each = group.T.repeat(1, tried), limits.flatten()  # columns lie in one piece so
    inverse = torch.linalg.solve_triangular(root, torch.eye(bk, device="cpu").to(root), upper=True)
    stored, errors = left.new_empty(left.shape, dtype=torch.float32), torch.empty_like(left)
    for j in range(bk):
        stored[j] = storage.rounded(left[j].float()[:, None], each)[:, 0]
        errors[j] = (left[j] - stored[j]) * root[j, j]
        left[j + 1 :].addr_(inverse[j, j + 1 :], errors[j], alpha=-1)
    best = errors.square().sum(0).view(tried, n).argmin(0)
    places = best * n + torch.arange(n, device=best.device)
    return stored[:, places].T, errors[:, places].T, each[places]


def _errors(weight: Tensor, blocks: Tensor, pattern: BlockPattern, second: Tensor) -> Tensor:
    """Return ‖X (w - ŵ)‖² / tokens [out_features] of a weight's rows."""
    return _output(weight - with_blocks(blocks, pattern), second)


def _output(weight: Tensor, second: Tensor) -> Tensor:
    weight = weight.double()
    return ((weight @ second) * weight).sum(1).clamp(min=0)


def _of_blocks(of_rows: Tensor, pattern: BlockPattern) -> Tensor:
    """Return [nnz, bn] of numbers [out_features, block columns]."""
    rows, columns = (places.to(of_rows.device) for places in pattern.block_indices())
    return of_rows.view(-1, pattern.block_shape[0], of_rows.shape[1])[rows, :, columns]


def _over(error: float, size: float) -> float:
    return error / size if size > 0 else 0.0
