"""Estimated times of kernels and of dense products, also of GPUs that are not here; no GPU is needed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import check_estimates
import pytest
import stored
import torch
from kernel_cases import product_of
from report import rows_of

from tilesparse import _C
from tilesparse._checks import DTYPES
from tilesparse._runtime.device import DDS_NN, DDS_NT, SDD_TN
from tilesparse.errors import UnsupportedError
from tilesparse.tuning import Device
from tilesparse.tuning import product as devices

ROOT = Path(__file__).parents[2]
RESULTS = Path(check_estimates.__file__).parent / "results"
KERNELS = _C.kernels()
CUDA, RUN_DENSE = 1, -1
LAYERS = ((768, 3072), (4096, 4096), (4096, 14336))
# GB of memory in a second and TFLOP/s of tensor cores in 16 bits with sums in float32, as published.
LIMITS = {
    "A100": (2039, 312),
    "A40": (696, 150),
    "L40S": (864, 362),
    "L4": (300, 121),
    "RTX 4090": (1008, 165),
    "H100": (3350, 989),
    "H200": (4800, 989),
    "B200": (8000, 2250),
    "RTX 5090": (1792, 210),
    "GB10": (273, 125),
}
SLICE = Device("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, 232448, max_cluster=2)

needs_sm90 = pytest.mark.skipif(
    not any(kernel.min_compute_capability == 90 for kernel in KERNELS),
    reason="this library has no kernels for compute capability 9.0",
)


def described(
    layer: tuple[int, int], tokens: int, *, block: int = 64, density: float = 0.25, op: int = DDS_NT
) -> _C.Product:
    """A product in bfloat16; layers are out_features and in_features."""
    blocks = max(1, round(density * (layer[0] // block) * (layer[1] // block)))
    pattern = _C.Pattern(block, block, *layer, blocks, 0, 0, 0)
    return _C.Product(pattern, op, DTYPES[torch.bfloat16], CUDA, tokens)


def estimates(problem: _C.Product, device: Device) -> dict[str, float]:
    """Return the time of each kernel that computes the product there."""
    found = {}
    for number, kernel in enumerate(KERNELS):
        try:
            time = problem.estimate(device.info(), number)
        except UnsupportedError:
            continue
        if time > 0:
            found[kernel.name] = time
    return found


def problems() -> Iterator[tuple[tuple[int, int], int, int, float, int]]:
    yield from product(
        LAYERS, (16, 32, 64, 128), (DDS_NT, DDS_NN, SDD_TN), (0.05, 0.25, 0.75), (1, 64, 1024, 8192)
    )


@needs_sm90
@pytest.mark.parametrize("name", LIMITS)
def test_nothing_is_faster_than_the_limits_of_the_gpu(name: str) -> None:
    """Neither more products in a second than tensor cores have, nor more bytes than memory has."""
    device = Device.find(name)
    bandwidth, tensor = LIMITS[name]
    for layer, block, op, density, tokens in problems():
        problem = described(layer, tokens, block=block, density=density, op=op)
        products = 2e-6 * layer[0] * layer[1] * tokens
        activations, values = 2 * tokens * sum(layer), 2 * density * layer[0] * layer[1]
        for kernel, time in estimates(problem, device).items():
            assert time >= 0.99 * density * products / tensor, kernel
            assert time >= 0.98e-3 * (activations + values) / bandwidth, kernel
        dense = problem.estimate(device.info(), RUN_DENSE)
        assert dense >= 0.99 * products / tensor
        assert dense >= 0.99e-3 * activations / bandwidth


@needs_sm90
@pytest.mark.parametrize("name", ["H100", "H200", "A100", "L40S", "B200"])
def test_more_tokens_take_more_time(name: str) -> None:
    """By the kernel that is chosen. Those that cut sums into parts may take less where they no longer do."""
    device = Device.find(name)
    tokens = [1, 2, 8, 16, 17, 32, 63, 64, 65, 96, 128, 129, 192, 256, 257, 400, 512, 513, 768, 1023, 1024]
    tokens += [1025, 1500, 2048, 2049, 3000, 4096, 4097, 6144, 6145, 8192, 8193, 16384]
    for layer, block, op in product(LAYERS, (16, 32, 64, 128), (DDS_NT, DDS_NN, SDD_TN)):
        problems = [described(layer, count, block=block, op=op) for count in tokens]
        times = [min(estimates(problem, device).values()) for problem in problems]
        assert all(after >= 0.97 * before for before, after in pairwise(times)), (layer, block, op)


@needs_sm90
@pytest.mark.parametrize("name", ["H100", "H200", "A100", "L40S", "B200"])
def test_nothing_jumps_where_one_way_to_estimate_would_end(name: str) -> None:
    """The time of the chosen kernel, from one number of tokens to the next, with as many tiles."""
    device = Device.find(name)
    for layer, block, op in product(LAYERS, (16, 32, 64, 128), (DDS_NT, DDS_NN, SDD_TN)):
        for count in (1000, 1022, 1030, 2000, 4100, 6140, 6150, 8200):
            first, second = (
                estimates(described(layer, tokens, block=block, op=op), device)
                for tokens in (count, count + 1)
            )
            assert min(second.values()) == pytest.approx(min(first.values()), rel=0.1)


@needs_sm90
def test_dense_scales_as_sparse_does() -> None:
    """A slice of 16 multiprocessors takes the dense product as much longer as the sparse one, about."""
    whole = Device.find("H100")
    problem = described((4096, 14336), 4096, block=128, density=0.25)
    ratios = []
    for device in (whole, SLICE):
        sparse = min(estimates(problem, device).values())
        ratios.append(problem.estimate(device.info(), RUN_DENSE) / sparse)
    assert ratios[0] > 1.5 and ratios[1] > 1.5
    assert ratios[1] == pytest.approx(ratios[0], rel=0.3)


@needs_sm90
@pytest.mark.parametrize(
    "run",
    ["h100_fit.json.gz#kernels", "h100_fit.json.gz#kernels_second", "h200_fit.json.gz#kernels_second"],
)
def test_chosen_kernels_are_close_to_the_best(run: str) -> None:
    """Products that coefficients were fitted to; a kernel that takes over twice as long counts as twice.

    Some took much longer as something interrupted a kernel (`fit_estimates.py` leaves them out).
    """
    pairs = list(check_estimates.pairs_of([stored.document(RESULTS / run)]))
    losses = [min(choice.loss, 1.0) for choice in check_estimates.choices_of(pairs)]
    assert len(losses) > 2500
    assert statistics.mean(losses) < 0.015
    assert sum(loss > 0.1 for loss in losses) < 0.04 * len(losses)


@needs_sm90
def test_choices_for_less_shared_memory_are_close_to_the_best() -> None:
    """Nothing was fitted to these: an H100 with the 99 KiB of a GPU of compute capability 8.9."""
    pairs = list(check_estimates.pairs_of([stored.document(RESULTS / "h100_99kib.json.gz")]))
    losses = [choice.loss for choice in check_estimates.choices_of(pairs)]
    assert len(losses) > 1200
    assert statistics.mean(losses) < 0.035


@needs_sm90
@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_auto_takes_the_faster_of_sparse_and_dense(gpu: str) -> None:
    """Where the measured times are apart by a quarter; dense is with writing W out, or copying its blocks."""
    document = stored.document(RESULTS / f"{gpu.lower()}_fit.json.gz#kernels_second")
    device = Device.find(gpu).info()
    numbers = {kernel.name: number for number, kernel in enumerate(KERNELS)}
    clear, wrong = 0, 0
    for case, result in rows_of([document]):
        times = {name: time for name, time in result.get("kernels_us", {}).items() if name in numbers}
        if not times or not result.get("expanded_us") or case.get("storage", "plain") != "plain":
            continue
        ratio = result["expanded_us"] / min(times.values())
        if 0.8 < ratio < 1.25:
            continue
        problem = product_of(case)
        sparse = min(problem.estimate(device, numbers[name]) for name in times)
        clear += 1
        wrong += (problem.estimate(device, RUN_DENSE) < sparse) != (ratio < 1)
    assert clear > 1500
    assert wrong < 0.01 * clear


def test_what_estimates_rest_on_is_what_was_fitted() -> None:
    text = (ROOT / "cuda/common/coefficients.inc").read_text()
    assert tuple(sorted(set(re.findall(r'^\{"([^"]+)"', text, re.M)))) == devices.MEASURED
    order = re.search(r"kMeasured\[\] = {(.*)}", (ROOT / "cuda/common/estimate.cpp").read_text())
    assert order is not None and tuple(re.findall(r'"([^"]+)"', order[1])) == devices.MEASURED


def test_limits_of_all_gpus_are_known() -> None:
    """GPUs that have names and kernels have figures, too; multiprocessors agree."""
    text = (ROOT / "cuda/common/machine.h").read_text()
    known = {
        name: (int(capability), int(count))
        for name, capability, count in re.findall(r'\{"([^"]+)", (\d+), (\d+)', text)
    }
    for name, (capability, count, _) in devices.GPUS.items():
        if capability >= (8, 0):
            assert known[name.removeprefix("AGX ")] == (10 * capability[0] + capability[1], count)
