"""What pruning did to a model."""

from __future__ import annotations

from dataclasses import dataclass

from .._reports import aligned
from ..patch import Size, SkippedLayer, by_reason
from .choice import Choice


@dataclass(frozen=True)
class PrunedLayer:
    """One pruned layer.

    Attributes:
        name: in the model.
        shape: (out_features, in_features).
        choice: how it is stored. Its density is what was asked for.
        density: kept fraction of the blocks.
        error_before_refit: ‖y - ŷ‖² / ‖X Wᵀ‖² of the kept blocks with their dense weights, where X are the
            inputs in the pruned model, and W is the dense weight that comes closest with them to the layer's
            output in the dense model. For the first layer that is its own.
        error: likewise, of the layer as it is now, also stored in 8 bits.
        damping: what the second moment of the inputs was damped by, over the mean of its diagonal: as given,
            or more where that was too weak.
        tokens: of the calibration data that the layer has met.
    """

    name: str
    shape: tuple[int, int]
    choice: Choice
    density: float
    error_before_refit: float
    error: float
    damping: float
    tokens: int


@dataclass(frozen=True)
class PruneReport:
    """What `prune_model` did; ``str()`` makes a table of it.

    Attributes:
        layers: those that were pruned, in the order in which they were.
        skipped: linear layers that stay dense, and why.
        stack: the name of the stack of blocks that was pruned block by block, or None.
        method: how blocks were chosen.
        before: size of the whole model.
        after: likewise.
    """

    layers: list[PrunedLayer]
    skipped: list[SkippedLayer]
    stack: str | None
    method: str
    before: Size
    after: Size

    def __str__(self) -> str:
        rows = [
            ("layer", "shape", "block", "density", "storage", "tokens", "damping", "before refit", "error")
        ]
        for layer in self.layers:
            choice = layer.choice
            rows.append(
                (
                    layer.name,
                    "{}x{}".format(*layer.shape),
                    "{}x{}".format(*choice.block_shape),
                    f"{layer.density:.3f}",
                    choice.storage if choice.nm is None else f"2:4 {choice.storage}",
                    f"{layer.tokens:,}",
                    f"{layer.damping:.2g}",
                    f"{layer.error_before_refit:.4f}",
                    f"{layer.error:.4f}",
                )
            )
        order = f"block by block of {self.stack!r}" if self.stack is not None else "all layers at once"
        sizes = f"{self.before.parameters:,} → {self.after.parameters:,} parameters"
        lines = [*aligned(rows), f"{order}, by {self.method}; {sizes}"]
        return "\n".join(lines + [f"skipped {text}" for text in by_reason(self.skipped)])
