"""A model that was prepared for inference computes the same, by the ways that are fastest, and says which."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn
from run_zoo import assert_close, outputs, patched
from torch import Tensor, nn
from zoo import ZOO

import tilesparse
from tilesparse import (
    BlockSparseConfig,
    BlockSparseLinear,
    BlockSparseMLP,
    BlockSparseModelPatcher,
    InvalidArgumentError,
    InvalidTypeError,
    prepare_for_inference,
)
from tilesparse.nn.joint import JointLinear
from tilesparse.tuning import document

pytestmark = [pytest.mark.usefixtures("one_thread", "own_file"), pytest.mark.filterwarnings("ignore")]

STORED: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"nm": (2, 4)},
    "compressed": {"nm": (2, 4), "storage": "compressed"},
    "int8": {"storage": "int8"},
    "2:4 int8": {"nm": (2, 4), "storage": "int8"},
    "int4": {"storage": "int4"},
    "int8 W8A8": {"storage": "int8", "activations": "int8"},
}
KINDS = ["llama", "qwen2", "gpt_oss", "bert", "t5", "bart", "clip", "swin", "whisper"]


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No test measures into the user's file, or leaves measurements that count in others."""
    monkeypatch.setenv("TILESPARSE_TUNE_FILE", str(tmp_path / "tune.json"))
    yield tmp_path / "tune.json"
    monkeypatch.setenv("TILESPARSE_TUNE_FILE", "")
    tilesparse.tuning.load()


class Attention(nn.Module):
    """Three layers of one x, which take their names from models that are served."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
        for seed, (name, size) in enumerate(sizes.items()):
            layer = BlockSparseLinear(
                64,
                size,
                bias=name != "k_proj",
                block_shape=32,
                generator=torch.Generator().manual_seed(seed),
                **options,
            )
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).tanh()
        k = self.k_proj(x).tanh()
        return torch.cat([q, k, self.v_proj(x)], -1)


def sparse(**options: Any) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), mlp)
    tilesparse.sparsify_(model, BlockSparseConfig(0.5, 16, **options))
    return model


def prepared(**options: Any) -> tuple[Any, Any]:
    """A model, and the same one prepared."""
    model = Attention(**options).eval()
    twin = copy.deepcopy(model).requires_grad_(False)
    prepare_for_inference(model)
    assert joints(model) == 1
    return twin, model


def layers(model: nn.Module) -> list[BlockSparseLinear]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def joints(model: nn.Module) -> int:
    """The number of products that layers share."""
    shared = [layer.joint for layer in layers(model) if isinstance(layer, JointLinear)]
    return len({id(joint) for joint in shared if joint is not None})


@pytest.mark.parametrize("storage", ["plain", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_prepared_model_computes_the_same(device: str, storage: str) -> None:
    model: Any = sparse(storage=storage).to(device)
    x = randn(7, 64, dtype=torch.float32, device=device)
    expected, names = model.eval()(x), list(model.state_dict())
    model.train()
    report = prepare_for_inference(model, x)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert isinstance(model[2], BlockSparseMLP) and len(report.mlps.mlps) == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    if any("stored as kernels read it" in product.done for product in report.products):
        names = [name for name in names if not name.endswith(".scales")]
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("name", KINDS)
def test_architectures_compute_the_same_bits(name: str) -> None:
    kind = ZOO[name]
    model: Any = patched(kind)
    patcher = BlockSparseModelPatcher()
    patcher.fuse_mlps(model)  # which rounds once less; all else is equal bit for bit
    with torch.no_grad():
        expected = outputs(kind, model)
    state, report = copy.deepcopy(model.state_dict()), prepare_for_inference(model)
    shared = [one for one in report.shared if one.reason is None]
    assert shared and joints(model) == len(shared)
    calls: list[nn.Module] = []
    for layer in layers(model):
        if isinstance(layer, JointLinear) and layer.joint is not None:
            layer.joint.layer.register_forward_hook(lambda module, *_: calls.append(module))
    with torch.inference_mode():
        assert torch.equal(outputs(kind, model), expected)
    assert len(set(calls)) == len(shared)
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(tensor, state[own]) for own, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_prepared_models_are_saved_as_before(name: str, tmp_path: Path) -> None:
    kind = ZOO[name]
    model: Any = patched(kind)
    prepare_for_inference(model)
    expected = outputs(kind, model)
    model.save_pretrained(tmp_path / "pretrained")
    tilesparse.save(model, tmp_path / "saved")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    plain: Any = patched(kind)
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
    loaded = [
        type(kind.skeleton()).from_pretrained(tmp_path / "pretrained").eval(),
        tilesparse.load(kind.skeleton, tmp_path / "saved").eval(),
        plain,
    ]
    for one in loaded:
        assert joints(one) == 0
        assert_close(outputs(kind, one), expected)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_one_x_share_a_product(name: str, dtype: torch.dtype, device: str) -> None:
    model = Attention(**STORED[name]).eval().to(device, dtype)
    x = randn(3, 5, 64, dtype=dtype, device=device)
    expected = model(x).detach()
    report = prepare_for_inference(model)
    names = ("q_proj", "k_proj", "v_proj")
    assert [(one.names, one.reason) for one in report.shared] == [(names, None)]
    assert [product.names for product in report.products] == [names]
    if device == "cpu":
        assert torch.equal(model(x), expected)
    torch.testing.assert_close(model(x), expected)


def test_shared_products_take_the_memory_of_the_layers() -> None:
    _, model = prepared()
    assert isinstance(model.q_proj, JointLinear) and model.q_proj.joint is not None
    whole = model.q_proj.joint.layer.weight.untyped_storage().data_ptr()
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers(model)} == {whole}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_another_x_is_multiplied_by_itself(mode: Any) -> None:
    twin, model = prepared()
    with mode():
        x, other = randn(5, 64, dtype=torch.float32), randn(5, 64, dtype=torch.float32, seed=1)
        model.q_proj(x)
        for name in ("v_proj", "k_proj", "k_proj", "q_proj"):
            assert torch.equal(model.get_submodule(name)(other), twin.get_submodule(name)(other))
        q = model.q_proj(x)
        k = model.k_proj(x)
        assert torch.equal(k, twin.k_proj(x)) and torch.equal(model.k_proj(x), k)
        assert not torch.equal(model.k_proj(x).add_(1), k) and torch.equal(q, twin.q_proj(x))


def test_hooks_see_and_change_what_is_theirs() -> None:
    model = Attention().eval()
    seen: list[str] = []
    for name in ("q_proj", "v_proj"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    model.k_proj.register_forward_hook(lambda layer, args, y: y.mul_(2))
    model.v_proj.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    x = randn(5, 64, dtype=torch.float32)
    with torch.no_grad():
        expected = model(x)
        prepare_for_inference(model)
        assert joints(model) == 1 and torch.equal(model(x), expected)
    assert seen == ["q_proj", "v_proj"] * 2


CHANGES: dict[str, Any] = {
    "state dict": lambda model: model.load_state_dict(Attention(density=0.25).state_dict()),
    "pattern": lambda model: model.k_proj.pattern.update_(Attention().v_proj.pattern),
    "buffer": lambda model: model.k_proj.col_indices.copy_(Attention().v_proj.col_indices),
    "dtype": lambda model: model.double(),
    "storage": lambda model: model.k_proj.to_storage("int8"),
    "2:4": lambda model: model.k_proj.set_nm((2, 4)),
    "parameter": lambda model: setattr(model.k_proj, "weight", nn.Parameter(model.k_proj.weight.clone() + 1)),
    "data": lambda model: setattr(model.k_proj.weight, "data", model.k_proj.weight + 1),
    "in place": lambda model: model.k_proj.weight.mul_(2),
    "bias": lambda model: model.q_proj.bias.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changed_layers_compute_what_they_hold(change: str) -> None:
    twin, model = prepared()
    x = randn(5, 64, dtype=torch.float32)
    before = model(x)
    for one in (twin, model):
        if change == "buffer":
            one.k_proj.slot.copy_(Attention().v_proj.slot)
            one.k_proj.crow_indices.copy_(Attention().v_proj.crow_indices)
        CHANGES[change](one)
    x = x.to(model.q_proj.weight.dtype)
    assert torch.equal(model(x), twin(x)) and not torch.equal(model(x).float(), before)


@torch.no_grad()
def test_expanded_weights_follow_changes() -> None:
    twin, model = prepared(nm=(2, 4))
    x = randn(5, 64, dtype=torch.float32)
    assert torch.equal(model(x), twin(x))
    for change in (lambda layer: layer.weight.mul_(2), lambda layer: layer.mask.logical_not_()):
        for one in (twin, model):
            change(one.v_proj)
        assert torch.equal(model(x), twin(x))
    assert joints(model) == 1


@torch.no_grad()
def test_copies_are_models_of_their_own() -> None:
    twin, model = prepared()
    x = randn(5, 64, dtype=torch.float32)
    copied = copy.deepcopy(model)
    assert joints(copied) == 0 and joints(model) == 1
    copied.k_proj.weight.zero_()
    assert torch.equal(model(x), twin(x)) and not torch.equal(copied(x), twin(x))
    prepare_for_inference(copied)
    assert joints(copied) == 1
    prepare_for_inference(model)
    assert joints(model) == 1 and torch.equal(model(x), twin(x))


def test_weights_that_are_trained_again_have_gradients() -> None:
    twin, model = prepared()
    x = randn(5, 64, dtype=torch.float32)
    for one in (twin, model):
        one.requires_grad_().train()
        one(x).square().sum().backward()
    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


def test_gradients_of_x_pass_shared_products() -> None:
    twin, model = prepared()
    inputs = [randn(5, 64, dtype=torch.float32).requires_grad_() for _ in range(2)]
    for one, x in zip((twin, model), inputs, strict=True):
        one(x).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


def test_exported_and_compiled_models_compute_the_same() -> None:
    twin, model = prepared()
    x = randn(5, 64, dtype=torch.float32)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        assert set(program.state_dict) == set(model.state_dict())
        assert torch.equal(program.module()(x), twin(x))
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(x), twin(x))
        model.double()  # after which it no longer shares
        torch.testing.assert_close(compiled(x.double()), twin.double()(x.double()))


def test_compiled_models_multiply_once() -> None:
    _, model = prepared()
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(randn(5, 64, dtype=torch.float32))
    (graph,) = graphs
    assert sum("dds_nt" in str(node.target) for node in graph.graph.nodes) == 1


class Apart(nn.Module):
    """Layers whose x is not known to be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (BlockSparseLinear(64, 64, block_shape=32) for _ in range(2))

    def written_between(self, x: Tensor) -> Tensor:
        y = self.a(x)
        x.add_(1)
        return y + self.b(x)

    def written_by_another(self, x: Tensor) -> Tensor:
        y = self.a(x)
        torch.add(x, 1, out=x)
        return y + self.b(x)

    def written_by_name(self, x: Tensor) -> Tensor:
        other = x
        y = self.a(x)
        other += 1
        return y + self.b(x)

    def written_in_part(self, x: Tensor) -> Tensor:
        other = x
        y = self.a(x)
        other[0] = 1
        return y + self.b(x)

    def assigned(self, x: Tensor) -> Tensor:
        y = self.a(x)
        x = y
        return self.b(x)

    def assigned_by_itself(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x)

    def sometimes(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.training:
            y = self.b(x)
        return y

    def one_of_two(self, x: Tensor) -> Tensor:
        return self.a(x) if self.training else self.b(x)

    def twice(self, x: Tensor) -> Tensor:
        return self.a(x) + self.a(x)


@pytest.mark.parametrize("how", [name for name, of in vars(Apart).items() if name[0] != "_"])
def test_layers_whose_x_may_change_stay_apart(how: str) -> None:
    kind = type("Kind", (Apart,), {"forward": getattr(Apart, how)})
    model, x = kind().eval(), randn(5, 64, dtype=torch.float32)
    expected = model(x.clone())
    report = prepare_for_inference(model)
    assert not report.shared and joints(model) == 0
    assert torch.equal(model(x.clone()), expected)


def share(layer: Any, other: Any) -> None:
    layer.pattern = other.pattern
    layer.weight = other.weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.k_proj.to_storage("int8"), "they differ in storage: plain, int8"),
        (lambda model: setattr(model.k_proj, "policy", "dense"), "they differ in policy"),
        (lambda model: setattr(model, "k_proj", BlockSparseLinear(64, 64, block_shape=16)), "block_shape"),
        (lambda model: share(model.k_proj, model.v_proj), "another module has, too"),
        (lambda model: setattr(model.k_proj, "forward", partial(model.k_proj.forward)), "forward of its own"),
    ],
)
def test_layers_that_differ_stay_apart(change: Any, reason: str) -> None:
    model = Attention().eval()
    change(model)
    x = randn(5, 64, dtype=torch.float32)
    expected = model(x)
    report = prepare_for_inference(model)
    (one,) = report.shared
    assert one.reason is not None and reason in one.reason and reason in str(report)
    assert joints(model) == 0 and torch.equal(model(x), expected)


def test_dense_layers_stay_beside_shared_products() -> None:
    model = Attention().eval()
    model.q_proj = nn.Linear(64, 128)
    x = randn(5, 64, dtype=torch.float32)
    expected = model(x)
    assert prepare_for_inference(model).shared[0].names == ("k_proj", "v_proj")
    assert torch.equal(model(x), expected)


def test_reports_say_what_is_there(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that do not depend on the machine; the calls of a measurement end with the dense product."""

    def timer(calls: Sequence[Any], *_: Any) -> list[float]:
        return [*range(1, len(calls)), 100.0]

    monkeypatch.setattr("tilesparse.inference.tune", partial(tilesparse.tune, timer=timer))
    kind = ZOO["llama"]
    model: Any = patched(kind)
    report = prepare_for_inference(model, kind.batch(0))
    measured = {one.product: one for one in document.measurements(own_file)[0]}
    named = [name for product in report.products for name in product.names]
    modules = dict(model.named_modules())
    assert sorted(named) == sorted(
        name for name, one in modules.items() if isinstance(one, BlockSparseLinear)
    )
    for product in report.products:
        own = [modules[name] for name in product.names]
        assert ("merged" in product.done) == all(isinstance(layer, JointLinear) for layer in own)
        assert {layer.policy for layer in own} == {product.policy}
        layer = own[0].joint.layer if isinstance(own[0], JointLinear) else own[0]
        assert product.shape == (layer.out_features, layer.in_features)
        assert product.tokens == 64
        what = tilesparse.Product.of(layer, tokens=64)
        assert product.kernel == tilesparse.choose(what, "cpu", policy=product.policy).kernel
        assert product.microseconds == min(measured[what].microseconds.values())
        assert product.dense_microseconds == measured[what].dense_microseconds
        assert len(measured[what].microseconds) == 3
    assert report.seconds_before is not None and report.seconds_before > 0
    assert report.seconds_after is not None and f"{1e3 * report.seconds_after:.2f} ms after" in str(report)
    lines = str(report).splitlines()
    assert sum("merged" in line for line in lines) == 1 and "self_attn.q_proj, k_proj, v_proj (2)" in lines[1]
    assert "2 MLPs fused" in lines


def test_without_a_batch_nothing_is_measured(own_file: Path) -> None:
    report = prepare_for_inference(sparse())
    assert report.seconds_before is None and report.seconds_after is None and not own_file.exists()
    assert {(one.tokens, one.kernel, one.microseconds) for one in report.products} == {(None, None, None)}


def time_dense_as(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure this of dense products, with which the calls of a measurement end; kernels take 2 s or more."""

    def timer(calls: Sequence[Any], *_: Any) -> list[float]:
        return [*range(2, len(calls) + 1), seconds]

    monkeypatch.setattr("tilesparse.inference.tune", partial(tilesparse.tune, timer=timer))


def test_policies_follow_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(7, 64, dtype=torch.float32)
    for dense, policy, kernel in ((1.0, "auto", {"dense"}), (9.0, "sparse", {"cpu_portable"})):
        model = sparse()
        time_dense_as(dense, monkeypatch)
        report = prepare_for_inference(model, x)
        assert {layer.policy for layer in layers(model)} == {policy}
        names = {product.kernel for product in report.products}
        assert names == kernel if policy == "auto" else "dense" not in names
        assert {product.microseconds for product in report.products} == {2e3}
        assert {product.dense_microseconds for product in report.products} == {1e3 * dense}


def test_a_policy_that_was_chosen_stays() -> None:
    model = sparse(policy="dense")
    report = prepare_for_inference(model, randn(7, 64, dtype=torch.float32))
    assert {layer.policy for layer in layers(model)} == {"dense"}
    assert {product.kernel for product in report.products} == {"dense"}


@pytest.mark.parametrize("name", STORED)
def test_weights_that_no_kernel_reads_are_expanded_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    time_dense_as(99.0, monkeypatch)
    model = Attention(**STORED[name]).eval()
    state = copy.deepcopy(model.state_dict())
    x = randn(40, 64, dtype=torch.float32)
    expected = model(x)
    report = prepare_for_inference(model, x)
    (product,) = report.products
    assert ("expanded once" in product.done) == (name not in ("plain", "int8 W8A8"))
    assert product.kernel is not None and product.kernel.startswith("cpu_")
    assert all(torch.equal(tensor, state[own]) for own, tensor in model.state_dict().items())
    torch.testing.assert_close(model(x), expected)


def test_four_bits_of_few_tokens_are_read_as_they_are() -> None:
    model = Attention(storage="int4").eval()
    report = prepare_for_inference(model, randn(3, 64, dtype=torch.float32))
    (product,) = report.products
    assert product.done == ("merged",)
    assert prepare_for_inference(model).products[0].done == ("merged",)
    many = prepare_for_inference(model, randn(9, 64, dtype=torch.float32))
    assert many.products[0].done == ("merged", "expanded once")


@pytest.mark.parametrize(
    "batch",
    [
        lambda x: x,
        lambda x: (x,),
        lambda x: [x],
        lambda x: {"input": x},
    ],
)
def test_batches_are_what_models_take(batch: Any) -> None:
    report = prepare_for_inference(sparse(), batch(randn(2, 3, 64, dtype=torch.float32)))
    assert {product.tokens for product in report.products} == {6}


def test_nothing_is_changed_by_what_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="model must have a block-sparse layer"):
        prepare_for_inference(nn.Linear(3, 3))
    with pytest.raises(InvalidArgumentError, match="0 on the meta device"):
        prepare_for_inference(sparse().to("meta"))
    model: Any = sparse()
    model(randn(7, 64, dtype=torch.float32)).sum().backward()
    with pytest.raises(InvalidArgumentError, match=r"not be in training, got a gradient of 0\.weight"):
        prepare_for_inference(model)
    model.zero_grad()
    with pytest.raises(InvalidTypeError, match="batch must be a tensor, or a mapping"):
        prepare_for_inference(model, "a text")
    with pytest.raises(tilesparse.TileSparseError):
        prepare_for_inference(model, randn(7, 63, dtype=torch.float32))
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert layers(model)[0].policy == "sparse" and not isinstance(model[2], BlockSparseMLP)
