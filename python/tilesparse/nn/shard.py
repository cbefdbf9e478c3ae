"""The protocol of tensor parallelism, which `tilesparse.parallel` implements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .._checks import Index
from ..pattern.block_pattern import BlockPattern

if TYPE_CHECKING:
    from .linear import BlockSparseLinear
    from .stored import StoredWeight


class Shard(Protocol):
    """This process's shard of a layer's weight, whose pattern buffers describe the whole weight."""

    def random(self, like: Index, generator: torch.Generator | None) -> BlockPattern:
        """Return a random pattern of the whole weight, with equally many blocks in each shard."""

    def check(self, pattern: BlockPattern) -> None:
        """Raise InvalidPatternError unless the blocks of each shard have the slots of its process."""

    def index(self, layer: StoredWeight) -> Index:
        """Return the pattern of this process's blocks, kept in sync with the layer's."""

    def linear(self, layer: BlockSparseLinear, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute the layer's forward pass."""
