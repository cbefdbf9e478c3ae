"""Writes to patterns on CUDA devices that PyTorch does not count: ``tensor.data``, collectives and the like.

Products read copies, so none computes with half of a write; but the write must be noticed. A kernel compares
all patterns of a device with their copies, about once for each forward pass: a pattern that has had a forward
product since the last look calls for the next one, which serves all others as well. The host waits for the
answer for a moment only. Where the GPU has hardly more to do, a write is followed before the product at hand.
Where it is far behind, a later look finds that products have read the former pattern, and raises.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._checks import Index
from ..errors import InvalidPatternError, PatternChangedError
from .private import current_device, current_stream

# Seconds by which the GPU may be behind for a write to be followed at once. While the host waits, the GPU
# runs out of work: with a millisecond a layer that is called again and again took 20 us more for each call.
PATIENCE = 1e-4


class Watch:
    """The patterns of one device that are compared with their copies.

    Attributes:
        looks: number of comparisons so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.looks = _C.Looks()
        self._device = device
        self._pairs = _pinned(64)
        self._free: list[int] = []
        self._watched: dict[int, weakref.ref[Any]] = {}  # by the first of three pairs
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._mark = 0

    def add(self, entry: Any) -> int:
        """Watch what is kept of a pattern, once it was pointed to; return its place."""
        place = self._free.pop() if self._free else 3 * len(self._watched)
        if place + 3 > len(self._pairs):
            torch.cuda.synchronize(self._device)  # which may be reading these
            larger = _pinned(2 * len(self._pairs))
            larger[: len(self._pairs)] = self._pairs
            self._pairs = larger
        self._watched[place] = weakref.ref(entry)
        return place

    def point(self, place: int, tensors: Index, copies: Index) -> None:
        """Compare these at a place, both of which the caller keeps."""
        both = zip(tensors[:3], copies[:3], strict=True)
        pairs = [[tensor.data_ptr(), copy.data_ptr(), tensor.shape[0], 0] for tensor, copy in both]
        self._pairs[place : place + 3] = torch.tensor(pairs, dtype=torch.int64, device="cpu")

    def rest(self, place: int) -> None:
        """Compare nothing at a place until something is pointed to there."""
        self._pairs[place : place + 3] = 0

    def remove(self, place: int) -> None:
        """Give a place to others. The garbage collector may call it anywhere."""
        self.rest(place)
        self._watched.pop(place, None)
        self._free.append(place)

    def look(self) -> None:
        """Follow writes, before the product at hand if the answer comes soon.

        Raises:
            PatternChangedError: products have read a former pattern since the write, which is followed now.
        """
        self._mark += 1
        self.looks.add()
        pairs, count = self._pairs.data_ptr(), 3 * (len(self._watched) + len(self._free))
        device = self._device.index
        with nullcontext() if current_device() == device else torch.cuda.device(device):
            _C.arrays_compare(pairs, count, self._mark, current_stream(device))
            self._event.record()
        deadline = time.perf_counter() + PATIENCE
        while not self._event.query() and time.perf_counter() < deadline:
            pass
        if _C.arrays_differ(pairs, count):
            self._follow()

    def _follow(self) -> None:
        self._event.synchronize()
        late = [since < self._mark for entry, since in self._marked() if self._followed(entry)]
        if any(late):
            raise PatternChangedError(
                "pattern was written to in a way that PyTorch does not count, such as tensor.data or a "
                "collective, and products have read the former one since; from now on they read the new one"
            )

    def _marked(self) -> Iterator[tuple[Any, int]]:
        """Yield the entries that differ, and since which look."""
        for place, reference in list(self._watched.items()):
            entry, marks = reference(), self._pairs[place : place + 3, 3]
            if entry is not None and marks.any():
                since = int(marks[marks > 0].min())
                marks.zero_()
                yield entry, since

    def _followed(self, entry: Any) -> bool:
        try:
            return bool(entry.follow_writes())
        except InvalidPatternError:  # of a layer that need not be the one at hand
            entry.distrust()
            return False


@cache
def watch(device: torch.device) -> Watch:
    """Return the watch of a device."""
    return Watch(device)


@torch.inference_mode(False)
def _pinned(count: int) -> Tensor:
    """Allocate rows of ts_array_pair, four 64-bit integers each, in pinned memory that the GPU reads."""
    return torch.zeros(count, 4, dtype=torch.int64, device="cpu", pin_memory=True)
