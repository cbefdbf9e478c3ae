from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

from tilesparse import _C, cli

LAYER = ["--in-features", "64", "--out-features", "96", "--tokens", "16"]


def test_info_lists_versions_kernels_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", *LAYER, "--block", "32x16"]) == 0
    text = capsys.readouterr().out
    for expected in (_C.version(), torch.__version__, _C.architectures(), _C.device_info(0).name):
        assert expected in text
    assert all(kernel.name in text for kernel in _C.kernels())
    assert "expand=True" in text
    choice = text[text.index("64 -> 96 features") :]
    assert "blocks 32x16" in choice
    for op in cli.OPS:
        line = next(line for line in choice.splitlines() if line.split()[:2] == ["cpu", op])
        assert any(f"{kernel.name}: " in line for kernel in _C.kernels())


def test_info_says_from_which_density_dense_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", *LAYER]) == 0
    text = capsys.readouterr().out
    table = text[text.index("density from which dense is faster") :].splitlines()
    blocks = next(line.split()[1:] for line in table if line.split()[:1] == ["blocks"])
    assert blocks == ["16x16", "32x32", "64x64", "128x128"]
    for op in cli.OPS:
        densities = next(line.split()[1:] for line in table if line.split()[:1] == [op])
        assert len(densities) == len(blocks) and all(0 <= float(density) <= 1 for density in densities)


def test_bench_compares_the_products_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *LAYER, "--device", "cpu", "--op", "dgrad"]) == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert "density 0.25" in title and title.endswith("on cpu")
    assert [row.split()[0] for row in rows] == ["dgrad"]
    assert rows[0].count(" ms") == 3 and "x" in rows[0]


@pytest.mark.parametrize("op", cli.OPS)
def test_bench_computes_the_same_on_all_sides(op: str) -> None:
    pattern = cli.BlockPattern.full((96, 64), block_shape=(32, 32))
    dense, expanded, sparse = cli._products(pattern, op, 16, torch.float32, torch.device("cpu"))
    assert expanded().shape == sparse().shape
    assert sparse().numel() == dense().numel()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required"),
        (["train"], "invalid choice"),
        (["info", "--block", "24"], "24"),
        (["info", "--density", "1.5"], "1.5"),
        (["bench", "--device", "tpu"], "tpu"),
        (["bench", "--device", "cuda:99"], "cuda:99"),
        (["demo", "--steps", "0"], "0 is not at least 1"),
        (["demo", "--size", "huge"], "huge"),
    ],
)
def test_bad_options_are_explained(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_bad_input_is_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--in-features", "100"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("tilesparse info: in_features") and output.err.count("\n") == 1


def test_an_interrupt_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.demo, "run", interrupt)
    assert cli.main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_command_and_the_module_are_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="tilesparse")
    assert script.load() is cli.main
    run = subprocess.run([sys.executable, "-m", "tilesparse", "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and "demo" in run.stdout
