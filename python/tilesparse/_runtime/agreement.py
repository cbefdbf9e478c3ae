"""A check that processes which train one model have one pattern: a checksum of each layer, exchanged once.

Checksums go through the store of ``torch.distributed``, not through collectives: a process that trains other
layers makes the others raise after a while, not wait for ever, and disturbs no collective of the training.
"""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .._checks import Index
from .._files import chunks
from ..errors import UnsynchronizedPatternError
from .torch_private import default_store

PATIENCE = timedelta(minutes=2)  # the first step of another process may compile
_REMEDY = (
    "call tilesparse.distributed.synchronize_patterns(model) before training, or let DistributedDataParallel "
    "broadcast buffers"
)
_counted: tuple[Any, int] = None, 0  # the store, and how many layers were published in it


def publish(index: Index) -> str:
    """Tell the other processes the checksum of a pattern; return its key, but for the rank at the end.

    Layers are known by the order of their first training steps, which processes of one training share.
    """
    global _counted
    store = default_store()
    count = _counted[1] if _counted[0] is store else 0
    _counted = store, count + 1
    key = f"tilesparse/pattern/{count}/"
    if store is not None:
        store.set(f"{key}{dist.get_rank()}", _checksum(index))
    return key


def check(index: Index) -> None:
    """Raise UnsynchronizedPatternError unless all processes have this pattern."""
    key, store, ranks = publish(index), default_store(), range(dist.get_world_size())
    if store is None:
        raise UnsynchronizedPatternError(f"pattern was drawn in this process only; {_REMEDY}")
    try:
        store.wait([f"{key}{rank}" for rank in ranks], PATIENCE)
    except RuntimeError as error:
        silent = [rank for rank in ranks if not store.check([f"{key}{rank}"])]
        raise UnsynchronizedPatternError(
            f"pattern was drawn in this process only, and processes {silent} have not said within "
            f"{PATIENCE.seconds} s which one they have; {_REMEDY}"
        ) from error
    own = store.get(f"{key}{dist.get_rank()}")
    others = [rank for rank in ranks if store.get(f"{key}{rank}") != own]
    if others:
        raise UnsynchronizedPatternError(
            f"pattern was drawn in this process only, and processes {others} have another one; {_REMEDY}"
        )


def _checksum(index: Index) -> str:
    found = 0
    for tensor in index[:3]:
        for chunk in chunks(tensor.detach().cpu()):
            found = zlib.crc32(chunk, found)
    return f"{index.shape} in {index.block_shape}: {len(index.col_indices)} blocks, {found:08x}"
