"""Prints how far estimated times are from measured ones, and what that costs. No GPU is needed.

python benchmarks/check_estimates.py benchmarks/results/h200_fit.json.gz

Estimates are what the library chooses kernels by. Errors are printed by family of kernels. Of results of
bench_kernels.py, which have all kernels, choices are compared with the best ones, too.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import stored
from kernel_cases import gpu_of, product_of
from report import rows_of

from tilesparse import _C
from tilesparse.tuning import Device

KERNELS = {kernel.name: index for index, kernel in enumerate(_C.kernels())}


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


class Choice(NamedTuple):
    """The kernel with the least estimate of several for one case, and the fastest."""

    chosen: Pair
    best: Pair

    @property
    def loss(self) -> float:
        return self.chosen.measured / self.best.measured - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", help="of bench_ops.py or bench_kernels.py")
    parser.add_argument("--worst", type=int, default=0, help="print so many of the worst cases, too")
    arguments = parser.parse_args(argv)
    runs = [run for file in arguments.results for run in stored.documents(file).values()]
    pairs = [list(pairs_of([run])) for run in runs]
    print_errors([pair for of_file in pairs for pair in of_file], arguments.worst)
    if choices := [choice for of_file in pairs for choice in choices_of(of_file)]:
        print_choices(choices, arguments.worst)
    return 0


def print_errors(pairs: Sequence[Pair], worst: int) -> None:
    """A line for each family."""
    families: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        families[pair.family].append(pair.error)
    print(f"{'family':24}{'cases':>6}{'bias':>8}{'median error':>14}{'90th percentile':>17}")
    for family, errors in sorted(families.items()):
        sizes = sorted(map(abs, errors))
        print(
            f"{family:24}{len(sizes):6}{statistics.median(errors):+8.1%}{statistics.median(sizes):14.1%}"
            f"{sizes[int(0.9 * (len(sizes) - 1))]:17.1%}"
        )
    for pair in sorted(pairs, key=lambda pair: -abs(pair.error))[:worst]:
        print(f"{pair.error:+7.0%}  {pair.measured:8.1f} us  {pair.kernel:28}{pair.case}")


def print_choices(choices: Sequence[Choice], worst: int) -> None:
    """Time that the chosen kernel takes beyond the best, as a fraction of the latter."""
    losses = [choice.loss for choice in choices]
    over = [sum(loss > limit for loss in losses) for limit in (0.05, 0.1)]
    print(
        f"\nof {len(choices)} cases the chosen kernel takes {statistics.mean(losses):.1%} longer than the "
        f"best in the mean, over 5 % longer in {over[0]}, over 10 % in {over[1]}"
    )
    for choice in sorted(choices, key=lambda choice: -choice.loss)[:worst]:
        print(
            f"{choice.loss:+7.0%}  {choice.chosen.kernel} {choice.chosen.measured:.1f} us, "
            f"{choice.best.kernel} {choice.best.measured:.1f} us  {choice.best.case}"
        )


def pairs_of(documents: Sequence[Mapping[str, Any]]) -> Iterator[Pair]:
    """Yield a pair for every measured kernel that this library has, on a GPU that is known here."""
    for document in documents:
        gpu = gpu_of(document["environment"].get("gpu") or "")
        if gpu is None or "op" not in document["cases"][0]:
            continue
        device = limited(Device.find(gpu).info(), document["environment"].get("limits", ""))
        for case, result in rows_of([document]):
            packed = result["contender"] == "packed"
            times = result.get("kernels_us", {result.get("kernel"): result.get("t_us")})
            for kernel in (name for name in times if name in KERNELS):
                estimated = estimate(case, KERNELS[kernel], device, packed=packed)
                yield Pair(kernel, describe(case), times[kernel], estimated)


def limited(device: _C.DeviceInfo, limits: str) -> _C.DeviceInfo:
    """A GPU with the limits under which results were measured, as TILESPARSE_DEVICE_LIMITS gives them."""
    names = "compute_capability", "multiprocessors", "shared_memory", "max_cluster"
    has = {name: getattr(device, name) for name in names}
    for limit in filter(None, limits.split(",")):
        name, _, most = limit.partition("=")
        has[name] = min(has[name], int(most))
    return _C.DeviceInfo(device.device, **has, name=device.name)


def choices_of(pairs: Sequence[Pair]) -> list[Choice]:
    """Yield the choices of one document, for cases of which more than one kernel was measured."""
    cases = defaultdict(list)
    for pair in pairs:
        cases[pair.case].append(pair)
    return [
        Choice(min(kernels, key=lambda pair: pair.estimated), min(kernels, key=lambda pair: pair.measured))
        for kernels in cases.values()
        if len({pair.kernel for pair in kernels}) > 1
    ]


def estimate(case: Mapping[str, Any], kernel: int, device: _C.DeviceInfo, *, packed: bool = False) -> float:
    """Return the library's estimate of a kernel for a case."""
    product = product_of(case)
    if packed:
        product.use_prepacked(256, 1 << 40, 0)  # an address that nothing reads
    microseconds = product.estimate(device, kernel)
    assert microseconds > 0, f"no estimate of {describe(case)}"
    return microseconds


def describe(case: Mapping[str, Any]) -> str:
    """In one line."""
    bn, bk = case["block_shape"]
    kind = f"{case['kind']} " if "kind" in case else ""
    return (
        f"{kind}{case['op']} {case['dtype']} {case['tokens']} x {case['out_features']} x "
        f"{case['in_features']}, {bn}x{bk}, {case['pattern']} {case['density']:.2f}, {case['x_layout']}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
