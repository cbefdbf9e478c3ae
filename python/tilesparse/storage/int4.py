"""Quantization of values to int4."""

import torch
from torch import Tensor

from .._arguments import checked
from .._checks import PACKED
from ..errors import InvalidArgumentError
from .traits import SCALES
from .values import checked_finite, checked_limits, clamped_scales

LARGEST = 7.0  # what the largest magnitude becomes by the largest scale
_FRACTIONS = tuple(1 - 0.04 * step for step in range(1, 11))  # of that scale, which are tried as well
_AT_A_TIME = 1 << 22  # elements, of which several copies in float32 are made


@checked
def quantize_int4(
    values: Tensor, *, per: str = "row", search: bool = True, limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize values to int4, -8 to 7: rounded to the nearest, without calibration.

    Args:
        values: [nnz, bn, bk], finite, with an even bk.
        per: what has a scale of its own, a "row" of a block or a "block".
        search: False takes the scale by which the largest magnitude there becomes 7. True takes the one with
            the least sum of squared errors, among that and ten smaller ones, down to .6 of it, which clip.
        limits: the magnitude that becomes 7, for each scale and of its shape, in place of a search; values
            beyond are clipped.

    Returns:
        (values, scales): uint8 [nnz, bn, bk / 2], of which byte j has the value of column 2 j in its low four
        bits and that of 2 j + 1 in the high ones, both in two's complement; and float32 [nnz, bn] or [nnz].

    Raises:
        InvalidArgumentError: another shape or `per`, a value that is not finite, or limits of another shape,
            below 0 or not finite.
    """
    if per not in SCALES:
        raise InvalidArgumentError(f"per must be 'row' or 'block', got {per!r}")
    values = checked_finite(values, "4-bit")
    if values.shape[2] % 2:
        raise InvalidArgumentError(f"values must be [nnz, bn, bk] with an even bk, got {list(values.shape)}")
    if limits is not None:
        limits = checked_limits(limits, values.abs().amax((1, 2) if per == "block" else 2))
        scales = clamped_scales(limits, LARGEST)
        return _packed(values / scales.view(*scales.shape, *(1,) * (3 - scales.dim()))), scales
    blocks = max(1, _AT_A_TIME // max(1, values[:1].numel()))
    parts = [_quantize(part, per, search) for part in torch.split(values, blocks)]
    stored, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return stored, scales


def limits_int4(groups: Tensor) -> Tensor:
    """Return the magnitude that becomes 7 for each group that shares a scale, as `quantize_int4` finds it.

    Float32 [..., n] for groups [..., n, k].
    """
    groups = groups.float()
    scales = clamped_scales(groups.abs().amax(-1, keepdim=True), LARGEST)
    return (scales * _best_fractions(groups / scales, (-1,))).squeeze(-1) * LARGEST


def rounded_int4(groups: Tensor, limits: Tensor) -> Tensor:
    """Return groups [..., n, k] in float32, with limits [..., n] as 7: rounded to int4 and back."""
    scales = clamped_scales(limits, LARGEST)[..., None]
    return _rounded(groups.float() / scales) * scales


def _quantize(values: Tensor, per: str, search: bool) -> tuple[Tensor, Tensor]:
    sides = (1, 2) if per == "block" else (2,)
    scales = clamped_scales(values.abs().amax(sides, keepdim=True), LARGEST)
    if search:
        scales = (scales * _best_fractions(values / scales, sides)).clamp(min=torch.finfo(torch.float32).tiny)
    return _packed(values / scales), scales.squeeze(sides)


def _packed(scaled: Tensor) -> Tensor:
    rounded = _rounded(scaled).to(torch.int8).view(PACKED)
    return (rounded[..., ::2] & 15) | (rounded[..., 1::2] << 4)


def _best_fractions(scaled: Tensor, sides: tuple[int, ...]) -> Tensor:
    """Return by what to multiply scales, from the values over these."""

    def error(fraction: float) -> Tensor:
        return (_rounded(scaled / fraction) * fraction - scaled).square_().sum(sides, keepdim=True)

    least = error(1.0)
    best = torch.ones_like(least)
    for fraction in _FRACTIONS:
        other = error(fraction)
        best = torch.where(other < least, fraction, best)
        least = torch.minimum(least, other)
    return best


def _rounded(scaled: Tensor) -> Tensor:
    return scaled.round().clamp_(-LARGEST - 1, LARGEST)
