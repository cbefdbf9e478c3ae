"""Products of 8 bits on the CPU whose operands lie beside pages that cannot be read or written.

A kernel that touches a byte outside of an operand ends the process. Vectors reach over the ends of lines, so
every operand, the workspace and the pattern's arrays too, ends with a page or begins with one.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from itertools import product

import pytest
import test_eight_bits_cpu as eight_bits
import torch
from helpers import OPTIONS
from test_cpu_kernels import random_pattern
from test_eight_bits_cpu import RESULTS, ROWS, Operands, Problem, Row, check
from test_kernels import CPU, POISON
from torch import Tensor

from tilesparse import _C, BlockPattern
from tilesparse._checks import BLOCK_SIZES
from tilesparse._runtime.device import DDS_NT
from tilesparse._runtime.pattern_cache import prepared

PAGE = mmap.PAGESIZE
PRIVATE_ANONYMOUS = 0x22
ALIGNMENT = 64  # of a workspace


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


class Bounded:
    """Lines of numbers as `Guarded` has them, in an area that ends with the last one."""

    at_end = True

    def __init__(self, lines: int, length: int, dtype: torch.dtype, *, gap: int = 0) -> None:
        integer, self._poison = POISON[dtype.itemsize]
        self.ld = length + gap
        self._inside = (lines, length), (self.ld, 1)
        self._area = Area(((lines - 1) * self.ld + length) * dtype.itemsize, self.at_end)
        self.address = self._area.address
        self.bits = self._area.tensor(integer)
        self.lines = self.bits.view(dtype).as_strided(*self._inside)
        self.poison()

    def poison(self) -> None:
        self.bits.fill_(self._poison)

    def is_whole_outside(self) -> bool:
        bits = self.bits.clone()
        bits.as_strided(*self._inside).fill_(self._poison)
        return bool((bits == self._poison).all())


def bounded_pattern(pattern: BlockPattern, at_end: bool) -> tuple[_C.Pattern, list[Area]]:
    """The pattern with arrays in areas, and what keeps them."""
    index = prepared(pattern.index_on(torch.device("cpu"))).index()
    areas = []
    for array in index[:3]:
        areas.append(Area(array.numel() * array.itemsize, at_end))
        areas[-1].tensor(array.dtype).copy_(array)
    addresses = (area.address for area in areas)
    return _C.Pattern(*pattern.block_shape, *pattern.shape, pattern.nnz, *addresses), areas


def run(operands: Operands) -> Tensor:
    """Does what `test_eight_bits_cpu.run` does, with a workspace in an area."""
    pattern, _arrays = bounded_pattern(operands.problem.pattern, Bounded.at_end)
    made = eight_bits.product_of(operands, pattern)
    workspace = Area(made.workspace_size(), Bounded.at_end, ALIGNMENT)
    eight_bits.call(made, operands, workspace.address)
    return operands.by_tokens("y")


@pytest.fixture(params=["end", "begin"], autouse=True)
def _edge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "at_end", request.param == "end")
    monkeypatch.setattr(eight_bits, "Guarded", Bounded)
    monkeypatch.setattr(eight_bits, "run", run)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_nothing_outside_of_operands_is_touched(row: Row) -> None:
    """From decode to chunks of a thread's own, and in blocks of every size."""
    if reason := eight_bits.refusal(row):
        pytest.skip(reason)
    draw = random.Random(str(row))
    for tokens in (1, 4, 7, 11, 12, 17, 49, 97, 96 * _C.device_info(CPU).multiprocessors + 9):
        for block_shape in draw.sample(list(product(BLOCK_SIZES, BLOCK_SIZES)), 6):
            pattern = random_pattern(draw.choice([(1, 1), (3, 2), (2, 9)]), block_shape, 0.6)
            layout, gap, options = draw.choice((0, 1)), draw.choice((0, 1)), draw.choice(OPTIONS[DDS_NT])
            check(Operands(row, Problem(pattern, tokens, draw.choice(RESULTS), layout, gap, **options)))
