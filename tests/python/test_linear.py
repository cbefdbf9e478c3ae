from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICES, Recorder, blocks_of_dense, seeded
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import prune

from tilesparse import BlockPattern, BlockSparseConfig, BlockSparseLinear, sparsify_
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.errors import (
    InvalidArgumentError,
    InvalidPatternError,
    InvalidTypeError,
    PatternChangedError,
    UnsupportedError,
)
from tilesparse.nn import ReferenceBlockSparseLinear
from tilesparse.nn.weight import layer_index

IN, OUT = 128, 96
POLICIES, ITSELF = ["sparse", "dense"], lambda layer: layer
NAMES = ("crow_indices", "col_indices", "slot")


def make(density: float = 0.5, seed: int = 0, **options: Any) -> BlockSparseLinear:
    generator = torch.Generator().manual_seed(seed)
    return BlockSparseLinear(IN, OUT, density=density, generator=generator, **{"block_shape": 32, **options})


def randn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(**options)


def gradients(module: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    """Return gradients of a fixed scalar of the output, with respect to x and the parameters."""
    y = module(x)
    target = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y)
    return list(torch.autograd.grad((y * target).sum(), [x, *module.parameters()]))


def same_layers(a: BlockSparseLinear, b: BlockSparseLinear) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def reload(state: dict[str, Tensor]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)])
def test_computes_the_dense_layer_and_its_gradients(
    device: str, bias: bool, leading: tuple[int, ...], policy: str
) -> None:
    layer = make(bias=bias, policy=policy, device=device)
    dense = layer.to_linear()
    x = randn(*leading, IN, device=device).requires_grad_()
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-5)
    residual = randn(*leading, OUT, device=device).requires_grad_()
    for module in (layer, ReferenceBlockSparseLinear(layer)):
        y = module(x, residual=residual)
        torch.testing.assert_close(y, dense(x) + residual, rtol=1e-5, atol=1e-5)
        assert torch.equal(torch.autograd.grad(y.sum(), residual)[0], torch.ones_like(residual))
    with pytest.raises(InvalidArgumentError, match="residual"):
        layer(x, residual=residual[..., :1])
    got, expected = gradients(layer, x), gradients(dense, x)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5)
    kept = blocks_of_dense(expected[1].cpu(), layer.pattern).to(device)
    torch.testing.assert_close(got[1], kept, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[2:], expected[2:], rtol=1e-4, atol=1e-5)


def test_initial_values_have_the_scale_of_a_dense_layer_with_the_kept_fan_in() -> None:
    rows = [(0, col) for col in range(0, 64, 4)] + [(1, 0)]  # 16 blocks, 1 block, none
    pattern = BlockPattern.from_blocks(rows, shape=(96, 2048), block_shape=(32, 32))
    layer = BlockSparseLinear(2048, 96, pattern=pattern, generator=torch.Generator().manual_seed(0))
    assert layer.bias is not None
    for blocks, bias, fan_in in (
        (layer.weight[:16], layer.bias[:32], 16 * 32),
        (layer.weight[16:], layer.bias[32:64], 32),
    ):
        bound = 1 / math.sqrt(fan_in)
        assert 0.9 * bound < blocks.abs().max() <= bound
        assert 0.5 * bound < bias.abs().max() <= bound
        assert blocks.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert torch.equal(layer.bias[64:], torch.zeros(32))


@pytest.mark.parametrize("block_shape", [(16, 16), (32, 64), (32, 32)])
def test_from_linear_keeps_the_strongest_blocks_with_their_values(block_shape: tuple[int, int]) -> None:
    linear = nn.Linear(IN, OUT, dtype=torch.float64).eval()
    linear.bias.requires_grad_(False)
    layer = BlockSparseLinear.from_linear(linear, 0.25, block_shape=block_shape)
    bn, bk = block_shape
    norms = linear.weight.detach().reshape(OUT // bn, bn, IN // bk, bk).square().sum((1, 3))
    kept = layer.pattern.to_block_mask()
    assert kept.sum() == round(0.25 * norms.numel())
    assert norms[kept].min() > norms[~kept].max()
    assert torch.equal(layer.to_linear().weight, linear.weight * layer.pattern.to_mask())
    assert layer.weight.dtype == torch.float64 and not layer.training
    assert layer.weight.requires_grad and layer.bias is not None and not layer.bias.requires_grad
    assert torch.equal(layer.bias, linear.bias) and layer.bias is not linear.bias


def test_from_linear_warns_of_empty_rows_at_the_line_of_the_caller() -> None:
    scores = torch.arange(12.0).view(3, 4)
    with pytest.warns(UserWarning, match="leave 2 block rows") as warned:
        BlockSparseLinear.from_linear(nn.Linear(IN, OUT), 0.25, block_shape=32, scores=scores)
    assert warned[0].filename == __file__


def test_from_linear_follows_given_scores_or_pattern() -> None:
    linear = nn.Linear(IN, OUT)
    wanted = BlockPattern.random((OUT, IN), block_shape=(32, 32), nnz=5)
    by_pattern = BlockSparseLinear.from_linear(linear, pattern=wanted)
    assert by_pattern.pattern == wanted
    for scores in (wanted.to_block_mask().float(), wanted.to_mask().half()):
        by_scores = BlockSparseLinear.from_linear(linear, 5 / 12, scores=scores, block_shape=32)
        assert same_layers(by_scores, by_pattern)
    dense = BlockSparseLinear.from_linear(linear, 1, block_shape=32)
    torch.testing.assert_close(dense(randn(7, IN)), linear(randn(7, IN)), rtol=1e-5, atol=1e-5)


# Adam divides by the size of gradients, so rounding errors of small ones grow: on the CPU, where they depend
# on where tensors lie, there is float64.
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [("cpu", torch.float64, 1e-9), pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu)],
)
def test_the_plain_twin_agrees_through_forty_adam_steps(
    device: str, dtype: torch.dtype, tolerance: float
) -> None:
    layer = make(device=device, dtype=dtype)
    twin = ReferenceBlockSparseLinear(layer)
    optimizers = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (layer, twin)]
    x, target = randn(64, IN, device=device, dtype=dtype), randn(64, OUT, device=device, dtype=dtype)
    for _ in range(40):
        for module, optimizer in zip((layer, twin), optimizers, strict=True):
            optimizer.zero_grad()
            (module(x) - target).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(layer(x), twin(x), rtol=0, atol=tolerance)
    torch.testing.assert_close(layer.weight, twin.weight, rtol=0, atol=tolerance)


def test_the_policy_is_a_choice_of_each_layer_and_not_of_its_state() -> None:
    layer, other = make(policy="dense"), make()
    assert "policy='dense'" in repr(layer) and "policy" not in repr(other)
    assert layer.state_dict().keys() == other.state_dict().keys()
    other.load_state_dict(layer.state_dict())
    assert layer.policy == "dense" and other.policy == "sparse"
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.policy == "dense"
    for policy, seen in (("sparse", "dds_nt"), ("dense", "expand"), ("auto", "dds_nt")):
        other.policy = policy  # "auto" is sparse where there is no estimate, as on the CPU
        with Recorder() as recorder:
            other(randn(2, IN))
        assert recorder.seen == {seen}
    with pytest.raises(InvalidArgumentError, match=r"policy.*'sparse', 'auto', 'dense'.*'fast'"):
        layer.policy = "fast"
    assert layer.policy == "dense"
    assert BlockSparseLinear.from_linear(nn.Linear(IN, OUT), policy="dense", block_shape=32).policy == "dense"


@pytest.mark.parametrize(
    "other", [{"density": 0.25}, {"density": 0.75, "block_shape": (16, 32)}, {"density": 0}]
)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_brings_its_pattern(other: dict[str, Any], assign: bool) -> None:
    saved = make(seed=5, **other)
    layer = make()
    weight = layer.weight
    layer(randn(2, IN)).sum().backward()
    layer.load_state_dict(reload(saved.state_dict()), assign=assign)
    assert same_layers(layer, saved)
    assert assign or (layer.weight is weight and weight.grad is None)
    x = randn(3, IN)
    assert torch.equal(layer(x), saved(x))
    layer(x).sum().backward()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}])
@pytest.mark.parametrize(("before", "now"), [(0.25, 0.75), (0.75, 0.25)])
def test_an_optimizer_with_states_of_another_number_of_blocks_is_refused(
    before: float, now: float, options: dict[str, Any]
) -> None:
    layer, other = make(seed=1, density=before), make(seed=2, density=now)
    x = randn(4, IN)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    optimizer, fresh = (torch.optim.AdamW(layer.parameters(), lr=0.1, **options) for _ in range(2))
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    layer.load_state_dict(other.state_dict())
    weights = copy.deepcopy(layer.state_dict())
    with pytest.raises(PatternChangedError, match="AdamW keeps 'exp_avg' of shape"):
        step(optimizer)
    torch.testing.assert_close(dict(layer.state_dict()), dict(weights), rtol=0, atol=0)
    step(fresh)  # has no states yet
    optimizer.load_state_dict(fresh.state_dict())
    step(optimizer)  # has states of the new size
    optimizer.load_state_dict(saved)
    with pytest.raises(PatternChangedError, match="AdamW keeps"):
        step(optimizer)


def test_loading_into_a_layer_leaves_others_with_the_same_pattern_alone() -> None:
    layer = make()
    sibling = BlockSparseLinear(IN, OUT, pattern=layer.pattern)
    before = copy.deepcopy(sibling)
    layer.load_state_dict(make(density=0.25).state_dict())
    assert same_layers(sibling, before) and sibling(randn(2, IN)).shape == (2, OUT)
    sibling.pattern.update_(make(seed=2).pattern)
    assert torch.equal(sibling.state_dict()["col_indices"], make(seed=2).col_indices)
    sibling.pattern = make(seed=3).pattern
    sibling(randn(1, IN))
    assert torch.equal(sibling.col_indices, make(seed=3).col_indices)


BROKEN: list[tuple[str, Any]] = [
    ("col_indices", torch.tensor([0, 1, 9])),
    ("slot", torch.tensor([0, 0, 1])),
    ("slot", None),
    ("crow_indices", torch.tensor([0, 3])),
    ("crow_indices", torch.empty(4, dtype=torch.int32, device="meta")),
    ("weight", torch.zeros(OUT, IN)),
    ("weight", torch.zeros(4, 32, 32)),
    ("bias", torch.zeros(OUT + 1)),
]


@pytest.mark.parametrize(("name", "value"), BROKEN)
def test_a_broken_state_dict_changes_nothing(name: str, value: Any) -> None:
    state, layer, before = make(density=0.25).state_dict(), make(), make()
    state[name] = value
    if value is None:
        del state[name]
    with pytest.raises(RuntimeError, match="meta" if value is not None and value.is_meta else name):
        layer.load_state_dict(state)
    assert same_layers(layer, before) and layer(randn(2, IN)).shape == (2, OUT)


def test_a_state_dict_holds_only_tensors_with_memory_of_their_own() -> None:
    state = make().state_dict()
    assert set(state) == {"weight", "bias", "crow_indices", "col_indices", "slot"}
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    assert all(tensor.is_contiguous() for tensor in state.values())


def test_buffers_changed_in_place_replace_the_pattern() -> None:
    layer, other = make(seed=1), make(seed=2)
    for name in NAMES:
        getattr(layer, name).copy_(getattr(other, name))
    with torch.no_grad():
        for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    x = randn(3, IN)
    assert torch.equal(layer(x), other(x))
    assert layer.pattern == other.pattern
    entry = prepared(layer_index(layer))
    layer.col_indices.copy_(layer.col_indices.clone())  # no change of content
    layer(x)
    assert prepared(layer_index(layer)) is entry and entry.generation == 0
    layer.col_indices.fill_(99)
    with pytest.raises(InvalidPatternError, match="col_indices"):
        layer(x)


def test_another_buffer_in_the_place_of_a_dropped_one_replaces_the_pattern() -> None:
    layer, other = (
        make(pattern=BlockPattern.from_blocks([(0, column)], shape=(OUT, IN), block_shape=(32, 32)))
        for column in (0, 1)
    )
    dropped = id(layer.col_indices)
    layer.col_indices = torch.zeros_like(layer.col_indices)
    # One is where the first buffer was, if that is free.
    arrays = [other.col_indices.clone() for _ in range(100)]
    layer.col_indices = next((array for array in arrays if id(array) == dropped), arrays[0])
    layer.weight, layer.bias = other.weight, other.bias
    x = randn(3, IN)
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("kind", [ITSELF, ReferenceBlockSparseLinear])
def test_calls_are_those_of_nn_linear(kind: Callable[[BlockSparseLinear], nn.Module]) -> None:
    """As PyTorch's own tests of modules call it: by the name of the argument, and without a mode."""
    layer, x = kind(make()), randn(4, IN)
    y = layer(input=x)
    assert torch.equal(y, layer(x))
    del layer.training
    assert torch.equal(layer(x), y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [ITSELF, ReferenceBlockSparseLinear])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(
    kind: Callable[[BlockSparseLinear], nn.Module], layout: torch.layout
) -> None:
    x = torch.nested.nested_tensor([randn(3, IN), randn(5, IN)], layout=layout)
    with pytest.raises(InvalidTypeError, match=r"^input must be a dense tensor, got a"):
        kind(make())(x)


ARGUMENTS: list[tuple[str, Any]] = [
    ("in_features", 100),
    ("out_features", 100),
    ("density", 1.5),
    ("block_shape", (8, 32)),
    ("pattern", BlockPattern.full((IN, OUT), block_shape=(32, 32))),
    ("policy", "fast"),
]
OF_LINEAR: list[tuple[nn.Module, dict[str, Any], str]] = [
    (nn.Identity(), {}, "linear"),
    (nn.Linear(IN, OUT, device="meta"), {}, "linear"),
    (nn.Linear(IN, OUT + 1), {}, "out_features"),
    (nn.Linear(IN, OUT), {"scores": torch.zeros(2, 2)}, "scores"),
    (nn.Linear(IN, OUT), {"density": -1}, "density"),
    (nn.Linear(IN, OUT), {"policy": "fast"}, "policy"),
    (nn.Linear(IN, OUT), {"parts": (1, 2), "pattern": BlockPattern.full((OUT, IN), block_shape=16)}, "parts"),
]


def test_bad_arguments_are_named() -> None:
    for name, value in ARGUMENTS:
        with pytest.raises(InvalidArgumentError, match=name):
            BlockSparseLinear(**{"block_shape": 32, "in_features": IN, "out_features": OUT} | {name: value})
    for linear, options, name in OF_LINEAR:
        with pytest.raises(InvalidArgumentError, match=name):
            BlockSparseLinear.from_linear(linear, **{"block_shape": 32} | options)


UTILS, PARAMETRIZATIONS = torch.nn.utils, torch.nn.utils.parametrizations
OF_MATRICES: dict[str, Callable[[nn.Module], Any]] = {
    "SpectralNorm": UTILS.spectral_norm,
    "WeightNorm": UTILS.weight_norm,
    "_SpectralNorm": PARAMETRIZATIONS.spectral_norm,
    "_WeightNorm": PARAMETRIZATIONS.weight_norm,
    "_Orthogonal": PARAMETRIZATIONS.orthogonal,
    "LnStructured": lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
    "RandomStructured": lambda layer: prune.random_structured(layer, "weight", 0.5, dim=0),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("name", OF_MATRICES)
def test_norms_of_matrices_are_refused(name: str) -> None:
    """Silently, they would be norms of blocks, or of [nnz, bn * bk]."""
    layer, x = BlockSparseLinear(128, 96, block_shape=32), torch.randn(3, 128)
    OF_MATRICES[name](layer)
    with pytest.raises(UnsupportedError, match=rf"weight must not be under torch.nn.utils.*\.{name}, "):
        layer(x)
    with pytest.raises(UnsupportedError, match="remove what parametrizes it"):
        layer.to_linear()


def test_what_is_hung_on_single_weights_is_not_refused() -> None:
    layer, x = BlockSparseLinear(128, 96, generator=seeded(), block_shape=32), torch.randn(3, 128)
    y = layer(x)
    prune.l1_unstructured(layer, "weight", 0.5)
    pruned = layer(x)
    assert not torch.equal(pruned, y)
    prune.remove(layer, "weight")
    assert torch.allclose(pruned, layer.to_linear()(x), atol=1e-6)
    layer = BlockSparseLinear(128, 96, generator=seeded(), block_shape=32)
    for options in ({"dim": -1}, {"name": "bias"}):  # by the norm of W, which is that of its blocks
        PARAMETRIZATIONS.weight_norm(layer, **options)
        assert torch.allclose(layer(x), y, atol=1e-6)


@pytest.mark.parametrize(("whole", "limit", "compiled"), [(False, 4, 4), (False, 8, 6), (True, 4, 1)])
def test_many_layers_are_compiled_as_the_page_on_compilation_says(
    whole: bool, limit: int, compiled: int
) -> None:
    layers = [BlockSparseLinear(256, 256, block_shape=16, density=0.1 + 0.1 * i) for i in range(6)]
    assert len({layer.pattern.nnz for layer in layers}) == 6
    counter, x = CompileCounterWithBackend("eager"), torch.randn(8, 256)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=limit), torch.no_grad():
        for module in [nn.Sequential(*layers)] if whole else layers:
            torch.testing.assert_close(torch.compile(module, backend=counter)(x), module(x))
    assert counter.frame_count == compiled


INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, a=5**0.5),
    "kaiming_normal": lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out"),
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": lambda weight: nn.init.xavier_normal_(weight.data),
    "normal": nn.init.normal_,
}


KINDS: list[Callable[[BlockSparseLinear], Any]] = [
    ITSELF,
    copy.deepcopy,
    lambda layer: pickle.loads(pickle.dumps(layer)),
    lambda layer: layer.double(),
    ReferenceBlockSparseLinear,
]


@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_of_pytorch_count_the_weights_of_a_row(
    name: str, kind: Callable[[BlockSparseLinear], Any]
) -> None:
    sizes, scale = (512, 1024), 1 if name == "normal" else 2
    layer = kind(BlockSparseLinear(*sizes, density=0.25, block_shape=32))
    dense = nn.Linear(*sizes)
    for each in (layer, dense):
        INITS[name](each.weight)
    assert layer.weight.std().item() == pytest.approx(scale * dense.weight.std().item(), rel=0.03)


@pytest.mark.parametrize("name", ["orthogonal_", "dirac_"])
def test_initial_values_of_other_weights_are_refused(name: str) -> None:
    layer = make()
    before = layer.weight.detach().clone()
    with pytest.raises(UnsupportedError, match=f"torch.nn.init.{name} takes the kept blocks"):
        getattr(nn.init, name)(layer.weight)
    assert torch.equal(layer.weight, before)
    getattr(nn.init, name)(torch.empty(4, 4, 4))


def test_weights_are_shared_by_layers_of_one_pattern_alone() -> None:
    layer, other, alike = make(seed=0), make(seed=1), make(seed=0)
    before = other.weight
    with pytest.raises(InvalidArgumentError, match="weight must not be that of a layer with another pattern"):
        other.weight = layer.weight
    with pytest.raises(InvalidArgumentError, match=r"weight must be a Parameter \[nnz, bn, bk\], got None"):
        other.weight = None  # type: ignore[assignment]
    assert other.weight is before and other(randn(2, IN)).shape == (2, OUT)
    alike.weight = layer.weight
    copied, _ = copy.deepcopy((layer, alike))
    other.pattern, other.weight, other.bias = copied.pattern, copied.weight, copied.bias
    assert torch.equal(other(randn(2, IN)), copied(randn(2, IN)))


def _sparsified(layer: BlockSparseLinear) -> BlockSparseLinear:
    model: Any = nn.Sequential(nn.Linear(IN, OUT))
    sparsify_(model, BlockSparseConfig(0.5, 32))
    return model[0]


WITHIN_INFERENCE: dict[str, Callable[[Any], Any]] = {
    "made": lambda layer: make(),
    "of a spec": lambda layer: BlockSparseLinear.from_spec(layer.spec),
    "of tensors": lambda layer: BlockSparseLinear.from_state(layer.spec, layer.state_dict()),
    "of a dense layer": _sparsified,
    "of another dtype": lambda layer: layer.double().float(),
    "stored otherwise": lambda layer: layer.to_storage("int8").to_storage("plain"),
    "2:4": lambda layer: layer.set_nm((2, 4)),
    "loaded": lambda layer: [layer, layer.load_state_dict(make(seed=1, density=0.25).state_dict())][0],
    "of another pattern": lambda layer: [layer, layer.pattern.update_(make(seed=1).pattern)][0],
}


@pytest.mark.filterwarnings("ignore:the blocks that were chosen")
@pytest.mark.parametrize("name", WITHIN_INFERENCE)
def test_layers_of_inference_mode_can_be_trained(name: str) -> None:
    layer = make()
    with torch.inference_mode():
        layer = WITHIN_INFERENCE[name](layer)
    if name == "of a spec":
        layer.load_state_dict(make().state_dict())
    x = randn(4, IN).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(layer(x), layer.to_linear()(x))
    with torch.no_grad():
        layer.pattern = make(seed=2, density=layer.density).pattern
        layer.weight.zero_()
    assert torch.equal(layer(x), layer.bias.expand(4, OUT))
