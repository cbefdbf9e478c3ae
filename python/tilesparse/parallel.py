"""Models that several processes train together."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ._checks import Index
from .errors import UnsynchronizedPatternError
from .linear import _SHARED, BlockSparseLinear
from .pattern import BlockPattern


def synchronize_patterns(model: nn.Module, group: dist.ProcessGroup | None = None, src: int = 0) -> None:
    """Gives every `BlockSparseLinear` of a model the pattern that it has in one process.

    Call it in every process of the group, with the same model, before DistributedDataParallel with
    ``broadcast_buffers=False`` or FullyShardedDataParallel and ``fully_shard``, which leave patterns as they
    are. Weights are left alone.

    Args:
        model: may be one layer.
        group: the processes that train the model together; None is the default group.
        src: the rank, in the whole job, of the process whose patterns are taken.

    Raises:
        UnsynchronizedPatternError: the layers of the processes differ in more than where their blocks lie. It
            is raised in all of them, before anything has changed.
    """
    layers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)
    ]
    mine = [(name, layer._shape, layer.block_shape, layer.col_indices.shape[0]) for name, layer in layers]
    everyone: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    if any(theirs != mine for theirs in everyone):
        raise UnsynchronizedPatternError(
            f"model: the same layers, block shapes and numbers of blocks in every process expected, "
            f"got {everyone}"
        )
    for _, layer in layers:
        index = layer._index()
        crow, col, slot = (tensor.clone() for tensor in index[:3])
        for tensor in (crow, col, slot):
            dist.broadcast(tensor, src, group)
        layer.pattern = BlockPattern._of(Index(crow, col, slot, index.shape, index.block_shape))
        layer._mark(_SHARED)
