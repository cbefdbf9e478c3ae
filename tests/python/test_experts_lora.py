"""Adapters of experts: LoRA of PEFT and adapters of blocks, merged, saved and loaded."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import seeded
from peft import LoraConfig, PeftModel, get_peft_model
from test_experts import (
    BLOCK,
    calibration,
    close,
    dense_experts,
    gradients,
    routed,
    sparse_experts,
    sparse_experts_of,
    sparsified,
)
from torch import Tensor, nn

import tilesparse as ts
from tilesparse.errors import UnsupportedError
from tilesparse.integrations.peft import LoraExperts, MergeLossWarning, merge_loss
from tilesparse.nn.experts import ExpertsLinear

TARGETS = ["gate_up", "down"]


class Holder(nn.Module):
    """A model with experts, as PEFT needs one."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *inputs: Tensor) -> Any:
        return self.experts(*inputs)


def adapted(experts: nn.Module, r: int = 4, **options: Any) -> Any:
    """Return a PEFT model with adapters that are not zero."""
    torch.manual_seed(1)
    names = [name for name in (*TARGETS, "up") if name in dict(experts.named_children())]
    model = get_peft_model(Holder(experts), LoraConfig(target_modules=names, r=r, lora_alpha=8, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return model


def updates(model: Any, name: str = "default") -> dict[str, Tensor]:
    """Return scaling B_e A_e [experts, out, in] of both projections, by the documented layout."""
    found = {}
    for own, layer in model.base_model.model.experts.named_children():
        if isinstance(layer, LoraExperts):
            a, b = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
            experts, r = layer.get_base_layer().experts, layer.r[name]
            found[own] = layer.scaling[name] * torch.stack(
                [b[:, expert::experts] @ a[expert * r : (expert + 1) * r] for expert in range(experts)]
            )
    return found


def with_updates(dense: Any, weights: dict[str, Tensor], deltas: dict[str, Tensor]) -> Any:
    """Return dense experts with these weights, and updates added."""
    dense = copy.deepcopy(dense)
    with torch.no_grad():
        for name, tensor in weights.items():
            dense.get_parameter(name).copy_(tensor)
        for own, delta in deltas.items():
            weight = dense.get_parameter(f"{own}_proj")
            weight.add_(delta if weight.shape == delta.shape and not dense.is_transposed else delta.mT)
    return dense


@pytest.mark.parametrize("r", [4, 16, 20])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h", "deepseek_v3"])
def test_lora_adds_each_experts_own_product(kind: str, r: int) -> None:
    model = adapted(sparse_experts(kind).requires_grad_(False), r)
    for only in (None, 1):  # the other experts have no tokens
        inputs = routed(dense_experts(kind), torch.float32, only=only)
        dense = with_updates(dense_experts(kind), sparse_experts(kind).to_dense(), updates(model))
        close(model(*inputs), dense(*inputs))
        assert len(updates(model)) == 2
    with model.disable_adapter():
        close(model(*inputs), sparse_experts(kind)(*inputs))


@pytest.mark.parametrize("r", [4, 16, 24])
def test_a_single_expert_has_lora(r: int) -> None:
    """Its factors are blocks as they lie, which no copy makes contiguous."""
    layers = (
        ExpertsLinear(width, features, experts=1, bias=False, block_shape=BLOCK, generator=seeded())
        for width, features in ((64, 128), (64, 32))
    )
    experts = ts.BlockSparseExperts(*layers)
    weights = experts.to_dense()
    model = adapted(experts, r)
    deltas = updates(model)
    x, index, scale = torch.randn(7, 64, generator=seeded(1)), torch.zeros(7, 1).long(), torch.ones(7, 1)
    gate, up = (x @ (weights["gate_up_proj"] + deltas["gate_up"])[0].T).chunk(2, -1)
    expected = (nn.functional.silu(gate) * up) @ (weights["down_proj"] + deltas["down"])[0].T
    y = model(x, index, scale)
    close(y, expected)
    y.sum().backward()
    layer = model.base_model.model.experts.down
    assert layer.lora_A["default"].weight.grad.any() and layer.lora_B["default"].weight.grad.any()


def test_gradients_of_lora_are_those_of_the_dense_update() -> None:
    model = adapted(sparse_experts("mixtral").requires_grad_(False))
    inputs = routed(dense_experts("mixtral"), torch.float32)
    dense = with_updates(dense_experts("mixtral"), sparse_experts("mixtral").to_dense(), updates(model))
    _, of_dense = gradients(dense, inputs)
    x, index, weights = inputs
    x = x.clone().requires_grad_()
    y = model(x, index, weights)
    y.backward(torch.randn(y.shape, generator=seeded(3)))
    assert x.grad is not None
    close(x.grad, of_dense["x"])
    for own in TARGETS:
        layer = getattr(model.base_model.model.experts, own)
        assert layer.get_base_layer().weight.grad is None
        a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
        slope, r, experts = of_dense[f"{own}_proj"], 4, 4
        for expert in range(experts):
            rows, columns = slice(expert * r, (expert + 1) * r), slice(expert, None, experts)
            close(a.grad[rows], layer.scaling["default"] * b[:, columns].T @ slope[expert])
            close(b.grad[:, columns], layer.scaling["default"] * slope[expert] @ a[rows].T)


@pytest.mark.parametrize(("nm", "density"), [(None, 1.0), (None, 0.5), ((2, 4), 0.5)])
def test_merging_keeps_what_the_pattern_keeps_and_unmerging_restores_bits(nm: Any, density: float) -> None:
    sparse = sparse_experts("mixtral", density, nm=nm, block_shape=32 if nm else BLOCK)
    before, original = copy.deepcopy(sparse.state_dict()), sparse.to_dense()
    model, inputs = adapted(sparse), routed(dense_experts("mixtral"), torch.float32)
    deltas, losses = updates(model), merge_loss(model)
    for own, delta in deltas.items():
        outside = delta[original[f"{own}_proj"] == 0].norm() / delta.norm()
        (loss,) = [loss for name, loss in losses.items() if name.endswith(own)]
        assert loss == pytest.approx(float(outside), abs=1e-3)
    with pytest.warns(MergeLossWarning) if density < 1 else nullcontext():
        model.merge_adapter()
    merged = {
        name: tensor + deltas[name.removesuffix("_proj")] * (tensor != 0) for name, tensor in original.items()
    }
    close(model(*inputs), with_updates(dense_experts("mixtral"), merged, {})(*inputs))
    model.unmerge_adapter()
    for name, tensor in before.items():
        own, _, rest = name.partition(".")
        layer = getattr(model.base_model.model.experts, own).get_base_layer()
        assert torch.equal(layer.state_dict()[rest], tensor), name


@pytest.mark.filterwarnings("ignore::tilesparse.integrations.peft.MergeLossWarning")
def test_models_with_adapters_are_trained_saved_loaded_and_merged(tmp_path: Path) -> None:
    (batch,), base = calibration("qwen3_moe", 1), sparsified("qwen3_moe")
    torch.manual_seed(0)
    expected = base(**batch).logits
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", r"gate_up", "down"], r=4))
    torch.testing.assert_close(model(**batch).logits, expected)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    trained = model.eval()(**batch).logits
    model.save_pretrained(tmp_path)
    other = PeftModel.from_pretrained(sparsified("qwen3_moe"), tmp_path).eval()
    assert torch.equal(other(**batch).logits, trained)
    whole = other.merge_and_unload()
    assert [{*one.projections()} for one in sparse_experts_of(whole).values()] == [{"gate_up", "down"}] * 2
    assert not torch.equal(whole(**batch).logits, expected)


def test_several_adapters_and_storages() -> None:
    sparse = sparse_experts("mixtral", storage="int8", block_shape=32)
    model = adapted(sparse)
    model.add_adapter("other", LoraConfig(target_modules=TARGETS, r=2, lora_alpha=2))
    inputs = routed(dense_experts("mixtral"), torch.float32)
    first = model(*inputs)
    model.set_adapter("other")
    assert not torch.equal(model(*inputs), first)
    model.set_adapter("default")
    assert torch.equal(model(*inputs), first)
    with pytest.raises(UnsupportedError, match="storage 'plain'"):
        model.merge_adapter()


def test_what_lora_of_experts_does_not_know_is_refused() -> None:
    for option, value in (
        ("lora_bias", True),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", "pissa"),
        ("use_dora", True),
    ):
        options: Any = {option: value}
        with pytest.raises(UnsupportedError, match=f"'eva'|{option}"):
            get_peft_model(Holder(sparse_experts("mixtral")), LoraConfig(target_modules=TARGETS, **options))


def test_all_linear_leaves_experts_out_and_says_so() -> None:
    with pytest.warns(UserWarning, match="leaves experts without an adapter"):
        model = get_peft_model(sparsified("mixtral"), LoraConfig(target_modules="all-linear"))
    assert not any(isinstance(module, LoraExperts) for module in model.modules())


def test_lora_is_compiled_and_runs_under_autocast() -> None:
    model = adapted(sparse_experts("mixtral"))
    inputs = routed(dense_experts("mixtral"), torch.float32)
    expected = model(*inputs)
    compiled = torch.compile(model.base_model.model.experts, backend="aot_eager")
    close(compiled(*inputs), expected)
    with torch.autocast("cpu", torch.bfloat16):
        under = model(*inputs)
    close(under, expected, 0.05)
