"""Tokens of a layer's input on calibration data."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 512  # that are kept of an input: errors of layers are means over them


class Samples:
    """Random tokens of an input, and the largest magnitude of each feature over all tokens.

    Args:
        device: where they are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        self._chosen: list[
            tuple[Tensor, Tensor]
        ] = []  # random numbers [tokens], and tokens [tokens, features]
        self.largest: Tensor | None = None
        self._finite: dict[int, Tensor] = {}
        self.tokens = 0

    def add(self, x: Tensor, number: int, keep: Tensor | None = None) -> None:
        """Add the input [..., features] of a call in a batch; see `Moments.add` for the tokens to keep."""
        rows = x.detach().to(self._device, torch.float32).reshape(-1, x.shape[-1])
        if keep is not None and keep.shape == x.shape[:-1]:
            rows = rows[keep.to(self._device).reshape(-1)]
        self.tokens += len(rows)
        largest = rows.abs().amax(0) if len(rows) else rows.new_zeros(x.shape[-1])
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self._finite[number] = self._finite.get(number, True) & rows.isfinite().all()
        order = torch.rand(len(rows), generator=self._generator, device="cpu").to(self._device)
        self._chosen.append((order, rows))
        if sum(len(rows) for _, rows in self._chosen) > 2 * TOKENS:
            self._chosen = [self._least()]

    def rows(self) -> Tensor:
        """Return tokens [at most TOKENS, features] in float32."""
        return self._least()[1]

    def not_finite(self) -> int | None:
        """Return the first batch with NaN or infinities, or None."""
        return next((number for number, finite in self._finite.items() if not bool(finite)), None)

    def _least(self) -> tuple[Tensor, Tensor]:
        order, rows = (torch.cat(parts) for parts in zip(*self._chosen, strict=True))
        chosen = order.argsort()[:TOKENS]
        return order[chosen], rows[chosen].clone()


def inverse_norms(outputs: Tensor) -> Tensor:
    """Return 1 / ‖y‖ [..., 1] of outputs [..., features], by which tokens count alike; 0 where y = 0.

    Language models have a few tokens whose activations are a thousand times those of others. Sums of squares
    would be about these alone.
    """
    norms = torch.linalg.vector_norm(outputs, dim=-1, keepdim=True)
    return torch.where(norms > 0, 1 / norms, 0)
