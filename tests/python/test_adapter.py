"""Adapters of chosen blocks: gradients, merging, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, dense_weight, randn, seeded
from safetensors.torch import load_file, save_file
from torch import nn

from tilesparse import BlockSparseLinear, CheckpointError, InvalidArgumentError, UnsupportedError
from tilesparse.adapter import AdaptedLinear, BlockSparseAdapter

FORMS: list[dict[str, Any]] = [
    {},
    {"nm": (2, 4)},
    {"nm": (2, 4), "storage": "compressed"},
    {"storage": "int8"},
    {"storage": "int4"},
    {"nm": (2, 4), "storage": "float8_e4m3fn"},
]


def network(device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    generator = seeded(1)

    def layer(in_features: int, out_features: int) -> BlockSparseLinear:
        made = BlockSparseLinear(
            in_features, out_features, dtype=dtype, generator=generator, **{"block_shape": 32, **options}
        )
        return made.to(device)

    return nn.Sequential(
        layer(128, 96), nn.GELU(), layer(96, 64), nn.LayerNorm(64, device=device, dtype=dtype)
    )


def trained(adapter: BlockSparseAdapter) -> BlockSparseAdapter:
    """As after some steps: Δ is not zero any more."""
    with torch.no_grad():
        for seed, parameter in enumerate(adapter.parameters()):
            parameter.copy_(randn(*parameter.shape, dtype=parameter.dtype, seed=seed) / 16)
    return adapter


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_gradients_are_those_of_the_dense_weight_in_the_chosen_blocks(
    device: str, options: dict[str, Any]
) -> None:
    model = network(device, **options)
    adapter = trained(BlockSparseAdapter(model, "0$", density=0.5, generator=seeded()))
    layer = adapter.layers["0"]
    x = randn(7, 128, dtype=torch.float32, device=device).requires_grad_()
    y = layer(x)
    y.square().sum().backward()

    delta, base = layer.delta, layer.base_layer
    change = dense_weight(delta.plain_values(), delta.pattern)
    weight = (dense_weight(base.plain_values(), base.pattern) + change).requires_grad_()
    x64 = x.detach().cpu().double().requires_grad_()
    expected = x64 @ weight.t() + base.bias.detach().cpu().double()
    expected.square().sum().backward()
    assert delta.weight.grad is not None and weight.grad is not None
    kept = dense_weight(torch.ones_like(delta.weight) if delta.mask is None else delta.mask, delta.pattern)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False, "check_device": False}
    torch.testing.assert_close(y, expected, **close)
    torch.testing.assert_close(x.grad, x64.grad, **close)
    torch.testing.assert_close(dense_weight(delta.weight.grad, delta.pattern), weight.grad * kept, **close)
    assert kept.any() and base.weight.grad is None


def test_the_adapter_begins_as_the_model_and_trains_alone() -> None:
    model, x = network(), randn(5, 128, dtype=torch.float32)
    before = model(x)
    adapter = BlockSparseAdapter(model, ".*", density=0.25, generator=seeded())
    assert list(adapter.layers) == ["0", "2"]
    assert torch.equal(model(x), before)
    parameters = list(adapter.parameters())
    assert [p for p in model.parameters() if p.requires_grad] == parameters
    # 128 x 96 in blocks of 32 with density 0.5: 6 blocks of which a quarter is 2; 96 x 64 has 3, so 1.
    assert [len(p) for p in parameters] == [2, 1]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    loss = model[:3](x).square().mean()
    loss.backward()
    optimizer.step()
    assert model[:3](x).square().mean() < loss


@pytest.mark.parametrize("options", FORMS[:2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_merging_keeps_the_function_and_the_zeros(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = network(dtype=dtype, **options)
    bases = [model[0], model[2]]
    patterns = [base.pattern.to("cpu") for base in bases]
    adapter = trained(BlockSparseAdapter(model, ".*", density=0.5, generator=seeded()))
    x = randn(5, 128, dtype=dtype)
    unmerged = model(x)
    weights = [base.weight.detach().clone() for base in bases]
    assert adapter.merge() is model
    assert [model[0], model[2]] == bases and not adapter.layers
    assert [base.pattern for base in bases] == patterns
    for base, weight in zip(bases, weights, strict=True):
        changes = base.weight != weight
        assert changes.any()
        assert base.mask is None or not changes[~base.mask].any()
    tolerance = 1e-12 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(model(x), unmerged, rtol=tolerance, atol=tolerance)


def test_a_merge_that_one_layer_refuses_changes_none() -> None:
    model = network()
    model[2].to_storage("int8")
    adapter = trained(BlockSparseAdapter(model, ".*", generator=seeded()))
    before = model[0].base_layer.weight.clone()
    with pytest.raises(UnsupportedError, match=r"'2', got 'int8'; call to_storage\('plain'\)"):
        adapter.merge()
    assert torch.equal(model[0].base_layer.weight, before) and isinstance(model[0], AdaptedLinear)


def test_removal_gives_back_the_model() -> None:
    model, x = network(), randn(5, 128, dtype=torch.float32)
    before, first = model(x), model[0]
    trained(BlockSparseAdapter(model, ".*", generator=seeded())).remove()
    assert model[0] is first and torch.equal(model(x), before)


def test_scores_choose_the_blocks() -> None:
    model = network()
    scores = {"0": torch.tensor([3.0, 1, 5, 0, 4, 2])}
    adapter = BlockSparseAdapter(model, "0", density=0.5, scores=scores)
    rows, cols = model[0].base_layer.pattern.block_indices()
    chosen = adapter.layers["0"].delta.pattern.block_indices()
    assert [t.tolist() for t in chosen] == [rows[[0, 2, 4]].tolist(), cols[[0, 2, 4]].tolist()]


def test_a_shared_layer_is_adapted_under_all_its_names() -> None:
    model = network()
    shared = nn.ModuleList([model, model[0]])
    BlockSparseAdapter(shared, "0.0", generator=seeded())
    assert isinstance(shared[1], AdaptedLinear) and shared[1] is model[0]


def test_the_delta_of_16_bits_is_float32_and_computed_in_16() -> None:
    model = network(dtype=torch.bfloat16)
    adapter = trained(BlockSparseAdapter(model, ".*", generator=seeded()))
    y = model(randn(5, 128, dtype=torch.bfloat16))
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert {p.grad.dtype for p in adapter.parameters() if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None for p in adapter.parameters())


def test_autocast_and_compile() -> None:
    model, x = network(), randn(5, 128, dtype=torch.float32)
    trained(BlockSparseAdapter(model, ".*", generator=seeded()))
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        y = model[:3](x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), model[:3](x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_a_saved_adapter_comes_back_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    model, x = network(**options), randn(5, 128, dtype=torch.float32)
    path = tmp_path / "adapter.safetensors"
    trained(BlockSparseAdapter(model, ".*", density=0.5, generator=seeded())).save(path)
    other = network(**options)
    loaded = BlockSparseAdapter.load(other, path)
    assert list(loaded.layers) == ["0", "2"]
    assert [p for p in other.parameters() if p.requires_grad] == list(loaded.parameters())
    assert torch.equal(other(x), model(x))
    assert list(tmp_path.iterdir()) == [path]


def _without(tensors: dict[str, Any], about: dict[str, Any]) -> None:
    del tensors["0.slot"]


def _of_another_shape(tensors: dict[str, Any], about: dict[str, Any]) -> None:
    about["layers"]["0"]["shape"] = [96, 160]


def _of_another_layer(tensors: dict[str, Any], about: dict[str, Any]) -> None:
    about["layers"]["9"] = about["layers"]["0"]


def _newer(tensors: dict[str, Any], about: dict[str, Any]) -> None:
    about["version"] = 2


def _elsewhere(tensors: dict[str, Any], about: dict[str, Any]) -> None:
    tensors["0.col_indices"] = tensors["0.col_indices"] + 100


def _of_other_blocks(tensors: dict[str, Any], about: dict[str, Any]) -> None:
    tensors["0.weight"] = tensors["0.weight"][:, :16].contiguous()


def _too_few(tensors: dict[str, Any], about: dict[str, Any]) -> None:
    tensors["0.weight"] = tensors["0.weight"][1:].contiguous()


def _masked(tensors: dict[str, Any], about: dict[str, Any]) -> None:
    tensors["0.mask"] = tensors["0.weight"] > 0


def _with_a_stray(tensors: dict[str, Any], about: dict[str, Any]) -> None:
    tensors["1.weight"] = tensors["0.weight"].clone()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_without, "layer '0': slot is missing"),
        (_of_another_shape, r"layer '0': shape must be \[96, 128\]"),
        (_of_another_layer, "layer '9': model must have a BlockSparseLinear as '9', got nothing"),
        (_newer, "version 1 of the file format, got 2"),
        (_elsewhere, "layer '0': "),
        (_of_other_blocks, r"weight must have floating-point blocks of \(32, 32\)"),
        (_too_few, "weight must have 3 blocks, got 2"),
        (_masked, "mask must be that of the layer"),
        (_with_a_stray, "got '1.weight'"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path, change: Any, text: str) -> None:
    path = tmp_path / "adapter.safetensors"
    BlockSparseAdapter(network(), ".*", density=0.5, generator=seeded()).save(path)
    tensors, about = (
        load_file(path),
        {"version": 1, "layers": {"0": {"shape": [96, 128]}, "2": {"shape": [64, 96]}}},
    )
    change(tensors, about)
    save_file(tensors, path, {"tilesparse_adapter": json.dumps(about)})
    model = network()
    with pytest.raises(CheckpointError, match=text):
        BlockSparseAdapter.load(model, path)
    assert isinstance(model[0], BlockSparseLinear) and model[0].weight.requires_grad


def test_a_block_that_the_layer_does_not_keep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    BlockSparseAdapter(network(density=1.0), ".*", density=1.0).save(path)
    with pytest.raises(
        CheckpointError, match=r"blocks that layer '0' keeps, got \(\d, \d\), which it does not"
    ):
        BlockSparseAdapter.load(network(), path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 64])
def test_what_is_no_adapter_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="path must be a safetensors file"):
        BlockSparseAdapter.load(network(), path)
    save_file({"0.weight": torch.zeros(2, 32, 32)}, path)
    with pytest.raises(CheckpointError, match=r"path must be a file of BlockSparseAdapter\.save"):
        BlockSparseAdapter.load(network(), path)
    with pytest.raises(FileNotFoundError, match="is missing"):
        BlockSparseAdapter.load(network(), tmp_path / "none")


def test_a_folder_is_no_adapter_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidArgumentError, match=r"^path must be the path of a file, got the folder '"):
        BlockSparseAdapter(network(), ".*", density=0.5).save(tmp_path / "folder")
    assert [file.name for file in tmp_path.rglob("*")] == ["folder"]
    with pytest.raises(CheckpointError, match="path must be a safetensors file"):
        BlockSparseAdapter.load(network(), tmp_path / "folder")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"regex": "9"}, "regex must match a block-sparse layer, got '9'"),
        ({"regex": "("}, "regex must be a name or a regular expression"),
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"density": 1.5}, r"density must be in \(0, 1\], got 1.5"),
        ({"density": True}, r"density must be in \(0, 1\], got True"),
        ({"density": "0.1"}, r"density must be in \(0, 1\], got '0.1'"),
        ({"density": None}, r"density must be in \(0, 1\], got None"),
        (
            {"scores": {"0": [1.0] * 6, "2": torch.ones(3)}},
            r"scores\['0'\] must be a dense tensor, got \[1.0, 1.0, 1.0, 1.0, 1.0, 1.0\]",
        ),
        ({"scores": {"0": torch.ones(6)}}, r"scores must .*\['2'\]"),
        ({"scores": {"0": torch.ones(5), "2": torch.ones(3)}}, r"scores of '0' must have shape \(6,\)"),
        (
            {"scores": {"0": torch.full((6,), torch.nan), "2": torch.ones(3)}},
            "scores of '0' must not have NaN",
        ),
    ],
)
def test_bad_arguments_change_nothing(arguments: dict[str, Any], text: str) -> None:
    model = network()
    with pytest.raises(InvalidArgumentError, match=text):
        BlockSparseAdapter(model, **{"regex": ".*", **arguments})
    assert isinstance(model[0], BlockSparseLinear) and model[0].weight.requires_grad


def test_a_weight_that_two_layers_share_is_refused() -> None:
    model = nn.Sequential(*(BlockSparseLinear(64, 64, block_shape=32) for _ in range(2)))
    model[1].pattern = model[0].pattern
    model[1].weight = model[0].weight
    with pytest.raises(InvalidArgumentError, match="layer '0', got one that '1' has, too"):
        BlockSparseAdapter(model, "0")
    assert type(model[0]) is BlockSparseLinear and model[0].weight.requires_grad


@pytest.mark.parametrize("end", ["merge", "remove"])
def test_what_is_merged_or_removed_is_not_saved(tmp_path: Path, end: str) -> None:
    adapter = BlockSparseAdapter(network(), ".*")
    getattr(adapter, end)()
    with pytest.raises(UnsupportedError, match="got one merged or removed"):
        adapter.save(tmp_path / "adapter.safetensors")
    assert not list(tmp_path.iterdir())


def test_an_adapted_layer_has_the_attributes_of_a_layer() -> None:
    model = network()
    base = model[0]
    BlockSparseAdapter(model, "0")
    layer = model[0]
    assert layer.weight is base.weight and layer.bias is base.bias
    assert (layer.in_features, layer.out_features) == (128, 96)
    assert "weight" not in dict(layer.named_parameters(recurse=False))


def test_a_second_adapter_is_refused() -> None:
    model = network()
    BlockSparseAdapter(model, "0", generator=seeded())
    with pytest.raises(InvalidArgumentError, match="no adapter at layer '0'"):
        BlockSparseAdapter(model, ".*")


@pytest.mark.parametrize(("storage", "options"), [("int8", {}), ("compressed", {"nm": (2, 4)})], ids=str)
def test_a_delta_in_another_storage_still_counts(
    tmp_path: Path, storage: str, options: dict[str, Any]
) -> None:
    model, x = network(**options), randn(5, 128, dtype=torch.float32)
    adapter = trained(BlockSparseAdapter(model, ".*", density=1.0, generator=seeded()))
    before = model(x)
    for layer in model.modules():
        if isinstance(layer, BlockSparseLinear):
            layer.to_storage(storage)
    torch.testing.assert_close(model(x), before, rtol=0.05, atol=0.05)
    with pytest.raises(UnsupportedError, match=r"delta of layer '0'.*to_storage\('plain'\)"):
        adapter.save(tmp_path / "adapter.safetensors")


def test_a_merge_into_fewer_blocks_changes_none() -> None:
    model = network()
    adapter = trained(BlockSparseAdapter(model, ".*", density=1.0, generator=seeded()))
    first, last = (layer.base_layer for layer in adapter.layers.values())
    free = (~last.pattern.to_block_mask()).nonzero()[:1]
    last.pattern.move_blocks_([0], free)
    before = first.weight.clone()
    with pytest.raises(InvalidArgumentError, match="blocks that layer '2' keeps"):
        adapter.merge()
    assert torch.equal(first.weight, before) and list(adapter.layers) == ["0", "2"]


@pytest.mark.parametrize("options", FORMS[:2], ids=str)
def test_a_merge_into_another_mask_changes_none(options: dict[str, Any]) -> None:
    model = network(**options)
    adapter = trained(BlockSparseAdapter(model, ".*", density=1.0, generator=seeded()))
    first, last = (layer.base_layer for layer in adapter.layers.values())
    last.set_nm((2, 4), scores=randn(*last.weight.shape, dtype=torch.float32, seed=5))
    before = first.weight.clone()
    with pytest.raises(UnsupportedError, match=r"layer '2' does not keep all weights .* mask has changed"):
        adapter.merge()
    assert torch.equal(first.weight, before) and list(adapter.layers) == ["0", "2"]


def test_the_base_stays_frozen_in_all_storages() -> None:
    model = network(storage="int8")
    adapter = BlockSparseAdapter(model, "0", generator=seeded())
    model[0].base_layer.to_storage("plain")
    model[2].to_storage("plain")
    assert [p for p in model.parameters() if p.requires_grad] == list(adapter.parameters())
