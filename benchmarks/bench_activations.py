"""Times of a gated MLP whose neurons are partly off, in decode, on a GPU in CUDA graphs.

    python benchmarks/bench_activations.py --output activations.json

Contenders: "dense", PyTorch's product of dense weights; "all", the block-sparse MLP without thresholds;
"down", with one on what down_proj multiplies; "gate", with one on the activated gate, so that up_proj
computes no other features and down_proj reads no others; "inputs", with one on x of all three layers.
Thresholds are quantiles of what is there, so that the fraction is exact. Medians, with a cold L2 cache,
contenders in turn.

Then the experts of a layer of Qwen3-30B-A3B: both projections and what is between them, of rows that are
sorted by expert. "grouped" is PyTorch's grouped product of dense weights, "all" is without thresholds, "down"
has 80 % off of what down multiplies, and "inputs" half of what gate and up multiply as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import CapturedCall, add_names, parsed, recording, result_parser, run_benchmark, warm_up
from torch import Tensor

from tilesparse import BlockSparseLinear
from tilesparse.nn.experts import ExpertsLinear, routing_of
from tilesparse.tuning.measure import milliseconds

SHAPES = {"Llama 3 8B": (4096, 14336)}
FORMS = ((128, 1.0), (64, 0.5), (64, 0.25))
STORAGES = ("plain", "int8", "int4")
HALF = 0.5
EXPERTS, CHOICES, EXPERT_SHAPE, OFF = 128, 8, (2048, 768), 0.8
EXPERT_FORMS = ((128, 1.0), (64, 0.5))


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "activations.json", repetitions=30)
    add_names(parser, "--sections", ("mlp", "experts"))
    return run_benchmark(parsed(parser, argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    warm_up()
    if "mlp" in arguments.sections:
        run_mlps(arguments, document)
    if "experts" not in arguments.sections:
        return
    for block, density in EXPERT_FORMS:
        experts = Experts(block, density)
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            own: dict[str, Any] = {"model": "Qwen3-30B-A3B", "block": block, "density": density}
            case = {**own, "storage": "plain", "tokens": tokens, "off": OFF, "results": []}
            document["cases"].append(case)
            with recording(case, str({**case, "results": None})), torch.no_grad():
                case["results"] += experts.measured(tokens, arguments.repetitions)


def run_mlps(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    for name, (hidden, inner) in SHAPES.items():
        for block, density in FORMS:
            for storage in STORAGES:
                mlp = MLP(hidden, inner, block, density, storage)
                # Many fractions for one token, and one fraction for more of them.
                pairs = [(1, off) for off in (0.25, 0.4, HALF, 0.6, 0.9)] if density == 1 else [(1, HALF)]
                if density == 1:
                    pairs += [(tokens, off) for tokens in (2, 4, 8) for off in (HALF, 0.9)]
                for tokens, off in pairs:
                    own: dict[str, Any] = {"model": name, "block": block, "density": density}
                    case = {**own, "storage": storage, "tokens": tokens, "off": off, "results": []}
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

        graphs = {"dense": CapturedCall(dense), "all": CapturedCall(ours())}
        self._set(down=limits["h"])
        graphs["down"] = CapturedCall(ours())
        self._set(down=0.0)
        graphs["gate"] = CapturedCall(ours(limits["gate"]))
        self._set(limits["h"], limits["x"])
        graphs["inputs"] = CapturedCall(ours())
        return timed(graphs, repetitions)

    def _set(self, down: float | None = None, others: float | None = None) -> None:
        self.down.threshold, self.gate.threshold, self.up.threshold = down, others, others


class Experts:
    """Both projections of the experts of a layer, of random weights."""

    def __init__(self, block: int, density: float) -> None:
        hidden, inner = EXPERT_SHAPE
        own: Any = {"density": density, "block_shape": block, "bias": False, "device": "cuda"}
        own |= {"experts": EXPERTS, "dtype": torch.bfloat16, "generator": torch.Generator().manual_seed(0)}
        self.up = ExpertsLinear(hidden, EXPERTS * 2 * inner, **own)
        self.down = ExpertsLinear(inner, EXPERTS * hidden, **own)
        shapes = (EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)
        self.dense = [torch.randn(shape, device="cuda").bfloat16() * 0.02 for shape in shapes]

    def measured(self, tokens: int, repetitions: int) -> list[dict[str, Any]]:
        torch.manual_seed(tokens)
        chosen = torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in range(tokens)])
        offsets = routing_of(chosen.cuda(), EXPERTS)[0]
        x = torch.randn(tokens * CHOICES, EXPERT_SHAPE[0], device="cuda", dtype=torch.bfloat16)

        def between(both: Tensor) -> Tensor:
            gate, up = both.chunk(2, dim=-1)
            y: Tensor = torch.nn.functional.silu(gate) * up
            return y

        def grouped() -> Tensor:
            up, down = self.dense
            h = between(torch._grouped_mm(x, up.mT, offs=offsets[1:]))
            y: Tensor = torch._grouped_mm(h, down.mT, offs=offsets[1:])
            return y

        def ours() -> Tensor:
            y: Tensor = self.down(between(self.up(x, offsets)), offsets)
            return y

        self.up.threshold = self.down.threshold = None
        h = between(self.up(x, offsets))
        graphs = {"grouped": CapturedCall(grouped), "all": CapturedCall(ours)}
        self.down.threshold = limit(h, OFF)
        graphs["down"] = CapturedCall(ours)
        self.up.threshold = limit(x, HALF)
        self.down.threshold = limit(between(self.up(x, offsets)), OFF)
        graphs["inputs"] = CapturedCall(ours)
        return timed(graphs, repetitions)


def timed(graphs: dict[str, CapturedCall], repetitions: int) -> list[dict[str, Any]]:
    """Return the time of each contender."""
    times = milliseconds([*graphs.values()], torch.device("cuda"), repetitions)
    for name, time in zip(graphs, times, strict=True):
        print(f"  {name:8}{1e3 * time:8.2f} us")
    return [{"contender": name, "us": round(1e3 * time, 2)} for name, time in zip(graphs, times, strict=True)]


def limit(numbers: Tensor, off: float) -> float:
    """Return the threshold up to which a fraction of them is off."""
    ordered = numbers.abs().float().flatten().sort().values
    return float(ordered[round(off * len(ordered)) - 1])


if __name__ == "__main__":
    sys.exit(main())
