"""Shards of a pattern: which blocks of a weight each process multiplies by, and their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from .._checks import Index
from .._runtime.lock import exclusive
from .._runtime.lookup import content_of
from ..errors import InvalidPatternError
from ..nn.stored import StoredWeight
from ..pattern.block_pattern import BlockPattern
from ..pattern.indices import moved_index, overwrite_index

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PatternShard:
    """Some of the blocks of a weight, by their position along block rows (dim 0) or columns (dim 1).

    The pattern's buffers of a layer describe the whole weight, with slots in the order of the shards.
    """

    def __init__(self, mesh: DeviceMesh, dim: int) -> None:
        self._mesh, self._dim = mesh, dim
        self._index: Index | None = None
        self._seen: tuple[object, int] | None = None  # what the layer's buffers held when it was made

    @property
    def parts(self) -> tuple[int, int]:
        """(r, c) as `BlockPattern.random` has them."""
        count = self._mesh.size()
        return (count, 1) if self._dim == 0 else (1, count)

    def check(self, pattern: BlockPattern) -> None:
        """Raise InvalidPatternError unless the blocks of each shard have the slots of its process."""
        shards = self._shard_of(pattern)
        count = self._mesh.size()
        if not torch.equal(shards, torch.arange(count, device="cpu").repeat_interleave(pattern.nnz // count)):
            raise InvalidPatternError(
                f"pattern must have its slots in the order of the layer's {count} shards, with "
                f"{pattern.nnz // count} blocks each; load other patterns before parallelize_module"
            )

    def arranged(self, pattern: BlockPattern) -> BlockPattern:
        """Return the same blocks with slots in the order of the shards.

        The order is the same for every number of processes, so a state dict of a few serves others.
        """
        counts = torch.bincount(self._shard_of(pattern), minlength=self._mesh.size()).tolist()
        if len(set(counts)) > 1:
            raise InvalidPatternError(
                f"pattern must have equally many blocks in each of the {len(counts)} shards of its block "
                f"{('rows', 'columns')[self._dim]}, got {counts}; make it with parts={self.parts}"
            )
        blocks = torch.stack(pattern.block_indices(), 1)[self.order(pattern)]
        return BlockPattern.from_blocks(blocks, shape=pattern.shape, block_shape=pattern.block_shape)

    def order(self, pattern: BlockPattern) -> Tensor:
        """Return, for every slot of the arranged pattern, the slot of its block in this one."""
        rows, columns = pattern.block_indices()
        position, _ = self._along(pattern)
        return ((position * pattern.grid[0] + rows) * pattern.grid[1] + columns).argsort()

    def random(self, like: Index, generator: torch.Generator | None) -> BlockPattern:
        """Return a random pattern of the whole weight, with equally many blocks in each shard."""
        nnz = like.col_indices.shape[0]
        return self.arranged(
            BlockPattern.random(
                like.shape, block_shape=like.block_shape, nnz=nnz, parts=self.parts, generator=generator
            )
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else it would be what it was when traced
    def index(self, layer: StoredWeight) -> Index:
        """Return the pattern of this process's blocks, kept in sync with the layer's."""
        whole = layer.index()
        with exclusive():
            seen = content_of(whole)
            if self._index is None or self._seen != seen:
                self._index, self._seen = self._synced(whole), seen
            return self._index

    def _synced(self, index: Index) -> Index:
        pattern, device = BlockPattern.from_index(index).to("cpu"), index.col_indices.device
        self.check(pattern)
        cut = self._cut(pattern)
        mine = cut.index_on(cut.device)
        if self._index is None or self._index.col_indices.device != device:
            with torch.inference_mode(False):  # training may go on with it
                return moved_index(mine, device)
        overwrite_index(self._index, mine)  # in place, so that prepared plans stay valid
        return self._index

    def _cut(self, pattern: BlockPattern) -> BlockPattern:
        count, rank = self._mesh.size(), self._mesh.get_local_rank()
        each = pattern.nnz // count
        blocks = torch.stack(pattern.block_indices(), 1)[rank * each : (rank + 1) * each]
        blocks[:, self._dim] -= rank * (pattern.grid[self._dim] // count)
        shape = [size // part for size, part in zip(pattern.shape, self.parts, strict=True)]
        return BlockPattern.from_blocks(blocks, shape=shape, block_shape=pattern.block_shape)

    def _along(self, pattern: BlockPattern) -> tuple[Tensor, int]:
        """Return, for every slot, the position of its block along what is divided, and how long that is."""
        return pattern.block_indices()[self._dim], pattern.grid[self._dim]

    def _shard_of(self, pattern: BlockPattern) -> Tensor:
        """Return, for every slot, the shard that its block lies in."""
        position, length = self._along(pattern)
        return position.cpu() // (length // self._mesh.size())


def sharded_by_slots(blocks: Tensor, mesh: DeviceMesh, source: int | None) -> Tensor:
    """Shard blocks by slots; they are sent as bytes, since not every backend knows every dtype."""
    as_bytes = distributed(blocks.contiguous().view(torch.uint8), mesh, Shard(0), source).to_local()
    return DTensor.from_local(as_bytes.view(blocks.dtype), mesh, [Shard(0)], run_check=False)


def distributed(tensor: Tensor, mesh: DeviceMesh, placement: Placement, source: int | None) -> DTensor:
    """Distribute a tensor of one process; None: every process has the whole."""
    options = {} if source == 0 else {"src_data_rank": source}
    return distribute_tensor(tensor, mesh, [placement], **options)


def local_of(tensor: Any) -> Any:
    """Return this process's shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
