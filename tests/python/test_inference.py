"""A model that was prepared for inference computes the same, by the ways that are fastest, and says which."""

from __future__ import annotations

import copy
import gc
import operator
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn, seeded
from run_zoo import assert_close, outputs, patched
from torch import Tensor, nn
from zoo import ZOO

import tilesparse
from tilesparse import BlockSparseConfig, BlockSparseLinear, BlockSparseMLP, prepare_for_inference_
from tilesparse.errors import InvalidArgumentError, InvalidTypeError
from tilesparse.model.fuse import fuse_mlps_
from tilesparse.nn.merged import MergedProduct, product_of
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


def time_dense_as(seconds: float, monkeypatch: pytest.MonkeyPatch, first: int = 2) -> None:
    """Measure this of dense products, with which the calls of a measurement end; of kernels 2 s or more."""

    def timer(calls: Sequence[Any], *_: Any) -> list[float]:
        return [*range(first, len(calls) + first - 1), seconds]

    monkeypatch.setattr("tilesparse.tuning.measure.milliseconds", timer)


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
        for seed, (name, size) in enumerate({"q_proj": 128, "k_proj": 64, "v_proj": 64}.items()):
            own: Any = {"bias": name != "k_proj", "block_shape": 32, "generator": seeded(seed)}
            self.add_module(name, BlockSparseLinear(64, size, **own, **options))

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
    prepare_for_inference_(model, tokens())
    assert len(merged(model)) == 1
    return twin, model


def tokens(seed: int = 0) -> Tensor:
    return randn(5, 64, dtype=torch.float32, seed=seed)


def layers(model: nn.Module) -> list[BlockSparseLinear]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def merged(model: nn.Module) -> list[MergedProduct]:
    """The products that layers share."""
    shared = [product for layer in layers(model) if (product := product_of(layer)) is not None]
    return list(dict.fromkeys(shared))


@pytest.mark.parametrize("storage", ["plain", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_prepared_model_computes_the_same(device: str, storage: str) -> None:
    model: Any = sparse(storage=storage).to(device)
    x = randn(7, 64, dtype=torch.float32, device=device)
    expected, names = model.eval()(x), list(model.state_dict())
    model.train()
    report = prepare_for_inference_(model, x)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert isinstance(model[2], BlockSparseMLP) and report.facts["mlps"] == ["2"]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    if any("stored as kernels read it" in product.done for product in report.layers):
        names = [name for name in names if not name.endswith(".scales")]
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("name", KINDS)
def test_architectures_compute_the_same_bits(name: str) -> None:
    kind = ZOO[name]
    model: Any = patched(kind)
    fuse_mlps_(model, kind.batch(0))  # which rounds once less; all else is equal bit for bit
    with torch.no_grad():
        expected = outputs(kind, model)
    state, report = copy.deepcopy(model.state_dict()), prepare_for_inference_(model, kind.batch(0))
    shared = {one.names for one in report.layers if "merged" in one.done}
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
    prepare_for_inference_(model, kind.batch(0))
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
    report = prepare_for_inference_(model, x)
    names = ("q_proj", "k_proj", "v_proj")
    assert not report.skipped
    assert [product.names for product in report.layers] == [names]
    if device == "cpu":
        assert torch.equal(model(x), expected)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_another_x_is_multiplied_by_itself(mode: Any) -> None:
    twin, model = prepared()
    with mode():
        x, other = tokens(), tokens(1)
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
    x = tokens()
    with torch.no_grad():
        expected = model(x)
        prepare_for_inference_(model, x)
        del seen[2:]
        assert len(merged(model)) == 1 and torch.equal(model(x), expected)
    assert seen == ["q_proj", "v_proj"] * 2


class Writing(Attention):
    """Writes to x between its layers in a way that no batch has shown."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.write: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        x, parts = x.clone(), []
        for name in ("q_proj", "k_proj", "v_proj"):
            parts.append(self.get_submodule(name)(x))
            self.write(x)
        return torch.cat(parts, -1)


def doubled(x: Tensor) -> None:
    view = x.view(-1)
    torch.mul(view, 2, out=view)


def write_in_hook(layer: nn.Module, args: Any, *_: Any) -> None:
    args[0].add_(1)


WRITES: dict[str, Any] = {
    "module": lambda model: setattr(model, "write", model.relu),
    "view": lambda model: setattr(model, "write", doubled),
    "data": lambda model: setattr(model, "write", lambda x: setattr(x, "data", x + 1)),
    "hook": lambda model: model.q_proj.register_forward_hook(write_in_hook),
    "pre-hook": lambda model: model.v_proj.register_forward_pre_hook(write_in_hook),
}


UNCOUNTED = [("hook", torch.inference_mode), ("pre-hook", torch.inference_mode)]


@pytest.mark.parametrize(("how", "mode"), [*((how, torch.no_grad) for how in WRITES), *UNCOUNTED])
def test_what_is_written_to_between_layers_counts(how: str, mode: Any) -> None:
    model = Writing().eval()
    twin = copy.deepcopy(model)
    prepare_for_inference_(model, tokens())
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
    prepare_for_inference_(model, tokens())
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

    @torch.inference_mode()
    def work(number: int) -> bool:
        return all(torch.equal(model(inputs[number]), expected[number]) for _ in range(50))

    with ThreadPoolExecutor(len(inputs)) as threads:
        assert all(threads.map(work, range(len(inputs))))


@pytest.mark.parametrize("trained", ["bias", "v_proj.bias", "v_proj.weight", "", "nothing"])
def test_what_is_trained_has_gradients(trained: str) -> None:
    twin, model = prepared()
    inputs = [tokens().requires_grad_() for _ in range(2)]
    for one, x in zip((twin, model), inputs, strict=True):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name.endswith(trained))
        one.train(trained == "")(x).square().sum().backward()
    for (name, mine), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is not None) == name.endswith(trained)
        torch.testing.assert_close(mine.grad, wanted.grad)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


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
    x = tokens()
    before = model(x)
    for one in (twin, model):
        if "buffer" in change:
            one.k_proj.slot.data.copy_(Attention().v_proj.slot)
            one.k_proj.crow_indices.data.copy_(Attention().v_proj.crow_indices)
        CHANGES[change](one)
    x = x.to(model.q_proj.weight.dtype)
    assert torch.equal(model(x), twin(x)) and not torch.equal(model(x).float(), before)


@torch.no_grad()
def test_copies_are_models_of_their_own() -> None:
    twin, model = prepared()
    whole = merged(model)[0].whole.weight.untyped_storage().data_ptr()  # the memory of all layers
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers(model)} == {whole}
    x, copied = tokens(), copy.deepcopy(model)
    assert not merged(copied) and len(merged(model)) == 1
    copied.k_proj.weight.zero_()
    assert torch.equal(model(x), twin(x)) and not torch.equal(copied(x), twin(x))
    for one in (copied, model):
        prepare_for_inference_(one, x)
        assert len(merged(one)) == 1
    assert torch.equal(model(x), twin(x))


def test_exported_and_compiled_models_compute_the_same() -> None:
    twin, model = prepared()
    x = tokens()
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        assert set(program.state_dict) == set(model.state_dict())
        assert torch.equal(program.module()(x), twin(x))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), twin(x))
        model.double()  # after which it no longer shares
        torch.testing.assert_close(compiled(x.double()), twin.double()(x.double()))


def test_compiled_models_multiply_once() -> None:
    _, model = prepared()
    graphs: list[Any] = []
    with torch.no_grad():
        keep: Any = lambda graph, _: (graphs.append(graph), graph)[1]  # noqa: E731
        torch.compile(model, backend=keep, fullgraph=True)(tokens())
    (graph,) = graphs
    assert sum("dds_nt" in str(node.target) for node in graph.graph.nodes) == 1


def test_layers_of_a_kind_share_compiled_code() -> None:
    graphs: list[Any] = []
    keep: Any = lambda graph, _: (graphs.append(graph), graph)[1]  # noqa: E731
    for model in [prepared()[1] for _ in range(3)]:
        model.compile(backend=keep, fullgraph=True)
        with torch.no_grad():
            model(tokens())
    assert len(graphs) == 1


class Apart(nn.Module):
    """Layers whose x is not known to be the same."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = (BlockSparseLinear(64, 64, block_shape=32) for _ in range(2))
        self.how = APART[how]

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


APART: dict[str, Any] = {
    "written": lambda self, x: self.a(x) + self.b(x.add_(1)),
    "written by another": lambda self, x: self.a(x) + self.b(torch.add(x, 1, out=x)),
    "written in part": lambda self, x: self.a(x) + (x[0].fill_(1), self.b(x))[1],
    "one after the other": lambda self, x: self.b(self.a(x)),
    "one of two": lambda self, x: self.a(x) if self.training else self.b(x),
    "twice": lambda self, x: self.a(x) + self.a(x),
}


@pytest.mark.parametrize("how", APART)
def test_layers_whose_x_may_change_stay_apart(how: str) -> None:
    model, x = Apart(how).eval(), tokens()
    expected = model(x.clone())
    report = prepare_for_inference_(model, x.clone())
    assert not report.skipped and not merged(model) and torch.equal(model(x.clone()), expected)


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


@pytest.mark.parametrize(
    ("batch", "names"), [((tokens(),), ["k", "q", "v"]), ((tokens(), tokens(1)), ["k", "v"])]
)
@torch.no_grad()
def test_layers_that_have_one_x_in_every_call_share(batch: Any, names: list[str]) -> None:
    model = Cross().eval()
    expected = model(*batch)
    report = prepare_for_inference_(model, batch)
    assert [sorted(one.names) for one in report.layers if "merged" in one.done] == [names]
    torch.testing.assert_close(model(*batch), expected)


@torch.no_grad()
def test_a_shared_product_that_gives_something_else_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, result = Attention().eval(), MergedProduct.result
    expected, parameters = model(tokens()), list(model.parameters())

    def wrong(self: MergedProduct, number: int, x: Tensor) -> Tensor | None:
        y = result(self, number, x)
        return y if y is None or number < 2 else y + 0.1

    monkeypatch.setattr(MergedProduct, "result", wrong)
    report = prepare_for_inference_(model, tokens())
    assert not merged(model) and "v_proj (product of one x): their results differed" in str(report)
    assert all(map(operator.is_, model.parameters(), parameters)) and torch.equal(model(tokens()), expected)


def share(layer: Any, other: Any) -> None:
    layer.pattern, layer.weight = other.pattern, other.weight


DIFFERING: dict[str, Any] = {
    "they differ in storage: plain, int8": lambda model: model.k_proj.to_storage("int8"),
    "they differ in policy": lambda model: setattr(model.k_proj, "policy", "dense"),
    "they differ in use_fast_accum": lambda model: setattr(model.k_proj, "use_fast_accum", True),
    "block_shape": lambda model: setattr(model, "k_proj", BlockSparseLinear(64, 64, block_shape=16)),
    "another module has, too": lambda model: share(model.k_proj, model.v_proj),
    "forward of its own": lambda model: setattr(model.k_proj, "forward", partial(model.k_proj.forward)),
    "": lambda model: setattr(model, "q_proj", nn.Linear(64, 128)),  # the others share
}


@pytest.mark.parametrize("reason", DIFFERING)
def test_layers_that_differ_stay_apart(reason: str) -> None:
    model, x = Attention().eval(), tokens()
    DIFFERING[reason](model)
    expected = model(x)
    report = prepare_for_inference_(model, x)
    assert torch.equal(model(x), expected)
    if reason:
        (one,) = report.skipped
        assert reason in one.reason and reason in str(report) and not merged(model)
    else:
        assert report.layers[0].names == ("k_proj", "v_proj")


def test_reports_say_what_is_there(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that do not depend on the machine; the calls of a measurement end with the dense product."""
    time_dense_as(100.0, monkeypatch, first=1)
    kind = ZOO["llama"]
    model: Any = patched(kind)
    report = prepare_for_inference_(model, kind.batch(0))
    measured = {one.product: one for one in store.measurements(own_file)[0]}
    modules = {name: one for name, one in model.named_modules() if isinstance(one, BlockSparseLinear)}
    assert sorted(name for product in report.layers for name in product.names) == sorted(modules)
    for product in report.layers:
        own = [modules[name] for name in product.names]
        shared = {product_of(layer) for layer in own}
        assert len(shared) == 1 and ("merged" in product.done) == (shared != {None})
        assert {layer.policy for layer in own} == {product.policy} and product.tokens == 64
        layer = getattr(shared.pop(), "whole", own[0])
        what = tilesparse.tuning.Product.of(layer, tokens=64)
        assert product.kernel == tilesparse.tuning.choose(what, "cpu", policy=product.policy).kernel
        assert product.microseconds == min(measured[what].microseconds.values())
        assert product.dense_microseconds == measured[what].dense_microseconds
        assert len(measured[what].microseconds) == 3
    assert report.facts["seconds_before"] > 0
    assert f"{1e3 * report.facts['seconds_after']:.2f} ms after" in str(report)
    lines = str(report).splitlines()
    assert sum("merged" in line for line in lines) == 1 and "self_attn.q_proj, k_proj, v_proj (2)" in lines[1]
    assert "2 MLPs fused: model.layers.*.mlp (2)" in lines


def test_without_a_batch_nothing_is_measured(own_file: Path) -> None:
    report = prepare_for_inference_(sparse())
    assert "seconds_before" not in report.facts and not own_file.exists()
    assert {(one.tokens, one.kernel, one.microseconds) for one in report.layers} == {(None, None, None)}


def test_policies_follow_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(7, 64, dtype=torch.float32)
    for dense, policy, kernel in ((1.0, "auto", {"dense"}), (9.0, "sparse", {"cpu_portable"})):
        model = sparse()
        time_dense_as(dense, monkeypatch)
        report = prepare_for_inference_(model, x)
        assert {layer.policy for layer in layers(model)} == {policy}
        names = {product.kernel for product in report.layers}
        assert names == kernel if policy == "auto" else "dense" not in names
        assert {product.microseconds for product in report.layers} == {2e3}
        assert {product.dense_microseconds for product in report.layers} == {1e3 * dense}
    model = sparse(policy="dense")  # one that was chosen stays
    assert {product.kernel for product in prepare_for_inference_(model, x).layers} == {"dense"}
    assert {layer.policy for layer in layers(model)} == {"dense"}


@pytest.mark.parametrize("name", STORED)
def test_weights_that_no_kernel_reads_are_expanded_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    time_dense_as(99.0, monkeypatch)
    model = Attention(**STORED[name]).eval()
    state = copy.deepcopy(model.state_dict())
    x = randn(40, 64, dtype=torch.float32)
    expected = model(x)
    report = prepare_for_inference_(model, x)
    (product,) = report.layers
    assert ("dequantized once" in product.done) == (name not in ("plain", "int8 W8A8"))
    assert product.kernel is not None and product.kernel.startswith("cpu_")
    assert all(torch.equal(tensor, state[own]) for own, tensor in model.state_dict().items())
    torch.testing.assert_close(model(x), expected)


def test_four_bits_of_few_tokens_are_read_as_they_are() -> None:
    model = Attention(storage="int4").eval()
    for count, done in ((3, ()), (None, ()), (9, ("dequantized once",))):
        batch = () if count is None else (randn(count, 64, dtype=torch.float32),)
        assert prepare_for_inference_(model, *batch).layers[0].done == ("merged", *done)


def test_batches_are_what_models_take() -> None:
    x = randn(2, 3, 64, dtype=torch.float32)
    for batch in (x, (x,), [x], {"input": x}):
        assert {product.tokens for product in prepare_for_inference_(sparse(), batch).layers} == {6}


def test_nothing_is_changed_by_what_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="model must have a block-sparse layer"):
        prepare_for_inference_(nn.Linear(3, 3))
    with pytest.raises(InvalidArgumentError, match="0 on the meta device"):
        prepare_for_inference_(sparse().to("meta"))
    model: Any = sparse()
    model(randn(7, 64, dtype=torch.float32)).sum().backward()
    with pytest.raises(InvalidArgumentError, match=r"not be in training, got a gradient of 0\.weight"):
        prepare_for_inference_(model)
    model.zero_grad()
    with pytest.raises(InvalidTypeError, match="batch must be a tensor, or a mapping"):
        prepare_for_inference_(model, "a text")
    with pytest.raises(tilesparse.TileSparseError):
        prepare_for_inference_(model, randn(7, 63, dtype=torch.float32))
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
        prepare_for_inference_(model, tokens())
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
    prepare_for_inference_(Features(), (features,))
    assert list(features) == ["x"]
