"""Times of a gated MLP whose neurons are partly off, in decode, on a GPU in CUDA graphs.

    python benchmarks/bench_activations.py --output activations.json

Contenders: "dense", PyTorch's product of dense weights; "all", the block-sparse MLP without thresholds;
"down", with one on what down_proj multiplies; "gate", with one on the activated gate, so that up_proj
computes no other features and down_proj reads no others; "inputs", with one on x of all three layers.
Thresholds are quantiles of what is there, so that the fraction is exact. Medians, with a cold L2 cache,
contenders in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import parsed, recording, result_parser, run_benchmark, warm_up
from torch import Tensor

from tilesparse import BlockSparseLinear
from tilesparse.tuning.timing import milliseconds

SHAPES = {"Llama 3 8B": (4096, 14336)}
FORMS = ((128, 1.0), (64, 0.5), (64, 0.25))
STORAGES = ("plain", "int8", "int4")
HALF = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "activations.json", 60)
    parser.add_argument("--repetitions", type=int, default=30, help="(%(default)s)")
    return run_benchmark(parsed(parser, argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    warm_up()
    for name, (hidden, inner) in SHAPES.items():
        for block, density in FORMS:
            for storage in STORAGES:
                mlp = MLP(hidden, inner, block, density, storage)
                # Many fractions for one token, and one fraction for more of them.
                pairs = [(1, off) for off in (0.25, 0.4, HALF, 0.6, 0.9)] if density == 1 else [(1, HALF)]
                if density == 1:
                    pairs += [(tokens, off) for tokens in (2, 4, 8) for off in (HALF, 0.9)]
                for tokens, off in pairs:
                    case: dict[str, Any] = {
                        "model": name,
                        "block": block,
                        "density": density,
                        "storage": storage,
                        "tokens": tokens,
                        "off": off,
                        "results": [],
                    }
                    document["cases"].append(case)
                    with recording(case, str({**case, "results": None})), torch.no_grad():
                        case["results"] += mlp.measured(tokens, off, arguments.repetitions)


class MLP:
    """down(silu(gate(x)) * up(x)), of random weights."""

    def __init__(self, hidden: int, inner: int, block: int, density: float, storage: str) -> None:
        own: Any = {"density": density, "block_shape": block, "bias": False, "device": "cuda"}
        own |= {"dtype": torch.bfloat16, "generator": torch.Generator().manual_seed(0)}
        self.gate, self.up = (BlockSparseLinear(hidden, inner, **own) for _ in range(2))
        self.down = BlockSparseLinear(inner, hidden, **own)
        self.layers = self.gate, self.up, self.down
        torch.manual_seed(0)
        self.dense = [
            torch.randn(*layer.spec.shape, device="cuda").bfloat16() * 0.02 for layer in self.layers
        ]
        for layer in self.layers:
            layer.to_storage(storage)

    def measured(self, tokens: int, off: float, repetitions: int) -> list[dict[str, Any]]:
        x = torch.randn(tokens, self.gate.in_features, device="cuda", dtype=torch.bfloat16)
        self._set()
        gate = torch.nn.functional.silu(self.gate(x))
        h = gate * self.up(x)
        limits = {name: limit(one, off) for name, one in (("x", x), ("gate", gate), ("h", h))}

        def dense() -> Tensor:
            gate, up, down = self.dense
            linear = torch.nn.functional.linear
            return linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)

        def ours(limit_of_gate: float | None = None) -> Callable[[], Tensor]:
            return lambda: self.down(
                self.up(x, gate=self.gate(x), activation="silu", gate_threshold=limit_of_gate)
            )

        graphs = {"dense": captured(dense), "all": captured(ours())}
        self._set(down=limits["h"])
        graphs["down"] = captured(ours())
        self._set(down=0.0)
        graphs["gate"] = captured(ours(limits["gate"]))
        self._set(limits["h"], limits["x"])
        graphs["inputs"] = captured(ours())
        times = milliseconds([graph.replay for graph in graphs.values()], x.device, repetitions)
        for name, time in zip(graphs, times, strict=True):
            print(f"  {name:8}{1e3 * time:8.2f} us")
        return [
            {"contender": name, "us": round(1e3 * time, 2)} for name, time in zip(graphs, times, strict=True)
        ]

    def _set(self, down: float | None = None, others: float | None = None) -> None:
        self.down.threshold, self.gate.threshold, self.up.threshold = down, others, others


def limit(numbers: Tensor, off: float) -> float:
    """Return the threshold up to which a fraction of them is off."""
    ordered = numbers.abs().float().flatten().sort().values
    return float(ordered[round(off * len(ordered)) - 1])


def captured(call: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


if __name__ == "__main__":
    sys.exit(main())
