"""`BlockSparseMLP`, by itself and in the place of MLPs of Transformers."""

from __future__ import annotations

import copy
import operator
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from helpers import DEVICES, SIZES, make_pattern, randn, seeded
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.modernbert.modeling_modernbert import ModernBertMLP

import tilesparse
from tilesparse import BlockSparseConfig, BlockSparseLinear, BlockSparseMLP, sparsify_
from tilesparse._runtime import launch
from tilesparse.errors import InvalidArgumentError, UnsupportedError
from tilesparse.model.fuse import fuse_mlps_, mlps_to_fuse, unfuse
from tilesparse.model.replace import densify_, replace_modules
from tilesparse.nn import concatenate
from tilesparse.nn.weight import observe

ACTIVATIONS: dict[str, tuple[str | nn.Module, Callable[[Tensor], Tensor]]] = {
    "none": ("none", lambda t: t),
    "relu": ("relu", torch.relu),
    "gelu": (nn.GELU(), torch.nn.functional.gelu),
    "silu": (nn.SiLU(), torch.nn.functional.silu),
    "tanh": (nn.GELU("tanh"), nn.GELU("tanh")),
}
IMAGES = {"image_size": 16, "patch_size": 8}
GPT2: Any = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 40}
TOKENS: Any = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def layer(ins: int, outs: int, device: str = "cpu", seed: int = 0, **options: Any) -> BlockSparseLinear:
    options = {"block_shape": 16, **options}
    return BlockSparseLinear(ins, outs, generator=seeded(seed), **options).to(device)


def mlp(device: str = "cpu", gated: bool = True, **options: Any) -> BlockSparseMLP:
    gate = layer(64, 96, device, 1) if gated else None
    return BlockSparseMLP(layer(64, 96, device, 2), layer(96, 64, device, 3), gate, **options)


def of_halves(device: str = "cpu", **options: Any) -> BlockSparseMLP:
    """The layers of `mlp` with those of gate and up in one."""
    both = concatenate([layer(64, 96, device, seed) for seed in (1, 2)])
    return BlockSparseMLP(None, layer(96, 64, device, 3), gate_up=both, **options)


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def by_hand(made: BlockSparseMLP, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if made.gated and hasattr(made, "gate_up"):
        gate, factor = made.gate_up(x).chunk(2, -1)
        halves: Tensor = made.down(act(gate) * factor)
        return halves
    up: Tensor = made.up(x)
    y: Tensor = made.down(act(made.gate(x)) * up if made.gated else act(up))
    return y


@pytest.mark.parametrize("form", ["plain", "gated", "halves"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_computes_its_function(
    device: str, activation: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients and without, and a residual in place."""
    monkeypatch.setattr(launch, "MANY_ELEMENTS", 0)
    given, act = ACTIVATIONS[activation]
    options: Any = {"activation": given}
    made = of_halves(device, **options) if form == "halves" else mlp(device, form == "gated", **options)
    assert made.activation_name == (None if activation == "tanh" else activation)
    x, residual = (randn(2, 7, 64, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    expected = by_hand(made, act, x) + residual
    results = made(x, residual=residual), expected
    close(*results)
    parameters = list(made.parameters())
    made_ones, right = (torch.autograd.grad(y.square().sum(), parameters) for y in results)
    close(made_ones, right, tolerance=1e-4)
    with torch.no_grad():
        close(made(x, residual=residual), expected)
        close(made(x) + residual, expected)


@pytest.mark.parametrize(
    "options", [{"nm": (2, 4)}, {"nm": (2, 4), "storage": "compressed"}, {"storage": "int8"}]
)
def test_layers_in_every_storage(options: dict[str, Any]) -> None:
    layers = [layer(*size, block_shape=32, **options) for size in ((64, 96), (96, 64), (64, 96))]
    made, x = BlockSparseMLP(*layers, activation="silu"), torch.randn(5, 64, generator=seeded(1))
    for graded in (True, False):
        with torch.set_grad_enabled(graded):
            close(made(x), by_hand(made, torch.nn.functional.silu, x))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_to_the_second_order(device: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, with block rows of ``up`` that are empty, whose biases have gradients all the same."""
    monkeypatch.setattr(launch, "MANY_ELEMENTS", 0)
    pattern = make_pattern("empty rows and columns", (6, 4), (16, 16))
    up: Any = layer(64, 96, device, pattern=pattern)
    made = BlockSparseMLP(up, layer(96, 64, device, 3), activation=activation).double()
    with torch.no_grad():
        up.bias += 0.1  # where relu has a gradient, also of empty rows
    x = randn(5, 64, dtype=torch.float64, device=device, seed=1).requires_grad_()
    names, parameters = zip(*made.named_parameters(), strict=True)

    def function(x: Tensor, *values: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(made, dict(zip(names, values, strict=True)), x)
        return y

    assert torch.autograd.gradcheck(function, (x, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_one_layer_stands_for_gate_and_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as of two, with the gradients of both, wherever blocks move."""
    monkeypatch.setattr(launch, "MANY_ELEMENTS", 0)
    made, two = of_halves(device, activation="silu"), mlp(device, activation="silu")
    x = randn(9, 64, dtype=torch.float32, device=device, seed=1)
    found = []
    for each in (made, two):
        y = each(x)
        gradients = torch.autograd.grad(y.square().sum(), list(each.parameters()))
        found.append({"y": y, **dict(zip(dict(each.named_parameters()), gradients, strict=True))})
    mine, theirs = found
    for name in ("weight", "bias"):
        theirs[f"gate_up.{name}"] = torch.cat([theirs.pop(f"{role}.{name}") for role in ("gate", "up")])
    close(mine, {name: theirs[name] for name in mine}, 1e-4)
    free = (~made.gate_up.pattern.to_block_mask()).nonzero()
    made.gate_up.pattern.move_blocks_([0, 20], free[[0, -1]])
    for graded in (False, True):
        with torch.set_grad_enabled(graded):
            close(made(x), by_hand(made, torch.nn.functional.silu, x))


def test_dropout_comes_before_the_residual() -> None:
    made, x = mlp(dropout=nn.Dropout(0.5)), torch.randn(9, 64, generator=seeded(1))
    torch.manual_seed(3)
    y = made(x, residual=x)
    torch.manual_seed(3)
    torch.testing.assert_close(y, made(x) + x)
    dropped = ((y - x) == 0).float().mean()
    assert 0.3 < dropped < 0.7
    made.eval()
    torch.testing.assert_close(made(x, residual=x), by_hand(made, torch.nn.functional.gelu, x) + x)


def test_hooks_and_observers_see_what_the_layers_give() -> None:
    made, x, seen = mlp(activation=nn.SiLU()), torch.randn(9, 64, generator=seeded(1)), []
    for module in (made.up, made.gate, made.down, made.activation):
        module.register_forward_hook(lambda module, inputs, y: seen.append((module, inputs[0], y)))
    with torch.no_grad():
        expected = made.down(torch.nn.functional.silu(made.gate(x)) * made.up(x))
        seen.clear()
        torch.testing.assert_close(made(x), expected)
        assert [module for module, _, _ in seen] == [made.gate, made.activation, made.up, made.down]
        for module, given, y in seen:
            assert torch.equal(type(module).forward(module, given), y)
    observed = mlp()
    up: Any = observed.up
    observe(up, lambda y, given: y * 2)
    torch.testing.assert_close(observed(x), by_hand(observed, torch.nn.functional.gelu, x))


def test_layers_refuse_what_they_cannot_do_before_they_compute() -> None:
    x = torch.randn(3, 64)
    for made in (layer(64, 96), layer(64, 96, nm=(2, 4), block_shape=32)):
        y = made(x)
        for options in ({"activation": "swish"}, {"gate": y, "residual": y}, {"gate": y[:1]}):
            with pytest.raises(InvalidArgumentError, match=next(iter(options))):
                made(x, **options)
    with forward_ad.dual_level(), torch.no_grad():
        y = forward_ad.make_dual(y.detach(), torch.ones_like(y))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            layer(64, 96)(x, gate=y)
    parts = of_halves()
    parts.gate_up = layer(64, 96)  # what one of two processes has, and gives
    with pytest.raises(UnsupportedError, match="gate_up must return 192 features, got 96"):
        parts(x)


def test_autocast() -> None:
    made, x = mlp(activation="silu"), torch.randn(9, 64, generator=seeded(1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = made(x, residual=x), by_hand(made, torch.nn.functional.silu, x) + x
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected.float(), rtol=0.02, atol=0.02)


def test_bad_arguments() -> None:
    up, down, both = layer(64, 96), layer(96, 64), layer(64, 192)
    for match, *arguments in (
        ("up", nn.Linear(64, 96), down),
        ("up", None, down),
        ("down", up, nn.Linear(96, 64)),
        ("down must have 96", up, up),
        ("gate must have the shape", up, down, down),
        ("gate_up", None, down, {"gate_up": nn.Linear(64, 192)}),
        ("gate_up", up, down, {"gate_up": both}),
        ("gate_up", None, down, up, {"gate_up": both}),
        ("down must have 48", None, down, {"gate_up": up}),
        ("activation", up, down, {"activation": "swish"}),
        ("activation", up, down, {"activation": torch.relu}),
        ("dropout", up, down, {"dropout": 0.1}),
        ("hidden_dropout", up, down, {"hidden_dropout": 0.1}),
    ):
        options: Any = arguments.pop() if isinstance(arguments[-1], dict) else {}
        with pytest.raises(InvalidArgumentError, match=f"^{match}\\b"):
            BlockSparseMLP(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("block_shape", [(128, 32), (64, 16), (32, 32), (64, 64)])
def test_what_lies_between_narrow_blocks_is_column_major(block_shape: tuple[int, int]) -> None:
    """As the class says, and the same numbers; captured in a graph as well."""
    options: dict[str, Any] = {"block_shape": block_shape, "dtype": torch.bfloat16, "bias": False}
    layers = [
        layer(*size, "cuda", seed, **options)
        for seed, size in enumerate(((256, 512), (512, 256), (256, 512)))
    ]
    made = BlockSparseMLP(*layers, activation="silu").requires_grad_(False)
    for tokens in (300, 1000, 1025, 3000):
        x = randn(tokens, 256, dtype=torch.bfloat16, device="cuda")
        for graded in (False, True):
            with torch.set_grad_enabled(graded):
                hidden = made._hidden(x)
                y = made(x, residual=x)
                narrow = block_shape[0] >= 64 and block_shape[1] <= 32
                assert (hidden.stride(0) == 1) == (narrow and tokens > 1024 and not graded)
                expected = by_hand(made, torch.nn.functional.silu, x) + x
                torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = made(x, residual=x)
        x.copy_(x.flip(0))
        graph.replay()
        assert torch.equal(captured, made(x, residual=x))


# ---- in the place of MLPs of Transformers ----


MODELS: dict[str, tuple[Callable[[], Any], bool, str | None]] = {  # gated, and the activation of kernels
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=1)), True, "silu"),
    "phi3": (lambda: Phi3ForCausalLM(Phi3Config(**SIZES, **TOKENS)), True, "silu"),  # both in one layer
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **TOKENS)), False, None),
    "vit": (lambda: ViTForImageClassification(ViTConfig(**SIZES | IMAGES)), False, "gelu"),
    # In two halves, of which the first is fused.
    "bert": (lambda: BertForSequenceClassification(BertConfig(**SIZES, pad_token_id=2)), False, "gelu"),
}


def given(kind: str) -> Tensor:
    return randn(2, 3, 16, 16, dtype=torch.float32) if kind == "vit" else torch.arange(32).view(2, 16)


def patched(kind: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind][0]().eval()
    sparsify_(model, BlockSparseConfig(0.5, 16), layers=r".*\.(mlp|intermediate)\.")
    return model


def fused(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, BlockSparseMLP)]


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).logits.square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_models_compute_the_same(kind: str, tmp_path: Path) -> None:
    """Forward and backward, copied, compiled, saved and loaded by everybody, and undone."""
    model = patched(kind)
    x, (make, gated, activation) = given(kind), MODELS[kind]

    def agrees(other: Any) -> bool:
        with torch.no_grad():
            close(other(x).logits, expected)
        return True

    with torch.no_grad():
        expected = model(x).logits
    right, parameters, modules = gradients(model, x), list(model.parameters()), dict(model.named_modules())
    calls: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in modules.items()
        if name.endswith((".mlp", ".intermediate"))
    ]
    names = list(model.state_dict())
    assert not fuse_mlps_(model).layers and fused(model) == []
    report = fuse_mlps_(model, x)
    found = [(mlp.name, mlp.gated, mlp.activation) for mlp in report.layers]
    assert found == [(name, gated, activation) for name in fused(model)]
    assert len(report.layers) == 2 and not report.skipped and "(2)" in str(report)
    assert list(model.state_dict()) == names and all(map(operator.is_, model.parameters(), parameters))
    calls.clear()
    assert agrees(model) and calls == fused(model)
    for handle in handles:
        handle.remove()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert agrees(twin) and fused(twin) == fused(model)
    for name, gradient in gradients(model, x).items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-4, atol=1e-6)
    assert agrees(torch.compile(model, backend="aot_eager", fullgraph=True))

    tilesparse.save(model, tmp_path / "own")
    model.save_pretrained(tmp_path / "theirs")
    for loaded in (
        tilesparse.load(make().eval(), tmp_path / "own"),
        tilesparse.load(copy.deepcopy(model), tmp_path / "own"),
        type(model).from_pretrained(tmp_path / "theirs"),
    ):
        fuse_mlps_(loaded, x)
        assert agrees(loaded.eval()) and fused(loaded) == fused(model)

    densify_(model)
    assert not any(isinstance(m, BlockSparseLinear) for m in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, expected, rtol=1e-5, atol=1e-5)


def test_adapters_of_peft() -> None:
    """They stand around the layers of a fused MLP as around others, and are still there when it is undone."""
    model = patched("llama")
    other, x = copy.deepcopy(model), given("llama")
    targets, _ = mlps_to_fuse(model, x)
    replace_modules(model, targets)
    config = peft.LoraConfig(target_modules=["up_proj", "down_proj"], init_lora_weights=False)
    results = []
    with torch.no_grad():
        for base in (model, other):
            torch.manual_seed(0)
            results.append(peft.get_peft_model(base, config).eval()(x).logits)
        close(*results)
        unfuse(model, targets)
        assert not fused(model)
        close(model(x).logits, results[0])


def test_what_is_left_alone_is_reported() -> None:
    model = patched("llama")
    first, second = (block.mlp for block in model.model.layers)
    first.norm = nn.LayerNorm(4)
    second.up_proj = nn.Linear(SIZES["hidden_size"], SIZES["intermediate_size"])
    reasons = {skipped.name: skipped.reason for skipped in fuse_mlps_(model, given("llama")).skipped}
    other = "it has other parts than one to three BlockSparseLinear, an activation and dropouts"
    assert reasons == {
        "model.layers.0.mlp": other,
        "model.layers.1.mlp": "its up_proj is Linear, not BlockSparseLinear",
    }
    with pytest.raises(UnsupportedError, match="it has other parts"):
        BlockSparseMLP.from_module(first)
    with pytest.raises(UnsupportedError, match="it has other parts"):
        BlockSparseMLP.from_module(nn.Sequential())
    model = patched("bert")
    half = model.bert.encoder.layer[0].intermediate
    half.dense = half.dense.to_linear()
    assert not fuse_mlps_(model, given("bert")).skipped and len(fused(model)) == 1
    model = patched("llama")
    for skipped in fuse_mlps_(model).skipped:
        assert skipped.reason == "a call shows what it computes: pass a batch"
    with pytest.raises(UnsupportedError, match="a call shows what it computes: pass x"):
        BlockSparseMLP.from_module(model.model.layers[0].mlp)
    model = patched("vit")
    first, second = (block.mlp for block in model.vit.layers)
    first.forward = first.forward
    second.register_state_dict_post_hook(lambda *_: None)
    text = str(fuse_mlps_(model, given("vit")))
    assert fused(model) == [] and "its forward was replaced" in text and "a hook of its state dict" in text


def test_other_classes_are_known_by_their_calls() -> None:
    model = PhiForCausalLM(PhiConfig(**SIZES, **TOKENS)).eval()
    sparsify_(model, BlockSparseConfig(0.5, 16), layers=r".*\.mlp\.")
    assert [mlp.kind for mlp in fuse_mlps_(model, given("phi")).layers] == ["PhiMLP"] * 2


def test_halves_of_modernbert() -> None:
    module: Any = ModernBertMLP(ModernBertConfig(**SIZES, mlp_dropout=0.5, pad_token_id=2))
    model = nn.ModuleDict({"mlp": module})
    sparsify_(model, BlockSparseConfig(0.5, 16), layers=r".*\.W.")
    x = randn(2, 8, 64, dtype=torch.float32)
    mlp = BlockSparseMLP.from_module(module, x)
    assert mlp.gated and mlp.activation_name == "gelu"
    for training in (False, True):
        results = []
        for one in (module, mlp):
            torch.manual_seed(0)
            results.append(one.train(training)(x))
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ending", [(), (nn.Dropout(0.5),)], ids=["", "dropout"])
@pytest.mark.parametrize("between", [(), (nn.Dropout(0.5),)], ids=["", "hidden_dropout"])
@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU()], ids=["gelu", "relu"])
def test_sequences(
    activation: nn.Module, between: tuple[nn.Module, ...], ending: tuple[nn.Module, ...]
) -> None:
    sequence = nn.Sequential(layer(64, 96), activation, *between, layer(96, 64, seed=1), *ending)
    model, x = nn.Sequential(nn.LayerNorm(64), sequence), randn(5, 64, dtype=torch.float32)
    names = list(model.state_dict())
    results = []
    for fuse in (False, True):
        if fuse:
            report = fuse_mlps_(model)
            assert [(mlp.name, mlp.kind) for mlp in report.layers] == [
                ("1", "Sequential")
            ] and not report.skipped
        for training in (False, True):
            torch.manual_seed(0)
            results.append(model.train(training)(x))
            with torch.no_grad():
                torch.manual_seed(0)
                results.append(model(x))
    for before, after in zip(results[:4], results[4:], strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names


def test_sequences_that_compute_something_else_are_left_alone() -> None:
    up, down = layer(64, 96), layer(96, 64)
    others = [
        nn.Sequential(up, down),
        nn.Sequential(up, nn.GELU("tanh"), down),
        nn.Sequential(up, nn.Dropout(), nn.GELU(), down),
        nn.Sequential(up, nn.GELU(), down, nn.GELU()),
        nn.Sequential(nn.Linear(64, 96), nn.GELU(), down),
    ]
    report = fuse_mlps_(nn.ModuleList(others))
    assert not report.layers and not report.skipped


class OtherMLP(nn.Module):
    """Computes what its method ``of`` does, of two or three layers, an activation and a dropout."""

    def __init__(self, of: Callable[[Any, Tensor], Any], gated: bool) -> None:
        super().__init__()
        self.up, self.down = layer(64, 96), layer(96, 64, seed=1)
        if gated:
            self.gate = layer(64, 96, seed=2)
        self.act, self.drop, self.of = nn.SiLU(), nn.Dropout(0.5), of

    def forward(self, x: Tensor) -> Any:
        return self.of(self, x)


MLPS: dict[str, tuple[Callable[[Any, Tensor], Any], bool, str | None]] = {  # of what, gated, why not fused
    "plain": (lambda self, x: self.down(self.drop(self.act(self.up(x)))), False, None),
    "dropout": (lambda self, x: self.drop(self.down(self.act(self.up(x)))), False, None),
    "names": (lambda self, x: self.down(self.dropout(self.act(self.up(x)))), False, None),
    "gated": (lambda self, x: self.drop(self.down(self.act(self.gate(x)) * self.up(x))), True, None),
    "twice": (
        lambda self, x: self.drop(self.down(self.drop(self.act(self.up(x))))),
        False,
        "it calls drop more than once",
    ),
    "residual": (lambda self, x: x + self.down(self.drop(self.act(self.up(x)))), False, "something else"),
    "factor": (lambda self, x: 1.001 * self.down(self.drop(self.act(self.up(x)))), False, "something else"),
    "in between": (lambda self, x: self.down(1.001 * self.drop(self.act(self.up(x)))), False, "something"),
    "sum": (lambda self, x: self.drop(self.down(self.act(self.gate(x)) + self.up(x))), True, "something"),
    "functional": (
        lambda self, x: nn.functional.dropout(self.down(self.drop(self.act(self.up(x)))), 0.5, self.training),
        False,
        "something else .*, in training",
    ),
    "tuple": (lambda self, x: (self.drop(self.down(self.act(self.up(x)))), None), False, "returns a tuple"),
    "unused": (lambda self, x: self.down(self.act(self.up(x))), False, "it does not call drop"),
    "another x": (lambda self, x: self.drop(self.down(self.act(self.up(x + 1)))), False, "other inputs"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MLPS)
def test_a_call_shows_what_a_module_computes(name: str, dtype: torch.dtype) -> None:
    of, gated, reason = MLPS[name]
    model = nn.Sequential(OtherMLP(of, gated)).to(dtype).eval()
    if name == "names":  # of another role
        model[0].dropout = model[0].__dict__["_modules"].pop("drop")
    model[0].down.bias.data.zero_()
    x = randn(5, 64, dtype=dtype)
    expected, modes = model(x), [module.training for module in model.modules()]
    report = fuse_mlps_(model, x)
    assert [module.training for module in model.modules()] == modes
    if reason is None:
        assert len(report.layers) == 1 and report.layers[0].gated == gated
        torch.testing.assert_close(model(x), expected)
        return
    assert re.search(reason, report.skipped[0].reason) and not fused(model)


def test_inputs_that_show_nothing_fuse_nothing() -> None:
    model = nn.Sequential(OtherMLP(MLPS["gated"][0], True))
    for one in model[0].children():
        if isinstance(one, BlockSparseLinear):
            nn.init.zeros_(one.get_parameter("bias"))
    x = torch.zeros(5, 64)
    (skipped,) = fuse_mlps_(model, x).skipped
    assert "show nothing" in skipped.reason
    nn.init.zeros_(model[0].get_parameter("down.weight"))  # what follows it is not seen
    (skipped,) = fuse_mlps_(model, randn(5, 64, dtype=torch.float32)).skipped
    assert "show nothing" in skipped.reason
