"""A config for each layer of a model, within a budget of weights, bytes or milliseconds."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .._checks import Progress, aligned, as_number
from ..calibrate.calibration import (
    DAMPING,
    Calibration,
    Forward,
    call_model,
    check_model,
    collected,
    dense_layers,
    expanded,
    tokens_of_projections,
    warn_of_few_tokens,
)
from ..calibrate.stream import chosen_device, observing
from ..config import BlockSparseConfig, LayerSpec, as_nm
from ..errors import InvalidArgumentError
from ..model.match import (
    SkippedLayer,
    block_shape_of,
    checked_config,
    checked_configs,
    chosen_layers,
    described,
    kept_blocks,
    naming_layer,
    reasons,
    shape_of,
)
from ..nn.linear import dense_weight
from ..storage.formats import forms_of
from ..tuning.advise import AdviceReport
from .driver import Pruner

INDEX_BYTES = 4  # of an entry of a pattern's tensors


@dataclass(frozen=True)
class AllocatedLayer:
    """Config of a layer, or None for dense; its error, and its cost beside that of the dense layer."""

    name: str
    shape: tuple[int, int]
    config: BlockSparseConfig | None
    error: float
    cost: float
    dense_cost: float


@dataclass(frozen=True, eq=False)  # equal to any mapping with the same configs
class Allocation(Mapping[str, "BlockSparseConfig | None"]):
    """Result of `allocate`, as a mapping from layer names to configs; ``str()`` makes a table of it.

    Attributes:
        layers: in the order of the profiles.
        unit: of costs, "weights", "bytes" or "ms".
        budget: what costs were to sum up to at most.
        bound: no config within the budget has a sum of errors below it, so that `gap` says what is left.
        note: where costs come from, or "".
    """

    layers: list[AllocatedLayer]
    unit: str
    budget: float
    bound: float
    note: str = ""

    def __getitem__(self, name: str) -> BlockSparseConfig | None:
        return self._configs()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs())

    def __len__(self) -> int:
        return len(self.layers)

    def _configs(self) -> dict[str, BlockSparseConfig | None]:
        return {layer.name: layer.config for layer in self.layers}

    @property
    def error(self) -> float:
        """The sum of the layers' errors."""
        return sum(layer.error for layer in self.layers)

    @property
    def cost(self) -> float:
        """The sum of the layers' costs."""
        return sum(layer.cost for layer in self.layers)

    @property
    def gap(self) -> float:
        """Fraction of the error that better configs might save at most; 0 of an optimum."""
        return (self.error - self.bound) / self.error if self.error else 0.0

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("layer", "shape", "density", "block", "storage", "error", self.unit, "dense")
        ]
        for layer in self.layers:
            shape = f"{layer.shape[0]}x{layer.shape[1]}"
            costs = self._number(layer.cost), self._number(layer.dense_cost)
            rows.append((layer.name, shape, *described(layer.config), f"{layer.error:.4g}", *costs))
        dense = self._number(sum(layer.dense_cost for layer in self.layers))
        rows.append(("sum", "", "", "", "", f"{self.error:.4g}", self._number(self.cost), dense))
        lines = aligned(rows)
        lines.append(
            f"budget {self._number(self.budget)} {self.unit}; no config has an error below {self.bound:.4g}, "
            f"a gap of {self.gap:.2g}"
        )
        return "\n".join([*lines, self.note] if self.note else lines)

    def _number(self, cost: float) -> str:
        return f"{cost:.4f}" if self.unit == "ms" else f"{cost:,.0f}"


def allocate(
    profiles: ErrorProfiles,
    model: nn.Module,
    *,
    parameters: int | None = None,
    bytes: int | None = None,
    milliseconds: float | None = None,
    report: AdviceReport | None = None,
) -> Allocation:
    """Choose a config for every layer, or None for dense, with the least sum of errors within a budget.

    It is a multiple-choice knapsack, solved to a relative gap of 1e-6 by dynamic programming, which bounds of
    the linear relaxation keep small. Where that would take too many states the gap is larger;
    ``gap`` of the result says so in any case. Equal arguments have equal results.

    Errors of different layers are added up although they are relative ones: that what a layer gets wrong
    matters alike in all layers is an assumption.

    Args:
        profiles: from `measure_errors`: by layer and config. Layers not among them are no part of any sum.
        model: has these layers, dense; shapes and dtypes are read, so that it may be on the meta device.
        parameters: how many weights the layers may multiply by: those of kept blocks, with 2:4 half of them.
        bytes: of what the layers may store: weights, masks, metadata, scales and patterns. Biases stay as
            they are and do not count.
        milliseconds: for one call of each layer, as ``report`` has measured it. Exactly one of these three is
            to be given.
        report: from `tilesparse.advise`, with ``milliseconds``.
    """
    unit, budget = _budget(parameters, bytes, milliseconds)
    if (report is not None) != (unit == "ms") or not isinstance(report, AdviceReport | None):
        raise InvalidArgumentError(
            f"report must be an AdviceReport with milliseconds, else None, got {type(report).__name__}"
        )
    layers = dense_layers("profiles", model, profiles)
    options: dict[str, list[BlockSparseConfig | None]] = {}
    costs: list[list[float]] = []
    errors: list[list[float]] = []
    for name, layer in layers.items():
        shape = shape_of(layer)
        options[name] = [None, *checked_configs("profiles", name, profiles[name], shape)]
        if report is not None:
            costs.append([report.milliseconds(name, config) for config in options[name]])
        else:
            cost_of = _weights_of if unit == "weights" else _bytes_of
            costs.append([float(cost_of(layer, config)) for config in options[name]])
        errors.append([0.0, *(_checked_error(name, error) for error in profiles[name].values())])
    least = sum(map(min, costs))
    if budget < least:
        rounded = math.ceil(least * 1e6) / 1e6 if unit == "ms" else math.ceil(least)
        raise InvalidArgumentError(
            f"{_ARGUMENTS[unit]} must be at least {rounded}, the sum of the cheapest configs, got {budget}"
        )
    found = solve(costs, errors, budget)
    note = "" if report is None else f"measured on {report.device.name} in {report.dtype}"
    allocated = [
        AllocatedLayer(name, shape_of(layers[name]), options[name][item], error[item], cost[item], cost[0])
        for name, item, error, cost in zip(layers, found.items, errors, costs, strict=True)
    ]
    return Allocation(allocated, unit, budget, found.bound, note)


_ARGUMENTS = {"weights": "parameters", "bytes": "bytes", "ms": "milliseconds"}  # by units


def _budget(parameters: float | None, bytes: float | None, milliseconds: float | None) -> tuple[str, float]:
    given = {
        unit: number
        for unit, number in (("weights", parameters), ("bytes", bytes), ("ms", milliseconds))
        if number is not None
    }
    if len(given) != 1:
        raise InvalidArgumentError(
            "exactly one of parameters, bytes and milliseconds must be given, got "
            f"{[_ARGUMENTS[unit] for unit in given] or 'none'}"
        )
    ((unit, budget),) = given.items()
    if not 0 <= as_number(budget) < math.inf:
        raise InvalidArgumentError(f"{_ARGUMENTS[unit]} must be a number of at least 0, got {budget!r}")
    return unit, float(budget) if unit == "ms" else math.floor(budget)


def _checked_error(name: str, error: object) -> float:
    if not 0 <= as_number(error) < math.inf:
        raise InvalidArgumentError(
            f"profiles: errors must be finite numbers of at least 0, got {error!r} for layer {name!r}"
        )
    return as_number(error)


def _weights_of(layer: Any, config: BlockSparseConfig | None) -> int:
    """Return how many weights a layer multiplies by."""
    shape = shape_of(layer)
    if config is None:
        return math.prod(shape)
    weights = kept_blocks(config, shape) * math.prod(block_shape_of(config))
    return weights if config.nm is None else weights // 2


def _bytes_of(layer: Any, config: BlockSparseConfig | None) -> int:
    """Return how many bytes a layer stores, but for its bias."""
    weight = dense_weight(layer)
    if config is None:
        return weight.nbytes
    kept = kept_blocks(config, shape_of(layer))
    block_shape, nm = block_shape_of(config), as_nm(config.nm)
    spec = LayerSpec(shape=shape_of(layer), block_shape=block_shape, nnz=kept, dtype=weight.dtype, nm=nm)
    forms = forms_of(spec.with_storage(config.storage, config.granularity, config.activations))
    stored = sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms.values())
    return stored + INDEX_BYTES * (weight.shape[0] // block_shape[0] + 1 + 2 * kept)


GAP = 1e-6  # of the error: states that could save less go
STATES = 10_000  # that are followed at a time; what the others could become enters the bound
ROUNDING = 1e-12  # of the budget, for sums of costs in another order


class Solution(NamedTuple):
    """The item of each group, the sums of their errors and costs, and what no solution's error is below."""

    items: list[int]
    error: float
    cost: float
    bound: float


class _Group(NamedTuple):
    """The items that no other item of the group beats: costs rise, errors fall."""

    costs: list[float]
    errors: list[float]
    items: list[int]
    hull: list[int]  # positions of those on the lower convex hull


class _Hulls:
    """Walk along the hulls of all groups from some position on."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        steps = [
            (position, end, group.costs[end] - group.costs[start], group.errors[end] - group.errors[start])
            for position, group in enumerate(groups)
            for start, end in pairwise(group.hull)
        ]
        steps.sort(key=lambda step: step[3] / step[2])
        self._steps = [step[:3] for step in steps]
        self._positions = torch.tensor([step[0] for step in steps], device="cpu")
        self._costs, self._errors = (_floats([step[which] for step in steps]) for which in (2, 3))
        self._groups = groups

    def bounds(self, first: int, budgets: Tensor) -> Tensor:
        """Return the least error of the groups from `first` on, by the relaxation; ∞ above a budget."""
        cheapest = sum(group.costs[0] for group in self._groups[first:])
        worst = sum(group.errors[0] for group in self._groups[first:])
        here = self._positions >= first
        costs, errors = (
            torch.cat([_floats([start]), start + steps[here].cumsum(0)])
            for start, steps in ((cheapest, self._costs), (worst, self._errors))
        )
        slopes = torch.cat([errors.diff() / costs.diff(), _floats([0.0])])  # behind the last step it is level
        start = (torch.searchsorted(costs, budgets, right=True) - 1).clamp(min=0)
        found = errors[start] + slopes[start] * (budgets - costs[start])
        return found.masked_fill(budgets < cheapest, torch.inf)

    def greedy(self, budget: float) -> list[int]:
        """Return positions in the groups: along the hulls as far as the budget goes, then what still fits."""
        chosen = [0] * len(self._groups)
        left = budget - sum(group.costs[0] for group in self._groups)
        stopped: set[int] = set()
        for position, end, cost in self._steps:
            if position in stopped or cost > left:
                stopped.add(position)
            else:
                chosen[position] = end
                left -= cost
        worst = [(group.errors[0], position) for position, group in enumerate(self._groups)]
        for _, position in sorted(worst, reverse=True):
            group, now = self._groups[position], chosen[position]
            fitting = bisect_right(group.costs, group.costs[now] + left) - 1
            left -= group.costs[fitting] - group.costs[now]
            chosen[position] = fitting
        return chosen


def solve(costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], budget: float) -> Solution:
    """Return the items with the least sum of errors whose costs sum up to at most the budget.

    It is within `GAP` of the optimum unless more than `STATES` states were worth following; the bound says so
    in either case. The same problem always has the same solution. Costs and errors are those of the items of
    each group, finite and at least 0; the cheapest ones fit into the budget.
    """
    budget += ROUNDING * abs(budget)
    groups = [_group(*items) for items in zip(costs, errors, strict=True)]
    # Those that differ most in cost come first: what is left for the others is then filled finely.
    order = sorted(range(len(groups)), key=lambda number: groups[number].costs[0] - groups[number].costs[-1])
    ordered = [groups[number] for number in order]
    positions, bound = _search(ordered, budget)
    items = [0] * len(groups)
    for number, group, position in zip(order, ordered, positions, strict=True):
        items[number] = group.items[position]
    error = sum(float(of[item]) for of, item in zip(errors, items, strict=True))
    cost = sum(float(of[item]) for of, item in zip(costs, items, strict=True))
    return Solution(items, error, cost, min(bound, error))


def _floats(numbers: Sequence[float]) -> Tensor:
    """Return float64 numbers on the host, whatever the default device and dtype are."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _group(costs: Sequence[float], errors: Sequence[float]) -> _Group:
    every = _floats(costs), _floats(errors)
    items = _undominated(*every)
    costs, errors = every[0][items].tolist(), every[1][items].tolist()
    hull: list[int] = []
    for point in range(len(costs)):
        while len(hull) > 1 and _above(costs, errors, hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return _Group(costs, errors, items.tolist(), hull)


def _above(costs: Sequence[float], errors: Sequence[float], left: int, middle: int, right: int) -> bool:
    """Return True if the middle one of three points lies on the line between the others, or above it."""
    rise = (errors[right] - errors[left]) * (costs[middle] - costs[left])
    return (errors[middle] - errors[left]) * (costs[right] - costs[left]) >= rise


def _undominated(costs: Tensor, errors: Tensor) -> Tensor:
    """Return the points that no other one beats in both, by rising cost; of equal ones the first."""
    order = errors.argsort(stable=True)
    order = order[costs[order].argsort(stable=True)]
    falling = errors[order]
    better = torch.ones_like(order, dtype=torch.bool)
    better[1:] = falling[1:] < falling.cummin(0).values[:-1]
    return order[better]


def _search(groups: Sequence[_Group], budget: float) -> tuple[list[int], float]:
    """Return positions in the groups, and a lower bound of all errors."""
    hulls = _Hulls(groups)
    best = hulls.greedy(budget)
    least = sum(group.errors[position] for group, position in zip(groups, best, strict=True))
    bound = least
    costs, errors = _floats([0.0]), _floats([0.0])
    history: list[tuple[Tensor, Tensor]] = []  # of states: from which each comes, and by which item
    for position, group in enumerate(groups):
        new_costs = (costs[:, None] + _floats(group.costs)).view(-1)
        new_errors = (errors[:, None] + _floats(group.errors)).view(-1)
        lower = new_errors + hulls.bounds(position + 1, budget - new_costs)
        worth = lower < least * (1 - GAP)
        if not worth.all():
            bound = min(bound, float(lower[~worth].min()))
        kept = worth.nonzero().squeeze(1)
        kept = kept[_undominated(new_costs[kept], new_errors[kept])]
        if len(kept) > STATES:
            by_bound = lower[kept].argsort(stable=True)
            bound = min(bound, float(lower[kept[by_bound[STATES]]]))
            kept = kept[by_bound[:STATES].sort().values]
        if not len(kept):
            return best, bound
        history.append((kept // len(group.costs), kept % len(group.costs)))
        costs, errors = new_costs[kept], new_errors[kept]
    state = int(errors.argmin())
    bound = min(bound, float(errors[state]))
    found = []
    for parents, positions in reversed(history):
        found.append(int(positions[state]))
        state = int(parents[state])
    return found[::-1], bound


# By layer and config: ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖² on the calibration data, in Frobenius norms; 0 is dense.
ErrorProfiles: TypeAlias = Mapping[str, Mapping[BlockSparseConfig, float]]


def measure_errors(
    model: nn.Module,
    batches: Iterable[Any],
    configs: Sequence[BlockSparseConfig],
    *,
    layers: str | Sequence[str] | None = None,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
) -> ErrorProfiles:
    """Measure the error of each layer's output by each config, in the dense model; nothing changes.

    Layers are pruned by "obs", by the inputs of the dense model, gathered block by block as in `prune_`. The
    order in which blocks go is found once for each block shape, and serves all densities.

    Args:
        model: dense; only read.
        batches: calibration data, as of `prune_`; so are ``layers``, ``forward`` and ``device``.
        configs: ways to store a layer. A layer that cannot be cut into some blocks, or of which a density
            rounds to no block, has no entries for these.
        layers: names or regular expressions, or None.
        forward: calls the model with a batch.
        device: where blocks of the stack and all matrices are computed.

    Returns:
        The error profile of each layer: by config ‖y - ŷ‖² / ‖X Wᵀ‖², of the layer as it would be stored.
    """
    checked = [checked_config("configs", config) for config in configs]
    if not checked:
        raise InvalidArgumentError("configs must have at least one config, got none")
    check_model(model)
    with expanded(model) as experts:
        fitting: dict[str, list[BlockSparseConfig]] = {}
        others: list[SkippedLayer] = []
        for config in dict.fromkeys(checked):
            targets, skipped = chosen_layers(model, config, layers, strict=False, cut=False)
            others += skipped
            for name in targets:
                fitting.setdefault(name, []).append(config)
        if not fitting:
            raise InvalidArgumentError(f"model: no layer is left to measure; {reasons(others)}")
        order = [name for name, _ in model.named_modules() if name in fitting]
        data, device = collected(batches), chosen_device(model, device)
        profiles: dict[str, dict[BlockSparseConfig, float]] = {}
        tokens: dict[str, int] = {}
        with observing(model):
            calibration = Calibration(model, data, forward or call_model, order, device)
            progress = Progress(len(order))
            for group in calibration.groups():
                for name, moments in calibration.moments(group):
                    with naming_layer(name):
                        pruner = Pruner(model.get_submodule(name), moments, DAMPING)
                    tokens[name] = pruner.tokens
                    profiles[name] = {config: pruner.prune(config, "obs").error for config in fitting[name]}
                    progress.show(len(profiles), f"layers measured, {name} the last")
        warn_of_few_tokens(model, tokens_of_projections(experts, tokens))
        return profiles
