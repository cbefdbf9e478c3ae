"""`BlockSparseExperts`: against Transformers' own experts, in models, pruned, saved and loaded."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import DEVICES, seeded
from torch import Tensor, nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from zoo import ZOO

import tilesparse as ts
from tilesparse.errors import InvalidArgumentError, UnsupportedError
from tilesparse.nn.experts import ExpertsLinear, projections_of
from tilesparse.prune import allocate, measure_errors, prune_

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3", "gpt_oss"]
SIZES = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "hidden_size": 64,
    "moe_hidden_size": 64,
    "moe_intermediate_size": 32,
    "moe_latent_size": None,
    "mlp_hidden_act": "relu2",
    "hidden_act": "silu",
    "post_norm_eps": 1e-6,
    "_experts_implementation": "eager",
}


def muse_spark_experts() -> Any:
    """Return experts that not every version of Transformers 5 has."""
    module = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    return module.MuseSparkExperts(SimpleNamespace(**SIZES))


ALONE: dict[str, Callable[[], Any]] = {  # without a gate; with a norm behind each expert
    "nemotron_h": lambda: NemotronHExperts(SimpleNamespace(**SIZES)),
    "muse_spark": muse_spark_experts,
}
BLOCK = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float64: 1e-12}


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Return the dense experts of a model by name."""
    return {name: module for name, module in model.named_modules() if projections_of(module) is not None}


def sparse_experts_of(model: nn.Module) -> dict[str, ts.BlockSparseExperts]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, ts.BlockSparseExperts)
    }


def dense_experts(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the experts of a small model, which compute as Transformers' eager ones."""
    if kind in ALONE:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(7)
            experts = ALONE[kind]()
            for parameter in experts.parameters():
                parameter.normal_(0, 0.1)
        return experts.to(dtype)
    model = ZOO[kind].make()
    model.set_experts_implementation("eager")
    return next(iter(experts_of(model).values())).to(dtype)


def routed(experts: Any, dtype: torch.dtype, tokens: int = 24, only: int | None = None) -> tuple[Tensor, ...]:
    """Return inputs, choices of two experts for each token, and weights; ``only``: experts below this."""
    found = projections_of(experts)
    assert found is not None
    weight = experts.get_parameter(found.up)
    hidden = weight.shape[1 if found.transposed else 2]
    number = len(weight) if only is None else only
    x = torch.randn(tokens, hidden, generator=seeded(), dtype=dtype)
    index = torch.rand(tokens, number, generator=seeded(1)).topk(min(2, number)).indices
    weights = torch.rand(index.shape, generator=seeded(2), dtype=dtype)
    return x, index, weights


def gradients(experts: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return output and gradients of x, of the routing weights and of parameters."""
    x, index, weights = inputs
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts(x, index, weights)
    named = dict(experts.named_parameters())
    slope = torch.randn(y.shape, generator=seeded(3), dtype=y.dtype).to(y.device)
    found = torch.autograd.grad(y, [x, weights, *named.values()], slope)
    return y.detach(), dict(zip(["x", "weights", *named], found, strict=True))


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*MIXTURES, *ALONE])
def test_with_every_block_they_compute_what_transformers_does(
    kind: str, device: str, dtype: torch.dtype
) -> None:
    dense = dense_experts(kind, dtype).to(device)
    sparse = ts.BlockSparseExperts.from_experts(dense, 1.0, block_shape=BLOCK)
    for only in (None, 1, 3):  # the others have no tokens
        inputs = tuple(one.to(device) for one in routed(dense, dtype, only=only))
        expected, of_dense = gradients(dense, inputs)
        actual, of_sparse = gradients(sparse, inputs)
        close(actual, expected)
        for name in ("x", "weights"):
            close(of_sparse[name], of_dense[name])
        as_dense = copy.deepcopy(sparse)
        for name, parameter in as_dense.named_parameters():
            if "norm" not in name:
                parameter.data = of_sparse[name]
        for name, gradient in as_dense.to_dense().items():
            close(gradient, of_dense[name])


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_they_compute_with_the_kept_blocks_alone(kind: str) -> None:
    dense = dense_experts(kind)
    sparse = ts.BlockSparseExperts.from_experts(dense, 0.5, block_shape=BLOCK)
    kept = sparse.to_dense()
    with torch.no_grad():
        for name, tensor in kept.items():
            assert tensor.shape == dense.get_parameter(name).shape
            dense.get_parameter(name).copy_(tensor)
    inputs = routed(dense, torch.float32)
    close(sparse(*inputs), dense(*inputs))
    for layer in sparse.projections().values():
        assert torch.equal(layer.densities(), torch.full((layer.experts,), 0.5))
    assert float((kept[f"{sparse.up_name}_proj"] == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("none", [4, 5, -1, -4, 2**40])
def test_an_index_that_is_none_of_an_expert_stands_for_none(none: int) -> None:
    """As num_experts does in Transformers: also where an expert would overflow, and in gradients."""
    dense = dense_experts("mixtral", torch.float16)
    sparse = ts.BlockSparseExperts.from_experts(dense, 1.0, block_shape=BLOCK)
    x, index, weights = routed(dense, torch.float16)
    x[::3] *= 2000  # what an expert makes of these tokens is not finite
    index[::3] = dense.num_experts
    index[1, 1] = dense.num_experts
    weights[1, 1] = torch.nan
    expected, of_dense = gradients(dense, (x, index, weights))
    inputs = x, torch.where(index == dense.num_experts, none, index), weights
    actual, of_sparse = gradients(sparse, inputs)
    assert expected.isfinite().all() and not sparse(x[::3], index[::3] * 0, weights[::3]).isfinite().all()
    assert (actual[::3] == 0).all() and (of_sparse["weights"][index == dense.num_experts] == 0).all()
    close(actual, expected)
    for name in ("x", "weights"):
        close(of_sparse[name], of_dense[name])
    assert all(gradient.isfinite().all() for gradient in of_sparse.values())


def test_routing_is_refused_where_it_does_not_fit() -> None:
    sparse = ts.BlockSparseExperts.from_experts(dense_experts("mixtral"), 0.5, block_shape=BLOCK)
    x, index, weights = routed(dense_experts("mixtral"), torch.float32)
    for inputs, name in (
        ((x[None], index, weights), "hidden_states must be"),
        ((x, index[1:], weights), "top_k_index must be"),
        ((x, index, weights[:, :1]), "top_k_weights must have the shape"),
        ((x, index.float(), weights), "top_k_index must be int32 or int64"),
    ):
        with pytest.raises(InvalidArgumentError, match=name):
            sparse(*inputs)
    with pytest.raises(InvalidArgumentError, match="offsets must say"):
        sparse.down(x)


@pytest.mark.parametrize(
    ("nm", "storage"),
    [((2, 4), "plain"), ((2, 4), "compressed"), (None, "int8"), (None, "float8_e4m3fn"), (None, "int4")],
)
def test_storages_compute_with_the_weights_they_hold(nm: Any, storage: str) -> None:
    dense = dense_experts("mixtral")
    sparse = ts.BlockSparseExperts.from_experts(dense, 0.5, block_shape=32, nm=nm, storage=storage)
    with torch.no_grad():
        for name, tensor in sparse.to_dense().items():
            dense.get_parameter(name).copy_(tensor)
        inputs = routed(dense, torch.float32)
        close(sparse(*inputs), dense(*inputs))
    x = inputs[0].clone().requires_grad_()
    sparse(x, *inputs[1:]).sum().backward()
    y = inputs[0].clone().requires_grad_()
    dense(y, *inputs[1:]).sum().backward()
    assert x.grad is not None and y.grad is not None
    close(x.grad, y.grad)


@pytest.mark.parametrize(("experts", "tokens", "k"), [(1, 5, 1), (3, 7, 2), (512, 33, 5)])
@pytest.mark.parametrize("device", DEVICES)
def test_any_number_of_experts(device: str, experts: int, tokens: int, k: int) -> None:
    torch.manual_seed(0)
    up, down = (
        ExpertsLinear(in_features, experts * out, experts=experts, block_shape=BLOCK, density=0.5)
        for in_features, out in ((32, 32), (16, 32))
    )
    sparse = ts.BlockSparseExperts(up, down).to(device)
    x = torch.randn(tokens, 32, device=device)
    index = torch.rand(tokens, experts, generator=seeded()).topk(k).indices.to(device)
    weights = torch.rand(tokens, k, device=device)
    y, found = gradients(sparse, (x, index, weights))
    dense = {name: tensor.double() for name, tensor in sparse.to_dense().items()}
    expected = torch.zeros(tokens, 32, dtype=torch.float64, device=device)
    for token, choice in ((token, choice) for token in range(tokens) for choice in range(k)):
        own = {name: tensor[index[token, choice]] for name, tensor in dense.items()}
        both = own["gate_up_proj"] @ x[token].double() + own["gate_up_proj_bias"]
        middle = torch.nn.functional.silu(both[:16]) * both[16:]
        result = own["down_proj"] @ middle + own["down_proj_bias"]
        expected[token] += weights[token, choice].double() * result
    close(y, expected.float())
    unused = sorted({*range(experts)} - {*index.flatten().tolist()})
    assert not bool(found["down.bias"].view(experts, -1)[unused].any())


def test_state_dicts_copies_and_moves_keep_what_they_compute() -> None:
    sparse = ts.BlockSparseExperts.from_experts(dense_experts("gpt_oss"), 0.25, block_shape=BLOCK)
    inputs = routed(dense_experts("gpt_oss"), torch.float32)
    expected = sparse(*inputs)
    other = ts.BlockSparseExperts.from_experts(dense_experts("gpt_oss"), 0.5, block_shape=32)
    other.load_state_dict(sparse.state_dict())
    for same in (other, copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse)), sparse.to("cpu")):
        assert torch.equal(same(*inputs), expected)
    half = copy.deepcopy(sparse).bfloat16()
    assert (
        half(*(one.bfloat16() if one.is_floating_point() else one for one in inputs)).dtype == torch.bfloat16
    )
    with torch.autocast("cpu", torch.bfloat16):
        under = sparse(*inputs)
    assert under.dtype == torch.float32
    torch.testing.assert_close(under, expected, rtol=0.05, atol=0.05 * float(expected.detach().abs().max()))


def test_gradients_of_the_routing_are_exact() -> None:
    dense = dense_experts("mixtral", torch.float64)
    sparse = ts.BlockSparseExperts.from_experts(dense, 0.5, block_shape=BLOCK)
    x, index, weights = routed(dense, torch.float64, tokens=3)
    inputs = x.requires_grad_(), weights.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weights: sparse(x, index, weights), inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_exported_they_compute_the_same(device: str) -> None:
    sparse = ts.BlockSparseExperts.from_experts(dense_experts("mixtral").to(device), 0.5, block_shape=BLOCK)
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    for tokens in (9, 24):
        inputs = tuple(one.to(device) for one in routed(dense_experts("mixtral"), torch.float32, tokens))
        (expected, of_eager), (actual, of_compiled) = gradients(sparse, inputs), gradients(compiled, inputs)
        assert torch.equal(actual, expected)
        for name, gradient in of_eager.items():
            same = name if name in of_compiled else f"_orig_mod.{name}"
            assert torch.equal(of_compiled[same], gradient)
    sizes = {0: torch.export.Dim("tokens", min=1, max=4096)}
    exported = torch.export.export(sparse, inputs, dynamic_shapes=(sizes, sizes, sizes)).module()
    for number in (1, 24, 100):
        inputs = tuple(one.to(device) for one in routed(dense_experts("mixtral"), torch.float32, number))
        assert torch.equal(exported(*inputs), sparse(*inputs))


@pytest.mark.gpu
def test_a_graph_follows_the_routing() -> None:
    sparse = ts.BlockSparseExperts.from_experts(
        dense_experts("mixtral", torch.bfloat16).cuda(), 0.5, block_shape=BLOCK
    )
    routings = [
        tuple(one.cuda() for one in routed(dense_experts("mixtral"), torch.bfloat16, only=only))
        for only in (None, 2, 1)
    ]
    routings[2] = tuple(torch.cat((one, one), 1) if one is not routings[2][0] else one for one in routings[2])
    inputs = tuple(one.clone() for one in routings[0])
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            sparse(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = sparse(*inputs)
        for routing in routings:
            for own, new in zip(inputs, routing, strict=True):
                own.copy_(new)
            graph.replay()
            assert torch.equal(y, sparse(*routing))


def test_experts_without_a_gate_or_a_module_of_transformers() -> None:
    torch.manual_seed(0)
    up = ExpertsLinear(64, 4 * 32, experts=4, block_shape=BLOCK, density=0.5)
    down = ExpertsLinear(32, 4 * 64, experts=4, block_shape=BLOCK, density=0.5)
    x, index = torch.randn(7, 64), torch.tensor([[0], [3], [3], [0], [2], [0], [3]])
    for activation, function in (("relu", torch.relu), (nn.Tanh(), torch.tanh)):
        experts = ts.BlockSparseExperts(up, down, gated=False, activation=activation)
        dense = experts.to_dense()
        for token, (expert,) in enumerate(index.tolist()):
            hidden = function(x[token] @ dense["up_proj"][expert].T + dense["up_proj_bias"][expert])
            y = hidden @ dense["down_proj"][expert].T + dense["down_proj_bias"][expert]
            close(experts(x, index, torch.full((7, 1), 0.5))[token], 0.5 * y)
    with pytest.raises(InvalidArgumentError, match="down must have 16 in_features"):
        ts.BlockSparseExperts(up, down)
    with pytest.raises(InvalidArgumentError, match="experts must divide"):
        ExpertsLinear(64, 4 * 32, experts=3, block_shape=BLOCK)


def test_what_needs_one_weight_for_all_tokens_is_refused() -> None:
    layer = ExpertsLinear(64, 4 * 32, experts=4, block_shape=BLOCK, density=0.5)
    for call in (layer.to_linear, layer.to_semi_structured, layer.cut):
        with pytest.raises(UnsupportedError):
            call()
    with pytest.raises(InvalidArgumentError, match="policy must be 'sparse' with experts"):
        layer.policy = "auto"
    with pytest.raises(InvalidArgumentError, match="activations must be None with experts"):
        layer.to_storage("int8", activations="int8")


# Models.


@pytest.mark.parametrize("kind", MIXTURES)
def test_models_are_patched_by_structure(kind: str) -> None:
    model = ZOO[kind].make()
    batch = ZOO[kind].batch(0)
    found = experts_of(model)
    expected = model(**batch).logits
    patcher = ts.model.BlockSparseModelPatcher()
    patcher.add_pattern("experts", {"density": 1, "block_shape": BLOCK})
    report = patcher.patch_model(model, keep_dense=True)
    assert set(sparse_experts_of(model)) == set(found)
    assert len(report.layers) == 2 * len(found)
    assert {layer.name.rpartition(".")[0] for layer in report.layers} == set(found)
    assert report.after.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert not any("experts" in one.name and len(one.shape) == 3 for one in report.dense)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-3, atol=1e-4)
    fused = patcher.fuse_mlps_(model)
    assert not any("Experts" in one.kind for one in (*fused.mlps, *fused.skipped))
    patcher.undo(model)
    assert experts_of(model) == found


class Stacked(nn.Module):
    """Experts that do not implement the interface."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 64))
        self.router = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x) @ self.gate_up_proj.sum(0)


def test_stacked_weights_that_stay_dense_are_named_in_every_report() -> None:
    model = nn.Sequential(Stacked())
    report = ts.sparsify_(copy.deepcopy(model), ts.BlockSparseConfig(0.5, BLOCK), dry_run=True)
    patcher = ts.model.BlockSparseModelPatcher()
    patcher.add_pattern(".*router", {"density": 0.5, "block_shape": BLOCK})
    batches, sparse = [torch.randn(80, 64)], copy.deepcopy(model)
    assert "gate_up_proj" in str(patcher.patch_model(sparse))
    for config in (ts.BlockSparseConfig.w8a8(), ts.BlockSparseConfig.w4a16()):
        quantized = ts.quantize_(copy.deepcopy(sparse), config, batches)
        reasons = {one.name: one.reason for one in quantized.skipped}
        assert "3-D gate_up_proj" in reasons["0"] and "gate_up_proj" in str(quantized)
    prepared = ts.prepare_for_inference_(copy.deepcopy(sparse), batches[0])
    assert prepared.stacked == ["0.gate_up_proj"] and "0.gate_up_proj" in str(prepared)
    for one in (report, prune_(copy.deepcopy(model), ts.BlockSparseConfig(0.5, BLOCK), batches)):
        assert "0.gate_up_proj" in [parameter.name for parameter in one.dense]
        assert [skipped.name for skipped in one.skipped if "3-D gate_up_proj" in skipped.reason] == ["0"]
        assert "gate_up_proj" in str(one)
    with pytest.raises(InvalidArgumentError, match="3-D gate_up_proj, but not the interface"):
        ts.sparsify_(model, {"0$": ts.BlockSparseConfig(0.5, BLOCK)})


def test_experts_that_would_lose_something_stay_and_are_named() -> None:
    model = ZOO["mixtral"].make()
    (first, experts), (second, other) = experts_of(model).items()
    experts.extra = nn.Parameter(torch.zeros(3))
    other.forward = lambda *args: args[0]
    report = ts.sparsify_(model, ts.BlockSparseConfig(0.5, BLOCK))
    reasons = {one.name: one.reason for one in report.skipped}
    assert "it holds extra" in reasons[first] and "its forward was replaced" in reasons[second]
    assert f"{first}.gate_up_proj" in [one.name for one in report.dense]
    for options, reason in (({"policy": "auto"}, "policy='sparse'"), ({"density": 1e-6}, "rounds to none")):
        config = ts.BlockSparseConfig(**{"density": 0.5, "block_shape": BLOCK} | options)
        report = ts.sparsify_(ZOO["mixtral"].make(), config, strict=False)
        assert reason in {one.name: one.reason for one in report.skipped}[first]


# Pruning.


def calibration(kind: str, batches: int = 4) -> list[dict[str, Tensor]]:
    return [ZOO[kind].batch(seed) for seed in range(batches)]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_pruning_beats_magnitude_and_replaces_all_experts(kind: str) -> None:
    dense = ZOO[kind].make()
    batches = calibration(kind, 8)
    expected = dense(**batches[0]).logits
    errors = {}
    for method, refit in (("obs", True), ("magnitude", False)):
        model = copy.deepcopy(dense)
        config = ts.BlockSparseConfig(0.5, BLOCK)
        report = prune_(model, config, batches, method=method, refit=refit, layers=r".*experts\.")
        sparse = sparse_experts_of(model)
        assert set(sparse) == set(experts_of(dense))
        pruned = [layer for layer in report.layers if ".experts." in layer.name]
        assert len(pruned) == sum(2 * one.num_experts for one in sparse.values())
        assert not any(len(one.shape) == 3 for one in report.dense)
        errors[method] = float((model(**batches[0]).logits - expected).norm())
        by_name = {layer.name: layer.density for layer in report.layers}
        name, experts = next(iter(sparse.items()))
        for own, layer in experts.projections().items():
            found = [by_name[f"{name}.{own}.{number}"] for number in range(experts.num_experts)]
            torch.testing.assert_close(layer.densities().tolist(), found)
    assert errors["obs"] < errors["magnitude"]


def test_each_expert_is_pruned_as_a_layer_of_its_own() -> None:
    """With the same inputs, an expert without a pull towards the others is what `prune_` makes of it."""
    from tilesparse.calibrate.moments import Moments

    x, y = (torch.randn(40, 32, generator=seeded(seed)) for seed in (0, 1))
    whole = Moments(32, torch.device("cpu"), False)
    whole.add(torch.cat((x, y)), None, 0)
    own = Moments(32, torch.device("cpu"), False, origin=whole.origin)
    own.add(x, None, 0)
    drawn = own.drawn_to(whole, 8.0)
    both = torch.cat((x, y)).double()
    expected = (x.double().T @ x.double() + 8 * both.T @ both / 80) / 48
    torch.testing.assert_close(drawn.second(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        drawn.mean(), (x.double().sum(0) + 8 * both.mean(0)) / 48, rtol=1e-5, atol=1e-6
    )
    assert drawn.tokens() == 40
    nothing = Moments(32, torch.device("cpu"), False, origin=whole.origin).drawn_to(whole, 8.0)
    torch.testing.assert_close(nothing.second(), whole.second())
    assert nothing.tokens() == 0


def test_budgets_are_spent_on_single_experts() -> None:
    kind = "mixtral"
    model, batches = ZOO[kind].make(), calibration(kind)
    configs = [ts.BlockSparseConfig(density, BLOCK) for density in (0.25, 0.5, 0.75)]
    profiles = measure_errors(model, batches, configs, layers=r".*experts\.")
    assert all(len(own) == 3 for own in profiles.values())
    weights = sum(p.numel() for experts in experts_of(model).values() for p in experts.parameters())
    plan = allocate(profiles, model, parameters=weights // 2)
    report = prune_(model, plan, batches)
    densities = {layer.density for layer in report.layers}
    assert len(densities) > 1
    kept = sum(p.numel() for experts in sparse_experts_of(model).values() for p in experts.parameters())
    assert kept <= weights // 2
    first = next(iter(profiles))
    with pytest.raises(InvalidArgumentError, match="must agree in block_shape"):
        other = dict.fromkeys(profiles, configs[0]) | {first: ts.BlockSparseConfig(0.5, 32)}
        prune_(ZOO[kind].make(), other, batches)


def test_experts_of_a_projection_that_is_not_named_keep_their_blocks() -> None:
    model, dense = ZOO["mixtral"].make(), ZOO["mixtral"].make()
    prune_(model, ts.BlockSparseConfig(0.5, BLOCK), calibration("mixtral"), layers=r".*experts\.gate_up")
    for name, experts in sparse_experts_of(model).items():
        assert experts.down.density == 1 and experts.projections()["gate_up"].density == 0.5
        assert torch.equal(experts.to_dense()["down_proj"], dense.get_submodule(name).down_proj)


def test_an_expert_that_stays_dense_is_stored_as_the_others() -> None:
    model = ZOO["mixtral"].make()
    config = ts.BlockSparseConfig.w8a16(density=0.5, block_shape=BLOCK, granularity="block")
    prune_(model, {r".*experts\..*\.1$": None, "experts": config}, calibration("mixtral"))
    for experts in sparse_experts_of(model).values():
        for layer in experts.projections().values():
            assert layer.density == 0.625 and layer.spec.granularity == "block"


def test_an_error_leaves_dense_experts_in_place() -> None:
    model = ZOO["mixtral"].make()
    before = dict(model.named_modules())
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 3)}
    with pytest.raises(Exception):  # noqa: B017 - whatever the model says
        prune_(model, ts.BlockSparseConfig(0.5, BLOCK), [batch])
    assert dict(model.named_modules()) == before


def test_experts_are_reconstructed_and_distilled() -> None:
    kind = "mixtral"
    teacher, batches = ZOO[kind].make(), calibration(kind)
    model = copy.deepcopy(teacher)
    ts.sparsify_(model, {"experts": ts.BlockSparseConfig(0.5, BLOCK)})

    def error() -> float:
        return float((model(**batches[0]).logits - teacher(**batches[0]).logits).detach().norm())

    before = error()
    ts.recover.reconstruct_(model, teacher, batches, epochs=8)
    middle = error()
    ts.distill_(model, teacher, batches * 5, lr=1e-4)
    assert error() < middle < before


def test_blocks_move_without_dense_gradients_and_not_with_them() -> None:
    batch = calibration("mixtral")[0]
    for grow in ("random", "gradient"):
        model = ZOO["mixtral"].make()
        ts.sparsify_(model, {"experts": ts.BlockSparseConfig(0.5, BLOCK)})
        (first, *_) = sparse_experts_of(model).values()
        before = first.down.pattern.to_block_mask()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()

        if grow == "gradient":
            with pytest.raises(UnsupportedError, match="no dense gradients of experts"):
                ts.train.PatternSchedule(model, optimizer, every=10, grow=grow)
            step()
        else:
            schedule = ts.train.PatternSchedule(model, optimizer, every=1, grow=grow)
            step()
            schedule.step()
            assert not torch.equal(first.down.pattern.to_block_mask(), before)
            step()
            assert first.down.density == 0.5


def test_experts_are_not_spread_over_processes() -> None:
    model = ZOO["mixtral"].make()
    for experts in experts_of(model).values():
        experts._is_expert_parallel = True
    report = ts.sparsify_(model, {"experts": ts.BlockSparseConfig(0.5, BLOCK)}, strict=False)
    assert [
        "spread over processes" in one.reason for one in report.skipped if one.kind == "MixtralExperts"
    ] == [True] * 2


# Checkpoints.


RELOAD = """
import sys, torch, tilesparse as ts, transformers
sys.path.insert(0, {tests!r})
from zoo import ZOO
kind, how, path = sys.argv[1:]
if how == "save":
    model = ts.load(ZOO[kind].skeleton, path)
else:
    model = getattr(transformers, ZOO[kind].model).from_pretrained(path)
assert any(isinstance(module, ts.BlockSparseExperts) for module in model.modules())
torch.save((dict(model.state_dict()), model.eval()(**ZOO[kind].batch(0)).logits), path + "/out.pt")
"""


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("qwen3_moe", "save"),
        ("gpt_oss", "save"),
        ("gpt_oss", "save_pretrained"),
        ("granitemoe", "save_pretrained"),
        ("deepseek_v3", "save_pretrained"),
    ],
)
def test_checkpoints_come_back_bit_for_bit_in_a_new_process(kind: str, how: str, tmp_path: Path) -> None:
    model = ZOO[kind].make()
    ts.sparsify_(
        model, {"experts": ts.BlockSparseConfig(0.5, BLOCK), ".*self_attn": ts.BlockSparseConfig(0.5, BLOCK)}
    )
    expected = model(**ZOO[kind].batch(0)).logits
    if how == "save":
        ts.save(model, tmp_path, max_shard_size="100KB")
    else:
        model.save_pretrained(tmp_path, max_shard_size="100KB")
    script = RELOAD.format(tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", script, kind, how, str(tmp_path)], check=True)
    state, logits = torch.load(tmp_path / "out.pt")
    assert set(state) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn", "int4"])
def test_experts_are_quantized_saved_and_loaded_in_a_new_process(storage: str, tmp_path: Path) -> None:
    kind = "qwen2_moe"
    model, batches = ZOO[kind].make(), calibration("qwen2_moe")
    ts.sparsify_(model, {"experts": ts.BlockSparseConfig(1.0, 32), "o_proj": ts.BlockSparseConfig(1.0, 32)})
    expected = model(**batches[0]).logits
    report = ts.quantize_(model, ts.BlockSparseConfig(storage=storage), batches)
    named = {layer.name: layer for layer in report.layers}
    for name, experts in sparse_experts_of(model).items():
        for own, layer in experts.projections().items():
            assert layer.storage == storage and 0 < named[f"{name}.{own}"].error < 0.02
    quantized = model(**batches[0]).logits
    assert 0 < float((quantized - expected).norm() / expected.norm()) < 0.2
    model.save_pretrained(tmp_path)
    script = RELOAD.format(tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", script, kind, "save_pretrained", str(tmp_path)], check=True)
    state, logits = torch.load(tmp_path / "out.pt")
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert torch.equal(logits, quantized)


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_stored_experts_load_without_dense_weights(storage: str, tmp_path: Path) -> None:
    kind = "mixtral"
    model = ZOO[kind].make()
    ts.sparsify_(model, {"experts": ts.BlockSparseConfig(0.5, 32, storage=storage)})
    ts.save(model, tmp_path)
    other = ts.load(ZOO[kind].skeleton, tmp_path).eval()
    batch = ZOO[kind].batch(0)
    assert torch.equal(other(**batch).logits, model(**batch).logits)
    again = ts.load(other, tmp_path)  # into experts that are sparse already
    assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_a_checkpoint_of_experts_does_not_load_into_others(tmp_path: Path) -> None:
    model = ZOO["mixtral"].make()
    ts.sparsify_(model, {"experts": ts.BlockSparseConfig(0.5, BLOCK)})
    ts.save(model, tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert '"version": 3' in text
    with pytest.raises(ts.errors.CheckpointError, match=r"missing in the model|experts"):
        ts.load(ZOO["llama"].skeleton, tmp_path)


def test_dense_experts_come_back() -> None:
    pytest.importorskip("transformers")
    from tilesparse.integrations.transformers import to_dense

    model = ZOO["gpt_oss"].make()
    ts.sparsify_(model, {"experts": ts.BlockSparseConfig(0.5, BLOCK)})
    batch = ZOO["gpt_oss"].batch(0)
    expected = model(**batch).logits
    to_dense(model)
    assert experts_of(model) and not sparse_experts_of(model)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_know_experts_says_so() -> None:
    model = ZOO["mixtral"].make()
    ts.sparsify_(model, {"experts": ts.BlockSparseConfig(0.5, 32), "o_proj": ts.BlockSparseConfig(0.5, 32)})
    report = ts.quantize_(copy.deepcopy(model), ts.BlockSparseConfig.w8a8(), calibration("mixtral"))
    assert "no products with 8-bit activations" in str(report)
    ts.prepare_for_inference_(copy.deepcopy(model))
