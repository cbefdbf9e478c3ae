"""Plans of every kernel of the library that walks one: each block exactly once, no tile twice.

The layout is that of cuda/common/plan.h, strip_plan.h or list_plan.h, whether the host or the GPU made the
plan. A library without CUDA kernels has no plans to check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEVICES, PATTERNS, make_pattern, seeded, shuffled
from torch import Tensor

from tilesparse import _C, BlockPattern
from tilesparse._checks import BLOCK_SIZES, DTYPES, QUANTIZED
from tilesparse._runtime.device import DDS_NN, DDS_NT, SDD_TN
from tilesparse._runtime.pattern_cache import Prepared, prepared
from tilesparse.errors import InvalidArgumentError, UnsupportedError

BLOCK_SHAPES = list(product(BLOCK_SIZES, BLOCK_SIZES))
# The index of the first kernel for each plan shape and set of products: later ones are for groups.
KERNELS = {
    (kernel.plan, kernel.ops): index
    for index, kernel in reversed(list(enumerate(_C.kernels())))
    if kernel.plan
}
needs_plans = pytest.mark.skipif(not KERNELS, reason="this library has no kernel with a plan")


def build(pattern: BlockPattern, kernel: int, op: int, device: str, groups: int = 1) -> dict[str, np.ndarray]:
    """The sections of a plan by name; of one weight, or of several below each other."""
    builder = build_on_host if device == "cpu" else build_on_gpu
    words = builder(pattern, kernel, op, groups)
    tiles, steps, group_rows, pieces, *offsets, total = words[:10].tolist()
    assert total == len(words)
    assert words[11] == _C.plan_key(prepared_on("cpu", pattern, groups).descriptor, kernel, op) != 0
    assert all(offset % 4 == 0 and 16 <= offset <= total for offset in offsets)
    tile, ranks = _C.kernels()[kernel].plan >> 12 & 0xFFF, _C.kernels()[kernel].plan >> 24 & 0xF
    shapes: dict[str, tuple[int, ...]]
    if walks_lists(kernel):
        shapes = {
            "tiles": (tiles, 4),
            "rows": (0,),
            "masks": (tiles, 16, 8),
            "k": (tiles, 18),
            "slots": (tiles, 16, 8),
        }
    elif walks_strips(kernel):
        shapes = strip_shapes(tiles, units=pieces, unit_blocks=group_rows)
        if groups > 1:
            offsets.append(int(words[10]))
            shapes["starts"] = (groups + 1,)
    elif op == SDD_TN:
        shapes = {
            "tiles": (tiles,),
            "rows": (tiles, group_rows),
            "masks": (tiles, tile // 16),
            "k": (tiles, pieces),
            "slots": (tiles, pieces, group_rows),
        }
    elif is_aligned(_C.kernels()[kernel].plan):
        offsets.append(int(words[10]))
        shapes = {
            "tiles": (tiles, 2),
            "rows": (tiles, ranks, group_rows // ranks),
            "masks": (steps, ranks, tile // ranks // 64, 2),
            "k": (steps,),
            "slots": (pattern.nnz * squares_of(pattern),),
            "starts": (steps * ranks + 1,),
            "header": (16,),
        }
        offsets.append(0)
    else:
        shapes = {
            "tiles": (tiles, 2),
            "rows": (tiles, ranks, group_rows),
            "masks": (steps, ranks),
            "k": (steps, ranks, pieces),
            "slots": (steps, ranks, pieces, group_rows),
        }
    return sections_of(words, offsets, shapes)


def prepared_on(device: str, pattern: BlockPattern, groups: int = 1) -> Prepared:
    """Return a pattern prepared for that device; its memory lasts as long as the pattern."""
    one = prepared(pattern.index_on(torch.device(device)))
    return one if groups == 1 else one.grouped(groups)


def build_on_host(pattern: BlockPattern, kernel: int, op: int, groups: int = 1) -> np.ndarray:
    descriptor = prepared_on("cpu", pattern, groups).descriptor
    words = np.full(_C.plan_size(descriptor, kernel, op) // 4, -7, dtype=np.int32)
    _C.plan_build(descriptor, kernel, op, words.ctypes.data, words.nbytes)
    return words


def build_on_gpu(pattern: BlockPattern, kernel: int, op: int, groups: int = 1) -> np.ndarray:
    """Built twice over different memory, of which no more than announced may be written."""
    descriptor = prepared_on("cuda:0", pattern, groups).descriptor
    sizes = _C.plan_device_size(descriptor, kernel, op)
    plans = []
    for fill in (-7, 0x5A5A5A5A):
        plan = guarded(sizes[0], -7)
        workspace = guarded(sizes[1], fill)
        addresses = (plan.data_ptr(), sizes[0], workspace.data_ptr(), sizes[1])
        _C.plan_device_build(descriptor, kernel, op, *addresses, torch.cuda.current_stream().cuda_stream)
        assert (plan[sizes[0] // 4 :] == -7).all() and (workspace[sizes[1] // 4 :] == fill).all()
        plans.append(plan[: sizes[0] // 4].cpu())
    assert torch.equal(*plans), "two builds differ"
    return plans[0].numpy()


def guarded(size: int, fill: int) -> Tensor:
    """Device memory of so many bytes and some more."""
    return torch.full((size // 4 + 1024,), fill, dtype=torch.int32, device="cuda")


def sections_of(
    words: np.ndarray, offsets: list[int], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    sections = {}
    for (name, shape), begin in zip(shapes.items(), offsets, strict=True):
        end = begin + math.prod(shape)
        assert end <= len(words)
        sections[name] = words[begin:end].reshape(shape)
    return sections


def is_aligned(key: int) -> bool:
    """Return True for the key of plans of aligned steps."""
    return key >> 28 == 1


def squares_of(pattern: BlockPattern) -> int:
    """As many as plans of aligned steps cut a block into."""
    return max(pattern.block_shape) // min(pattern.block_shape)


def walks_strips(kernel: int) -> bool:
    """Return True if the kernel's plans of sdd are those of cuda/common/strip_plan.h."""
    return _C.kernels()[kernel].plan >> 28 == 2


def walks_lists(kernel: int) -> bool:
    """Return True if the kernel's plans are those of cuda/common/list_plan.h."""
    return _C.kernels()[kernel].plan >> 28 == 3


def strip_shapes(tiles: int, units: int, unit_blocks: int) -> dict[str, tuple[int, ...]]:
    return {
        "tiles": (tiles, 4),
        "rows": (0,),
        "masks": (0,),
        "k": (tiles, units),
        "slots": (tiles, 2, units // 2, unit_blocks),
    }


def takes_bytes(index: int) -> bool:
    """Return True if both factors of a kernel have 8 bits."""
    return any(_C.kernels()[index].dtypes >> dtype & 1 for dtype in QUANTIZED.values())


def takes_float32(index: int) -> bool:
    return bool(_C.kernels()[index].dtypes >> DTYPES[torch.float32] & 1)


def computes(pattern: BlockPattern, index: int, op: int) -> bool:
    """Return True if a kernel accepts a product on that pattern."""
    kernel = _C.kernels()[index]
    dtype = next(bit for bit in range(7) if kernel.dtypes >> bit & 1)
    h100 = _C.DeviceInfo(1, 90, 132, 232448)  # runs every kernel there is
    descriptor = prepared_on("cpu", pattern).descriptor
    result: dict[str, Any] = {}
    if takes_bytes(index):  # a kernel for 9.0 writes the dtype that its name has
        written = DTYPES[torch.bfloat16] if "_bf16_" in kernel.name else DTYPES[torch.float32]
        result = {"granularity": 3, "result_dtype": written}
    product = _C.Product(
        descriptor, op, dtype, 1, 1024, precision=kernel.precision, kernel=index + 1, **result
    )
    try:
        product.select(h100)
    except UnsupportedError:
        return False
    return True


@needs_plans
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN])
@pytest.mark.parametrize("name", PATTERNS)
def test_dds_plans_visit_each_block_once(name: str, op: int, device: str) -> None:
    checked = 0
    for ((key, ops), index), block_shape in product(KERNELS.items(), BLOCK_SHAPES):
        pattern = make_pattern(name, (7, 10), block_shape)
        if ops >> op & 1 and not is_aligned(key) and computes(pattern, index, op):
            checked += 1
            plan = build(pattern, index, op, device)
            check_dds_plan(pattern if op == DDS_NT else pattern.transpose(), plan, key)
    assert checked


def check_tiles(pattern: BlockPattern, plan: dict[str, np.ndarray]) -> None:
    """Each block row is in one tile, each step in one, and longer tiles come first."""
    written = plan["rows"][plan["rows"] >= 0]
    assert sorted(written) == list(range(pattern.grid[0]))
    first, count = plan["tiles"].T
    assert (first == np.r_[0, np.cumsum(count)[:-1]]).all() and count.sum() == len(plan["masks"])
    assert all(before >= after for before, after in pairwise(count))


def tile_of_steps(plan: dict[str, np.ndarray]) -> list[int]:
    count = plan["tiles"][:, 1]
    return [int(tile) for tile in np.repeat(np.arange(len(count)), count)]


def check_dds_plan(pattern: BlockPattern, plan: dict[str, np.ndarray], key: int) -> None:
    """Checks a plan against the pattern as seen from the output of the product."""
    step = key & 0xFFF
    row_block, col_block = pattern.block_shape
    check_tiles(pattern, plan)

    visited: dict[tuple[int, int], int] = {}
    ranks = plan["masks"].shape[1]
    for s, tile in enumerate(tile_of_steps(plan)):
        masks = [visit_step(visited, plan, tile, s, rank, row_block) for rank in range(ranks)]
        assert any(masks), "a step without a block"
        assert plan["masks"][s].view(np.uint32).tolist() == masks

    rows, cols = pattern.block_indices()
    expected = {
        (row, col * col_block + offset): slot
        for slot, (row, col) in enumerate(zip(rows.tolist(), cols.tolist(), strict=True))
        for offset in range(0, col_block, step)
    }
    assert visited == expected


def visit_step(
    visited: dict[tuple[int, int], int],
    plan: dict[str, np.ndarray],
    tile: int,
    s: int,
    rank: int,
    row_block: int,
) -> int:
    """Notes the blocks that one rank multiplies in a step, and gives their mask."""
    mask = 0
    for piece, k in enumerate(plan["k"][s, rank]):
        slots = plan["slots"][s, rank, piece]
        assert k >= 0 or (slots == -1).all()
        assert k < 0 or (slots >= 0).any(), "a column without a block"
        for in_group, slot in enumerate(slots):
            if slot >= 0:
                place = (int(plan["rows"][tile, rank, in_group]), int(k))
                assert place not in visited
                visited[place] = int(slot)
                mask |= mask_of(piece, in_group, row_block, len(plan["k"][s, rank]))
    return mask


def mask_of(piece: int, in_group: int, row_block: int, pieces: int) -> int:
    """Bit 4 i + j for the 16-feature strips i and the quarters j of the step that a block covers."""
    strips = range(in_group * row_block // 16, (in_group + 1) * row_block // 16)
    first = piece * 4 // pieces  # of a quarter, or half of one
    quarters = range(first, first + max(4 // pieces, 1))
    return sum(1 << 4 * i + j for i in strips for j in quarters)


@needs_plans
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN])
@pytest.mark.parametrize("name", PATTERNS)
def test_aligned_plans_visit_each_block_once(name: str, op: int, device: str) -> None:
    for ((key, ops), index), (features, k) in product(KERNELS.items(), BLOCK_SHAPES):
        if not is_aligned(key) or not ops >> op & 1:
            continue
        if min(features, k) != 16 if takes_float32(index) else features > min(k, 32):
            continue
        if features == 16 and takes_bytes(index):  # whose products have 32 of k
            continue
        for grid in ((7, 10), (131, 29)) if k in (features, 64) else ((7, 10),):
            pattern = make_pattern(name, grid, (features, k) if op == DDS_NT else (k, features))
            assert computes(pattern, index, op)
            plan = build(pattern, index, op, device)
            check_aligned_plan(pattern if op == DDS_NT else pattern.transpose(), plan, key)


def check_aligned_plan(pattern: BlockPattern, plan: dict[str, np.ndarray], key: int) -> None:
    """Checks a plan against the pattern as seen from the output of the product."""
    side, step, fill = min(pattern.block_shape), int(plan["header"][3]), int(plan["header"][12])
    percent, unevenness, some = fill_of(pattern, plan["rows"], key & 0xFFF)
    assert fill == int(percent)
    crowds = fill > 36 or (plan["rows"].shape[1] == 1 and unevenness > 1.6 and some < 0.9)
    assert step == (key & 0xFFF) // (2 if crowds else 1)
    across, along = (length // side for length in pattern.block_shape)
    columns, strips, squares = step // side, side // 16, squares_of(pattern)
    square_at = {
        (row * across + i, column * along + j): slot * squares + i + j
        for slot, (row, column) in enumerate(
            zip(*(indices.tolist() for indices in pattern.block_indices()), strict=True)
        )
        for i, j in product(range(across), range(along))
    }
    check_tiles(pattern, plan)
    lengths = np.r_[np.bincount(pattern.block_indices()[0], minlength=pattern.grid[0]), 0]  # of row -1: 0
    blocks = lengths[plan["rows"]].sum((1, 2))
    assert all(before >= after for before, after in pairwise(zip(plan["tiles"][:, 1], blocks, strict=True)))
    assert (plan["k"] % step == 0).all()

    slots: list[int] = []
    for s, tile in enumerate(tile_of_steps(plan)):
        assert s == plan["tiles"][tile, 0] or plan["k"][s] > plan["k"][s - 1]
        before = len(slots)
        for rank, rows in enumerate(plan["rows"][tile].tolist()):
            start = len(slots)
            assert plan["starts"][s * len(plan["rows"][tile]) + rank] == start
            expected = np.zeros_like(plan["masks"][s, rank]).view(np.uint32)
            for place, row in enumerate(row * across + i for row in rows for i in range(across)):
                for strip in range(place * strips, (place + 1) * strips):
                    expected[strip // 4, 1] |= len(slots) - start << 8 * (strip % 4)
                for column in range(columns):
                    slot = square_at.get((row, plan["k"][s] // side + column))
                    if slot is None:
                        continue
                    slots.append(slot)
                    for strip, k16 in product(range(place * strips, (place + 1) * strips), range(strips)):
                        expected[strip // 4, 0] |= 1 << 4 * (column * strips + k16) + strip % 4
            assert (plan["masks"][s, rank].view(np.uint32) == expected).all()
        assert len(slots) > before, "a step without a block"
    assert plan["starts"][-1] == len(slots)
    assert plan["slots"].tolist() == slots and sorted(slots) == list(range(pattern.nnz * squares))


def fill_of(pattern: BlockPattern, rows: np.ndarray, step: int) -> tuple[float, float, float]:
    """How many places for squares are taken of a rank's steps that have any: in percent, in the mean over
    squares; how many times that in the mean over steps; and how many of all steps these are."""
    side = min(pattern.block_shape)
    across, along = (length // side for length in pattern.block_shape)
    mask = np.zeros((pattern.grid[0] + 1, pattern.grid[1]), dtype=bool)  # of row -1: nothing
    mask[tuple(indices.numpy() for indices in pattern.block_indices())] = True
    squares = np.repeat(mask, along, axis=1) * across
    squares = np.pad(squares, ((0, 0), (0, -squares.shape[1] % (step // side))))
    in_steps = squares[rows].sum(2).reshape(*rows.shape[:2], -1, step // side).sum(3)
    if not in_steps.any():
        return 0, 0, 0
    of_square = (in_steps**2).sum() / in_steps.sum()
    percent = of_square * 100 / (rows.shape[2] * across * step // side)
    return percent, of_square / in_steps[in_steps > 0].mean(), (in_steps > 0).mean()


@needs_plans
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "density", "step"), [("random", 0.1, 128), ("random", 0.5, 64), ("banded", 0.1, 64)]
)
def test_steps_are_narrow_where_blocks_crowd(name: str, density: float, step: int, device: str) -> None:
    pattern = BlockPattern.random((2048, 2048), block_shape=(16, 16), density=density, generator=seeded(0))
    if name == "banded":
        rows, cols = np.indices((128, 128))
        pattern = BlockPattern.from_block_mask(torch.from_numpy(abs(rows - cols) < 6), block_shape=16)
    aligned = {index: key & 0xFFF for (key, _), index in KERNELS.items() if is_aligned(key)}
    assert aligned
    for index, whole in aligned.items():
        assert build(pattern, index, DDS_NT, device)["header"][3] == step * whole // 128


@needs_plans
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grid", [(7, 10), (70, 37)])
@pytest.mark.parametrize("name", PATTERNS)
def test_sdd_plans_write_each_block_once(name: str, grid: tuple[int, int], device: str) -> None:
    checked = 0
    for ((_, ops), index), block_shape in product(KERNELS.items(), BLOCK_SHAPES):
        if grid != (7, 10) and (block_shape[0] != 32 or not walks_strips(index)):
            continue  # more strips than a neighbourhood are enough
        pattern = make_pattern(name, grid, block_shape)
        if ops >> SDD_TN & 1 and computes(pattern, index, SDD_TN):
            checked += 1
            check = check_strip_plan if walks_strips(index) else check_sdd_plan
            check = check_list_plan if walks_lists(index) else check
            check(pattern, build(pattern, index, SDD_TN, device))
    assert checked


@needs_plans
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("grid", "density"), [((131, 290), 0.02), ((131, 290), 0.3), ((40, 40), 1.0)])
def test_list_plans_fill_tiles(grid: tuple[int, int], density: float, device: str) -> None:
    """Tiles have all of the blocks or units that they could, but for the last one of each group."""
    shape = (16 * grid[0], 16 * grid[1])
    random = BlockPattern.random(shape, block_shape=(16, 16), density=density, generator=seeded(1))
    pattern = shuffled(random)
    for index in KERNELS.values():
        if walks_lists(index):
            plan = build(pattern, index, SDD_TN, device)
            check_list_plan(pattern, plan)
            _, of_x, blocks, _ = plan["tiles"].T
            group = min(max(round(math.sqrt(32768 / pattern.density) / 64), 1), 7)
            units = -(-shape[0] // 64)
            groups = -(-units // group)
            partial = (blocks < 16 * 8) & (of_x < 18 - -(-units // groups))
            assert np.count_nonzero(partial) <= groups


@needs_plans
@pytest.mark.parametrize("device", DEVICES)
def test_strip_plans_leave_no_wide_block_alone(device: str) -> None:
    checked = 0
    for grid, density in product(((40, 10), (10, 40), (24, 24)), (0.1, 0.5)):
        generator = torch.Generator().manual_seed(1)
        shape = (128 * grid[0], 128 * grid[1])
        pattern = BlockPattern.random(shape, block_shape=(128, 128), density=density, generator=generator)
        for (_, ops), index in KERNELS.items():
            if ops >> SDD_TN & 1 and walks_strips(index):
                checked += 1
                tiles = len(build(pattern, index, SDD_TN, device)["tiles"])
                # One may remain in a row or column that nothing crosses.
                assert tiles <= pattern.nnz / 2 + (4 if density == 0.1 else 1)
    assert checked


def check_sdd_plan(pattern: BlockPattern, plan: dict[str, np.ndarray]) -> None:
    row_block, col_block = pattern.block_shape
    written = {}
    for count, rows, masks, k, slots in zip(*plan.values(), strict=True):
        assert 0 < count <= len(slots)
        assert (k[count:] == -1).all() and (slots[count:] == -1).all()
        expected_masks = [0] * len(masks)
        for piece, in_group in product(range(count), range(len(rows))):
            slot = int(slots[piece, in_group])
            if slot < 0:
                continue
            assert slot not in written
            written[slot] = (int(rows[in_group]), int(k[piece]) // col_block)
            for strip in range(in_group * row_block // 16, (in_group + 1) * row_block // 16):
                expected_masks[strip] |= ((1 << col_block // 16) - 1) << piece * col_block // 16
        assert masks.tolist() == expected_masks
        assert all((slots[piece] >= 0).any() for piece in range(count)), "a column without a block"
    rows, cols = pattern.block_indices()
    assert written == dict(enumerate(zip(rows.tolist(), cols.tolist(), strict=True)))


def check_list_plan(pattern: BlockPattern, plan: dict[str, np.ndarray]) -> None:
    """Each block is in one warp's list, which says where in the tile's units its features are."""
    block, unit = pattern.block_shape[0], 64
    rows, cols = pattern.block_indices()
    places = list(zip(rows.tolist(), cols.tolist(), strict=True))
    written = []
    for (of_y, of_x, blocks, of_warp), masks, k, lists in zip(
        *(plan[name] for name in ("tiles", "masks", "k", "slots")), strict=True
    ):
        count = lists.shape[1]
        assert min(of_y, of_x) > 0 and of_y + of_x <= len(k) and 0 < of_warp <= count
        assert (k[: of_y + of_x] % unit == 0).all() and (k[of_y + of_x :] == -1).all()
        assert len(set(k[:of_y])) == of_y and len(set(k[of_y : of_y + of_x])) == of_x
        slots = lists[:, :of_warp].reshape(-1)
        assert (slots[:blocks] >= 0).all() and (slots[blocks:] == -1).all()
        assert (lists[:, of_warp:] == -1).all()
        assert (masks[lists < 0] == 0).all()
        assert blocks > (of_warp - 1) * len(lists), "warps could have fewer"
        seen = set()
        for warp, (own_masks, own) in enumerate(zip(masks.view(np.uint32), lists, strict=True)):
            before = None
            for mask, slot in zip(own_masks.tolist(), own.tolist(), strict=True):
                if slot < 0:
                    continue
                x, y = mask & 0xFFFF, mask >> 16 & 0x7FFF  # in 16 features of the tile's units
                assert of_y <= x // 4 < of_y + of_x and y // 4 < of_y, warp
                place = (k[y // 4] + y % 4 * 16, k[x // 4] + x % 4 * 16)
                assert place == (places[slot][0] * block, places[slot][1] * block)
                assert mask >> 31 == (place[0] != before)
                before = place[0]
                seen |= {y // 4, x // 4}
                written.append(slot)
        assert len(seen) == of_y + of_x, "a unit without a block"
    assert sorted(written) == list(range(pattern.nnz))


def check_strip_plan(pattern: BlockPattern, plan: dict[str, np.ndarray]) -> None:
    """Check that each part of a block, cut by a strip and a unit, is in one half of one tile, in place."""
    strip, window, most_features = 64, 256, 576
    row_block, col_block = pattern.block_shape
    unit = 2 * window // plan["k"].shape[-1]
    cols_per_unit = max(1, unit // col_block)
    rows, cols = pattern.block_indices()
    places = list(zip(rows.tolist(), cols.tolist(), strict=True))
    written = set()
    for tile, (first, second, units, begin) in enumerate(plan["tiles"].tolist()):
        k = plan["k"][tile].tolist()
        strips = [first] if second < 0 else [first, second]
        swapped = begin < 0
        assert all(x % unit == 0 and x >= 0 for x in k[:units]) and set(k[units:]) <= {-1}
        assert strip * len(strips) + unit * max(units, begin) <= most_features
        assert not swapped or (units <= window // unit and strip == unit <= min(pattern.block_shape))
        for half, feature, start in ((0, first, 0), (1, strips[-1], max(begin, 0))):
            for (i, block), slot in np.ndenumerate(plan["slots"][tile, half]):
                if slot < 0:
                    continue
                row, col = places[slot]
                y = feature + block // cols_per_unit * row_block
                x = k[start + i] + block % cols_per_unit * col_block
                if swapped:
                    y, x = x, y
                assert y // row_block == row and x // col_block == col and start + i < units
                assert (slot, y, x) not in written
                written.add((int(slot), y, x))
    expected = {
        (slot, row * row_block + y, col * col_block + x)
        for slot, (row, col) in enumerate(places)
        for y in range(0, row_block, strip)
        for x in range(0, col_block, unit)
    }
    assert written == expected


def structured(name: str, rows: int, cols: int) -> BlockPattern:
    """Patterns in blocks of 32 in whose rows there is something to find, and one without."""
    r, c = torch.arange(rows)[:, None], torch.arange(cols)[None]
    draw = torch.rand(rows, cols, generator=seeded(5))
    mask = {
        "random": draw < 0.25,
        "banded": (r * cols / rows - c).abs() <= cols / 8,
        "block-diagonal": r * 4 // rows == c * 4 // cols,
        "four alike": (draw[: rows // 4] < 0.25).repeat(4, 1),
        "power law": draw < (0.25 * rows**0.7 / (r + 1) ** 0.7),
    }[name]
    order = torch.randperm(rows, generator=seeded(6)) if name != "banded" else torch.arange(rows)
    return shuffled(BlockPattern.from_block_mask(mask[order], block_shape=(32, 32)))


def cost(plan: dict[str, np.ndarray], op: int, kernel: int) -> int:
    """Return a number that the time grows with: features loaded, products, steps or tiles."""
    if op == SDD_TN and walks_strips(kernel):
        _, second, units, _ = plan["tiles"].T
        return int((64 * (1 + (second >= 0)) + units * 512 // plan["k"].shape[-1]).sum())
    if walks_lists(kernel):
        return int(plan["tiles"][:, :2].sum())
    if is_aligned(_C.kernels()[kernel].plan):
        return int(np.count_nonzero(quarters_of(plan["masks"][..., 0])))
    return len(plan["masks"])


def quarters_of(masks: np.ndarray) -> np.ndarray:
    """For each mask the bits of its 16-feature strips, 16 of k by 16."""
    return masks.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 0xF


@pytest.mark.gpu
@needs_plans
@pytest.mark.parametrize("name", ["random", "banded", "block-diagonal", "four alike", "power law"])
def test_plans_of_the_gpu_are_as_good(name: str) -> None:
    pattern = structured(name, 224, 128)
    for ((_, ops), kernel), op in product(KERNELS.items(), (DDS_NT, DDS_NN, SDD_TN)):
        if ops >> op & 1 and computes(pattern, kernel, op):
            ours, hosts = (cost(build(pattern, kernel, op, device), op, kernel) for device in ("cuda", "cpu"))
            assert ours <= 1.03 * hosts, f"{_C.kernels()[kernel].name}: {ours}, on the host {hosts}"


@pytest.mark.gpu
@needs_plans
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("grid", [(7, 10), (131, 29), (33, 1100)])
def test_transpose_on_the_gpu(name: str, grid: tuple[int, int]) -> None:
    pattern = make_pattern(name, grid, (16, 64))
    descriptor = prepared_on("cuda:0", pattern).descriptor
    expected = prepared_on("cpu", pattern).columns()
    results = [guarded(4 * len(array), -7) for array in expected]
    size = _C.pattern_device_transpose_size(descriptor)
    workspace = guarded(size, -7)
    addresses = [array.data_ptr() for array in (*results, workspace)]
    _C.pattern_device_transpose(descriptor, *addresses, size, torch.cuda.current_stream().cuda_stream)
    for result, array in zip(results, expected, strict=True):
        assert torch.equal(result[: len(array)].cpu(), array) and (result[len(array) :] == -7).all()
    assert (workspace[size // 4 :] == -7).all()


@pytest.mark.gpu
@needs_plans
def test_bad_memory_is_refused() -> None:
    pattern = make_pattern("random 50%", (7, 10), (32, 32))
    host, device = (prepared_on(name, pattern).descriptor for name in ("cpu", "cuda:0"))
    kernel, op = next(i for (_, ops), i in KERNELS.items() if ops >> DDS_NT & 1), DDS_NT
    sizes = _C.plan_device_size(device, kernel, op)
    plan, workspace = (guarded(size, -7) for size in sizes)
    good: dict[str, Any] = {
        "pattern": device,
        "plan": plan.data_ptr(),
        "plan_bytes": sizes[0],
        "workspace": workspace.data_ptr(),
        "workspace_bytes": sizes[1],
    }
    on_host = torch.zeros(sizes[0])
    for message, bad in (
        ("row_ptr must be in memory of a CUDA device", {"pattern": host}),
        ("plan must not be null", {"plan": 0}),
        ("plan must be in memory of a CUDA device", {"plan": on_host.data_ptr()}),
        ("plan must be aligned to 16 bytes", {"plan": plan.data_ptr() + 4}),
        ("plan_bytes must be at least", {"plan_bytes": sizes[0] - 1}),
        ("workspace must not be null", {"workspace": 0}),
        ("workspace must be aligned to 256 bytes", {"workspace": workspace.data_ptr() + 16}),
        ("workspace_bytes must be at least", {"workspace_bytes": sizes[1] - 1}),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            _C.plan_device_build(kernel=kernel, op=op, stream=0, **{**good, **bad})
    columns = [array.data_ptr() for array in prepared_on("cpu", pattern).columns()]
    with pytest.raises(InvalidArgumentError, match="col_ptr must be in memory of a CUDA device"):
        _C.pattern_device_transpose(device, *columns, workspace.data_ptr(), workspace.numel() * 4, 0)
    assert (plan == -7).all()
