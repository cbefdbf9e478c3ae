"""Times of making plans on the GPU and on the host, for the kernels the library chooses in bfloat16.

A plan of the GPU is timed between CUDA events, its launches queued behind a delay; one of the host by its
clock, without the copy to the GPU. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from harness import CYCLES_PER_SECOND
from problems import LAYERS, OPS

from tilesparse import _C, BlockPattern

REPETITIONS = 20
DELAY_SECONDS = 5e-3  # the host issues all launches of a plan in less
BF16, CUDA = 3, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="up", help=f"comma-separated, of {', '.join(LAYERS)}")
    parser.add_argument("--blocks", default="128,64,32,16", help="comma-separated, square")
    parser.add_argument("--densities", default="0.25", help="comma-separated")
    arguments = parser.parse_args()
    print("| shape | block | density | product | kernel | GPU, µs | host, ms |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.shapes.split(","):
        for block in map(int, arguments.blocks.split(",")):
            for density in map(float, arguments.densities.split(",")):
                measure(name, block, density)


def measure(name: str, block: int, density: float) -> None:
    shape = LAYERS[name]
    pattern = BlockPattern.random(
        (shape.out_features, shape.in_features),
        block_shape=(block, block),
        density=density,
        generator=torch.Generator().manual_seed(0),
    )
    for op, product in enumerate(OPS):
        host, device = (pattern.prepared.descriptor(torch.device(name)) for name in ("cpu", "cuda:0"))
        kernel, plan_key, _ = _C.query(host, op, BF16, CUDA, 0, 0, 0, shape.tokens, 0, 0, False)
        if plan_key:
            times = (
                f"{gpu_seconds(device, kernel, op) * 1e6:.0f} | {host_seconds(host, kernel, op) * 1e3:.1f}"
            )
            print(f"| {name} | {block} | {density} | {product} | {_C.kernels()[kernel].name} | {times} |")


def gpu_seconds(pattern: _C.Pattern, kernel: int, op: int) -> float:
    sizes = _C.plan_device_size(pattern, kernel, op)
    plan, workspace = (torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes)
    stream = torch.cuda.current_stream().cuda_stream
    seconds = []
    for _ in range(REPETITIONS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(DELAY_SECONDS * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        begin.record()
        _C.plan_device_build(
            pattern, kernel, op, plan.data_ptr(), sizes[0], workspace.data_ptr(), sizes[1], stream
        )
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(seconds)


def host_seconds(pattern: _C.Pattern, kernel: int, op: int) -> float:
    plan = torch.empty(_C.plan_size(pattern, kernel, op), dtype=torch.uint8)
    seconds = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        _C.plan_build(pattern, kernel, op, plan.data_ptr(), plan.numel())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
