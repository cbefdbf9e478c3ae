"""What pictures show is what there is: data of artists rather than pixels."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import matplotlib.colors
import pytest
import torch
from helpers import DEVICES
from matplotlib.figure import Figure
from test_docs import executed
from torch import Tensor, nn

import tilesparse
from tilesparse import (
    BlockPattern,
    BlockSparseLinear,
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    UnsupportedError,
    cli,
    plot,
)


def model_of(*densities: float, device: str = "cpu", **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            BlockSparseLinear(128, 64, density=density, device=device, **{"block_shape": 32, **options})
            for density in densities
        )
    )


def shades_of(figure: Figure, panel: int = 0) -> Tensor:
    """What the map of a layer shows, NaN where no block is kept."""
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


def test_margins_show_the_density_of_rows_and_columns() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    layer = BlockSparseLinear(64, 48, pattern=BlockPattern.from_block_mask(mask, block_shape=16))
    (figure,) = plot.patterns(layer)
    right, above = figure.axes[0].child_axes
    assert right.patches[0].get_data().values.tolist() == [1, 0, 0.25]
    torch.testing.assert_close(torch.tensor(above.patches[0].get_data().values), mask.float().mean(0))


def test_every_kept_block_can_be_seen() -> None:
    """Its colour is not that of the paper, however small its weights are."""
    layer = BlockSparseLinear(64, 64, density=1, block_shape=32)
    with torch.no_grad():
        layer.weight[0] = 0
    (figure,) = plot.patterns(layer)
    image = figure.axes[0].images[-1]
    assert float(shades_of(figure).min()) == 0
    assert all(matplotlib.colors.to_rgb(image.cmap(0.0))[channel] < 0.95 for channel in range(3))


def test_empty_and_zero_layers_are_drawn() -> None:
    empty, zero = model_of(0.0, 0.5)
    with torch.no_grad():
        zero.weight.zero_()
    (figure,) = plot.patterns(nn.Sequential(empty, zero))
    assert bool(shades_of(figure).isnan().all()) and float(shades_of(figure, 1).nan_to_num().max()) == 0


def test_layers_beyond_a_page_go_to_the_next() -> None:
    figures = plot.patterns(model_of(*[0.5] * 27))
    assert [len(titles_of(figure)) for figure in figures] == [24, 3]
    assert titles_of(figures[1])[0].startswith("24\n")


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nm": (2, 4)},
        {"nm": (2, 4), "storage": "compressed"},
        {"storage": "int8"},
        {"nm": (2, 4), "storage": "float8_e4m3fn"},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_checkpoints_show_what_their_models_show(options: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(0.5, 0.25, **options)
    tilesparse.save(model, tmp_path)
    (of_model,), (of_files,) = plot.patterns(model), plot.patterns(tmp_path)
    for panel in (0, 1):
        torch.testing.assert_close(shades_of(of_files, panel), shades_of(of_model, panel), equal_nan=True)
    assert titles_of(of_files) == titles_of(of_model)


def test_only_the_layers_that_are_drawn_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilesparse.plot import sources

    model = model_of(*[0.5] * 12)
    model[2] = model[10]  # one layer under two names
    tilesparse.save(model, tmp_path, max_shard_size=100_000)
    read: list[str] = []
    read_tensor = sources.read_tensor
    monkeypatch.setattr(
        sources, "read_tensor", lambda stored: read.append(stored.name) or read_tensor(stored)
    )
    (figure,) = plot.patterns(tmp_path, layers=r"1\d*$")
    assert [title.split("\n")[0] for title in titles_of(figure)] == ["1", "11"]
    assert {name.split(".")[0] for name in read} == {"1", "11"}
    assert not any("bias" in name for name in read)
    (figure,) = plot.patterns(tmp_path)  # in the order of the model, and not of the alphabet
    assert [title.split("\n")[0] for title in titles_of(figure)] == list(map(str, [*range(10), 11]))


def test_models_of_transformers_are_drawn_from_their_folder(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(
            vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
    )
    patcher = tilesparse.BlockSparseModelPatcher()
    patcher.add_pattern(".*", {"density": 0.5, "block_shape": 16})
    patcher.patch_model(model)
    model.save_pretrained(tmp_path)
    (figure,) = plot.patterns(tmp_path, layers=r"encoder\.layer\.0\.(intermediate|output)")
    assert [title.split("\n")[1] for title in titles_of(figure)] == [
        "64 x 32 in 16 x 16, density 0.5",
        "32 x 64 in 16 x 16, density 0.5",
    ]


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    model = model_of(0.5)
    source: Any
    layers: Any
    for source, layers, said in (
        (nn.Linear(4, 4), None, "source must have block-sparse layers"),
        (3, None, "source must be a torch.nn.Module or a string or a path, got 3"),
        (model, "encoder", "layers: 'encoder' matches none of '0'"),
        (model, "(", "layers must be a name or a regular expression"),
        (model, b"0", "layers must be a name or a regular expression"),
        (model_of(0.5).to("meta"), None, "source must have weights, but those of '0' are on the meta device"),
    ):
        with pytest.raises(InvalidArgumentError, match=said.replace("(", r"\(")):
            plot.patterns(source, layers=layers)
    with pytest.raises(CheckpointNotFoundError, match="path must be a folder"):
        plot.patterns(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="config"):
        plot.patterns(tmp_path)
    with torch.no_grad():
        model[0].weight[0, 0, 0] = torch.nan
    with pytest.raises(InvalidArgumentError, match=r"source must have finite weights.*'0'"):
        plot.patterns(model)


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    tilesparse.save(model_of(0.5), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    whole, section = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        plot.patterns(tmp_path)
    weights.write_bytes(whole)
    for key, value, said in (("nnz", 3, "shape"), ("dtype", "float16", "float16")):
        changed = json.loads(json.dumps(section))
        changed["tilesparse"]["layers"]["0"][key] = value
        config.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=said):
            plot.patterns(tmp_path)
    section["tilesparse"]["layers"]["other"] = section["tilesparse"]["layers"]["0"]
    config.write_text(json.dumps(section))
    with pytest.raises(CheckpointError, match=r"'other\.weight' is missing|'other\.\w+' is missing"):
        plot.patterns(tmp_path)


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


def test_a_block_that_came_back_is_as_old_as_its_return() -> None:
    _, ages = plot.evolution(snapshots_of([[1]], [[0]], [[1]], [[1]], [[1]]))
    assert float(shades_of(ages)) == 20


def test_few_layers_have_colours_and_many_a_mean() -> None:
    masks = {
        f"{number}": torch.rand(4, 4, generator=torch.Generator().manual_seed(number)) < 0.5
        for number in range(30)
    }
    snapshots = [(step, {name: mask.roll(step) for name, mask in masks.items()}) for step in range(4)]
    few, *pages = plot.evolution(snapshots, layers="[0-4]$")
    assert [text.get_text() for text in few.legends[0].get_texts()] == ["0", "1", "2", "3", "4"]
    assert len(pages) == 1
    many, *pages = plot.evolution(snapshots)
    assert [text.get_text() for text in many.legends[0].get_texts()] == ["mean of 30 layers"]
    densities = torch.stack([mask.float().mean() for mask in masks.values()])
    mean = many.axes[0].lines[60]
    torch.testing.assert_close(torch.tensor(mean.get_ydata()), densities.mean().expand(4))
    assert len(pages) == 2


def test_names_of_compiled_models_are_listed() -> None:
    snapshots = [(step, {"_orig_mod.up": masks["layer"]}) for step, masks in MOVING]
    curves, _ = plot.evolution(snapshots)
    assert [text.get_text().strip() for text in curves.legends[0].get_texts()] == ["_orig_mod.up"]
    figure = plot.tradeoff([{"label": "_a", "x": 1, "y": 1}], x="x", y="y")
    assert [text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()] == ["_a"]


def test_patterns_may_lose_all_their_blocks() -> None:
    curves, ages = plot.evolution(snapshots_of([[1, 1]], [[1, 0]], [[0, 0]]))
    assert curves.axes[1].lines[0].get_xydata()[:, 1].tolist() == [0, 0]
    assert bool(shades_of(ages).isnan().all())


def test_snapshots_are_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    plot.save_snapshots(path, MOVING)
    loaded = plot.load_snapshots(path)
    assert [step for step, _ in loaded] == [step for step, _ in MOVING]
    for (_, masks), (_, expected) in zip(loaded, MOVING, strict=True):
        assert masks.keys() == expected.keys() and torch.equal(masks["layer"], expected["layer"])


@pytest.mark.parametrize(
    ("snapshots", "said"),
    [
        (3, "must be a sequence, got 3"),
        (MOVING[:1], "two or more .step, masks., got 1"),
        ([MOVING[0], 7], r"\[1\] must be a tuple, got 7"),
        ([MOVING[0], (0.5, {})], r"\[1\] must be \(step, masks\)"),
        ([MOVING[0], (1, {})], "a mask by each layer.*step 1"),
        ([MOVING[0], (1, {3: torch.ones(2, 2) > 0})], "a mask by each layer's name"),
        ([MOVING[0], (1, {"other": torch.ones(2, 2) > 0})], "differ in 'layer', 'other'"),
        ([MOVING[0], (1, {"layer": torch.ones(2, 2)})], r"'layer' must be a bool tensor \[R, C\]"),
        ([MOVING[0], (1, {"layer": torch.ones(2) > 0})], r"'layer' must be a bool tensor \[R, C\]"),
        ([MOVING[0], (1, {"layer": torch.ones(2, 3) > 0})], r"must have the \(2, 2\) blocks of the first"),
        ([MOVING[1], MOVING[0]], r"ascending steps, got \[10, 0\]"),
    ],
)
def test_bad_snapshots_are_refused(snapshots: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^snapshots.*{said}"):
        plot.evolution(snapshots)
    with pytest.raises(InvalidArgumentError, match=r"^snapshots"):
        plot.save_snapshots(tmp_path / "run.safetensors", snapshots)
    assert not list(tmp_path.iterdir())


def test_files_that_hold_no_snapshots_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(CheckpointNotFoundError):
        plot.load_snapshots(tmp_path / "run.safetensors")
    (tmp_path / "text").write_text("text")
    with pytest.raises(CheckpointError, match="text"):
        plot.load_snapshots(tmp_path / "text")
    masks = torch.ones(2, 3, 3, dtype=torch.bool)
    for metadata, tensors in (
        (None, {"layer": masks}),
        ({"tilesparse.steps": "[0, 1, 2]"}, {"layer": masks}),
        ({"tilesparse.steps": "[0, 0]"}, {"layer": masks}),
        ({"tilesparse.steps": "{}"}, {"layer": masks}),
        ({"tilesparse.steps": "2"}, {"layer": masks}),
        ({"tilesparse.steps": "[0, 1]"}, {"layer": torch.tensor(1)}),
    ):
        save_file(tensors, tmp_path / "run.safetensors", metadata=metadata)
        with pytest.raises(CheckpointError, match=r"run\.safetensors has no snapshots of patterns"):
            plot.load_snapshots(tmp_path / "run.safetensors")


# Quality against time.

POINTS = [
    {"label": "pruned", "x": 8, "y": 11.5, "spread": 0.5},
    {"label": "dense", "x": 10.0, "y": 10.0},
    {"label": "pruned", "x": 6, "y": 15.0, "spread": 1.0, "note": "d .5"},
]


def test_points_of_a_label_are_joined_in_order() -> None:
    figure = plot.tradeoff(POINTS, x="ms", y="perplexity", log_y=True)
    (panel,) = figure.axes
    pruned, dense = panel.containers
    assert pruned.get_label() == "pruned" and dense.get_label() == "dense"
    assert pruned.lines[0].get_xydata().tolist() == [[6, 15], [8, 11.5]]
    assert [bar.tolist() for bar in pruned.lines[2][0].get_segments()] == [
        [[6, 14], [6, 16]],
        [[8, 11], [8, 12]],
    ]
    assert not dense.has_yerr
    assert "d .5" in [text.get_text() for text in panel.texts]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("ms", "perplexity")
    assert (panel.get_xscale(), panel.get_yscale()) == ("linear", "log")


def test_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    labels = ["$5 and $6", r"$\frac$"]
    points = [{"label": label, "x": 1, "y": 2, "note": label} for label in labels]
    figure = plot.tradeoff(points, x="ms", y="perplexity")
    plot.save(figure, tmp_path / "a.png")
    panel = figure.axes[0]
    texts = [*panel.texts, *panel.get_legend().get_texts()]
    assert [text.get_text() for text in texts] == labels * 2
    assert not any(text.get_parse_math() for text in texts)
    snapshots = [(step, {labels[1]: torch.ones(2, 2) > 0}) for step in (0, 1)]
    plot.save(plot.evolution(snapshots), tmp_path / "b.pdf")


def test_labels_do_not_share_both_colour_and_marker() -> None:
    figure = plot.tradeoff([{"label": f"{i}", "x": i, "y": i} for i in range(35)], x="x", y="y")
    lines = [container.lines[0] for container in figure.axes[0].containers]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 35


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "must be at least one"),
        ({}, "must be a list of points"),
        ([3], r"\[0\] must be a mapping, got 3"),
        ([{"label": "a", "x": 1}], r"\[0\] must have label, x and y"),
        ([{**POINTS[0], "colour": "red"}], r"\[0\] must have label, x and y"),
        ([POINTS[1], {**POINTS[0], "x": float("nan")}], r"\[1\]: x must be a finite number, got nan"),
        ([{**POINTS[0], "y": "10"}], r"\[0\]: y must be a finite number, got '10'"),
        ([{**POINTS[0], "y": True}], r"\[0\]: y must be a finite number"),
        ([{**POINTS[0], "y": 10**400}], r"\[0\]: y must be a finite number"),
        ([{**POINTS[0], "spread": -1}], r"\[0\]: spread must be a number of at least 0, got -1"),
        ([{**POINTS[0], "label": 3}], r"\[0\]: label must be a text, got 3"),
        ([{**POINTS[0], "x": 0}], "x above 0 on a logarithmic axis, got 0"),
        ([{"label": f"{i}", "x": 1, "y": 1} for i in range(36)], "at most 35 labels, got 36"),
    ],
)
def test_bad_points_are_refused(points: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^points.*{said}"):
        plot.tradeoff(points, x="ms", y="perplexity", log_x=True)


# Files.


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_equal_figures_give_equal_files(suffix: str, start: bytes, tmp_path: Path) -> None:
    contents = []
    for number in range(2):
        (file,) = plot.save(plot.patterns(model_of(0.5)), tmp_path / f"{number}{suffix}")
        contents.append(file.read_bytes())
    assert contents[0] == contents[1] and contents[0].startswith(start)


def test_notebooks_show_figures_without_pyplot() -> None:
    """IPython asks an object for `_repr_png_`."""
    assert all(figure._repr_png_().startswith(b"\x89PNG") for figure in plot.evolution(MOVING))


def test_several_figures_are_pages_or_files(tmp_path: Path) -> None:
    figures = plot.evolution(MOVING)
    assert plot.save(figures, tmp_path / "a.pdf") == [tmp_path / "a.pdf"]
    assert (tmp_path / "a.pdf").read_bytes().count(b"/Type /Page ") == 2
    assert plot.save(figures, tmp_path / "a.svg") == [tmp_path / "a-1.svg", tmp_path / "a-2.svg"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a-1.svg", "a-2.svg", "a.pdf"]


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    figure = plot.tradeoff(POINTS, x="ms", y="perplexity")
    (tmp_path / "folder.png").mkdir()
    for path, said in (
        (tmp_path / "a.gif", "must end in .png, .svg, .pdf"),
        (tmp_path / "nowhere" / "a.png", "must be in a folder that exists"),
        (tmp_path / "folder.png", "must be a file, got the folder"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^path:? .*{said}"):
            plot.save(figure, path)
    with pytest.raises(InvalidArgumentError, match="figures must be at least one"):
        plot.save([], tmp_path / "a.png")
    for figures in (3, [figure, "figure"]):
        with pytest.raises(InvalidArgumentError, match=r"must be figures of matplotlib, got (int|str)"):
            plot.save(figures, tmp_path / "a.png")  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["folder.png"]


def test_matplotlib_is_needed_for_pictures_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    plot.save_snapshots(tmp_path / "run.safetensors", MOVING)
    for draw in (
        lambda: plot.patterns(model_of(0.5)),
        lambda: plot.evolution(MOVING),
        lambda: plot.tradeoff(POINTS, x="ms", y="perplexity"),
        lambda: plot.save([], "a.png"),
    ):
        with pytest.raises(UnsupportedError, match="pip install matplotlib"):
            draw()


# The command.


def test_the_command_writes_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tilesparse.save(model_of(0.5, 0.25), "checkpoint")
    plot.save_snapshots("run.safetensors", MOVING)
    for name, points in (("a", POINTS[:2]), ("b", POINTS[2:])):
        Path(f"{name}.json").write_text(json.dumps(points))
    for command in (
        "patterns checkpoint -o patterns.png --layers 1",
        "evolution run.safetensors --output evolution.svg",
        "tradeoff a.json b.json -o tradeoff.pdf --x ms --y perplexity --log-x",
    ):
        assert cli.main(["plot", *command.split()]) == 0
    said = [
        f"wrote {name}" for name in ("patterns.png", "evolution-1.svg", "evolution-2.svg", "tradeoff.pdf")
    ]
    assert capsys.readouterr().out.splitlines() == said
    assert all(Path(line.removeprefix("wrote ")).stat().st_size > 1000 for line in said)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("patterns nowhere -o a.png", "path must be a folder"),
        ("patterns checkpoint -o a.gif", "path must end in"),
        ("patterns checkpoint -o a.png --layers x", "layers: 'x' matches none of '0'"),
        ("evolution nowhere -o a.png", "nowhere: missing"),
        ("evolution points.json -o a.png", "points.json: no safetensors file"),
        ("tradeoff nowhere -o a.png --x ms --y loss", "nowhere has no points"),
        (
            "tradeoff points.json -o a.png --x ms --y loss",
            "points.json has no points: points must be at least one",
        ),
    ],
)
def test_bad_input_is_one_line(
    command: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tilesparse.save(model_of(0.5), "checkpoint")
    Path("points.json").write_text("[]")
    assert cli.main(["plot", *command.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tilesparse plot: {said}") and error.count("\n") == 1
    assert not Path("a.png").exists()


def test_the_page_on_pictures_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("pictures.md")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "checkpoint",
        "evolution.pdf",
        "patterns.png",
        "run.safetensors",
    ]
    assert names["figure"].axes[0].get_yscale() == "log"
