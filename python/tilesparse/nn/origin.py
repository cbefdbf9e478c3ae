"""The origin of a layer's pattern: whether other processes have it, and whether it was averaged."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from .._checks import Index
from .._files import checksum
from .._runtime.torch_private import default_store, is_exporting, transforms_active, version
from ..errors import InvalidPatternError, UnsynchronizedPatternError
from ..pattern import BlockPattern


class Source(Enum):
    """Origin of a pattern."""

    SHARED = "every process is known to have it, or there is one process"
    OWN = "this process, so that others may have another one"
    MISSING = "nowhere yet"
    CHANGED = "this process, since all had one pattern: others must have changed theirs alike"
    LOADED = "a file or another process, of which the others are to be told"


AVERAGES = (  # what to do about them
    "averages of all buffers change it: use tilesparse.train.AveragedModel, or leave buffers out, as "
    "use_buffers=False does"
)


class PatternOrigin:
    """The source of a pattern, with the versions that its tensors had when this was recorded."""

    def __init__(self, source: Source, index: Index, *, copied: bool = False) -> None:
        """Record the tensors' versions, and of a ``copied`` layer their contents, for `not_averaged`."""
        self.source = source
        self._recorded = [(tensor, version(tensor)) for tensor in index[:3]]
        self.copied = copied and source is not Source.MISSING and not index.col_indices.is_meta
        self._contents = torch.cat(index[:3]).detach() if self.copied else None
        # Whether a call has something to validate.
        self.pending = self.copied or source is not Source.SHARED

    @classmethod
    def loaded(cls, index: Index, *, copied: bool = False) -> PatternOrigin:
        """Return the origin of a pattern that was read from a file or received."""
        return cls(Source.LOADED if has_peers() else Source.SHARED, index, copied=copied)

    def updated(self, index: Index) -> PatternOrigin:
        """Return the origin once this process wrote a pattern: where others train, theirs may differ now."""
        source = Source.OWN if self.source is Source.MISSING else self.source
        if source is Source.SHARED and has_peers():
            source = Source.CHANGED
        return PatternOrigin(source, index, copied=self.copied)

    def not_averaged(self, index: Index) -> PatternOrigin:
        """Return the origin once a copied layer is known to have no average of patterns; waits for a GPU.

        An average of integers is computed in float32 and rounded down: some of 11, 22, 29 … become one less,
        with a decay of .9999. Where there are few blocks, that is a pattern again.

        Raises:
            InvalidPatternError: the pattern was averaged.
        """
        if self._contents is None or self._is_unchanged(index) or transforms_active() or is_exporting():
            return self
        now = torch.cat(index[:3])
        if now.shape == self._contents.shape:
            lost = self._contents - now
            if ((lost == 0) | (lost == 1)).all() & lost.any():
                raise InvalidPatternError(f"pattern was averaged; {AVERAGES}")
        return PatternOrigin(self.source, index, copied=True)

    def lacks_pattern(self, index: Index) -> bool:
        """Return True if the pattern has no contents; waits for a GPU where they have to be looked at."""
        return self.source is Source.MISSING and (index.col_indices.is_meta or self._is_blank(index))

    def filled(self, index: Index) -> PatternOrigin:
        """Return the origin of buffers that were filled since the layer left the meta device.

        Raises:
            InvalidPatternError: nothing was written to them, or what was written is not a pattern.
        """
        if transforms_active():  # their tensors have no contents to check
            return self
        if self._is_blank(index):
            raise InvalidPatternError(
                "pattern is missing: the layer left the meta device empty; call load_state_dict or "
                "reset_parameters, or assign layer.pattern"
            )
        checked_pattern(index)
        return PatternOrigin.loaded(index)

    def agreed(self, index: Index) -> PatternOrigin:
        """Return the origin once the other processes are known to have the same pattern.

        Raises:
            UnsynchronizedPatternError: another process has drawn another pattern.
        """
        alone = self._is_unchanged(index)
        if self.source is Source.CHANGED and not alone:
            pass  # DistributedDataParallel has broadcast it, or another broadcast has
        elif self.source in (Source.OWN, Source.CHANGED) and alone:
            check_agreement(index)
        else:  # written by a broadcast or read from a file: processes without may have to know
            publish(index)
        return PatternOrigin(Source.SHARED, index)

    def _is_blank(self, index: Index) -> bool:
        """Return True for the zeros with which a layer leaves the meta device."""
        return self._is_unchanged(index) and len(index.col_indices) > 0 and not index.crow_indices.any()

    def _is_unchanged(self, index: Index) -> bool:
        for place, (recorded, count) in enumerate(self._recorded):
            if index[place] is not recorded or version(recorded) != count:
                return False
        return True


def checked_pattern(index: Index) -> BlockPattern:
    """Return a copy on the CPU of what the tensors hold, or raise if that is not a pattern."""
    crow, col, slot, shape, block_shape = index
    return BlockPattern(crow, col, shape=shape, block_shape=block_shape, slot=slot, device="cpu")


def has_peers() -> bool:
    """Return True if other processes may train with this one."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


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
        said = f"{index.shape} in {index.block_shape}: {checksum(torch.cat(index[:3]))}"
        store.set(f"{key}{dist.get_rank()}", said)
    return key


def check_agreement(index: Index) -> None:
    """Raise UnsynchronizedPatternError unless all processes have this pattern.

    Checksums go through the store of ``torch.distributed``, not through collectives: a process that trains
    other layers makes the others raise after a while, not wait for ever, and disturbs no collective of the
    training.
    """
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
