"""Values in fewer bytes: 2:4, 8 bits and both, what is kept of them, and products that multiply by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import hypothesis
import pytest
import torch
from helpers import (
    DEVICE_DTYPES,
    DEVICES,
    DTYPES,
    INTEGERS,
    PATTERNS,
    STORAGES,
    Storage,
    Stored,
    assert_product_close,
    blocks_of_dense,
    dense_weight,
    expanded_by_definition,
    kept_columns,
    make_pattern,
    randn,
    random_values,
    rounding_unit,
    seeded,
    stored_values,
)
from hypothesis import strategies
from torch import Tensor, func

from tilesparse import _C, BlockPattern, _checks, functional
from tilesparse._checks import BLOCK_SIZES
from tilesparse._ops.products import linear_on
from tilesparse._runtime.device import ACTIVATIONS, TENSORS
from tilesparse._runtime.launch import use_kernel
from tilesparse.errors import InvalidArgumentError, UnsupportedError
from tilesparse.storage import compress, dequantize, quantize_int4, quantize_weights, row_scales, two_of_four
from tilesparse.storage.quantize import CLIP_RATIOS, clip_limits

OPS = torch.ops.tilesparse
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
WIDE = [size for size in BLOCK_SIZES if size % 32 == 0]  # sides that are cut into groups of four


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.itemsize])


def equal_bits(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(bits(first), bits(second))


# ---- 2:4 ----


def any_bits(size: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of every kind: signed zeros, infinities and NaN of all payloads among them."""
    integer = INTEGERS[dtype.itemsize]
    everything = torch.randint(-(2**63), 2**63 - 1, size, generator=seeded(seed)).to(integer)
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0]).to(dtype).view(integer)
    chosen = special[torch.randint(len(special), size, generator=seeded(seed + 1))]
    return torch.where(torch.rand(size, generator=seeded(seed + 2)) < 0.3, chosen, everything).view(dtype)


def first_two(mask: Tensor) -> Tensor:
    """No more than the first two that the mask keeps of each four neighbours in a row."""
    fours = mask.unflatten(-1, (-1, 4))
    return (fours & (fours.cumsum(-1) <= 2)).flatten(-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*DTYPES, *EIGHT_BITS])
@hypothesis.settings(max_examples=30)
@hypothesis.given(
    nnz=strategies.integers(0, 3),
    rows=strategies.sampled_from(BLOCK_SIZES),
    columns=strategies.sampled_from(WIDE),
    density=strategies.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=strategies.integers(0, 99),
    transposed=strategies.booleans(),
)
def test_compression_keeps_the_bits_of_what_the_mask_keeps(
    device: str,
    dtype: torch.dtype,
    nnz: int,
    rows: int,
    columns: int,
    density: float,
    seed: int,
    transposed: bool,
) -> None:
    values = any_bits((nnz, rows, columns), dtype, seed).to(device)
    mask = (torch.rand(values.shape, generator=seeded(seed)) < density).to(device)
    given = (values.mT.contiguous(), mask.mT.contiguous()) if transposed else (values, mask)
    compressed, metadata = compress(*given, transposed=transposed)
    assert compressed.shape == (nnz, rows, columns // 2) and compressed.dtype == dtype
    assert metadata.shape == (nnz, columns // 32, rows) and metadata.dtype == torch.int32
    kept = kept_columns(metadata, rows)
    assert bool((kept[..., ::2] < kept[..., 1::2]).all()), "the columns of a pair do not ascend"
    plain = expanded_by_definition(compressed, metadata, None, dtype)
    wanted = torch.where(first_two(mask), bits(values), 0).view(dtype)
    assert equal_bits(plain, wanted)
    if dtype in DTYPES:
        assert equal_bits(dequantize(compressed, metadata), wanted)


def test_metadata_of_a_small_block_by_hand() -> None:
    """Row 8 keeps columns 1 and 2 of its second four, all other rows the last two."""
    mask = torch.zeros(1, 16, 32, dtype=torch.bool)
    mask.unflatten(2, (8, 4))[..., 2:] = True
    mask[0, 8, 4:8] = torch.tensor([False, True, True, False])
    values = torch.arange(16 * 32.0).view(1, 16, 32)
    compressed, metadata = compress(values, mask)
    wanted = torch.full((8, 2), 0xEEEEEEEE)  # 2 and 3 in each four bits: 2 | 3 << 2
    wanted[0, 0] = 0xEE9EEEEE  # the high half of the word that has row 8 beside row 0: 1 | 2 << 2
    assert torch.equal(metadata.view(8, 2).long() & 0xFFFFFFFF, wanted)
    assert compressed[0, 8, :4].tolist() == [8 * 32 + 2, 8 * 32 + 3, 8 * 32 + 5, 8 * 32 + 6]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_expansion_is_value_times_scale_rounded(device: str, dtype: torch.dtype, storage: str) -> None:
    for block_shape in product(BLOCK_SIZES, WIDE):
        pattern = make_pattern("full", (1, 3), block_shape)
        stored = stored_values(pattern, STORAGES[storage], dtype=dtype, device=device)
        plain = dequantize(stored.values, stored.metadata, stored.scales, dtype)
        assert plain.shape == (3, *block_shape)
        assert equal_bits(plain, stored.plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", EIGHT_BITS)
@pytest.mark.parametrize("exponent", [-140, -24, -14, 0, 9, 120])
def test_expansion_of_all_eight_bits(
    device: str, dtype: torch.dtype, quantized: torch.dtype, exponent: int
) -> None:
    """Also where results are subnormal, infinite or NaN."""
    values = torch.arange(256).view(1, 16, 16).to(torch.uint8).view(quantized).to(device)
    scales = torch.tensor([1.2345 * 2.0**exponent], device=device)
    plain = dequantize(values, None, scales, dtype)
    wanted = expanded_by_definition(values, None, scales, dtype)
    assert torch.equal(plain.isnan(), wanted.isnan())
    assert int(plain.isnan().sum()) == (2 if quantized == torch.float8_e4m3fn else 0)
    assert equal_bits(plain.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0))


def test_without_a_dtype_the_expansion_has_that_of_the_values_or_float32() -> None:
    pattern = make_pattern("full", (1, 1), (16, 32))
    half = stored_values(pattern, STORAGES["2:4"], dtype=torch.float16)
    assert dequantize(half.values, half.metadata).dtype == torch.float16
    eight = stored_values(pattern, STORAGES["int8 by row"], dtype=torch.float16)
    assert dequantize(eight.values, None, eight.scales).dtype == torch.float32


# ---- the choice of two of four ----

PAIRS = list(combinations(range(4), 2))


def best_two(scores: list[float]) -> list[bool]:
    """The definition: the pair before which no other comes, the first one of equal ones."""

    def key(pair: tuple[int, int]) -> tuple[list[float], list[int]]:
        ranked = sorted(range(4), key=lambda i: (-scores[i], i))
        places = sorted(ranked.index(i) for i in pair)
        return [float(place) for place in places], list(pair)

    best = min(PAIRS, key=key)
    return [i in best for i in range(4)]


FOURS = strategies.lists(
    strategies.one_of(
        strategies.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40]),
        strategies.floats(width=32),
    ),
    min_size=4,
    max_size=4,
)


@hypothesis.given(fours=strategies.lists(FOURS, min_size=1, max_size=8))
def test_two_of_four_are_the_best_two(fours: list[list[float]]) -> None:
    kept = two_of_four(torch.tensor(fours))
    wanted = [best_two([math.inf if math.isnan(score) else score for score in four]) for four in fours]
    assert kept.tolist() == wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.uint8, torch.bool])
def test_two_of_four_for_any_dtype_and_dimensions(device: str, dtype: torch.dtype) -> None:
    """Few different numbers, so that many are equal."""
    for lead in ((), (3,), (2, 3), (0,)):
        scores = torch.randint(0, 4, (*lead, 8, 12), generator=seeded(1)).to(dtype)
        kept = two_of_four(scores.to(device))
        assert kept.shape == scores.shape and kept.dtype == torch.bool and kept.device.type == device
        flat = scores.double().reshape(-1, 4).tolist()
        assert kept.reshape(-1, 4).tolist() == [best_two(four) for four in flat]
        both = two_of_four(scores.to(device), transposable=True).cpu()
        assert both.shape == scores.shape and both.dtype == torch.bool
        tiles = both.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4))
        assert bool((tiles.sum(-1) == 2).all()) and bool((tiles.sum(-3) == 2).all())


# By definition: all 4 x 4 with two in each row and column.
TRANSPOSABLE = torch.tensor(
    [
        tile
        for tile in product(*([[i in pair for i in range(4)] for pair in PAIRS],) * 4)
        if all(sum(column) == 2 for column in zip(*tile, strict=True))
    ]
)
# The best of a row or of a whole tile leads away from the best mask.
TILES: dict[str, Callable[[], Tensor]] = {
    "random": lambda: torch.randint(-999, 999, (200, 4, 4), generator=seeded(1)),
    "few numbers": lambda: torch.randint(0, 3, (200, 4, 4), generator=seeded(2)),
    "all equal": lambda: torch.ones(1, 4, 4),
    "equal rows": lambda: torch.tensor([[9, 8, 1, 0]] * 4)[None],
    "one large": lambda: torch.eye(16).view(16, 4, 4) * 1000,
    "a row of large ones": lambda: (
        torch.eye(4)[:, :, None].expand(4, 4, 4) * 1000 + torch.arange(16).view(4, 4)
    ),
    "greedy is wrong": lambda: torch.tensor([[10, 9, 9, 0], [9, 10, 0, 9], [9, 0, 0, 0], [0, 9, 0, 0]])[None],
    "powers of two": lambda: 2.0 ** torch.stack([torch.randperm(16, generator=seeded(s)) for s in range(50)]),
    "negative": lambda: -torch.arange(16).view(1, 4, 4),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TILES)
def test_transposable_masks_are_the_best_of_all_90(device: str, name: str) -> None:
    """Scores are integers, so that all sums are exact."""
    assert len(TRANSPOSABLE) == 90
    tiles = TILES[name]().double().reshape(-1, 4, 4)
    best = (tiles.flatten(1) @ TRANSPOSABLE.double().flatten(1).t()).amax(1)
    side_by_side = tiles.transpose(0, 1).reshape(4, -1).to(device, torch.float32)
    kept = two_of_four(side_by_side, transposable=True).cpu().reshape(4, -1, 4).transpose(0, 1)
    assert bool((kept.sum(1) == 2).all()) and bool((kept.sum(2) == 2).all())
    assert torch.equal((tiles * kept).sum((1, 2)), best)


@hypothesis.given(
    strategies.lists(
        strategies.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16
    )
)
def test_transposable_masks_of_any_numbers_are_the_best_up_to_rounding(numbers: list[float]) -> None:
    tile = torch.tensor(numbers, dtype=torch.float64)
    limit = torch.finfo(torch.float32).max / 64
    tile = tile.clamp(-limit, limit).view(4, 4)
    kept = two_of_four(torch.tensor(numbers).view(4, 4), transposable=True)
    best = (tile.flatten() @ TRANSPOSABLE.double().flatten(1).t()).max()
    assert kept.sum(0).tolist() == kept.sum(1).tolist() == [2] * 4
    assert float(best - (tile * kept).sum()) <= 16 * rounding_unit(torch.float32) * float(tile.abs().sum())


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("device", DEVICES)
def test_transposable_masks_keep_nan_and_infinity(device: str, number: float) -> None:
    for place in range(16):
        tile = torch.arange(16.0, device=device)
        tile[place] = number
        kept = two_of_four(tile.view(4, 4), transposable=True)
        assert bool(kept.flatten()[place])
        tile[place] = -math.inf
        assert not bool(two_of_four(tile.view(4, 4), transposable=True).flatten()[place])


@pytest.mark.parametrize("device", DEVICES)
def test_transposable_masks_do_not_depend_on_how_products_round(device: str) -> None:
    """Neither autocast nor TF32, by which differences below a thousandth would get lost."""
    scores = 1 + torch.randint(0, 64, (64, 64), generator=seeded(3)).to(device, torch.float32) / 2**16
    wanted = two_of_four(scores, transposable=True)
    exact = two_of_four(scores.double(), transposable=True)
    assert float((scores.double() * wanted).sum()) == float((scores.double() * exact).sum())
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(two_of_four(scores, transposable=True), wanted)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(two_of_four(scores, transposable=True), wanted)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("shape", "transposable"), [((4, 6), False), ((6, 4), True), ((8,), False), ((8,), True), ((), False)]
)
def test_two_of_four_needs_fours(shape: tuple[int, ...], transposable: bool) -> None:
    with pytest.raises(InvalidArgumentError, match=r"scores must be \[..., rows, columns\]"):
        two_of_four(torch.zeros(shape), transposable=transposable)


# ---- 8 bits ----

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*EIGHT_BITS, None])
@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1.0, 6e4, 3e38])
def test_quantisation_rounds_to_the_nearest(
    device: str, dtype: torch.dtype | None, granularity: str, size: float
) -> None:
    """In 4 bits without a dtype."""
    values = torch.randn(3, 16, 32, generator=seeded(1), dtype=torch.float64).to(device)
    spread = torch.rand(3, 16, 1, generator=seeded(2)).to(device)
    values = (values / values.abs().max() * size * (1 if dtype is None else spread)).float()
    if dtype is None:
        largest = values.abs().amax((1, 2) if granularity == "block" else 2)
        quantized, scales = quantize_int4(values, granularity=granularity, limits=largest)
        assert quantized.shape == (3, 16, 16) and quantized.dtype == torch.uint8
    else:
        quantized, scales = quantize_weights(values, dtype, granularity=granularity)
        assert quantized.shape == values.shape and quantized.dtype == dtype
    assert quantized.is_contiguous()
    assert scales.shape == ((3, 16) if granularity == "row" else (3,)) and scales.dtype == torch.float32
    scale = scales.view(*scales.shape, *(1,) * (3 - scales.dim())).double()
    step = scale.expand(values.shape)
    if dtype == torch.float8_e4m3fn:  # with 3 bits behind the first one, down to 2^-6
        step = scale * 2.0 ** ((values.abs() / scale).log2().floor().clamp(min=-6) - 3)
    restored = dequantize(quantized, None, scales, torch.float32)
    assert bool(restored.isfinite().all())
    numbers = restored.double() / scale if dtype is None else quantized.double()
    error = (numbers * scale - values.double()).abs()
    assert bool((error <= step * (0.5 + 1e-5)).all())
    if size > 1e-35:
        largest = numbers.abs().amax((1, 2) if granularity == "block" else 2)
        wanted = torch.full_like(largest, 7 if dtype is None else LARGEST[dtype])
        torch.testing.assert_close(largest, wanted, rtol=1.3e-6 if dtype is None else 0, atol=0)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("source", DTYPES)
def test_the_largest_numbers_stay_finite(dtype: torch.dtype, source: torch.dtype) -> None:
    largest = min(torch.finfo(source).max, torch.finfo(torch.float32).max)
    for fraction in torch.linspace(0.5, 1, 200, dtype=torch.float64):
        values = torch.full((1, 16, 16), float(fraction) * largest, dtype=torch.float64).to(source)
        quantized, scales = quantize_weights(values, dtype)
        assert bool(dequantize(quantized, None, scales, source).isfinite().all()), float(fraction)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("granularity", ["row", "block"])
def test_zeros_and_no_blocks_are_quantised_without_nan(dtype: torch.dtype, granularity: str) -> None:
    zeros = torch.zeros(2, 16, 16, requires_grad=True)
    quantized, scales = quantize_weights(zeros, dtype, granularity=granularity)
    assert not bool(quantized.float().any()) and bool((scales > 0).all())
    assert not quantized.requires_grad and not scales.requires_grad
    quantized, scales = quantize_weights(zeros[:0], dtype, granularity=granularity)
    assert quantized.shape == (0, 16, 16) and scales.shape[0] == 0


ONES = torch.ones(1, 16, 16)


@pytest.mark.parametrize(
    ("values", "arguments", "named"),
    [
        (ONES * math.nan, {"dtype": torch.int8}, "values must be finite"),
        (ONES * -math.inf, {"dtype": torch.float8_e4m3fn}, "values must be finite"),
        (ONES.double() * 1e300, {"dtype": torch.int8}, "values must be finite"),
        (ONES, {"dtype": torch.float16}, "dtype must be"),
        (ONES, {"dtype": torch.uint8}, "dtype must be"),
        (ONES, {"dtype": torch.int8, "granularity": "tensor"}, "granularity must be"),
        (ONES, {"dtype": torch.int8, "limits": torch.ones(1)}, r"limits must .*\[1, 16\]"),
        (ONES, {"dtype": torch.int8, "limits": torch.ones(1, 16).int()}, "limits .*int32"),
        (ONES, {"dtype": torch.int8, "limits": -torch.ones(1, 16)}, "limits .*at least 0"),
        (ONES * math.nan, {}, "values must be finite: 4-bit storage"),
        (ONES[0], {}, r"values must be a real tensor \[nnz, bn, bk\]"),
        (ONES[..., :15], {}, "values must be .* even bk"),
        (ONES, {"granularity": "feature"}, "granularity must be"),
    ],
)
def test_bad_quantisations_are_named(values: Tensor, arguments: dict[str, Any], named: str) -> None:
    """Four bits have no dtype here."""
    with pytest.raises(InvalidArgumentError, match=named):
        (quantize_weights if "dtype" in arguments else quantize_int4)(values, **arguments)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("granularity", ["row", "block", "feature"])
def test_values_beyond_limits_are_clipped(dtype: torch.dtype, granularity: str) -> None:
    pattern = BlockPattern.random((32, 64), block_shape=16, density=0.5, generator=seeded(0))
    values = torch.randn(pattern.nnz, 16, 16, generator=seeded(1))
    shape = {"row": (pattern.nnz, 16), "block": (pattern.nnz,), "feature": (32,)}[granularity]
    limits = 0.5 + torch.rand(shape, generator=seeded(2))
    own = {"pattern": pattern} if granularity == "feature" else {}
    quantized, scales = quantize_weights(values, dtype, granularity=granularity, limits=limits, **own)
    torch.testing.assert_close(scales, limits / LARGEST[dtype])
    if granularity == "feature":
        limits, scales = (row_scales(each, pattern) for each in (limits, scales))
    limits = limits.view(*limits.shape, *(1,) * (3 - limits.dim()))
    clipped = values.clamp(-limits, limits)
    restored = dequantize(quantized, None, scales)
    assert bool(((restored - clipped).abs() <= limits / (100 if dtype == torch.int8 else 16)).all())


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_clipping_at_the_largest_magnitudes_is_no_clipping(dtype: torch.dtype) -> None:
    values = torch.randn(3, 16, 16, generator=seeded(1))
    plain, limited = (
        quantize_weights(values, dtype),
        quantize_weights(values, dtype, limits=values.abs().amax(2)),
    )
    assert torch.equal(plain[0].float(), limited[0].float()) and torch.equal(plain[1], limited[1])


def to_four_bits(groups: Tensor, limits: Tensor) -> Tensor:
    scales = (limits / 7)[..., None].clamp(min=1e-30)
    return (groups / scales).clamp(-7, 7).round() * scales


def test_clip_limits_are_the_best_ratios_of_each_group() -> None:
    groups = torch.randn(5, 16, 32, generator=seeded(1))
    inputs = torch.randn(5, 200, 32, generator=seeded(2))
    groups[..., 3] = 8  # a large weight of every group, which only some inputs meet
    inputs[..., 3] *= torch.linspace(0.01, 0.1, 5)[:, None]
    limits = clip_limits(groups, inputs, to_four_bits)
    largest = groups.abs().amax(-1)

    def errors(limits: Tensor) -> Tensor:
        return ((groups - to_four_bits(groups, limits)) @ inputs.mT).square().sum(-1)

    each = torch.stack([errors(ratio * largest) for ratio in CLIP_RATIOS])
    torch.testing.assert_close(errors(limits), each.amin(0))
    assert bool((limits[0] < largest[0]).all()) and float(errors(limits).sum()) < 0.5 * float(each[0].sum())
    factor = torch.linalg.cholesky(inputs.mT @ inputs).mT  # the same second moment
    torch.testing.assert_close(clip_limits(groups, factor, to_four_bits), limits)
    assert not clip_limits(torch.zeros(2, 8), torch.ones(3, 8), to_four_bits).any()


# ---- 4 bits ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("granularity", ["row", "block"])
def test_the_search_takes_the_best_of_eleven_scales(device: str, granularity: str) -> None:
    values = torch.randn(4, 16, 64, generator=seeded(1)).to(device)
    values[0, 0, 5] = -40  # an outlier, which costs least where it is not clipped
    values[3] = 0
    sides = (1, 2) if granularity == "block" else (2,)
    found = []
    for fraction in torch.arange(11) * -0.04 + 1:
        scales = values.abs().amax(sides, keepdim=True) / 7 * fraction.to(device)
        rounded = (values / scales).nan_to_num().round().clamp(-8, 7) * scales
        found.append((rounded - values).square().sum(sides))
    packed, scales = quantize_int4(values, granularity=granularity)
    error = (dequantize(packed, None, scales) - values).square().sum(sides)
    torch.testing.assert_close(error, torch.stack(found).amin(0), rtol=1e-4, atol=1e-6)
    assert not bool(packed[3].any()) and bool((scales > 0).all())
    whole = quantize_int4(values, granularity=granularity, limits=values.abs().amax(sides))
    assert float(error.sum()) < float((dequantize(whole[0], None, whole[1]) - values).square().sum())


def test_four_bits_of_much_and_of_nothing() -> None:
    """More blocks than are quantized at a time have the scales that each has alone."""
    values = torch.randn(300, 128, 128, generator=seeded(1), dtype=torch.bfloat16)
    packed, scales = quantize_int4(values)
    alone = quantize_int4(values[290:291])
    assert torch.equal(packed[290:291], alone[0]) and torch.equal(scales[290:291], alone[1])
    for granularity, shape in (("row", (0, 16)), ("block", (0,))):
        packed, scales = quantize_int4(torch.zeros(0, 16, 32), granularity=granularity)
        assert packed.shape == (0, 16, 16) and scales.shape == shape


# ---- products ----


class Operands:
    """A pattern, stored values, and what is multiplied with them."""

    def __init__(
        self,
        storage: str = "2:4 int8 by row",
        name: str = "random 50%",
        *,
        grid: tuple[int, int] = (4, 6),
        block_shape: tuple[int, int] = (32, 32),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        tokens: int = 33,
    ) -> None:
        self.pattern = make_pattern(name, grid, block_shape)
        self.stored: Stored = stored_values(self.pattern, STORAGES[storage], dtype=dtype, device=device)
        self.x = randn(tokens, self.pattern.in_features, dtype=dtype, device=device, seed=1)
        self.y = randn(tokens, self.pattern.out_features, dtype=dtype, device=device, seed=2)
        self.bias = randn(self.pattern.out_features, dtype=dtype, device=device, seed=3)
        self.weight = dense_weight(self.stored.plain, self.pattern)

    def linear(self, x: Tensor | None = None, *args: Any, **options: Any) -> Tensor:
        x = self.x if x is None else x
        return functional.linear(
            x, self.stored.values, self.pattern, *args, **{**self.stored.extras, **options}
        )

    def dds(self, a: Tensor, *, transpose: bool) -> Tensor:
        return functional.dds(a, self.stored.values, self.pattern, transpose=transpose, **self.stored.extras)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_products_on_adversarial_patterns(device: str, dtype: torch.dtype, storage: str, name: str) -> None:
    o = Operands(storage, name, dtype=dtype, device=device)
    assert_product_close(o.linear(None, o.bias), o.x, o.weight.t(), o.bias)
    assert_product_close(o.dds(o.x, transpose=True), o.x, o.weight.t())
    assert_product_close(o.dds(o.y, transpose=False), o.y, o.weight)


@pytest.mark.parametrize("tokens", [0, 1, 17, 200])
@pytest.mark.parametrize("block_shape", [(16, 32), (128, 128), (64, 32), (32, 64), (16, 128)])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("device", "dtype"), [DEVICE_DTYPES[1], DEVICE_DTYPES[-1]])
def test_products_for_any_tokens_and_blocks(
    device: str, dtype: torch.dtype, storage: str, block_shape: tuple[int, int], tokens: int
) -> None:
    o = Operands(storage, grid=(3, 2), block_shape=block_shape, dtype=dtype, device=device, tokens=tokens)
    assert_product_close(o.linear(), o.x, o.weight.t())
    assert_product_close(o.dds(o.y, transpose=False), o.y, o.weight)


@pytest.mark.parametrize("storage", ["int8 by row", "int4 by row"])
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_eight_and_four_bits_need_no_wide_blocks(device: str, block: int, storage: str) -> None:
    o = Operands(storage, grid=(3, 4), block_shape=(block, 16), device=device)
    assert_product_close(o.linear(), o.x, o.weight.t())
    assert_product_close(o.dds(o.y, transpose=False), o.y, o.weight)


@pytest.mark.parametrize("kernel", ["cpu_avx512_4_bits", "cpu_avx2_4_bits", "cpu_portable_4_bits"])
@pytest.mark.parametrize("block_shape", [(16, 16), (16, 128), (32, 32), (64, 16), (128, 64)])
@pytest.mark.parametrize("storage", ["int4 by row", "int4 by block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_few_tokens_of_four_bits_on_the_cpu(
    dtype: torch.dtype, storage: str, block_shape: tuple[int, int], kernel: str
) -> None:
    """Every instruction set of this machine, without an expansion."""
    number = next((i for i, each in enumerate(_C.kernels()) if each.name == kernel), None)
    if number is None:
        pytest.skip("of another architecture")
    for tokens in range(1, 9):
        o = Operands(storage, "random 50%", grid=(4, 6), block_shape=block_shape, dtype=dtype, tokens=tokens)
        try:
            with use_kernel(kernel):
                result = o.linear(None, o.bias, "relu", residual=o.y)
        except UnsupportedError as error:
            assert tokens > 1 or "the processor lacks" in str(error), error
            break
        exact = (o.x.double() @ o.weight.t() + o.bias.double()).relu() + o.y.double()
        error = 4 * rounding_unit(dtype) * float(exact.abs().max())
        torch.testing.assert_close(result.double(), exact, rtol=0, atol=error + 1e-5)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_products_are_those_of_the_expansion_and_repeat(
    device: str, dtype: torch.dtype, storage: str
) -> None:
    """With everything that can be added, by every policy; on the CPU to the last bit."""
    o = Operands(storage, dtype=dtype, device=device, tokens=40)
    for activation, major in product(ACTIVATIONS, (False, True)):
        options: dict[str, Any] = {"residual": o.y, "column_major_output": major}
        plain = functional.linear(o.x, o.stored.plain, o.pattern, o.bias, activation, **options)
        for policy in ("sparse", "auto", "dense"):
            result = o.linear(None, o.bias, activation, **options, policy=policy)
            assert torch.equal(result, o.linear(None, o.bias, activation, **options, policy=policy))
            assert result.stride() == plain.stride()
            if device == "cpu" and policy != "dense":
                assert torch.equal(result, plain)
            error = 16 * rounding_unit(dtype) * float(plain.abs().max())
            torch.testing.assert_close(result, plain, rtol=0, atol=error)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("device", DEVICES)
def test_operands_in_other_layouts_and_dimensions(device: str, storage: str) -> None:
    o = Operands(storage, dtype=torch.bfloat16, device=device, tokens=24)
    for x in (o.x.t().contiguous().t(), o.x.repeat(1, 2)[:, : o.x.shape[1]], o.x.view(2, 3, 4, -1), o.x[0]):
        result = o.linear(x)
        assert result.shape == (*x.shape[:-1], o.pattern.out_features)
        flat = x.reshape(-1, x.shape[-1])
        assert_product_close(result.reshape(len(flat), -1), flat, o.weight.t())
    y = o.y.t().contiguous().t()
    assert_product_close(o.dds(y, transpose=False), y, o.weight)


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_all_but_the_values(device: str, storage: str, activation: str, policy: str) -> None:
    o = Operands(storage, device=device)
    leaves = [t.clone().requires_grad_() for t in (o.x, o.bias, o.y)]
    x, bias, residual = leaves
    grad = randn(*o.y.shape, dtype=torch.float32, device=device, seed=5)
    o.linear(x, bias, activation, residual=residual, policy=policy).backward(grad)
    references = [t.detach().cpu().double().requires_grad_() for t in leaves]
    y = torch.nn.functional.linear(references[0], o.weight, references[1])
    y = torch.nn.functional.gelu(y) if activation == "gelu" else y
    (y + references[2]).backward(grad.cpu().double())
    for actual, expected in zip(leaves, references, strict=True):
        torch.testing.assert_close(actual.grad.cpu().double(), expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_of_every_order(storage: str, check: Callable[..., bool]) -> None:
    o = Operands(storage, "diagonal", grid=(2, 2), dtype=torch.float64, tokens=3)
    x, y, bias = (t.requires_grad_() for t in (o.x, o.y, o.bias))
    assert check(lambda *t: o.linear(t[0], t[1], "silu", residual=t[2]), (x, bias, y), fast_mode=True)
    assert check(lambda t: o.dds(t, transpose=False), (y,), fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", STORAGES)
def test_products_follow_another_pattern_and_other_values(device: str, storage: str) -> None:
    o = Operands(storage, "diagonal", grid=(3, 3), device=device)
    for name in ("diagonal", "full", "banded", "diagonal"):
        o.pattern.update_(make_pattern(name, (3, 3), (32, 32)))
        o.stored = stored_values(
            o.pattern, STORAGES[storage], dtype=torch.float32, device=device, seed=len(name)
        )
        weight = dense_weight(o.stored.plain, o.pattern)
        assert_product_close(o.linear(), o.x, weight.t())
        assert_product_close(o.dds(o.y, transpose=False), o.y, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device: str, storage: str, dtype: torch.dtype) -> None:
    """Scales stay as they are, and 8 bits; other values are cast."""
    o = Operands(storage, device=device)
    stored = o.stored
    values = stored.values if stored.scales is not None else stored.values.to(dtype)
    plain = expanded_by_definition(values, stored.metadata, stored.scales, dtype)
    with torch.autocast(device, dtype):
        y, x = o.linear(), o.dds(o.y, transpose=False)
    assert y.dtype == x.dtype == dtype
    weight = dense_weight(plain, o.pattern)
    assert_product_close(y, o.x.to(dtype), weight.t())
    assert_product_close(x, o.y.to(dtype), weight)


# ---- values of the transposed weight ----


class Transposable:
    """Plain values with a mask that keeps two of four both ways, and what is compressed of them."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32, tokens: int = 20) -> None:
        self.pattern = make_pattern("random 50%", (3, 4), (32, 64))
        self.index = self.pattern.index_on(torch.device(device))
        self.values = random_values(self.pattern, dtype=dtype, device=device)
        self.mask = two_of_four(self.values.abs(), transposable=True)
        self.there = compress(self.values, self.mask)
        self.back = compress(self.values, self.mask, transposed=True)
        self.x = randn(tokens, self.pattern.in_features, dtype=dtype, device=device, seed=1)
        self.y = randn(tokens, self.pattern.out_features, dtype=dtype, device=device, seed=2)
        self.bias = randn(self.pattern.out_features, dtype=dtype, device=device, seed=3)

    @property
    def weight(self) -> Tensor:
        return dense_weight(self.values * self.mask, self.pattern)

    def through(
        self, values: Tensor, x: Tensor, bias: Tensor, residual: Tensor, *, transposed: bool
    ) -> Tensor:
        result: Tensor = OPS.dds_nt(x, values, *self.index, bias, residual, **self.kept(transposed))
        return result

    def kept(self, transposed: bool) -> dict[str, Tensor]:
        tensors = (*self.there, *(self.back if transposed else ()))
        return dict(zip(("compressed", "metadata", "compressed_t", "metadata_t"), tensors, strict=False))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_products_with_the_values_of_the_transposed_weight(
    device: str, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TENSORS, "enabled", native)
    t = Transposable(device, dtype)
    values, metadata = t.back
    grid, shape = t.pattern.grid, t.pattern.block_shape
    for change in range(3):
        for major in (False, True):
            x = OPS.dds_nn(t.y, values, *t.index, major, metadata, None, True)
            assert_product_close(x, t.y, t.weight)
            assert x.stride() == OPS.dds_nn(t.y, t.values, *t.index, major).stride()
            y = OPS.dds_nt(t.x, values, *t.index, None, None, 0, major, metadata, None, True)
            assert_product_close(y, t.x, t.weight.t())
        if change == 0:  # to a free place, without new tensors
            free = (~t.pattern.to_block_mask()).nonzero()[0].tolist()
            t.pattern.move_blocks_([1], [tuple(free)])
        else:
            other = BlockPattern.random(
                (grid[0] * shape[0], grid[1] * shape[1]),
                block_shape=shape,
                nnz=t.pattern.nnz,
                generator=seeded(change),
            )
            t.pattern.update_(other)


@pytest.mark.parametrize("device", DEVICES)
def test_quantised_values_of_the_transposed_weight(device: str) -> None:
    """Their scales are those of its rows."""
    pattern = make_pattern("random 50%", (3, 4), (32, 64))
    transposed = stored_values(pattern.transpose(), Storage(True, torch.int8, True), dtype=torch.float32)
    transposed = transposed.map(lambda t: t.to(device))
    y = randn(20, pattern.out_features, dtype=torch.float32, device=device)
    index = pattern.index_on(torch.device(device))
    x = OPS.dds_nn(y, transposed.values, *index, False, transposed.metadata, transposed.scales, True)
    assert_product_close(x, y, dense_weight(transposed.plain.mT, pattern))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_pass_straight_through_to_plain_values(device: str, transposed: bool) -> None:
    t = Transposable(device)
    for _ in range(2):
        leaves = [leaf.clone().requires_grad_() for leaf in (t.values, t.x, t.bias, t.y)]
        y = t.through(*leaves, transposed=transposed)
        grad = randn(*y.shape, dtype=torch.float32, device=device, seed=5)
        y.backward(grad)
        weight, flat = t.weight, grad.cpu().double()
        torch.testing.assert_close(
            y.detach().cpu().double(),
            t.x.cpu().double() @ weight.t() + t.bias.cpu() + t.y.cpu(),
            rtol=1e-4,
            atol=1e-4,
        )
        expected = (
            blocks_of_dense(flat.t() @ t.x.cpu().double(), t.pattern),  # of kept and other weights alike
            flat @ weight,
            flat.sum(0),
            flat,
        )
        for leaf, wanted in zip(leaves, expected, strict=True):
            torch.testing.assert_close(leaf.grad.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
        t.pattern.move_blocks_([0], [tuple((~t.pattern.to_block_mask()).nonzero()[0].tolist())])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("native", [True, False])
def test_second_derivatives_pass_straight_through(
    native: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TENSORS, "enabled", native)
    t = Transposable(dtype=torch.float64)
    fields: Any = t.kept(transposed)
    kept = _checks.Operands(**fields)

    def by_plain_values(values: Tensor, x: Tensor) -> Tensor:
        return functional.linear(x, values + (values * ~t.mask).detach() * -1, t.pattern, t.bias)

    products = (
        lambda values, x: linear_on(x, values, t.index, t.bias, operands=kept),
        by_plain_values,
    )
    results = []
    for multiply in products:
        values, x = t.values.clone().requires_grad_(), t.x.clone().requires_grad_()
        gradients = torch.autograd.grad(multiply(values, x).tanh().sum(), (values, x), create_graph=True)
        penalty = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        results.append((*gradients, *torch.autograd.grad(penalty, (values, x))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("name", ["bias", "residual", "activation"])
def test_nothing_is_added_to_products_with_the_transposed_values(device: str, name: str) -> None:
    t = Transposable()
    added = {"bias": t.bias.to(device), "residual": t.y.to(device), "activation": ACTIVATIONS["relu"]}
    index = t.pattern.index_on(torch.device(device))
    values, metadata = (tensor.to(device) for tensor in t.back)
    with pytest.raises(UnsupportedError, match=f"{name} cannot be combined"):
        OPS.dds_nt(t.x.to(device), values, *index, metadata=metadata, transposed=True, **{name: added[name]})


# ---- what refuses ----


def change(o: Operands, name: str, how: Callable[[Tensor], Tensor | None]) -> None:
    """Change an operand; None leaves it out."""
    owner = o if name in ("x", "bias") else o.stored
    other: Any = {name: how(getattr(owner, name))}
    if owner is o:
        setattr(o, name, other[name])
    else:
        o.stored = o.stored._replace(**other)


def nothing(_: Tensor) -> None:
    """Return None."""


BOTH, HALF, BYTES, FOUR = "2:4 int8 by row", "2:4", "float8 by block", "int4 by row"
# Storage, operand, what becomes of it, and how the error begins and what it says that there was.
REFUSED: list[tuple[str, str, Callable[[Tensor], Tensor | None], str]] = [
    (BOTH, "metadata", nothing, r"values must be .*= \[14, 32, 32\].*\[14, 32, 16\]"),
    (BOTH, "scales", nothing, "scales are missing, .*torch.int8"),
    (HALF, "values", Tensor.half, "x must have dtype torch.float16 .*float32"),
    (HALF, "metadata", Tensor.long, "metadata must be .*torch.int32, got.*torch.int64"),
    (HALF, "metadata", lambda m: m[1:], r"metadata must be .*= \[14, 1, 32\].*\[13, 1, 32\]"),
    (HALF, "metadata", Tensor.flatten, r"metadata must be .*\[nnz, bk / 32, bn\]"),
    (HALF, "metadata", lambda m: torch.stack([m, m], 3)[..., 0], "metadata must be a contiguous"),
    (HALF, "metadata", lambda m: m.to("meta"), "metadata must be on cpu .*meta"),
    (BYTES, "scales", Tensor.double, "scales must be .*torch.float32, got.*torch.float64"),
    (BYTES, "scales", lambda s: s[1:], r"scales must be .*= \[14\].*\[13\]"),
    (BYTES, "scales", lambda s: s[:, None], r"scales must be .*= \[14, 32\].*\[14, 1\]"),
    (BYTES, "scales", lambda s: s[:, None, None], r"scales must be .*= \[14, 32\].*\[14, 1, 1\]"),
    (BYTES, "scales", lambda s: torch.stack([s, s], 1)[:, 0], "scales must be a contiguous"),
    (BYTES, "scales", lambda s: s.to("meta"), "scales must be on cpu .*meta"),
    (BYTES, "values", Tensor.float, "scales are given, .*torch.float32"),
    (BYTES, "values", lambda v: v.view(torch.bool), "scales are given, .*torch.bool"),
    (
        BYTES,
        "values",
        lambda v: v.view(torch.uint8),
        r"values must be .*\[14, 32, 16\], got .*\[14, 32, 32\]",
    ),
    (BOTH, "values", lambda v: v.view(torch.uint8), "metadata must be None for values of int4"),
    (FOUR, "scales", nothing, "scales are missing, .*torch.uint8"),
    (BYTES, "x", lambda x: x.to(torch.int8), "x must have dtype float64, float32.*torch.int8"),
    (BYTES, "x", lambda x: x.to("meta"), "x must be on cpu .*meta"),
    (BYTES, "bias", Tensor.half, "bias must have dtype torch.float32 .*torch.float16"),
]


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize(("storage", "name", "how", "named"), REFUSED)
def test_what_does_not_fit_is_named(
    storage: str, name: str, how: Callable[[Tensor], Tensor | None], named: str, policy: str
) -> None:
    """Also after a product that ran: none of it passes for what ran before."""
    o = Operands(storage, name="random 50%", grid=(4, 6))
    o.linear(None, o.bias)
    change(o, name, how)
    with pytest.raises(InvalidArgumentError, match=named):
        o.linear(None, o.bias, policy=policy)


def test_plain_values_have_nothing_besides() -> None:
    o = Operands(HALF)
    plain, ones = o.stored.plain, torch.ones(o.pattern.nnz)
    for values, extras, named in (
        (plain, {"metadata": o.stored.metadata}, r"values must be .*= \[14, 32, 16\]"),
        (plain, {"scales": ones}, "scales are given, .*torch.float32"),
        (plain.to(torch.int8), {}, "scales are missing, .*torch.int8"),
    ):
        with pytest.raises(InvalidArgumentError, match=named):
            functional.linear(o.x, values, o.pattern, **extras)
    with pytest.raises(InvalidArgumentError, match=r"values.*dtype|y.*dtype|scales are missing"):
        functional.dsd(plain.to(torch.int8), o.pattern, o.x.t())


def test_narrow_blocks_are_not_compressed() -> None:
    pattern = make_pattern("full", (2, 2), (32, 16))
    values, mask = random_values(pattern, dtype=torch.float32), torch.ones(4, 32, 16, dtype=torch.bool)
    metadata = torch.zeros(4, 1, 32, dtype=torch.int32)
    halves = values[:, :, :8].contiguous()
    for call, named in (
        (lambda: compress(values, mask), "bk of 32"),
        (lambda: compress(values.mT.contiguous(), mask.mT.contiguous(), transposed=True), "bn of 32"),
        (lambda: functional.linear(torch.ones(3, 32), halves, pattern, metadata=metadata), "bk of 32"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"values: 2:4 is for {named}"):
            call()


WIDE_ONES, ALL = torch.ones(2, 16, 32), torch.ones(2, 16, 32, dtype=torch.bool)


@pytest.mark.parametrize(
    ("values", "mask", "named"),
    [
        (WIDE_ONES, WIDE_ONES, "mask must be .*torch.bool, got.*torch.float32"),
        (WIDE_ONES, ALL[..., :16].contiguous(), r"mask must be .*\[2, 16, 32\].*\[2, 16, 16\]"),
        (WIDE_ONES, ALL.view(2, 32, 16).mT, "mask must be a contiguous"),
        (WIDE_ONES.view(2, 32, 16).mT, ALL, "values must be a contiguous"),
        (WIDE_ONES[0], ALL[0], r"values must be .*\[nnz, bn, bk\]"),
        (torch.ones(2, 16, 48), torch.ones(2, 16, 48, dtype=torch.bool), "block_shape must be .*48"),
        (WIDE_ONES.int(), ALL, "values must be .*torch.int32"),
        (WIDE_ONES, ALL.to("meta"), "mask must be on cpu .*meta"),
    ],
)
def test_bad_compressions_are_named(values: Tensor, mask: Tensor, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        compress(values, mask)


@pytest.mark.parametrize(
    ("storage", "changes", "named"),
    [
        (HALF, {"values": torch.ones(16, 32)}, "values must be "),
        (HALF, {"values": torch.ones(14, 32, 24)}, "block_shape must be .*48"),
        (HALF, {"metadata": torch.zeros(14, 1, 32)}, "metadata must be .*torch.int32"),
        (BYTES, {"scales": None}, "scales are missing"),
        (BYTES, {"dtype": torch.int8}, "dtype must be one of .* got torch.int8"),
        (
            BYTES,
            {"values": torch.ones(14, 32, 32).int(), "scales": None},
            "values must have a dtype of activ",
        ),
    ],
)
def test_bad_expansions_are_named(storage: str, changes: dict[str, Any], named: str) -> None:
    stored = Operands(storage).stored
    arguments = {"values": stored.values, **stored.extras, **changes}
    with pytest.raises(InvalidArgumentError, match=named):
        dequantize(**arguments)


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("compiled", [False, True])
def test_stored_values_have_no_gradient(compiled: bool, policy: str) -> None:
    o = Operands(HALF)
    index, values = o.pattern.index_on(o.x.device), o.stored.values.requires_grad_()

    def run() -> Tensor:
        return o.linear(policy=policy)

    for call in (
        torch.compile(run, backend="aot_eager") if compiled else run,
        lambda: o.dds(o.y, transpose=False),
        lambda: OPS.dds_nt(o.x, values, *index, None, None, 0, False, o.stored.metadata).sum().backward(),
        lambda: OPS.dds_nn(o.y, values, *index, False, o.stored.metadata).sum().backward(),
    ):
        with pytest.raises(UnsupportedError, match="values must be dense blocks"):
            call()
    with torch.no_grad():
        assert_product_close(run(), o.x, o.weight.t())


@pytest.mark.gpu
@pytest.mark.parametrize(("storage", "name"), [(HALF, "metadata"), (BYTES, "scales"), (BYTES, "values")])
def test_mixed_devices(storage: str, name: str) -> None:
    o = Operands(storage, device="cuda")
    o.linear()
    change(o, name, Tensor.cpu)
    with pytest.raises(InvalidArgumentError, match=r"must be on (cpu|cuda:0) like .*, got (cpu|cuda:0)"):
        o.linear()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("device", DEVICES)
def test_stored_values_at_any_address(device: str, storage: str) -> None:
    """Tensors that vectors cannot read are copied, and none is taken for what ran before."""
    o = Operands(storage, device=device)
    expected = o.linear(), o.dds(o.y, transpose=False)

    o.stored = o.stored.map(lambda t: t.new_empty(t.numel() + 1)[1:].view_as(t).copy_(t))
    plain = dequantize(o.stored.values, o.stored.metadata, o.stored.scales, torch.float32)
    assert equal_bits(plain, o.stored.plain)
    assert torch.equal(o.linear(), expected[0]) and torch.equal(o.dds(o.y, transpose=False), expected[1])


@pytest.mark.parametrize("storage", STORAGES)
def test_meta_tensors_give_shapes_only(storage: str) -> None:
    o = Operands(storage)
    stored = o.stored.map(lambda t: t.to("meta"))
    x = torch.empty(2, 5, o.pattern.in_features, device="meta", requires_grad=True)
    for policy in ("sparse", "dense"):
        y = functional.linear(x, stored.values, o.pattern, **stored.extras, policy=policy)
        assert y.is_meta and y.shape == (2, 5, o.pattern.out_features)
        y.sum().backward()
        assert x.grad.shape == x.shape
    assert dequantize(stored.values, stored.metadata, stored.scales).shape == stored.plain.shape


# ---- what acts on operators ----


def check(op: Any, *args: Any, **options: Any) -> None:
    assert set(torch.library.opcheck(op.default, args, options).values()) == {"SUCCESS"}


@pytest.mark.parametrize("storage", ["2:4", "int8 by block", "2:4 int8 by row"])
@pytest.mark.parametrize(("device", "dtype"), [DEVICE_DTYPES[0], DEVICE_DTYPES[-1]])
def test_opcheck_of_products(device: str, dtype: torch.dtype, storage: str) -> None:
    """Not of float8_e4m3fn, which opcheck cannot compare with itself."""
    o = Operands(storage, grid=(2, 3), dtype=dtype, device=device, tokens=9)
    values, metadata, scales, _ = o.stored
    index = o.pattern.index_on(o.x.device)
    x, y, bias = (t.requires_grad_() for t in (o.x, o.y, o.bias))
    check(OPS.dds_nt, x, values, *index, bias, y, 0, False, metadata, scales)
    check(OPS.dds_nt, x.detach(), values, *index, None, None, ACTIVATIONS["relu"], True, metadata, scales)
    check(OPS.dds_nn, y, values, *index, True, metadata, scales)
    check(OPS.dds_nn, y.detach(), values, *index, False, metadata, scales)
    check(OPS.dequantize_values, values, metadata, scales, DTYPES.index(dtype) + 1)


@pytest.mark.parametrize(("device", "dtype"), [DEVICE_DTYPES[0], DEVICE_DTYPES[-1]])
def test_opcheck_of_transposed_values(device: str, dtype: torch.dtype) -> None:
    t = Transposable(device, dtype, tokens=9)
    x, y, values, bias = (leaf.requires_grad_() for leaf in (t.x, t.y, t.values, t.bias))
    check(OPS.dds_nt, x, t.back[0], *t.index, None, None, 0, True, t.back[1], None, True)
    check(OPS.dds_nn, y, t.back[0], *t.index, False, t.back[1], None, True)
    check(OPS.dds_nt, x, values, *t.index, bias, y, **t.kept(True))
    check(OPS.dds_nt, x, values, *t.index, column_major=True, **t.kept(False))
    check(OPS.dds_nt, x.detach(), values, *t.index, column_major=True, **t.kept(False))
    for transposed in (False, True):
        check(OPS.compress, values.detach(), t.mask, transposed)
    check(OPS.compress, values.detach()[:0], t.mask[:0])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("device", DEVICES)
def test_compile_without_graph_breaks(device: str, storage: str) -> None:
    torch.compiler.reset()  # what other parameters compiled counts towards the limit
    o = Operands(storage, device=device)

    def step(x: Tensor) -> Tensor:
        ys = (o.linear(x, o.bias, "gelu", policy=policy) for policy in ("sparse", "dense"))
        return torch.cat([o.dds(y, transpose=False).sin() for y in ys])

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (8, 13):
        x = o.x[:tokens].clone().requires_grad_()
        results = [(y, *torch.autograd.grad(y.sum(), x)) for y in (step(x), compiled(x))]
        torch.testing.assert_close(results[1], results[0])


def test_compile_of_compression() -> None:
    t = Transposable()

    def step(values: Tensor) -> Tensor:
        mask = two_of_four(values.abs(), transposable=True)
        return dequantize(*compress(values, mask)) + dequantize(*compress(values, mask, transposed=True)).mT

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(t.values), 2 * t.values * t.mask)


@pytest.mark.parametrize("storage", STORAGES)
def test_transforms(storage: str) -> None:
    o = Operands(storage, dtype=torch.float64, tokens=5)

    def loss(x: Tensor) -> Tensor:
        return o.linear(x, o.bias).square().sum()

    expected = 2 * (o.x @ o.weight.t() + o.bias) @ o.weight
    torch.testing.assert_close(func.grad(loss)(o.x), expected)
    torch.testing.assert_close(func.vmap(func.grad(loss))(o.x), expected)
    batch = torch.stack([o.y, 2 * o.y])
    torch.testing.assert_close(func.vmap(lambda y: o.dds(y, transpose=False))(batch), batch @ o.weight)


@pytest.mark.parametrize("transposed", [False, True])
def test_transforms_of_products_whose_gradient_passes_through(transposed: bool) -> None:
    t = Transposable(dtype=torch.float64, tokens=5)
    fields: Any = t.kept(transposed)
    kept = _checks.Operands(**fields)

    def loss(values: Tensor, x: Tensor) -> Tensor:
        return linear_on(x, values, t.index, t.bias, operands=kept).square().sum()

    grad = 2 * (t.x @ t.weight.t() + t.bias)
    of_values, of_x = func.grad(loss, (0, 1))(t.values, t.x)
    torch.testing.assert_close(of_values, blocks_of_dense(grad.t() @ t.x, t.pattern))
    torch.testing.assert_close(of_x, grad @ t.weight)
