"""Products on the CPU whose operands lie beside pages that cannot be read or written.

A kernel that touches a byte outside of an operand ends the process. Vectors reach over the ends of lines, so
every operand, the workspace and the pattern's arrays too, ends with a page or begins with one.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from itertools import cycle, product

import pytest
import test_kernels as harness
import torch
from helpers import OPTIONS
from test_cpu_kernels import ROWS, random_pattern, refusal
from test_kernels import CPU, POISON, Guarded, Problem, Row, accepted_layouts, check
from torch import Tensor

from tilesparse import _C, BlockPattern
from tilesparse._checks import BLOCK_SIZES
from tilesparse._runtime.pattern_cache import Prepared, prepared

PAGE = mmap.PAGESIZE
PRIVATE_ANONYMOUS = 0x22


class Area:
    """Memory of some bytes directly before a page without access, or directly behind one."""

    def __init__(self, size: int, at_end: bool, alignment: int = 1) -> None:
        self._pages = -(-max(size, 1) // PAGE) * PAGE
        self._begin = LIBRARY.mmap(None, self._pages + 2 * PAGE, 3, PRIVATE_ANONYMOUS, -1, 0)
        for page in (self._begin, self._begin + PAGE + self._pages):
            assert LIBRARY.mprotect(page, PAGE, 0) == 0
        before = (self._pages - size) // alignment * alignment if at_end else 0
        self.address = self._begin + PAGE + before
        self._bytes = (ctypes.c_byte * size).from_address(self.address)

    def __del__(self) -> None:
        LIBRARY.munmap(self._begin, self._pages + 2 * PAGE)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._bytes, dtype=dtype) if len(self._bytes) else torch.empty(0, dtype=dtype)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_long]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


LIBRARY = _library()


class Bounded(Guarded):
    """Lines of numbers as `Guarded` has them, in an area that ends with the last one."""

    at_end = True

    def __init__(
        self,
        lines: int,
        length: int,
        dtype: torch.dtype,
        *,
        gap: int = 0,
        alignment: int = 0,
        device: torch.device | None = None,
    ) -> None:
        integer, self._poison = POISON[dtype.itemsize]
        self.ld = length + gap
        self._inside = (lines, length), (self.ld, 1), None
        size = max((lines - 1) * self.ld + length, 0) * dtype.itemsize
        self._area = Area(size, self.at_end, alignment or dtype.itemsize)
        self.address = self._area.address
        self.bits = self._area.tensor(integer)
        self.lines = self.bits.view(dtype).as_strided(*self._inside)
        self.poison()


class BoundedPattern:
    """A pattern of the cache with arrays in areas."""

    def __init__(self, entry: Prepared) -> None:
        crow, col, slot, shape, block_shape = entry.index()
        self._areas = []
        for array in (crow, col, slot, *entry.columns()):
            self._areas.append(Area(array.numel() * array.itemsize, Bounded.at_end))
            self._areas[-1].tensor(array.dtype).copy_(array)
        addresses = (area.address for area in self._areas)
        self.descriptor = _C.Pattern(*block_shape, *shape, len(col), *addresses)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_nothing_outside_of_operands_is_touched(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """From decode to chunks of a thread's own, before and behind, and in blocks of every size."""
    if reason := refusal(row):
        pytest.skip(reason)
    layouts = accepted_layouts(row)
    monkeypatch.setattr(harness, "Guarded", Bounded)
    patterns: list[BoundedPattern] = []

    def bounded(row: Row, device: torch.device, pattern: BlockPattern, groups: int) -> BoundedPattern:
        patterns.append(BoundedPattern(prepared(pattern.index_on(device))))
        return patterns[-1]

    monkeypatch.setattr(harness, "entry_of", bounded)
    draw = random.Random(str(row))
    for tokens in (1, 4, 7, 11, 12, 17, 49, 97, 96 * _C.device_info(CPU).multiprocessors + 9):
        shapes = draw.sample(list(product(BLOCK_SIZES, BLOCK_SIZES)), 6 if row.of_8_bits else 2)
        for block_shape, at_end in zip(shapes, cycle((True, False)), strict=False):
            monkeypatch.setattr(Bounded, "at_end", at_end)
            pattern = random_pattern(draw.choice([(1, 1), (3, 2), (2, 9)]), block_shape, 0.6)
            gap, options = draw.choice((0, 1)), draw.choice(OPTIONS[row.op])
            check(row, Problem(pattern, tokens, *draw.choice(layouts), gap=gap, **options))
            patterns.clear()
