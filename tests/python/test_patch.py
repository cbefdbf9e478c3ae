from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tilesparse import BlockSparseLinear, BlockSparseModelPatcher, PseudoBlockSparseLinear
from tilesparse.demo import GPT, SIZES
from tilesparse.errors import InvalidArgumentError

BLOCKS = r"blocks\.\d+\.(attention|mlp)\."


def patcher(regex: str = BLOCKS, fullmatch: bool = False, **options: Any) -> BlockSparseModelPatcher:
    made = BlockSparseModelPatcher()
    made.add_pattern(regex, options, fullmatch=fullmatch)
    return made


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SIZES["tiny"])


def kinds(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(module) for name, module in model.named_modules()}


def tokens(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (2, SIZES["tiny"].context), generator=generator)


def test_replaces_exactly_the_matching_layers() -> None:
    model = gpt()
    before = kinds(model)
    report = patcher(density=0.25, block_shape=(16, 32)).patch_model(model)
    names = {f"blocks.0.{name}" for name in ("attention.inputs", "attention.output", "mlp.0", "mlp.2")}
    assert {layer.name for layer in report.layers} == names
    after = kinds(model)
    assert {name for name in before if before[name] is not after[name]} == names
    assert list(before) == list(after)
    layer = model.blocks[0].attention.inputs
    assert isinstance(layer, BlockSparseLinear)
    assert layer.block_shape == (16, 32) and layer.density == 0.25


def test_density_one_gives_the_results_of_the_dense_model() -> None:
    model, x = gpt(), tokens()
    expected = model(x)
    expected.sum().backward()
    gradient = model.tokens.weight.grad
    for pseudo in (False, True):
        patched = gpt()
        patcher(density=1, pseudo_linear=pseudo).patch_model(patched)
        result = patched(x)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-3)
        result.sum().backward()
        torch.testing.assert_close(patched.tokens.weight.grad, gradient, rtol=0, atol=1e-3)


def test_layers_can_be_patched_to_compute_densely() -> None:
    models, x = [gpt(), gpt()], tokens()
    for model, expand in zip(models, (False, True), strict=True):
        patcher(expand=expand).patch_model(model)
        assert model.blocks[0].mlp[0].expand is expand
    torch.testing.assert_close(models[0](x), models[1](x), rtol=0, atol=1e-3)


def test_a_patched_model_equals_its_plain_twin_and_trains() -> None:
    model, twin, x = gpt(), gpt(), tokens()
    patcher(density=0.5).patch_model(model)
    patcher(density=0.5, pseudo_linear=True).patch_model(twin)
    assert isinstance(twin.blocks[0].mlp[0], PseudoBlockSparseLinear)
    for module in (model, twin):
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
    torch.testing.assert_close(model(x), twin(x), rtol=0, atol=1e-3)


def test_the_report_counts_what_is_there() -> None:
    model = gpt()
    model.head.weight = nn.Parameter(torch.zeros(256, 64))
    model.tokens.weight = model.head.weight

    def size() -> tuple[int, int]:
        parameters, buffers = list(model.parameters()), list(model.buffers())
        return sum(p.numel() for p in parameters), sum(t.nbytes for t in parameters + buffers)

    before = size()
    report = patcher().patch_model(model)
    assert (report.before.parameters, report.before.bytes) == before
    assert (report.after.parameters, report.after.bytes) == size()
    first = report.layers[0]
    assert first.shape == (192, 64) and first.before.parameters == 192 * 64 + 192
    assert first.after.parameters == 6 * 32 * 32 + 192
    table = str(report)
    assert all(layer.name in table for layer in report.layers)
    assert f"{report.after.bytes:,}" in table


def test_a_dry_run_reports_the_same_and_changes_nothing() -> None:
    model = gpt()
    modules = dict(model.named_modules())
    dry = patcher().patch_model(model, dry_run=True)
    assert dict(model.named_modules()) == modules
    assert patcher().patch_model(model) == dry


def test_undo_restores_the_very_modules() -> None:
    model = gpt()
    modules = dict(model.named_modules())
    state = copy.deepcopy(model.state_dict())
    made = patcher(r".*attention")
    made.patch_model(model)
    made.add_pattern(r".*mlp")
    made.patch_model(model)
    model.blocks[0].mlp[0].reset_parameters()
    nn.init.ones_(model.blocks[0].mlp[0].bias)
    made.undo(model)
    assert dict(model.named_modules()) == modules
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    for unpatched in (model, gpt()):
        with pytest.raises(InvalidArgumentError, match="model"):
            made.undo(unpatched)


def test_the_patcher_does_not_keep_models_alive() -> None:
    model, made = gpt(), patcher()
    made.patch_model(model)
    watch = weakref.ref(model)
    del model
    gc.collect()
    assert watch() is None


def test_the_first_matching_pattern_wins_and_prefixes_match() -> None:
    made = BlockSparseModelPatcher()
    made.add_pattern(r"blocks\.0\.mlp\.0", {"density": 0.25})
    made.add_pattern(r"blocks\.0\.m", {"density": 0.75})
    model = gpt()
    made.patch_model(model)
    assert (model.blocks[0].mlp[0].density, model.blocks[0].mlp[2].density) == (0.25, 0.75)


def test_fullmatch_wants_the_whole_name_and_unmatched_patterns_are_reported() -> None:
    report = patcher(r"blocks\.0\.mlp", fullmatch=True).patch_model(gpt())
    assert not report.layers and not report.unmatched
    assert [(layer.name, layer.reason) for layer in report.skipped] == [
        ("blocks.0.mlp", "Sequential is not nn.Linear")
    ]
    report = patcher("encoder").patch_model(gpt())
    assert report.unmatched == ["encoder"] and "'encoder'" in str(report)
    assert report.before == report.after


def test_a_layer_tied_to_another_module_is_skipped_unless_asked() -> None:
    model = gpt()
    model.head.weight = model.tokens.weight
    report = patcher("head").patch_model(model)
    assert not report.layers and "tokens" in report.skipped[0].reason
    assert model.head.weight is model.tokens.weight
    report = patcher("head", untie=True, density=0.5).patch_model(model)
    assert isinstance(model.head, BlockSparseLinear)
    assert report.after.parameters == sum(p.numel() for p in model.parameters())


def test_a_layer_registered_twice_stays_shared() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(32, 32))})
    made = patcher(r"b\.0")
    report = made.patch_model(model)
    assert len(report.layers) == 1
    assert isinstance(model["a"], BlockSparseLinear) and model["a"] is model["b"][0]
    made.undo(model)
    assert model["a"] is shared and model["b"][0] is shared


def test_layers_whose_weight_others_read_are_left_alone() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1).eval()
    x = torch.randn(1, 4, 32)
    report = patcher(".*").patch_model(model)
    assert not report.layers
    with torch.no_grad():
        model(x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        report = patcher(".*").patch_model(model)
        assert {layer.name for layer in report.layers} == {"layers.0.linear1", "layers.0.linear2"}
        with torch.no_grad():
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_the_model_itself_and_patched_layers_are_skipped() -> None:
    assert "model itself" in patcher("").patch_model(nn.Linear(32, 32)).skipped[0].reason
    model = gpt()
    patcher().patch_model(model)
    report = patcher(r".*attention\.output").patch_model(model)
    assert [layer.reason for layer in report.skipped] == ["already block-sparse"]


def test_an_indivisible_layer_stops_everything_before_any_change() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 33))
    modules = dict(model.named_modules())
    with pytest.raises(InvalidArgumentError, match=r"'1'.*out_features.*33"):
        patcher(r"\d").patch_model(model)
    assert dict(model.named_modules()) == modules


@pytest.mark.parametrize(
    ("regex", "options", "field"),
    [
        ("(", {}, "regex"),
        (None, {}, "regex"),
        (".*", {"dense": 0.5}, "dense"),
        (".*", {"density": 2}, "density"),
        (".*", {"density": "half"}, "density"),
        (".*", {"block_shape": 32}, "block_shape"),
        (".*", {"block_shape": (32, 20)}, "block_shape"),
        (".*", {"pseudo_linear": 1}, "pseudo_linear"),
        (".*", {"expand": "yes"}, "expand"),
    ],
)
def test_bad_patterns_are_refused_when_added(regex: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        BlockSparseModelPatcher().add_pattern(regex, options)


def test_subclasses_choose_and_make_layers() -> None:
    class Wide(BlockSparseModelPatcher):
        def is_patchable(self, name: str, module: nn.Module) -> bool:
            return super().is_patchable(name, module) and not name.endswith("output")

        def new_child_module(
            self, name: str, module: nn.Module, options: Mapping[str, Any]
        ) -> BlockSparseLinear | PseudoBlockSparseLinear:
            return super().new_child_module(name, module, {**options, "density": 1})

    made, model = Wide(), gpt()
    made.add_pattern(BLOCKS)
    assert "blocks.0.attention.output" not in made.get_patchable_layers(model)
    report = made.patch_model(model)
    assert [layer.density for layer in report.layers] == [1, 1, 1]
    assert ("blocks.0.attention.output", "is_patchable refuses it") in [
        (layer.name, layer.reason) for layer in report.skipped
    ]
