"""The plan of what becomes of each layer of a model whose weights alone are quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._progress import Progress
from ..calibrate.calibration import Calibration, Forward, Unit, checked_moments, naming_layer
from ..calibrate.moments import Damped, Moments, damped, exact_products, supports
from ..errors import InvalidArgumentError
from ..matrix import BlockSparseMatrix
from ..nn.linear import BlockSparseLinear
from ..nn.weight import take_over
from ..pattern import BlockPattern
from ..storage.formats import QuantizedStorage
from ..storage.quantize import CLIP_RATIOS
from .report import QuantizedLayer
from .smooth import dense_of, inverse_norms

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
            take_over(layer, other)

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
    clip: bool,
) -> RoundedWeight:
    """Round a weight by the moments of its inputs; no row is worse than rounded to the nearest.

    Args:
        weight: W [out_features, in_features] float32, zero outside of the pattern.
        pattern: the kept blocks, on the device of the weight.
        second: XᵀX / tokens [in_features, in_features] float64, by which errors are measured.
        moment: the same, damped, by which columns make up for others.
        storage: with scales.
        clip: whether limits are those with the least error of the output; otherwise those of `to_storage`.
    """
    blocks = BlockSparseMatrix.from_dense(weight, pattern).values
    limits = storage.limits_of(blocks)
    plain = _Rounded(storage.rounded(blocks, limits), limits, limits < blocks.abs().amax(-1))
    with exact_products(weight.device):
        found = _in_order(weight, pattern, moment, storage, clip)
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


def _in_order(
    weight: Tensor, pattern: BlockPattern, moment: Damped, storage: QuantizedStorage, clip: bool
) -> _Rounded:
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
            tried = [of_rows * ratio for ratio in CLIP_RATIOS] if clip else [storage.limits_of(group)]
            stored, errors, chosen = _best_of(group, torch.stack(tried), root[own, own], storage)
            rounded[rows, columns[own]] = stored
            largest[rows, number], limits[rows, number] = of_rows[:, None], chosen[:, None]
            left[:, behind] -= errors @ inverse[own, behind]
    blocks = BlockSparseMatrix.from_dense(rounded, pattern).values
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
    """Round the rows of a block by each of some limits, and keep for each row what costs least.

    Args:
        group: float64 [n, bk].
        limits: float32 [tried, n].
        root: R of these columns [bk, bk].
        storage: that rounds.

    Returns:
        Rounded rows float32 [n, bk], (w - ŵ) R_jj [n, bk] of each column as it was when it was rounded, and
        limits [n].
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
    return _output(weight - BlockSparseMatrix(blocks, pattern).to_dense(), second)


def _output(weight: Tensor, second: Tensor) -> Tensor:
    weight = weight.double()
    return ((weight @ second) * weight).sum(1).clamp(min=0)


def _of_blocks(of_rows: Tensor, pattern: BlockPattern) -> Tensor:
    """Return [nnz, bn] of numbers [out_features, block columns]."""
    rows, columns = (places.to(of_rows.device) for places in pattern.block_indices())
    return of_rows.view(-1, pattern.block_shape[0], of_rows.shape[1])[rows, :, columns]


def _over(error: float, size: float) -> float:
    return error / size if size > 0 else 0.0
