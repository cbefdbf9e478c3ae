"""Times a Llama of Transformers in every form of its weights: prefill, and decode with a static cache.

    python benchmarks/bench_served.py --output served.json

The weights are random, in the shapes of Llama 3 8B; the blocks of largest norm are kept, or the largest two
of four weights. Every layer is compiled. Prefill is one prompt. Decode is one step of some numbers of
sequences in a CUDA graph: each token attends to a full cache. Dense layers in float8 have scales by row and
fast sums. Each form is made, measured and dropped before the next one.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from harness import (
    CapturedCall,
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
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilesparse as ts
from tilesparse.tuning.measure import milliseconds

WHOLE = {"block_shape": 128, "density": 1.0, "nm": (2, 4)}
FLOAT8 = "float8_e4m3fn"
FORMS: dict[str, dict[str, Any] | None] = {
    "dense bfloat16": None,
    "dense float8": None,
    "2:4 bfloat16": {**WHOLE, "storage": "compressed"},
    "2:4 int8": {**WHOLE, "storage": "int8", "activations": "int8"},
    "2:4 float8": {**WHOLE, "storage": FLOAT8, "activations": FLOAT8},
    "2:4 int4": {"block_shape": 128, "density": 1.0, "storage": "int4"},  # the zeros are stored
    "blocks .5 bfloat16": {"block_shape": 128, "density": 0.5},
    "blocks .5 float8": {"block_shape": 128, "density": 0.5, "storage": FLOAT8, "activations": FLOAT8},
    "blocks .25 bfloat16": {"block_shape": 128, "density": 0.25},
    "blocks .25 float8": {"block_shape": 128, "density": 0.25, "storage": FLOAT8, "activations": FLOAT8},
    "blocks .5 int4": {"block_shape": 128, "density": 0.5, "storage": "int4"},
    "blocks .25 int4": {"block_shape": 128, "density": 0.25, "storage": "int4"},
}
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
VOCABULARY = 128_256
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

    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    with torch.no_grad():
        for sequences in map(int, arguments.sequences.split(",")):
            add(f"decode {sequences}", decoding(model, sequences, arguments.cached))
        states = torch.randn(1, model.config.hidden_size, dtype=DTYPE, device=device)
        add("head", lambda: model.lm_head(states))
        prompt = torch.randint(VOCABULARY, (1, arguments.tokens), device=device)

        def prefill() -> Tensor:
            states = model.model(input_ids=prompt, use_cache=False).last_hidden_state
            logits: Tensor = model.lm_head(states[:, -1])
            return logits

        prefill()
        add("prefill", prefill)


def make(arguments: argparse.Namespace, name: str) -> Any:
    """A random model in one of the forms, ready for inference."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

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
        attn_implementation="grouped",
    )
    AttentionInterface.register("grouped", grouped)
    with torch.device(arguments.device):
        torch.set_default_dtype(DTYPE)
        try:
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0  # a constant of its code, which all layers share so
    form = FORMS[name]
    if name == "dense float8":
        for path, module in list(model.model.named_modules()):
            if isinstance(module, nn.Linear):
                model.model.set_submodule(path, Float8Linear(module, compiled=True))
    elif form is not None:
        ts.sparsify_(model.model, ts.BlockSparseConfig(**form))
        for module in model.modules():
            if isinstance(module, ts.BlockSparseLinear):
                module.use_fast_accum = True  # as the dense layers
        tokens = torch.zeros(1, 128, dtype=torch.int64, device=arguments.device)
        ts.prepare_for_inference_(model.model, {"input_ids": tokens, "use_cache": False})
    return model


class LastPosition:
    """The cache of one layer, all but its last position filled, which every token takes."""

    def __init__(self, config: Any, sequences: int, cached: int, device: torch.device) -> None:
        size = (sequences, config.num_key_value_heads, cached, config.head_dim)
        self._keys, self._values = (torch.randn(size, dtype=DTYPE, device=device) for _ in range(2))

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the token's keys and values, and return all."""
        self._keys[:, :, -1:], self._values[:, :, -1:] = keys, values
        return self._keys, self._values


def grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of Transformers; heads of a group are queries of one token, so the cache is read once."""
    if query.shape[2] > 1:
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    else:
        groups = query.reshape(*key.shape[:2], -1, key.shape[-1])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # cuDNN takes three times as long
            y = F.scaled_dot_product_attention(groups, key, value).reshape(query.shape)
    return y.transpose(1, 2).contiguous(), None


def decoding(model: Any, sequences: int, cached: int) -> Callable[[], Tensor]:
    """A call that decodes one more token of each sequence."""
    layers, device = model.model.layers, model.lm_head.weight.device
    caches = [LastPosition(model.config, sequences, cached, device) for _ in layers]
    position = torch.full((sequences, 1), cached - 1, device=device)
    token = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
    taken = inspect.signature(type(layers[0].self_attn).forward).parameters
    name = "cache" if "cache" in taken else "past_key_values"

    def step() -> Tensor:
        states = model.model.embed_tokens(token)
        turns = model.model.rotary_emb(states, position_ids=position)
        for layer, cache in zip(layers, caches, strict=True):
            states = layer(states, position_embeddings=turns, **{name: cache})
        logits: Tensor = model.lm_head(model.model.norm(states)[:, -1])
        return logits

    step()
    return CapturedCall(torch.no_grad()(step)) if device.type == "cuda" else step


if __name__ == "__main__":
    sys.exit(main())
