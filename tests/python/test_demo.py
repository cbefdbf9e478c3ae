from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tilesparse import _progress
from tilesparse.cli import command as cli
from tilesparse.cli import demo

TINY = ["demo", "--size", "tiny", "--device", "cpu"]


pytestmark = pytest.mark.usefixtures("one_thread")


def test_trains_both_models_on_the_standard_library_and_compares_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*TINY, "--steps", "60", "--density", "0.5"]) == 0
    output = capsys.readouterr()
    rows = dict(re.findall(r"^(\D[^\d]*?)\s{2,}(\S.*)$", output.out, re.MULTILINE))
    losses = [float(cell) for cell in rows["validation loss (nats per byte)"].split()]
    assert all(loss < 4.6 for loss in losses)  # it starts at ln(256) = 5.5
    dense, sparse = (int(cell.replace(",", "")) for cell in rows["parameters"].split())
    width = demo.SIZES["tiny"].width
    assert dense - sparse == 12 * width * width / 2
    assert rows["speedup"].startswith("1.00x")
    assert "4 linear layers made block-sparse: density 0.5" in output.out
    assert "\r" not in output.err  # no bar where there is no terminal


def test_progress_is_said_without_a_terminal_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_progress, "SECONDS", 0)
    assert cli.main([*TINY, "--steps", "2"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "loss" in line]
    assert [line.split()[0] for line in lines] == ["1/2", "2/2"]


def test_both_models_see_the_same_batches_in_the_same_number_of_steps() -> None:
    settings = demo.Settings(demo.SIZES["tiny"], torch.device("cpu"), torch.float32, 1.0, (32, 32), steps=3)
    torch.manual_seed(0)
    dense = demo.GPT(settings.size)
    trainees = [
        demo.Trainee(name, model, settings)
        for name, model in (("dense", dense), ("copy", demo.copy.deepcopy(dense)))
    ]
    demo.train(trainees, demo.load_text(None, settings.size.context)[0])
    assert trainees[0].loss == trainees[1].loss
    assert [len(trainee.seconds) for trainee in trainees] == [3, 3]


def test_own_text_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 20)
    assert cli.main([*TINY, "--steps", "2", "--text", str(file)]) == 0
    assert "0.0 MB of text" in capsys.readouterr().out
    file.write_bytes(b"short")
    assert cli.main([*TINY, "--text", str(file)]) == 2
    assert cli.main([*TINY, "--text", str(tmp_path / "missing")]) == 2
    errors = capsys.readouterr().err
    assert "found 5" in errors and "missing" in errors


def test_the_text_is_split_and_always_the_same() -> None:
    training, validation = demo.load_text(None, 32)
    assert len(validation) == (len(training) + len(validation)) // 10
    assert bytes(training[:100_000]).count(b"import ") > 10
    assert torch.equal(training[:1000], demo.load_text(None, 32)[0][:1000])


def test_bad_block_shapes_are_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY, "--block", "128"]) == 2
    assert "blocks.0.attention" in capsys.readouterr().err


def test_a_density_that_keeps_no_block_is_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY, "--density", "0.01"]) == 2
    assert "density 0.01 of its 12 blocks" in capsys.readouterr().err
