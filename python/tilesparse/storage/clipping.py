"""Where to clip weights before they are rounded to few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import InvalidArgumentError

CLIP_RATIOS = tuple(1 - 0.05 * step for step in range(11))  # of the largest magnitude of a group


@torch.no_grad()
def clip_limits(
    groups: Tensor,
    inputs: Tensor,
    rounded: Callable[[Tensor, Tensor], Tensor],
    *,
    ratios: Sequence[float] = CLIP_RATIOS,
) -> Tensor:
    """Return the magnitude at which each group of weights is clipped, so that its output changes least.

    The weights of a group share a scale. A smaller scale rounds most of them better and clips the largest. Of
    the ratios of the largest magnitude each group gets the one with the least ‖X (w - ŵ)‖², as in AWQ (Lin et
    al., "AWQ: Activation-aware Weight Quantization", arXiv:2306.00978).

    Args:
        groups: [..., n, k]: n groups of k weights, which the same inputs meet: rows of W, or of a block.
        inputs: [..., m, k]: X, or another matrix with the same XᵀX, such as the factor of its Cholesky
            decomposition. Leading dimensions are those of groups, or broadcast to them.
        rounded: ``rounded(groups, limits)`` returns groups as products see them once they are clipped at
            limits [..., n] and rounded.
        ratios: to choose from, above 0 and at most 1.

    Returns:
        float32 [..., n]; 0 for groups of zeros.

    Raises:
        InvalidArgumentError: shapes do not fit together, or a ratio is not allowed.
    """
    if groups.dim() < 2 or inputs.dim() < 2 or groups.shape[-1] != inputs.shape[-1]:
        raise InvalidArgumentError(
            f"inputs must be [..., m, k] for groups [..., n, k], got {list(inputs.shape)} for "
            f"{list(groups.shape)}"
        )
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise InvalidArgumentError(f"ratios must be numbers above 0 and at most 1, got {list(ratios)}")
    groups, inputs = groups.float(), inputs.float()
    largest = groups.abs().amax(-1)
    best, least = largest, torch.full_like(largest, torch.inf)
    for ratio in ratios:
        limits = largest * ratio
        wrong = groups - rounded(groups, limits).float()
        error = (wrong @ inputs.mT).square().sum(-1)
        better = error < least
        best, least = torch.where(better, limits, best), torch.where(better, error, least)
    return best
