"""The interface of all storages of a layer's weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .._checks import SCALED
from .._runtime.native import SCALES_PER_BLOCK, SCALES_PER_FEATURE, SCALES_PER_ROW
from .values import expand

if TYPE_CHECKING:
    from ..config import LayerSpec
    from ..pattern.block_pattern import BlockPattern

Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor
STORED_NAMES = ("mask", "metadata", "scales")  # what some storages keep besides the weight


def smaller_blocks(blocks: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Divide blocks [nnz, bn, bk] into smaller ones, the parts of each one after the other, row by row."""
    (nnz, bn, bk), (rows, columns) = blocks.shape, block_shape
    parts = blocks.reshape(nnz, bn // rows, rows, bk // columns, columns).transpose(2, 3)
    return parts.reshape(-1, rows, columns)


class Storage(ABC):
    """One way to store the kept blocks [nnz, bn, bk] of a weight: its tensors, packing and conversions.

    Instances have no state. Tensors are passed by the names that a layer and its state_dict have for them:
    "weight" and some of `STORED_NAMES`.

    Attributes:
        name: as in `LayerSpec.storage`.
        dtype: of the stored values; None is the layer's.
        trainable: True where the weight is its dense blocks, the only form that has a gradient.
        needs_nm: True where only 2:4 can be stored.
        allows_nm: False where 2:4 cannot be stored.
        needs_finite: True where inf and nan cannot be represented.
        scales: what may have a scale of its own, as `LayerSpec.scales` names it; empty without scales.
    """

    name: str
    dtype: torch.dtype | None = None
    trainable = False
    needs_nm = False
    allows_nm = True
    needs_finite = False
    scales: tuple[str, ...] = ()

    @abstractmethod
    def forms(self, spec: LayerSpec) -> dict[str, Form]:
        """Return shape and dtype of each tensor of a layer with this spec."""

    @abstractmethod
    def store(
        self,
        blocks: Tensor,
        mask: Tensor | None,
        spec: LayerSpec,
        pattern: BlockPattern | None = None,
        limits: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors that store dense blocks; of 2:4 only what the mask keeps counts.

        ``pattern``: needed where features have scales. ``limits``: as of `quantize`, of storages with scales.

        Raises:
            InvalidArgumentError: the storage cannot represent a value.
        """

    def dense_blocks(
        self, tensors: Mapping[str, Tensor | None], spec: LayerSpec, pattern: BlockPattern | None = None
    ) -> Tensor:
        """Return a copy [nnz, bn, bk] of what products multiply by; 8 and 4 bits become the spec's dtype.

        ``pattern``: needed where features have scales.
        """
        weight, metadata, scales = (tensors.get(name) for name in ("weight", "metadata", "scales"))
        assert weight is not None
        return expand(weight, metadata, scales, spec.dtype)

    @abstractmethod
    def refined(
        self, tensors: Mapping[str, Tensor], spec: LayerSpec, block_shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the tensors of the same weight in smaller blocks, in the order of `BlockPattern.refined`.

        Nothing is rounded: values, scales and masks are those of the larger blocks.
        """

    @abstractmethod
    def mask(self, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return the mask of 2:4 [nnz, bn, bk], None without 2:4."""

    def block_shape(self, weight: Tensor, nm: tuple[int, int] | None) -> tuple[int, int]:
        """Return (bn, bk) of the blocks that a stored weight holds."""
        return weight.shape[1], weight.shape[2]

    def scales_of(self, scales: Tensor | None) -> str | None:
        """Return what has a scale of its own in stored values, as `LayerSpec.scales` names it."""
        return None

    def multiplied(self, nm: tuple[int, int] | None) -> str:
        """Return the name of the storage in which kernels read the values; conversions are done before."""
        return self.name

    def describe(self, nm: Sequence[int] | None, activations: str | None = None) -> str:
        """Return the storage as reports name it: "int8", "2:4 int8", with activations "int8 W8A8"."""
        name = self.name if activations is None else f"{self.name} W8A8"
        return name if nm is None else f"2:4 {name}"

    def product_fields(self, nm: tuple[int, int] | None, activations: str | None = None) -> dict[str, Any]:
        """Return the arguments of `_C.Product` that describe values as kernels read them."""
        granularity = 0 if self.dtype is None else SCALES_PER_ROW if self.scales else SCALES_PER_BLOCK
        if activations is not None:
            granularity = SCALES_PER_FEATURE
        return {
            "storage": int(nm is not None),
            "values_dtype": 0 if self.dtype is None else SCALED[self.dtype],
            "granularity": granularity,
        }
