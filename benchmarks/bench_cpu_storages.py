"""Times layers in every storage on a CPU, as they are and packed, against a dense one, as a table.

    OMP_NUM_THREADS=1 python benchmarks/bench_cpu_storages.py

Dense and sparse layers take turns; of each the least time counts, since others share the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from tilesparse import BlockSparseLinear

LAYERS = ((1024, 1024), (1024, 4096))  # in_features, out_features
TOKENS = (1, 16, 256)
STORAGES: dict[str, dict[str, object]] = {
    "plain": {},
    "plain, 2:4": {"nm": (2, 4)},
    "compressed": {"nm": (2, 4), "storage": "compressed"},
    "int8": {"storage": "int8"},
    "float8": {"storage": "float8_e4m3fn"},
    "2:4 int8": {"nm": (2, 4), "storage": "int8"},
    "packed": {"storage": "int8"},  # which is then the same for all
}


def make(in_features: int, out_features: int, density: float, block: int, name: str) -> BlockSparseLinear:
    """A layer in the storage of that name."""
    options = STORAGES[name]
    layer = BlockSparseLinear(in_features, out_features, density=density, block_shape=block, **options)  # type: ignore[arg-type]
    return layer.pack() if name == "packed" else layer


def least_times(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Microseconds of each."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own in zip(calls, times, strict=True):
            call()  # whose operands are in the cache then, as far as they fit
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [min(own) * 1e6 for own in times]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--blocks", type=int, nargs="+", default=(32, 64))
    parser.add_argument("--densities", type=float, nargs="+", default=(0.5, 0.25))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, float32, µs")
    print(f"| layer | tokens | density | blocks | dense | {' | '.join(STORAGES)} |")
    print("| --- " * (5 + len(STORAGES)) + "|")
    for in_features, out_features in LAYERS:
        dense = torch.nn.Linear(in_features, out_features)
        for tokens in options.tokens:
            x = torch.randn(tokens, in_features)
            for density in options.densities:
                for block in options.blocks:
                    layers = [make(in_features, out_features, density, block, name) for name in STORAGES]
                    calls = [lambda layer=layer, x=x: layer(x) for layer in (dense, *layers)]
                    with torch.no_grad():
                        times = least_times(calls, options.rounds)
                    cells = (f"{in_features} → {out_features}", tokens, density, block)
                    print(f"| {' | '.join(map(str, (*cells, *map(round, times))))} |", flush=True)


if __name__ == "__main__":
    main()
