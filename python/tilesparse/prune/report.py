"""Reports of pruning, and its warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from torch import nn

from .._reports import MOST, aligned, empty_texts, listed, warn_user
from ..config import BlockSparseConfig
from ..nn.convert import dense_weight
from ..patch.reports import DenseParameter, Size, SkippedLayer, by_reason, dense_lines
from ..storage.registry import storage_of
from .configs import block_shape_of


@dataclass(frozen=True)
class PrunedLayer:
    """One pruned layer.

    Attributes:
        name: in the model.
        shape: (out_features, in_features).
        config: how it is stored. Its density is what was asked for.
        density: kept fraction of the blocks.
        error_before_refit: ‖y - ŷ‖² / ‖X Wᵀ‖² of the kept blocks with their dense weights, where X are the
            inputs in the pruned model, and W is the dense weight that comes closest with them to the layer's
            output in the dense model. For the first layer that is its own.
        error: likewise, of the layer as it is now, also stored in 8 or 4 bits.
        damping: what the second moment of the inputs was damped by, over the mean of its diagonal: as given,
            or more where that was too weak.
        tokens: of the calibration data that the layer has met.
        empty_rows: block rows without a block, whose outputs are the bias alone.
        empty_columns: block columns without a block, whose inputs nothing reads.
        projection: of an expert, the name of the projection of all of them; the table has one row for these.
    """

    name: str
    shape: tuple[int, int]
    config: BlockSparseConfig
    density: float
    error_before_refit: float
    error: float
    damping: float
    tokens: int
    empty_rows: int
    empty_columns: int
    projection: str | None = None


@dataclass(frozen=True)
class PruneReport:
    """Result of `prune_model`; ``str()`` makes a table of it.

    Attributes:
        layers: those that were pruned, in the order in which they were.
        skipped: linear layers that stay dense, and why.
        stack: the name of the stack of blocks that was pruned block by block, or None.
        method: how blocks were chosen.
        before: size of the whole model.
        after: likewise.
        dense: all parameters of two dimensions or more that stay dense, also those of other modules.
    """

    layers: list[PrunedLayer]
    skipped: list[SkippedLayer]
    stack: str | None
    method: str
    before: Size
    after: Size
    dense: list[DenseParameter]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("layer", "shape", "block", "density", "storage", "tokens", "damping", "before refit", "error")
        ]
        for _, group in groupby(self.layers, lambda layer: layer.projection or layer.name):
            rows.append(_row(list(group)))
        order = f"block by block of {self.stack!r}" if self.stack is not None else "all layers at once"
        sizes = f"{self.before.parameters:,} → {self.after.parameters:,} parameters"
        lines = [*aligned(rows), f"{order}, by {self.method}; {sizes}"]
        lines += [f"skipped {text}" for text in by_reason(self.skipped)]
        return "\n".join([*lines, *empty_texts(self.layers), *dense_lines(self.dense)])


def _row(layers: Sequence[PrunedLayer]) -> tuple[str, ...]:
    """Describe a layer, or all experts of a projection: means, and the largest damping."""
    first, several = layers[0], len(layers) > 1
    least, most = (function(layer.tokens for layer in layers) for function in (min, max))
    return (
        f"{first.projection}.* ({len(layers)})" if several else first.name,
        "{}x{}".format(*first.shape),
        "{}x{}".format(*block_shape_of(first.config)),
        f"{fmean(layer.density for layer in layers):.3f}",
        storage_of(first.config.storage).describe(first.config.nm, first.config.activations),
        f"{least:,} to {most:,}" if several else f"{least:,}",
        f"{max(layer.damping for layer in layers):.2g}",
        f"{fmean(layer.error_before_refit for layer in layers):.4f}",
        f"{fmean(layer.error for layer in layers):.4f}",
    )


def warn_of_few_tokens(model: nn.Module, tokens: Mapping[str, int]) -> None:
    """Warn of layers whose XᵀX cannot have full rank, with the tokens that they have met and need."""
    short: dict[tuple[int, int], list[str]] = {}
    for name, met in tokens.items():
        layer: Any = model.get_submodule(name)
        in_features = layer.in_features if hasattr(layer, "in_features") else dense_weight(layer).shape[1]
        needed = in_features + (layer.bias is not None)  # the mean takes one
        if met < needed:
            short.setdefault((met, needed), []).append(name)
    if short:
        texts = [f"{met} of {needed} at {listed(names)}" for (met, needed), names in short.items()]
        warn_user(
            "batches must give a layer at least as many tokens as it has inputs, and one more for a bias, or "
            f"its weights fit these tokens alone and its error is too small, got {'; '.join(texts[:MOST])}"
        )


def warn_of_dense(model: nn.Module, dense: Sequence[DenseParameter]) -> None:
    """Warn where most of a model is no linear layer, as with experts stacked in one parameter."""
    usual = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
    others = [one for one in dense if not isinstance(model.get_submodule(one.name.rpartition(".")[0]), usual)]
    share = sum(one.share for one in others)
    if share > 0.5:
        warn_user(
            f"{share:.0%} of the parameters are in no linear layer and stay dense: "
            f"{listed(one.name for one in others)}"
        )
