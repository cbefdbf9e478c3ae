"""Times vLLM on a CPU with dense and block-sparse checkpoints of one size: prefill, and decode in batches.

    OMP_NUM_THREADS=2 python benchmarks/bench_vllm.py --output benchmarks/results/cpu_vllm.json

It needs a vLLM for the CPU beside this package, see docs/vllm.md. Models are random Llamas: speed does not
depend on which blocks are kept. Each is served by a process of its own, and the processes take turns at every
measurement, so that all see the same machine; those that wait take no processor time. The least time counts,
since others may share the machine. Prefill is four prompts of 500 tokens at once; decode is the time of 33
tokens of each sequence less that of the first.

--only measures some models, always beside the dense one.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import Worker, answer_turns, environment, result_parser, write_json

import tilesparse as ts

DENSE = "dense"
MODELS: dict[str, dict[str, Any]] = {  # options of `BlockSparseConfig`
    DENSE: {},
    "bfloat16 .25": {"density": 0.25},
    "bfloat16 .5": {"density": 0.5},
    "int8 W8A8 .25": {"density": 0.25, "storage": "int8", "activations": "int8"},
}
BATCHES = (1, 8, 32)
PROMPTS, PROMPT_TOKENS, DECODED = 4, 500, 32
MEASURES = ("prefill", *(f"decode {batch}" for batch in BATCHES))
VOCABULARY = 4096


def make_checkpoint(folder: Path, name: str, arguments: argparse.Namespace) -> Path:
    """Write a random model, unless it is there already."""
    where = folder / name.replace(" ", "-")
    if where.exists():
        return where
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = arguments.hidden
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 512),
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    if MODELS[name]:
        ts.sparsify_(model, ts.BlockSparseConfig(block_shape=arguments.block, **MODELS[name]))
    model.save_pretrained(where)
    return where


def serve(folder: str) -> None:
    """Load a model, and answer each measure with the tokens per second for it."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    llm = LLM(
        folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=PROMPTS * PROMPT_TOKENS,
        kv_cache_memory_bytes=1 << 29,
        enable_prefix_caching=False,
        seed=0,
    )
    numbers = random.Random(0)

    def seconds(batch: int, tokens: int, generated: int) -> float:
        drawn = [[numbers.randrange(2, VOCABULARY) for _ in range(tokens)] for _ in range(batch)]
        prompts = [{"prompt_token_ids": ids} for ids in drawn]
        sampling = SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def rate(measure: str) -> float:
        if measure == "prefill":
            return PROMPTS * PROMPT_TOKENS / seconds(PROMPTS, PROMPT_TOKENS, 1)
        batch = int(measure.removeprefix("decode "))
        first = seconds(batch, 16, 1)
        return batch * DECODED / (seconds(batch, 16, 1 + DECODED) - first)

    seconds(2, 64, 3)
    answer_turns(rate)


def cases_of(rounds: Sequence[dict[tuple[str, str], float]]) -> list[dict[str, Any]]:
    """Return the best of the rounds for each model and measure, beside the dense one's."""
    best = {key: max(each[key] for each in rounds) for key in rounds[0]}
    found = []
    for (name, measure), rate in best.items():
        if name != DENSE:
            dense = best[DENSE, measure]
            case = {"model": name, "measure": measure, "tokens_per_second": rate}
            case |= {"dense_tokens_per_second": dense, "speedup": rate / dense}
            found.append(case)
    return found


def compare(arguments: argparse.Namespace) -> None:
    """Serve the models, and write what was measured after every round."""
    names = [DENSE, *(name for name in MODELS if name != DENSE and name in (arguments.only or MODELS))]
    folders = {name: make_checkpoint(arguments.folder, name, arguments) for name in names}
    output = arguments.output
    servers = {name: Worker(__file__, "--serve", str(folder)) for name, folder in folders.items()}
    rounds: list[dict[tuple[str, str], float]] = []
    for _ in range(arguments.rounds):
        turns = product(arguments.measures, servers)
        rounds.append({(name, measure): servers[name].ask(measure) for measure, name in turns})
        print(rounds[-1], flush=True)
        document = {
            "environment": environment(arguments.commit),
            "arguments": {name: getattr(arguments, name) for name in ("hidden", "layers", "block")},
            "rounds": len(rounds),
            "load_average": os.getloadavg(),  # of which this takes its threads
            "cases": cases_of(rounds),
        }
        if output:
            write_json(output, document)
    for server in servers.values():
        server.end()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, or serve one model to the process that does."""
    parser = result_parser(__doc__, None)
    parser.add_argument("--folder", type=Path, default=Path("build/bench_vllm"), help="of the models")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="models beside the dense one")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # for the processes
    arguments = parser.parse_args(argv)
    if arguments.serve:
        serve(arguments.serve)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
