"""The plan for layers whose weights alone are quantized: rounded column by column, as in GPTQ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..calibrate.calibration import Calibration, checked_moments
from ..calibrate.moments import Damped, Moments, damped, exact_products, supports
from ..errors import InvalidArgumentError
from ..matrix import BlockSparseMatrix
from ..nn.linear import BlockSparseLinear
from ..pattern import BlockPattern
from ..storage.formats import QuantizedStorage
from ..storage.quantize import CLIP_RATIOS
from .plan import Plan, Task, inverse_norms

# Of the mean of the diagonal. On tokens that were not calibrated on a tenth was better than a hundredth, and
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
        found = round_weight(weight, pattern, second, damped(second, _DAMPING), storage, self._task.clip)
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
