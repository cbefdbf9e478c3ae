"""Judges the embeddings of dense all-MiniLM-L6-v2 in several runtimes and precisions, on kinds of text.

    python examples/texts.py --root root --output texts  # see there
    python benchmarks/bench_cpu_embeddings.py --folder models --prepare
    python benchmarks/judge_embeddings.py --folder models --texts texts --output quality.json

The kinds are those that `examples/recover_embeddings.py` holds out, and so are the questions: cosines are to
the embeddings of PyTorch in float32, and a sentence is to find the passage that it was taken from.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bench_cpu_embeddings import Contender, machine
from bench_cpu_models import DENSE, PACKAGE
from harness import write_json

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from common import packaged
from recover_embeddings import Judge
from spans import judged


class Model:
    """A contender, called as the models of Transformers are."""

    def __init__(self, name: str, folder: Path) -> None:
        self._hidden = Contender(name, folder, 1.0, 0).hidden(os.cpu_count() or 1, None)

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
    parser.add_argument("--judged", type=int, default=200, help="texts of a length and kind (%(default)s)")
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(
        packaged(PACKAGE, "model")
    )
    kinds = {
        file.stem: judged(file.read_text().split("\f"), arguments.judged, seed=0)
        for file in sorted((arguments.texts / "held_out").glob("*.txt"))
    }
    exact: Any = Model(DENSE[0], arguments.folder)
    judge = Judge(tokenizer, exact, kinds, "cpu")
    document: dict[str, Any] = {
        "environment": machine(arguments.commit),
        "judged": {kind: one.counts() for kind, one in kinds.items()},
        "cases": [],
    }
    for name in DENSE:
        model: Any = Model(name, arguments.folder)
        document["cases"].append({"contender": name, "quality": judge(model)})
        write_json(arguments.output, document)
        print(document["cases"][-1], flush=True)


if __name__ == "__main__":
    main()
