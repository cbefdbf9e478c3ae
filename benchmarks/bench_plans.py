"""Times of making plans on the GPU and on the host, for the kernels the library chooses in bfloat16.

A plan of the GPU is timed between CUDA events, its launches queued behind a delay; one of the host by its
clock, without the copy to the GPU. "rewire" moves 5 % of the blocks of a pattern whose three products have
run, which rewrites the pattern, its transpose and all plans on the GPU; the host's time is that of the call.
Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from harness import CYCLES_PER_SECOND, environment, write_json
from problems import LAYERS, OPS, Shape

from tilesparse import _C, BlockPattern, functional
from tilesparse._runtime.lookup import prepared

REPETITIONS = 20
DELAY_SECONDS = 5e-3  # the host issues all launches of a plan in less
MOVED = 0.05  # of the blocks, when a pattern is rewired
BF16, CUDA = 4, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="up", help=f"comma-separated, of {', '.join(LAYERS)}")
    parser.add_argument("--blocks", default="128,64,32,16", help="comma-separated, square")
    parser.add_argument("--densities", default="0.25", help="comma-separated")
    parser.add_argument("--output", type=Path, help="also as JSON")
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    arguments = parser.parse_args()
    print("| shape | block | density | product | kernel | GPU, µs | host, ms |")
    print("|---|---|---|---|---|---|---|")
    cases = []
    for name in arguments.shapes.split(","):
        for block in map(int, arguments.blocks.split(",")):
            for density in map(float, arguments.densities.split(",")):
                for case in measure(LAYERS[name], block, density):
                    print("|", " | ".join(str(value) for value in case.values()), "|")
                    cases.append(case)
    if arguments.output:
        write_json(arguments.output, {"environment": environment(arguments.commit), "cases": cases})


def measure(shape: Shape, block: int, density: float) -> Iterator[dict[str, Any]]:
    pattern = BlockPattern.random(
        (shape.out_features, shape.in_features),
        block_shape=(block, block),
        density=density,
        generator=torch.Generator().manual_seed(0),
    )
    begin = {"shape": shape.name, "block": block, "density": density}
    on_gpu = pattern.to("cuda")
    host, device = (prepared(copy.index_on(copy.device)).descriptor for copy in (pattern, on_gpu))
    for op, product in enumerate(OPS):
        multiply = _C.Product(
            device, op, BF16, CUDA, shape.tokens, ldx=shape.in_features, ldy=shape.out_features
        )
        kernel, plan = multiply.resolve()
        if plan:
            seconds = plan_seconds(device, kernel, op), host_seconds(host, kernel, op)
            yield begin | times(product, _C.kernels()[kernel].name, *seconds)
    yield begin | times("rewire", "", *rewire_seconds(on_gpu, shape.tokens))


def times(product: str, kernel: str, gpu_seconds: float, host_seconds: float) -> dict[str, Any]:
    return {
        "product": product,
        "kernel": kernel,
        "gpu_us": round(gpu_seconds * 1e6),
        "host_ms": round(host_seconds * 1e3, 1),
    }


def plan_seconds(pattern: _C.Pattern, kernel: int, op: int) -> float:
    """Of the GPU."""
    sizes = _C.plan_device_size(pattern, kernel, op)
    plan, workspace = (torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes)
    stream = torch.cuda.current_stream().cuda_stream
    arguments = (plan.data_ptr(), sizes[0], workspace.data_ptr(), sizes[1], stream)
    return gpu_and_host_seconds(lambda: _C.plan_device_build(pattern, kernel, op, *arguments))[0]


def host_seconds(pattern: _C.Pattern, kernel: int, op: int) -> float:
    plan = torch.empty(_C.plan_size(pattern, kernel, op), dtype=torch.uint8)
    seconds = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        _C.plan_build(pattern, kernel, op, plan.data_ptr(), plan.numel())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def rewire_seconds(pattern: BlockPattern, tokens: int) -> tuple[float, float]:
    """Of the GPU and of the host, to move blocks to free places, and back in the next call."""
    make_plans(pattern, tokens)
    moved = round(MOVED * pattern.nnz)
    slots = torch.randperm(pattern.nnz, device="cuda")[:moved]
    free = (~pattern.to_block_mask()).nonzero()
    places = (free[torch.randperm(len(free), device="cuda")[:moved]], blocks_at(pattern, slots))
    in_turn = cycle(places)

    def rewire() -> None:
        pattern.move_blocks_(slots, next(in_turn), check=False)

    for _ in places:  # memory is allocated once
        rewire()
    return gpu_and_host_seconds(rewire)


def make_plans(pattern: BlockPattern, tokens: int) -> None:
    """By running every product once."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    x, y = (torch.randn(tokens, features, **options) for features in pattern.shape[::-1])
    values = torch.randn(pattern.nnz, *pattern.block_shape, **options)
    functional.linear(x, values, pattern)
    functional.dds(y, values, pattern, transpose=False)
    functional.sdd(y, x, pattern)


def blocks_at(pattern: BlockPattern, slots: torch.Tensor) -> torch.Tensor:
    """[n, 2] block row and block column."""
    return torch.stack(pattern.block_indices(), 1)[slots]


def gpu_and_host_seconds(call: Callable[[], None]) -> tuple[float, float]:
    """Of a call whose launches are queued behind a delay; raises if the host waits for that."""
    gpu, host = [], []
    for _ in range(REPETITIONS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(DELAY_SECONDS * CYCLES_PER_SECOND))
        begin.record()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        if begin.query():
            raise RuntimeError(f"the host took {host[-1] * 1e3:.1f} ms, or waited for the GPU")
        end.record()
        end.synchronize()
        gpu.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(gpu), statistics.median(host)


if __name__ == "__main__":
    main()
