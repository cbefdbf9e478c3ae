"""The example that recovers an embedding model with kinds of text, and the benchmark of embeddings."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import bench_cpu_embeddings
import pytest
import recover_embeddings
import spans
import torch
from documents import parted
from safetensors.torch import load_file

WORDS = "abcdefghij"
ANY_SENTENCE = re.compile(r"(?<=[.])\s")
SIZES = "--characters 20000 --calibration 8 --batch 256 --judged 20 --block 16 --device cpu"


class Tokenizer:
    """Each letter is a token; capitals go on with the word before them."""

    cls_token_id, sep_token_id, pad_token_id = 0, 1, 2

    def get_vocab(self) -> dict[str, int]:
        marks = {"[CLS]": 0, "[SEP]": 1, "[PAD]": 2, ".": 3}
        words = {letter: number for number, letter in enumerate(WORDS, 4)}
        return marks | words | {f"##{letter}": number for number, letter in enumerate(WORDS, 14)}

    def __len__(self) -> int:
        return 24

    def __call__(self, texts: list[str], add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        vocabulary = self.get_vocab()
        names = [
            [f"##{one.lower()}" if one.isupper() else one for one in text if not one.isspace()]
            for text in texts
        ]
        ids = [[vocabulary[name] for name in some] for some in names]
        return {"input_ids": [[0, *some, 1] for some in ids] if add_special_tokens else ids}

    def pad(self, tokens: dict[str, Any], **_: Any) -> Any:
        ids = tokens["input_ids"]
        longest = max(map(len, ids))
        mask = torch.tensor([[1] * len(some) + [0] * (longest - len(some)) for some in ids])
        padded = torch.tensor([some + [2] * (longest - len(some)) for some in ids])
        return BatchOfTokens(input_ids=padded, attention_mask=mask)


class BatchOfTokens(dict[str, torch.Tensor]):
    def to(self, device: str) -> BatchOfTokens:
        return self


def documents(letters: str, count: int) -> list[str]:
    """Return documents of passages of four sentences of six words, none twice."""
    found, chosen = [], torch.Generator().manual_seed(len(letters))
    for _ in range(count):
        drawn = torch.randint(len(letters), (12, 6), generator=chosen)
        sentences = [" ".join(letters[i] + "J" for i in row) + "." for row in drawn.tolist()]
        found.append("\n\n".join(" ".join(sentences[start : start + 4]) for start in (0, 4, 8)))
    return found


def test_passages_are_sentences_of_paragraphs() -> None:
    long = " ".join(f"This is sentence {number} of ten words or so, is it?" for number in range(20))
    text = f"One is here. Two (too) is there.\n\n1 2 3 4 5 6 7 8 9\n\nfew words\n\n{long}"
    first, *parts = spans.passages(text)
    assert first == ["One is here.", "Two (too) is there."]
    assert len(parts) > 1 and " ".join(" ".join(part) for part in parts) == long
    assert all(" ".join(part).count(" ") < spans.WORDS[1] for part in parts)


def test_what_is_judged_is_not_trained_on_and_has_one_answer() -> None:
    texts = [
        f"Number {i} is here to say something. And {i} is what it has. Then {i} is gone." for i in range(400)
    ]
    training, held_out = parted(texts)
    assert sorted(training + held_out) == sorted(texts) and 0 < len(held_out) < 30
    found = spans.judged(texts, 50, seed=0)
    counts = found.counts()
    assert (
        counts["passages"] == counts["sentences"] == counts["questions"] == 50 and 20 < counts["words"] <= 50
    )
    assert all(1 <= len(words.split()) <= 8 for words in found.texts["words"])
    assert len({question.rest for question in found.questions}) == 50
    for question in found.questions:
        assert question.sentence not in question.rest
        (number,) = {word for word in question.rest.replace(".", "").split() if word.isdigit()}
        assert number in question.sentence


def test_spans_have_their_words_whole_and_the_ends_that_models_expect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spans, "SENTENCE", ANY_SENTENCE)
    texts = ["aB cD eF gH. iJ aB cD eF gH iJ.", "cD eF gH iJ aB. eF gH iJ aB cD."]
    made = spans.Spans(Tokenizer(), {"one": texts * 20, "two": texts * 10}, "cpu", 0)
    assert made.tokens == {"one": 20 * 44, "two": 10 * 44}
    for length in (3, 8, 16):
        batch = made.batch(4096, length)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert ids.shape == mask.shape == (2 * (4096 // (length + 2) // 2), length + 2)
        for row, count in zip(ids, mask.sum(1).tolist(), strict=True):
            assert row[0] == 0 and row[count - 1] == 1 and (row[count:] == 2).all()
            assert 4 <= row[1] < 14 or row[1] == 3  # no word is cut at its beginning
            assert not 4 <= row[count - 2] < 14 or count == 3  # nor at its end
            assert ((row[1 : count - 1] > 2) & (row[1 : count - 1] < 24)).all()
    lengths = {next(made.batches(512))["input_ids"].shape[1] for _ in range(200)}
    assert lengths == {length + 2 for length in spans.LENGTHS}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Texts, and a small model that is loaded in place of MiniLM."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=24, **size)).eval()
    for part, letters in (
        ("training/guides", "abc"),
        ("training/one", "bcdef"),
        ("training/two", "efghij"),
        ("held_out/news", "aj"),
    ):
        file = tmp_path / f"texts/{part}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\f".join(documents(letters, 120)))
    monkeypatch.setattr(recover_embeddings.AutoModel, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(recover_embeddings.AutoTokenizer, "from_pretrained", lambda *_: Tokenizer())
    monkeypatch.setattr(spans, "SENTENCE", ANY_SENTENCE)
    monkeypatch.setattr(spans, "docstrings", lambda seed, characters: iter(documents("cde", 9)))
    return tmp_path


def test_embeddings_are_recovered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (
        f"recover --texts {folder}/texts --output {folder}/out.json --model {folder} --save {folder} {SIZES}"
    )
    monkeypatch.setattr(sys, "argv", [*command.split(), "--cases", "0.75>0.5:2", "0.5:0.5"])
    recover_embeddings.main()
    document = json.loads((folder / "out.json").read_text())
    assert document["tokens"].keys() == {
        "one",
        "two",
        "docstrings",
    }  # neither validation nor what is held out
    assert document["dense"].keys() >= {"validation: guides", "news", "of one"}
    assert all(abs(one["cosine"] - 1) < 1e-4 for one in document["dense"].values())
    gradual, once = document["cases"]
    assert (gradual["start"], gradual["density"], once["start"], once["density"]) == (0.75, 0.5, 0.5, 0.5)
    times = [point["seconds"] for point in gradual["curve"]]
    assert times == sorted(times) and len(times) >= 2 and times[-1] >= 2
    assert gradual["curve"][-1]["steps"] > 0
    states = load_file(folder / "minilm-0.5.safetensors")
    assert all(name.startswith("encoder.") for name in states)
    weight = next(tensor for name, tensor in states.items() if name.endswith("query.weight"))
    assert weight.shape == (2, 16, 16) and weight.dtype == torch.bfloat16  # half of four blocks


def test_cases_are_read_as_they_are_written() -> None:
    assert recover_embeddings.case("0.5:90") == (0.5, 0.5, 90)
    assert recover_embeddings.case("0.75>0.5:20") == (0.75, 0.5, 20)


def test_contenders_take_turns_and_the_least_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    class Fake:
        def __init__(self, arguments: Any, name: str, density: float, block: int) -> None:
            self.name, self.density, self.block = name, density, block

        def answer(self, turn: Any = None) -> Any:
            if turn is None:
                return "ready"
            turns.append(self.name)
            return float(100 - len(turns))

        def end(self) -> None:
            turns.append(f"end of {self.name}")

    monkeypatch.setattr(bench_cpu_embeddings, "Process", Fake)
    monkeypatch.setattr(bench_cpu_embeddings, "DENSE", ("torch",))
    output = tmp_path / "out.json"
    sizes = "--blocks 32 --densities .5 --threads 1 --seconds 0"
    bench_cpu_embeddings.main(f"--folder {tmp_path} --output {output} {sizes}".split())
    names = ["torch", *bench_cpu_embeddings.COMPILED_DENSE, *bench_cpu_embeddings.SPARSE]
    # Three batches, once without counting, so that what is compiled is compiled.
    assert turns == names * 6 + [f"end of {name}" for name in names]
    cases = json.loads(output.read_text())["cases"]
    assert [case["contender"] for case in cases] == names
    assert [result["ms"] for result in cases[0]["results"]] == [81, 75, 69]


def test_tables_of_embeddings_compare_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(docs)
    tables = runpy.run_path(str(docs / "embedding_tables.py"))
    found = [
        {"contender": name, "density": density, "block": block, "results": [{**setting, "ms": ms}]}
        for setting in [{"threads": 2, "batch": 1, "tokens": 32}]
        for name, density, block, ms in [
            ("torch", 1.0, 0, 30.0),
            ("openvino int8", 1.0, 0, 12.0),
            ("tilesparse bfloat16", 0.5, 32, 10.0),
            ("tilesparse bfloat16", 0.5, 64, 8.0),
            ("tilesparse int8 bfloat16", 0.25, 64, 24.0),
        ]
    ]
    monkeypatch.setitem(tables["gains"].__globals__, "cases", lambda file: found)
    best = "1.50×, bfloat16, blocks of 64", "0.50×, int8 bfloat16, blocks of 64"
    assert tables["gains"]().splitlines()[2] == f"| 1 × 32, 2 threads | openvino int8 | {' | '.join(best)} |"
    assert [line.split(" | ")[-1] for line in tables["speed"]().splitlines()[2:5]] == ["30 |", "12 |", "10 |"]
    assert "**8**" in tables["speed"]()
