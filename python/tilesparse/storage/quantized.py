"""8 bits and scales, with 2:4 of the kept half of each block alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Form, Storage, smaller_blocks
from .compressed import COMPRESSED
from .traits import PER_FEATURE
from .values import quantize, rounded, row_scales, scales_of

if TYPE_CHECKING:
    from ..config import LayerSpec
    from ..pattern.block_pattern import BlockPattern


class QuantizedStorage(Storage):
    """Weight [nnz, bn, bk] in 8 bits with float32 scales; 2:4 is compressed as well.

    Scales are [nnz, bn] or [nnz]. Where x has 8 bits, too, they are [out_features], or [nnz, 1] of blocks:
    two dimensions tell them from those of features.
    """

    dtype: torch.dtype

    def forms(self, spec: LayerSpec) -> dict[str, Form]:
        """Return shape and dtype of each tensor."""
        nnz, bn, _ = spec.values_shape
        forms: dict[str, Form] = {"weight": (spec.values_shape, spec.value_dtype)}
        if spec.nm is not None:
            forms = COMPRESSED.forms(spec)
        of_blocks = (nnz,) if spec.activations is None else (nnz, 1)
        shapes = {"block": of_blocks, PER_FEATURE: spec.shape[:1]}
        return {**forms, "scales": (shapes.get(spec.scales or "row", (nnz, bn)), torch.float32)}

    def store(
        self,
        blocks: Tensor,
        mask: Tensor | None,
        spec: LayerSpec,
        pattern: BlockPattern | None = None,
        limits: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors that store dense blocks."""
        per = spec.scales or "row"
        weight, scales = quantize(
            blocks, self.dtype, per=per, pattern=pattern if per == PER_FEATURE else None, limits=limits
        )
        stored = {"weight": weight} if mask is None else COMPRESSED.store(weight, mask, spec, pattern)
        inside = spec.activations is not None and per == "block"
        return {**stored, "scales": scales[:, None] if inside else scales}

    def dense_blocks(
        self, tensors: Mapping[str, Tensor | None], spec: LayerSpec, pattern: BlockPattern | None = None
    ) -> Tensor:
        """Return a copy [nnz, bn, bk] of the weight, dequantized to the spec's dtype."""
        scales = tensors["scales"]
        if spec.activations is not None and scales is not None:
            if spec.scales == PER_FEATURE and pattern is not None:
                scales = row_scales(scales, pattern)
            elif spec.scales == "block":
                scales = scales.flatten()
            tensors = {**tensors, "scales": scales}
        return super().dense_blocks(tensors, spec)

    def limits_of(self, groups: Tensor) -> Tensor:
        """Return the magnitude at which `store` clips each group that shares a scale, from values alone.

        Float32 [..., n] for groups [..., n, k].
        """
        return groups.abs().amax(-1).float()

    def rounded(self, groups: Tensor, limits: Tensor) -> Tensor:
        """Return groups [..., n, k] in float32 as products see them, clipped at limits [..., n] and rounded.

        Storing what is returned with the same limits rounds nothing.
        """
        scales = scales_of(limits, self.dtype)[..., None]
        return rounded(groups.float(), scales, self.dtype).float() * scales

    def refined(
        self, tensors: Mapping[str, Tensor], spec: LayerSpec, block_shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the tensors of the same weight in smaller blocks, with the scales of the larger ones."""
        if spec.nm is None:
            stored = {"weight": self.refined_weight(tensors["weight"], block_shape)}
        else:
            stored = COMPRESSED.refined(tensors, spec, block_shape)
        (bn, bk), (rows, columns), scales = spec.block_shape, block_shape, tensors["scales"]
        if spec.scales == "block":
            scales = scales.repeat_interleave(bn // rows * (bk // columns))
        elif spec.scales == "row":
            of_rows = scales.reshape(-1, bn // rows, 1, rows).expand(-1, -1, bk // columns, -1)
            scales = of_rows.reshape(-1, rows)
        return {**stored, "scales": scales}

    def refined_weight(self, weight: Tensor, block_shape: tuple[int, int]) -> Tensor:
        """Return the weight in smaller blocks, without 2:4."""
        return smaller_blocks(weight, block_shape)

    def mask(self, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return the mask of 2:4, None without 2:4."""
        return None if tensors.get("metadata") is None else COMPRESSED.mask(tensors)

    def scales_of(self, scales: Tensor | None) -> str | None:
        """Return "row" or "block" for what has a scale of its own where x has none."""
        return None if scales is None else "block" if scales.dim() == 1 else "row"

    def block_shape(self, weight: Tensor, nm: tuple[int, int] | None) -> tuple[int, int]:
        """Return (bn, bk) of the blocks that a stored weight holds."""
        return super().block_shape(weight, nm) if nm is None else COMPRESSED.block_shape(weight, nm)
