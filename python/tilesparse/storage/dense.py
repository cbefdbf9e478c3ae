"""Dense blocks: the storage that can be trained; with 2:4, a mask says which weights count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._ops.masks import masked
from .base import Form, Storage, smaller_blocks
from .compressed import COMPRESSED

if TYPE_CHECKING:
    from ..config import LayerSpec
    from ..pattern.block_pattern import BlockPattern


class DenseStorage(Storage):
    """Weight [nnz, bn, bk] in the layer's dtype, and with 2:4 a mask of bools of the same shape."""

    def forms(self, spec: LayerSpec) -> dict[str, Form]:
        """Return shape and dtype of each tensor."""
        forms: dict[str, Form] = {"weight": (spec.values_shape, spec.dtype)}
        return forms if spec.nm is None else {**forms, "mask": (spec.values_shape, torch.bool)}

    def store(
        self,
        blocks: Tensor,
        mask: Tensor | None,
        spec: LayerSpec,
        pattern: BlockPattern | None = None,
        limits: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors that store dense blocks."""
        return {"weight": blocks} if mask is None else {"weight": blocks, "mask": mask}

    def dense_blocks(
        self, tensors: Mapping[str, Tensor | None], spec: LayerSpec, pattern: BlockPattern | None = None
    ) -> Tensor:
        """Return a masked copy of the weight."""
        weight, mask = tensors["weight"], tensors.get("mask")
        assert weight is not None
        return weight.detach().clone() if mask is None else masked(weight.detach(), mask)

    def refined(
        self, tensors: Mapping[str, Tensor], spec: LayerSpec, block_shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the tensors of the same weight in smaller blocks."""
        return {name: smaller_blocks(tensors[name], block_shape) for name in self.forms(spec)}

    def mask(self, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return the mask of 2:4, None without 2:4."""
        return tensors.get("mask")

    def multiplied(self, nm: tuple[int, int] | None) -> str:
        """Return "compressed" for 2:4, of which products multiply the kept half."""
        return self.name if nm is None else COMPRESSED.name

    def describe(self, nm: Sequence[int] | None, activations: str | None = None) -> str:
        """Return "plain", or "2:4" for dense blocks with a mask."""
        return self.name if nm is None else "2:4"
