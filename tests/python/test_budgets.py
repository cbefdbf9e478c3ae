"""Configs of layers within a budget, and the tables of times that budgets are made of."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from test_docs import executed
from torch import nn

from tilesparse import BlockSparseLinear, prune_
from tilesparse.config import BlockSparseConfig as Config
from tilesparse.errors import InvalidArgumentError
from tilesparse.prune import allocate, measure_errors
from tilesparse.prune import allocation as solver
from tilesparse.prune.allocation import solve
from tilesparse.tuning import AdviceReport, Device
from tilesparse.tuning.advise import MeasuredLayers

PLAIN = [Config(density, (block, block)) for density in (0.25, 0.5, 0.75) for block in (32, 64)]
OTHERS = [Config(0.5, (64, 64), (2, 4), storage) for storage in ("plain", "compressed", "int8")]
CONFIGS = [*PLAIN, *OTHERS, Config(0.5, (64, 64), None, "int8")]


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256, device="meta", dtype=dtype)
        self.down = nn.Linear(256, 128, device="meta", dtype=dtype)
        self.other = nn.Linear(128, 256, bias=False, device="meta", dtype=dtype)


NAMES = ("up", "down", "other")


def profiles_of() -> dict[str, dict[Config, float]]:
    """Layers that matter differently."""
    return {
        name: {c: factor * (1 - c.density + 0.1 * (c.nm is not None)) ** 2 for c in CONFIGS}
        for factor, name in enumerate(NAMES, 1)
    }


def report_of(*configs: Config) -> AdviceReport:
    """Times of these configs, else of all."""
    own = {None: 1.0, **{one: 0.1 + one.density * (1 if one.nm else 1.5) for one in configs or CONFIGS}}
    layers = (
        MeasuredLayers((256, 128), 8, "bfloat16", own, ("up", "other"), 2),
        MeasuredLayers((128, 256), 8, "bfloat16", own, ("down",), 1),
    )
    return AdviceReport(Device("A device", None, 4), {"torch": "2"}, layers, 9.0, None, 1.0, {})


# The knapsack


def brute_force(costs: list[list[float]], errors: list[list[float]], budget: float) -> float:
    """The least error of all that can be chosen."""
    return min(
        sum(of[item] for of, item in zip(errors, items, strict=True))
        for items in product(*map(range, map(len, costs)))
        if sum(of[item] for of, item in zip(costs, items, strict=True)) <= budget * (1 + solver.ROUNDING)
    )


fractions = st.integers(0, 9 << 10).map(lambda number: number / 1024)
items = st.tuples(st.integers(0, 12) | fractions, st.integers(0, 9) | fractions)


@given(st.lists(st.lists(items, min_size=1, max_size=5), min_size=1, max_size=5), st.floats(0, 1))
@settings(max_examples=150)
def test_the_knapsack_is_that_of_all_that_can_be_chosen(
    groups: list[list[tuple[float, float]]], part: float
) -> None:
    costs, errors = ([[float(item[i]) for item in group] for group in groups] for i in (0, 1))
    least, most = sum(map(min, costs)), sum(map(max, costs))
    budget = least + part * (most - least)
    chosen, best = solve(costs, errors, budget), brute_force(costs, errors, budget)
    cost, error = (sum(of[item] for of, item in zip(parts, chosen, strict=True)) for parts in (costs, errors))
    assert cost <= budget * (1 + 2 * solver.ROUNDING) and error <= best * (1 + 2 * solver.GAP) + 1e-8


# Budgets


def test_a_plan_is_the_configs_and_the_sums_of_its_layers() -> None:
    model, profiles = Layers(), profiles_of()
    of: Any = profiles
    total = 4 * 3 * 128 * 256
    plan = allocate(profiles, model, bytes=total // 2)
    assert sum(layer.cost for layer in plan.layers) == plan.cost <= total // 2
    assert plan.error == sum(of[name].get(plan[name], 0.0) for name in NAMES)
    assert list(plan) == list(NAMES)
    assert allocate(profiles, model, bytes=total) == dict.fromkeys(NAMES)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_bytes_are_those_of_the_layers(config: Config) -> None:
    most = 2 * 128 * 256 - 1 if config != OTHERS[0] else 50_000
    plan = allocate({"up": {config: 0.5}}, Layers(torch.bfloat16), bytes=most)
    options: Any = {"block_shape": config.block_shape, "nm": config.nm, "storage": config.storage}
    layer = BlockSparseLinear(128, 256, False, density=config.density, dtype=torch.bfloat16, **options)
    assert plan["up"] == config
    assert plan.cost == sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


@given(st.floats(0, 1), st.sampled_from(["bytes", "milliseconds"]))
@settings(max_examples=40)
def test_budgets_are_met(part: float, unit: str) -> None:
    model, profiles, report = Layers(), profiles_of(), report_of()
    options: dict[str, Any] = {"report": report} if unit == "milliseconds" else {}
    options[unit] = 1e9
    most = allocate(profiles, model, **options).cost
    with pytest.raises(InvalidArgumentError, match=rf"{unit} must be at least [\d.]+") as raised:
        allocate(profiles, model, **(options | {unit: 0}))
    least = float(str(raised.value).split()[5].rstrip(","))
    budget = min(most, least + part * (most - least))
    plan = allocate(profiles, model, **(options | {unit: budget}))
    assert plan.cost <= budget * (1 + 1e-9)


def test_latency_chooses_what_is_fast_and_keeps_dense_what_is_not() -> None:
    report, profiles = report_of(), profiles_of()
    plan = allocate(profiles, Layers(), milliseconds=2.0, report=report)
    configs: list[Any] = [None, *CONFIGS]
    best = min(
        sum(profiles[name].get(config, 0.0) for name, config in zip(NAMES, chosen, strict=True))
        for chosen in product(configs, repeat=3)
        if sum(report.milliseconds("up", config) for config in chosen) <= 2.0
    )
    assert math.isclose(plan.error, best, rel_tol=1e-5)
    assert plan.cost == pytest.approx(sum(report.milliseconds(name, plan[name]) for name in NAMES))
    # At density .75 these are slower than dense, and so never chosen.
    assert all(config is None or config.density < 0.75 for config in plan.values())


ENOUGH = {"bytes": 500_000}
ALLOCATE_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no budget": ({}, "exactly one"),
    "two": ({"milliseconds": 1, "bytes": 1}, "exactly one"),
    "negative": ({"bytes": -1}, "bytes must"),
    "nan": ({"bytes": math.nan}, "bytes must"),
    "a text": ({"bytes": "1"}, "bytes must"),
    "no report": ({"milliseconds": 5.0}, "report must"),
    "no need of one": ({**ENOUGH, "report": report_of()}, "report must"),
    "no profiles": ({**ENOUGH, "profiles": {}}, "profiles must have at least one"),
    "no layer": ({**ENOUGH, "profiles": {"in": {}}}, "profiles must .*'in'"),
    "not dense": ({**ENOUGH, "profiles": {"": {}}}, "profiles must .*''"),
    "nan error": ({**ENOUGH, "profiles": {"up": {PLAIN[0]: math.nan}}}, "profiles: .*'up'"),
    "none kept": ({**ENOUGH, "profiles": {"up": {Config(0.01, (64, 64)): 0.1}}}, "'up': density"),
    "no time": (
        {"milliseconds": 9.0, "report": report_of(CONFIGS[-1])},
        "report must have a time of layer 'up' for density 0.25, 32x32",
    ),
}


@pytest.mark.parametrize("name", ALLOCATE_WRONG)
def test_what_allocate_refuses(name: str) -> None:
    options, text = ALLOCATE_WRONG[name]
    with pytest.raises(InvalidArgumentError, match=text):
        allocate(**{"profiles": profiles_of(), "model": Layers(), **options})


# Configs


def test_configs_as_a_program_has_them() -> None:
    """Numbers of NumPy, and one number for both sides."""
    loose: Any = Config(np.float32(0.5), 32)
    plan = allocate({"up": {loose: np.float32(0.1)}}, Layers(), bytes=np.int64(80_000))
    assert plan == {"up": Config(0.5, (32, 32))}


# From profiles to a model


def test_the_page_on_budgets_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = executed("budgets.md")
    allocation, fast, profiles = names["allocation"], names["fast"], names["profiles"]
    assert allocation.unit == "bytes" and 60_000 < allocation.cost <= 70_000
    assert any(isinstance(module, BlockSparseLinear) for module in names["pruned"])
    assert fast.unit == "ms" and fast.cost <= fast.budget * (1 + 1e-9)
    assert fast.error <= sum(profile[names["alike"]] for profile in profiles.values())
    assert names["report"].layers[0].name == "2"
    assert "budget" in capsys.readouterr().out


def test_a_plan_is_what_a_model_becomes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    batches = [torch.randn(256, 64, generator=seeded(seed)) for seed in range(4)]
    configs = [Config(density, (block, 32)) for density in (0.25, 0.5, 0.75) for block in (16, 32)]
    profiles = measure_errors(model, batches, [*configs, Config(0.5, (32, 32), (2, 4), "compressed")])
    budget = 4 * (64 * 128 + 128 * 128 + 128 * 64) // 2
    plan = allocate(profiles, model, bytes=budget)
    report = prune_(model, plan, batches)
    pruned = {layer.name: layer for layer in report.layers}
    assert set(pruned) == {name for name, config in plan.items() if config is not None}
    stored = 0
    for name, config in plan.items():
        module: Any = model.get_submodule(name)
        if config is not None:
            assert isinstance(module, BlockSparseLinear) and pruned[name].config == config
            found = module.storage, module.nm, module.block_shape
            assert found == (config.storage, config.nm, config.block_shape)
        tensors = (module.weight, *module.buffers())
        stored += sum(tensor.nbytes for tensor in tensors)
    assert stored == plan.cost <= budget


def test_a_plan_that_leaves_all_dense_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    layers = list(model)
    plan = allocate({"0": {Config(0.5, (32, 32)): 0.1}, "2": {}}, model, bytes=4 * 64 * 96)
    report = prune_(model, plan, [torch.randn(4, 64)])
    assert list(model) == layers and report.layers == [] and report.before == report.after
    assert [layer.name for layer in report.skipped] == ["0", "2"] and "its config is None" in str(report)
    with pytest.raises(InvalidArgumentError, match="config must have a config"):
        prune_(model, {}, [torch.randn(4, 64)])
