"""Pictures show the model: data of artists are compared rather than pixels."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES
from matplotlib.figure import Figure
from test_docs import executed
from torch import Tensor, nn

from tilesparse import BlockPattern, BlockSparseLinear, plot
from tilesparse.errors import InvalidArgumentError, UnsupportedError


def model_of(*densities: float, device: str = "cpu", **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            BlockSparseLinear(128, 64, density=density, device=device, **{"block_shape": 32, **options})
            for density in densities
        )
    )


def shades_of(figure: Figure, panel: int = 0) -> Tensor:
    """Shades of the map of a layer, NaN where no block is kept."""
    image = figure.axes[panel].images[-1].get_array()
    assert image is not None
    return torch.as_tensor(image.filled(torch.nan))


def titles_of(figure: Figure) -> list[str]:
    return [panel.get_title() for panel in figure.axes if panel.images]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_maps_show_the_norms_of_kept_blocks(device: str, dtype: torch.dtype) -> None:
    layer = BlockSparseLinear(96, 160, density=0.4, block_shape=(32, 16), dtype=dtype, device=device)
    (figure,) = plot.patterns(layer)
    mask = layer.pattern.to_block_mask().cpu()
    dense = layer.to_linear().weight.detach().cpu().double()
    norms = dense.view(5, 32, 6, 16).square().mean((1, 3)).sqrt()
    shown = shades_of(figure)
    assert torch.equal(shown.isnan(), ~mask)
    torch.testing.assert_close(shown[mask].double(), (norms / norms.max())[mask], rtol=1e-4, atol=1e-6)
    assert titles_of(figure) == ["the model\n160 x 96 in 32 x 16, density 0.4"]


def test_empty_and_zero_layers_are_drawn() -> None:
    empty, zero = model_of(0.0, 0.5)
    with torch.no_grad():
        zero.weight.zero_()
    (figure,) = plot.patterns(nn.Sequential(empty, zero))
    assert bool(shades_of(figure).isnan().all()) and float(shades_of(figure, 1).nan_to_num().max()) == 0


def test_large_layers_are_drawn_in_cells_of_several_blocks() -> None:
    mask = torch.zeros(300, 10, dtype=torch.bool)
    mask[:3, :3] = True
    mask[299, 9] = True
    layer = BlockSparseLinear(160, 4800, pattern=BlockPattern.from_block_mask(mask, block_shape=16))
    with torch.no_grad():
        layer.weight.fill_(1)
    (figure,) = plot.patterns(layer)
    expected = torch.full((100, 4), torch.nan)
    expected[0, 0], expected[99, 3] = 1, 1 / 3  # of the last cell three blocks are left, one of them kept
    torch.testing.assert_close(shades_of(figure), expected, equal_nan=True)
    assert titles_of(figure)[0].endswith("\na cell: 3 x 3 blocks")
    assert figure.axes[0].get_xlim() == (0, 10) and figure.axes[0].get_ylim() == (300, 0)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    model = model_of(0.5)
    source: Any
    layers: Any
    for source, layers, said in (
        (nn.Linear(4, 4), None, "source must have block-sparse layers"),
        (model, "encoder", "layers: 'encoder' matches none of '0'"),
        (model, "(", "layers must be a name or a regular expression"),
        (model, b"0", "layers must be a name or a regular expression"),
        (model_of(0.5).to("meta"), None, "source must have weights, but those of '0' are on the meta device"),
    ):
        with pytest.raises(InvalidArgumentError, match=said.replace("(", r"\(")):
            plot.patterns(source, layers=layers)
    with torch.no_grad():
        model[0].weight[0, 0, 0] = torch.nan
    with pytest.raises(InvalidArgumentError, match=r"source must have finite weights.*'0'"):
        plot.patterns(model)


# Evolution.


def snapshots_of(*grids: list[list[int]], every: int = 10) -> list[tuple[int, dict[str, Tensor]]]:
    return [
        (every * number, {"layer": torch.tensor(grid, dtype=torch.bool)}) for number, grid in enumerate(grids)
    ]


MOVING = snapshots_of([[1, 1], [0, 0]], [[1, 0], [1, 0]], [[1, 1], [0, 0]], [[1, 0], [0, 1]])


def test_curves_count_kept_new_and_remaining_blocks() -> None:
    curves, _ = plot.evolution(MOVING)
    density, new, first = curves.axes
    (kept, ever), steps = density.lines[:2], [0, 10, 20, 30]
    line: Any
    for line, values in (
        (kept, [0.5] * 4),
        (ever, [0.5, 0.75, 0.75, 1.0]),
        (first.lines[0], [1, 0.5, 1, 0.5]),
    ):
        assert line.get_xydata().tolist() == [list(point) for point in zip(steps, values, strict=True)]
    assert new.lines[0].get_xydata().tolist() == [[step, 0.5] for step in steps[1:]]


def test_maps_show_the_age_of_blocks_and_where_they_were() -> None:
    _, ages = plot.evolution(MOVING)
    expected = torch.tensor([[30, torch.nan], [torch.nan, 0]])
    torch.testing.assert_close(shades_of(ages), expected, equal_nan=True)
    assert ages.axes[0].images[0].get_array().tolist() == [[0, 1], [1, 0]]
    assert [text.get_text() for text in ages.legends[0].get_texts()] == ["kept earlier, not now"]


def test_patterns_may_lose_all_their_blocks() -> None:
    curves, ages = plot.evolution(snapshots_of([[1, 1]], [[1, 0]], [[0, 0]]))
    assert curves.axes[1].lines[0].get_xydata()[:, 1].tolist() == [0, 0]
    assert bool(shades_of(ages).isnan().all())


@pytest.mark.parametrize(
    "snapshots",
    [
        3,
        MOVING[:1],
        [MOVING[0], 7],
        [MOVING[0], (0.5, {})],
        [MOVING[0], (1, {})],
        [MOVING[0], (1, {3: torch.ones(2, 2) > 0})],
        [MOVING[0], (1, {"other": torch.ones(2, 2) > 0})],
        [MOVING[0], (1, {"layer": torch.ones(2, 2)})],
        [MOVING[0], (1, {"layer": torch.ones(2) > 0})],
        [MOVING[0], (1, {"layer": torch.ones(2, 3) > 0})],
        [MOVING[1], MOVING[0]],
    ],
)
def test_bad_snapshots_are_refused(snapshots: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^snapshots must be two or more"):
        plot.evolution(snapshots)


def test_notebooks_show_figures_without_pyplot() -> None:
    """IPython asks an object for `_repr_png_`."""
    assert all(figure._repr_png_().startswith(b"\x89PNG") for figure in plot.evolution(MOVING))


def test_matplotlib_is_needed_for_pictures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    for draw in (
        lambda: plot.patterns(model_of(0.5)),
        lambda: plot.evolution(MOVING),
    ):
        with pytest.raises(UnsupportedError, match="pip install matplotlib"):
            draw()


def test_the_page_on_pictures_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("pictures.md")
    assert [file.name for file in tmp_path.iterdir()] == ["patterns.png"]
    assert names["curves"].axes and names["ages"].axes
