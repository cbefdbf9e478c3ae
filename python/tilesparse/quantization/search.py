"""How much of large activations moves into weights, and where weights are clipped, by errors of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..calibrate.moments import exact_products
from ..storage.clipping import CLIP_RATIOS, clip_limits
from ..storage.quantized import QuantizedStorage
from .samples import Samples, inverse_norms

ALPHAS = tuple(step / 10 for step in range(10))  # 0 to 0.9
_SPAN = 16  # exponents of factors are within this of the largest


class Found(NamedTuple):
    """The best that was found for the layers of a group that are to be quantized.

    Attributes:
        alpha: the strength of the migration, None for none.
        columns: factors of the columns of all weights of the group [in_features], powers of two; the input
            has their inverse. None for none.
        limits: by layer, where its weights are clipped, [out_features].
        before: by layer, the error as of `QuantizedLayer` without scaling and clipping.
        after: likewise, with both.
    """

    alpha: float | None
    columns: Tensor | None
    limits: dict[str, Tensor]
    before: dict[str, float]
    after: dict[str, float]


class Search:
    """Search for the scales of one input, by the error of layers in 8 bits on some of its tokens.

    Args:
        samples: of the input.
        weights: W [out_features, in_features] in float32 of the layers that are to be quantized, by name, on
            the device of the samples.
        storage: of weights, and so the dtype of activations.
    """

    def __init__(self, samples: Samples, weights: Mapping[str, Tensor], storage: QuantizedStorage) -> None:
        assert samples.largest is not None
        self._x, self._largest = samples.rows(), samples.largest
        self._weights, self._rounded = weights, storage.rounded
        with exact_products(self._x.device):
            self._outputs = {name: self._x @ weight.T for name, weight in weights.items()}
        self._sizes = inverse_norms(torch.cat(list(self._outputs.values()), 1))

    def best(self, source: Tensor | None, *, clip: bool) -> Found:
        """Return the best of all strengths, and then of all clippings.

        Args:
            source: of the features of the input, as of `ScaleGroup`; None scales nothing.
            clip: whether to look for limits below the largest weights.
        """
        before = self._errors(None)
        alpha, columns, least = None, None, sum(before.values())
        if source is not None:
            for candidate in ALPHAS:
                factors = self.factors(candidate, source)
                error = sum(self._errors(factors).values())
                if error < least:
                    alpha, columns, least = candidate, factors, error
        limits = {name: self._limits(name, columns, clip) for name in self._weights}
        return Found(alpha, columns, limits, before, self._errors(columns, limits))

    def factors(self, alpha: float, source: Tensor) -> Tensor:
        """Return factors of the weights' columns by which activations and weights share their range.

        They are max|x_j|^alpha / max|w_j|^(1 - alpha), as in SmoothQuant (Xiao et al., "SmoothQuant: Accurate
        and Efficient Post-Training Quantization for Large Language Models", arXiv:2211.10438), rounded to
        powers of two: multiplying by these is exact, so the model computes the same before it is quantized.
        """
        source = source.to(self._largest.device)
        of_x, of_w = (_largest_of(each, source) for each in (self._largest, self._largest_weights()))
        live = (of_x > 0) & (of_w > 0)
        if not bool(live.any()):
            return torch.ones_like(of_x)
        exponents = (alpha * of_x.log2() - (1 - alpha) * of_w.log2()).round()
        # Most features stay as they are, unless one would grow beyond the largest there is.
        grown = (of_x.log2() - exponents)[live].amax() - of_x[live].amax().log2()
        shift = torch.maximum(grown.ceil(), -exponents[live].median())
        exponents = torch.where(live, exponents, exponents[live].amax()) + shift
        exponents = exponents.clamp(min=float(exponents.amax()) - _SPAN)
        return 2.0 ** torch.where(source >= 0, exponents, 0)

    def _largest_weights(self) -> Tensor:
        return torch.stack([weight.abs().amax(0) for weight in self._weights.values()]).amax(0)

    def _limits(self, name: str, columns: Tensor | None, clip: bool) -> Tensor:
        weight = self._weights[name] if columns is None else self._weights[name] * columns
        if not clip:
            return weight.abs().amax(-1)
        with exact_products(weight.device):
            inputs = self._quantized(columns) * self._sizes
            return clip_limits(weight, inputs, self._rounded, ratios=CLIP_RATIOS)

    def _errors(self, columns: Tensor | None, limits: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        x, found = self._quantized(columns), {}
        with exact_products(x.device):
            for name, weight in self._weights.items():
                scaled = weight if columns is None else weight * columns
                own = scaled.abs().amax(-1) if limits is None else limits[name]
                wrong = (self._outputs[name] - x @ self._rounded(scaled, own).T) * self._sizes
                size = float((self._outputs[name] * self._sizes).square().sum())
                found[name] = float(wrong.square().sum()) / size if size > 0 else 0.0
        return found

    def _quantized(self, columns: Tensor | None) -> Tensor:
        """Return the tokens as products see them, over the factors of columns."""
        x = self._x if columns is None else self._x / columns
        return self._rounded(x, x.abs().amax(-1))


def _largest_of(of_features: Tensor, source: Tensor) -> Tensor:
    """Return for each feature the largest number of all that come from the same row."""
    known = source >= 0
    of_rows = of_features.new_zeros(int(source.max()) + 1)
    of_rows.scatter_reduce_(0, source[known], of_features[known], "amax")
    return torch.where(known, of_rows[source.clamp(min=0)], 0)
