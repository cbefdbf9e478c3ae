"""`BlockSparseExperts`: against Transformers' own experts, in models, pruned, saved and loaded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import DEVICES, run_anew, seeded
from torch import Tensor, nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from zoo import ZOO

import tilesparse as ts
from tilesparse import prune_
from tilesparse.calibrate.calibration import Moments
from tilesparse.errors import InvalidArgumentError, UnsupportedError
from tilesparse.nn.experts import ExpertsLinear, projections_of
from tilesparse.nn.weight import INDEX_NAMES, dense_blocks
from tilesparse.prune import allocate, measure_errors

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


def close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    tolerance = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * size)


def sparse_experts(
    kind: str, density: float = 0.5, dtype: torch.dtype = torch.float32, **options: Any
) -> ts.BlockSparseExperts:
    options = {"block_shape": BLOCK, **options}
    return ts.BlockSparseExperts.from_experts(dense_experts(kind, dtype), density, **options)


def sparsified(kind: str, density: float = 0.5, block: int = BLOCK, also: str = "", **options: Any) -> Any:
    """Return a model with sparse experts, and other layers of this name."""
    model, config = ZOO[kind].make(), ts.BlockSparseConfig(density, block, **options)
    ts.sparsify_(model, {"experts": config} | ({also: ts.BlockSparseConfig(density, block)} if also else {}))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*MIXTURES, *ALONE])
def test_with_every_block_they_compute_what_transformers_does(
    kind: str, device: str, dtype: torch.dtype
) -> None:
    dense, sparse = dense_experts(kind, dtype).to(device), sparse_experts(kind, 1.0, dtype).to(device)
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


STORED = [
    (BLOCK, None, "plain"),
    (32, (2, 4), "plain"),
    (32, (2, 4), "compressed"),
    *((32, None, storage) for storage in ("int8", "float8_e4m3fn", "int4")),
]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(("block", "nm", "storage"), STORED)
def test_they_compute_with_the_kept_weights_alone(block: int, nm: Any, storage: str, kind: str) -> None:
    dense, sparse = dense_experts(kind), sparse_experts(kind, block_shape=block, nm=nm, storage=storage)
    kept, inputs = sparse.to_dense(), routed(dense, torch.float32)
    with torch.no_grad():
        for name, tensor in kept.items():
            assert tensor.shape == dense.get_parameter(name).shape
            dense.get_parameter(name).copy_(tensor)
    results = []
    for experts in (sparse, dense):
        x = inputs[0].clone().requires_grad_()
        y = experts(x, *inputs[1:])
        results.append((y, torch.autograd.grad(y.sum(), x)[0]))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected)
    for layer in sparse.projections().values():
        assert torch.equal(layer.densities(), torch.full((layer.experts,), 0.5))
    if nm is None and storage == "plain":
        assert float((kept[f"{sparse.up_name}_proj"] == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


EIGHT = ["int8", "float8_e4m3fn"]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", *ALONE])
@pytest.mark.parametrize("storage", EIGHT)
@pytest.mark.parametrize("device", DEVICES)
def test_8_bit_activations_are_those_of_each_expert_alone(device: str, storage: str, kind: str) -> None:
    """Each projection has the bits of layers of one expert each; gradients pass by the rounding of x."""
    options: Any = {"block_shape": 32, "storage": storage, "activations": storage}
    sparse = sparse_experts(kind, **options).to(device)
    assert "activations=" in repr(sparse)
    x, *routing = (one.to(device) for one in routed(dense_experts(kind), torch.float32, 300))
    counts = [70, 0, 100, 130]
    offsets = torch.tensor([0, 70, 70, 170, 300], dtype=torch.int32, device=device)
    for layer in sparse.projections().values():
        tokens = torch.randn(300, layer.in_features, generator=seeded(4)).to(device).requires_grad_()
        y, dense = layer(tokens, offsets), dense_blocks(layer)
        weight = ts.BlockSparseMatrix(dense, layer.pattern).to_dense().view(4, -1, layer.in_features)
        alone = [part_of(layer, expert) for expert in range(4)]
        for own, part, rows in zip(alone, tokens.split(counts), y.split(counts), strict=True):
            if device == "cpu" or storage == "int8":
                assert torch.equal(own(part) if len(part) else rows, rows)
        slope = torch.randn(y.shape, generator=seeded(5)).to(device)
        (gradient,) = torch.autograd.grad(y, tokens, slope)
        wanted = torch.cat([dy @ w for dy, w in zip(slope.split(counts), weight, strict=True)])
        close(gradient, wanted, 1e-4 if device == "cpu" else 5e-3)
    y, exact = sparse(x, *routing), copy.deepcopy(sparse)
    for layer in exact.projections().values():
        layer.to_storage("plain")
    expected = exact(x, *routing)
    assert 0 < float((y - expected).detach().norm() / expected.detach().norm()) < 0.08


@pytest.mark.parametrize("storage", EIGHT)
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_quantized_once_and_not_each_of_their_rows(device: str, storage: str) -> None:
    """With the bits of an `up` that quantizes rows, as one that somebody looks at does."""
    options: Any = {"block_shape": 32, "storage": storage, "activations": storage}
    sparse = sparse_experts("gpt_oss", **options).to(device)
    x, index, weights = (one.to(device) for one in routed(dense_experts("gpt_oss"), torch.float32, 90))
    index[::7, 1], x[4] = sparse.num_experts, torch.inf
    index[4, 1], weights[4] = 0, 0.5
    with torch.no_grad():
        y = sparse(x, index, weights)
        seen: list[Tensor] = []
        up = sparse.projections()[sparse.up_name]
        hook = up.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        expected = sparse(x, index, weights)
        hook.remove()
        assert torch.equal(y[5:], expected[5:]) and not y[4].isfinite().any() and y[5:].isfinite().all()
        assert seen[0].shape == (180, x.shape[1]) and seen[0][5:].isfinite().any()
        torch._dynamo.reset()
        compiled = torch.compile(sparse, fullgraph=True, dynamic=True, backend="aot_eager")(x, index, weights)
        close(compiled[5:], y[5:])
    with torch.autocast(device, torch.bfloat16):
        assert 0 < float((sparse(x, index, weights)[5:] - y[5:]).detach().abs().max()) < 0.1
    recorded = sparse(x[5:].clone().requires_grad_(), index[5:], weights[5:])
    assert torch.equal(recorded, y[5:]) and recorded.requires_grad


def part_of(layer: ExpertsLinear, expert: int) -> ts.BlockSparseLinear:
    """Return a layer of one expert, on as many bits."""
    rows = layer.pattern.grid[0] // layer.experts
    mask = layer.pattern.to_block_mask()[expert * rows : (expert + 1) * rows]
    pattern = ts.BlockPattern.from_block_mask(mask, block_shape=layer.block_shape)
    of_rows, columns = layer.pattern.block_indices()
    numbers = of_rows * layer.pattern.grid[1] + columns
    slots = (of_rows // rows == expert).nonzero().flatten()
    features = slice(expert * rows * layer.block_shape[0], (expert + 1) * rows * layer.block_shape[0])
    assert layer.scales is not None
    tensors = {
        "weight": layer.weight[slots[numbers[slots].argsort()]],
        "scales": layer.scales[features],
        **({} if layer.bias is None else {"bias": layer.bias[features]}),
        **{name: getattr(pattern, name) for name in INDEX_NAMES},
    }
    spec = replace(layer.spec, experts=None, shape=pattern.shape, nnz=pattern.nnz)
    own = ts.BlockSparseLinear.from_state(spec, tensors)
    assert isinstance(own, ts.BlockSparseLinear)
    return own


@pytest.mark.parametrize("storage", EIGHT)
def test_8_bit_activations_are_set_and_unset(storage: str) -> None:
    layer = ExpertsLinear(64, 4 * 64, experts=4, block_shape=32, storage=storage, activations=storage)
    assert layer.scales is not None and layer.scales.shape == (4 * 64,)
    plain = dense_blocks(layer)
    ways: tuple[dict[str, Any], ...] = ({"activations": None}, {"activations": storage}, {"storage": "plain"})
    for there in ways:
        layer.to_storage(**{"storage": storage, **there})
        assert layer.activations == there.get("activations")
        close(dense_blocks(layer), plain, 0.05)
    again = ExpertsLinear.from_spec(layer.to_storage(storage, activations=storage).spec)
    again.load_state_dict(layer.state_dict())
    x, offsets = torch.randn(9, 64), torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    for other in (again, copy.deepcopy(layer)):
        assert torch.equal(other(x, offsets), layer(x, offsets))
    joined = ExpertsLinear.from_layers([part_of(layer, expert) for expert in range(4)])
    assert joined.activations == storage and torch.equal(joined(x, offsets), layer(x, offsets))
    with pytest.raises(RuntimeError, match="scales must be"):
        again.to_storage(storage).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("none", [4, 5, -1, -4, 2**40])
def test_an_index_that_is_none_of_an_expert_stands_for_none(none: int) -> None:
    """As num_experts does in Transformers: also where an expert would overflow, and in gradients."""
    dense, sparse = dense_experts("mixtral", torch.float16), sparse_experts("mixtral", 1.0, torch.float16)
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
    sparse = sparse_experts("mixtral")
    x, index, weights = routed(dense_experts("mixtral"), torch.float32)
    for inputs, name in (
        ((x[None], index, weights), "hidden_states must be"),
        ((x, index[1:], weights), "top_k_index"),
        ((x, index, weights[:, :1]), "top_k_weights must have the shape"),
        ((x, index.float(), weights), "top_k_index must be int32 or int64"),
    ):
        with pytest.raises(InvalidArgumentError, match=name):
            sparse(*inputs)
    with pytest.raises(InvalidArgumentError, match="offsets must say"):
        sparse.down(x)


@pytest.mark.parametrize(("experts", "tokens", "k"), [(1, 5, 1), (3, 7, 2), (512, 33, 5)])
@pytest.mark.parametrize("activation", ["silu", "relu", nn.Tanh()], ids=["gated", "relu", "tanh"])
@pytest.mark.parametrize("device", DEVICES)
def test_any_number_of_experts(device: str, activation: Any, experts: int, tokens: int, k: int) -> None:
    """Without a module of Transformers; with a gate and without, by kernels' activations and a module."""
    torch.manual_seed(0)
    gated, options = activation == "silu", {"experts": experts, "block_shape": BLOCK, "density": 0.5}
    up = ExpertsLinear(32, experts * 32, **options)  # type: ignore[arg-type]
    down = ExpertsLinear(16 if gated else 32, experts * 32, **options)  # type: ignore[arg-type]
    sparse = ts.BlockSparseExperts(up, down, gated=gated, activation=activation).to(device)
    x = torch.randn(tokens, 32, device=device)
    index = torch.rand(tokens, experts, generator=seeded()).topk(k).indices.to(device)
    weights = torch.rand(tokens, k, device=device)
    y, found = gradients(sparse, (x, index, weights))
    dense = {name: tensor.double() for name, tensor in sparse.to_dense().items()}
    expected = torch.zeros(tokens, 32, dtype=torch.float64, device=device)
    for token, choice in ((token, choice) for token in range(tokens) for choice in range(k)):
        own = {name: tensor[index[token, choice]] for name, tensor in dense.items()}
        name = f"{sparse.up_name}_proj"
        both = own[name] @ x[token].double() + own[f"{name}_bias"]
        middle = both.relu() if activation == "relu" else both.tanh()
        middle = torch.nn.functional.silu(both[:16]) * both[16:] if gated else middle
        result = own["down_proj"] @ middle + own["down_proj_bias"]
        expected[token] += weights[token, choice].double() * result
    close(y, expected.float())
    unused = sorted({*range(experts)} - {*index.flatten().tolist()})
    assert not bool(found["down.bias"].view(experts, -1)[unused].any())


def test_state_dicts_copies_and_moves_keep_what_they_compute() -> None:
    sparse, other = sparse_experts("gpt_oss", 0.25), sparse_experts("gpt_oss", block_shape=32)
    inputs = routed(dense_experts("gpt_oss"), torch.float32)
    expected = sparse(*inputs)
    other.load_state_dict(sparse.state_dict())
    for same in (other, copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse)), sparse.to("cpu")):
        assert torch.equal(same(*inputs), expected)
    half = [one.bfloat16() if one.is_floating_point() else one for one in inputs]
    assert copy.deepcopy(sparse).bfloat16()(*half).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        under = sparse(*inputs)
    assert under.dtype == torch.float32
    close(under, expected, 0.05)


def test_gradients_of_the_routing_are_exact() -> None:
    sparse = sparse_experts("mixtral", dtype=torch.float64)
    x, index, weights = routed(dense_experts("mixtral"), torch.float64, tokens=3)
    inputs = x.requires_grad_(), weights.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weights: sparse(x, index, weights), inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_exported_they_compute_the_same(device: str) -> None:
    sparse = sparse_experts("mixtral").to(device)
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
    sparse = sparse_experts("mixtral", dtype=torch.bfloat16).cuda()
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


def test_what_needs_one_weight_for_all_tokens_is_refused() -> None:
    layer = ExpertsLinear(64, 4 * 32, experts=4, block_shape=BLOCK, density=0.5)
    for call in (
        layer.to_linear,
        layer.cut,
        lambda: layer.from_linear(nn.Linear(4, 4)),
    ):
        with pytest.raises(UnsupportedError):
            call()
    with pytest.raises(InvalidArgumentError, match="policy must be 'sparse' with experts"):
        layer.policy = "auto"
    of_blocks = ExpertsLinear(128, 4 * 128, experts=4, block_shape=128, density=1)
    with pytest.raises(InvalidArgumentError, match="granularity must be 'feature' with experts"):
        of_blocks.to_storage("float8_e4m3fn", granularity="block", activations="float8_e4m3fn")
    with pytest.raises(InvalidArgumentError, match="down must have"):
        ts.BlockSparseExperts(layer, layer)
    with pytest.raises(InvalidArgumentError, match="experts must divide"):
        ExpertsLinear(64, 4 * 32, experts=3, block_shape=BLOCK)


@pytest.mark.parametrize("kind", MIXTURES)
def test_models_are_patched_by_structure(kind: str) -> None:
    model = ZOO[kind].make()
    batch = ZOO[kind].batch(0)
    found = experts_of(model)
    expected = model(**batch).logits
    report = ts.sparsify_(model, ts.BlockSparseConfig(1, BLOCK), layers="experts")
    assert set(sparse_experts_of(model)) == set(found)
    assert len(report.layers) == 2 * len(found)
    assert {layer.name.rpartition(".")[0] for layer in report.layers} == set(found)
    assert report.after.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert not any("experts" in one.name and len(one.shape) == 3 for one in report.dense)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-3, atol=1e-4)
    fused = ts.model.fuse_mlps_(model)
    assert not any("Experts" in one.kind for one in (*fused.layers, *fused.skipped))
    ts.densify_(model)
    assert [*experts_of(model)] == [*found] and not sparse_experts_of(model)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-3, atol=1e-4)


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
    config = ts.BlockSparseConfig(0.5, BLOCK)
    batches, sparse = [torch.randn(80, 64)], copy.deepcopy(model)
    assert "gate_up_proj" in str(ts.sparsify_(sparse, config, layers=".*router"))
    for config in (ts.BlockSparseConfig.w8a8(), ts.BlockSparseConfig.w4a16()):
        quantized = ts.quantize_(copy.deepcopy(sparse), config, batches)
        reasons = {one.name: one.reason for one in quantized.skipped}
        assert "3-D gate_up_proj" in reasons["0"] and "gate_up_proj" in str(quantized)
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
    for options, reason in (({"policy": "auto"}, "policy must be"), ({"density": 1e-6}, "rounds to none")):
        config = ts.BlockSparseConfig(**{"density": 0.5, "block_shape": BLOCK} | options)
        report = ts.sparsify_(ZOO["mixtral"].make(), config, strict=False)
        assert reason in {one.name: one.reason for one in report.skipped}[first]


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


def test_moments_of_an_expert_are_drawn_to_those_of_all() -> None:
    x, y = (torch.randn(40, 32, generator=seeded(seed)) for seed in (0, 1))
    whole = Moments(32, torch.device("cpu"), False)
    whole.add(torch.cat((x, y)), None, 0)
    own, nothing = (Moments(32, torch.device("cpu"), False, origin=whole.origin) for _ in range(2))
    own.add(x, None, 0)
    drawn, other = own.drawn_to(whole, 8.0), nothing.drawn_to(whole, 8.0)
    both, x = torch.cat((x, y)).double(), x.double()
    second, mean = (x.T @ x + 8 * both.T @ both / 80) / 48, (x.sum(0) + 8 * both.mean(0)) / 48
    torch.testing.assert_close(drawn.second(), second, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(drawn.mean(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other.second(), whole.second())
    assert (drawn.tokens(), other.tokens()) == (40, 0)


def test_budgets_are_spent_on_single_experts() -> None:
    kind = "mixtral"
    model, batches = ZOO[kind].make(), calibration(kind)
    configs = [ts.BlockSparseConfig(density, BLOCK) for density in (0.25, 0.5, 0.75)]
    profiles = measure_errors(model, batches, configs, layers=r".*experts\.")
    assert all(len(own) == 3 for own in profiles.values())
    weights = sum(p.numel() for experts in experts_of(model).values() for p in experts.parameters())
    plan = allocate(profiles, model, bytes=weights * 2)
    report = prune_(model, plan, batches)
    densities = {layer.density for layer in report.layers}
    assert len(densities) > 1
    kept = sum(p.numel() for experts in sparse_experts_of(model).values() for p in experts.parameters())
    assert kept <= weights // 2
    first = next(iter(profiles))
    other = dict.fromkeys(profiles, configs[0]) | {first: ts.BlockSparseConfig.w8a16(block_shape=BLOCK)}
    with pytest.raises(InvalidArgumentError, match="must agree in storage"):
        prune_(ZOO[kind].make(), other, batches)


def test_experts_of_a_projection_that_is_not_named_keep_their_blocks() -> None:
    model, dense = ZOO["mixtral"].make(), ZOO["mixtral"].make()
    prune_(model, ts.BlockSparseConfig(0.5, BLOCK), calibration("mixtral"), layers=r".*experts\.gate_up")
    for name, experts in sparse_experts_of(model).items():
        assert experts.down.density == 1 and experts.projections()["gate_up"].density == 0.5
        assert torch.equal(experts.to_dense()["down_proj"], dense.get_submodule(name).down_proj)


@pytest.mark.parametrize("activations", [None, "int8"])
def test_an_expert_that_stays_dense_is_stored_as_the_others(activations: str | None) -> None:
    model, granularity = ZOO["mixtral"].make(), "feature" if activations else "block"
    config = ts.BlockSparseConfig(0.5, BLOCK, None, "int8", granularity=granularity, activations=activations)
    prune_(model, {r".*experts\..*\.1$": None, "experts": config}, calibration("mixtral"))
    for experts in sparse_experts_of(model).values():
        for layer in experts.projections().values():
            assert layer.density == 0.625 and layer.spec.granularity == granularity
            assert layer.activations == activations
    assert model(**ZOO["mixtral"].batch(0)).logits.isfinite().all()


def test_an_error_leaves_dense_experts_in_place() -> None:
    model = ZOO["mixtral"].make()
    before = dict(model.named_modules())
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 3)}
    with pytest.raises(Exception):  # noqa: B017 - whatever the model says
        prune_(model, ts.BlockSparseConfig(0.5, BLOCK), [batch])
    assert dict(model.named_modules()) == before


def test_experts_are_reconstructed_and_distilled() -> None:
    teacher, batches, model = ZOO["mixtral"].make(), calibration("mixtral"), sparsified("mixtral")

    def error() -> float:
        return float((model(**batches[0]).logits - teacher(**batches[0]).logits).detach().norm())

    before = error()
    ts.reconstruct_(model, teacher, batches, epochs=8)
    middle = error()
    ts.distill_(model, teacher, batches * 5, lr=1e-4)
    assert error() < middle < before


def test_blocks_move_without_dense_gradients_and_not_with_them() -> None:
    batch, model = calibration("mixtral")[0], sparsified("mixtral")
    (first, *_) = sparse_experts_of(model).values()
    before, optimizer = first.down.pattern.to_block_mask(), torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(UnsupportedError, match="no dense gradients of experts"):
        ts.train.PatternSchedule(model, optimizer, every=10, grow="gradient")
    schedule = ts.train.PatternSchedule(model, optimizer, every=1, grow="random")
    for moved in (False, True):
        assert torch.equal(first.down.pattern.to_block_mask(), before) != moved
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        if not moved:
            schedule.step()
    assert first.down.density == 0.5


def test_experts_are_not_spread_over_processes() -> None:
    model = ZOO["mixtral"].make()
    for experts in experts_of(model).values():
        experts._is_expert_parallel = True
    report = ts.sparsify_(model, {"experts": ts.BlockSparseConfig(0.5, BLOCK)}, strict=False)
    reasons = [one.reason for one in report.skipped if one.kind == "MixtralExperts"]
    assert len(reasons) == 2 and all("spread over processes" in reason for reason in reasons)


RELOAD = """
import sys, torch, tilesparse as ts, transformers
from zoo import ZOO
for path in sys.argv[1:]:
    kind, how = path.rpartition("/")[2].split("-")[:2]
    if how == "save":
        model = ts.load(ZOO[kind].skeleton, path)
    else:
        model = getattr(transformers, ZOO[kind].model).from_pretrained(path)
    assert any(isinstance(module, ts.BlockSparseExperts) for module in model.modules())
    torch.save((dict(model.state_dict()), model.eval()(**ZOO[kind].batch(0)).logits), path + "/out.pt")
"""


def come_back(models: dict[str, Any], path: Path) -> None:
    """Save models, load them in a new process, and compare all bits; names begin with "kind-how-"."""
    for name, model in models.items():
        if "-save-" in name:
            ts.save(model, path / name, max_shard_size="100KB")
        else:
            model.save_pretrained(path / name, max_shard_size="100KB")
    run_anew(RELOAD, *(path / name for name in models))
    for own, model in models.items():
        state, logits = torch.load(path / own / "out.pt")
        assert set(state) == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), (own, name)
        assert torch.equal(logits, model(**ZOO[own.partition("-")[0]].batch(0)).logits), own


def quantized_experts(storage: str, activations: str | None = None) -> Any:
    kind = "qwen2_moe"
    model, batches = sparsified(kind, 1.0, 32, also="o_proj"), calibration(kind)
    expected = model(**batches[0]).logits
    config = ts.BlockSparseConfig(storage=storage, activations=activations)
    report = ts.quantize_(model, config, batches)
    named = {layer.name: layer for layer in report.layers}
    for name, experts in sparse_experts_of(model).items():
        for own, layer in experts.projections().items():
            found = named[f"{name}.{own}"]
            assert layer.storage == storage and 0 < found.error < 0.02
            assert layer.activations == found.activations == activations
    quantized = model(**batches[0]).logits
    assert 0 < float((quantized - expected).norm() / expected.norm()) < 0.2
    return model


def test_checkpoints_come_back_bit_for_bit_in_a_new_process(tmp_path: Path) -> None:
    plain = (
        "gpt_oss-save-",
        *(f"{kind}-save_pretrained-" for kind in ("gpt_oss", "granitemoe", "deepseek_v3")),
    )
    quantized_experts("float8_e4m3fn")
    models = {
        **{name: sparsified(name.partition("-")[0], also=".*self_attn") for name in plain},
        "qwen2_moe-save-int8": quantized_experts("int8"),
        "qwen2_moe-save_pretrained-int4": quantized_experts("int4"),
        "qwen2_moe-save_pretrained-w8a8": quantized_experts("int8", "int8"),
        "qwen2_moe-save-float8": quantized_experts("float8_e4m3fn", "float8_e4m3fn"),
    }
    come_back(models, tmp_path)


@pytest.mark.parametrize(("storage", "activations"), [("int8", None), ("int4", None), ("int8", "int8")])
def test_stored_experts_load_without_dense_weights(
    storage: str, activations: str | None, tmp_path: Path
) -> None:
    kind, batch = ZOO["mixtral"], ZOO["mixtral"].batch(0)
    model = sparsified("mixtral", block=32, storage=storage, activations=activations)
    ts.save(model, tmp_path)
    assert '"version": 3' in (tmp_path / "config.json").read_text()
    other = ts.load(kind.skeleton, tmp_path).eval()
    assert torch.equal(other(**batch).logits, model(**batch).logits)
    again = ts.load(other, tmp_path)  # into experts that are sparse already
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    with pytest.raises(ts.errors.CheckpointError, match=r"missing in the model|experts"):
        ts.load(ZOO["llama"].skeleton, tmp_path)
