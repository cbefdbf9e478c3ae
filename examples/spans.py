"""Spans of texts of several kinds, short and long: to train embedding models on, and to judge them by."""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from documents import by_kind, limited
from torch import Tensor

SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
WORDS = (4, 90)  # of a passage
LENGTHS = (3, 5, 8, 12, 16, 24, 32, 48, 64, 96, 126)  # tokens of spans, which are equally frequent
ROWS = 2048  # spans at a time, at most


class Question(NamedTuple):
    """A sentence, and the rest of the passage that it was taken from."""

    sentence: str
    rest: str


class Judged(NamedTuple):
    """What a kind of text is judged by: key of the texts is their length."""

    texts: dict[str, list[str]]
    questions: list[Question]

    def first(self, most: int) -> Judged:
        return Judged({name: texts[:most] for name, texts in self.texts.items()}, self.questions[:most])

    def counts(self) -> dict[str, int]:
        return {name: len(texts) for name, texts in self.texts.items()} | {"questions": len(self.questions)}


def documents_of(folder: Path, characters: int, seed: int) -> dict[str, list[str]]:
    """Return the documents of the kinds in a folder's ``training``, and docstrings of this installation."""
    kinds = by_kind(folder / "training")
    kinds["docstrings"] = list(docstrings(seed, characters))
    return {kind: limited(documents, characters) for kind, documents in kinds.items()}


def docstrings(seed: int, characters: int) -> Iterator[str]:
    """Yield the docstrings of Python files in random order, those of a file as one document."""
    files = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    random.Random(seed).shuffle(files)
    size = 0
    for file in files:
        text = file.read_text(errors="ignore") if file.is_file() else ""
        found = "\n\n".join(dict.fromkeys(re.findall(r'"""(.*?)"""', text, re.S)))
        if len(found) > 200:
            size += len(found)
            yield found
        if size > characters:
            return


def passages(document: str) -> Iterator[list[str]]:
    """Yield the sentences of each passage: a paragraph, or as much of it as the model reads at once."""
    for paragraph in re.split(r"\n\s*\n", document):
        if 2 * sum(map(str.isalpha, paragraph)) < len(paragraph):
            continue  # a table, or code
        sentences, words = list[str](), 0
        for sentence in SENTENCE.split(" ".join(paragraph.split())):
            if sentences and words + sentence.count(" ") >= WORDS[1]:
                yield sentences
                sentences, words = [], 0
            sentences.append(sentence)
            words += sentence.count(" ") + 1
        if words >= WORDS[0]:
            yield sentences


def judged(documents: list[str], count: int, seed: int) -> Judged:
    """Return up to ``count`` texts of each length, and as many questions."""
    chosen = random.Random(seed)
    found = [sentences for document in documents for sentences in passages(document)]
    chosen.shuffle(found)
    whole = list(dict.fromkeys(" ".join(sentences) for sentences in found if len(sentences) > 1))
    sentences = list(
        dict.fromkeys(sentence for some in found for sentence in some if sentence.count(" ") > 3)
    )
    chosen.shuffle(sentences)
    words = list(dict.fromkeys(span(sentence, chosen) for sentence in sentences[: 2 * count]))
    questions = dict[str, Question]()  # key: the sentence, which has one answer
    for some in found:
        if len(some) > 2:
            place = chosen.randrange(len(some))
            rest = " ".join(some[:place] + some[place + 1 :])
            if some[place].count(" ") > 3:
                questions[some[place]] = Question(some[place], rest)
    answers = {question.rest: question for question in questions.values()}
    texts = {"passages": whole[:count], "sentences": sentences[:count], "words": words[:count]}
    return Judged(texts, list(answers.values())[:count])


def span(sentence: str, chosen: random.Random) -> str:
    """Return one to eight words of a sentence."""
    words = sentence.split()
    start = chosen.randrange(len(words))
    return " ".join(words[start : start + chosen.randint(1, 8)])


class Spans:
    """Random spans of training texts, as batches that never end; kinds are equally frequent."""

    def __init__(self, tokenizer: Any, kinds: dict[str, list[str]], device: str, seed: int) -> None:
        self._random = torch.Generator(device).manual_seed(seed)
        self._lengths = random.Random(seed)
        self._ends = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
        vocabulary = tokenizer.get_vocab()
        goes_on = torch.zeros(len(tokenizer), dtype=torch.bool)
        goes_on[[number for word, number in vocabulary.items() if word.startswith("##")]] = True
        self._kinds = [Tokens.of(tokenizer, documents, goes_on).to(device) for documents in kinds.values()]
        self.tokens = {kind: len(one.tokens) for kind, one in zip(kinds, self._kinds, strict=True)}

    def batches(self, tokens: int) -> Iterator[dict[str, Tensor]]:
        """Yield batches of about so many tokens."""
        while True:
            yield self.batch(tokens, self._lengths.choice(LENGTHS))

    def batch(self, tokens: int, length: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, both [spans, length + 2]."""
        rows = max(2, min(ROWS, tokens // (length + 2)) // len(self._kinds))
        first, last, padding = self._ends
        found = [one.spans(rows, length, self._random) for one in self._kinds]
        spans, counts = (torch.cat(parts) for parts in zip(*found, strict=True))
        places = torch.arange(length + 2, device=spans.device)
        ids = torch.nn.functional.pad(spans, (1, 1), value=padding)
        ids[:, 0] = first
        ids = torch.where(places == counts[:, None] + 1, last, ids)
        mask = places <= counts[:, None] + 1
        return {"input_ids": torch.where(mask, ids, padding), "attention_mask": mask.long()}


class Tokens(NamedTuple):
    """Tokens of a kind's documents, one after the other."""

    tokens: Tensor  # [tokens] int64
    words: Tensor  # [words]: where words begin
    sentences: Tensor  # [sentences]: where sentences begin

    @classmethod
    def of(cls, tokenizer: Any, documents: list[str], goes_on: Tensor) -> Tokens:
        sentences = [sentence for text in documents for some in passages(text) for sentence in some]
        found = tokenizer(sentences, add_special_tokens=False)["input_ids"]
        counts = torch.tensor([len(ids) for ids in found])
        tokens = torch.tensor([token for ids in found for token in ids], dtype=torch.int64)
        starts = counts.cumsum(0) - counts
        return cls(tokens, (~goes_on[tokens]).nonzero()[:, 0], starts.unique())

    def to(self, device: str) -> Tokens:
        return Tokens(*(tensor.to(device) for tensor in self))

    def spans(self, rows: int, length: int, chosen: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return (tokens [rows, length], how many of them count [rows]).

        Half of the spans begin with a sentence, and half of those that can do so end with one.
        """
        device, half = self.tokens.device, rows // 2
        whole, any_word = (self.sentences, half), (self.words, rows - half)
        starts = torch.cat([self._some(places, count, chosen) for places, count in (whole, any_word)])
        starts = self._before(self.words, starts.clamp(max=max(0, len(self.tokens) - length)))
        places = starts[:, None] + torch.arange(length, device=device)
        ends = self._before(self.sentences, starts + length)
        short = ends - starts < max(1, length // 3)
        full = torch.rand(rows, generator=chosen, device=device) < 0.5
        cut = self._before(self.words, starts + length)
        cut = torch.where(cut > starts, cut, starts + length)
        ends = torch.where(short | full, cut, ends)
        return self.tokens[places.clamp(max=len(self.tokens) - 1)], ends - starts

    def _some(self, places: Tensor, count: int, chosen: torch.Generator) -> Tensor:
        return places[torch.randint(len(places), (count,), generator=chosen, device=places.device)]

    @staticmethod
    def _before(places: Tensor, ends: Tensor) -> Tensor:
        """Return the last of the places that is not behind each end."""
        return places[(torch.searchsorted(places, ends, right=True) - 1).clamp(min=0)]
