"""The multiple-choice knapsack: one item of every group, so that errors are least and costs stay in a budget.

States are sums of cost and error over the first groups, of which only those remain that no other one beats in
both (Nemhauser and Ullmann, "Discrete Dynamic Programming and Capital Allocation", Management Science 1969).
The linear relaxation of the other groups, which is a walk along their lower convex hulls (Sinha and Zoltners,
"The Multiple-Choice Knapsack Problem", Operations Research 1979), bounds what can become of a state; those
that cannot beat the best solution known go.

`scipy.optimize.milp` (SciPy 1.17, HiGHS 1.12) finds the same optima, but loses what budgets need: its sums of
costs exceed a budget by up to 1e-6 of it unless costs are scaled up (1,240 weights in one case); with a limit
of time its results differ, with a limit of nodes there may be none; and it prints lines of its own on stdout.
12 problems of 500 layers with 10 configs each took it 0.4 to 7.5 s, one of them 38 s with other units of
costs, and this solver 0.1 to 1.2 s, on one core.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

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
    in either case. The same problem always has the same solution.

    Args:
        costs: of the items of each group, finite and at least 0; the cheapest ones fit into the budget.
        errors: likewise.
        budget: for the sum of costs.
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
