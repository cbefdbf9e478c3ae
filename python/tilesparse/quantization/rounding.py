"""One weight rounded column by column, so that columns behind make up for the error of those before.

Weights ŵ of a row change its output by (w - ŵ) H (w - ŵ)ᵀ, H = XᵀX / tokens + λ I. With H = R Rᵀ in the order
in which columns are rounded, R upper triangular and U = R⁻¹, the error of column j costs least once the
columns i that are still free become

    w_i ← w_i - (w_j - ŵ_j) R_jj U_ji,   i > j,

and is then ((w_j - ŵ_j) R_jj)². This is GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers", arXiv:2210.17323), whose Cholesky factor of H⁻¹ is U. The rows of a
block row keep the same columns S, and H is H_SS for them: blocks that are pruned make up for nothing. Blocks
with the largest inputs are rounded first, and in a block the columns with these, while most others are free.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..calibrate.moments import Damped, exact_products, supports
from ..matrix import BlockSparseMatrix
from ..pattern.block_pattern import BlockPattern
from ..storage.clipping import CLIP_RATIOS
from ..storage.quantized import QuantizedStorage


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
