"""Fits the coefficients of estimates to times of kernels, and writes them where the library is built from.

    python benchmarks/fit_estimates.py benchmarks/results/h100_kernels.json benchmarks/results/h200_kernels.json

Estimates are sums of features times coefficients that are not negative (docs/developers/estimates.md). The
library says what the features of a product and a kernel are; here coefficients are found for each GPU, family
of kernels and block by non-negative least squares on relative errors, robustly, as patterns differ and the
library cannot see them. Where there are few measurements coefficients stay near those of more: of all blocks,
of families like it, or of the first GPU. Choices are then compared with the best kernels, also for layers that
were left out of the fit. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kernel_cases import product_of
from scipy.optimize import nnls

from tilesparse import _C, UnsupportedError

TARGET = Path(__file__).parents[1] / "cuda" / "common" / "coefficients.inc"
GPUS = {"NVIDIA H100": "H100", "NVIDIA H200": "H200"}  # beginnings of the driver's names; as in machine.h
DEVICE = (1, 90, 132, 232448)
DENSE = "dense"  # in the place of a kernel
ROUNDS = 8  # of robust fitting
STEADY = 0.05  # relative error from which a measurement counts less
NEAR = 2.0  # measurements that the coefficients of more count as
MOST = 1500  # measurements that are enough
LEAST = 4  # measurements that coefficients of their own need

Key = tuple[str, int]  # family and block
Array = np.ndarray[Any, np.dtype[np.float64]]
Coefficients = dict[Key, Array]


class Row(NamedTuple):
    """One kernel of one case."""

    family: str
    block: int
    features: Array
    time: float


class Measured(NamedTuple):
    """One case: all kernels that were timed, and the dense product with its expansion of W."""

    case: Mapping[str, Any]
    rows: dict[str, Row]

    @property
    def layer(self) -> tuple[int, int]:
        return self.case["out_features"], self.case["in_features"]


def main(argv: Sequence[str] | None = None) -> int:
    """Fits, compares and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="of bench_kernels.py, the best covered GPU first")
    parser.add_argument("--output", type=Path, default=TARGET, help="(%(default)s)")
    parser.add_argument("--left-out", action="store_true", help="fit without each layer, too, and compare")
    arguments = parser.parse_args(argv)
    fitted: dict[str, Coefficients] = {}
    for path in arguments.results:
        gpu, cases = load(json.loads(path.read_text()))
        first = next(iter(fitted.values()), {})
        fitted[gpu] = fit(cases, first)
        print(f"{gpu}: {len(cases)} cases, {len(fitted[gpu])} rows of coefficients")
        report(losses(cases, {**first, **fitted[gpu]}))
        if arguments.left_out:
            print(f"{gpu}, of layers that were left out:")
            report([one for layer in sorted({case.layer for case in cases}) for one in left_out(cases, layer, first)])
    arguments.output.write_text(as_text(fitted, [path.name for path in arguments.results]))
    return 0


def load(document: Mapping[str, Any]) -> tuple[str, list[Measured]]:
    """The GPU, and its cases with the features that the library has of them."""
    name = document["environment"]["gpu"]
    gpu = next(short for beginning, short in GPUS.items() if name.startswith(beginning))
    device, kernels = _C.DeviceInfo(*DEVICE, name), {kernel.name: i for i, kernel in enumerate(_C.kernels())}
    return gpu, [measured for case in document["cases"] if (measured := _measured(case, device, kernels)).rows]


def _measured(case: Mapping[str, Any], device: _C.DeviceInfo, kernels: Mapping[str, int]) -> Measured:
    """Without the time in which values are dequantized first, which is not fitted."""
    (bn, bk), result = case["block_shape"], case["results"][0]
    nnz = round(case["density"] * (case["out_features"] // bn) * (case["in_features"] // bk))
    product, plain = product_of(case, nnz), product_of({**case, "storage": "plain", "nm": False}, nnz)
    stored = case.get("storage", "plain") != "plain" and case.get("activations") is None
    times = {name: time for name, time in result.get("kernels_us", {}).items() if name in kernels}
    if not stored and result.get("expanded_us"):
        times[DENSE] = result["expanded_us"]
    rows = {}
    for name, time in times.items():
        number = -1 if name == DENSE else kernels[name]
        family, features = product.features(device, number)
        dequantizing = 0.0
        if stored and product.features(device, number) == _features(plain, device, number):
            dequantizing = product.estimate(device, number) - plain.estimate(device, number)
        rows[name] = Row(family, min(bn, bk), np.array(features), time - dequantizing)
    return Measured(case, rows)


def _features(product: _C.Product, device: _C.DeviceInfo, number: int) -> tuple[str, list[float]] | None:
    try:
        return product.features(device, number)
    except UnsupportedError:
        return None


def prefixes(family: str) -> Iterator[str]:
    """The family and those that speak for it."""
    while family:
        yield family
        family = family.rpartition("_")[0]


def keys(family: str, block: int) -> Iterator[Key]:
    """Where coefficients are looked for, in this order, on one GPU."""
    for prefix in prefixes(family):
        yield prefix, block
        yield prefix, 0


def fit(cases: Sequence[Measured], first: Coefficients) -> Coefficients:
    """Coefficients of every family, of those that speak for several of them, and of their blocks."""
    rows: dict[Key, list[Row]] = defaultdict(list)
    for case in cases:
        for row in case.rows.values():
            for key in keys(row.family, row.block):
                rows[key].append(row)
    found: Coefficients = {}
    for key in sorted(rows, key=lambda key: (key[0].count("_"), key[1])):  # the general ones first
        if len(rows[key]) < LEAST:
            continue
        near = [found[other] for other in list(keys(*key))[1:] if other in found]
        if key in first:
            near = [first[key]]
        found[key] = solve(rows[key][:: 1 + len(rows[key]) // MOST], near[0] if near else None)
    return found


def solve(rows: Sequence[Row], near: Array | None) -> Array:
    """Non-negative least squares of logarithms of errors, nearly; large errors count as their roots."""
    features, times = np.array([row.features for row in rows]), np.array([row.time for row in rows])
    times = np.maximum(times, 0.5)
    weights, result = 1 / times, np.zeros(features.shape[1])
    for _ in range(ROUNDS):
        matrix, target = features * weights[:, None], times * weights
        sizes = np.linalg.norm(matrix, axis=0) + 1e-12
        if near is not None:
            tie = np.diag(sizes * np.sqrt(NEAR / len(rows)))
            matrix, target = np.vstack([matrix, tie]), np.concatenate([target, tie @ near])
        scaled, _ = nnls(matrix / sizes, target, maxiter=1000)
        result = scaled / sizes
        found = np.maximum(features @ result, 1e-6)
        errors = np.maximum(np.abs(np.log(found / times)), STEADY) / STEADY
        weights = 1 / np.sqrt(times * found * errors)
    return result


class Loss(NamedTuple):
    """How much longer than the best kernel of a case the chosen one takes, and the best of three."""

    case: Mapping[str, Any]
    chosen: float
    of_three: float


def losses(cases: Sequence[Measured], coefficients: Coefficients) -> list[Loss]:
    """Of all cases with several kernels."""
    found = []
    for case in cases:
        estimates = {
            name: float(_coefficients_of(coefficients, row) @ row.features) - row.time + _time(case, name)
            for name, row in case.rows.items()
            if name != DENSE
        }
        if len(estimates) < 2:
            continue
        ranked = sorted(estimates, key=lambda name: estimates[name])
        times = {name: _time(case, name) for name in ranked}
        best = min(times.values())
        found.append(
            Loss(case.case, times[ranked[0]] / best - 1, min(times[name] for name in ranked[:3]) / best - 1)
        )
    return found


def _time(case: Measured, name: str) -> float:
    time: float = case.case["results"][0]["kernels_us"][name]
    return time


def _coefficients_of(coefficients: Coefficients, row: Row) -> Array:
    return next(coefficients[key] for key in keys(row.family, row.block) if key in coefficients)


def left_out(cases: Sequence[Measured], layer: tuple[int, int], first: Coefficients) -> list[Loss]:
    """Of the cases of one layer, by the coefficients of all others."""
    others = fit([case for case in cases if case.layer != layer], first)
    return losses([case for case in cases if case.layer == layer], {**first, **others})


def report(found: Sequence[Loss]) -> None:
    """A line for each kind of product."""
    kinds: dict[str, list[Loss]] = defaultdict(list)
    for loss in found:
        kinds[f"{loss.case.get('kind', 'bf16')} {loss.case['op']}"].append(loss)
    for kind, own in [*sorted(kinds.items()), ("all", list(found))]:
        mean, over, three = _summary(own)
        print(f"  {kind:26}{len(own):6} cases, mean loss {mean:6.2%}, over 10 % {over:6.1%}, best of three {three:.2%}")


def _summary(found: Sequence[Loss]) -> tuple[float, float, float]:
    def mean(value: Callable[[Loss], float]) -> float:
        return sum(map(value, found)) / len(found)

    return mean(lambda one: one.chosen), mean(lambda one: one.chosen > 0.1), mean(lambda one: one.of_three)


def as_text(fitted: Mapping[str, Coefficients], names: Sequence[str]) -> str:
    """Rows of C++, sorted as the library looks for them."""
    rows = sorted((gpu, family, block) for gpu, found in fitted.items() for family, block in found)
    lines = [
        f"// Generated by benchmarks/fit_estimates.py from {', '.join(names)}; not to be edited.\n",
        "// GPU, family, block (0: any), and a coefficient for each feature of common/estimate.h.\n",
    ]
    for gpu, family, block in rows:
        numbers = ", ".join(f"{value:.4g}" for value in fitted[gpu][family, block])
        lines.append(f'{{"{gpu}", "{family}", {block}, {{{numbers}}}}},\n')
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
