"""Times a Llama of Transformers in every form of its weights: prefill, and decode with a static cache.

    python benchmarks/bench_served.py --output served.json

The weights are random, in the shapes of Llama 3 8B; the blocks of largest norm are kept, or the largest two
of four weights. Prefill is one prompt, each layer compiled. Decode is one step of some numbers of sequences,
in a CUDA graph. Dense layers in float8 have scales by row and fast sums, and where nothing is compiled this
library's kernel rounds their inputs. Each form is made, measured and dropped before the next one.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from bench_models import CapturedCall
from harness import (
    add_names,
    measuring,
    parsed,
    positive,
    recording,
    result_parser,
    run_benchmark,
    warm_up,
    write_json,
)
from models import Float8Linear
from torch import Tensor, nn

import tilesparse as ts
from tilesparse.tuning.timing import milliseconds

WHOLE = {"block_shape": 128, "density": 1.0, "nm": (2, 4)}
FLOAT8 = "float8_e4m3fn"
FORMS: dict[str, dict[str, Any] | None] = {
    "dense bfloat16": None,
    "dense float8": None,
    "2:4 bfloat16": {**WHOLE, "storage": "compressed"},
    "2:4 int8": {**WHOLE, "storage": "int8", "activations": "int8"},
    "2:4 float8": {**WHOLE, "storage": FLOAT8, "activations": FLOAT8},
    "int4": {"block_shape": 128, "density": 1.0, "storage": "int4"},
    "blocks .5 bfloat16": {"block_shape": 128, "density": 0.5},
    "blocks .5 float8": {"block_shape": 128, "density": 0.5, "storage": FLOAT8, "activations": FLOAT8},
    "blocks .25 bfloat16": {"block_shape": 128, "density": 0.25},
    "blocks .25 float8": {"block_shape": 128, "density": 0.25, "storage": FLOAT8, "activations": FLOAT8},
    "blocks .5 int4": {"block_shape": 128, "density": 0.5, "storage": "int4"},
}
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
VOCABULARY = 32_768
DTYPE = torch.bfloat16


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = result_parser(__doc__, "served.json", 540.0, device=True, repetitions=5)
    add_names(parser, "--forms", FORMS)
    parser.add_argument("--layers", type=positive, default=32, help="(%(default)s)")
    parser.add_argument("--tokens", type=positive, default=8192, help="of the prompt (%(default)s)")
    parser.add_argument("--sequences", default="1,16,64", help="that are decoded (%(default)s)")
    parser.add_argument("--cached", type=positive, default=1024, help="positions of the cache (%(default)s)")
    parser.add_argument("--small", action="store_true", help="with 256 features, to try the script")
    return run_benchmark(parsed(parser, argv), _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    if arguments.device == "cuda":
        warm_up()
    deadline = time.monotonic() + arguments.budget
    for name in arguments.forms:
        if time.monotonic() > deadline:
            document["stopped"] = f"budget of {arguments.budget:g} s spent before {name}"
            return
        print(name, flush=True)
        record: dict[str, Any] = {"form": name, "results": []}
        document["cases"].append(record)
        with recording(record, name):
            _measure(arguments, name, record)
        write_json(arguments.output, document)
        gc.collect()
        torch.compiler.reset()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


def _measure(arguments: argparse.Namespace, name: str, record: dict[str, Any]) -> None:
    model = make(arguments, name)
    record["bytes"] = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    device = torch.device(arguments.device)

    def add(what: str, call: Callable[[], Tensor]) -> None:
        with measuring(record, what=what) as result:
            result["ms"] = round(milliseconds([call], device, arguments.repetitions)[0], 4)
            print(f"  {what:12} {result['ms']:10.3f} ms", flush=True)

    with torch.no_grad():
        for sequences in map(int, arguments.sequences.split(",")):
            add(f"decode {sequences}", decoding(model, sequences, arguments.cached))
        for layer in model.model.layers:
            layer.compile(fullgraph=True, dynamic=False)
            for module in layer.modules():
                if isinstance(module, Float8Linear):
                    module.compiled = True
        prompt = torch.randint(VOCABULARY, (1, arguments.tokens), device=device)

        def prefill() -> Tensor:
            states = model.model(input_ids=prompt, use_cache=False).last_hidden_state
            logits: Tensor = model.lm_head(states[:, -1])
            return logits

        prefill()
        add("prefill", prefill)


def make(arguments: argparse.Namespace, name: str) -> Any:
    """A random model in one of the forms, ready for inference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Mapping[str, int] = LLAMA
    if arguments.small:
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    config = LlamaConfig(
        **sizes,
        num_hidden_layers=arguments.layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=16384,
        dtype=DTYPE,
    )
    with torch.device(arguments.device):
        torch.set_default_dtype(DTYPE)
        try:
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
    form = FORMS[name]
    if name == "dense float8":
        for path, module in list(model.model.named_modules()):
            if isinstance(module, nn.Linear):
                model.model.set_submodule(path, Float8Linear(module, compiled=False))
    elif form is not None:
        ts.sparsify_(model.model, ts.BlockSparseConfig(**form))
        batch = {
            "input_ids": torch.zeros(1, 128, dtype=torch.int64, device=arguments.device),
            "use_cache": False,
        }
        ts.prepare_for_inference_(model.model, batch)
    return model


def decoding(model: Any, sequences: int, cached: int) -> Callable[[], Tensor]:
    """A call that decodes one more token of each sequence, after half of the cache is filled."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=cached)
    device = model.lm_head.weight.device
    position = torch.full((1,), cached // 2, device=device)
    token = torch.zeros(sequences, 1, dtype=torch.int64, device=device)

    def step() -> Tensor:
        states = model.model(
            input_ids=token,
            position_ids=position[None].expand(sequences, 1),
            cache_position=position,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits: Tensor = model.lm_head(states[:, -1])
        return logits

    step()
    return CapturedCall(torch.no_grad()(step)) if device.type == "cuda" else step


if __name__ == "__main__":
    sys.exit(main())
