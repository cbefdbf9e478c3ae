"""Report of quantization."""

from __future__ import annotations

from collections import Counter
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
        storage: of the weight.
        error_before: ‖Y - Ŷ‖² / ‖Y‖² of the layer's product Y = X Wᵀ on the calibration data, as `to_storage`
            stores the layer. Each row of X is divided by the norm of what all layers with this input give for
            it, so that a few tokens with large activations do not decide alone. Of experts ‖W - Ŵ‖² / ‖W‖².
        error: likewise, as the layer is now.
        tokens: of the calibration data that the layer has met; 0 of experts, whose tokens are not looked at.
        activations: as of `BlockSparseConfig`; None where the weight alone is quantized.
        clipped: fraction of the scales, each of an output feature, or with weights alone of a row of a block,
            that clip the largest weights.
        smoothed_by: the module that took the inverse of the scales of the layer's input, or None.
        alpha: strength of the migration from activations into weights; None without.
        reason: why its input could not be smoothed, or None; None with weights alone.
        nearest: fraction of the output features whose weights are each rounded to the nearest. 1 with 8-bit
            activations; with weights alone those where no other rounding was better.
    """

    name: str
    shape: tuple[int, int]
    density: float
    storage: str
    error_before: float
    error: float
    tokens: int
    activations: str | None = None
    clipped: float = 0.0
    smoothed_by: str | None = None
    alpha: float | None = None
    reason: str | None = None
    nearest: float = 1.0

    @property
    def stored_as(self) -> str:
        """The storage as tables show it: "int4", "int8 W8A8"."""
        return storage_of(self.storage).describe(None, self.activations)


@dataclass(frozen=True)
class QuantizeReport:
    """Result of `quantize_`; ``str()`` makes a table of it.

    Attributes:
        layers: those that were quantized, with 8-bit activations and then with weights alone, each in the
            order in which they run, and then experts.
        skipped: linear layers that stay as they are, and why.
        stack: the name of the stack of blocks that the data went through block by block, or None.
    """

    layers: list[QuantizedLayer]
    skipped: list[SkippedLayer]
    stack: str | None

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            (
                "layer",
                "shape",
                "density",
                "smoothed by",
                "alpha",
                "nearest",
                "clipped",
                "error before",
                "error",
            )
        ]
        rows += [
            (
                layer.name,
                "{}x{}".format(*layer.shape),
                f"{layer.density:.3f}",
                layer.smoothed_by or "",
                "" if layer.alpha is None else f"{layer.alpha:g}",
                f"{layer.nearest:.0%}",
                f"{layer.clipped:.0%}",
                f"{layer.error_before:.2g}",
                f"{layer.error:.2g}",
            )
            for layer in self.layers
        ]
        counts = Counter(layer.stored_as for layer in self.layers)
        lines = [*aligned(rows), *(f"{count} layers stored as {name}" for name, count in counts.items())]
        rough = [
            SkippedLayer(layer.name, "BlockSparseLinear", layer.reason)
            for layer in self.layers
            if layer.reason is not None
        ]
        for kind, layers in (("not smoothed:", rough), ("skipped", self.skipped)):
            lines += [f"{kind} {text}" for text in by_reason(layers)]
        return "\n".join(lines)
