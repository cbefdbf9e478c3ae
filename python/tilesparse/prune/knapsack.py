"""The multiple-choice knapsack: one item of every group, so that errors are least and costs stay in a budget.

States are sums of cost and error over the first groups, of which only those remain that no other one beats in
both (Nemhauser and Ullmann, "Discrete Dynamic Programming and Capital Allocation", Management Science 1969).
The linear relaxation of the other groups, which is a walk along their lower convex hulls (Sinha and Zoltners,
"The Multiple-Choice Knapsack Problem", Operations Research 1979), bounds what can become of a state; those
that cannot beat the best solution known go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

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

    costs: Floats
    errors: Floats
    items: Integers
    hull: list[int]  # positions of those on the lower convex hull


class _Hulls:
    """Walks along the hulls of all groups from some position on."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        steps = [
            (position, group, start, end)
            for position, group in enumerate(groups)
            for start, end in zip(group.hull[:-1], group.hull[1:], strict=True)
        ]
        costs = np.array([group.costs[end] - group.costs[start] for _, group, start, end in steps])
        errors = np.array([group.errors[end] - group.errors[start] for _, group, start, end in steps])
        slopes = errors / costs if steps else np.empty(0)
        order = np.argsort(slopes, kind="stable")
        self._positions = np.array([position for position, *_ in steps], dtype=np.int64)[order]
        self._ends = [steps[step][3] for step in order]
        self._costs, self._errors, self._groups = costs[order], errors[order], groups

    def bounds(self, first: int, budgets: Floats) -> Floats:
        """The least error that the groups from `first` on can have, by the relaxation; ∞ above a budget."""
        cheapest = sum(float(group.costs[0]) for group in self._groups[first:])
        worst = sum(float(group.errors[0]) for group in self._groups[first:])
        here = self._positions >= first
        costs = np.concatenate([[0.0], np.cumsum(self._costs[here])]) + cheapest
        errors = np.concatenate([[0.0], np.cumsum(self._errors[here])]) + worst
        return np.where(budgets < cheapest, np.inf, np.interp(budgets, costs, errors))

    def greedy(self, budget: float) -> list[int]:
        """Positions in the groups: along the hulls as far as the budget goes, and then what still fits."""
        chosen = [0] * len(self._groups)
        left = budget - sum(float(group.costs[0]) for group in self._groups)
        stopped: set[int] = set()
        for position, end, cost in zip(self._positions.tolist(), self._ends, self._costs, strict=True):
            if position in stopped or cost > left:
                stopped.add(position)
            else:
                chosen[position] = end
                left -= float(cost)
        for position in np.argsort([group.errors[0] for group in self._groups], kind="stable")[::-1]:
            group, now = self._groups[position], chosen[position]
            fitting = int(np.searchsorted(group.costs, group.costs[now] + left, side="right")) - 1
            left -= float(group.costs[fitting] - group.costs[now])
            chosen[position] = fitting
        return chosen


def solve(costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], budget: float) -> Solution:
    """The items with the least sum of errors whose costs sum up to at most the budget.

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
        items[number] = int(group.items[position])
    error = sum(float(of[item]) for of, item in zip(errors, items, strict=True))
    cost = sum(float(of[item]) for of, item in zip(costs, items, strict=True))
    return Solution(items, error, cost, min(bound, error))


def _group(costs: Sequence[float], errors: Sequence[float]) -> _Group:
    every = np.asarray(costs, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    items = _undominated(*every)
    costs_, errors_ = every[0][items], every[1][items]
    hull: list[int] = []
    for point in range(len(items)):
        while len(hull) > 1 and _above(costs_, errors_, hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return _Group(costs_, errors_, items, hull)


def _above(costs: Floats, errors: Floats, left: int, middle: int, right: int) -> bool:
    """Whether the middle one of three points lies on the line between the others, or above it."""
    rise = (errors[right] - errors[left]) * (costs[middle] - costs[left])
    return bool((errors[middle] - errors[left]) * (costs[right] - costs[left]) >= rise)


def _undominated(costs: Floats, errors: Floats) -> Integers:
    """Which points no other one beats in both, by rising cost; of equal ones the first."""
    order = np.lexsort((errors, costs))
    least = np.minimum.accumulate(errors[order])
    better = np.concatenate([[True], errors[order][1:] < least[:-1]])
    found: Integers = order[better]
    return found


def _search(groups: Sequence[_Group], budget: float) -> tuple[list[int], float]:
    """Positions in the groups, and what no error is below."""
    hulls = _Hulls(groups)
    best = hulls.greedy(budget)
    least = sum(float(group.errors[position]) for group, position in zip(groups, best, strict=True))
    bound = least
    costs, errors = np.zeros(1), np.zeros(1)
    history: list[tuple[Any, Any]] = []  # of each group: the state that a state comes from, and its position
    for position, group in enumerate(groups):
        new_costs = (costs[:, None] + group.costs).ravel()
        new_errors = (errors[:, None] + group.errors).ravel()
        lower = new_errors + hulls.bounds(position + 1, budget - new_costs)
        worth = lower < least * (1 - GAP)
        if not worth.all():
            bound = min(bound, float(lower[~worth].min()))
        kept = np.flatnonzero(worth)
        kept = kept[_undominated(new_costs[kept], new_errors[kept])] if len(kept) else kept
        if len(kept) > STATES:
            by_bound = np.argsort(lower[kept], kind="stable")
            bound = min(bound, float(lower[kept[by_bound[STATES]]]))
            kept = kept[np.sort(by_bound[:STATES])]
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
