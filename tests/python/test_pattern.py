"""BlockPattern: constructors, conversions, invariants, identity."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import DEVICES, make_pattern, seeded, shuffled
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilesparse import BlockPattern, BlockSparseLinear
from tilesparse._checks import BLOCK_SIZES
from tilesparse._runtime.pattern_cache import entries, prepared
from tilesparse.errors import InvalidArgumentError

block_shapes = st.tuples(st.sampled_from(BLOCK_SIZES), st.sampled_from(BLOCK_SIZES))


@st.composite
def patterns(draw: st.DrawFn) -> BlockPattern:
    """Any pattern of up to 9 x 9 blocks, its slots in any order."""
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    places = draw(st.lists(st.integers(0, rows * cols - 1), unique=True))
    blocks = [divmod(place, cols) for place in places]
    bn, bk = draw(block_shapes)
    return BlockPattern.from_blocks(blocks, shape=(rows * bn, cols * bk), block_shape=(bn, bk))


@given(patterns())
def test_arrays_hold_the_invariants_of_bsr(pattern: BlockPattern) -> None:
    rows, cols = pattern.grid
    row_ptr, col_idx = pattern.crow_indices.tolist(), pattern.col_indices.tolist()
    assert row_ptr[0] == 0 and row_ptr[-1] == pattern.nnz == len(col_idx)
    assert len(row_ptr) == rows + 1
    for begin, end in pairwise(row_ptr):
        columns = col_idx[begin:end]
        assert columns == sorted(set(columns))
        assert all(0 <= column < cols for column in columns)
    assert sorted(pattern.slot.tolist()) == list(range(pattern.nnz))
    assert pattern.density == pattern.nnz / (rows * cols)
    assert {array.dtype for array in (pattern.crow_indices, pattern.col_indices, pattern.slot)} == {
        torch.int32
    }


@given(patterns())
def test_round_trips(pattern: BlockPattern) -> None:
    blocks = torch.stack(pattern.block_indices(), 1)
    assert BlockPattern.from_blocks(blocks, shape=pattern.shape, block_shape=pattern.block_shape) == pattern
    in_row_order = BlockPattern(
        pattern.crow_indices, pattern.col_indices, shape=pattern.shape, block_shape=pattern.block_shape
    )
    mask = pattern.to_block_mask()
    assert int(mask.sum()) == pattern.nnz
    assert BlockPattern.from_block_mask(mask, block_shape=pattern.block_shape) == in_row_order
    assert BlockPattern.from_mask(pattern.to_mask(), block_shape=pattern.block_shape) == in_row_order
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert copy.deepcopy(pattern) == pattern


@given(patterns())
def test_transpose(pattern: BlockPattern) -> None:
    transposed = pattern.transpose()
    assert transposed.shape == pattern.shape[::-1]
    assert transposed.block_shape == pattern.block_shape[::-1]
    assert transposed.block_indices()[0].equal(pattern.block_indices()[1])
    assert transposed.block_indices()[1].equal(pattern.block_indices()[0])
    assert transposed.transpose() == pattern


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 1), st.integers(0, 99))
def test_random_keeps_the_density(rows: int, cols: int, density: float, seed: int) -> None:
    shape = (rows * 32, cols * 16)
    if density > 0 and round(density * rows * cols) == 0:
        with pytest.raises(InvalidArgumentError, match=r"density.*rounds to none"):
            BlockPattern.random(shape, block_shape=(32, 16), density=density)
        return
    pattern = BlockPattern.random(shape, block_shape=(32, 16), density=density, generator=seeded(seed))
    assert pattern.nnz == round(density * rows * cols)
    assert pattern == BlockPattern.random(
        shape, block_shape=(32, 16), nnz=pattern.nnz, generator=seeded(seed)
    )


def test_random_is_uniform() -> None:
    generator, counts = seeded(), torch.zeros(4, 8)
    for _ in range(400):
        pattern = BlockPattern.random((64, 128), block_shape=(16, 16), density=0.25, generator=generator)
        counts += pattern.to_block_mask()
    # Binomial(400, 1/4): mean 100, standard deviation 8.7; six of them for 32 counts.
    assert counts.sum() == 400 * 8
    assert (counts - 100).abs().max() < 52


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.integers(0, 64),
    st.integers(0, 99),
)
def test_random_covers_rows_and_columns(
    parts: tuple[int, int], grid: tuple[int, int], kept: int, seed: int
) -> None:
    (r, c), (rows, cols) = parts, (parts[0] * grid[0], parts[1] * grid[1])
    nnz = min(kept, grid[0] * grid[1]) * r * c
    pattern = BlockPattern.random(
        (rows * 16, cols * 32), block_shape=(16, 32), nnz=nnz, parts=parts, generator=seeded(seed)
    )
    mask = pattern.to_block_mask()
    assert pattern.nnz == nnz
    assert (mask.view(r, grid[0], c, grid[1]).sum((1, 3)) == nnz // (r * c)).all()
    # As many as there can be: all where the blocks suffice.
    assert mask.any(1).sum() == min(rows, nnz) and mask.any(0).sum() == min(cols, nnz)


def test_random_layers_have_no_dead_outputs() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        mask = BlockSparseLinear(1024, 4096, density=0.1, block_shape=128).pattern.to_block_mask()
        assert mask.sum() == 26 and mask.any(0).all()
        assert mask.any(1).sum() == 26  # of 32: more than one of no row
        mask = BlockSparseLinear(1024, 4096, density=0.125, block_shape=128).pattern.to_block_mask()
        assert mask.any(0).all() and mask.any(1).all()


def test_random_covers_large_grids() -> None:
    pattern = BlockPattern.random((16384, 16384), block_shape=16, density=0.1, generator=seeded())
    mask = pattern.to_block_mask()
    assert mask.sum() == round(0.1 * 2**20) and mask.any(0).all() and mask.any(1).all()


def test_random_uses_the_default_generator() -> None:
    torch.manual_seed(11)
    first = BlockPattern.random((128, 128), block_shape=(16, 16), density=0.5)
    torch.manual_seed(11)
    assert BlockPattern.random((128, 128), block_shape=(16, 16), density=0.5) == first


def test_full_keeps_every_block() -> None:
    pattern = BlockPattern.full((64, 96), block_shape=(32, 16))
    assert pattern.nnz == 12 and pattern.density == 1
    assert pattern.to_mask().all()


def test_from_blocks_stores_in_the_given_order() -> None:
    pattern = BlockPattern.from_blocks([(1, 0), (0, 1), (1, 2)], shape=(32, 48), block_shape=(16, 16))
    assert pattern.crow_indices.tolist() == [0, 1, 3]
    assert pattern.col_indices.tolist() == [1, 0, 2]
    assert pattern.slot.tolist() == [1, 0, 2]
    assert [indices.tolist() for indices in pattern.block_indices()] == [[1, 0, 1], [0, 1, 2]]


@pytest.mark.parametrize("block", [(16, 16), (64, 64), (128, 128), (16, 128), (128, 32)], ids=str)
def test_from_mask_chooses_the_blocks_of_a_mask(block: tuple[int, int]) -> None:
    made = BlockPattern.random((512, 768), block_shape=block, density=0.2, generator=seeded())
    mask = made.to_mask()
    pattern = BlockPattern.from_mask(mask)
    assert pattern.block_shape == block and torch.equal(pattern.to_mask(), mask) and pattern.waste(mask) == 0
    mask[:, ::4] = False
    assert pattern.waste(mask) == 0.25


def test_waste_needs_a_mask_that_is_covered() -> None:
    pattern = BlockPattern.from_blocks([(0, 1)], shape=(16, 32), block_shape=16)
    assert BlockPattern.from_blocks([], shape=(16, 32), block_shape=16).waste(torch.zeros(16, 32)) == 0
    with pytest.raises(InvalidArgumentError, match="within the kept blocks, got 256 nonzeros outside"):
        pattern.waste(torch.ones(16, 32))
    with pytest.raises(InvalidArgumentError, match=r"mask must have shape \(16, 32\), got \(16, 16\)"):
        pattern.waste(torch.ones(16, 16))
    assert BlockPattern.from_mask(torch.ones(16, 24)).shape == (16, 24)  # which no block divides


@pytest.mark.parametrize("device", DEVICES)
def test_from_mask_keeps_blocks_with_one_element(device: str) -> None:
    mask = torch.zeros(64, 64, dtype=torch.bool, device=device)
    mask[37, 63] = True
    pattern = BlockPattern.from_mask(mask, block_shape=(32, 16))
    assert [indices.tolist() for indices in pattern.block_indices()] == [[1], [3]]


@pytest.mark.parametrize("device", DEVICES)
def test_from_scores_keeps_the_best_and_breaks_ties_in_row_order(device: str) -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0], [2.0, -1.0, 2.0]], device=device)
    pattern = BlockPattern.from_scores(scores, block_shape=(16, 16), density=0.5)
    assert pattern.to_block_mask().tolist() == [[False, True, True], [True, False, False]]
    assert BlockPattern.from_scores(scores, block_shape=(16, 16), nnz=0).nnz == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_from_dense_ranks_by_norm(dtype: torch.dtype) -> None:
    dense = torch.zeros(32, 64, dtype=dtype)
    dense[0, 0] = -3  # one large element
    dense[16:, 48:] = 0.25  # norm 4
    dense[:16, 16:32] = 0.125  # norm 2
    kept = BlockPattern.from_dense(dense, block_shape=(16, 16), nnz=2)
    assert [indices.tolist() for indices in kept.block_indices()] == [[0, 1], [0, 3]]


def test_equality_sees_slots() -> None:
    pattern = BlockPattern.full((64, 64), block_shape=(16, 16))
    assert pattern == BlockPattern.full((64, 64), block_shape=(16, 16))
    assert pattern != shuffled(pattern)
    assert pattern != BlockPattern.full((64, 64), block_shape=(32, 32))
    assert pattern != "pattern"


def tensors_of(pattern: BlockPattern) -> tuple[Tensor, Tensor, Tensor]:
    return pattern.crow_indices, pattern.col_indices, pattern.slot


def test_copies_have_tensors_of_their_own() -> None:
    pattern = BlockPattern.full((32, 32), block_shape=(16, 16))
    others = [copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern)), pattern.transpose()]
    memory = {tensor.data_ptr() for one in (pattern, *others) for tensor in tensors_of(one)}
    assert len(memory) == 4 * 3
    before = [[tensor.tolist() for tensor in tensors_of(other)] for other in others]
    pattern.move_blocks_([0, 1], [(0, 1), (0, 0)])
    assert [[tensor.tolist() for tensor in tensors_of(other)] for other in others] == before
    assert pattern != others[0] == others[1]


def test_what_is_derived_goes_with_the_tensors() -> None:
    """Whichever object names them, and as soon as nothing does."""
    gc.collect()
    pattern, before = BlockPattern.full((32, 32), block_shape=(16, 16)), len(entries)
    index = pattern.index_on(pattern.device)
    assert prepared(index) is prepared(pattern.index_on(torch.device("cpu")))
    assert len(entries) == before + 1
    alive = weakref.ref(prepared(index))
    del pattern, index
    gc.collect()
    assert alive() is None and len(entries) == before


def test_arrays_are_copies() -> None:
    row_ptr = torch.tensor([0, 1], dtype=torch.int32)
    pattern = BlockPattern(row_ptr, [0], shape=(16, 16), block_shape=(16, 16))
    row_ptr.zero_()
    assert pattern.crow_indices.tolist() == [0, 1]


def test_update_takes_over_the_blocks_in_place() -> None:
    pattern = make_pattern("diagonal", (4, 4), (16, 16))
    other = BlockPattern.from_blocks(
        [(0, 1), (3, 0), (2, 3), (1, 1)], shape=pattern.shape, block_shape=pattern.block_shape
    )
    transposed, tensors, entry = (
        pattern.transpose(),
        tensors_of(pattern),
        prepared(pattern.index_on(pattern.device)),
    )
    columns = [tensor.clone() for tensor in entry.columns()]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert pattern.update_(other) is pattern
    assert pattern == other
    assert all(now is before for now, before in zip(tensors_of(pattern), tensors, strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert (
        prepared(pattern.index_on(pattern.device)) is not entry
    )  # whoever computes with it goes on with the old blocks
    assert all(map(torch.equal, entry.columns(), columns))
    assert pattern.transpose() == other.transpose() != transposed


def test_update_may_change_the_number_of_blocks() -> None:
    pattern = make_pattern("diagonal", (4, 4), (16, 16))
    other = make_pattern("banded", (4, 4), (16, 16))
    transposed = pattern.transpose()
    assert pattern.update_(other) is pattern
    assert pattern == other and pattern.nnz != transposed.nnz
    assert pattern.transpose() == other.transpose() != transposed
    assert tensors_of(pattern)[0] is not tensors_of(other)[0]


def test_patterns_live_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        pattern = BlockPattern.random((64, 64), block_shape=(16, 16), density=0.5)
        assert {tensor.device.type for tensor in tensors_of(pattern)} == {"cpu"}
        assert pattern.transpose().transpose() == pattern
        assert pattern.to_mask().sum() == pattern.nnz * 256


@pytest.mark.parametrize("make", [BlockPattern.full, partial(BlockPattern.random, nnz=3)])
def test_blocks_are_chosen_from_as_many_as_there_is_memory_for(make: Callable[..., BlockPattern]) -> None:
    shape = 2**20, 2**20
    with pytest.raises(InvalidArgumentError, match=r"shape must have fewer than 2\^31 blocks .*from_blocks"):
        make(shape, block_shape=16)
    last = [(2**16 - 1, 2**16 - 1)]
    assert BlockPattern.from_blocks(last, shape=shape, block_shape=16).nnz == 1


@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (1, 3), (4, 6)])
def test_parts_have_equally_many_blocks(parts: tuple[int, int]) -> None:
    shape, scores = (128, 192), torch.rand(8, 12, generator=seeded())
    patterns = [
        BlockPattern.random(shape, block_shape=16, density=0.25, parts=parts, generator=seeded(1)),
        BlockPattern.random(shape, block_shape=16, nnz=24, parts=parts, generator=seeded(1)),
        BlockPattern.from_scores(scores, block_shape=16, nnz=24, parts=parts),
        BlockPattern.from_dense(
            scores.repeat_interleave(16, 0).repeat_interleave(16, 1),
            block_shape=16,
            density=0.25,
            parts=parts,
        ),
    ]
    assert patterns[0] == patterns[1] and patterns[2] == patterns[3]
    r, c = parts
    for pattern in patterns:
        counts = pattern.to_block_mask().view(r, 8 // r, c, 12 // c).sum((1, 3))
        assert (counts == 24 // (r * c)).all()
    best = scores.view(r, 8 // r, c, 12 // c)
    kept = patterns[2].to_block_mask().view(best.shape)
    worst_kept = torch.where(kept, best, 2).amin((1, 3))
    assert (worst_kept > torch.where(kept, -1, best).amax((1, 3))).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": (3, 1)}, "parts must divide the 8 x 12 blocks of the shape, got \\(3, 1\\)"),
        ({"parts": (0, 1)}, "parts must be \\(r, c\\), two positive integers, got \\(0, 1\\)"),
        ({"parts": 2}, "parts must be .* got 2"),
        ({"parts": (2, 1), "density": None, "nnz": 3}, "nnz must be a multiple of the 2 parts, got 3"),
    ],
)
def test_parts_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        BlockPattern.random((128, 192), **{"block_shape": 16, "density": 0.25, **options})


@given(patterns(), block_shapes)
def test_refined_patterns_keep_the_weight(pattern: BlockPattern, block_shape: tuple[int, int]) -> None:
    if any(size % part for size, part in zip(pattern.block_shape, block_shape, strict=True)):
        with pytest.raises(InvalidArgumentError, match="block_shape must divide"):
            pattern.refined(block_shape)
        return
    small = pattern.refined(block_shape)
    assert small.block_shape == block_shape and torch.equal(small.to_mask(), pattern.to_mask())
    count = small.nnz // max(pattern.nnz, 1)
    rows, cols = small.block_indices()
    down, across = (size // part for size, part in zip(pattern.block_shape, block_shape, strict=True))
    parents = torch.stack((rows // down, cols // across), 1)[:: max(count, 1)]
    assert torch.equal(parents, torch.stack(pattern.block_indices(), 1))
    assert (
        BlockPattern(*small._index[:2], shape=small.shape, block_shape=block_shape, slot=small.slot) == small
    )
