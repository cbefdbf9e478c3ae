"""README and the pages in docs run, and name what there is."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import dense_weight
from torch import nn

import tilesparse
from tilesparse import _C, BlockSparseLinear, TileSparseError, errors, tuning
from tilesparse._files import VARIABLE
from tilesparse.cli import command as cli
from tilesparse.tuning import Product

ROOT = Path(__file__).resolve().parents[2]
HEADER = Path(_C.__file__).parent / "include" / "tilesparse" / "tilesparse.h"
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()


def snippets_of(page: str) -> list[str]:
    """The Python snippets of a page in docs."""
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert snippets
    return snippets


def executed(page: str) -> dict[str, Any]:
    """The names that the Python snippets of a page in docs define, one after the other."""
    names: dict[str, Any] = {"__name__": page}
    for snippet in snippets_of(page):
        exec(compile(snippet, page, "exec"), names)
    return names


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return executed("debugging.md")


def test_a_right_model_is_found_to_be_right(recipe: dict[str, Any]) -> None:
    model, x, twin = recipe["model"], recipe["x"], recipe["twin"]
    assert recipe["difference"](model(x), twin(x)) < 1e-4
    report = recipe["check_layers"](model, lambda: model(x).square().mean().backward())
    assert sorted(name for name, _ in report) == ["0", "2"]
    whats = {"y", "y in the model", "gradient of x", "gradient of weight", "gradient of bias"}
    for _, differences in report:
        assert set(differences) == whats and max(differences.values()) < 1e-4
    assert max(recipe["difference"](*both) for both in zip(*recipe["both"], strict=True)) < 1e-3


def test_a_layer_that_goes_wrong_is_found(recipe: dict[str, Any]) -> None:
    model, x = recipe["model"], recipe["x"]
    hook = model[2].register_forward_hook(lambda layer, inputs, y: 1.5 * y)
    name, differences = recipe["check_layers"](model, lambda: model(x).square().mean().backward())[-1]
    hook.remove()
    assert name == "2"
    assert differences["y"] < 1e-4 and 0.4 < differences["y in the model"] < 0.6


def test_every_error_and_every_status_is_explained() -> None:
    classes = [
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, TileSparseError)
    ]
    enum = re.search(r"enum \{\s*TS_SUCCESS.*?\}", HEADER.read_text(), re.S)
    assert enum is not None
    statuses = set(re.findall(r"TS_[A-Z_]+", enum[0])) - {"TS_SUCCESS"}
    assert len(classes) >= 9 and len(statuses) >= 8
    assert [name for name in (*classes, *sorted(statuses)) if f"`{name}`" not in TROUBLESHOOTING] == []


def test_serving_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("serving.md")
    torch.testing.assert_close(names["package"](names["x"]), names["model"](names["x"]).detach())


def test_the_page_on_grouped_products_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("experts.md")
    weights = dense_weight(names["values"], names["pattern"]).view(names["count"], 64, 128)
    order = names["order"]
    expected = torch.einsum("tk,tnk->tn", names["x"][order].double(), weights[names["expert_of"][order]])
    torch.testing.assert_close(names["y"].detach().double(), expected, atol=1e-4, rtol=1e-4)


def test_the_page_on_block_matrices_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax", reason="tilesparse.jax needs JAX")
    with jax.default_device(jax.devices("cpu")[0]):
        names = executed("block-matrices.md")
    x = torch.from_numpy(names["x"])
    exact = torch.from_numpy(names["assembled"].toarray()) @ x
    for found, expected in (("y", exact), ("v", exact), ("u", x)):
        result = torch.tensor(names[found].tolist(), dtype=torch.float64)
        torch.testing.assert_close(result, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    "page",
    [
        "../README.md",
        "advise.md",
        "concepts.md",
        "layers.md",
        "models.md",
        "experts.md",
        "storages.md",
        "compile.md",
        "checkpoints.md",
        "quantization.md",
    ],
)
def test_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed(page)
    sparse = [name for name, found in names.items() if isinstance(found, nn.Module) and is_sparse(found)]
    assert sparse or page in ("advise.md", "concepts.md")


def test_the_pages_on_hugging_face_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("huggingface.md")
    counts = names["gpt2"].transformer.h[0].attn.c_attn.pattern.crow_indices.diff().view(3, -1).sum(1)
    assert counts.tolist() == [8, 8, 4]
    executed("peft.md")  # with the model that the page before has saved


class Block(nn.Module):
    def __init__(self, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.up, self.down = linear(512, 512), linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x).relu())
        return y


class Blocks(nn.Module):
    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(linear), Block(linear))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(x)
        return y


def test_the_page_on_several_processes_runs(tmp_path: Path) -> None:
    """With one process on the CPU, so that it says of calls and names whether they are right, and no more."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sparse = partial(Blocks, BlockSparseLinear)
    x = torch.randn(4, 512)
    names: dict[str, Any] = {"folder": str(tmp_path)}
    saved: list[torch.Tensor] = []
    try:
        for snippet in snippets_of("distributed.md"):
            if "dcp" not in names:  # what it imports; the model is saved at the end
                names["model"] = Blocks() if "from_linear(" in snippet else sparse()
            if "dcp.save(" in snippet:
                names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
                names["model"](x).sum().backward()
                names["optimizer"].step()
                saved.append(names["model"](x).detach())
            names["Model"] = Blocks if "prepare(" in snippet else sparse
            code = snippet.replace('"cuda"', '"cpu"').replace("(2,)", "(1,)").replace("(2, 4)", "(1, 1)")
            exec(compile(code, "distributed.md", "exec"), names)
        torch.testing.assert_close(names["model"](x), saved[0])
    finally:
        dist.destroy_process_group()


def is_sparse(model: nn.Module) -> bool:
    return any(isinstance(module, BlockSparseLinear) for module in model.modules())


def test_the_tutorial_keeps_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("tutorial.md")
    loss_of, pruned = names["loss_of"], names["pruned_loss"]
    dense, recovered, magnitude = (loss_of(names[name]) for name in ("dense", "model", "by_magnitude"))
    # The text is that of Python's own pages, which differs: with Python 3.10 the last difference is .12.
    assert dense < pruned < magnitude - 0.3 and recovered < pruned - 0.01 and recovered < dense + 0.15
    assert abs(loss_of(names["loaded"]) - recovered) < 0.02  # in 8 bits
    block, x = names["block"], torch.randn(8, 128)
    exported = torch.export.load("mlp.pt2").module()
    torch.testing.assert_close(exported(x), block(x).detach())
    layer = tilesparse.load(nn.Sequential(nn.Linear(128, 256, bias=False)), "layer")
    torch.testing.assert_close(layer(x), block.gate_proj(x))


def test_tables_are_those_of_the_results() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "docs/tables.py", "--check"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_reference_has_every_public_name() -> None:
    """By itself, or as a member of its module: of those listed, or else of ``__all__``."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    explained = set(re.findall(r"^::: tilesparse\.([\w.]+)", pages, re.M))
    listed = dict(
        re.findall(r"^::: tilesparse\.([\w.]+)\n    options:\n      members: \[(.*)\]", pages, re.M)
    )
    of_all = explained - {*listed}
    for name, members in listed.items():
        module, shown = importlib.import_module(f"tilesparse.{name}"), members.split(", ")
        assert [member for member in shown if not hasattr(module, member)] == []
        explained |= {f"{name}.{member}" for member in shown}
    for name in {*tilesparse.__all__} - {"TileSparseError", "__version__"}:
        for member in getattr(getattr(tilesparse, name), "__all__", [""]):
            assert {name} & (of_all if member else explained) or {member, f"{name}.{member}"} & explained


def test_every_command_is_explained() -> None:
    (commands,) = (
        action.choices
        for action in cli._parser([])._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    page = (ROOT / "docs/commands.md").read_text()
    assert [name for name in commands if f"`tilesparse {name}`" not in page] == []


@pytest.mark.skipif("sm_90" not in _C.architectures(), reason="this library has no kernels for 9.0")
def test_selection_runs_and_shows_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "tune.json"))
    try:
        names = executed("selection.md")
    finally:
        monkeypatch.setenv(VARIABLE, "")
        tuning.load()
    shown = re.search(r"^```\n(forward of .*?)^```", (ROOT / "docs/selection.md").read_text(), re.M | re.S)
    printed = capsys.readouterr().out
    assert shown is not None and printed.startswith(shown[1])
    assert "the fastest when measured on this device; measured" in printed
    assert names["found"][0].product == Product.of(names["layer"], tokens=16)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    lost = []
    pages = [ROOT / page for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
    for page in (*pages, *sorted((ROOT / "docs").rglob("*.md"))):
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)", page.read_text()):
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in anchors_of(file)):
                lost.append((page.name, target, anchor))
    assert lost == []
