"""Patterns are tensors: whatever holds, moves, copies, compiles or exports tensors has the right pattern."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import DEVICES, dense_weight, make_pattern, randn, random_values, seeded
from torch import Tensor, func, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

from tilesparse import BlockPattern, BlockSparseLinear, functional
from tilesparse._runtime import pattern_cache
from tilesparse._runtime.pattern_cache import entries, prepared
from tilesparse.errors import InvalidArgumentError, InvalidPatternError, PatternChangedError
from tilesparse.nn.weight import layer_index

IN, OUT = 96, 64
ARRAYS = ("crow_indices", "col_indices", "slot")


@pytest.fixture(autouse=True)
def no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every call on a GPU begin a comparison, or ask for the answer."""
    monkeypatch.setattr(pattern_cache, "INTERVAL", 0.0)
    monkeypatch.setattr(pattern_cache, "PAUSE", 0.0)


def make(seed: int = 0, **options: Any) -> Any:
    options = {"density": 0.5, "block_shape": 16, "generator": seeded(seed), **options}
    return BlockSparseLinear(IN, OUT, **{"block_shape": 32, **options})


def expected(layer: BlockSparseLinear, x: Tensor) -> Tensor:
    """From the definition of BSR, of what the buffers hold now."""
    buffers = {name: getattr(layer, name) for name in ("crow_indices", "col_indices", "slot")}
    slot = buffers.pop("slot")
    pattern = BlockPattern(**buffers, slot=slot, shape=(OUT, IN), block_shape=layer.block_shape)
    y = x.double().cpu() @ dense_weight(layer.weight, pattern).t()
    return y if layer.bias is None else y + layer.bias.detach().double().cpu()


def assert_right(layer: Any, y: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(y.double().cpu(), expected(layer, x), rtol=1e-5, atol=1e-5)


def write(layer: Any, other: BlockSparseLinear) -> None:
    """Overwrites a layer's buffers as a broadcast does."""
    for name in ("crow_indices", "col_indices", "slot"):
        layer.get_buffer(name).copy_(other.get_buffer(name))


# ---- one truth ----


@pytest.mark.parametrize("device", DEVICES)
def test_products_follow_buffers_changed_in_place(device: str) -> None:
    layer, x = make(1, device=device), randn(5, IN, dtype=torch.float32, device=device).requires_grad_()
    for seed in (2, 3, 2):
        layer(x)
        write(layer, make(seed))
        assert_right(layer, layer(x), x)
        (gradient,) = torch.autograd.grad(layer(x).sum(), x)
        weight = dense_weight(layer.weight, layer.pattern)
        torch.testing.assert_close(gradient.double().cpu(), weight.sum(0).expand(5, -1), rtol=1e-5, atol=1e-5)
    assert layer.pattern == make(2).pattern


UNCOUNTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    ".data": lambda buffer, value: buffer.data.copy_(value),
    "state_dict": lambda buffer, value: buffer.detach().data.copy_(value),
    "storage": lambda buffer, value: buffer.untyped_storage().copy_(value.untyped_storage()),
}


def after_a_write(device: str, call: Callable[[], Tensor]) -> Tensor:
    """The result of a call once an uncounted write was found, on a GPU by the second call since."""
    if device == "cuda":
        call()
        torch.cuda.synchronize()
        with pytest.raises(PatternChangedError, match=r"between .* ms ago"):
            call()
    return call()


@pytest.mark.parametrize("name", UNCOUNTED)
@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("device", DEVICES)
def test_products_follow_writes_that_pytorch_does_not_count(device: str, policy: str, name: str) -> None:
    options: dict[str, Any] = {"policy": policy, "device": device}
    layer, x = make(1, **options), randn(5, IN, dtype=torch.float32, device=device).requires_grad_()
    with torch.inference_mode():
        frozen = make(1, **options)
    for seed in (2, 3):
        before = layer(x)
        versions = [layer.get_buffer(array)._version for array in ARRAYS]
        for changed in (layer, frozen):
            with torch.no_grad():
                changed(x)
            if device == "cuda":
                torch.cuda.synchronize()  # a comparison that is under way has its answer
            for array in ARRAYS:
                UNCOUNTED[name](changed.get_buffer(array), make(seed).get_buffer(array))
            with torch.no_grad():
                assert_right(changed, after_a_write(device, partial(changed, x)), x)
        assert versions == [layer.get_buffer(array)._version for array in ARRAYS]
        if policy == "sparse":
            with pytest.raises(PatternChangedError, match="pattern"):
                before.sum().backward()
        (gradient,) = torch.autograd.grad(layer(x).sum(), x)
        weight = dense_weight(layer.weight, layer.pattern)
        torch.testing.assert_close(gradient.double().cpu(), weight.sum(0).expand(5, -1), rtol=1e-5, atol=1e-5)
    if device == "cuda":
        torch.cuda.synchronize()
    layer.slot.data.fill_(7)
    with pytest.raises(InvalidPatternError, match="slot"):
        after_a_write(device, partial(layer, x))


@pytest.mark.parametrize("device", DEVICES)
def test_swapping_memory_back_and_forth_leaves_nothing_behind(device: str) -> None:
    layer, x = make(1, device=device), randn(5, IN, dtype=torch.float32, device=device)
    layer(x)
    memories = [[make(seed, device=device).get_buffer(name) for name in ARRAYS] for seed in (1, 2)]
    finalizers, before = len(weakref.finalize._registry), len(entries)
    for turn in range(10):
        for name, memory in zip(ARRAYS, memories[turn % 2], strict=True):
            layer.get_buffer(name).data = memory
        assert_right(layer, layer(x), x)
    assert len(weakref.finalize._registry) == finalizers
    assert len(entries) == before


@pytest.mark.parametrize("device", DEVICES)
def test_the_pattern_is_a_view_of_the_buffers(device: str) -> None:
    layer, x = make(1, device=device), randn(5, IN, dtype=torch.float32, device=device)
    pattern, buffer = layer.pattern, layer.col_indices
    assert pattern.col_indices is buffer and pattern.device == buffer.device
    pattern.update_(make(2).pattern)
    assert layer.col_indices is buffer and layer.pattern == make(2).pattern
    assert_right(layer, layer(x), x)
    layer.pattern = make(3).pattern
    assert layer.col_indices is buffer and pattern == make(3).pattern
    assert_right(layer, layer(x), x)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make(density=0.25).pattern, "pattern must .*12 of them"),
        (BlockPattern.full((OUT, IN), block_shape=32), "pattern must .*blocks of"),
        (BlockPattern.full((IN, OUT), block_shape=16), "pattern must have shape"),
        (torch.zeros(3), "pattern must be a BlockPattern, got Tensor"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused_when_it_is_assigned(other: Any, message: str) -> None:
    layer = make()
    before = copy.deepcopy(layer.pattern)
    with pytest.raises(InvalidArgumentError, match=message):
        layer.pattern = other
    assert layer.pattern == before


def test_a_layers_pattern_keeps_its_number_of_blocks() -> None:
    layer = make()
    with pytest.raises(InvalidPatternError, match=r"must have 12 blocks.*got 6"):
        layer.pattern.update_(make(density=0.25).pattern)


def test_layers_do_not_share_the_tensors_of_a_pattern() -> None:
    pattern = make().pattern
    layers = [make(seed, pattern=pattern) for seed in (1, 2)]
    layers[0].pattern.update_(make(5).pattern)
    assert layers[1].pattern == pattern and layers[0].pattern != pattern


@pytest.mark.parametrize("device", DEVICES)
def test_moved_blocks_keep_their_weights(device: str) -> None:
    layer, x = make(device=device), randn(5, IN, dtype=torch.float32, device=device)
    layer(x)
    free = (~layer.pattern.to_block_mask()).nonzero()[:2]
    for check in (True, False):
        taken = torch.stack(layer.pattern.block_indices(), 1)[[3, 7]]
        weight = layer.weight.detach().clone()
        layer.pattern.move_blocks_([3, 7], free, check=check)
        assert torch.equal(layer.weight, weight)
        assert torch.equal(torch.stack(layer.pattern.block_indices(), 1)[[3, 7]].cpu(), free.cpu())
        assert_right(layer, layer(x), x)
        free = taken
    with pytest.raises(InvalidPatternError, match="listed twice"):
        layer.pattern.move_blocks_([0], torch.stack(layer.pattern.block_indices(), 1)[1:2])


@pytest.mark.parametrize("device", DEVICES)
def test_a_pattern_elsewhere_is_copied_once_and_followed(device: str) -> None:
    pattern = make_pattern("random 50%", (3, 4), (16, 32))
    values = random_values(pattern, dtype=torch.float32, device=device)
    x = randn(7, pattern.in_features, dtype=torch.float32, device=device)
    for name in ("diagonal", "random 50%"):
        other = make_pattern(name, (3, 4), (16, 32))
        if other.nnz == pattern.nnz:
            pattern.update_(other)
        y = functional.linear(x, values, pattern)
        torch.testing.assert_close(
            y.double().cpu(), x.double().cpu() @ dense_weight(values, pattern).t(), rtol=1e-5, atol=1e-5
        )
    assert pattern.to(device).device.type == device


def test_inference_mode_leaves_nothing_that_cannot_be_updated() -> None:
    layer, x = make(1), randn(5, IN, dtype=torch.float32)
    with torch.inference_mode():
        layer(x)
        made_there = make(1)
        pattern = make(1).pattern
    for changed in (layer, made_there):
        changed.pattern.update_(make(2).pattern)
        assert changed.pattern == make(2).pattern
        assert torch.equal(layer(x), changed(x))
    layer.load_state_dict(make(3).state_dict())
    assert_right(layer, layer(x), x)
    assert pattern.update_(make(2).pattern) == make(2).pattern


def test_work_is_counted_for_kept_blocks() -> None:
    layer, x = make(), randn(5, IN, dtype=torch.float32).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 12 * 16 * 16


# ---- copies, parametrizations, loading ----


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_have_their_own_pattern(copied: Callable[[BlockSparseLinear], BlockSparseLinear]) -> None:
    layer, x = make(1), randn(5, IN, dtype=torch.float32)
    layer(x)
    other = copied(layer)
    assert other.pattern == layer.pattern
    other.pattern.update_(make(2).pattern)
    assert_right(other, other(x), x)
    assert_right(layer, layer(x), x)


REPARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, dim=None),  # type: ignore[arg-type]
    "old weight_norm": lambda layer: nn.utils.weight_norm(layer, dim=None),  # type: ignore[arg-type]
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "parametrize": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh()),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", REPARAMETRIZATIONS)
def test_a_reparametrized_layer_loads_its_own_state(name: str) -> None:
    layers = [make(1), make(2)]
    for layer in layers:
        REPARAMETRIZATIONS[name](layer)
    x = randn(5, IN, dtype=torch.float32)
    y = layers[0](x)
    layers[1].load_state_dict(layers[0].state_dict())
    torch.testing.assert_close(layers[1](x), y)
    other = make(3, density=0.25)
    REPARAMETRIZATIONS[name](other)
    with pytest.raises(RuntimeError, match=r"must have 12 blocks of"):
        layers[1].load_state_dict(other.state_dict())
    torch.testing.assert_close(layers[1](x), y)


@pytest.mark.parametrize("names", [("weight", "bias"), ("weight",), ("weight", "crow_indices", "slot")])
def test_a_weight_is_not_loaded_without_its_pattern(names: tuple[str, ...]) -> None:
    layer, saved = make(1), make(2).state_dict()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="missing, but weight is there"):
        layer.load_state_dict({name: saved[name] for name in names}, strict=False)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_loading_in_place_reaches_what_was_prepared() -> None:
    layer, saved, x = make(1), make(2), randn(5, IN, dtype=torch.float32)
    layer(x)
    buffer = layer.col_indices
    layer.load_state_dict(saved.state_dict())
    assert layer.col_indices is buffer
    assert torch.equal(layer(x), saved(x))


# ---- graphs of autograd that are older than an update ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", ["update_", "write", "load", "load another nnz"])
def test_backward_after_a_change_of_the_pattern_raises(device: str, change: str) -> None:
    layer = make(1, device=device)
    loss = layer(randn(5, IN, dtype=torch.float32, device=device).requires_grad_()).sum()
    if change == "update_":
        layer.pattern.update_(make(2).pattern)
    elif change == "write":
        write(layer, make(2))
    else:
        layer.load_state_dict(make(2, density=0.25 if "nnz" in change else 0.5).state_dict())
    with pytest.raises(PatternChangedError, match="pattern"):
        loss.backward()


@pytest.mark.parametrize("device", DEVICES)
def test_writing_the_same_pattern_again_changes_nothing(device: str) -> None:
    layer = make(1, device=device)
    x = randn(5, IN, dtype=torch.float32, device=device).requires_grad_()
    loss = layer(x).sum()
    write(layer, make(1))
    loss.backward()
    entry = prepared(layer_index(layer))
    write(layer, make(1))
    assert_right(layer, layer(x), x)
    assert prepared(layer_index(layer)) is entry and entry.generation == 0


def test_an_older_loss_of_a_free_pattern_still_has_its_gradient() -> None:
    pattern = make_pattern("random 50%", (3, 4), (16, 16))
    values = random_values(pattern, dtype=torch.float64).requires_grad_()
    x = randn(5, pattern.in_features, dtype=torch.float64)
    y = functional.linear(x, values, pattern)
    (wanted,) = torch.autograd.grad(y.sum(), values, retain_graph=True)
    pattern.update_(make_pattern("full", (3, 4), (16, 16)))  # other tensors: these cannot hold it
    assert torch.equal(torch.autograd.grad(y.sum(), values)[0], wanted)


# ---- the meta device ----


def test_a_layer_that_left_the_meta_device_has_no_pattern_until_it_gets_one() -> None:
    x = randn(5, IN, dtype=torch.float32)
    for give in (
        lambda layer: layer.load_state_dict(make(3).state_dict()),
        lambda layer: layer.reset_parameters(seeded(3)),
        lambda layer: (setattr(layer, "pattern", make(3).pattern), layer.reset_parameters()),
        lambda layer: (write(layer, make(3)), nn.init.ones_(layer.weight)),
    ):
        layer = make(device="meta").to_empty(device="cpu")
        nn.init.zeros_(layer.bias)
        for use in (layer, lambda _, layer=layer: layer.pattern, lambda _, layer=layer: layer.state_dict()):
            with pytest.raises(InvalidPatternError, match=r"pattern is missing.*meta device"):
                use(x)
        give(layer)
        assert_right(layer, layer(x), x)


def test_garbage_in_buffers_is_refused_before_it_is_used() -> None:
    layer, x = make(1), randn(5, IN, dtype=torch.float32)
    layer(x)
    layer.col_indices.fill_(99)
    for _ in range(2):
        with pytest.raises(InvalidPatternError, match="col_indices"):
            layer(x)
    write(layer, make(1))
    assert_right(layer, layer(x), x)


# ---- transforms ----


@pytest.mark.filterwarnings("ignore:.*performance drop")
def test_stacked_layers_of_equal_nnz() -> None:
    layers, x = [make(seed, dtype=torch.float64) for seed in range(3)], randn(3, 5, IN, dtype=torch.float64)
    base = copy.deepcopy(layers[0]).to("meta")
    parameters, buffers = func.stack_module_state(layers)

    def run(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        result: Tensor = func.functional_call(base, (parameters, buffers), (x,))
        return result

    y = func.vmap(run)(parameters, buffers, x)
    torch.testing.assert_close(y, torch.stack([layer(one) for layer, one in zip(layers, x, strict=True)]))
    gradients = func.vmap(func.grad(lambda *args: run(*args).square().sum()))(parameters, buffers, x)
    for i, layer in enumerate(layers):
        (wanted,) = torch.autograd.grad(layer(x[i]).square().sum(), layer.weight)
        torch.testing.assert_close(gradients["weight"][i], wanted)
    one = {name: tensor[1] for name, tensor in parameters.items()}
    torch.testing.assert_close(run(one, {name: b[1] for name, b in buffers.items()}, x[1]), layers[1](x[1]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    layer, x = make(), randn(5, IN, dtype=torch.float32).requires_grad_()
    wanted = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    assert torch.equal(x.grad, wanted[0]) and torch.equal(layer.weight.grad, wanted[1])


# ---- compiled code ----


def counted() -> CompileCounter:
    torch.compiler.reset()
    return CompileCounter()


def test_updates_of_a_compiled_model_cost_no_compilation() -> None:
    counter = counted()
    model = nn.Sequential(make(1), nn.ReLU(), BlockSparseLinear(OUT, IN, block_shape=16, generator=seeded(5)))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = randn(5, IN, dtype=torch.float32)
    patterns = [make(seed).pattern for seed in range(4)]
    for step in range(1000):
        model[0].pattern.update_(patterns[step % 4])
        if step % 100 < 3:
            assert torch.equal(compiled(x), model(x))
        else:
            compiled(x)
    write(model[0], make(2))
    assert torch.equal(compiled(x), model(x))
    assert counter.frame_count == 1


def test_equal_layers_compiled_one_by_one_compile_once() -> None:
    counter = counted()
    layers = [make(seed) for seed in range(32)]
    x = randn(5, IN, dtype=torch.float32)
    for layer in layers:
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("policy", ["sparse", "dense"])
def test_compiled_training_follows_updates(policy: str) -> None:
    torch.compiler.reset()
    layer = make(1, policy=policy)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = randn(5, IN, dtype=torch.float32).requires_grad_()
    for seed in (2, 3):
        write(layer, make(seed))
        results = [
            torch.autograd.grad(run(x).square().sum(), (x, *layer.parameters())) for run in (layer, compiled)
        ]
        torch.testing.assert_close(*results)
