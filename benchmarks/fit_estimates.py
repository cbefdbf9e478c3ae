"""Fits the coefficients of estimates to times of kernels, and writes them where the library is built from.

    python benchmarks/fit_estimates.py
    python benchmarks/fit_estimates.py --left-out benchmarks/results/h100_fit.json.gz

Results are those of bench_kernels.py, of any number of GPUs; of which GPU is in them. The library says what
the features of a product and a kernel are; coefficients are found as estimate_fit.py says. Choices are then
compared with the best kernels that were measured, with --left-out also those for a fifth of the layers at a
time by coefficients that were fitted without them. Times that something interrupted are left out: a kernel
that took several times its estimate. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import estimate_fit
import numpy as np
import stored
from estimate_fit import Coefficients, Loss, Row, Table
from kernel_cases import gpu_of, product_of
from report import rows_of

from tilesparse import _C
from tilesparse.tuning import Device
from tilesparse.tuning.product import MEASURED

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "cuda" / "common" / "coefficients.inc"
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = RESULTS / "estimates.json"
NAMES = "*_fit.json.gz", "*_kernels*.json"  # of those that estimates are fitted to
KERNELS = {kernel.name: index for index, kernel in enumerate(_C.kernels())}
DENSE = -1  # in the place of a kernel
INTERRUPTED, LONG = 2.5, 50.0  # see uninterrupted
PARTS = 5  # of layers, left out one after another
VECTOR = 8  # tokens that kernels read at a time where x is column-major, in 16 bits


class Measured(NamedTuple):
    """The cases that were measured on one GPU, and a row for each of their kernels."""

    gpu: str
    cases: list[Mapping[str, Any]]
    rows: list[Row]

    def part_of(self, case: int) -> int:
        """Return the part of all layers that this one is left out with."""
        layer = self.cases[case]["out_features"], self.cases[case]["in_features"]
        return zlib.crc32(str(layer).encode()) % PARTS

    def of_cases(self) -> set[int]:
        """Return the cases that have rows."""
        return {row.case for row in self.rows}


class Pair(NamedTuple):
    """Microseconds of one case and kernel."""

    kernel: str
    case: str
    measured: float
    estimated: float

    @property
    def family(self) -> str:
        """Kernels of one architecture and product differ in their tiles: sm90_dds_nt, sm80_decode."""
        return re.split(r"_(?:f16|bf16|tf32|tf32x3)(?=_|$)", self.kernel)[0]

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1


class Fitted(NamedTuple):
    """The coefficients of one GPU, and what they were fitted to."""

    coefficients: Coefficients
    measured: Measured


def main(argv: Sequence[str] | None = None) -> int:
    """Fits, compares and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results",
        type=Path,
        nargs="*",
        help="of bench_kernels.py (all that are named for it)",
    )
    parser.add_argument("--output", type=Path, default=TARGET, help="(%(default)s)")
    parser.add_argument("--summary", type=Path, default=SUMMARY, help="losses of choices (%(default)s)")
    help = "fit without a fifth of the layers at a time, too"
    parser.add_argument("--left-out", action="store_true", help=help)
    arguments = parser.parse_args(argv)
    summaries = {}
    runs = _by_gpu(arguments.results or sorted(path for name in NAMES for path in RESULTS.glob(name)))
    everything = {gpu: load(gpu, [*own.values()]) for gpu, own in runs.items()}
    fitted = fit_all(everything)
    for gpu, own in runs.items():
        coefficients, measured = fitted[gpu]
        first = {} if gpu == next(iter(runs)) else next(iter(fitted.values())).coefficients
        found = losses(measured, {**first, **coefficients})
        summaries[gpu] = {
            "runs": [*own],
            "interrupted": len(everything[gpu].of_cases()) - len(measured.of_cases()),
            "all": estimate_fit.summary(found),
            "kinds": {kind: estimate_fit.summary(some) for kind, some in _kinds(measured, found).items()},
        }
        if arguments.left_out:
            left = estimate_fit.left_out(measured.rows, measured.part_of, first)
            summaries[gpu]["left_out"] = estimate_fit.summary(left)
            if len(own) > 1:
                largest = load(gpu, [next(iter(own.values()))])
                summaries[gpu]["unseen"] = estimate_fit.summary(unseen(largest, measured, first))
        report(gpu, summaries[gpu], len(coefficients))
    names = [name for own in runs.values() for name in own]
    arguments.output.write_text(as_text({gpu: one.coefficients for gpu, one in fitted.items()}, names))
    arguments.summary.write_text(json.dumps({"gpus": summaries}, indent=1) + "\n")
    return 0


def fit_all(everything: Mapping[str, Measured]) -> dict[str, Fitted]:
    """Fit the coefficients of each GPU.

    They stay near those of the first GPU; at last its own stay near those of the second, and the others' near
    these: each GPU speaks for blocks of which the other has few measurements.
    """
    first, *others = everything
    second = next(iter(others), first)
    fitted = {gpu: Fitted({}, measured) for gpu, measured in everything.items()}
    for gpu in (*everything, *(everything if others else ())):
        near = fitted[second if gpu == first else first].coefficients
        measured = uninterrupted(everything[gpu], near)
        own = estimate_fit.fit(measured.rows, near)
        fitted[gpu] = Fitted(fitted[gpu].coefficients | own, measured)
    return fitted


def _by_gpu(paths: Sequence[Path]) -> dict[str, dict[str, stored.Document]]:
    """Return the runs of bench_kernels.py by GPU and name, those with most cases first.

    The GPU that others stay near is the first one.
    """
    found: dict[str, list[tuple[int, str, stored.Document]]] = defaultdict(list)
    for path in paths:
        for run, document in stored.documents(path).items():
            cases = document.get("cases")
            environment = document.get("environment", {})
            gpu = gpu_of(environment.get("gpu") or "") if "limits" not in environment else None
            if gpu and cases and "kind" in cases[0]:
                name = f"{path.name}#{run}" if run else path.name
                found[gpu].append((-len(cases), name, document))
    by_gpu = sorted(found.items(), key=lambda item: item[0] != MEASURED[0])
    return {
        gpu: {name: one for _, name, one in sorted(runs, key=lambda run: run[:2])} for gpu, runs in by_gpu
    }


def load(gpu: str, runs: Sequence[stored.Document]) -> Measured:
    """Return the measurements of one GPU."""
    measured = Measured(gpu, [], [])
    device = Device.find(gpu).info()
    for case, result in rows_of(runs):
        if case["x_layout"] == "feature" and case["tokens"] % VECTOR:
            continue  # a copy is made first, which is no part of a kernel's estimate
        measured.rows.extend(_rows(case, result, len(measured.cases), device))
        measured.cases.append(case)
    return measured


def _rows(
    case: Mapping[str, Any],
    result: Mapping[str, Any],
    number: int,
    device: _C.DeviceInfo,
) -> Iterator[Row]:
    times = {name: time for name, time in result.get("kernels_us", {}).items() if name in KERNELS}
    if not times:
        return
    if case.get("storage", "plain") == "plain" and result.get("expanded_us"):
        times["dense"] = result["expanded_us"]
    bn, bk = case["block_shape"]
    product = product_of(case)
    rows, columns = (bk, bn) if case["op"] == "dds_nn" else (bn, bk)
    for name, time in times.items():
        names, values = product.features(device, KERNELS.get(name, DENSE))
        families = names.split("+")
        keys = [(family, rows, columns) if name in KERNELS else (family, 0, 0) for family in families]
        parts = tuple(zip(keys, np.array(values).reshape(len(families), -1), strict=True))
        yield Row(name, number, max(time, 0.5), parts, name in KERNELS)


def uninterrupted(measured: Measured, first: Coefficients) -> Measured:
    """Return what was measured without cases in which something interrupted a kernel.

    Such a kernel took 2.5 times its estimate, by a fit that no case sways, and 50 microseconds more; the
    other kernels of its case did not, nor does it for most products with such blocks, which would be a
    mistake of the estimate.
    """
    table = Table(measured.rows)
    estimates = table.estimates(estimate_fit.least_squares(table, first))
    ratios = table.times / estimates
    keys = [row.parts[0][0] for row in measured.rows]
    usual = np.maximum(_usual(table.cases.tolist(), ratios), _usual(keys, ratios))
    late = table.chosen & (ratios > INTERRUPTED * usual) & (table.times > usual * estimates + LONG)
    without = set(table.cases[late].tolist())
    return measured._replace(rows=[row for row in measured.rows if row.case not in without])


def _usual(groups: Sequence[Hashable], ratios: estimate_fit.Array) -> estimate_fit.Array:
    """Return for each row the median ratio of its group, at least 1."""
    found: dict[Hashable, list[float]] = defaultdict(list)
    for group, ratio in zip(groups, ratios.tolist(), strict=True):
        found[group].append(ratio)
    medians = {group: max(statistics.median_low(own), 1.0) for group, own in found.items()}
    return np.array([medians[group] for group in groups])


def losses(measured: Measured, coefficients: Coefficients) -> list[Loss]:
    """Return what choices by these coefficients cost."""
    table = Table(measured.rows)
    return estimate_fit.losses(measured.rows, table.estimates(table.array(coefficients)))


def unseen(some: Measured, measured: Measured, first: Coefficients) -> list[Loss]:
    """Return what choices cost for products that are not in `some`, by coefficients fitted to `some`.

    Of kernels that `some` has: nothing is known of others.
    """
    known = {_product(case) for case in some.cases}
    coefficients = estimate_fit.fit(uninterrupted(some, first).rows, first)
    kernels = {row.kernel for row in some.rows}
    rows = [
        row
        for row in measured.rows
        if row.kernel in kernels and _product(measured.cases[row.case]) not in known
    ]
    return losses(measured._replace(rows=rows), {**first, **coefficients})


def _product(case: Mapping[str, Any]) -> str:
    return json.dumps([value for name, value in case.items() if name != "results"])


def _kinds(measured: Measured, found: Sequence[Loss]) -> dict[str, list[Loss]]:
    kinds: dict[str, list[Loss]] = defaultdict(list)
    for loss in found:
        case = measured.cases[loss.case]
        kinds[f"{case.get('kind', case['dtype'])} {case['op']}"].append(loss)
    return dict(sorted(kinds.items()))


def pairs_of(documents: Sequence[Mapping[str, Any]]) -> Iterator[Pair]:
    """Yield a pair for every measured kernel that this library has, on a GPU that is known here."""
    for document in documents:
        gpu = gpu_of(document["environment"].get("gpu") or "")
        if gpu is None or "op" not in document["cases"][0]:
            continue
        device = limited(Device.find(gpu).info(), document["environment"].get("limits", ""))
        for case, result in rows_of([document]):
            product, described = product_of(case), _product(case)
            if result["contender"] == "packed":
                product.use_prepacked(256, 1 << 40, 0)  # an address that nothing reads
            times = result.get("kernels_us", {result.get("kernel"): result.get("t_us")})
            for kernel in (name for name in times if name in KERNELS):
                yield Pair(kernel, described, times[kernel], product.estimate(device, KERNELS[kernel]))


def limited(device: _C.DeviceInfo, limits: str) -> _C.DeviceInfo:
    """A GPU with the limits under which results were measured, as TILESPARSE_DEVICE_LIMITS gives them."""
    names = "compute_capability", "multiprocessors", "shared_memory", "max_cluster"
    has = {name: getattr(device, name) for name in names}
    for limit in filter(None, limits.split(",")):
        name, _, most = limit.partition("=")
        has[name] = min(has[name], int(most))
    return _C.DeviceInfo(device.device, **has, name=device.name)


def costs_of(pairs: Sequence[Pair]) -> list[float]:
    """Return by what fraction the kernel of the least estimate takes longer than the best, for each case."""
    cases = defaultdict(list)
    for pair in pairs:
        cases[pair.case].append(pair)
    return [
        min(kernels, key=lambda pair: pair.estimated).measured / min(pair.measured for pair in kernels) - 1
        for kernels in cases.values()
        if len({pair.kernel for pair in kernels}) > 1
    ]


def report(gpu: str, summary: Mapping[str, Any], count: int) -> None:
    """A line for each kind of product, for all, and for layers that were left out."""
    print(f"{gpu}: {count} rows of coefficients, {summary['interrupted']} cases were interrupted")
    lines = {**summary["kinds"], "all": summary["all"]}
    if "left_out" in summary:
        lines["layers left out"] = summary["left_out"]
    if "unseen" in summary:
        lines["one file, products of others"] = summary["unseen"]
    for kind, one in lines.items():
        print(
            f"  {kind:26}{one['cases']:6} cases, mean loss {one['mean']:6.2%}, over 10 % "
            f"{one['over_10']:6.1%}, best of three {one['best_of_three']:.2%}"
        )


def as_text(fitted: Mapping[str, Coefficients], names: Sequence[str]) -> str:
    """Rows of C++, sorted as the library looks for them."""
    rows = sorted((gpu, *key) for gpu, found in fitted.items() for key in found)
    lines = [
        "// Generated by benchmarks/fit_estimates.py; not to be edited. From:\n",
        *(f"//   {name}\n" for name in names),
        "// GPU, family, block (along features, along k; 0: any), a coefficient for each feature.\n",
    ]
    for gpu, family, along, across in rows:
        numbers = ", ".join(f"{value:.4g}" for value in fitted[gpu][family, along, across])
        lines.append(f'{{"{gpu}", "{family}", {along}, {across}, {{{numbers}}}}},\n')
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
