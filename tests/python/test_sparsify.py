"""`sparsify_`, the options that a rule has, and the names that it matches."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import seeded
from torch import Tensor, nn
from torch.masked import masked_tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tilesparse
from tilesparse import BlockPattern, BlockSparseLinear, prune_, sparsify_
from tilesparse._checks import check_block_shape
from tilesparse.config import BlockSparseConfig
from tilesparse.errors import InvalidArgumentError, InvalidTypeError
from tilesparse.model.match import NamePattern, matching
from tilesparse.storage.formats import storage_of
from tilesparse.tuning.product import Product

CONFIG = BlockSparseConfig(0.5, 16)
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def sparse(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)}


def test_every_linear_layer_but_the_output_embedding_becomes_sparse() -> None:
    model = llama()
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    report = sparsify_(model, CONFIG)
    assert sparse(model) == linear - {"lm_head"} == {layer.name for layer in report.layers}
    assert "output embedding" in {one.name: one.reason for one in report.skipped}["lm_head"]
    sparsify_(model, {"lm_head": CONFIG})
    assert sparse(model) == linear


def test_conv1d_and_layers_that_cannot_be_cut() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2))
    assert len(sparsify_(model, CONFIG).layers) == 4
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    report = sparsify_(model, CONFIG)
    assert sparse(model) == {"0"} and "no multiple of 16" in report.skipped[-1].reason


def test_the_filter_takes_the_layer_and_its_name() -> None:
    model, seen = llama(), []

    def filter_fn(module: nn.Module, name: str) -> bool:
        assert type(module) is nn.Linear and model.get_submodule(name) is module
        seen.append(name)
        return "mlp" in name or name == "lm_head"

    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    report = sparsify_(model, CONFIG, filter_fn=filter_fn)
    assert {*seen} == linear
    assert sparse(model) == {name for name in linear if "mlp" in name or name == "lm_head"}
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons["model.layers.0.self_attn.q_proj"] == "filter_fn refuses it"


def test_each_name_has_a_config_of_its_own() -> None:
    model = llama()
    quarter = BlockSparseConfig(0.25, (32, 16), storage="int8", granularity="block", policy="auto")
    sparsify_(model, {"mlp.up_proj": quarter, r"model\.layers\.1": CONFIG})
    layers = {name: model.get_submodule(name) for name in sparse(model)}
    assert {name for name in layers if layers[name].density == 0.25} == {
        f"model.layers.{number}.mlp.up_proj" for number in range(2)
    }
    up = model.model.layers[1].mlp.up_proj
    assert (up.block_shape, up.storage, up.policy, up.scales.dim()) == ((32, 16), "int8", "auto", 1)
    assert len(layers) == 1 + 7


def test_a_dry_run_and_an_error_change_nothing() -> None:
    model = llama()
    modules = dict(model.named_modules())
    dry = sparsify_(model, CONFIG, dry_run=True)
    assert dict(model.named_modules()) == modules
    for config, text in (({}, "config must have"), ({"(": CONFIG}, "config must be a name or a regular")):
        with pytest.raises(InvalidArgumentError, match=text):
            sparsify_(model, config)
    with pytest.raises(InvalidArgumentError, match="each make a layer block-sparse, got 'experts'"):
        sparsify_(model, {"experts": CONFIG, "mlp": CONFIG})
    wrong: list[Any] = [0.5, {"mlp": 0.5}, {"mlp": {"density": 0.5}}]
    for config in wrong:
        with pytest.raises(InvalidTypeError, match=r"config.* must be a"):
            sparsify_(model, config)
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(InvalidArgumentError, match=r"'model\.layers\.1\.mlp\.down_proj': its weight .* NaN"):
        sparsify_(model, CONFIG)
    assert dict(model.named_modules()) == modules
    report = sparsify_(llama(), {"experts": CONFIG, ".*": CONFIG}, strict=False)
    assert (report.notes, report.layers) == (["no layer matches 'experts'"], dry.layers)


# Names.


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("l1", ["l1", "a.l1", "l1.base", "a.l1.base.x"], ["l10", "al1", "a.l10", "l1x.b"]),
        ("mlp.up", ["mlp.up", "x.0.mlp.up", "mlp.up.base"], ["mlp.0.up", "mlpxup", "mlp.upper", "amlp.up"]),
        ("0", ["0", "a.0", "0.b"], ["10", "00", "a.01"]),
        (r"l1", ["l1"], ["l11"]),
        (r"l\d", ["l1", "l10", "l1.a"], ["a.l1"]),
        (r"l1|l2", ["l1", "l10", "l2"], ["a.l1"]),
        ("l1.", ["l1.a", "l10"], ["a.l1.b"]),  # the dot is one of a regular expression
        (".*", ["", "a.b"], []),
        ("", ["", "a.b"], []),
    ],
)
def test_names_match_whole_components_and_regular_expressions_the_start(
    pattern: str, matched: list[str], others: list[str]
) -> None:
    parsed = NamePattern.parse(pattern, "layers")
    assert [name for name in matched + others if parsed.match(name)] == matched


def test_thousands_of_names_are_looked_up_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {number: [f"layers.{number // 64}.experts.{number % 64}.up"] for number in range(4096)}
    names |= {4096: ["up"], 4097: ["up.base", "x.layers.0.experts.0.up"], 4098: ["layers.1"]}
    texts = [own[0] for own in names.values()] + ["experts.3.up", r".*\.7\.up"]
    patterns, tried = [NamePattern.parse(text, "layers") for text in texts], []
    match = NamePattern.match
    monkeypatch.setattr(NamePattern, "match", lambda own, name: tried.append(name) or match(own, name))  # type: ignore[func-returns-value]
    found = matching(patterns, names)
    assert len(tried) == len(names) + 1  # by the regular expression
    assert found[3] == [3, 4099] and found[7] == [7, 4100] and found[64 + 3] == [64 + 3, 4098, 4099]
    # The full name of a module is no end of another's.
    assert found[0] == [0] and found[4096] == [4096] and found[4097] == [4096, 4097]


HALF, WHOLE = BlockSparseConfig(0.5, 16), BlockSparseConfig(1.0, 16)
CHOICES: list[tuple[Any, dict[str, Any], dict[str, float]]] = [
    (HALF, {"layers": "down"}, {"blocks.0.down": 0.5}),
    (HALF, {"layers": "up"}, {"up": 0.5}),  # a full name
    (HALF, {"layers": ["up", r"blocks\.\d"]}, {"up": 0.5, "blocks.0.up": 0.5, "blocks.0.down": 0.5}),
    (HALF, {"exclude": "blocks"}, {"up": 0.5}),
    (HALF, {"exclude": ["down", "up"]}, {"blocks.0.up": 0.5}),
    (HALF, {"filter_fn": lambda _, name: name.endswith("up")}, {"up": 0.5, "blocks.0.up": 0.5}),
    ({"up": None, ".*": HALF}, {}, {"blocks.0.up": 0.5, "blocks.0.down": 0.5}),
    ({"0.up": HALF, ".*up": WHOLE}, {}, {"blocks.0.up": 0.5, "up": 1.0}),
    ({"up": WHOLE, "blocks": HALF}, {"exclude": "down"}, {"blocks.0.up": 0.5, "up": 1.0}),
]
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (HALF, {"exclude": "9", "strict": False}, "exclude must match modules of the model, got '9'"),
    (HALF, {"exclude": "("}, "exclude must be a name or a regular expression"),
    (HALF, {"layers": "9"}, "'9'|no layer is left"),
    ({"up": HALF}, {"layers": "up"}, "layers must be None beside a mapping"),
    ({"up": HALF, "9": None}, {}, "got '9'"),
    ({".*": HALF, "up": WHOLE}, {}, "'up' after '.*'"),
    ({}, {}, "config must have a config"),
]


def two_floors() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(OrderedDict(up=nn.Linear(32, 32), down=nn.Linear(32, 32)))
    return nn.Sequential(OrderedDict(up=nn.Linear(32, 32), blocks=nn.Sequential(block)))


VERBS: dict[str, Callable[..., Any]] = {
    "sparsify_": sparsify_,
    "prune_": lambda model, config, **options: prune_(model, config, [torch.randn(64, 32)], **options),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("config", "options", "expected"), CHOICES)
def test_verbs_choose_layers_alike(
    config: Any, options: dict[str, Any], expected: dict[str, float], verb: str
) -> None:
    model = two_floors()
    VERBS[verb](model, config, **options)
    assert {name: model.get_submodule(name).density for name in sparse(model)} == expected


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("config", "options", "text"), WRONG)
def test_choices_that_find_nothing_are_refused(
    config: Any, options: dict[str, Any], text: str, verb: str
) -> None:
    model = two_floors()
    with pytest.raises(InvalidArgumentError, match=text):
        VERBS[verb](model, config, **options)
    assert not sparse(model)


# Options.


def test_configs_by_name() -> None:
    presets = {
        "int8 W8A8": BlockSparseConfig.w8a8(density=0.25),
        "float8_e4m3fn W8A8": BlockSparseConfig.w8a8("float8_e4m3fn", block_shape=128, granularity="block"),
        "int8": BlockSparseConfig.w8a16(nm=(2, 4)),
        "int4": BlockSparseConfig.w4a16(granularity="block"),
    }
    for name, config in presets.items():
        assert storage_of(config.storage).describe(None, config.activations) == name


def test_block_shape_has_one_default() -> None:
    owners = [getattr(tilesparse, name) for name in tilesparse.__all__]
    owners += [tilesparse.model, BlockSparseConfig, Product]
    modules = [owner for owner in owners if inspect.ismodule(owner)]
    owners += [getattr(module, name) for module in modules for name in getattr(module, "__all__", ())]
    owners = [one for one in owners if not (inspect.isclass(one) and issubclass(one, Exception))]
    functions = [member for owner in owners if inspect.isclass(owner) for member in vars(owner).values()]
    found = set()
    for function in [*owners, *(getattr(one, "__func__", one) for one in functions)]:
        if inspect.isfunction(function) or inspect.isclass(function):
            shape = inspect.signature(function).parameters.get("block_shape")
            if shape is not None and shape.default not in (shape.empty, None):
                found.add((function.__name__, check_block_shape(shape.default)))
    assert {shape for _, shape in found} == {(64, 64)}
    assert {"BlockSparseLinear", "from_linear", "BlockSparseConfig", "Product"} <= {name for name, _ in found}


def gappy() -> Tensor:
    """A weight [64, 64] of multiples of 1/8, half of whose blocks of 32 are zero."""
    weight = torch.randn(64, 64, generator=seeded()).mul(8).round().clamp(-15, 15) / 8
    weight[:32, :32], weight[32:, 32:] = 0, 0
    return weight


CONVERTED: dict[str, Callable[[Tensor], Tensor]] = {
    "bsr": lambda weight: weight.to_sparse_bsr(32),
    "bsr of other blocks": lambda weight: weight.to_sparse_bsr(8),
    "bsc": lambda weight: weight.to_sparse_bsc(32),
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "coo": Tensor.to_sparse,
    "float8": lambda weight: weight.to(torch.float8_e4m3fn),
    "float8 of 5 bits": lambda weight: weight.clamp(-1, 1).to(torch.float8_e5m2),
}
LEFT_ALONE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mkldnn": (Tensor.to_mkldnn, r"layout torch\._mkldnn"),
    "int8": (lambda weight: weight.to(torch.int8), r"torch\.int8"),
    "quantized": (lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), r"torch\.qint8"),
    "complex": (lambda weight: weight.to(torch.complex64), r"torch\.complex64"),
    "another class": (lambda weight: masked_tensor(weight, weight > 0), r"MaskedTensor"),
}


def stored(weight: Tensor) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", CONVERTED)
def test_weights_that_pytorch_stores_otherwise_are_converted(name: str) -> None:
    weight = CONVERTED[name](gappy())
    plain = weight.to_dense().float() if weight.layout != torch.strided else weight.float()
    model: Any = stored(weight)
    report = sparsify_(model, BlockSparseConfig(0.5, 32))
    assert [layer.name for layer in report.layers] == ["0", "1"]
    pattern = BlockPattern.full((64, 64), block_shape=32)
    for layer in (model[0], BlockSparseLinear.from_linear(stored(weight)[0], pattern=pattern)):
        assert torch.equal(layer.to_linear().weight, plain) and not layer.weight.requires_grad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_weights_that_cannot_be_read_are_left_alone_with_the_reason(name: str) -> None:
    make, reason = LEFT_ALONE[name]
    model = stored(make(gappy()))
    report = sparsify_(model, BlockSparseConfig(0.5, 32))
    assert [layer.name for layer in report.layers] == ["1"]
    assert re.search(reason, {layer.name: layer.reason for layer in report.skipped}["0"])
    with pytest.raises(InvalidArgumentError, match=rf"linear must have a weight .* read: .*{reason}"):
        BlockSparseLinear.from_linear(model[0], block_shape=32)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_pruning_reads_sparse_weights() -> None:
    batches = [torch.randn(200, 64, generator=seeded())]
    reports = []
    for weight in (gappy(), gappy().to_sparse_bsr(32), gappy().to_sparse_csr()):
        torch.manual_seed(0)
        model = stored(weight)
        reports.append((str(prune_(model, BlockSparseConfig(0.25, 32), batches)), model(batches[0])))
    for report, y in reports[1:]:
        assert report == reports[0][0]
        torch.testing.assert_close(y, reports[0][1])
