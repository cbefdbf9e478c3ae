"""The origin of a layer's pattern: whether there is one, and whether every process has the same."""

from __future__ import annotations

from enum import Enum

import torch

from .._checks import Index
from .._runtime.private import transforms_active, version
from ..errors import InvalidPatternError
from ..pattern.block_pattern import BlockPattern


class Source(Enum):
    """Where a pattern comes from."""

    SHARED = "every process is known to have it, or there is one process"
    OWN = "this process, so that others may have another one"
    MISSING = "nowhere yet"
    LOADED = "a file or another process, of which the others are to be told"


class PatternOrigin:
    """The source of a pattern, with the versions that its tensors had when this was recorded."""

    def __init__(self, source: Source, index: Index) -> None:
        self.source = source
        self.pending = source is not Source.SHARED  # whether a step has something to validate
        self._recorded = [(tensor, version(tensor)) for tensor in index[:3]]

    @classmethod
    def loaded(cls, index: Index) -> PatternOrigin:
        """Return the origin of a pattern that was read from a file or received."""
        return cls(Source.LOADED if has_peers() else Source.SHARED, index)

    def updated(self, index: Index) -> PatternOrigin:
        """Return the origin once this process wrote a pattern; a shared one counts as written by all."""
        return PatternOrigin(Source.OWN if self.source is Source.MISSING else self.source, index)

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
        from .._runtime import agreement as _agreement

        if self.source is Source.OWN and self._is_unchanged(index):
            _agreement.check(index)
        else:  # written by a broadcast or read from a file: processes without may have to know
            _agreement.publish(index)
        return PatternOrigin(Source.SHARED, index)

    def _is_blank(self, index: Index) -> bool:
        """Return True for the zeros with which a layer leaves the meta device."""
        return self._is_unchanged(index) and len(index.col_indices) > 0 and not index.crow_indices.any()

    def _is_unchanged(self, index: Index) -> bool:
        return all(
            tensor is recorded and version(recorded) == count
            for tensor, (recorded, count) in zip(index[:3], self._recorded, strict=True)
        )


def checked_pattern(index: Index) -> BlockPattern:
    """Return a copy on the CPU of what the tensors hold, or raise if that is not a pattern."""
    crow, col, slot, shape, block_shape = index
    return BlockPattern(crow, col, shape=shape, block_shape=block_shape, slot=slot, device="cpu")


def has_peers() -> bool:
    """Return True if other processes may train with this one."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
