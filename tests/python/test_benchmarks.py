"""The benchmarks run, and the sparse models of theirs are the dense ones at density 1."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import bench_cpu
import bench_cpu_eight_bits
import bench_cpu_embeddings
import bench_experts
import bench_host
import bench_kernels
import bench_looks
import bench_models
import bench_parallel
import bench_storages
import bench_vllm
import break_even
import harness
import kernel_cases
import models
import pytest
import report
import stored
import torch
from models import MODELS, Architecture, Size
from problems import Shape
from torch import nn

from tilesparse import _C, BlockSparseLinear, BlockSparseMLP
from tilesparse.cli import info

CPU = torch.device("cpu")
RESULTS = Path(break_even.__file__).parent / "results"
TINY = Size(layers=2, hidden=64, mlp=128, heads=4, kv_heads=2, batch=2, tokens=8)
CASES = [(name, task) for name, model in MODELS.items() for task in model.tasks]


def tiny(name: str) -> Architecture:
    size = dataclasses.replace(TINY, tokens=1, cached=8) if MODELS[name].size.cached else TINY
    return dataclasses.replace(MODELS[name], size=size)


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
    assert "products" in name or any(isinstance(module, BlockSparseMLP) for module in sparse.modules())
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


@pytest.mark.parametrize("name", ["vit", "llama-prefill"])
def test_models_in_8_bits_compute_nearly_what_dense_ones_do(name: str) -> None:
    architecture = tiny(name)
    dense = architecture.build(CPU, torch.bfloat16, seed=0)
    x = architecture.inputs(CPU, torch.bfloat16, seed=1)
    for model in (
        models.make_float8(copy.deepcopy(dense)),
        models.make_sparse(copy.deepcopy(dense), 1.0, (16, 16), 0, "int8", x),
    ):
        assert not any(type(module) is nn.Linear for module in model.modules())
        with torch.no_grad():
            error = harness.relative_error(model(x), dense(x).float())
        assert error is not None
        assert 0 < error < bench_models.TOLERANCE


def test_decoding_continues_a_prompt() -> None:
    """The last token of a prompt, from the cache of the ones before."""
    prefill, decode = tiny("llama-prefill"), tiny("llama-decode1")
    prompt, token = (
        dataclasses.replace(architecture, size=dataclasses.replace(architecture.size, layers=1)).build(
            CPU, torch.float32, seed=0
        )
        for architecture in (prefill, decode)
    )
    token.load_state_dict(dict(prompt.named_parameters()), strict=False)
    x = prefill.inputs(CPU, torch.float32, seed=1)
    with torch.no_grad():
        block, cache = prompt.blocks[0], token.blocks[0].attention
        _, keys, values = block.attention.project(block.norm1(x), prompt.cos, prompt.sin)
        cache.keys[:, :, :-1], cache.values[:, :, :-1] = keys[:, :, :-1], values[:, :, :-1]
        torch.testing.assert_close(token(x[:, -1:]), prompt(x)[:, -1:], rtol=1e-4, atol=1e-5)


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
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
        assert "multiple" in refused["unavailable"] and refused["block_shape"] == [128, 128]
    capsys.readouterr()
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert text.count("###") == len(CASES)
    assert text.count("| eager | 32x32 |") == len(CASES)
    assert "graph, all: CUDA graphs need a GPU" in text


def test_nothing_starts_after_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = run(tmp_path / "models.json", monkeypatch, "--budget", "0")
    assert "budget" in document["stopped"] and not document["cases"]


@pytest.mark.parametrize("options", [(), ("--activations", "int8", "--tokens", "4")])
def test_the_time_of_the_host_is_measured_in_every_mode(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "HOST_CALLS", 2)
    path = tmp_path / "host.json"
    assert bench_host.main(["--device", "cpu", "--rounds", "3", "--output", str(path), *options]) == 0
    cases = json.loads(path.read_text())["cases"]
    assert [case["mode"] for case in cases] == ["inference", "no_grad", "forward", "forward+backward"]
    for case in cases:
        (result,) = case["results"]
        assert result["ratio"] == pytest.approx(result["host_us"] / result["dense_host_us"], rel=1e-2)


def test_a_layer_is_measured_with_and_without_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_looks, "LAYERS", [(64, 96, 32)])
    monkeypatch.setattr(bench_looks, "SECONDS", 0.01)
    path = tmp_path / "looks.json"
    assert bench_looks.main(["--device", "cpu", "--rounds", "1", "--output", str(path)]) == 0
    for case in json.loads(path.read_text())["cases"]:
        assert [result["contender"] for result in case["results"]] == ["with", "without"]
        assert all(result[name] > 0 for result in case["results"] for name in bench_looks.TIMES)


def test_products_of_experts_are_measured_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    monkeypatch.setattr(bench_experts, "LAYER", small)
    path = tmp_path / "experts.json"
    sizes = ["--shapes", "8x64x128x2x24,3x64x32x1x2", "--blocks", "16,32", "--densities", "0.5,1"]
    sizes += ["--layer-tokens", "48"]
    assert bench_experts.main(["--device", "cpu", "--repetitions", "1", *sizes, "--output", str(path)]) == 0
    cases = json.loads(path.read_text())["cases"]
    layers, cases = cases[16:], cases[:16]
    assert [[result["op"] for result in case["results"]] for case in layers] == [
        ["layer forward", "layer step"]
    ] * 4
    assert {case["rows"] for case in cases} == {48, 2}
    assert all(not result["wrong"] for case in cases + layers for result in case["results"])
    most = {case["routing"]: case["most_rows"] for case in cases if case["experts"] == 8}
    assert most["zipf"] > most["even"]


def test_products_of_the_cpu_are_measured_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_cpu, "LAYERS", ((128, 192),))
    path = tmp_path / "cpu.json"
    assert bench_cpu.main(["--dtypes", "float32", "--repetitions", "1", "--output", str(path)]) == 0
    cases = json.loads(path.read_text())["cases"]
    assert len(cases) == 5 * len(bench_cpu.BLOCKS) * len(bench_cpu.DENSITIES)
    assert all(case["kernel"].startswith("cpu_") and not case["wrong"] for case in cases)


def test_products_of_int8_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_cpu_eight_bits, "SHAPES", ((128, 192),))
    path = tmp_path / "int8.json"
    sizes = "--rounds 1 --tokens 3 --blocks 32 64 --densities 0.5"
    bench_cpu_eight_bits.main([*sizes.split(), "--output", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[3].startswith("| 128 → 192 | 3 | 0.5 | 32 | cpu_")
    assert len({line.count("|") for line in lines[1:]}) == 1
    cases = json.loads(path.read_text())["cases"]
    assert all(case["speedup"] > 0 and set(case["own_us"]) == {"float32", "bfloat16"} for case in cases)
    report.main([str(path)])
    assert re.search(
        r"\| 128 → 192 \| 0.5 \| .* ms \(\w+\) \|.*×, .*× \|.*×, .*× \|", capsys.readouterr().out
    )


def storages(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    """Cases of the first of each section, of a tiny layer."""
    first: dict[str, bench_storages.Case] = {}
    for case in bench_storages.CASES:
        first.setdefault(case.section, case)
    shape = Shape("tiny", 4, 256, 384)
    tiny = tuple(dataclasses.replace(case, shape=shape) for case in first.values())
    monkeypatch.setattr(bench_storages, "CASES", tiny)
    options = ("--device", "cpu", "--repetitions", "1", "--output", str(path), *arguments)
    assert bench_storages.main(options) == 0
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return cases


def test_values_in_fewer_bytes_are_measured_checked_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "storages.json"
    cases = {case["section"]: case for case in storages(path, monkeypatch)}
    assert set(cases) == set(bench_storages.SECTIONS)
    assert "8.0" in cases.pop("sm80")["unavailable"]
    measured = [result for case in cases.values() for result in case["results"]]
    refused = [result["contender"] for result in measured if "unavailable" in result]
    assert refused == [bench_storages.CUSPARSELT, bench_storages.TINYGEMM]
    for section, case in cases.items():
        for result in case["results"]:
            if "unavailable" in result:
                continue
            assert result["t_us"] > 0 and not result["wrong"]
            if section != "masks":
                beside = sum(result["plain_us"]) / 2
                assert result["speedup_over_plain"] == pytest.approx(beside / result["t_us"], rel=1e-2)
                assert result["kernel"].startswith("cpu_")
                assert result["expanded"] != result["kernel"].endswith("_4_bits")
    by_name = {result["contender"]: result for result in cases["few tokens"]["results"]}
    assert list(by_name) == list(bench_storages.STORED)
    sizes = [by_name[name]["stored_bytes"] for name in ("2:4", "int8", "2:4 int8")]
    elements = round(256 * 384 * cases["few tokens"]["density"])
    scales = elements // 32 * 4
    assert sizes == [
        elements * 2 // 2 + elements // 8,
        elements + scales,
        elements // 2 + elements // 8 + scales,
    ]
    by_name = {result["contender"]: result for result in cases["four bits"]["results"]}
    elements = round(256 * 384 * cases["four bits"]["density"])
    assert by_name["int4"]["stored_bytes"] == elements // 2 + elements // 32 * 4
    capsys.readouterr()
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert text.count("###") == len(bench_storages.SECTIONS)
    assert text.count("| 4x256x384 |") == len(bench_storages.SECTIONS) - 1
    assert f"- tiny, 128x128, density 1, {bench_storages.CUSPARSELT}: " in text
    assert "- tiny, 128x128, density 0.5, all: no kernel for compute capability 8.0" in text


def test_what_storages_are_compared_with_on_a_gpu_is_measured_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels of the CPU in place of those for compute capability 8.0, and a dense product."""
    kernels = [kernel.name for kernel in _C.kernels() if kernel.name.startswith("cpu_")]
    monkeypatch.setattr(bench_storages, "_sm80_kernels", lambda compressed: kernels)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda dense: dense)
    cases = storages(tmp_path / "storages.json", monkeypatch, "--sections", "every block,sm80")
    results = {result["contender"]: result for case in cases for result in case["results"]}
    assert set(results) == {"2:4", bench_storages.CUSPARSELT}
    assert not any(result["wrong"] for result in results.values())
    assert results[bench_storages.CUSPARSELT]["backend"] == "Tensor"
    assert {results["2:4"]["kernel"], results["2:4"]["plain_kernel"]} <= set(kernels)


def test_wrong_products_and_masks_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench_storages.storage,
        "two_of_four",
        lambda scores, transposable=False: torch.ones_like(scores).bool(),
    )
    with pytest.raises(AssertionError):
        storages(tmp_path / "storages.json", monkeypatch, "--sections", "forward,masks")
    wrong = [
        result["contender"]
        for case in json.loads((tmp_path / "storages.json").read_text())["cases"]
        for result in case["results"]
        if result["wrong"]
    ]
    assert wrong == ["2:4", "choice", "transposable choice", "compress", "compress transposed"]


def test_no_storage_is_measured_after_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "storages.json"
    assert storages(path, monkeypatch, "--budget", "0") == []
    assert "budget" in json.loads(path.read_text())["stopped"]


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
    assert break_even.crossing(times) == pytest.approx(density)


def test_break_even_of_the_package_is_that_of_the_committed_results() -> None:
    names = ("h200_bf16.json#products", "h200_bf16.json#break_even")
    documents = [stored.document(RESULTS / name) for name in names]
    assert json.loads(info.BREAK_EVEN.read_text()) == break_even.break_even(documents)


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
            whole = 64 * 128 * 2 * 4 * (1 if contender == "dense" else 0.25)
            assert result["state_bytes"]["parameters"] == whole / (1 if way in ("one", "ddp") else 2)
            assert result["losses"] != [] and result["losses"] == pytest.approx(alone["losses"], rel=1e-2)
            assert (result["sent_bytes"] == {}) == (way == "one")
    assert cases["dense", "ddp"][0]["sent_bytes"] == {"all_reduce": 64 * 128 * 2 * 4}


def test_times_of_all_kernels_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: products run on the CPU, times are made up, and one kernel is wrong."""
    wrong = ""

    class Made(kernel_cases.Calls):
        def __init__(self, case: kernel_cases.Drawn, seed: int) -> None:
            small = dataclasses.replace(case, tokens=4, out_features=256, in_features=128, density=0.5)
            super().__init__(small, seed, "cpu")
            right = self.sparse
            self.sparse = lambda: right() * (2 if asked[-1] == wrong else 1)

    class Timer:
        def __init__(self, launch_seconds: float) -> None:
            self.launch_seconds = launch_seconds

        def microseconds(self, call: Callable[[], torch.Tensor], repetitions: int) -> float:
            return 12.5

    asked: list[str] = []

    @contextmanager
    def prefer(name: str) -> Iterator[None]:
        asked.append(name)
        yield

    monkeypatch.setattr(bench_kernels, "Calls", Made)
    monkeypatch.setattr(bench_kernels, "CudaTimer", Timer)
    monkeypatch.setattr(bench_kernels, "warm_up", lambda: None)
    monkeypatch.setattr(bench_kernels, "prefer", prefer)
    monkeypatch.setattr(bench_kernels, "_kernels", lambda case, calls: ["one", "other"])
    kinds = [kind for kind in kernel_cases.KINDS if kind != "grouped"]
    for wrong in ("", "other"):
        arguments = bench_kernels._parser().parse_args(["--cases", "30", "--kinds", ",".join(kinds)])
        document: dict[str, Any] = {"cases": []}
        bench_kernels._run(arguments, document)
        assert len({case["kind"] for case in document["cases"]}) > 4
        for case in document["cases"]:
            (result,) = case["results"]
            assert result["kernels_us"] == {"one": 12.5, "other": 12.5}, result
            assert result["wrong"] == (wrong == "other")
            assert ("expanded_us" in result) == (case["activations"] is None)
    for text in ("128", "128x", "0x64"):
        with pytest.raises(SystemExit):
            bench_kernels._parser().parse_args(["--layers", text])


def test_products_of_all_kinds_are_drawn() -> None:
    """As many as asked for, the same ones each time, and of those layers and operations alone."""
    kinds = tuple(kernel_cases.KINDS)
    first, second = (
        [kernel_cases.draw(chance, kinds) for _ in range(400)] for chance in map(random.Random, (1, 1))
    )
    assert first == second and {case.kind for case in first} == set(kinds)
    for case in first:
        assert case.tokens * case.out_features * case.in_features <= kernel_cases.MOST * case.groups
        nnz = case.out_features // case.block_shape[0]
        assert kernel_cases.product_of(case.record(), nnz) is not None
    few = [kernel_cases.draw(random.Random(2), ("bf16",), ("sdd_tn",), ((128, 256),)) for _ in range(5)]
    assert {(case.op, case.out_features, case.in_features) for case in few} == {("sdd_tn", 128, 256)}


def test_servers_take_turns_and_the_best_counts() -> None:
    """Of a run that adds to an earlier one, whose cases stay where it has none."""

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, measure: str) -> float:
            asked.append((self.name, measure))
            return 10.0 * len(asked)

    asked: list[tuple[str, str]] = []
    names = [bench_vllm.DENSE, "bfloat16 .25"]
    servers: Any = {name: Fake(name) for name in names}
    rounds = [bench_vllm.measure_round(servers, ["prefill", "decode 1"]) for _ in range(2)]
    assert asked == [(name, measure) for measure in ("prefill", "decode 1") for name in names] * 2
    old = {"model": "bfloat16 .5", "measure": "prefill", "speedup": 3.0}
    cases = bench_vllm.added([old, {"model": names[1], "measure": "prefill", "speedup": 9.0}], rounds)
    assert cases[0] is old and len(cases) == 3
    assert [case["speedup"] for case in cases[1:]] == [60 / 50, 80 / 70]
    assert cases[1]["tokens_per_second"] == 60 and cases[1]["dense_tokens_per_second"] == 50


def test_served_models_are_of_one_size(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = argparse.Namespace(hidden=128, layers=1, block=32)
    for name, options in bench_vllm.MODELS.items():
        folder = bench_vllm.make_checkpoint(tmp_path, name, arguments)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
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


def test_embedding_contenders_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    class Fake:
        def __init__(self, arguments: Any, model: str, name: str, density: float | None) -> None:
            self.name, self.density = name, density

        def answer(self, turn: Any = None) -> Any:
            if turn is None:
                return "ready"
            turns.append(self.name)
            return [float(100 - len(turns)), 5.0]

        def end(self) -> None:
            turns.append(f"end of {self.name}")

    monkeypatch.setattr(bench_cpu_embeddings, "Process", Fake)
    monkeypatch.setattr(bench_cpu_embeddings, "DENSE", ("torch",))
    output = tmp_path / "out.json"
    sizes = "--models minilm --densities .5 --threads 1 --seconds 0"
    bench_cpu_embeddings.main(f"--folder {tmp_path} --output {output} {sizes}".split())
    names = ["torch", bench_cpu_embeddings.SPARSE]
    # Four cases, once without counting, so that what is compiled is compiled.
    assert turns == names * 8 + [f"end of {name}" for name in names]
    cases = json.loads(output.read_text())["cases"]
    assert [(case["contender"], case["density"]) for case in cases] == list(
        zip(names, (None, 0.5), strict=True)
    )
    assert [result["ms"] for result in cases[0]["results"]] == [91, 89, 87, 85]
    assert list(cases[0]["results"][0]) == ["case", "ms", "mib"]


def test_tables_of_embeddings_compare_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(docs)
    tables = runpy.run_path(str(docs / "embedding_tables.py"))
    found = [
        {
            "model": model,
            "contender": name,
            "density": density,
            "results": [{"case": case, "ms": ms, "mib": 2}],
        }
        for model, case in (("minilm", "1 × 32"), ("vit", "8 images"))
        for name, density, ms in [
            ("torch", None, 30.0),
            ("openvino int8", None, 12.0),
            ("tilesparse int8", 1.0, 16.0),
            ("tilesparse int8", 0.5, 8.0),
        ]
    ]
    monkeypatch.setitem(tables["measured"].__globals__, "cases", lambda file: found)
    assert tables["gains"]().splitlines()[2] == "| 1 × 32 | openvino int8, 12 ms | 0.75× | 1.50× |"
    assert tables["contenders"]().splitlines()[-1] == "| tilesparse int8, density .5 | **8** | **8** |"
    assert "| torch | **2** | **2** |" in tables["contenders"]("mib")
