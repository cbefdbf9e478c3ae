"""LoRA of PEFT on block-sparse layers, by PEFT's own functions alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from helpers import DEVICES, dense_weight, randn, run_anew, seeded
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from test_experts import sparsified
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from tilesparse import BlockSparseConfig, BlockSparseLinear, sparsify_
from tilesparse.errors import InvalidArgumentError, UnsupportedError
from tilesparse.integrations.peft import LoraLinear, MergeLossWarning, merge_loss
from tilesparse.nn.weight import dense_blocks

FORMS: list[dict[str, Any]] = [
    {},
    {"nm": (2, 4)},
    {"nm": (2, 4), "storage": "compressed"},
    {"storage": "int8"},
    {"storage": "int4"},
    {"storage": "float8_e4m3fn"},
    {"nm": (2, 4), "storage": "float8_e4m3fn"},
]


class Network(nn.Module):
    """A block-sparse layer, a dense one, and a block-sparse one again."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        generator = seeded(1)
        self.up = BlockSparseLinear(
            64, 128, dtype=dtype, generator=generator, **{"block_shape": 32, **options}
        )
        self.mix = nn.Linear(128, 96, dtype=dtype)
        self.down = BlockSparseLinear(
            96, 64, dtype=dtype, generator=generator, **{"block_shape": 32, **options}
        )
        with torch.no_grad():
            self.mix.weight.copy_(randn(96, 128, dtype=dtype) / 12)
            self.mix.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.mix(torch.relu(self.up(x)))))
        return y


def adapted(model: nn.Module, *targets: str, **options: Any) -> PeftModel:
    """With an adapter that does something, as after training."""
    options = {"r": 4, "target_modules": list(targets or ("up", "down")), **options}
    return moved(get_peft_model(model, LoraConfig(**options)))


def moved(model: PeftModel, name: str = "default", seed: int = 0) -> PeftModel:
    with torch.no_grad():
        for number, (key, parameter) in enumerate(model.named_parameters()):
            if f".{name}." in key:
                parameter.copy_(randn(*parameter.shape, dtype=parameter.dtype, seed=seed + number) / 8)
    return model


def delta_of(layer: LoraLinear, name: str = "default") -> Tensor:
    """scaling B A in float64 on the host."""
    a, b = (factor[name].weight.detach().cpu().double() for factor in (layer.lora_A, layer.lora_B))
    return b @ a * layer.scaling[name]


def kept_by(layer: BlockSparseLinear) -> Tensor:
    """1 where the dense weight may differ from zero."""
    ones = torch.ones(len(layer.weight), *layer.block_shape)
    return dense_weight(ones if layer.mask is None else layer.mask, layer.pattern)


def dense_of(layer: BlockSparseLinear) -> Tensor:
    return dense_weight(dense_blocks(layer), layer.pattern)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_lora_is_that_of_the_dense_weight(device: str, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = adapted(Network(**options).to(device), lora_bias=True)
    layer = model.base_model.model.up
    assert isinstance(layer, LoraLinear) and layer.base_layer.storage == options.get("storage", "plain")
    x = randn(7, 64, dtype=torch.float32, device=device).requires_grad_()
    y = layer(x)
    y.square().sum().backward()

    a, b = (
        factor["default"].weight.detach().cpu().double().requires_grad_()
        for factor in (layer.lora_A, layer.lora_B)
    )
    x64 = x.detach().cpu().double().requires_grad_()
    bias = layer.bias.detach() + layer.lora_B["default"].bias.detach() * layer.scaling["default"]
    weight = dense_of(layer.base_layer) + b @ a * layer.scaling["default"]
    expected = x64 @ weight.t() + bias.cpu().double()
    expected.square().sum().backward()
    actual = [y, x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]
    for own, reference in zip(actual, [expected, x64.grad, a.grad, b.grad], strict=True):
        torch.testing.assert_close(
            own, reference, rtol=1e-3, atol=1e-3, check_dtype=False, check_device=False
        )
    assert layer.base_layer.weight.grad is None and layer.base_layer.bias.grad is None


def test_an_adapter_of_the_dense_model_fits_the_sparse_one(tmp_path: Path) -> None:
    model = Network()
    dense = Network()
    for name in ("up", "down"):
        setattr(dense, name, getattr(model, name).to_linear())
    on_dense = adapted(dense, use_rslora=True)
    on_dense.save_pretrained(tmp_path)
    x = randn(3, 64, dtype=torch.float32)
    on_sparse = PeftModel.from_pretrained(model, tmp_path)
    torch.testing.assert_close(on_sparse(x), on_dense(x))


@pytest.mark.parametrize(
    ("first", "options"), [("import tilesparse, peft", {}), ("import peft, tilesparse", {"storage": "int8"})]
)
def test_a_saved_adapter_works_in_a_fresh_process(
    tmp_path: Path, first: str, options: dict[str, Any]
) -> None:
    model = adapted(Network(**options))
    model.save_pretrained(tmp_path)
    x = randn(3, 64, dtype=torch.float32)
    torch.save({"x": x, "y": model(x), "state": Network(**options).state_dict()}, tmp_path / "expected.pt")
    program = f"""
{first}
import torch
expected = torch.load({str(tmp_path / "expected.pt")!r})
from test_peft import Network
model = Network(**{options!r})
model.load_state_dict(expected["state"])
model = peft.PeftModel.from_pretrained(model, {str(tmp_path)!r})
assert torch.equal(model(expected["x"]), expected["y"])
"""
    run_anew(program)


def test_experts_have_no_lora() -> None:
    with pytest.raises(UnsupportedError, match="target_modules must not name experts"):
        get_peft_model(sparsified("mixtral"), LoraConfig(target_modules=["down"]))
    with pytest.warns(UserWarning, match="leaves block-sparse experts without an adapter"):
        get_peft_model(sparsified("mixtral"), LoraConfig(target_modules="all-linear"))


def test_several_adapters() -> None:
    x, base = randn(3, 64, dtype=torch.float32), Network()
    plain = base(x)
    model = adapted(base)
    first = model(x)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up"]))
    moved(model, "second", seed=50)
    assert torch.equal(model(x), first)
    model.set_adapter("second")
    second = model(x)
    assert not torch.allclose(second, first)
    up, down = model.base_model.model.up, model.base_model.model.down
    torch.testing.assert_close(
        up(x), (x.double() @ (dense_of(up.base_layer) + delta_of(up, "second")).t() + up.bias).float()
    )
    assert down.active_adapters == ["second"] and "second" not in down.lora_A
    with model.disable_adapter():
        assert torch.equal(model(x), plain)
    both = torch.cat([x, x, x])
    names = ["default"] * 3 + ["second"] * 3 + ["__base__"] * 3
    model.eval()
    torch.testing.assert_close(model(both, adapter_names=names), torch.cat([first, second, plain]))
    model.set_adapter("default")
    model.delete_adapter("second")
    assert torch.equal(model(x), first)


def test_adapters_are_combined_as_dense_ones() -> None:
    options = {"target_modules": ["up"], "fan_in_fan_out": True}  # as for GPT-2, whose layers were a Conv1D
    model = adapted(Network(), lora_alpha=4, **options)
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=2, **options))
    moved(model, "second", seed=50)
    model.add_weighted_adapter(["default", "second"], [1.0, 0.5], "sum", combination_type="svd", svd_rank=6)
    layer = model.base_model.model.up
    expected = delta_of(layer) + 0.5 * delta_of(layer, "second")
    torch.testing.assert_close(delta_of(layer, "sum"), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.get_delta_weight("default"), delta_of(layer).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", FORMS[:2], ids=str)
def test_merging_keeps_zeros_and_says_what_it_loses(device: str, options: dict[str, Any]) -> None:
    base = Network(**options).to(device)
    model = adapted(base, lora_bias=True)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up"], lora_alpha=3))
    moved(model, "second", seed=50)
    layer = model.base_model.model.up
    delta = delta_of(layer) + delta_of(layer, "second")
    kept = kept_by(layer.base_layer)
    lost = float((delta * (1 - kept)).norm() / delta.norm())
    assert lost > 0.5
    both = ["default", "second"]
    losses = merge_loss(model, both)
    assert list(losses) == ["base_model.model.up", "base_model.model.down"]
    assert losses["base_model.model.up"] == pytest.approx(lost, rel=1e-4)
    weight, pattern = dense_of(layer.base_layer), layer.base_layer.pattern.to("cpu")
    bias = layer.bias.detach() + layer.lora_B["default"].bias.detach() * layer.scaling["default"]
    sparse = layer.base_layer
    with pytest.warns(
        MergeLossWarning, match=rf"layer 'up': .* default, second has lost {lost:.1%} of the change"
    ):
        merged = model.merge_and_unload(adapter_names=both, safe_merge=True)
    assert merged is base and base.up is sparse and sparse.pattern == pattern
    torch.testing.assert_close(dense_of(sparse), weight + delta * kept, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sparse.bias.detach(), bias)
    assert not any("lora" in name or "unmerged" in name for name, _ in merged.named_modules())


@pytest.mark.parametrize("options", FORMS[:2], ids=str)
def test_unmerging_is_exact(options: dict[str, Any]) -> None:
    base = Network(torch.bfloat16, **options)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = adapted(base, lora_bias=True)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up"]))
    x = randn(3, 64, dtype=torch.bfloat16)
    unmerged = model(x)
    keys = list(model.state_dict())
    with pytest.warns(MergeLossWarning):
        model.merge_adapter(["default"])
    with pytest.warns(UserWarning, match="Already following adapters were merged"):
        model.merge_adapter(["second"])
    assert list(model.state_dict()) == keys
    assert model.base_model.model.up.merged_adapters == ["default", "second"]
    assert not torch.equal(model(x), unmerged)
    model.unmerge_adapter()
    assert torch.equal(model(x), unmerged)
    after = model.unload().state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.filterwarnings("ignore::tilesparse.integrations.peft.MergeLossWarning")
@pytest.mark.parametrize("storage", ["int8", "compressed"])
def test_unmerging_is_exact_after_another_storage(storage: str) -> None:
    model = adapted(Network(nm=(2, 4)))
    base = model.base_model.model.up.base_layer
    weight = base.weight.detach().clone()
    model.merge_adapter()
    base.to_storage(storage)
    model.unmerge_adapter()
    assert base.storage == "plain" and torch.equal(base.weight, weight)


@pytest.mark.filterwarnings("ignore::tilesparse.integrations.peft.MergeLossWarning")
@pytest.mark.parametrize("density", [0.25, 0.5])
def test_unmerging_from_another_pattern_is_refused(density: float) -> None:
    model = adapted(Network(), "up")
    layer = model.base_model.model.up
    model.merge_adapter()
    other = BlockSparseLinear(64, 128, density=density, generator=seeded(7), block_shape=32)
    layer.base_layer.load_state_dict(other.state_dict())
    with pytest.raises(UnsupportedError, match=r"the pattern that layer '.*up' had when it was merged"):
        model.unmerge_adapter()
    assert torch.equal(layer.base_layer.weight, other.weight) and layer.merged


def test_the_base_stays_frozen_in_all_storages() -> None:
    model = adapted(Network(storage="int8"))
    for layer in model.modules():
        if isinstance(layer, BlockSparseLinear):
            layer.to_storage("plain")
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


def test_merging_into_a_full_pattern_loses_nothing() -> None:
    model = adapted(Network(density=1.0))
    x = randn(3, 64, dtype=torch.float32)
    unmerged = model(x)
    assert max(merge_loss(model).values()) < 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), unmerged)


@pytest.mark.gpu
def test_packed_weights_follow_a_merge() -> None:
    model = adapted(Network(block_shape=16).eval().cuda(), "up")
    layer = model.base_model.model.up
    x = randn(3, 64, dtype=torch.float32, device="cuda")
    layer.base_layer.prepack()
    with torch.no_grad():
        layer(x)
        with pytest.warns(MergeLossWarning):
            model.merge_adapter()
        y = layer(x)
        layer.base_layer.prepack(False)
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize("options", FORMS[2:], ids=str)
def test_merging_into_fewer_bytes_is_refused(options: dict[str, Any]) -> None:
    model = adapted(Network(**options))
    layer = model.base_model.model.up
    before = layer.base_layer.weight.detach().clone()
    with pytest.raises(
        UnsupportedError, match=rf"layer 'up', got '{options['storage']}'; call to_storage\('plain'\)"
    ):
        model.merge_adapter()
    assert torch.equal(layer.base_layer.weight.view(torch.uint8), before.view(torch.uint8))
    for name in ("up", "down"):
        getattr(model.base_model.model, name).base_layer.to_storage("plain")
    with pytest.warns(MergeLossWarning):
        model.merge_and_unload()


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_a_merge_that_one_layer_refuses_changes_none(merge: str) -> None:
    model = adapted(Network())
    up, down = model.base_model.model.up, model.base_model.model.down
    down.base_layer.to_storage("int8")
    before = up.base_layer.weight.clone()
    with pytest.raises(UnsupportedError, match="layer 'down', got 'int8'"):
        getattr(model, merge)()
    assert torch.equal(up.base_layer.weight, before) and model.base_model.model.up is up and not up.merged
    model.add_adapter("second", LoraConfig(target_modules=["up"], init_lora_weights=False))
    with pytest.warns(MergeLossWarning):  # of other layers nothing is asked
        model.merge_adapter(adapter_names=["second"])
    assert up.merged_adapters == ["second"]


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_a_merge_into_a_weight_that_two_layers_share_is_refused(merge: str) -> None:
    base: Any = nn.Sequential(*(BlockSparseLinear(64, 64, block_shape=32) for _ in range(2)))
    base[1].pattern = base[0].pattern
    base[1].weight = base[0].weight
    model = adapted(base, "0")
    before = base[1].weight.clone()
    with pytest.raises(InvalidArgumentError, match=r"layer 'model\.0', got one that another layer has"):
        getattr(model, merge)()
    assert torch.equal(base[1].weight, before)


def test_a_merge_without_a_bias_or_with_infinities_is_refused() -> None:
    with pytest.warns(UserWarning, match="no bias"):
        model = adapted(Network(bias=False), "up", lora_bias=True)
    with pytest.raises(UnsupportedError, match="merge needs a bias of layer 'up'"):
        model.merge_adapter()
    model = adapted(Network(), "up")
    layer = model.base_model.model.up
    before = layer.base_layer.weight.clone()
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(torch.inf)
    with pytest.raises(InvalidArgumentError, match=r"safe_merge: the sum with \['default'\] is not finite"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, before) and not layer.merged


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_dora": True}, "use_dora must be off, since layer 'up' is block-sparse"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must .*'up' is block-sparse, got 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights must "),
        (
            {"target_modules": None, "target_parameters": ["up.weight"]},
            "target_parameters: 'weight' of a block-sparse",
        ),
    ],
)
def test_what_takes_the_weight_for_a_dense_one_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        get_peft_model(Network(), LoraConfig(**{"target_modules": ["up"], **options}))


def test_all_linear_includes_block_sparse_layers() -> None:
    model = get_peft_model(Network(), LoraConfig(target_modules="all-linear"))
    assert model.peft_config["default"].target_modules == {"up", "mix", "down"}
    model.add_adapter("second", LoraConfig(target_modules="all-linear"))
    assert set(model.targeted_module_names) == {"up", "mix", "down"}
    assert model.peft_config["second"].target_modules == {"up", "mix", "down"}
    assert all("second" in getattr(model.base_model.model, name).lora_A for name in ("up", "mix", "down"))


def test_a_block_sparse_layer_that_is_trained_whole_is_saved(tmp_path: Path) -> None:
    model = adapted(Network(), "up", modules_to_save=["down"])
    x = randn(3, 64, dtype=torch.float32)
    y = model(x)
    y.square().sum().backward()
    trained = model.base_model.model.down.modules_to_save["default"]
    assert trained.weight.grad is not None and trained.weight.grad.any()
    with torch.no_grad():
        trained.weight.mul_(2)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(Network(), tmp_path)
    assert torch.equal(loaded(x), model(x)) and not torch.equal(model(x), y)


@pytest.mark.parametrize(
    "options", [{}, {"storage": "int8"}, {"storage": "float8_e4m3fn"}, {"storage": "int4"}], ids=str
)
@pytest.mark.parametrize("raised", [True, False])
def test_adapters_of_a_model_in_16_bits(options: dict[str, Any], raised: bool) -> None:
    model = get_peft_model(
        Network(torch.bfloat16, **options),
        LoraConfig(target_modules=["up", "down"]),
        autocast_adapter_dtype=raised,
    )
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    assert dtypes == {torch.float32 if raised else torch.bfloat16}
    y = model(randn(3, 64, dtype=torch.bfloat16))
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert model.base_model.model.up.lora_B["default"].weight.grad is not None


def test_autocast_and_compile() -> None:
    model = adapted(Network())
    x = randn(3, 64, dtype=torch.float32)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)


# Models of Transformers.


def patched(model: nn.Module, regex: str) -> Any:
    report = sparsify_(model, BlockSparseConfig(0.5, 16), layers=regex)
    assert report.layers and not report.skipped
    return model


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=1, max_position_embeddings=32, **sizes)
    return patched(LlamaForCausalLM(config), r".*(mlp|self_attn)\..*_proj")


TARGETS = ["q_proj", "down_proj"]


def tokens(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(2, 64, (rows, 8), generator=seeded())
    return {"input_ids": ids, "labels": ids.clone()}


def test_models_of_transformers_train_save_and_merge(tmp_path: Path) -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=TARGETS, r=4))
    adapters = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert len(adapters) == 4
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    batch = tokens(4)
    before = model(**batch).loss.item()
    rows = [{name: value[row] for name, value in batch.items()} for row in range(4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        gradient_checkpointing=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=rows).train()
    model.eval()
    assert model(**batch).loss.item() < before
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(llama(), tmp_path).eval()
    logits = loaded(**batch).logits
    torch.testing.assert_close(logits, model(**batch).logits)
    with pytest.warns(MergeLossWarning):
        merged = loaded.merge_and_unload()
    assert not any(isinstance(module, LoraLinear) for module in merged.modules())
    sparse = [module for module in merged.modules() if isinstance(module, BlockSparseLinear)]
    assert sparse and all(layer.density == 0.5 for layer in sparse)
    assert merged(**batch).logits.isfinite().all()


@pytest.mark.parametrize("storage", ["plain", "int8"])
def test_base_and_adapter_come_back_from_their_folders(storage: str, tmp_path: Path) -> None:
    base = llama()
    for module in base.modules():
        if isinstance(module, BlockSparseLinear):
            module.to_storage(storage)
    base.save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = adapted(loaded, *TARGETS)
    model.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    layer = again.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, LoraLinear) and layer.base_layer.storage == storage
    assert torch.equal(again(**tokens()).logits, model.eval()(**tokens()).logits)


def test_models_of_transformers_add_adapters_by_themselves() -> None:
    model, batch = llama(), tokens()
    plain = model(**batch).logits
    try:
        model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(f"Transformers {transformers.__version__} refuses PEFT {peft.__version__}: {error}")
    assert isinstance(model.model.layers[0].self_attn.q_proj, LoraLinear)
    assert not torch.allclose(model(**batch).logits, plain)
    model.disable_adapters()
    assert torch.equal(model(**batch).logits, plain)


def test_all_linear_leaves_the_output_embedding_out() -> None:
    model = patched(llama(), "lm_head")
    assert isinstance(model.lm_head, BlockSparseLinear)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    names = {name.rpartition(".")[2] for name in adapted.targeted_module_names}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
