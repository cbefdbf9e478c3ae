from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import prune
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    JambaConfig,
    JambaModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import tilesparse
from tilesparse import BlockSparseLinear, densify_, prune_, sparsify_, summary
from tilesparse.cli.demo import GPT, SIZES
from tilesparse.config import BlockSparseConfig
from tilesparse.errors import InvalidArgumentError, UnsupportedError
from tilesparse.model import Report
from tilesparse.model.match import SkippedLayer
from tilesparse.train import PatternSchedule

BLOCKS = r"blocks\.\d+\.(attention|mlp)\."


def config(density: float = 0.5, block_shape: Any = 32, **options: Any) -> BlockSparseConfig:
    return BlockSparseConfig(density, block_shape, **options)


def patch(
    model: nn.Module,
    regex: str = BLOCKS,
    *,
    batch: Any = None,
    dry_run: bool = False,
    strict: bool = True,
    **options: Any,
) -> Report:
    return sparsify_(model, {regex: config(**options)}, batch=batch, dry_run=dry_run, strict=strict)


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
    report = patch(model, density=0.25, block_shape=(16, 32))
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
    patched = gpt()
    patch(patched, density=1)
    result = patched(x)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-3)
    result.sum().backward()
    torch.testing.assert_close(patched.tokens.weight.grad, gradient, rtol=0, atol=1e-3)


STORED: list[
    tuple[dict[str, Any], str, int]
] = [  # options, what tables call them, and bytes of a block of 32
    ({}, "plain", 32 * 32 * 4),
    ({"nm": (2, 4)}, "2:4", 32 * 32 * (4 + 1)),  # and a mask
    ({"nm": (2, 4), "transposable": True}, "2:4", 32 * 32 * (4 + 1)),
    ({"nm": (2, 4), "storage": "compressed"}, "2:4 compressed", 32 * 32 * 2 + 32 * 4),  # and metadata
    ({"storage": "int8"}, "int8", 32 * 32 + 32 * 4),  # and scales
    ({"storage": "float8_e4m3fn"}, "float8_e4m3fn", 32 * 32 + 32 * 4),
    ({"storage": "int4"}, "int4", 32 * 32 // 2 + 32 * 4),
    ({"nm": (2, 4), "storage": "int8"}, "2:4 int8", 32 * 32 // 2 + 32 * 4 + 32 * 4),
]


@pytest.mark.parametrize(("options", "called", "block_bytes"), STORED)
def test_layers_are_stored_as_asked(options: dict[str, Any], called: str, block_bytes: int) -> None:
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    expected = BlockSparseLinear.from_linear(model[0], block_shape=32, **options)
    report = patch(model, "0", **options)
    (layer,) = report.layers
    new, indices = model[0], 4 * (len(expected.crow_indices) + 2 * expected.pattern.nnz)
    assert (layer.nm, layer.storage) == (options.get("nm"), options.get("storage", "plain"))
    assert (new.nm, new.storage, new.transposable) == (
        layer.nm,
        layer.storage,
        options.get("transposable", False),
    )
    assert layer.after.bytes == report.after.bytes == block_bytes * expected.pattern.nnz + indices
    assert layer.error == expected.storage_error
    assert (layer.error > 0) == (layer.storage in ("int8", "float8_e4m3fn", "int4"))
    line = str(report).splitlines()[1]
    assert f" {called} " in line and (f" {layer.error:.2g} " in line) == (layer.error > 0)
    x = torch.randn(3, 64)
    torch.testing.assert_close(model(x), expected(x))


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn", "int4"])
def test_eight_bits_are_for_finite_weights(storage: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    dense = model[1]
    dense.weight.data[3, 5] = float("inf")
    with pytest.raises(InvalidArgumentError, match=f"layer '1': its weight must be finite .*'{storage}'"):
        patch(model, r"\d", storage=storage)
    assert model[1] is dense and type(model[0]) is nn.Linear
    patch(model, r"\d")


def test_the_report_counts_what_is_there() -> None:
    model = gpt()
    model.head.weight = nn.Parameter(torch.zeros(256, 64))
    model.tokens.weight = model.head.weight

    def size() -> tuple[int, int]:
        parameters, buffers = list(model.parameters()), list(model.buffers())
        return sum(p.numel() for p in parameters), sum(t.nbytes for t in parameters + buffers)

    before = size()
    report = patch(model)
    assert (report.before.parameters, report.before.bytes) == before
    assert (report.after.parameters, report.after.bytes) == size()
    first = report.layers[0]
    assert first.shape == (192, 64) and first.before.parameters == 192 * 64 + 192
    assert first.after.parameters == 6 * 32 * 32 + 192
    table = str(report)
    assert all(layer.name in table for layer in report.layers)
    assert f"{report.after.bytes:,}" in table


def test_dense_layers_come_back_with_zeros() -> None:
    model = gpt()
    for index, regex in enumerate((BLOCKS, "head")):
        dense, size = kinds(model), summary(model).after
        patch(model, regex)
        expected = model(tokens())
        report = densify_(model)
        assert (report.verb, report.after) == ("densify_", size)
        assert kinds(model) == dense and len(report.layers) == (4, 1)[index]
        assert all(layer.after.parameters > layer.before.parameters for layer in report.layers)
        torch.testing.assert_close(model(tokens()), expected, rtol=0, atol=1e-4)
        assert not densify_(model).layers


def test_some_layers_stay_sparse() -> None:
    model = gpt()
    patch(model)
    densify_(model, layers=["mlp.0", "attention"], exclude="output")
    assert {layer.name for layer in summary(model).layers} == {"blocks.0.mlp.2", "blocks.0.attention.output"}
    report = densify_(model, filter_fn=lambda _, name: name.endswith("2"))
    assert [(one.name, one.reason) for one in report.skipped] == [
        ("blocks.0.attention.output", "filter_fn refuses it")
    ]
    wrong: list[dict[str, Any]] = [{"layers": "mlp"}, {"layers": "("}, {"exclude": "9"}]
    for options in wrong:
        with pytest.raises(InvalidArgumentError, match=next(iter(options))):
            densify_(model, **options)
    with pytest.raises(InvalidArgumentError, match="model must hold the layer"):
        densify_(model.get_submodule("blocks.0.attention.output"))
    adapted = get_peft_model(model, LoraConfig(target_modules=["attention.output"]))
    with pytest.raises(UnsupportedError, match="has an adapter"):
        densify_(model)
    adapted.unload()
    assert not densify_(model).skipped and BlockSparseLinear not in kinds(model).values()


def test_a_summary_is_the_report_of_patching() -> None:
    model = gpt()
    report, found = patch(model, storage="int8"), summary(model)
    assert (found.verb, found.layers, found.dense) == ("summary", report.layers, report.dense)
    assert (found.before, found.after) == (report.before, report.after)
    assert found.to_dict()["layers"][0]["before"]["bytes"] == 4 * (192 * 64 + 192)
    assert summary(gpt()).before == summary(gpt()).after == report.before


def test_dense_layers_are_not_kept() -> None:
    model = gpt()
    watch = weakref.ref(model.blocks[0].mlp[0])
    patch(model)
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("first", [".*", "mlp", r"blocks\.0\.(mlp|attention)"])
def test_a_pattern_that_never_decides_is_refused(first: str, strict: bool) -> None:
    model = gpt()
    with pytest.raises(InvalidArgumentError, match=f"'mlp.2' after {re.escape(repr(first))}"):
        sparsify_(model, {first: config(0.25), "mlp.2": config(0.75)}, strict=strict)
    assert not any(isinstance(module, BlockSparseLinear) for module in model.modules())


def test_patterns_may_overlap_and_repeat_each_other() -> None:
    model = gpt()
    rules = {r"blocks\.0\.mlp\.0": config(0.25), "mlp": config(0.75), r"blocks\.0\.mlp\.2": config(0.75)}
    report = sparsify_(model, rules)
    assert [layer.density for layer in report.layers] == [0.25, 0.75]


def test_unmatched_patterns_are_reported() -> None:
    report = patch(gpt(), r"blocks\.0\.mlp$", strict=False)
    assert not report.layers and not report.notes
    assert report.skipped == [SkippedLayer("blocks.0.mlp", "Sequential", "not nn.Linear")]
    assert "skipped blocks.0.mlp (Sequential): not nn.Linear" in str(report)
    report = patch(gpt(), "encoder", strict=False)
    assert report.notes == ["no layer matches 'encoder'"] and report.notes[0] in str(report)
    assert report.before == report.after


def test_a_layer_tied_to_another_module_is_skipped() -> None:
    model = gpt()
    model.head.weight = model.tokens.weight
    report = patch(model, "head", strict=False)
    assert not report.layers and "tokens" in report.skipped[0].reason
    assert model.head.weight is model.tokens.weight


def test_a_layer_registered_twice_stays_shared() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(64, 64))})
    report = patch(model, r"b\.0")
    assert len(report.layers) == 1
    assert isinstance(model["a"], BlockSparseLinear) and model["a"] is model["b"][0]
    densify_(model)
    assert isinstance(model["a"], nn.Linear) and model["a"] is model["b"][0]


def test_layers_whose_weight_others_read_are_left_alone() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1).eval()
    x = torch.randn(1, 4, 32)
    report = patch(model, ".*", strict=False)
    assert not report.layers
    with torch.no_grad():
        model(x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        report = patch(model, ".*")
        assert {layer.name for layer in report.layers} == {"layers.0.linear1", "layers.0.linear2"}
        with torch.no_grad():
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_the_model_itself_and_patched_layers_are_skipped() -> None:
    assert "model itself" in patch(nn.Linear(32, 32), "", strict=False).skipped[0].reason
    model = gpt()
    patch(model)
    report = patch(model, r".*attention\.output")
    assert [layer.reason for layer in report.skipped] == ["already block-sparse"]


def reasons(model: nn.Module, regex: str = ".*", **options: Any) -> dict[str, str]:
    """Why each skipped module was, once it is known that none was replaced."""
    modules = dict(model.named_modules())
    report = patch(model, regex, **options, strict=False)
    assert not report.layers and dict(model.named_modules()) == modules
    return {layer.name: layer.reason for layer in report.skipped}


def test_layers_that_are_not_initialised_are_skipped() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64))
    dry = patch(model, density=0.25, dry_run=True, strict=False)
    assert (dry.before.parameters, dry.skipped) == (64 * 64 + 64, [])
    assert "pass a batch" in patch(model, "0", strict=False).skipped[0].reason
    model(torch.randn(2, 32))
    assert [layer.name for layer in patch(model, "0").layers] == ["0"]


def test_errors_name_the_layer_and_what_is_wrong_with_it() -> None:
    model = gpt()
    model.blocks[0].mlp[0].weight.data[3, 5] = float("nan")
    with pytest.raises(InvalidArgumentError, match=r"'blocks.0.mlp.0'.*weight.*NaN"):
        patch(model)
    with pytest.raises(InvalidArgumentError, match=r"'1'.*block_shape.*\(128, 16\).*out_features is 64"):
        patch(nn.Sequential(nn.ReLU(), nn.Linear(64, 64)), "1", block_shape=(128, 16))
    with (
        torch.device("meta"),
        pytest.raises(InvalidArgumentError, match=r"'blocks\.0\.attention.inputs'.*meta"),
    ):
        patch(GPT(SIZES["tiny"]))


def test_no_layer_loses_all_its_blocks_unless_asked() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(32, 32))
    assert reasons(model, r"\d", density=0.1) == {
        "0": "density 0.1 of its 4 blocks in 32x32 rounds to none",
        "1": "density 0.1 of its 1 blocks in 32x32 rounds to none",
    }
    assert [layer.density for layer in patch(model, "0", density=0).layers] == [0]


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layers_that_no_sparse_layer_can_stand_for_are_skipped() -> None:
    def legacy_hook(*_: object) -> None: ...

    layers = {name: nn.Linear(64, 64) for name in "abcdefg"}
    nn.utils.parametrizations.weight_norm(layers["a"])
    prune.l1_unstructured(layers["b"], "weight", 0.5)
    layers["c"].register_backward_hook(legacy_hook)
    layers["d"].weight.register_hook(lambda gradient: gradient)
    layers["e"].register_state_dict_post_hook(legacy_hook)
    layers["f"].forward = lambda x: x  # type: ignore[assignment, method-assign]
    layers["g"].weight = nn.Parameter(layers["g"].weight.to(torch.int8), requires_grad=False)
    said = reasons(nn.ModuleDict({**layers, "h": nn.Linear(0, 64)}), "[a-h]$")
    for name, word in zip(
        "abcdefgh",
        (
            "remove_parametrizations",
            "weight_mask, weight_orig",
            "register_full_backward_hook",
            "on a parameter",
            "state dict",
            "forward was replaced",
            "torch.int8",
            "empty",
        ),
        strict=True,
    ):
        assert word in said[name]


def test_hooks_move_to_the_new_layer_and_back() -> None:
    calls: list[str] = []

    def record(name: str) -> Callable[..., None]:
        return lambda module, *_: calls.append(f"{name} {type(module).__name__}")

    def scale(module: nn.Module, args: Any, kwargs: dict[str, Any], y: torch.Tensor) -> torch.Tensor:
        calls.append(f"scale {sorted(kwargs)}")
        return 2 * y

    model = nn.Sequential(nn.Linear(64, 64))
    dense = model[0]
    dense.register_forward_pre_hook(record("before"))
    dense.register_forward_hook(record("second"))
    dense.register_forward_hook(record("first"), prepend=True)
    dense.register_forward_hook(scale, with_kwargs=True)
    removed = dense.register_forward_hook(record("removed"))
    dense.register_full_backward_pre_hook(record("backward begins"))
    dense.register_full_backward_hook(record("backward ends"))
    x = torch.randn(3, 64, requires_grad=True)
    expected = model(x)
    expected.sum().backward()
    seen_dense, calls[:] = list(calls), []

    patch(model, "0", density=1, dry_run=True)
    patch(model, "0", density=1)
    y = model(x)
    y.sum().backward()
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
    assert calls == [call.replace(" Linear", f" {type(model[0]).__name__}") for call in seen_dense]

    removed.remove()
    model[0].register_full_backward_hook(record("added"))
    densify_(model)
    calls.clear()
    model(x).sum().backward()
    assert type(model[0]) is nn.Linear
    assert calls == [*(call for call in seen_dense if not call.startswith("removed")), "added Linear"]


class Transformer(nn.Module):
    """Says what its output embedding is, as the models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.embed_out = nn.Linear(64, 96)

    def get_output_embeddings(self) -> nn.Module:
        return self.embed_out


class Decoder(nn.Module):
    """Its output embedding has the usual name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.lm_head = nn.Linear(64, 96)


@pytest.mark.parametrize(("kind", "name"), [(Transformer, "embed_out"), (Decoder, "lm_head")])
@pytest.mark.parametrize(
    ("regex", "is_patched"),
    [
        (".*", False),
        (r"model\.(layers\.\d|.*_(out|head))", False),
        (r"model\.NAM", False),
        ("model.NAME", True),
        (r"model\.(layers\.\d+|NAME)$", True),
        (r".*\bNAME\b", True),
    ],
)
def test_the_output_embedding_is_patched_only_where_it_is_named(
    regex: str, is_patched: bool, kind: type[nn.Module], name: str
) -> None:
    regex = regex.replace("NAME", name).replace("NAM", name[:-1])
    report = patch(nn.ModuleDict({"model": kind()}), regex, strict=False)
    patched = [layer.name for layer in report.layers]
    skipped = [layer.name for layer in report.skipped if "output embedding" in layer.reason]
    assert (f"model.{name}" in patched, f"model.{name}" in skipped) == (is_patched, not is_patched)


def test_a_later_pattern_may_name_the_output_embedding() -> None:
    model = Transformer()
    sparsify_(model, {".*": config(), "embed_out": config(1)})
    assert (model.layers[0].density, model.embed_out.density) == (0.5, 1)


def test_models_without_an_output_embedding_are_patched() -> None:
    class Encoder(Transformer):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert len(patch(Encoder(), ".*").layers) == 3


def test_relatives_of_linear_layers_are_left_alone_and_reported() -> None:
    class Conv1D(nn.Module):
        """Has the name of Transformers' layer only."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64, 96))

    class Scaled(nn.Linear): ...

    report = patch(nn.Sequential(Conv1D(), Scaled(64, 64), nn.Linear(64, 64)), r"\d")
    assert [layer.name for layer in report.layers] == ["2"]
    assert "skipped 0 (Conv1D): not nn.Linear" in str(report)
    assert "skipped 1 (Scaled): a subclass of nn.Linear" in str(report)


# Layers that are not converted.

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
ROUTER = r"model\.layers\.\d+\.mlp\.gate"


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=16))


def falcon() -> FalconForCausalLM:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
    return FalconForCausalLM(FalconConfig(**sizes))


@pytest.mark.parametrize(
    ("regex", "make", "why"),
    [
        ("encoder", gpt, "'encoder' .it matches no name"),
        (r"blocks\.0\.mlp$", gpt, "Sequential.: not nn.Linear"),
        (ROUTER, mixtral, r"2 MixtralTopKRouter.*: not nn.Linear"),
        (r"transformer\.h", falcon, r"8 FalconLinear .*a subclass of nn.Linear"),
        (".*", lambda: nn.Sequential(nn.Linear(64, 2)), "multiple of 32"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_pattern_that_makes_no_layer_sparse_raises(
    regex: str, make: Callable[[], nn.Module], why: str, dry_run: bool
) -> None:
    model = make()
    modules = dict(model.named_modules())
    with pytest.raises(InvalidArgumentError, match=f"patterns must each .*{why}.*strict=False"):
        patch(model, regex, dry_run=dry_run)
    assert dict(model.named_modules()) == modules
    report = patch(model, regex, dry_run=dry_run, strict=False)
    assert not report.layers and dict(model.named_modules()) == modules


def test_a_pattern_that_is_of_use_excuses_no_other() -> None:
    model, rules = mixtral(), {r".*self_attn": config(), ROUTER: config()}
    with pytest.raises(InvalidArgumentError, match="MixtralTopKRouter"):
        sparsify_(model, rules)
    assert len(sparsify_(model, rules, strict=False).layers) == 8


def test_layers_that_are_sparse_already_count() -> None:
    model = gpt()
    patch(model)
    assert not patch(model).layers


def test_the_report_lists_what_stays_dense() -> None:
    model = mixtral()
    model.lm_head.weight = model.model.embed_tokens.weight
    whole = sum(parameter.numel() for parameter in model.parameters())
    report = patch(model, ".*self_attn", block_shape=16)
    dense = {one.name: one for one in report.dense}
    expected = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and "self_attn" not in name
    }
    assert {name: one.shape for name, one in dense.items()} == {n: p.shape for n, p in expected.items()}
    for name, parameter in expected.items():
        assert dense[name].share == pytest.approx(parameter.numel() / whole)
    experts = 2 * 16 * (256 * 64 + 64 * 128)
    assert sum(one.share for one in report.dense if ".experts." in one.name) == pytest.approx(experts / whole)
    lines = str(report).splitlines()
    (line,) = [line for line in lines if line.startswith("model.layers.*.mlp.experts.gate_up_proj")]
    share = 2 * dense["model.layers.0.mlp.experts.gate_up_proj"].share
    assert line.split()[1:] == ["2", "16x256x64", f"{share:.1%}"]
    assert not [one for one in patch(gpt(), ".*", dry_run=True).dense if "mlp" in one.name]


def test_layers_that_stay_dense_are_a_few_lines() -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_hidden_layers": 60}))
    report = patch(model, r"model\.layers\.0\.mlp\.up_proj")
    assert len(report.dense) == 60 * 7 - 1 + 2
    text = str(report)
    assert len(text.splitlines()) < 20 and "model.layers.*.mlp.up_proj.weight" in text
    assert sum(one.share for one in report.dense) == pytest.approx(1, abs=0.01)


# Weights that others read.

STATE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
JAMBA = {"num_key_value_heads": 1, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
T5 = T5Config(
    vocab_size=96, d_model=64, d_ff=128, d_kv=32, num_layers=1, num_heads=2, decoder_start_token_id=0
)
READERS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "mamba": (lambda: MambaModel(MambaConfig(**STATE, time_step_rank=32)), "dt_proj"),
    "jamba": (
        lambda: JambaModel(JambaConfig(**SMALL, **JAMBA, mamba_dt_rank=32, mamba_d_state=16)),
        "dt_proj",
    ),
    "t5": (lambda: T5ForConditionalGeneration(T5), None),
}


@pytest.mark.parametrize("name", READERS)
def test_layers_whose_weight_a_module_reads_are_skipped(name: str) -> None:
    make, read = READERS[name]
    torch.manual_seed(0)
    model = make().eval()
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear} - {"lm_head"}
    batch = {"input_ids": torch.randint(96, (2, 8))}
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    with torch.no_grad():
        expected = model(**batch)[0]
        report = sparsify_(model, BlockSparseConfig(1, 16), batch=batch)
        torch.testing.assert_close(model(**batch)[0], expected, rtol=1e-3, atol=1e-3)
    kept = {layer.name for layer in report.skipped if "reads its weight itself" in layer.reason}
    assert kept == {one for one in linear if read and one.endswith(read)}
    cut = {layer.name for layer in report.skipped if "multiple of 16" in layer.reason}
    assert {layer.name for layer in report.layers if ".experts." not in layer.name} == linear - kept - cut


class Reader(nn.Module):
    """Reads weights under other names, in methods, and where nothing goes."""

    def __init__(self) -> None:
        super().__init__()
        self.alias, self.indexed, self.helped, self.sized = (nn.Linear(64, 64) for _ in range(4))
        self.both, self.dtype, self.idle, self.looked = (nn.Linear(64, 64) for _ in range(4))
        self.tables = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.inner, self.slow = nn.Sequential(nn.Linear(64, 64)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.alias
        x = x @ layer.weight.T
        x = x @ torch.stack([table.weight for table in self.tables]).sum(0)
        x = x @ self.helped.weight.mT + self.prop
        x = x * self.sized.weight.shape[0]
        x = self.both(x) @ self.both.weight
        if isinstance(self.dtype.weight, torch.Tensor) and self.looked.weight.requires_grad:
            x = self.dtype(self.looked(x.to(self.dtype.weight.dtype)))
        x = x @ self.idle.weight.T if self.slow else self.idle(x)
        y: torch.Tensor = self.inner(x)
        return y

    @property
    def prop(self) -> torch.Tensor:
        return self.indexed.weight[0]


def test_readers_are_recognised_by_what_they_do_with_a_batch() -> None:
    model, x = Reader(), torch.randn(3, 64)
    read = {"alias", "indexed", "helped", "sized", "both", "tables.0", "tables.1"}
    for slow in (False, True):
        model.slow = slow
        report = patch(model, ".*", density=1, batch=x, dry_run=True)
        found = {layer.name for layer in report.skipped if "Reader reads its weight itself" in layer.reason}
        assert found == (read | {"idle"} if slow else read)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert len(patch(model, ".*", density=1, dry_run=True).layers) == 11  # without a batch
    expected = model(x)
    patch(model, ".*", density=1, batch=x)
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("storage", ["float8_e4m3fn", "int4"])
def test_what_is_cast_to_the_dtype_of_stored_bits_is_refused(storage: str) -> None:
    """T5 casts to the dtype of a weight, unless that is int8."""
    model = T5ForConditionalGeneration(T5).eval()
    batch = dict.fromkeys(("input_ids", "labels"), torch.arange(1, 33).view(2, 16))
    sparsify_(model, BlockSparseConfig(0.5, 32, storage="int8"))
    assert model(**batch).logits.isfinite().all()
    densify_(model)
    sparsify_(model, {"DenseReluDense.wo": BlockSparseConfig(0.5, 32, storage=storage)})
    with pytest.raises(InvalidArgumentError, match="x must have dtype"):
        model(**batch)


# Blocks that are chosen so that some rows or columns have none.


def lopsided() -> nn.Sequential:
    """Its first layer has all large weights in one block row, its second in one block column."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    with torch.no_grad():
        model[0].weight[:32] += 10
        model[2].weight[:, :32] += 10
    return model


def test_empty_block_rows_and_columns_are_named() -> None:
    with pytest.warns(UserWarning, match=r"rows, .*: 3 in 0; empty block columns, .*: 3 in 2") as caught:
        report = patch(lopsided(), r"\d", density=0.25)
    assert caught[0].filename == __file__ and len(caught) == 1
    assert [(layer.empty_rows, layer.empty_columns) for layer in report.layers] == [(3, 0), (0, 3)]
    assert "empty block rows, whose outputs are the bias alone: 3 in 0" in str(report)
    with pytest.warns(UserWarning, match="3 block rows .* and 0 block columns"):
        BlockSparseLinear.from_linear(lopsided()[0], density=0.25, block_shape=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = patch(lopsided(), r"\d", density=1)
        assert "empty" not in str(report)
        patch(lopsided(), r"\d", density=0)  # as asked for


Pair = namedtuple("Pair", ["first", "second"])


class Keeper(nn.Module):
    """Computes with layers that it finds in attributes of its own."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        a, b = self.layers
        self.kept: Any = {
            "list": [a, b],
            "tuple": (a, b),
            "named tuple": Pair(a, b),
            "dict": {"a": a, "b": b},
            "nested": [{"a": (a,)}, [b]],
        }[place]
        self.kept = [self.kept, self.kept] if place == "list" else self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers_kept():
            x = layer(x)
        return x

    def layers_kept(self) -> list[nn.Module]:
        def flat(value: Any) -> list[nn.Module]:
            if isinstance(value, nn.Module):
                return [value]
            parts = value.values() if isinstance(value, dict) else value
            return [layer for part in parts for layer in flat(part)]

        return flat(self.kept)[-2:]


@pytest.mark.parametrize("place", ["list", "tuple", "named tuple", "dict", "nested"])
def test_layers_that_a_model_keeps_in_attributes_are_replaced_there(place: str) -> None:
    model = Keeper(place)
    object.__setattr__(model, "plain", model.layers[0])  # which nn.Module would register
    kept, x = model.kept, torch.randn(3, 64)
    patch(model, "layers")
    assert model.layers_kept() == [*model.layers] and model.plain is model.layers[0]
    assert (model.kept is kept) == (not isinstance(kept, tuple)) and type(model.kept) is type(kept)
    torch.testing.assert_close(model(x), nn.Sequential(*model.layers)(x))
    densify_(model)
    assert model.layers_kept() == [*model.layers] and model.plain is model.layers[0]
    assert {*kinds(model).values()} == {Keeper, nn.ModuleList, nn.Linear}
    prune_(model, BlockSparseConfig(0.5, 32), [torch.randn(200, 64)])
    torch.testing.assert_close(model(x), nn.Sequential(*model.layers)(x))
    assert all(isinstance(layer, BlockSparseLinear) for layer in model.layers_kept())


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a weight": lambda layer: [layer.weight],
    "a bias in a dict": lambda layer: {"bias": (layer.bias,)},
    "a set": lambda layer: {layer},
    "a key": lambda layer: {layer: 1},
    "a partial function": lambda layer: partial(layer),
    "a bound method": lambda layer: layer.forward,
    "a function": lambda layer: lambda x: layer(x),
    "a default": lambda layer: lambda x, own=layer: own(x),
    "an object": lambda layer: SimpleNamespace(own=layer),
}


@pytest.mark.parametrize("what", HOLDERS)
def test_layers_that_something_would_go_on_holding_stay_dense(what: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].holder = HOLDERS[what](model[0])
    report = patch(model, ".*", density=0.5)
    assert [layer.name for layer in report.layers] == ["1"]
    assert "1.holder" in {one.name: one.reason for one in report.skipped}["0"]


def test_a_layer_that_is_compiled_by_itself_goes_on_computing_what_the_model_has() -> None:
    """Its compiled function holds the layer, and would go on calling what was replaced."""
    x, change = torch.randn(3, 64), partial(patch, regex=".*", strict=False)
    for layer, verb in (
        (nn.Linear(64, 64), change),
        (BlockSparseLinear(64, 64, block_shape=32), densify_),
    ):
        compiled: Any = torch.compile(layer, backend="eager")
        model = nn.Sequential(compiled)
        y = model(x)
        assert "holds it" in {one.name: one.reason for one in verb(model).skipped}["0._orig_mod"]
        assert next(iter(compiled.children())) is layer and torch.equal(model(x), y)


def test_attributes_of_layers_and_weights_are_carried_over() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    dense: Any = model[0]
    dense.label, dense.scale, dense.weight.no_decay, dense.bias.rate = "q", torch.ones(2), True, 2.0
    setattr(model[1], "density", 0.3)  # noqa: B010
    model[2].weight.main_grad = torch.zeros(64, 64)
    model[3].compile(backend="eager")
    report = patch(model, ".*", density=0.5)
    layer: Any = model[0]
    assert isinstance(layer, BlockSparseLinear) and (layer.label, layer.scale) == ("q", dense.scale)
    assert layer.weight.no_decay is True and layer.bias.rate == 2.0
    said = {one.name: one.reason for one in report.skipped}
    for name, word in (("1", "density"), ("2", "main_grad"), ("3", "compiled")):
        assert word in said[name]


def quantized(layer: Any) -> Any:
    return layer.to_storage("int8", activations="int8")


UNDER_ANOTHER_DEVICE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "product": lambda model, x: model(x),
    "training": lambda model, x: model(x).square().mean().backward(),
    "initial values": lambda model, x: model[2].reset_parameters(),
    "2:4": lambda model, x: model[2].set_nm((2, 4)).update_mask_(),
    "8 bits": lambda model, x: quantized(model[2])(torch.relu(x)),
    "copy": lambda model, x: copy.deepcopy(model)(x),
    "state": lambda model, x: model.load_state_dict(model.state_dict()),
    "cut": lambda model, x: model[2].cut((0, 32)),
    "dense": lambda model, x: densify_(model),
    "sparsify_": lambda model, x: sparsify_(model, BlockSparseConfig(0.5, 32)),
    "prune_": lambda model, x: prune_(model, BlockSparseConfig(0.5, 32), [x]),
    "quantize_": lambda model, x: tilesparse.quantize_(model, BlockSparseConfig.w8a8(), [x]),
    "reconstruct_": lambda model, x: tilesparse.reconstruct_(model, copy.deepcopy(model), [x, x]),
    "prepare": lambda model, x: tilesparse.prepare_for_inference_(model),
    "activations": lambda model, x: tilesparse.sparsify_activations_(model, [x]),
    "patterns that move": lambda model, x: PatternSchedule(
        model, torch.optim.Adam(model.parameters()), every=2
    ).step(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNDER_ANOTHER_DEVICE)
def test_the_default_device_is_for_new_tensors_alone(name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), BlockSparseLinear(64, 64, block_shape=32))
    x = torch.randn(200, 64)
    with torch.device("meta"):  # whose tensors have no contents, for whoever takes them for others
        UNDER_ANOTHER_DEVICE[name](model, x)
    assert model(x).isfinite().all()
