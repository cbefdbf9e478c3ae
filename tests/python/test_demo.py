from __future__ import annotations

import re

import pytest
import torch

from tilesparse import _progress
from tilesparse.cli import command, demo

TINY = ["demo", "--size", "tiny", "--device", "cpu"]


pytestmark = pytest.mark.usefixtures("one_thread")


def test_trains_both_models_on_the_standard_library_and_compares_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main([*TINY, "--steps", "60", "--density", "0.5"]) == 0
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
    assert command.main([*TINY, "--steps", "2"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "loss" in line]
    assert [line.split()[0] for line in lines] == ["1/2", "2/2"]


def test_the_text_is_always_the_same() -> None:
    text = demo.library_sources()
    assert bytes(text[:100_000]).count(b"import ") > 10
    assert torch.equal(text[:1000], demo.library_sources()[:1000])


def test_bad_block_shapes_are_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*TINY, "--block", "128"]) == 2
    assert "blocks.0.attention" in capsys.readouterr().err


def test_a_density_that_keeps_no_block_is_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*TINY, "--density", "0.01"]) == 2
    assert "density 0.01 of its 12 blocks" in capsys.readouterr().err
