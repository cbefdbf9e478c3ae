"""The interface of all storages of a layer's weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from ..config import LayerSpec
from .values import expand

Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor
STORED_NAMES = ("mask", "metadata", "scales")  # what some storages keep besides the weight


class Storage(ABC):
    """One way to store the kept blocks [nnz, bn, bk] of a weight: its tensors, packing and conversions.

    Instances have no state. Tensors are passed by the names that a layer and its state_dict have for them:
    "weight" and some of `STORED_NAMES`.

    Attributes:
        name: as in `LayerSpec.storage`.
        trainable: whether the weight has a gradient.
    """

    name: str
    trainable = False

    @abstractmethod
    def forms(self, spec: LayerSpec) -> dict[str, Form]:
        """Return shape and dtype of each tensor of a layer with this spec."""

    @abstractmethod
    def store(self, blocks: Tensor, mask: Tensor | None, spec: LayerSpec) -> dict[str, Tensor]:
        """Return the tensors that store dense blocks; of 2:4 only what the mask keeps counts.

        Raises:
            InvalidArgumentError: the storage cannot represent a value.
        """

    def dense_blocks(self, tensors: Mapping[str, Tensor | None], dtype: torch.dtype) -> Tensor:
        """Return a copy [nnz, bn, bk] of what products multiply by; 8 bits are dequantized to ``dtype``."""
        weight, metadata, scales = (tensors.get(name) for name in ("weight", "metadata", "scales"))
        assert weight is not None
        return expand(weight, metadata, scales, dtype)

    @abstractmethod
    def mask(self, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return the mask of 2:4 [nnz, bn, bk], None without 2:4."""

    def block_shape(self, weight: Tensor, nm: tuple[int, int] | None) -> tuple[int, int]:
        """Return (bn, bk) of the blocks that a stored weight holds."""
        return weight.shape[1], weight.shape[2]

    def __reduce__(self) -> tuple[Callable[[str], Storage], tuple[str]]:
        from .registry import storage_of

        return storage_of, (self.name,)
