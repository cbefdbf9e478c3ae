from __future__ import annotations

import io
import logging
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilesparse import _C, _checks
from tilesparse.cli import command as cli
from tilesparse.cli import demo, kernels
from tilesparse.tuning import Device, Product, choose
from tilesparse.tuning.measure import device_to_measure, product_calls
from tilesparse.tuning.product import OPS, default_device

LAYER = ["--in-features", "64", "--out-features", "96", "--tokens", "16", "--block", "32"]


def test_info_lists_versions_kernels_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", *LAYER, "--block", "32x16"]) == 0
    text = capsys.readouterr().out
    for expected in (_C.version(), torch.__version__, _C.architectures(), _C.device_info(0).name):
        assert expected in text
    listed = text[text.index("\nkernels:") :]
    assert all(kernel.name in listed for kernel in _C.kernels())
    choice = text[text.index("64 -> 96 features") :]
    assert "blocks 32x16" in choice
    for op in OPS:
        line = next(line for line in choice.splitlines() if line.split()[:2] == ["cpu", op])
        assert any(f"{kernel.name}: " in line for kernel in _C.kernels())


@pytest.mark.skipif("sm_80" not in _C.architectures(), reason="this library has no kernels for 8.0")
@pytest.mark.parametrize("gpu", ["A100", "H100", "B200", "RTX PRO 6000"])
def test_info_names_the_kernels_that_are_chosen_from(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", *LAYER, "--gpu", gpu, "--op", "forward"]) == 0
    named = kernels._families(Device.find(gpu).info())
    problem = Product(4096, 4096, 512, 0.25, 64, torch.bfloat16)
    chosen_from = {name.partition("_")[0] for name in choose(problem, gpu).candidates}
    assert {word for word in ("sm80", "sm90") if word in named} == chosen_from
    lines = capsys.readouterr().out.splitlines()
    assert any(line.partition(f"  {gpu} ")[2].split()[:1] == ["forward"] for line in lines)


def test_a_gpu_without_kernels_is_left_alone_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "kernels", lambda: [SimpleNamespace(device=1, min_compute_capability=80)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    text = "on the CPU: no kernel of this library runs on Tesla T4, compute capability 7.5"
    with pytest.warns(UserWarning, match=text):
        assert Device.find() == Device.find("cpu")
    with pytest.warns(UserWarning, match=text):
        assert device_to_measure(None) == torch.device("cpu")
    for capability in ((8, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert default_device() == torch.device("cuda")


def test_bench_compares_the_products_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *LAYER, "--device", "cpu", "--op", "dgrad"]) == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert "density 0.25" in title and title.endswith("on cpu")
    assert [row.split()[0] for row in rows] == ["dgrad"]
    assert rows[0].count(" ms") == 3 and "x" in rows[0]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("block_shape", [32, (4, 8)])
def test_bench_computes_the_same_on_all_sides(op: str, block_shape: int | tuple[int, int]) -> None:
    product = Product(64, 96, 16, 1.0, block_shape, op=op)
    with torch.no_grad():
        sparse, expanded, dense = (call() for call in product_calls(product, torch.device("cpu")))
    torch.testing.assert_close(sparse, expanded, rtol=1e-4, atol=1e-4)
    assert sparse.numel() == dense.numel()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required"),
        (["train"], "invalid choice"),
        (["info", "--block", "32x64x"], "--block"),
        (["info", "--density", "half"], "half"),
        (["info", "--tokens", "some"], "some"),
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


@pytest.mark.parametrize(("module", "name"), [(demo, "run_demo"), (cli, "device_to_measure")])
def test_an_interrupt_ends_quietly(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupt)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_bad_input_is_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--in-features", "4294967296"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("tilesparse info: in_features") and output.err.count("\n") == 1


def test_the_command_and_the_module_are_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="tilesparse")
    assert script.load() is cli.main
    run = subprocess.run([sys.executable, "-m", "tilesparse", "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and "demo" in run.stdout


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"tilesparse {_C.version()}\n"


def test_outputs_that_cannot_be_written_are_found_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    prune = ["prune", "no/such/model", "--text", str(file), "--device", "cpu"]
    for arguments, said in (
        ([*prune, "/proc/none"], "tilesparse prune: output must be a path that can be written"),
        ([*prune, str(file / "below")], "tilesparse prune: output must be a path that can be written"),
    ):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(said) and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_progress_says_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(_checks.time, "monotonic", lambda: now[0])
    progress = _checks.Progress(8)
    now[0] = 60.0
    progress.show(4, "layers pruned")
    now[0] = 90.0
    progress.show(8, "layers pruned")
    assert capsys.readouterr().err == "4/8  layers pruned, about 1 min left\n8/8  layers pruned\n"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(_checks, "SECONDS", 0)
    progress = _checks.Progress(4)
    progress.show(3, "layers pruned")
    progress.show(4, "layers pruned")
    last = terminal.getvalue().split("\r")[-1]
    assert "100%" in last and "4/4" in last and "layers pruned" in last and last.endswith("\n")


def test_lines_of_progress_can_be_silenced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_checks, "SECONDS", 0)
    logger = logging.getLogger("tilesparse")
    said = []
    for level in (logging.WARNING, logging.INFO):
        logger.setLevel(level)
        _checks.Progress(2).show(1, "layers pruned")
        said.append(capsys.readouterr().err)
    assert said[0] == "" and said[1].startswith("1/2  layers pruned, about ")
