"""Conversions of values: 2:4 compression, and quantization to 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations, product

import torch
from torch import Tensor

from .._checks import LARGEST, PACKED, check_choice, check_content, check_values, shown
from .._ops.products import COMPRESS, dequantize_values, row_scales_on
from ..config import GRANULARITIES, PER_FEATURE
from ..errors import InvalidArgumentError
from ..pattern import BlockPattern

# Least and largest number of each stored dtype with scales, of int4 by its largest scale.
_BOUNDS = {**{dtype: (-largest, largest) for dtype, largest in LARGEST.items()}, PACKED: (-8.0, 7.0)}
_TILES_AT_A_TIME = 1 << 18  # of 4 x 4, whose scores for every mask take 180 MiB


def two_of_four(scores: Tensor, *, transposable: bool = False) -> Tensor:
    """Return the mask of the two of each four neighbours with the highest scores.

    With ``transposable`` two of each four in a column as well: the mask of each 4 x 4 with the highest sum of
    scores, found among all 90 there are, as in Hu et al., "Accelerating Transformer Pre-training with 2:4
    Sparsity" (ICML 2024); such masks are due to Hubara et al., "Accelerated Sparse Neural Training" (NeurIPS
    2021). Nothing waits for a GPU.

    Args:
        scores: [..., rows, columns] of any real dtype: magnitudes of weights, those times the norms of inputs
            (Wanda), or of gradients. NaN counts as the highest. Equal ones are taken from the left.
        transposable: whether the mask's transpose is to be one, too.

    Returns:
        Bools of the same shape.
    """
    sides = scores.shape[-2 if transposable else -1 :]
    if scores.dim() < 2 or any(side % 4 for side in sides):
        wanted = "rows and columns" if transposable else "columns"
        raise InvalidArgumentError(
            f"scores must be [..., rows, columns] with {wanted} a multiple of 4, got {tuple(scores.shape)}"
        )
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if transposable:
        return _transposable(scores)
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    four = scores.reshape(*scores.shape[:-1], scores.shape[-1] // 4, 4).unbind(-1)
    kept = []
    for i, score in enumerate(four):
        better = [four[j] >= score if j < i else four[j] > score for j in range(4) if j != i]
        first, second, third = better
        kept.append(~(first & second | first & third | second & third))
    return torch.stack(kept, -1).flatten(-2)


def _transposable(scores: Tensor) -> Tensor:
    limit = torch.finfo(scores.dtype).max / 64  # so that sums of them are finite
    tiles = scores.nan_to_num(nan=limit, posinf=limit, neginf=-limit).clamp(-limit, limit)
    *leading, rows, columns = scores.shape
    tiles = tiles.reshape(*leading, rows // 4, 4, columns // 4, 4).transpose(-3, -2)
    shape = tiles.shape
    tiles = tiles.reshape(-1, 16)
    masks = _masks(scores.device)
    of_tiles = masks.double()  # whose products neither autocast nor TF32 rounds
    # Sums lie tile beside tile, and masks are looked up eight bytes at a time: both are much faster so.
    parts = torch.split(tiles, _TILES_AT_A_TIME)
    chosen = [(of_tiles @ part.double().t()).argmax(0) for part in parts]
    places = torch.cat(chosen)
    halves = [half.contiguous()[places] for half in masks.view(torch.int64).unbind(1)]
    kept = torch.stack(halves, 1).view(torch.bool)
    return kept.view(shape).transpose(-3, -2).reshape(scores.shape)


@cache
def _masks(device: torch.device) -> Tensor:
    """[90, 16] bools: all 4 x 4 with two in each row and column."""
    rows = [tuple(int(i in pair) for i in range(4)) for pair in combinations(range(4), 2)]
    columns = (
        (four, [sum(column) for column in zip(*four, strict=True)]) for four in product(rows, repeat=4)
    )
    found = [four for four, sums in columns if sums == [2, 2, 2, 2]]
    with torch.inference_mode(False):
        return torch.tensor(found, dtype=torch.bool, device=device).flatten(1)


def compress(values: Tensor, mask: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Compress dense blocks to 2:4 by one kernel.

    Args:
        values: [nnz, bn, bk], contiguous, of any dtype that values have.
        mask: bools of that shape, two or fewer in each four neighbours of a row; of more the first two count,
            and where there are fewer zeros are stored.
        transposed: store the values of the transposed weight, from two of four neighbours in a column.

    Returns:
        (compressed, metadata): [nnz, bn, bk / 2] and int32 [nnz, bk / 32, bn]; with ``transposed`` bn and bk
        exchanged.
    """
    compressed, metadata = COMPRESS(values.detach(), mask, transposed)
    return compressed, metadata


def dequantize(
    values: Tensor,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the dense blocks [nnz, bn, bk] of stored values.

    Args:
        values: [nnz, bn, bk], or [nnz, bn, bk / 2] with ``metadata`` or of int4 (uint8).
        metadata: of 2:4, or None.
        scales: of 8 or 4 bits, or None.
        dtype: of the result where there are scales; None is float32. Otherwise values keep theirs.
    """
    return dequantize_values(values.detach(), metadata, scales, torch.float32 if dtype is None else dtype)


def quantize_weights(
    values: Tensor,
    dtype: torch.dtype,
    *,
    granularity: str = "row",
    pattern: BlockPattern | None = None,
    limits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize values to 8 bits, rounded to the nearest.

    Args:
        values: [nnz, bn, bk or less], finite.
        dtype: torch.int8 or torch.float8_e4m3fn.
        granularity: what has a scale of its own, "row" of a block, "block", or "feature", an output feature
            over all its blocks, as `functional.quantized_linear` takes them.
        pattern: where the blocks lie; with "feature" alone.
        limits: the magnitude that becomes the largest of the dtype, 127 or 448, for each scale and of its
            shape; values beyond are clipped. None is the largest magnitude there.

    Returns:
        (values, scales): of that dtype, and float32 [nnz, bn], [nnz] or [out_features].
    """
    check_choice("dtype", dtype, LARGEST)
    check_choice("granularity", granularity, (*GRANULARITIES, PER_FEATURE))
    values = checked_finite(values, "8-bit")
    largest = values.abs().amax((1, 2) if granularity == "block" else 2)
    rows = _rows_of_features(values, granularity, pattern)
    if rows is not None and pattern is not None:
        features = largest.new_zeros(pattern.grid[0], pattern.block_shape[0])
        largest = features.scatter_reduce_(0, rows[:, None].expand_as(largest), largest, "amax")
    if limits is not None:
        largest = checked_limits(limits, largest.flatten() if rows is not None else largest).view_as(largest)
    scales = clamped_scales(largest, dtype)
    stored = rounded(_over(values, scales if rows is None else scales[rows]), dtype)
    return stored.contiguous(), scales if rows is None else scales.flatten()


def checked_finite(values: Tensor, storage: str) -> Tensor:
    """Return values [nnz, bn, bk or less] in float32, refusing those that a storage cannot represent."""
    check_content("values", values)
    if values.dim() != 3 or values.is_complex():
        raise InvalidArgumentError(
            f"values must be a real tensor [nnz, bn, bk], got shape {list(values.shape)} of {values.dtype}"
        )
    values = values.detach().float()
    if not bool(values.isfinite().all()):
        raise InvalidArgumentError(f"values must be finite: {storage} storage cannot represent inf or nan")
    return values


def clamped_scales(magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 scales by which magnitudes become the largest of a stored dtype; 1 for zeros."""
    largest = _BOUNDS[dtype][1]
    scales = torch.where(magnitudes > 0, magnitudes / largest, 1.0)
    # A scale that is not normal would leave nothing of the values' precision, and the largest one rounds up.
    limits = torch.finfo(torch.float32)
    return scales.clamp(limits.tiny, limits.max / largest * (1 - 2 * limits.eps))


def rounded(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 numbers clipped and rounded to those of a stored dtype; int4 stays float32."""
    scaled = scaled.clamp(*_BOUNDS[dtype])
    return (
        scaled.round() if dtype == PACKED else (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    )


def _over(values: Tensor, scales: Tensor) -> Tensor:
    """Return values [nnz, bn, bk] over scales [nnz, bn] or [nnz]."""
    return values / scales.view(*scales.shape, *(1,) * (3 - scales.dim()))


def checked_limits(limits: Tensor, largest: Tensor) -> Tensor:
    """Return limits as the largest magnitudes, whose shape they have."""
    if limits.shape != largest.shape or not limits.is_floating_point():
        raise InvalidArgumentError(
            f"limits must be a floating-point tensor {list(largest.shape)}, one for each scale, got "
            f"{list(limits.shape)} of {limits.dtype}"
        )
    limits = limits.detach().to(largest.device, torch.float32)
    if not bool(((limits >= 0) & limits.isfinite()).all()):
        raise InvalidArgumentError("limits must be finite and at least 0")
    return limits


def _rows_of_features(values: Tensor, granularity: str, pattern: BlockPattern | None) -> Tensor | None:
    """Return the block row of each block where features have scales, otherwise None."""
    if (pattern is not None) != (granularity == PER_FEATURE):
        wanted = "a BlockPattern" if pattern is None else "None"
        raise InvalidArgumentError(
            f"pattern must be {wanted} with granularity={granularity!r}, got {shown(pattern)}"
        )
    if pattern is None:
        return None
    check_values("values", values, pattern.index_on(values.device))
    return pattern.block_indices()[0].to(values.device)


def row_scales(scales: Tensor, pattern: BlockPattern) -> Tensor:
    """Return the scales of output features as those of the rows of blocks, which `dequantize` takes.

    Args:
        scales: float32 [out_features].
        pattern: where the blocks lie.

    Returns:
        float32 [nnz, bn].
    """
    return row_scales_on(scales.detach(), pattern.index_on(scales.device)).clone()


CLIP_RATIOS = tuple(1 - 0.05 * step for step in range(11))  # of the largest magnitude of a group


@torch.no_grad()
def clip_limits(groups: Tensor, inputs: Tensor, rounded: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the magnitude at which each group of weights is clipped, so that its output changes least.

    The weights of a group share a scale. A smaller scale rounds most of them better and clips the largest. Of
    `CLIP_RATIOS` of the largest magnitude each group gets the one with the least ‖X (w - ŵ)‖², as in AWQ
    (Lin et al., "AWQ: Activation-aware Weight Quantization", arXiv:2306.00978).

    Args:
        groups: [..., n, k]: n groups of k weights, which the same inputs meet: rows of W, or of a block.
        inputs: [..., m, k]: X, or another matrix with the same XᵀX, such as the factor of its Cholesky
            decomposition. Leading dimensions are those of groups, or broadcast to them.
        rounded: ``rounded(groups, limits)`` returns groups as products see them once they are clipped at
            limits [..., n] and rounded.

    Returns:
        float32 [..., n]; 0 for groups of zeros.
    """
    groups, inputs = groups.float(), inputs.float()
    largest = groups.abs().amax(-1)
    best, least = largest, torch.full_like(largest, torch.inf)
    for ratio in CLIP_RATIOS:
        limits = largest * ratio
        wrong = groups - rounded(groups, limits).float()
        error = (wrong @ inputs.mT).square().sum(-1)
        better = error < least
        best, least = torch.where(better, limits, best), torch.where(better, error, least)
    return best


_FRACTIONS = tuple(1 - 0.04 * step for step in range(1, 11))  # of the largest scale, which are tried as well
_AT_A_TIME = 1 << 22  # elements, of which several copies in float32 are made


def quantize_int4(
    values: Tensor, *, granularity: str = "row", limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize values to int4, -8 to 7: rounded to the nearest, without calibration.

    Args:
        values: [nnz, bn, bk], finite, with an even bk.
        granularity: what has a scale of its own, a "row" of a block or a "block".
        limits: the magnitude that becomes 7, for each scale and of its shape; values beyond are clipped. None
            takes the one with the least sum of squared errors, among the largest magnitude there and ten
            smaller ones, down to .6 of it.

    Returns:
        (values, scales): uint8 [nnz, bn, bk / 2], of which byte j has the value of column 2 j in its low four
        bits and that of 2 j + 1 in the high ones, both in two's complement; and float32 [nnz, bn] or [nnz].
    """
    if granularity not in GRANULARITIES:
        raise InvalidArgumentError(f"granularity must be 'row' or 'block', got {granularity!r}")
    values = checked_finite(values, "4-bit")
    if values.shape[2] % 2:
        raise InvalidArgumentError(f"values must be [nnz, bn, bk] with an even bk, got {list(values.shape)}")
    groups = values.flatten(1) if granularity == "block" else values
    if limits is None:
        blocks = max(1, _AT_A_TIME // max(1, values[:1].numel()))
        limits = torch.cat([limits_int4(part) for part in torch.split(groups, blocks)])
    else:
        limits = checked_limits(limits, groups.abs().amax(-1))
    scales = clamped_scales(limits, PACKED)
    bits = rounded(_over(values, scales), PACKED).to(torch.int8).view(PACKED)
    return (bits[..., ::2] & 15) | (bits[..., 1::2] << 4), scales


def limits_int4(groups: Tensor) -> Tensor:
    """Return the magnitude that becomes 7 for each group that shares a scale, as `quantize_int4` finds it."""
    groups = groups.float()
    scales = clamped_scales(groups.abs().amax(-1, keepdim=True), PACKED)
    scaled = groups / scales

    def error(fraction: float) -> Tensor:
        return (rounded(scaled / fraction, PACKED) * fraction - scaled).square_().sum(-1, keepdim=True)

    least = error(1.0)
    best = torch.ones_like(least)
    for fraction in _FRACTIONS:
        other = error(fraction)
        best = torch.where(other < least, fraction, best)
        least = torch.minimum(least, other)
    return (scales * best).squeeze(-1) * _BOUNDS[PACKED][1]
