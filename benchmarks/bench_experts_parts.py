"""Time of each step of a block-sparse Qwen3-MoE layer: router, sorting, gathering, products, combining.

    python benchmarks/bench_experts_parts.py --output experts_parts.json

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from bench_experts import LayerCase, captured
from harness import (
    CudaTimer,
    HostTimer,
    Timer,
    block_list,
    budgeted_parser,
    density_list,
    parsed,
    positive,
    recording,
    run_benchmark,
    warm_up,
    within_budget,
    write_json,
)
from torch import Tensor

from tilesparse.functional import gated
from tilesparse.nn.routing import combined, gathered, routing_of

Calls = dict[str, Callable[[], Tensor]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if the GPU gave up."""
    arguments = parsed(_parser(), argv)
    # Not the default stream, which no graph captures: gradients run where their forward pass ran.
    on_gpu = arguments.device == "cuda"
    with torch.cuda.stream(torch.cuda.Stream() if on_gpu else None):
        return run_benchmark(arguments, _run)


def _parser() -> argparse.ArgumentParser:
    parser = budgeted_parser(__doc__, "experts_parts.json", 240.0)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: float32 (%(default)s)")
    add("--tokens", type=positive, nargs="+", default=[8192], help="(%(default)s)")
    add("--blocks", type=block_list, default=block_list("128"), help="as 32 or 128x32 (128)")
    add("--densities", type=density_list, default=(0.25,), help="(.25)")
    add("--repetitions", type=positive, default=20, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    return parser


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    start = time.monotonic()
    timer: Timer = CudaTimer() if arguments.device == "cuda" else HostTimer()
    if arguments.device == "cuda":
        warm_up()
    axes = arguments.tokens, arguments.blocks, arguments.densities
    dtype = "bf16" if arguments.device == "cuda" else "fp32"
    cases = [LayerCase(*parts, dtype) for parts in product(*axes)]
    for case in within_budget(cases, arguments, document, start):
        record = case.record()
        document["cases"].append(record)
        with recording(record, "case"):
            for name, call in _parts(case, arguments).items():
                result: dict[str, Any] = {"part": name}
                record["results"].append(result)
                with recording(result, name):
                    replayed = captured(call)
                    replayed()
                    result["t_us"] = round(timer.microseconds(replayed, arguments.repetitions), 2)
                    print(f"  {name:24} {result}", flush=True)
        write_json(arguments.output, document)


def _parts(case: LayerCase, arguments: argparse.Namespace) -> Calls:
    """Return the steps by name; those that begin with "gradient" are gradients alone."""
    torch.manual_seed(arguments.seed)
    layer: Any = case.make(arguments.device)[1]
    experts = layer.experts
    up, down = experts.projections().values()
    hidden, count = up.in_features, experts.num_experts

    def randn(*size: int) -> Tensor:
        return torch.randn(size, dtype=up.weight.dtype, device=arguments.device).requires_grad_()

    x = randn(case.tokens, hidden)
    *_, weights, index = layer.gate(x.detach())
    weights = weights.detach().requires_grad_()
    routing, given = routing_of(index, count), torch.ones_like(index, dtype=torch.bool)
    rows = routing.rows.numel()
    sorted_x, both = randn(rows, hidden), randn(rows, up.out_features // count)
    middle, y = randn(rows, down.in_features), randn(rows, hidden)
    chosen: Calls = {
        "gather": lambda: gathered(x, routing, given),
        "gate and up": lambda: up(sorted_x, routing.offsets),
        "activation": lambda: gated(both, activation="silu"),
        "down": lambda: down(middle, routing.offsets),
        "combine": lambda: combined(y, weights, routing),
    }
    wanted = {
        "gather": [x],
        "gate and up": [sorted_x, up.weight],
        "activation": [both],
        "down": [middle, down.weight],
        "combine": [y, weights],
    }
    parts: Calls = {
        "router": lambda: layer.gate(x.detach())[-1],
        "sort": lambda: routing_of(index, count).rows,
        **{name: torch.no_grad()(call) for name, call in chosen.items()},
        **{f"gradient of {name}": _gradient_of(call, wanted[name]) for name, call in chosen.items()},
        "copy of the sorted x": lambda: sorted_x.detach().clone(),  # what gathering and combining move
    }
    return {"all": torch.no_grad()(lambda: layer(x[None])), **parts}


def _gradient_of(call: Callable[[], Tensor], wanted: list[Tensor]) -> Callable[[], Tensor]:
    result = call()
    slope = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, wanted, slope, retain_graph=True)[0]


if __name__ == "__main__":
    sys.exit(main())
