"""The benchmarks that recover a language model with kinds of text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import documents
import pytest
import recover_kinds
import texts
import torch
import write_texts
from helpers import DEVICES, seeded
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = torch.randint(256, (4096,), generator=seeded(), dtype=torch.uint8)
SIZES = "--device cpu --seconds 1 --layers 1 --context 32 --batch 4 --width 64 --block 16"


def test_sources_that_are_held_out_are_not_trained_on() -> None:
    training, held_out = (bytes(text.tolist()) for text in documents.sources(8 << 20))
    assert 1000 < len(held_out) < len(training) / 10
    assert held_out[:1000] not in training and held_out[-1000:] not in training
    again = documents.sources(8 << 20)
    assert bytes(again[1].tolist()) == held_out


def test_texts_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert (
        texts.without_roff('.TH X 1\n.SH "A NAME"\n.B bold\nit \\fIis\\fP\\-so\n.\\" note')
        == "A NAME\nbold\nit is-so"
    )
    assert (
        texts.without_markup("<style>p {}</style><p>one &amp; <b>two</b></p>\n\n\n<p>three</p>")
        == "one & two\n\nthree"
    )
    assert (
        texts.is_english("index.html")
        and texts.is_english("a.en.html")
        and not texts.is_english("a.pt-br.html")
    )
    stored = b"".join(
        b"\x00\x04\x00\x09" + len(line).to_bytes(4, "big") + line for line in (b"one", b"", b"two")
    )
    assert texts.strings(b"X\n" + stored) == ["one", "", "two"]
    long, longer = "a" * texts.SHORTEST, "b" * (texts.SHORTEST + 1)
    texts.write(tmp_path / "kind.txt", [long, "short", longer, long])
    assert sorted((tmp_path / "kind.txt").read_text().split("\f")) == [long, longer]
    with pytest.raises(SystemExit, match="--root must have the package of none"):
        texts.write(tmp_path / "none.txt", ["short"])


class Tokenizer:
    """One token for each character."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 128

    def __call__(self, documents: list[str]) -> dict[str, Any]:
        return {"input_ids": [[ord(character) for character in document] for document in documents]}


def test_kinds_that_are_held_out_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, letters in (("training/one", "abc"), ("held_out/other", "xyz")):
        file = tmp_path / f"{part}.txt"
        file.parent.mkdir()
        file.write_text("\f".join(letters[number % 3] * (40 + number) for number in range(200)))
    monkeypatch.setattr(recover_kinds, "code", lambda seed: iter(["d" * 400]))
    written = tmp_path / "written.txt"
    written.write_text("\f".join("e" * (40 + number) for number in range(20)))
    arguments = argparse.Namespace(
        texts=tmp_path,
        characters=10**6,
        written=[written],
        context=16,
        windows=8,
        seed=0,
        batch=2,
        calibration=8,
        device="cpu",
    )
    found = recover_kinds.Texts(Tokenizer(), arguments)
    assert {"of one", "other"} <= found.held_out.keys() and found.tokens.keys() == {"one", "code", "written"}
    trained = torch.cat([batch["input_ids"] for batch in found.batches(recover_kinds.Course(0.05))])
    assert set(map(chr, trained.unique().tolist())) <= set("\0abcde")
    assert set(map(chr, found.held_out["other"].unique().tolist())) <= set("\0xyz")
    assert len(found.calibration()) == 2


def test_windows_go_on_from_how_documents_begin(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training/one.txt").write_text("\f".join("abcdefghijklmnop" for _ in range(3)) + "\fshort")
    arguments = argparse.Namespace(texts=tmp_path, seed=0, batch=2)
    starts = write_texts.documents_begin(Tokenizer(), arguments)
    known = [0, *map(ord, "abcdefghijkl")]
    found = [next(starts) for _ in range(10)]  # three documents are one batch, and one too few for another
    assert found[:2] == found[6:8] == [[0], [0]] and found[4:6] == [known, known]
    for end, token in (*found[2:4], *found[8:]):
        assert end == 0 and 0 <= token < len(Tokenizer())


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_writes_what_it_generates(device: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128, eos_token_id=None))
    model.eval().to(device)
    begun = torch.randint(128, (2, 3), device=device)
    likeliest = model.generate(begun, max_length=200, do_sample=False, pad_token_id=0)
    arguments = argparse.Namespace(batch=2, context=200, device=device, temperature=1e-9)
    assert torch.equal(write_texts.Writer(model, arguments).windows(begun), likeliest)
    arguments.temperature = 1.0
    windows = write_texts.Writer(model, arguments).windows(begun[:1].expand(2, 3))
    assert torch.equal(windows[:, :3], begun[:1].expand(2, 3))
    assert not torch.equal(*windows)  # drawn, and not the likeliest


def test_attention_sees_the_past_alone() -> None:
    query, key, value = (torch.randn(2, heads, 5, 8, generator=seeded(1)) for heads in (4, 2, 2))
    found, weights = recover_kinds.causal(torch.nn.Module(), query, key, value, None, 0.3)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).mT
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    assert weights is None
    torch.testing.assert_close(found, expected.transpose(1, 2))
