"""Weights rounded by the moments of their inputs: what is gained, what is exact, and what is never worse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import DEVICES, seeded
from torch import Tensor, nn

from tilesparse import BlockPattern, BlockSparseConfig, BlockSparseLinear, BlockSparseMatrix, quantize_
from tilesparse.calibrate.moments import damped
from tilesparse.errors import InvalidArgumentError
from tilesparse.quantize.weights import RoundedWeight, round_weight
from tilesparse.storage.formats import QuantizedStorage, storage_of

STORAGES = ("int4", "int8", "float8_e4m3fn")
IN, OUT, BLOCK = 128, 64, 16
W4A16 = BlockSparseConfig.w4a16()


def stored_as(name: str) -> QuantizedStorage:
    storage = storage_of(name)
    assert isinstance(storage, QuantizedStorage)
    return storage


def correlated(tokens: int, features: int = IN, seed: int = 0) -> Tensor:
    """Inputs that mostly lie in a quarter of the dimensions, as those of trained layers."""
    mixing = torch.randn(features // 4, features, generator=seeded(7))
    x = torch.randn(tokens, features // 4, generator=seeded(seed)) @ mixing
    return x + 0.3 * torch.randn(tokens, features, generator=seeded(seed + 100))


def case(density: float, device: str = "cpu") -> tuple[Tensor, BlockPattern]:
    pattern = BlockPattern.random((OUT, IN), block_shape=BLOCK, density=density, generator=seeded(1)).to(
        device
    )
    values = torch.randn(pattern.nnz, BLOCK, BLOCK, generator=seeded(2)).to(device)
    return BlockSparseMatrix(values, pattern).to_dense(), pattern


def rounded(weight: Tensor, pattern: BlockPattern, second: Tensor, name: str, **given: Any) -> RoundedWeight:
    options = {"clip": True, **given}
    return round_weight(weight, pattern, second, damped(second), stored_as(name), **options)


def second_of(x: Tensor) -> Tensor:
    return x.double().T @ x.double() / len(x)


def errors_of_rows(weight: Tensor, values: Tensor, pattern: BlockPattern, second: Tensor) -> Tensor:
    wrong = (weight - BlockSparseMatrix(values, pattern).to_dense()).double()
    return ((wrong @ second) * wrong).sum(1)


# ---- one weight ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("density", [1.0, 0.4])
@pytest.mark.parametrize("name", STORAGES)
def test_correlated_inputs_gain(name: str, density: float, device: str) -> None:
    weight, pattern = case(density, device)
    second = second_of(correlated(1000)).to(device)
    found = rounded(weight, pattern, second, name)
    assert found.error < (0.85 if density < 1 else 0.6) * found.error_before
    storage = stored_as(name)
    blocks = BlockSparseMatrix.from_dense(weight, pattern).values
    plain = storage.rounded(blocks, storage.limits_of(blocks))
    before, after = (errors_of_rows(weight, each, pattern, second) for each in (plain, found.values))
    size = ((weight.double() @ second) * weight).sum()
    assert float(before.sum() / size) == pytest.approx(found.error_before)
    assert float(after.sum() / size) == pytest.approx(found.error)
    assert bool((after <= before * (1 + 1e-9)).all())
    assert torch.equal(storage.rounded(found.values, found.limits), found.values)


@pytest.mark.parametrize("name", STORAGES)
def test_rounding_is_that_of_the_inverse_of_kept_columns(name: str) -> None:
    """The textbook's: H⁻¹ of the columns that are left, and its first row, for each column anew."""
    weight, pattern = case(0.4)
    second = second_of(correlated(1000))
    storage, moment = stored_as(name), damped(second)
    found = rounded(weight, pattern, second, name, clip=False)
    mask = pattern.to_mask()
    for row in torch.nonzero(~found.nearest).flatten().tolist()[::7]:
        columns, sizes = mask[row].nonzero().flatten(), moment.matrix.diagonal()
        blocks = sorted(torch.split(columns, BLOCK), key=lambda block: -float(sizes[block].sum()))
        columns = torch.cat([block[sizes[block].argsort(descending=True)] for block in blocks])
        left, inverse = weight[row, columns].double(), torch.linalg.inv(moment.matrix[columns][:, columns])
        expected = torch.zeros(IN)
        for start in range(0, len(columns), BLOCK):
            limit = storage.limits_of(left[:BLOCK].float()[None])
            for column in columns[start : start + BLOCK]:
                value = storage.rounded(left[:1].float()[None], limit)[0]
                expected[column] = value
                left = left[1:] - (left[:1] - value) / inverse[0, 0] * inverse[0, 1:]
                inverse = inverse[1:, 1:] - torch.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
        torch.testing.assert_close(BlockSparseMatrix(found.values, pattern).to_dense()[row], expected)


@pytest.mark.parametrize("name", STORAGES)
def test_weights_that_can_be_stored_stay_as_they_are(name: str) -> None:
    pattern = BlockPattern.random((OUT, IN), block_shape=BLOCK, density=0.5, generator=seeded(1))
    values = torch.randint(-7, 8, (pattern.nnz, BLOCK, BLOCK), generator=seeded(3)).float()
    values[:, :, 0] = {"int4": 7.0, "int8": 127.0, "float8_e4m3fn": 448.0}[name]
    weight = BlockSparseMatrix(values, pattern).to_dense()
    found = rounded(weight, pattern, second_of(correlated(500)), name)
    assert torch.equal(found.values, values) and found.error == 0 and found.clipped == 0


@pytest.mark.parametrize("name", STORAGES)
def test_uncorrelated_inputs_leave_rounding_to_the_nearest(name: str) -> None:
    weight, pattern = case(0.5)
    storage = stored_as(name)
    blocks = BlockSparseMatrix.from_dense(weight, pattern).values
    plain = storage.rounded(blocks, storage.limits_of(blocks))
    found = rounded(weight, pattern, torch.eye(IN, dtype=torch.float64), name, clip=False)
    assert torch.equal(found.values, plain) and found.error == found.error_before


def test_rows_that_would_lose_are_rounded_to_the_nearest() -> None:
    weight, pattern = case(1.0)
    second = torch.eye(IN, dtype=torch.float64)
    found = rounded(weight, pattern, second, "int4")  # whose search tries other clippings than `to_storage`
    fraction = float(found.nearest.float().mean())
    assert 0 < fraction < 1 and found.error < found.error_before
    blocks = BlockSparseMatrix.from_dense(weight, pattern).values
    plain = stored_as("int4").rounded(blocks, stored_as("int4").limits_of(blocks))
    of_rows = BlockSparseMatrix(found.values, pattern).to_dense()[found.nearest]
    assert torch.equal(of_rows, BlockSparseMatrix(plain, pattern).to_dense()[found.nearest])


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_fewer_tokens_than_features_are_damped(tokens: int) -> None:
    weight, pattern = case(0.5)
    second = second_of(correlated(tokens)) if tokens else torch.zeros(IN, IN, dtype=torch.float64)
    found = rounded(weight, pattern, second, "int4")
    assert bool(found.values.isfinite().all()) and found.error <= found.error_before
    if tokens:
        assert found.error < 0.7 * found.error_before


def test_features_that_are_always_zero_or_equal_do_no_harm() -> None:
    weight, pattern = case(1.0)
    x = correlated(500)
    x[:, 3], x[:, 40] = 0, x[:, 41]
    found = rounded(weight, pattern, second_of(x), "int4")
    assert bool(found.values.isfinite().all()) and found.error < found.error_before


def test_empty_patterns_and_rows_are_allowed() -> None:
    second = second_of(correlated(100))
    empty = BlockPattern.from_block_mask(torch.zeros(4, 8, dtype=torch.bool), block_shape=BLOCK)
    found = rounded(torch.zeros(OUT, IN), empty, second, "int4")
    assert found.values.shape == (0, BLOCK, BLOCK) and found.error == 0 and found.clipped == 0
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[2] = False
    weight, _ = case(1.0)
    pattern = BlockPattern.from_block_mask(mask, block_shape=BLOCK)
    weight = weight * pattern.to_mask()
    assert (
        rounded(weight, pattern, second, "int4").error < rounded(weight, pattern, second, "int4").error_before
    )


# ---- models ----


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options: Any = {"density": 0.75, "block_shape": BLOCK}
        self.blocks = nn.ModuleList(
            nn.Sequential(
                BlockSparseLinear(IN, IN, **options), nn.GELU(), BlockSparseLinear(IN, IN, **options)
            )
            for _ in range(2)
        )
        self.head = BlockSparseLinear(IN, OUT, **options)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def model(dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model().to(dtype).eval()


def batches(count: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [correlated(128, seed=seed).view(4, 32, IN).to(dtype) for seed in range(count)]


def loss(made: nn.Module, expected: nn.Module) -> float:
    x = correlated(1000, seed=50)
    with torch.no_grad():
        y, target = (each(x) for each in (made, expected))
    return float((y - target).square().sum() / target.square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STORAGES)
def test_models_lose_less_than_by_to_storage(name: str, dtype: torch.dtype) -> None:
    dense = model(dtype)
    plain, made = copy.deepcopy(dense), copy.deepcopy(dense)
    for layer in plain.modules():
        if isinstance(layer, BlockSparseLinear):
            layer.to_storage(name)
    bias = made.head.bias
    report = quantize_(made, BlockSparseConfig(storage=name), batches(dtype=dtype))
    assert {(layer.storage, layer.activations) for layer in report.layers} == {(name, None)}
    assert [layer.name for layer in report.layers] == [
        *(f"blocks.{block}.{layer}" for block in (0, 1) for layer in (0, 2)),
        "head",
    ]
    assert all(layer.error < layer.error_before for layer in report.layers)
    assert all(layer.tokens == 512 and layer.smoothed_by is None for layer in report.layers)
    assert {layer.storage for layer in made.modules() if isinstance(layer, BlockSparseLinear)} == {name}
    assert made.head.bias is bias and made.head.activations is None and made.head.storage_error > 0
    if dtype == torch.float32:  # in 16 bits other rounding hides what 8 bits lose
        assert loss(made, dense) < 0.8 * loss(plain, dense)
    assert "nearest" in str(report) and f"5 layers stored as {name}" in str(report)


def test_errors_of_the_report_are_those_of_the_stored_layers() -> None:
    dense, data = model(), batches()
    made = copy.deepcopy(dense)
    report = quantize_(made, W4A16, data)
    inputs: dict[str, Tensor] = {}
    names = [layer.name for layer in report.layers]
    for name in names:  # layers are rounded by inputs behind those that are rounded before
        made.get_submodule(name).register_forward_pre_hook(
            lambda _, x, name=name: inputs.update({name: x[0].flatten(0, 1)})
        )
    with torch.no_grad():
        made(torch.cat(data))
        for layer in report.layers:
            x, bias = inputs[layer.name], dense.get_submodule(layer.name).bias
            y, target = (each.get_submodule(layer.name)(x) - bias for each in (made, dense))
            of_tokens = (y - target).square().sum(1) / target.square().sum(1)
            assert float(of_tokens.mean()) == pytest.approx(layer.error, rel=1e-3), layer.name


def test_clip_false_takes_the_scales_of_to_storage() -> None:
    made = model()
    report = quantize_(made, BlockSparseConfig.w8a16(), batches(), clip=False)
    assert all(layer.clipped == 0 for layer in report.layers)
    assert all(layer.error < layer.error_before for layer in report.layers)


def test_layers_of_2_4_are_skipped() -> None:
    made = model()
    made.head = BlockSparseLinear(IN, OUT, density=0.5, block_shape=32, nm=(2, 4))
    for storage, reason in (
        ("int8", "2:4, whose weights are rounded one by one"),
        ("int4", "nm must be None"),
    ):
        report = quantize_(copy.deepcopy(made), BlockSparseConfig(storage=storage), batches(2))
        assert [layer.name for layer in report.skipped] == ["head"]
        assert reason in report.skipped[0].reason


def assert_unchanged(made: nn.Module, before: nn.Module) -> None:
    for (name, tensor), old in zip(made.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(tensor, old), name


def test_errors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    before, data = copy.deepcopy(made), batches()
    data[2][0, 0, 0] = torch.nan
    with pytest.raises(InvalidArgumentError, match=r"batch 2 \(counted from 0\).*'blocks.0.0'"):
        quantize_(made, W4A16, data)
    assert_unchanged(made, before)
    made.unused = BlockSparseLinear(IN, IN, density=1, block_shape=BLOCK)
    before = copy.deepcopy(made)
    with pytest.raises(InvalidArgumentError, match="batches must run layer 'unused'"):
        quantize_(made, W4A16, batches(2))
    assert_unchanged(made, before)
    calls, to_storage = [], BlockSparseLinear.to_storage

    def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError
        return to_storage(self, *arguments, **options)

    monkeypatch.setattr(BlockSparseLinear, "to_storage", failing)
    with pytest.raises(MemoryError):
        quantize_(made, W4A16, batches(2), layers=["blocks", "head"])
    assert_unchanged(made, before)


def test_a_weight_that_is_not_finite_is_named() -> None:
    made = model()
    with torch.no_grad():
        made.head.weight[0, 0, 0] = torch.inf
    with pytest.raises(InvalidArgumentError, match=r"layer 'head': weight must be finite"):
        quantize_(made, W4A16, batches(2))


def test_few_tokens_are_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"at least as many tokens as it has inputs.*got 128 of 129 at blocks"
    ):
        quantize_(model(), W4A16, batches(1))


# ---- values of to_storage ----


@pytest.mark.parametrize("name", STORAGES)
def test_given_values_are_stored_and_count_in_the_error(name: str) -> None:
    layer = BlockSparseLinear(IN, OUT, density=0.5, block_shape=BLOCK)
    weight, storage = layer.plain_values(), stored_as(name)
    limits = storage.limits_of(weight)
    given = storage.rounded(weight * 0.9, limits)
    layer.to_storage(name, limits=limits, values=given)
    torch.testing.assert_close(layer.plain_values(), given)
    expected = float((given - weight).norm() / weight.norm())
    assert layer.storage_error == pytest.approx(expected, rel=1e-4)


def test_values_that_do_not_fit_are_refused() -> None:
    layer = BlockSparseLinear(IN, OUT, density=0.5, block_shape=BLOCK)
    weight = layer.plain_values()
    with pytest.raises(InvalidArgumentError, match=r"values must be \[16, 16, 16\]"):
        layer.to_storage("int4", values=weight[:3])
    with pytest.raises(InvalidArgumentError, match="values must be None with storage 'plain'"):
        layer.to_storage("plain", values=weight)
    with pytest.raises(InvalidArgumentError, match="must be finite"):
        layer.to_storage("int4", values=weight / 0)
    assert layer.storage == "plain" and torch.equal(layer.weight, weight)
