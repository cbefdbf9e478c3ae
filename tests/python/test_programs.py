"""Programs run at small sizes: examples, notebooks, the demo, and the benchmarks, whose parts are checked."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import pydoc_data.topics
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import bench_cpu
import bench_experts
import bench_host
import bench_models
import bench_parallel
import bench_storages
import bench_two_four
import bench_vllm
import documents
import harness
import matplotlib.pyplot
import models
import pytest
import report
import stored
import torch
from models import MODELS, Architecture, Size
from problems import Shape
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from tilesparse import BlockSparseLinear, BlockSparseMLP
from tilesparse.cli import command, demo

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
CPU = torch.device("cpu")
TINY = Size(layers=2, hidden=64, mlp=128, heads=4, batch=2, tokens=8)
CASES = [(name, task) for name, model in MODELS.items() for task in model.tasks]


# ---- examples and notebooks ----


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / f"examples/{name}.py"))


FOLDER = ROOT / "docs/notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
# Small values for the cell tagged "parameters".
SMALL: dict[str, dict[str, Any]] = {
    "01_train_from_scratch": {"STEPS": 25, "BATCH": 4, "HIDDEN": 128, "LAYERS": 1, "EVALUATED": 16},
    "02_prune_pretrained": {
        "FOLDER": None,  # a tiny BERT
        "DENSITY": 0.5,
        "BLOCK": 16,
        "CALIBRATION": 64,
        "STEPS": 20,
        "HELD_OUT": 32,
    },
    "03_network_as_one_matrix": {"STEPS": 40, "BATCH": 64, "AT_LEAST": 0.15},
}


def cells_of(name: str) -> list[dict[str, Any]]:
    return [
        cell
        for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
        if cell["cell_type"] == "code"
    ]


def is_parameters(cell: dict[str, Any]) -> bool:
    return "parameters" in cell["metadata"].get("tags", [])


@pytest.fixture
def tiny_bert(tmp_path: Path) -> Path:
    """A BERT with random weights, and a tokenizer of the most frequent words."""
    words = re.findall(r"\w+|[^\w\s]", " ".join(pydoc_data.topics.topics.values()).lower())
    vocabulary = ["[PAD]", "[UNK]", *(word for word, _ in Counter(words).most_common(500))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            initializer_range=0.3,  # so that layers matter
        )
    )
    model.save_pretrained(tmp_path / "bert")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        tmp_path / "bert"
    )
    return tmp_path / "bert"


@pytest.fixture
def as_before() -> Iterator[None]:
    """Undoes what notebooks switch for the whole process."""
    backend = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    matplotlib.pyplot.close("all")
    matplotlib.use(backend)
    logging.enable_progress_bar()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run(name: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parameters = {key: value if key != "FOLDER" else tiny_bert for key, value in SMALL[name].items()}
    names: dict[str, Any] = {"__name__": name}
    for cell in cells_of(name):
        if is_parameters(cell):
            names |= parameters
        else:
            exec(compile("".join(cell["source"]), f"{name}: {cell['id']}", "exec"), names)


# ---- the demo ----

DEMO = ["demo", "--size", "tiny", "--device", "cpu"]


@pytest.mark.usefixtures("one_thread")
def test_the_demo_trains_both_models_on_the_standard_library_and_compares_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main([*DEMO, "--steps", "60", "--density", "0.5"]) == 0
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


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--block", "128"], "blocks.0.attention"), (["--density", "0.01"], "density 0.01 of its 12 blocks")],
)
def test_what_fits_no_layer_is_refused_before_training(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*DEMO, *options]) == 2
    assert text in capsys.readouterr().err


# ---- models of benchmarks ----


def tiny(name: str) -> Architecture:
    return dataclasses.replace(MODELS[name], size=TINY)


def steps(model: nn.Module, architecture: Architecture, task: str) -> list[torch.Tensor]:
    """Outputs or losses of two steps."""
    x = architecture.inputs(CPU, torch.float32, seed=1)
    torch.manual_seed(2)
    call = bench_models.prepare(model, x, task, "eager")
    return [call().clone(), call().clone()]


@pytest.mark.parametrize(("name", "task"), CASES)
def test_density_one_is_the_dense_model(name: str, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_models, "LEARNING_RATE", 1e-2)
    architecture = tiny(name)
    dense = architecture.build(CPU, torch.float32, seed=0)
    x = architecture.inputs(CPU, torch.float32, seed=3)
    sparse = models.make_sparse(copy.deepcopy(dense), 1.0, (16, 16), seed=0, x=x)
    assert any(isinstance(module, BlockSparseMLP) for module in sparse.modules())
    assert not any(type(module) is nn.Linear for module in sparse.modules())
    first, second = steps(dense, architecture, task)
    torch.testing.assert_close(steps(sparse, architecture, task), [first, second], rtol=1e-4, atol=1e-5)
    assert torch.equal(first, second) == (task == "inference")  # the step has changed the parameters


@pytest.mark.parametrize(("name", "task"), CASES)
def test_sparse_models_compute_what_their_expanded_weights_do(name: str, task: str) -> None:
    architecture = tiny(name)
    x = architecture.inputs(CPU, torch.float32, seed=3)
    dense = architecture.build(CPU, torch.float32, seed=0)
    sparse = models.make_sparse(dense, 0.25, (16, 32), seed=0, x=x)
    parameters = sum(parameter.numel() for parameter in sparse.parameters())
    expanded = models.make_dense(copy.deepcopy(sparse))
    assert parameters < sum(parameter.numel() for parameter in expanded.parameters()) / 3
    actual, expected = (steps(model, architecture, task)[0] for model in (sparse, expanded))
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(bench_models, "free_memory", lambda: None)  # collects garbage of all tests before
    for name in MODELS:
        monkeypatch.setitem(MODELS, name, tiny(name))
    assert (
        bench_models.main(["--device", "cpu", "--repetitions", "1", "--output", str(path), *arguments]) == 0
    )
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_results_and_failures_are_recorded_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "models.json"
    arguments = ("--modes", "eager,graph", "--blocks", "32,128", "--densities", ".5", "--layers", "1")
    document = run(path, monkeypatch, *arguments)
    assert [(case["model"], case["task"]) for case in document["cases"] if case["mode"] == "eager"] == CASES
    for case in document["cases"]:
        assert case["size"]["layers"] == 1
        if case["mode"] == "graph":
            assert case["unavailable"] == "CUDA graphs need a GPU" and not case["results"]
            continue
        measured, refused = case["results"]
        assert measured["speedup"] > 0 and measured["parameters"] < case["parameters"]
        assert "density must be" in refused["unavailable"] and refused["block_shape"] == [128, 128]
    capsys.readouterr()
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert text.count("| eager |") == 2 * len(CASES) and text.count("| 32x32 | 0.5 |") == len(CASES)
    assert text.count("CUDA graphs need a GPU") == len(CASES)


# ---- benchmarks that write results ----


def check_host(cases: list[dict[str, Any]]) -> None:
    assert [case["mode"] for case in cases] == ["inference", "no_grad", "forward", "forward+backward"]
    for case in cases:
        (result,) = case["results"]
        assert result["ratio"] == pytest.approx(result["host_us"] / result["dense_host_us"], rel=1e-2)


def check_experts(cases: list[dict[str, Any]]) -> None:
    layers, cases = cases[16:], cases[:16]
    assert [[result["op"] for result in case["results"]] for case in layers] == [
        ["layer forward", "layer step"]
    ] * 4
    assert {case["rows"] for case in cases} == {48, 2}
    assert all(not result["wrong"] for case in cases + layers for result in case["results"])
    most = {case["routing"]: case["most_rows"] for case in cases if case["experts"] == 8}
    assert most["zipf"] > most["even"]


def check_cpu(cases: list[dict[str, Any]]) -> None:
    assert len(cases) == (5 + 3) * len(bench_cpu.BLOCKS) * len(bench_cpu.DENSITIES)
    assert all(case["kernel"].startswith("cpu_") and not case["wrong"] for case in cases)


def check_two_four(cases: list[dict[str, Any]]) -> None:
    assert [case["dtype"] for case in cases] == [*bench_two_four.DTYPES]
    for case in cases:
        ours, *others = case["results"]
        assert ours["t_us"] > 0 and not ours["wrong"]
        assert all("cuSPARSELt" in other["unavailable"] for other in others)


def check_storages(cases: list[dict[str, Any]]) -> None:
    assert {case["section"] for case in cases} == set(bench_storages.SECTIONS)
    measured = [result for case in cases for result in case["results"]]
    refused = [result["contender"] for result in measured if "unavailable" in result]
    assert refused == [bench_storages.TINYGEMM]
    assert all(
        result["t_us"] > 0 and not result["wrong"] for result in measured if "unavailable" not in result
    )


def one_of_each_section() -> tuple[bench_storages.Case, ...]:
    first = {case.section: case for case in reversed(bench_storages.CASES)}
    return tuple(dataclasses.replace(case, shape=Shape("tiny", 4, 256, 384)) for case in first.values())


class Smoke(NamedTuple):
    """A program, its arguments but for the output, sizes that are made small, and a check of its cases."""

    program: Any
    arguments: str
    sizes: dict[str, Any]
    check: Callable[[list[dict[str, Any]]], None]


LAYER = {"num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
EXPERTS = "--shapes 8x64x128x2x24,3x64x32x1x2 --blocks 16,32 --densities 0.5,1 --layer-tokens 48"
SMOKE = {
    "host": Smoke(bench_host, "--device cpu --rounds 3", {}, check_host),
    "host in int8": Smoke(
        bench_host, "--device cpu --rounds 3 --activations int8 --tokens 4", {}, check_host
    ),
    "experts": Smoke(
        bench_experts, f"--device cpu --repetitions 1 {EXPERTS}", {"LAYER": LAYER}, check_experts
    ),
    "2:4": Smoke(
        bench_two_four,
        "--device cpu --shapes up",
        {"SHAPES": dict.fromkeys(("up", "down", "square", "up-m2048"), Shape("tiny", 4, 256, 384))},
        check_two_four,
    ),
    "storages": Smoke(
        bench_storages, "--device cpu --repetitions 1", {"CASES": one_of_each_section()}, check_storages
    ),
    "cpu": Smoke(bench_cpu, "--dtypes float32 int8 --repetitions 1", {"LAYERS": ((128, 192),)}, check_cpu),
}


@pytest.mark.parametrize("name", SMOKE)
def test_benchmarks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "HOST_CALLS", 2)
    program, arguments, sizes, check = SMOKE[name]
    for size, small in sizes.items():
        monkeypatch.setattr(program, size, small)
    path = tmp_path / "results.json"
    assert program.main([*arguments.split(), "--output", str(path)]) == 0
    check(json.loads(path.read_text())["cases"])


@pytest.mark.parametrize(
    ("times", "density"),
    [
        ({0.1: 0.2, 0.25: 0.5, 0.5: 1.5}, 0.375),  # between two measurements
        ({0.1: 0.2, 0.25: 0.5}, 0.5),  # beyond them
        ({0.1: 0.2, 0.9: 0.6}, 1.0),
        ({0.25: 1.5, 0.5: 2.5}, 0.125),  # below them
        ({0.1: 1.9, 0.5: 2.0}, 0.0),
        ({0.1: 0.8, 0.5: 0.95, 0.75: 0.94}, 1.0),  # noise beyond the slope
        ({0.1: 1.3, 0.5: 1.2}, 0.0),
    ],
)
def test_break_even_is_where_times_cross(times: dict[float, float], density: float) -> None:
    assert report.crossing(times) == pytest.approx(density)


def test_parallel_training_is_measured(tmp_path: Path) -> None:
    """In a process of its own, since it joins a group of processes."""
    output = tmp_path / "parallel.json"
    sizes = {"layers": 1, "hidden": 64, "ffn": 128, "block": 16, "tokens": 32, "steps": 1}
    command = [sys.executable, bench_parallel.__file__, "--device", "cpu", "--output", str(output)]
    command += [f"--{name}={size}" for name, size in sizes.items()]
    subprocess.run([*command, "--commit", "0"], check=True)
    assert report.main([str(output)]) == 0
    cases = {
        (case["contender"], case["way"]): case["results"] for case in json.loads(output.read_text())["cases"]
    }
    assert set(cases) == set(product(bench_parallel.CONTENDERS, bench_parallel.WAYS))
    for (contender, way), results in cases.items():
        alone = cases[contender, "one"][0]
        assert len(results) == (1 if way == "one" else 2)
        for result in results:
            assert result["losses"] != [] and result["losses"] == pytest.approx(alone["losses"], rel=1e-2)


def test_served_models_are_of_one_size(tmp_path: Path) -> None:
    arguments = argparse.Namespace(hidden=128, layers=1, block=32)
    for name, options in bench_vllm.MODELS.items():
        folder = bench_vllm.make_checkpoint(tmp_path, name, arguments)
        model = AutoModelForCausalLM.from_pretrained(folder)
        layers = [module for module in model.modules() if isinstance(module, BlockSparseLinear)]
        assert len(layers) == (7 if options else 0)
        for layer in layers:
            assert abs(layer.density - options["density"]) < 0.05
            assert layer.activations == options.get("activations")
        assert bench_vllm.make_checkpoint(tmp_path, name, arguments) == folder


def test_runs_are_stored_and_read(tmp_path: Path) -> None:
    """Fields keep their order, which tells products apart; rows may differ in their fields."""
    cases = [
        {"shape": [1, 2], "results": [{"kernels_us": {"b": 1.5, "a": 2.0}, "wrong": False}]},
        {"results": [{"wrong": True, "kernels_us": {"a": 1.0}}], "shape": None},
        {"shape": [3], "results": [{"kernels_us": {}, "wrong": False}]},
    ]
    one = {"environment": {"gpu": "H100"}, "cases": cases}
    for name in ("runs.json", "runs.json.gz"):
        path = tmp_path / name
        (tmp_path / "run.json").write_text(json.dumps(one))
        assert stored.main([str(tmp_path / "run.json"), f"{path}#first"]) == 0
        assert stored.document(path) == one
        assert stored.main([f"{path}#first", f"{path}#second"]) == 0
        assert json.dumps(stored.documents(path)) == json.dumps({"first": one, "second": one})
        with pytest.raises(ValueError, match="file must name one of its runs"):
            stored.document(path)
        assert stored.main([f"{path}#second", str(tmp_path / "only.json")]) == 0
        assert json.dumps(stored.document(tmp_path / "only.json")) == json.dumps(one)


# ---- texts ----


def test_sources_that_are_held_out_are_not_trained_on() -> None:
    training, held_out = (bytes(text.tolist()) for text in documents.sources(2 << 20))
    assert 1000 < len(held_out) < len(training) / 10
    assert held_out[:1000] not in training and held_out[-1000:] not in training
    again = documents.sources(2 << 20)
    assert bytes(again[1].tolist()) == held_out
