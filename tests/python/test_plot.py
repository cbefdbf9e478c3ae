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
    assert figure._repr_png_().startswith(b"\x89PNG")  # which IPython asks for


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
        (model, "encoder", "source must have block-sparse layers that match 'encoder'"),
        (model, "(", "layers must be a name or a regular expression"),
        (model, b"0", "layers must be a name or a regular expression"),
        (model_of(0.5).to("meta"), None, "source must have finite weights, but some of '0' are not"),
    ):
        with pytest.raises(InvalidArgumentError, match=said.replace("(", r"\(")):
            plot.patterns(source, layers=layers)
    with torch.no_grad():
        model[0].weight[0, 0, 0] = torch.nan
    with pytest.raises(InvalidArgumentError, match=r"source must have finite weights.*'0'"):
        plot.patterns(model)


def test_matplotlib_is_needed_for_pictures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        plot.patterns(model_of(0.5))


def test_the_page_on_pictures_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    executed("pictures.md")
    assert [file.name for file in tmp_path.iterdir()] == ["patterns.png"]
