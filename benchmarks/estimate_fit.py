"""Coefficients of estimates: what they are fitted by, and how kernels that are chosen by them compare.

An estimate is a sum of features times coefficients that are not negative (docs/developers/plans.md). For
each family of kernels and each block they are found in two steps: non-negative least squares of relative
errors, in which a family's coefficients for one block stay near those for all blocks, and those for groups
near those for one weight; then all of them together by L-BFGS-B, which lessens errors and what choices cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize, nnls

Array = np.ndarray[Any, np.dtype[Any]]
Key = tuple[str, int, int]  # family, and the block along features and along k, (0, 0) for all
Coefficients = dict[Key, Array]

NEAR = 10.0  # measurements that the coefficients of more count as
MOST = 1500  # measurements that are enough for least squares
ROUNDS = 4  # of least squares, in which large errors count less and less
STEADY = 0.05  # relative error from which they do
ITERATIONS = 200
CLOSE, LARGE = 4.0, 0.3  # powers by which errors count, see _weights
CHOICES = 2.0  # what costs of choices weigh beside errors
SHARP = 0.06  # relative difference of estimates by which a choice becomes certain
MOST_COST = 1.0  # of a choice: more are measurements that something interrupted
GROUPED = "_grouped"  # ends families that stay near those without it
FAST8, FLOAT8 = "_fast8", "_float8"  # families of fast sums stay near those of usual ones


class Row(NamedTuple):
    """One kernel of one case; what is dequantized first has a second key and features of its own."""

    kernel: str
    case: int
    time: float  # microseconds
    parts: tuple[tuple[Key, Array], ...]
    chosen: bool = True  # False: dense, which is not among the kernels that are chosen from


class Loss(NamedTuple):
    """Return by how much the chosen kernel of a case, and the best of three, take longer than the best."""

    case: int
    chosen: float
    of_three: float


def parent(key: Key) -> Key | None:
    """The key whose coefficients speak for this one where little was measured."""
    family, rows, columns = key
    if rows != columns:
        return family, min(rows, columns), min(rows, columns)
    near = family.replace(FAST8, FLOAT8) if FAST8 in family else family.removesuffix(GROUPED)
    if rows and near != family:
        return near, rows, columns
    return (family, 0, 0) if rows else None


def lineage(key: Key) -> Iterator[Key]:
    """Yield the key, its parent, and so on."""
    above: Key | None = key
    while above is not None:
        yield above
        above = parent(above)


class Table:
    """Rows as arrays: a row of coefficients for each key and each of its parents."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.keys: dict[Key, int] = {}
        for row in rows:
            for key, _ in row.parts:
                for own in lineage(key):
                    self.keys.setdefault(own, len(self.keys))
        self.parents = [self.keys[above] if (above := parent(key)) else -1 for key in self.keys]
        self.times = np.array([row.time for row in rows])
        self.cases = np.array([row.case for row in rows])
        self.chosen = np.array([row.chosen for row in rows])
        owned = [(number, self.keys[key], one) for number, row in enumerate(rows) for key, one in row.parts]
        self.row, self.key = (np.array(column) for column in list(zip(*owned, strict=True))[:2])
        self.features = np.array([one for _, _, one in owned])
        self.relative = self.features / self.times[self.row][:, None]
        self.count = self.features.shape[1]

    @cached_property
    def places(self) -> list[Array]:
        """For each key, where features of its own are, and of all keys that it is a parent of."""
        found: list[list[int]] = [[] for _ in self.keys]
        for place, key in enumerate(self.key.tolist()):
            while key >= 0:
                found[key].append(place)
                key = self.parents[key]
        return [np.array(one) for one in found]

    @cached_property
    def typical(self) -> Array:
        """Root mean square of features relative to times, for each key [keys, features].

        The few products that were measured of one block may be small, and say little of what counts in large
        ones: the mean over all blocks of the family is the least.
        """
        own = np.array([np.sqrt((self.relative[places] ** 2).mean(0)) for places in self.places])
        roots = [self.keys[list(lineage(key))[-1]] for key in self.keys]
        return np.asarray(np.maximum(own, own[roots]))

    def estimates(self, coefficients: Array) -> Array:
        """Microseconds of each row."""
        terms = np.einsum("ij,ij->i", self.features, coefficients[self.key])
        return np.maximum(np.bincount(self.row, terms, len(self.times)), 1e-3)

    def array(self, found: Coefficients) -> Array:
        """The coefficients that speak for each key."""
        result = np.zeros((len(self.keys), self.count))
        for key, number in self.keys.items():
            known = next((above for above in lineage(key) if above in found), None)
            if known is not None:
                result[number] = found[known]
        return result


def fit(rows: Sequence[Row], first: Coefficients | None = None) -> Coefficients:
    """Coefficients for each key of some rows; `first` are those of another GPU, to which they stay near."""
    table = Table(rows)
    start = least_squares(table, first or {})
    found = _of_choices(table, start)
    measured = set(table.key)  # the other GPU speaks for blocks that have no rows, if it knows them
    return {
        key: found[number]
        for key, number in table.keys.items()
        if number in measured or key not in (first or {})
    }


def least_squares(table: Table, first: Coefficients) -> Array:
    """Coefficients of all keys, those that speak for others first."""
    result = np.zeros((len(table.keys), table.count))
    for key, number in sorted(table.keys.items(), key=lambda item: len(list(lineage(item[0])))):
        own = table.places[number][:: 1 + len(table.places[number]) // MOST]
        near = first.get(key, result[table.parents[number]] if table.parents[number] >= 0 else None)
        result[number] = _solve(table.relative[own], near, table.typical[number] + 1e-12)
    return result


def _solve(relative: Array, near: Array | None, sizes: Array) -> Array:
    """Non-negative least squares of relative errors; large errors count as their roots, nearly."""
    scaled, weights = relative / sizes, np.ones(len(relative))
    tie = np.sqrt(NEAR) if near is not None else 0.02 * np.sqrt(len(relative))
    aim = np.zeros(len(sizes)) if near is None else near * sizes
    for _ in range(ROUNDS):
        matrix = np.vstack([scaled * weights[:, None], tie * np.eye(len(sizes))])
        result = nnls(matrix, np.concatenate([weights, tie * aim]), maxiter=3000)[0]
        found = np.maximum(scaled @ result, 1e-3)
        weights = 1 / np.sqrt(found * np.maximum(np.abs(np.log(found)), STEADY) / STEADY)
    return np.asarray(result / sizes)


def _of_choices(table: Table, start: Array) -> Array:
    """Lessens the mean error and the mean cost of choices together, near the coefficients at the start."""
    sizes = table.typical
    scale = np.where(sizes > 1e-9, 1 / np.maximum(sizes, 1e-9), 0)
    features, aim = table.features * scale[table.key], start * sizes
    choice, weights = _Choices(table), _weights(table)
    count = len(table.times)

    def cost(flat: Array) -> tuple[float, Array]:
        scaled = flat.reshape(start.shape)
        terms = np.einsum("ij,ij->i", features, scaled[table.key])
        found = np.maximum(np.bincount(table.row, terms, count), 1e-3)
        error = np.log(found / table.times)
        sizes = np.sqrt(error**2 + 0.01)
        of_choices, slopes = choice.cost(np.log(found))
        apart = scaled - aim
        slopes = (weights * error / sizes / count + CHOICES * slopes) / found
        gradient = _sums(table, features * slopes[table.row][:, None]) + 2 * NEAR / count * apart
        total = (weights * sizes).mean() + CHOICES * of_choices + NEAR / count * (apart**2).sum()
        return float(total), gradient.ravel()

    bounds = [(0, None if one > 0 else 0) for one in scale.ravel()]
    begin = np.maximum(aim, 1e-3 * (scale > 0)).ravel()
    options = {"maxiter": ITERATIONS, "maxfun": 2 * ITERATIONS}
    found = minimize(cost, begin, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    has_rows = np.isin(np.arange(len(start)), table.key)
    return np.where(has_rows[:, None], found.reshape(start.shape) * scale, start)


def _weights(table: Table) -> Array:
    """Return weights of errors, 1 in the mean: larger for kernels close to the best and for long times."""
    best = np.full(table.cases.max() + 1, np.inf)
    np.minimum.at(best, table.cases, np.where(table.chosen, table.times, np.inf))
    close = np.minimum(best[table.cases] / table.times, 1.0)
    weights = close**CLOSE * table.times**LARGE
    return np.asarray(weights / weights.mean())


def _sums(table: Table, values: Array) -> Array:
    """Sums over the features of each key."""
    columns = [np.bincount(table.key, column, len(table.keys)) for column in values.T]
    return np.stack(columns, axis=1)


class _Choices:
    """The cost of choices as a smooth function: each kernel is chosen the likelier the less its estimate."""

    def __init__(self, table: Table) -> None:
        self._rows = np.flatnonzero(table.chosen)
        cases = table.cases[self._rows]
        begins = np.r_[True, cases[1:] != cases[:-1]]
        self._starts, self._case = np.flatnonzero(begins), np.cumsum(begins) - 1
        times = table.times[self._rows]
        best = np.minimum.reduceat(times, self._starts)
        self._costs = np.minimum(times / best[self._case] - 1, MOST_COST)
        self._count = len(table.times)

    def cost(self, logarithms: Array) -> tuple[float, Array]:
        """The mean over cases, and its slope for the logarithm of each estimate."""
        scores = -logarithms[self._rows] / SHARP
        likely = np.exp(scores - np.maximum.reduceat(scores, self._starts)[self._case])
        likely /= np.add.reduceat(likely, self._starts)[self._case]
        means = np.add.reduceat(likely * self._costs, self._starts)
        slopes = np.zeros(self._count)
        slopes[self._rows] = -likely * (self._costs - means[self._case]) / SHARP / len(self._starts)
        return float(means.mean()), slopes


def losses(rows: Sequence[Row], estimates: Iterable[float]) -> list[Loss]:
    """Return the loss of each case with several kernels."""
    cases: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row, estimate in zip(rows, estimates, strict=True):
        if row.chosen:
            cases[row.case].append((estimate, row.time))
    found = []
    for case, kernels in cases.items():
        times = [time for _, time in sorted(kernels)]
        if len(times) > 1:
            found.append(Loss(case, times[0] / min(times) - 1, min(times[:3]) / min(times) - 1))
    return found


def left_out(
    rows: Sequence[Row], group_of: Callable[[int], Hashable], first: Coefficients | None = None
) -> list[Loss]:
    """Return the losses of each group's cases, by coefficients fitted to all others."""
    groups: dict[Hashable, set[int]] = defaultdict(set)
    for row in rows:
        groups[group_of(row.case)].add(row.case)
    found: list[Loss] = []
    for cases in groups.values():
        own = [row for row in rows if row.case in cases]
        coefficients = fit([row for row in rows if row.case not in cases], first)
        table = Table(own)
        found += losses(own, table.estimates(table.array({**(first or {}), **coefficients})))
    return found


def summary(found: Sequence[Loss]) -> Mapping[str, float]:
    """Shares: the mean loss, how often it is over 10 %, and the mean of the best of three."""
    chosen, of_three = (np.array(column) for column in list(zip(*found, strict=True))[1:])
    return {
        "cases": len(found),
        "mean": round(float(chosen.mean()), 5),
        "over_10": round(float((chosen > 0.1).mean()), 5),
        "best_of_three": round(float(of_three.mean()), 5),
    }
