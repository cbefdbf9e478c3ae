"""What the pages in docs show runs, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilesparse import _C, BlockSparseLinear, Product, TileSparseError, errors, tuning

ROOT = Path(__file__).resolve().parents[2]
HEADER = Path(_C.__file__).parent / "include" / "tilesparse" / "tilesparse.h"
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()


def executed(page: str) -> dict[str, Any]:
    """The names that the Python snippets of a page define, one after the other."""
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert snippets
    names: dict[str, Any] = {"__name__": page}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
    return names


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return executed("troubleshooting.md")


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


class WithResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = BlockSparseLinear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x, residual=x)
        return y


def test_residuals_and_parametrizations_are_no_differences(recipe: dict[str, Any]) -> None:
    x = torch.randn(8, 64)
    normed = nn.Sequential(BlockSparseLinear(64, 64))
    nn.utils.parametrizations.weight_norm(normed[0])
    for model in (WithResidual(), normed):
        ((_, differences),) = recipe["check_layers"](model, lambda model=model: model(x).sum().backward())
        assert {"y", "gradient of x"} <= set(differences) and max(differences.values()) < 1e-4


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


@pytest.mark.skipif("sm_90" not in _C.architectures(), reason="this library has no kernels for 9.0")
def test_selection_runs_and_shows_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tune.json"))
    try:
        names = executed("selection.md")
    finally:
        monkeypatch.setenv(tuning.VARIABLE, "")
        tuning.load()
    shown = re.search(r"^```\n(forward of .*?)^```", (ROOT / "docs/selection.md").read_text(), re.M | re.S)
    printed = capsys.readouterr().out
    assert shown is not None and printed.startswith(shown[1])
    assert "the device has too little shared memory\n" in printed
    assert "the fastest when measured on this device; measured" in printed
    assert names["found"][0].product == Product.of(names["layer"], tokens=16)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    lost = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)", page.read_text()):
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in anchors_of(file)):
                lost.append((page.name, target, anchor))
    assert lost == []
