"""Patterns that all processes of a training share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from .._checks import Index, checked_count
from ..errors import InvalidArgumentError, InvalidPatternError, UnsynchronizedPatternError
from ..nn.linear import BlockSparseLinear
from ..nn.weight import declare_shared, lacks_pattern, layer_index
from ..pattern import BlockPattern


def synchronize_patterns(model: nn.Module, group: dist.ProcessGroup | None = None, src: int = 0) -> None:
    """Give every `BlockSparseLinear` of a model the pattern that it has in one process.

    Call it in every process of the group, with the same model, before DistributedDataParallel with
    ``broadcast_buffers=False`` or FullyShardedDataParallel and ``fully_shard``, which leave patterns as they
    are. Weights are left alone.

    Args:
        model: may be one layer.
        group: the processes that train the model together; None is the default group.
        src: the rank, in the whole job, of the process whose patterns are taken.

    Raises:
        UnsynchronizedPatternError: the layers of the processes differ in more than where their blocks lie.
        InvalidPatternError: the process whose patterns are taken has a layer without one. Both are raised in
            all processes, before anything has changed.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgumentError(
            "group must be a process group, got none; call torch.distributed.init_process_group before"
        )
    checked_count("src", src, 0, dist.get_world_size() - 1)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)}
    for layer, pattern in zip(layers.values(), broadcast_patterns(layers, group, src), strict=True):
        layer.pattern = pattern
        declare_shared(layer)


def broadcast_patterns(
    layers: Mapping[str, BlockSparseLinear], group: dist.ProcessGroup | None, src: int
) -> list[BlockPattern]:
    """Return the patterns that the layers have in one process."""
    mine = [
        (name, layer.spec.shape, layer.block_shape, layer.col_indices.shape[0])
        for name, layer in layers.items()
    ]
    missing = [name for name, layer in layers.items() if lacks_pattern(layer)]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (dist.get_rank(), mine, missing), group)
    if any(theirs != mine for _, theirs, _ in everyone):
        raise UnsynchronizedPatternError(
            "model must have the same layers, block shapes and numbers of blocks in every process, "
            f"got {[theirs for _, theirs, _ in everyone]}"
        )
    for rank, _, names in everyone:
        if rank == src and names:
            raise InvalidPatternError(
                f"model must have a pattern in every layer of process {src}, but {names} left the meta "
                "device empty; call load_state_dict or reset_parameters there"
            )
    patterns = []
    for layer in layers.values():
        index = layer_index(layer)
        crow, col, slot = (tensor.clone() for tensor in index[:3])
        for tensor in (crow, col, slot):
            dist.broadcast(tensor, src, group)
        patterns.append(BlockPattern.from_index(Index(crow, col, slot, index.shape, index.block_shape)))
    return patterns
