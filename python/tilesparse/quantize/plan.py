"""Forms of layers that are quantized; and weights alone, rounded column by column as in GPTQ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
        smoothed_by: the module that took the inverse of the scales of the layer's input, or None.
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
    smoothed_by: str | None = None
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
            "nearest": f"{self.nearest:.0%}",
            "tokens": f"{self.tokens:,}" if self.tokens else "",
            "error before": f"{self.error_before:.2g}",
            "error": f"{self.error:.2g}",
        }


@dataclass
class Task:
    """Arguments of `quantize_`, and what becomes of the layers; the model stays as it is."""

    model: nn.Module  # in evaluation mode
    configs: Mapping[str, BlockSparseConfig]  # of the layers afterwards, by their names
    data: Sequence[Any]
    forward: Forward
    device: torch.device
    layers: list[QuantizedLayer] = field(default_factory=list)
    stored: dict[str, BlockSparseLinear] = field(default_factory=dict)  # as layers are to become
    scaled: dict[str, Tensor] = field(default_factory=dict)  # other parameters, by their names in the model
    stack: str | None = None  # of blocks that the data go through

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
        calibration = Calibration(self.model, self.data, self.forward, layers, self.device)
        self.stack = calibration.stack
        return calibration

    def weight(self, name: str) -> Tensor:
        """Return a float32 copy of a layer's W [out_features, in_features] on the device."""
        layer = self.layer(name)
        dense = with_blocks(dense_blocks(layer), layer.pattern)
        return dense.to(self.device, torch.float32)

    @torch.inference_mode(False)
    @torch.no_grad()
    def store(
        self, name: str, parameters: Mapping[str, Tensor] | None = None, **options: Any
    ) -> BlockSparseLinear:
        """Store a layer of the same tensors, but for some parameters; ``options`` as of `to_storage`."""
        layer, config = self.layer(name), self.configs[name]
        other: BlockSparseLinear = copy(layer)
        own = other.__dict__
        own["_parameters"], own["_buffers"] = dict(own["_parameters"]), dict(own["_buffers"])
        for parameter, tensor in (parameters or {}).items():
            setattr(other, parameter, nn.Parameter(tensor, layer.get_parameter(parameter).requires_grad))
        with naming_layer(name):
            self.stored[name] = other.to_storage(config.storage, activations=config.activations, **options)
        return self.stored[name]

    def note(
        self, name: str, error_before: float, error: float, tokens: int = 0, **found: Any
    ) -> QuantizedLayer:
        """Return the record of a layer."""
        layer, config = self.layer(name), self.configs[name]
        form = layer.spec.shape, layer.block_shape, layer.density, self.storage(name).name
        found["activations"] = config.activations
        return QuantizedLayer(name, *form, error_before, error, tokens, **found)


def inverse_norms(outputs: Tensor) -> Tensor:
    """Return 1 / ‖y‖ [..., 1] of outputs [..., features], 0 where y = 0, by which tokens count alike.

    A few tokens of language models have activations a thousand times those of others, and would decide alone.
    """
    norms = torch.linalg.vector_norm(outputs, dim=-1, keepdim=True)
    return torch.where(norms > 0, 1 / norms, 0)


# A share of the mean of the diagonal. On tokens not calibrated on a tenth was better than a hundredth, and
# much better with few tokens, where a hundredth was worse than rounding to the nearest.
_DAMPING = 0.1


def round_weights(task: Task, names: Sequence[str]) -> None:
    """Round weights of layers, in the order in which they run, each by its inputs behind those before."""
    calibration = task.calibration(names)
    rounded: dict[str, RoundedWeight] = {}

    def changed(layers: Sequence[str]) -> dict[str, Tensor]:
        weights = {name: task.model.get_parameter(f"{name}.weight") for name in layers}
        return {
            f"{name}.weight": rounded[name].values.to(weight.device, weight.dtype)
            for name, weight in weights.items()
        }

    for group in calibration.groups(changed):
        weights = {name: task.weight(name) for name in group}
        for name, weight in weights.items():
            if not bool(weight.isfinite().all()):
                raise InvalidArgumentError(f"layer {name!r}: weight must be finite, got NaN or infinities")
        moments = checked_moments(group[0], _moments(calibration, weights, task.device))
        second = moments.second()
        moment = damped(second, _DAMPING)
        for name, weight in weights.items():
            pattern = task.layer(name).pattern.to(task.device)
            found = rounded[name] = round_weight(weight, pattern, second, moment, task.storage(name))
            nearest = float(found.nearest.float().mean())
            errors = found.error_before, found.error
            task.layers.append(task.note(name, *errors, moments.tokens(), nearest=nearest))
    for name, found in rounded.items():
        task.store(name, limits=found.limits, values=found.values)


def _moments(calibration: Calibration, weights: Mapping[str, Tensor], device: torch.device) -> Moments | None:
    """Return the moments of the input of some layers, each token over the norm of its outputs."""
    found: list[Moments] = []
    together = torch.cat(list(weights.values()))

    def note(_: str, x: Tensor, number: int, keep: Tensor | None) -> None:
        if not found:
            found.append(Moments(x.shape[-1], device))
        x = x.detach().to(device, torch.float32)
        with exact_products(device):
            sizes = inverse_norms(x @ together.T)
        found[0].add(x * sizes, None, number, keep)

    calibration.visit(list(weights)[:1], note)
    return found[0] if found else None


class RoundedWeight(NamedTuple):
    """A weight as a storage holds it, with a scale for each row of a block.

    Errors are ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖², 0 where all of X Wᵀ is.
    """

    values: Tensor  # [nnz, bn, bk] float32, rounded
    limits: Tensor  # [nnz, bn] float32, the magnitudes at which values are clipped
    nearest: Tensor  # [out_features] bools: rows that are rounded to the nearest, as that was better
    error_before: float  # of all rows rounded to the nearest
    error: float


def round_weight(
    weight: Tensor,
    pattern: BlockPattern,
    second: Tensor,
    moment: Damped,
    storage: QuantizedStorage,
) -> RoundedWeight:
    """Round a weight W [out_features, in_features] float32 by the moments of its inputs, XᵀX / tokens.

    Errors are measured by ``second``, and made up for by ``moment``, which is damped. No row is worse than
    rounded to the nearest.
    """
    blocks = kept_blocks(weight, pattern)
    limits = storage.limits_of(blocks)
    plain = storage.rounded(blocks, limits)
    with exact_products(weight.device):
        found, chosen = _in_order(weight, pattern, moment, storage)
        before, after = (_output(weight - with_blocks(each, pattern), second) for each in (plain, found))
        size = float(_output(weight, second).sum())
    nearest = before < after
    of_blocks = nearest.view(-1, pattern.block_shape[0])[pattern.block_indices()[0].to(weight.device)]
    return RoundedWeight(
        torch.where(of_blocks[:, :, None], plain, found),
        torch.where(of_blocks, limits, chosen),
        nearest,
        _over(float(before.sum()), size),
        _over(float(torch.minimum(before, after).sum()), size),
    )


def _in_order(
    weight: Tensor, pattern: BlockPattern, moment: Damped, storage: QuantizedStorage
) -> tuple[Tensor, Tensor]:
    """Return blocks rounded column by column [nnz, bn, bk], and the limits of their rows [nnz, bn]."""
    bk = pattern.block_shape[1]
    rounded = torch.zeros_like(weight)
    limits = weight.new_zeros(len(weight), weight.shape[1] // bk)
    for rows, kept in supports(pattern, weight.device):
        columns = _largest_first(kept.view(-1, bk), moment.matrix.diagonal())
        matrix = moment.matrix[columns][:, columns]
        root = torch.linalg.cholesky(matrix.flip(0, 1)).flip(0, 1)
        inverse = torch.linalg.solve_triangular(root, torch.eye(len(root), device="cpu").to(root), upper=True)
        left = weight[rows, columns].double()
        for start in range(0, len(columns), bk):
            own, behind = slice(start, start + bk), slice(start + bk, None)
            group, number = left[:, own], int(columns[start]) // bk
            tried = torch.stack([group.abs().amax(1).float() * ratio for ratio in CLIP_RATIOS])
            stored, errors, chosen = _best_of(group, tried, root[own, own], storage)
            rounded[rows, columns[own]], limits[rows, number] = stored, chosen[:, None]
            left[:, behind] -= errors @ inverse[own, behind]
    of_rows, of_columns = (places.to(limits.device) for places in pattern.block_indices())
    limits = limits.view(-1, pattern.block_shape[0], limits.shape[1])[of_rows, :, of_columns]
    return kept_blocks(rounded, pattern), limits


def _largest_first(blocks: Tensor, sizes: Tensor) -> Tensor:
    """Return columns [C · bk] of blocks [C, bk], block by block, those of the largest size first."""
    of_blocks = sizes[blocks]
    order = of_blocks.argsort(dim=1, descending=True, stable=True)
    return blocks.gather(1, order)[of_blocks.sum(1).argsort(descending=True, stable=True)].flatten()


def _best_of(
    group: Tensor, limits: Tensor, root: Tensor, storage: QuantizedStorage
) -> tuple[Tensor, Tensor, Tensor]:
    """Round the rows of a block [n, bk] by each of some limits [tried, n], and keep what costs least.

    Returns rows float32 [n, bk], (w - ŵ) R_jj [n, bk] of each column, and limits [n]. ``root`` is R [bk, bk].
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


def _output(weight: Tensor, second: Tensor) -> Tensor:
    weight = weight.double()
    return ((weight @ second) * weight).sum(1).clamp(min=0)


def _over(error: float, size: float) -> float:
    return error / size if size > 0 else 0.0
