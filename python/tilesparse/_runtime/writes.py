"""Writes to patterns on CUDA devices that PyTorch does not count: ``tensor.data``, collectives and the like.

Products read copies, so none computes with half of a write; but the write must be noticed. While a device's
patterns are in use, a kernel compares all of them with their copies, every tenth of a second and on a stream
of its own. Nothing waits for it: a call reads a clock, and the first one after the time begins a comparison
or takes the answer of the last. So a finding is late: products may have read the former pattern, and the call
raises unless the pattern was not used meanwhile.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from array import array
from collections.abc import Iterable
from functools import cache
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._checks import Index
from ..errors import InvalidPatternError, PatternChangedError

INTERVAL = 0.1  # seconds between comparisons
PAUSE = 1e-3  # seconds between questions for the answer of one, each of which takes as long as several calls
ROW = 4  # 64-bit integers of a ts_array_pair


class Comparison:
    """Comparisons on a CUDA device, one at a time, on a stream of their own.

    The GPU says in memory of the host that one has ended: to ask CUDA would spoil a graph that another thread
    captures. Rows are copied for each comparison, so that they may change meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Among those of high priority, of which programs have few: streams of a pool have several users.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._asked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._memory = self._compared = _pinned(64)
        self._rows = 0
        # A pair that always differs, and its numbers. It is compared behind all others.
        self._end = _pinned(2)
        numbers = self._end.data_ptr() + 8 * ROW
        self._end_rows = (ctypes.c_int64 * (2 * ROW)).from_address(self._end.data_ptr())
        self._end_rows[:] = [numbers, numbers + 8, 1, 0, 0, 1, 0, 0]

    def reads(self, tensors: Iterable[Tensor]) -> None:
        """Have the memory of tensors outlast comparisons that were begun."""
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def reserve(self, rows: int) -> None:
        """Take so many rows from the next comparison on."""
        if rows > len(self._memory):
            self._memory = _pinned(2 * rows)

    def begin(self, pairs: array[int], entries: Iterable[Any]) -> bool:
        """Compare pairs, behind what the current stream was asked for and what entries have yet to write.

        Return False if it is impossible now.
        """
        torch.cuda.current_stream(self._device).record_event(self._asked)
        with torch.cuda.stream(self._stream):
            if torch.cuda.is_current_stream_capturing():  # for another user of this stream
                return False
            self._stream.wait_event(self._asked)
            for entry in entries:
                entry.wait()
            self._compared, self._rows = self._memory, len(pairs) // ROW
            content = pairs.tobytes()  # at once, for rows may be removed at any time
            ctypes.memmove(self._compared.data_ptr(), content, len(content))
            self._end_rows[3] = 0
            for memory, rows in ((self._compared, self._rows), (self._end, 1)):
                _C.arrays_compare(memory.data_ptr(), rows, 1, self._stream.cuda_stream)
        return True

    def answer(self) -> list[int] | None:
        """Return the rows that differ; None before the comparison has ended."""
        if not _C.arrays_differ(self._end.data_ptr(), 1):
            return None
        address = self._compared.data_ptr()
        if not _C.arrays_differ(address, self._rows):
            return []
        numbers = (ctypes.c_int64 * (ROW * self._rows)).from_address(address)
        return [row for row, mark in enumerate(numbers[ROW - 1 :: ROW]) if mark]


class Watch:
    """The patterns of one device that are compared with their copies.

    Attributes:
        clock: says when to look next.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.clock = _C.Clock()
        self._comparison = comparison
        self._pairs = array("q")
        self._free: list[int] = []
        self._watched: dict[int, weakref.ref[Any]] = {}  # by the first of three rows
        self._under_way = False
        # When the last comparison began, and the one before, which found what was unchanged until then.
        self._begun = self._begun_before = -math.inf

    def add(self, entry: Any) -> int:
        """Watch what is kept of a pattern, once it was pointed to; return its place."""
        place = self._free.pop() if self._free else 3 * len(self._watched)
        if ROW * place == len(self._pairs):
            self._pairs.extend([0] * (3 * ROW))
            self._comparison.reserve(place + 3)
        self._watched[place] = weakref.ref(entry)
        return place

    def point(self, place: int, tensors: Index, copies: Index) -> None:
        """Compare these at a place, both of which the caller keeps."""
        both = list(zip(tensors[:3], copies[:3], strict=True))
        self._comparison.reads(tensor for pair in both for tensor in pair)
        rows = [(tensor.data_ptr(), copy.data_ptr(), tensor.shape[0], 0) for tensor, copy in both]
        self._pairs[ROW * place : ROW * (place + 3)] = array("q", [number for row in rows for number in row])

    def rest(self, place: int) -> None:
        """Compare nothing at a place until something is pointed to there."""
        self._pairs[ROW * place : ROW * (place + 3)] = array("q", [0] * (3 * ROW))

    def remove(self, place: int) -> None:
        """Give a place to others. The garbage collector may call it anywhere."""
        self.rest(place)
        self._watched.pop(place, None)
        self._free.append(place)

    def use(self, entry: Any) -> None:
        """Note that a product uses a pattern, and look for writes if it is time to.

        Raises:
            PatternChangedError: products may have read a former pattern since a write, which is followed now.
        """
        now = monotonic()
        if now >= self.clock.due:
            self._look(now)
        entry.use.last = now

    def _look(self, now: float) -> None:
        if self._under_way:
            differing = self._comparison.answer()
            if differing is None:
                self.clock.due = now + PAUSE
                return
            self._under_way = False
            self.clock.due = self._begun + INTERVAL
            since, self._begun_before = self._begun_before, self._begun
            self._follow(differing, since, now)
        if now >= self._begun + INTERVAL:
            self._begin(now)

    def _begin(self, now: float) -> None:
        entries = [entry for reference in list(self._watched.values()) if (entry := reference()) is not None]
        recent = (entry for entry in entries if entry.noted >= self._begun)
        self._under_way = self._comparison.begin(self._pairs, recent)
        self.clock.due = now + PAUSE
        if self._under_way:
            self._begun = now

    def _follow(self, differing: list[int], since: float, now: float) -> None:
        """Follow writes that a comparison has found; the one before began at ``since``."""
        late, invalid = [], None
        for place in dict.fromkeys(row - row % 3 for row in differing):
            entry = self._watched.get(place, lambda: None)()
            if entry is None or entry.noted >= self._begun:
                continue  # what is known of was written while it was compared
            unchanged = max(since, entry.noted)
            try:
                found = entry.follow_writes()
            except InvalidPatternError as error:
                found, invalid = True, error
                entry.distrust()
            if found and entry.use.last > unchanged:
                late.append(unchanged)
        if late:
            first, last = (f"{1e3 * (now - at):.0f}" for at in (min(late), self._begun))
            raise PatternChangedError(
                f"pattern was written to between {first} and {last} ms ago in a way that PyTorch does not "
                "count, such as tensor.data or a collective, and products may have read the former one "
                "since; from now on they read the new one. BlockPattern.update_ is followed at once"
            ) from invalid


@cache
def watch(device: torch.device) -> Watch:
    """Return the watch of a device."""
    return Watch(Comparison(device))


@torch.inference_mode(False)
def _pinned(count: int) -> Tensor:
    """Allocate rows of ts_array_pair, four 64-bit integers each, in pinned memory that the GPU reads."""
    return torch.zeros(count, ROW, dtype=torch.int64, device="cpu", pin_memory=True)
