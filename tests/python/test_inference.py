"""A model that was prepared for inference computes the same, by the ways that are fastest, and says which."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
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


def tokens(seed: int = 0) -> Tensor:
    return randn(5, 64, dtype=torch.float32, seed=seed)


def layers(model: nn.Module) -> list[BlockSparseLinear]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


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
    state = copy.deepcopy(model.state_dict())
    prepare_for_inference_(model, kind.batch(0))
    with torch.inference_mode():
        assert torch.equal(outputs(kind, model), expected)
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
        assert_close(outputs(kind, one), expected)


def test_reports_say_what_is_there(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that do not depend on the machine; the calls of a measurement end with the dense product."""
    time_dense_as(100.0, monkeypatch, first=1)
    kind = ZOO["llama"]
    model: Any = patched(kind)
    report = prepare_for_inference_(model, kind.batch(0))
    measured = {one.product: one for one in store.measurements(own_file)[0]}
    modules = {name: one for name, one in model.named_modules() if isinstance(one, BlockSparseLinear)}
    assert [product.name for product in report.layers] == [*modules]
    for product in report.layers:
        layer = modules[product.name]
        assert layer.policy == product.policy
        assert product.tokens == 64
        what = tilesparse.tuning.Product.of(layer, tokens=64)
        assert product.kernel == tilesparse.tuning.choose(what, "cpu", policy=product.policy).kernel
        assert product.microseconds == min(measured[what].microseconds.values())
        assert product.dense_microseconds == measured[what].dense_microseconds
        assert len(measured[what].microseconds) == 3
    assert report.facts["seconds_before"] > 0
    assert f"{1e3 * report.facts['seconds_after']:.2f} ms after" in str(report)
    assert "2 MLPs fused: model.layers.*.mlp (2)" in str(report).splitlines()


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
    for product in report.layers:
        assert ("dequantized once" in product.done) == (name not in ("plain", "int8 W8A8"))
        assert product.kernel is not None and product.kernel.startswith("cpu_")
    assert all(torch.equal(tensor, state[own]) for own, tensor in model.state_dict().items())
    torch.testing.assert_close(model(x), expected)


def test_four_bits_of_few_tokens_are_read_as_they_are() -> None:
    model = Attention(storage="int4").eval()
    for count, done in ((3, ()), (None, ()), (9, ("dequantized once",))):
        batch = () if count is None else (randn(count, 64, dtype=torch.float32),)
        assert prepare_for_inference_(model, *batch).layers[0].done == done


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
        assert isinstance(model.rest[2], BlockSparseMLP)
        raise error

    monkeypatch.setattr("tilesparse.model.inference.tune", fail)
    with pytest.raises(type(error)):
        prepare_for_inference_(model, tokens())
    assert all(map(operator.is_, model.modules(), modules))
    assert all(map(operator.is_, model.parameters(), parameters))
    assert [(module.training, dict(module._forward_hooks)) for module in modules] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == records
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
