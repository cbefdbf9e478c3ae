"""4 bits and scales: two values to a byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from .._checks import PACKED
from .base import Form, smaller_blocks
from .int4 import limits_int4, quantize_int4, rounded_int4
from .quantized import QuantizedStorage

if TYPE_CHECKING:
    from ..config import LayerSpec
    from ..pattern.block_pattern import BlockPattern


class PackedStorage(QuantizedStorage):
    """Weight uint8 [nnz, bn, bk / 2], two values of int4 to a byte, and float32 scales [nnz, bn] or [nnz]."""

    def forms(self, spec: LayerSpec) -> dict[str, Form]:
        """Return shape and dtype of each tensor."""
        nnz, bn, bk = spec.values_shape
        return {**super().forms(spec), "weight": ((nnz, bn, bk // 2), PACKED)}

    def store(
        self,
        blocks: Tensor,
        mask: Tensor | None,
        spec: LayerSpec,
        pattern: BlockPattern | None = None,
        limits: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors that store dense blocks."""
        weight, scales = quantize_int4(blocks, per=spec.scales or "row", limits=limits)
        return {"weight": weight, "scales": scales}

    def limits_of(self, groups: Tensor) -> Tensor:
        """Return the magnitude at which `store` clips each group: the one with the least squared error."""
        return limits_int4(groups)

    def rounded(self, groups: Tensor, limits: Tensor) -> Tensor:
        """Return groups [..., n, k] as products see them, clipped at limits [..., n] and rounded."""
        return rounded_int4(groups, limits)

    def mask(self, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return None: there is no 2:4."""
        return None

    def block_shape(self, weight: Tensor, nm: tuple[int, int] | None) -> tuple[int, int]:
        """Return (bn, bk) of the blocks that a stored weight holds."""
        return weight.shape[1], 2 * weight.shape[2]

    def refined_weight(self, weight: Tensor, block_shape: tuple[int, int]) -> Tensor:
        """Return the weight in smaller blocks."""
        rows, columns = block_shape
        return smaller_blocks(weight, (rows, columns // 2))
