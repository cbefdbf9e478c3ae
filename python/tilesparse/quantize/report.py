"""Report of quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._reports import aligned
from ..model.report import SkippedLayer, by_reason
from ..storage.formats import storage_of


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer that has 8 or 4 bits now.

    Attributes:
        name: in the model.
        shape: (out_features, in_features).
        density: kept fraction of the blocks.
        smoothed_by: the module that took the inverse of the scales of the layer's input, or None.
        alpha: strength of the migration from activations into weights; None without.
        clipped: fraction of the scales, each of an output feature, or with weights alone of a row of a block,
            that clip the largest weights.
        error_before: ‖Y - Ŷ‖² / ‖Y‖² of the layer's product Y = X Wᵀ on the calibration data, as `to_storage`
            stores the layer. Each row of X is divided by the norm of what all layers with this input give for
            it, so that a few tokens with large activations do not decide alone. Of experts ‖W - Ŵ‖² / ‖W‖².
        error: likewise, as the layer is now.
        tokens: of the calibration data that the layer has met; 0 of experts, whose tokens are not looked at.
        reason: why its input could not be smoothed, or None; None with weights alone.
        nearest: fraction of the output features whose weights are each rounded to the nearest. 1 with 8-bit
            activations; with weights alone those where no other rounding was better.
    """

    name: str
    shape: tuple[int, int]
    density: float
    smoothed_by: str | None
    alpha: float | None
    clipped: float
    error_before: float
    error: float
    tokens: int
    reason: str | None
    nearest: float = 1.0


@dataclass(frozen=True)
class QuantizeReport:
    """Result of `quantize_`; ``str()`` makes a table of it.

    Attributes:
        layers: those that were quantized, in the order in which they run.
        skipped: linear layers that stay as they are, and why.
        stack: the name of the stack of blocks that the data went through block by block, or None.
        storage: of the layers now.
        activations: likewise; None where weights alone are quantized.
    """

    layers: list[QuantizedLayer]
    skipped: list[SkippedLayer]
    stack: str | None
    storage: str
    activations: str | None

    def __str__(self) -> str:
        of_inputs = self.activations is not None
        own = ("smoothed by", "alpha") if of_inputs else ("nearest",)
        rows: list[tuple[str, ...]] = [
            ("layer", "shape", "density", *own, "clipped", "error before", "error"),
        ]
        for layer in self.layers:
            alpha = "" if layer.alpha is None else f"{layer.alpha:g}"
            own = (layer.smoothed_by or "", alpha) if of_inputs else (f"{layer.nearest:.0%}",)
            rows.append(
                (
                    layer.name,
                    "{}x{}".format(*layer.shape),
                    f"{layer.density:.3f}",
                    *own,
                    f"{layer.clipped:.0%}",
                    f"{layer.error_before:.2g}",
                    f"{layer.error:.2g}",
                )
            )
        stored = storage_of(self.storage).describe(None, self.activations)
        lines = [*aligned(rows), f"{len(self.layers)} layers stored as {stored}"]
        lines += [f"not smoothed: {text}" for text in by_reason(_without_smoothing(self.layers))]
        return "\n".join([*lines, *(f"skipped {text}" for text in by_reason(self.skipped))])


def _without_smoothing(layers: Sequence[QuantizedLayer]) -> list[SkippedLayer]:
    kind = "BlockSparseLinear"
    return [SkippedLayer(layer.name, kind, layer.reason) for layer in layers if layer.reason is not None]
