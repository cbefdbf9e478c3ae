"""A model that was prepared for inference computes the same, by the ways that are fastest, and says which."""

from __future__ import annotations

import copy
import gc
import operator
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
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
from tilesparse.nn.merged import MergedProduct
from tilesparse.tuning import store

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
    """No test measures into the user's file, or leaves measurements that count in others.

    Dense products are slow, so that what is chosen does not depend on the machine.
    """
    time_dense_as(99.0, monkeypatch)
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
    prepare_for_inference(model, tokens())
    assert len(merged(model)) == 1
    return twin, model


def tokens(seed: int = 0) -> Tensor:
    return randn(5, 64, dtype=torch.float32, seed=seed)


def layers(model: nn.Module) -> list[BlockSparseLinear]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def merged(model: nn.Module) -> list[MergedProduct]:
    """The products that layers share."""
    shared = [layer.merged[0] for layer in layers(model) if layer.merged is not None]
    return list(dict.fromkeys(shared))


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
    patcher.fuse_mlps(model, kind.batch(0))  # which rounds once less; all else is equal bit for bit
    with torch.no_grad():
        expected = outputs(kind, model)
    state, report = copy.deepcopy(model.state_dict()), prepare_for_inference(model, kind.batch(0))
    shared = [one for one in report.shared if one.reason is None]
    assert shared and len(merged(model)) == len(shared)
    calls: list[nn.Module] = []
    for product in merged(model):
        product.whole.register_forward_hook(lambda module, *_: calls.append(module))
    with torch.inference_mode():
        assert torch.equal(outputs(kind, model), expected)
    assert len(set(calls)) == len(shared)
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(tensor, state[own]) for own, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_prepared_models_are_saved_as_before(name: str, tmp_path: Path) -> None:
    kind = ZOO[name]
    model: Any = patched(kind)
    prepare_for_inference(model, kind.batch(0))
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
        assert not merged(one)
        assert_close(outputs(kind, one), expected)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_one_x_share_a_product(name: str, dtype: torch.dtype, device: str) -> None:
    model = Attention(**STORED[name]).eval().to(device, dtype)
    x = randn(3, 5, 64, dtype=dtype, device=device)
    expected = model(x).detach()
    report = prepare_for_inference(model, x)
    names = ("q_proj", "k_proj", "v_proj")
    assert [(one.names, one.reason) for one in report.shared] == [(names, None)]
    assert [product.names for product in report.products] == [names]
    if device == "cpu":
        assert torch.equal(model(x), expected)
    torch.testing.assert_close(model(x), expected)


def test_shared_products_take_the_memory_of_the_layers() -> None:
    _, model = prepared()
    whole = merged(model)[0].whole.weight.untyped_storage().data_ptr()
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
        prepare_for_inference(model, x)
        del seen[2:]
        assert len(merged(model)) == 1 and torch.equal(model(x), expected)
    assert seen == ["q_proj", "v_proj"] * 2


class Writing(Attention):
    """Writes to x between its layers in a way that no batch has shown."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.how = nn.ReLU(inplace=True), "not"

    def forward(self, x: Tensor) -> Tensor:
        x, parts = x.clone(), []
        for name in ("q_proj", "k_proj", "v_proj"):
            parts.append(self.get_submodule(name)(x))
            if self.how == "module":
                self.relu(x)
            elif self.how == "view":
                view = x.view(-1)
                torch.mul(view, 2, out=view)
            elif self.how == "data":
                x.data = x + 1
        return torch.cat(parts, -1)


def write_in_hook(layer: nn.Module, args: Any, *_: Any) -> None:
    args[0].add_(1)


WRITES: dict[str, Any] = {
    "module": lambda model: setattr(model, "how", "module"),
    "view": lambda model: setattr(model, "how", "view"),
    "data": lambda model: setattr(model, "how", "data"),
    "hook": lambda model: model.q_proj.register_forward_hook(write_in_hook),
    "pre-hook": lambda model: model.v_proj.register_forward_pre_hook(write_in_hook),
}
COUNTED = [(how, torch.no_grad) for how in WRITES]
UNCOUNTED = [("hook", torch.inference_mode), ("pre-hook", torch.inference_mode)]


@pytest.mark.parametrize(("how", "mode"), [*COUNTED, *UNCOUNTED])
def test_what_is_written_to_between_layers_counts(how: str, mode: Any) -> None:
    model = Writing().eval()
    twin = copy.deepcopy(model)
    prepare_for_inference(model, tokens())
    for one in (twin, model):
        WRITES[how](one)
    with mode():
        assert len(merged(model)) == 1 and torch.equal(model(tokens()), twin(tokens()))


class Modes(Attention):
    """Calls one of its layers in another mode."""

    mode: Any = nullcontext

    def forward(self, x: Tensor) -> Any:
        q = self.q_proj(x)
        with self.mode():
            return q, self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("mode", [torch.enable_grad, partial(torch.autocast, "cpu")])
@torch.no_grad()
def test_results_are_of_the_mode_of_their_call(mode: Any) -> None:
    model = Modes().eval()
    twin = copy.deepcopy(model).requires_grad_(False)
    prepare_for_inference(model, tokens())
    model.mode = twin.mode = mode
    x = tokens().requires_grad_()
    for mine, wanted in zip(model(x), twin(x), strict=True):
        assert mine.dtype == wanted.dtype and mine.requires_grad == wanted.requires_grad
        assert torch.equal(mine, wanted)


@torch.no_grad()
def test_nothing_is_kept_behind_a_call() -> None:
    twin, model = prepared()

    class Ended(Exception):
        pass

    def end(*_: Any) -> None:
        raise Ended

    x = tokens()
    kept = weakref.ref(x)
    model.q_proj(x)
    model(x)
    handle = model.k_proj.register_forward_pre_hook(end)
    with pytest.raises(Ended):
        model(x)
    handle.remove()
    del x
    gc.collect()
    assert kept() is None
    x = tokens()
    assert model.q_proj(x).add_(1) is not None and torch.equal(model.k_proj(x), twin.k_proj(x))


def test_threads_take_their_own_results() -> None:
    twin, model = prepared()
    inputs = [tokens(seed) for seed in range(4)]
    expected = [twin(x) for x in inputs]
    wrong: list[int] = []

    @torch.inference_mode()
    def work(number: int) -> None:
        for _ in range(50):
            if not torch.equal(model(inputs[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("trained", ["bias", "v_proj.bias", "v_proj.weight"])
def test_parameters_that_are_trained_have_gradients(trained: str) -> None:
    twin, model = prepared()
    for one in (twin, model):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name.endswith(trained))
        one(tokens()).square().sum().backward()
    for (name, mine), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is not None) == name.endswith(trained)
        torch.testing.assert_close(mine.grad, wanted.grad)


CHANGES: dict[str, Any] = {
    "state dict": lambda model: model.load_state_dict(Attention(density=0.25).state_dict()),
    "pattern": lambda model: model.k_proj.pattern.update_(Attention().v_proj.pattern),
    "buffer": lambda model: model.k_proj.col_indices.copy_(Attention().v_proj.col_indices),
    "data of a buffer": lambda model: model.k_proj.col_indices.data.copy_(Attention().v_proj.col_indices),
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
        if "buffer" in change:
            one.k_proj.slot.data.copy_(Attention().v_proj.slot)
            one.k_proj.crow_indices.data.copy_(Attention().v_proj.crow_indices)
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
    assert len(merged(model)) == 1


@torch.no_grad()
def test_copies_are_models_of_their_own() -> None:
    twin, model = prepared()
    x = randn(5, 64, dtype=torch.float32)
    copied = copy.deepcopy(model)
    assert not merged(copied) and len(merged(model)) == 1
    copied.k_proj.weight.zero_()
    assert torch.equal(model(x), twin(x)) and not torch.equal(copied(x), twin(x))
    prepare_for_inference(copied, x)
    assert len(merged(copied)) == 1
    prepare_for_inference(model, x)
    assert len(merged(model)) == 1 and torch.equal(model(x), twin(x))


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
    report = prepare_for_inference(model, x.clone())
    assert not report.shared and not merged(model)
    assert torch.equal(model(x.clone()), expected)


class Cross(nn.Module):
    """Calls the same layers together in two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (BlockSparseLinear(64, 64, block_shape=16) for _ in range(3))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if other is None:
            k, v = self.k(x), self.v(x)
        else:
            k, v = self.k(other), self.v(other)
        return self.q(x) * k + v


class Twice(nn.Module):
    """Calls one attention for itself, then for something else, and shares a layer with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Cross(), Cross(), Cross()
        self.third.q = self.second.q

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.third(self.second(self.first(x, y)))


@pytest.mark.parametrize(
    ("make", "batch", "groups"),
    [
        (Cross, tokens(), [("q", "k", "v")]),
        (Cross, (tokens(), tokens(1)), [("k", "v")]),
        (Twice, tokens(), [("first.k", "first.v"), ("second.k", "second.v"), ("third.k", "third.v")]),
    ],
)
@torch.no_grad()
def test_layers_that_have_one_x_in_every_call_share(make: Any, batch: Any, groups: Any) -> None:
    model = make().eval()
    inputs = batch if isinstance(batch, tuple) else (batch,)
    expected = model(*inputs)
    report = prepare_for_inference(model, batch)
    assert sorted(tuple(sorted(one.names)) for one in report.shared) == [tuple(sorted(one)) for one in groups]
    assert len(merged(model)) == len(groups)
    torch.testing.assert_close(model(*inputs), expected)


@torch.no_grad()
def test_a_shared_product_that_gives_something_else_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, result = Attention().eval(), MergedProduct.result
    expected, parameters = model(tokens()), list(model.parameters())

    def wrong(self: MergedProduct, number: int, x: Tensor) -> Tensor | None:
        y = result(self, number, x)
        return y if y is None or number < 2 else y + 0.1

    monkeypatch.setattr(MergedProduct, "result", wrong)
    report = prepare_for_inference(model, tokens())
    assert not merged(model) and "not merged: q_proj, k_proj, v_proj: their results differed" in str(report)
    assert all(map(operator.is_, model.parameters(), parameters)) and torch.equal(model(tokens()), expected)


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
    report = prepare_for_inference(model, x)
    (one,) = report.shared
    assert one.reason is not None and reason in one.reason and reason in str(report)
    assert not merged(model) and torch.equal(model(x), expected)


def test_dense_layers_stay_beside_shared_products() -> None:
    model = Attention().eval()
    model.q_proj = nn.Linear(64, 128)
    x = randn(5, 64, dtype=torch.float32)
    expected = model(x)
    assert prepare_for_inference(model, x).shared[0].names == ("k_proj", "v_proj")
    assert torch.equal(model(x), expected)


def test_reports_say_what_is_there(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that do not depend on the machine; the calls of a measurement end with the dense product."""

    def timer(calls: Sequence[Any], *_: Any) -> list[float]:
        return [*range(1, len(calls)), 100.0]

    monkeypatch.setattr("tilesparse.tuning.measure.milliseconds", timer)
    kind = ZOO["llama"]
    model: Any = patched(kind)
    report = prepare_for_inference(model, kind.batch(0))
    measured = {one.product: one for one in store.measurements(own_file)[0]}
    named = [name for product in report.products for name in product.names]
    modules = dict(model.named_modules())
    assert sorted(named) == sorted(
        name for name, one in modules.items() if isinstance(one, BlockSparseLinear)
    )
    for product in report.products:
        own = [modules[name] for name in product.names]
        assert ("merged" in product.done) == all(layer.merged is not None for layer in own)
        assert {layer.policy for layer in own} == {product.policy}
        layer = own[0] if own[0].merged is None else own[0].merged[0].whole
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

    monkeypatch.setattr("tilesparse.tuning.measure.milliseconds", timer)


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


class Whole(nn.Module):
    """An attention and an MLP: something of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.rest = Attention(), sparse()
        self.out = BlockSparseLinear(256, 64, block_shape=32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest(self.out(self.attention(x)))
        return y


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_a_failure_on_the_way_changes_nothing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Whole()
    model.attention.k_proj.bias = None
    model.rest[2][0].bias.requires_grad_(False)
    model.attention.eval()
    modules, parameters = list(model.modules()), list(model.parameters())
    modes = [(module.training, dict(module._forward_hooks)) for module in modules]
    records = [parameter.requires_grad for parameter in parameters]
    state = copy.deepcopy(model.state_dict())

    def fail(*_: Any, **__: Any) -> None:
        assert merged(model) and isinstance(model.rest[2], BlockSparseMLP)
        raise error

    monkeypatch.setattr("tilesparse.model.inference.tune", fail)
    with pytest.raises(type(error)):
        prepare_for_inference(model, tokens())
    assert all(map(operator.is_, model.modules(), modules))
    assert all(map(operator.is_, model.parameters(), parameters))
    assert [(module.training, dict(module._forward_hooks)) for module in modules] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == records
    assert not merged(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_model_that_writes_into_its_batch_leaves_that_of_the_caller_alone() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = sparse()

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            features["y"] = self.own(features["x"])
            return features

    features = {"x": tokens()}
    prepare_for_inference(Features(), (features,))
    assert list(features) == ["x"]
