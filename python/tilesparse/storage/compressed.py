"""2:4 compressed: the kept half of each block, and metadata that says where it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._checks import COMPRESSIBLE, DTYPES
from .base import Form, Storage, smaller_blocks
from .traits import traits_of
from .values import compress, expand

if TYPE_CHECKING:
    from ..config import LayerSpec
    from ..pattern.block_pattern import BlockPattern


class CompressedStorage(Storage):
    """Weight [nnz, bn, bk / 2] in the layer's dtype and int32 metadata [nnz, bk / 32, bn]."""

    def forms(self, spec: LayerSpec) -> dict[str, Form]:
        """Return shape and dtype of each tensor."""
        nnz, bn, bk = spec.values_shape
        return {
            "weight": ((nnz, bn, bk // 2), spec.value_dtype),
            "metadata": ((nnz, bk // COMPRESSIBLE, bn), torch.int32),
        }

    def store(
        self,
        blocks: Tensor,
        mask: Tensor | None,
        spec: LayerSpec,
        pattern: BlockPattern | None = None,
        limits: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors that store dense blocks."""
        assert mask is not None
        weight, metadata = compress(blocks, mask)
        return {"weight": weight, "metadata": metadata}

    def refined(
        self, tensors: Mapping[str, Tensor], spec: LayerSpec, block_shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the tensors of the same weight in smaller blocks."""
        weight, mask = tensors["weight"], self.mask(tensors)
        assert mask is not None
        exact = weight if weight.dtype in DTYPES else weight.float()  # which holds every value in 8 bits
        blocks = smaller_blocks(expand(exact, tensors["metadata"]).to(weight.dtype), block_shape)
        return self.store(blocks, smaller_blocks(mask, block_shape), spec)

    def mask(self, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return the mask of 2:4, None without 2:4."""
        weight, metadata = tensors["weight"], tensors["metadata"]
        assert weight is not None
        ones = torch.ones(weight.shape, dtype=torch.float32, device=weight.device)
        return expand(ones, metadata) != 0

    def block_shape(self, weight: Tensor, nm: tuple[int, int] | None) -> tuple[int, int]:
        """Return (bn, bk) of the blocks that a stored weight holds."""
        return weight.shape[1], 2 * weight.shape[2]


COMPRESSED = CompressedStorage(traits_of("compressed"))
