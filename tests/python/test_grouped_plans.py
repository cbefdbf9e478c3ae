"""Plans of several weights below each other: no tile has blocks of two."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from helpers import DEVICES, PATTERNS, make_pattern
from test_plan import (
    BLOCK_SHAPES,
    KERNELS,
    build,
    check_sdd_plan,
    check_strip_plan,
    is_aligned,
    needs_plans,
    prepared_on,
    tile_of_steps,
    visit_step,
    walks_lists,
    walks_strips,
)

from tilesparse import _C, BlockPattern
from tilesparse._runtime.device import DDS_NN, DDS_NT, SDD_TN
from tilesparse.errors import UnsupportedError

GROUPS = 5
GRID = (12, 7)  # of one weight; strips of 64 features begin with it whatever the block


def stacked(name: str, block_shape: tuple[int, int]) -> BlockPattern:
    """Patterns of one kind, and an empty one in between, below each other."""
    masks = []
    for group in range(GROUPS):
        grid = (GRID[0] - group % 3, GRID[1])  # so that they differ
        mask = torch.zeros(GRID, dtype=torch.bool)
        if group != 2:
            mask[make_pattern(name, grid, block_shape).block_indices()] = True
        masks.append(mask)
    return BlockPattern.from_block_mask(torch.cat(masks), block_shape=block_shape)


def blocks_of(pattern: BlockPattern, op: int) -> dict[tuple[int, int], int]:
    """Slots by row and column as the product sees them: rows over all weights, columns in each."""
    found = {}
    for slot, (row, col) in enumerate(zip(*(i.tolist() for i in pattern.block_indices()), strict=True)):
        group, in_group = divmod(row, GRID[0])
        found[(row, col) if op == DDS_NT else (group * GRID[1] + col, in_group)] = slot
    return found


@needs_plans
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN])
@pytest.mark.parametrize("name", PATTERNS)
def test_dds_tiles_are_of_one_weight(name: str, op: int, device: str) -> None:
    checked = 0
    for ((key, ops), index), block_shape in product(KERNELS.items(), BLOCK_SHAPES):
        row_block, col_block = block_shape if op == DDS_NT else block_shape[::-1]
        if not ops >> op & 1 or is_aligned(key) or row_block > key >> 12 & 0xFFF:
            continue
        checked += 1
        pattern = stacked(name, block_shape)
        plan, rows_of_weight = build(pattern, index, op, device, GROUPS), GRID[0 if op == DDS_NT else 1]
        rows, count = plan["rows"].reshape(len(plan["rows"]), -1), plan["tiles"][:, 1]
        assert sorted(rows[rows >= 0]) == list(range(GROUPS * rows_of_weight))
        groups = [{row // rows_of_weight for row in tile[tile >= 0].tolist()} for tile in rows]
        tiles_of_weight = -(-rows_of_weight // rows.shape[1])
        assert groups == [{group} for group in range(GROUPS) for _ in range(tiles_of_weight)]
        assert all(
            before >= after for of_one in np.split(count, GROUPS) for before, after in pairwise(of_one)
        )
        visited: dict[tuple[int, int], int] = {}
        for step, tile in enumerate(tile_of_steps(plan)):
            for rank in range(plan["masks"].shape[1]):
                visit_step(visited, plan, tile, step, rank, row_block)
        expected = {
            (row, col * col_block + offset): slot
            for (row, col), slot in blocks_of(pattern, op).items()
            for offset in range(0, col_block, key & 0xFFF)
        }
        assert visited == expected
    assert checked


@needs_plans
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PATTERNS)
def test_sdd_tiles_are_of_one_weight(name: str, device: str) -> None:
    checked = 0
    for ((key, ops), index), block_shape in product(KERNELS.items(), BLOCK_SHAPES):
        if not ops >> SDD_TN & 1 or walks_lists(index):
            continue
        if not walks_strips(index) and block_shape[0] > key >> 12 & 0xFFF:
            continue
        checked += 1
        pattern = stacked(name, block_shape)
        plan = build(pattern, index, SDD_TN, device, GROUPS)
        (check_strip_plan if walks_strips(index) else check_sdd_plan)(pattern, plan)
        rows, _ = pattern.block_indices()
        groups = [set((rows[tile[tile >= 0]] // GRID[0]).tolist()) for tile in plan["slots"]]
        assert all(len(group) == 1 for group in groups)
        of_tiles = [group.pop() for group in groups]
        assert of_tiles == sorted(of_tiles)
        if walks_strips(index):
            assert plan["starts"].tolist() == [
                sum(group < first for group in of_tiles) for first in range(GROUPS + 1)
            ]
    assert checked


@needs_plans
def test_plans_of_aligned_steps_and_lists_are_of_one_weight() -> None:
    pattern = stacked(next(iter(PATTERNS)), (16, 16))
    others = [index for (key, _), index in KERNELS.items() if is_aligned(key) or walks_lists(index)]
    assert others
    for index in others:
        op = DDS_NT if _C.kernels()[index].ops >> DDS_NT & 1 else SDD_TN
        with pytest.raises(UnsupportedError, match=r"pattern\.groups must be 0 or 1"):
            _C.plan_size(prepared_on("cpu", pattern, GROUPS).descriptor, index, op)
