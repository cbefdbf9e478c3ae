"""Compares what `tilesparse.advise` estimates for whole models with the time of models made so.

    python benchmarks/bench_advise.py --output advise.json
    OMP_NUM_THREADS=2 python benchmarks/bench_advise.py --device cpu --models minilm --output cpu_advise.json

Models have the sizes of their names and random weights. At each density a copy of the model is made like the
fastest contender of `advise`, by `sparsify_` and `prepare_for_inference_`, and a call of it is measured as
that of the dense model is: on a GPU as the time that the GPU works in it.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from harness import block_list, density_list, parsed, recording, result_parser, run_benchmark, subset
from torch import nn

import tilesparse as ts
from tilesparse.tuning import AdviceReport
from tilesparse.tuning.advise import milliseconds_of_call
from tilesparse.tuning.product import Way, describe_way


class Model(NamedTuple):
    """A model of random weights, and the shape of its random inputs."""

    name: str
    kind: Callable[[Any], nn.Module]
    config: Any
    inputs: tuple[int, ...]  # token numbers where there are two
    blocks: tuple[int, ...] = (64, 128)


def _llama() -> Any:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 1024}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2}
    return transformers.LlamaConfig(**sizes, **heads, use_cache=False)


def _vit() -> Any:
    sizes = {"hidden_size": 1280, "intermediate_size": 5120, "image_size": 224, "patch_size": 14}
    return transformers.ViTConfig(**sizes, num_attention_heads=16, num_hidden_layers=8)


def _bert(width: int, layers: int) -> Any:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    return transformers.BertConfig(**sizes, num_attention_heads=12)


MODELS: dict[str, Callable[[], Model]] = {
    "llama-2048": lambda: Model(
        "two blocks of Llama 3 8B, 2048 tokens", transformers.LlamaModel, _llama(), (1, 2048)
    ),
    "llama-1": lambda: Model("the same, one token", transformers.LlamaModel, _llama(), (1, 1)),
    "vit": lambda: Model(
        "eight blocks of ViT-H/14, 64 images", transformers.ViTModel, _vit(), (64, 3, 224, 224)
    ),
    "bert-32": lambda: Model("BERT-base, 32 × 128 tokens", transformers.BertModel, _bert(768, 12), (32, 128)),
    "bert-1": lambda: Model("BERT-base, 1 × 128 tokens", transformers.BertModel, _bert(768, 12), (1, 128)),
    "minilm": lambda: Model(
        "MiniLM-L6, 32 × 64 tokens", transformers.BertModel, _bert(384, 6), (32, 64), (32,)
    ),
}
ON_CPU = ("minilm",)


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "advise.json", 540.0, device=True)
    parser.add_argument("--models", type=subset(MODELS), help="(those for the device)")
    parser.add_argument("--densities", type=density_list, default=(0.5, 0.25, 0.1), help="(.5,.25,.1)")
    parser.add_argument("--blocks", type=block_list, help="(by model)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parsed(parser, argv)
    warnings.simplefilter("ignore")
    with torch.no_grad():
        return run_benchmark(arguments, _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    document["environment"] |= {"threads": torch.get_num_threads()} if arguments.device == "cpu" else {}
    names = arguments.models or (
        ON_CPU if arguments.device == "cpu" else [name for name in MODELS if name not in ON_CPU]
    )
    for name in names:
        asked = MODELS[name]()
        case: dict[str, Any] = {"model": name, "name": asked.name, "results": []}
        document["cases"].append(case)
        with recording(case, name):
            _measure(asked, arguments, case)


def _measure(asked: Model, arguments: argparse.Namespace, case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    with device:
        model = asked.kind(asked.config).to(dtype).eval()
        images = len(asked.inputs) > 2
        x = torch.randn(asked.inputs, dtype=dtype) if images else torch.randint(1000, asked.inputs)
    start = time.perf_counter()
    report = ts.advise(
        model,
        (x,),
        densities=arguments.densities,
        block_shapes=[*arguments.blocks] if arguments.blocks else asked.blocks,
    )
    case["seconds"] = round(time.perf_counter() - start, 1)
    print(report, flush=True)
    found = report.recommended
    case |= {
        "dense_ms": round(report.call if report.busy is None else report.busy, 4),
        "call_ms": round(report.call, 4),
        "rest_ms": round(report.rest, 4),
        "recommended": None if found is None else describe_way(found.contender),
    }
    measured = [_best(report, density) for density in report.densities]
    for one in report.estimates():
        result = {"contender": describe_way(one.contender), "layers_ms": round(one.layers, 4)}
        result |= {"estimated_ms": round(one.total, 4)}
        if one.contender in measured:
            result["measured_ms"] = round(_milliseconds(model, report, one.contender, x), 4)
        case["results"].append(result)
        print(f"    {result}", flush=True)


def _best(report: AdviceReport, density: float) -> Way:
    of_density = [one for one in report.estimates() if _density(one.contender) == density]
    return min(of_density, key=lambda one: one.total).contender


def _density(contender: Way) -> float | None:
    return contender.density if isinstance(contender, ts.BlockSparseConfig) else None


def _milliseconds(model: nn.Module, report: AdviceReport, contender: Way, x: torch.Tensor) -> float:
    made = copy.deepcopy(model)
    names = [name for measured in report.layers for name in measured.names]
    ts.sparsify_(made, contender, filter_fn=lambda _, name: name in names)  # type: ignore[arg-type]
    ts.prepare_for_inference_(made, (x,))
    call, busy = milliseconds_of_call(made, (x,), x.device)
    return call if busy is None else busy


if __name__ == "__main__":
    sys.exit(main())
