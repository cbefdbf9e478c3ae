"""Judges the embeddings of all-MiniLM-L6-v2, dense in several runtimes and precisions, on kinds of text.

    python examples/texts.py --root root --output texts  # see there
    python benchmarks/bench_cpu_embeddings.py --folder models --prepare
    python benchmarks/judge_embeddings.py --folder models --texts texts --output quality.json
    python benchmarks/judge_embeddings.py … --recovered minilm-0.5.safetensors  # of recover_embeddings.py

The kinds are those that `examples/recover_embeddings.py` holds out, and so are the questions: cosines are to
the embeddings of PyTorch in float32, and a sentence is to find the passage that it was taken from.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bench_cpu_embeddings import Contender, Hidden, machine
from bench_cpu_models import DENSE, ENCODER, PACKAGE, inputs_of, loaded
from harness import write_json
from safetensors.torch import load_file

import tilesparse as ts

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from common import packaged
from documents import by_kind
from recover_embeddings import Judge
from spans import judged


def recovered(variant: str, file: Path) -> Hidden:
    """Return a pruned model in some precision, of which all linear layers have the density of the first."""
    states = load_file(file)
    encoder = loaded(variant)
    if "bfloat16" in variant:
        encoder = encoder.bfloat16()
    first = next(tensor for name, tensor in states.items() if name.endswith("query.weight"))
    dense = encoder.model.get_parameter("encoder.layer.0.attention.self.query.weight")
    config = ts.BlockSparseConfig(density=first.numel() / dense.numel(), block_shape=first.shape[1])
    ts.sparsify_(encoder, {f"model.{ENCODER}": config})
    _, unexpected = encoder.model.load_state_dict(states, strict=False)
    if unexpected:
        raise SystemExit(f"{file} has {unexpected[0]}, which the model has not")
    if "int8" in variant:
        for module in encoder.modules():
            if isinstance(module, ts.BlockSparseLinear):
                module.to_storage("int8", activations="int8")
    ts.prepare_for_inference(encoder, inputs_of(1, 128))
    return encoder


class Model:
    """A contender, called as the models of Transformers are."""

    def __init__(self, hidden: Hidden) -> None:
        self._hidden = hidden

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        with torch.inference_mode():
            hidden = self._hidden(input_ids, attention_mask)
        return SimpleNamespace(last_hidden_state=torch.as_tensor(hidden).clone())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="with exported models")
    parser.add_argument(
        "--texts", type=Path, required=True, help="a folder that examples/texts.py has written"
    )
    parser.add_argument("--output", type=Path, required=True, help="as JSON")
    parser.add_argument("--recovered", type=Path, help="also a model that recover_embeddings.py has saved")
    parser.add_argument("--judged", type=int, default=200, help="texts of a length and kind (%(default)s)")
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(
        packaged(PACKAGE, "model")
    )
    held_out = by_kind(arguments.texts / "held_out")
    kinds = {kind: judged(documents, arguments.judged, seed=0) for kind, documents in held_out.items()}
    threads = os.cpu_count() or 1

    def dense(name: str) -> Hidden:
        return Contender(name, arguments.folder, 1.0, 0).hidden(threads, None)

    contenders: dict[str, Callable[[], Hidden]] = {name: partial(dense, name) for name in DENSE}
    if arguments.recovered is not None:
        for variant in ("bfloat16", "int8 bfloat16"):
            name = f"tilesparse {variant}, {arguments.recovered.stem}"
            contenders[name] = partial(recovered, variant, arguments.recovered)
    exact: Any = Model(dense(DENSE[0]))
    judge = Judge(tokenizer, exact, kinds, "cpu")
    document: dict[str, Any] = {
        "environment": machine(arguments.commit),
        "judged": {kind: one.counts() for kind, one in kinds.items()},
        "cases": [],
    }
    for name, hidden in contenders.items():
        model: Any = Model(hidden())
        document["cases"].append({"contender": name, "quality": judge(model)})
        write_json(arguments.output, document)
        print(document["cases"][-1], flush=True)


if __name__ == "__main__":
    main()
