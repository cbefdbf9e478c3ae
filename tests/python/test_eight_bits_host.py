"""8-bit activations on the host: calls that are found natively, and inputs that are quantized once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import DEVICES, Recorder, make_pattern, randn, random_values, seeded
from torch import Tensor, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.utils import run_and_get_code

import tilesparse
from tilesparse import BlockSparseConfig, BlockSparseLinear, BlockSparseMLP, functional, sparsify_, storage
from tilesparse._ops.epilogue import _last
from tilesparse._runtime import launch
from tilesparse._runtime.device import TENSORS
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.errors import InvalidArgumentError
from tilesparse.model import fuse_mlps_

EIGHT = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
IN, OUT, TOKENS = 128, 192, 70
IS_READ = hasattr(Tensor, "__dlpack_c_exchange_api__")  # natively
QUANTIZE: Any = torch.ops.tilesparse.quantize.default

both = pytest.mark.parametrize("name", EIGHT)
on_every_device = pytest.mark.parametrize("device", DEVICES)


def make(name: str, seed: int = 0, sizes: tuple[int, int] = (IN, OUT), **options: Any) -> Any:
    options = {"block_shape": 32, "storage": name, "activations": name, **options}
    return BlockSparseLinear(*sizes, generator=seeded(seed), **options)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 1) -> Tensor:
    return randn(*(shape or (TOKENS,)), IN, dtype=dtype, device=device, seed=seed)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry whenever activations are quantized."""
    calls: list[int] = []
    of_library = launch.quantize

    def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        calls.append(x.numel())
        return of_library(x, dtype)

    monkeypatch.setattr(launch, "quantize", quantize)
    return calls


# ---- calls that are found natively ----

Product = Callable[..., Tensor]

# Products of (x, bias, residual [..., OUT]) by `run`, and how many calls of the kind are kept natively.
REPEATED: dict[str, tuple[Callable[[Product, Tensor, Tensor, Tensor], Tensor], int]] = {
    "plain": (lambda run, x, bias, other: run(x), 1),
    "bias": (lambda run, x, bias, other: run(x, bias), 1),
    "activation": (lambda run, x, bias, other: run(x, bias, "gelu"), 1),
    "residual": (lambda run, x, bias, other: run(x, bias, "relu", residual=other), 1),
    "gate": (lambda run, x, bias, other: run(x, None, "silu", gate=other), 1),
    "column-major": (lambda run, x, bias, other: run(x, bias, column_major_output=True), 1),
    "fast sums": (lambda run, x, bias, other: run(x, use_fast_accum=True), 1),
    "no tokens": (lambda run, x, bias, other: run(x[:0], bias), 1),
    "four dimensions": (lambda run, x, bias, other: run(x[None, None], bias), 1),
    "five dimensions": (lambda run, x, bias, other: run(x[None, None, None], bias), 0),
    "rows apart": (lambda run, x, bias, other: run(torch.cat([x, x], -1)[..., :IN], bias), 1),
    "x column-major": (lambda run, x, bias, other: run(x.mT.contiguous().mT, bias), 1),
    "bias with gaps": (lambda run, x, bias, other: run(x, torch.stack([bias, bias], 1)[:, 0]), 0),
    "residual with gaps": (
        lambda run, x, bias, other: run(x, residual=torch.stack([other, other], -1)[..., 0]),
        1,  # of the copy
    ),
}


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", REPEATED)
@on_every_device
def test_products_are_repeated_as_they_ran(
    device: str, case: str, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, kept = REPEATED[case]
    pattern = make_pattern("random 50%", (6, 4), (32, 32))
    values, scales = storage.quantize_weights(
        random_values(pattern, dtype=torch.float32), EIGHT[name], granularity="feature", pattern=pattern
    )
    values, scales = values.to(device), scales.to(device)
    x, bias = tokens(dtype=dtype, device=device), randn(OUT, dtype=dtype, device=device)
    other = randn(TOKENS, OUT, dtype=dtype, device=device, seed=4)

    def run(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return functional.quantized_linear(x, values, pattern, scales, *args, **options)

    results = [product(run, x, bias, other) for _ in range(3)]
    assert len(prepared(pattern.index_on(values.device)).kept) == (kept if IS_READ else 0)
    monkeypatch.setattr(TENSORS, "enabled", False)
    wanted = product(run, x, bias, other)
    for result in results:
        assert torch.equal(result, wanted) and result.stride() == wanted.stride()
        assert result.dtype == dtype and not result.requires_grad


def test_kept_calls_tell_dtypes_and_shapes_apart() -> None:
    """The 8 bits may be the same, while x has another dtype or shape."""
    layer, x = make("int8", bias=False), tokens()
    for some in (x, x.bfloat16(), x.half(), x[:3], x[None], x[0]):
        for _ in range(2):
            y = layer(some)
            assert y.dtype == some.dtype and y.shape == (*some.shape[:-1], OUT)
            assert torch.equal(y, layer(some.float()).to(some.dtype))


@pytest.mark.parametrize("native", [True, False])
@on_every_device
def test_both_ways_to_quantize_agree(device: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(6, 5, 96, dtype=torch.bfloat16, device=device)
    views = [
        x,
        x[..., :64],
        x[..., 3:67],
        x[:, ::2],
        x[:, :1],
        x[:1, :1].expand(4, 3, 96),
        x[0, 0],
        x[None, None],
    ]
    wanted = [functional.quantize_activations(view.clone()) for view in views]
    monkeypatch.setattr(TENSORS, "enabled", native)
    with torch.inference_mode():
        of_inference = [functional.quantize_activations(view) for view in views]
    for view, right, other in zip(views, wanted, of_inference, strict=True):
        found = functional.quantize_activations(view)
        assert all(map(torch.equal, found, right)) and all(map(torch.equal, other, right))
        assert not any(each.is_inference() for each in found) and all(each.is_inference() for each in other)
        assert found[1].shape == view.shape[:-1] and found[0].is_contiguous()


# ---- one quantization for layers that share an input ----


def test_layers_that_share_an_input_quantize_it_once(counted: list[int]) -> None:
    layers = [make("int8", seed) for seed in range(3)]
    x = tokens()
    for repeat in range(1, 4):
        for layer in layers:
            layer(x)
        assert len(counted) == repeat, "each pass begins anew"
    x.add_(1)
    results = [layer(x) for layer in layers[::-1]]
    assert len(counted) == 4
    for layer, y in zip(layers[::-1], results, strict=True):
        assert torch.equal(y, layer(x.clone()))


def test_profilers_see_what_runs_without_them() -> None:
    layers, x = [make("int8", seed) for seed in range(3)], tokens()
    with torch.profiler.profile() as profile:
        for layer in layers:
            layer(x)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["tilesparse::quantize"] == 1 and counts["tilesparse::dds_nt"] == 3


def test_an_input_is_quantized_again_where_it_may_have_changed(counted: list[int]) -> None:
    first, second, other = make("int8"), make("int8", 1), make("float8_e4m3fn")
    x = tokens()
    first(x)
    other(x)  # in another dtype
    assert len(counted) == 2
    first(x)
    second(x.clone())
    assert len(counted) == 4
    first(x)
    assert torch.equal(second(x[:5]), second(x)[:5])  # a view is another tensor
    assert len(counted) == 6 + 1
    with torch.inference_mode():
        made = tokens()
        first(made)
        second(made)  # whose writes are not counted
        first(x)
    assert len(counted) == 10
    second(x)  # the one before was made in inference mode
    assert len(counted) == 11


def test_what_was_kept_dies_with_the_input() -> None:
    first, x = make("int8"), tokens()
    first(x)
    holder = _last.holder
    assert holder[0] is not None
    del x
    gc.collect()
    assert holder[0] is None


def test_threads_do_not_share_what_was_kept(counted: list[int]) -> None:
    layers, x = [make("int8", seed) for seed in range(2)], tokens()
    wanted = [layer(x) for layer in layers]
    assert len(counted) == 1
    found: list[bool] = []

    def run() -> None:
        found.extend(torch.equal(layer(x), y) for layer, y in zip(layers, wanted, strict=True))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8 and len(counted) == 5


def test_compiled_training_steps_quantize_a_shared_input_once() -> None:
    layers = nn.ModuleList(make("int8", seed) for seed in range(3))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in layers)

    x = tokens().requires_grad_()
    results, codes = run_and_get_code(torch.compile(run, fullgraph=True), x)
    for found, wanted in zip(results, run(x), strict=True):
        torch.testing.assert_close(found, wanted)
    assert sum(code.count("tilesparse.quantize.default(") for code in codes) == 1


# ---- an input that is not what it was ----


def in_inference_mode(x: Tensor) -> None:
    with torch.inference_mode():
        x.add_(1)


# Writes to x, which is a view of a larger tensor, that must be noticed whatever layer asks next.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "item": lambda x: x.__setitem__((0, 0), 9.0),
    "view": lambda x: x[1:].mul_(3),
    "base": lambda x: x._base.zero_(),
    "detached": lambda x: x.detach().add_(1),
    "out": lambda x: torch.add(x, 1, out=x),
    "list": lambda x: torch._foreach_mul_([x], 2.0),
    "copy": lambda x: x.copy_(tokens(IN, seed=8)),
    "inference mode": in_inference_mode,
    "other memory": lambda x: setattr(x, "data", tokens(IN, seed=8)),
    "other strides": lambda x: setattr(x, "data", x.data.t()),
    "fewer": lambda x: setattr(x, "data", x.data[:5]),
    "set": lambda x: x.set_(tokens(IN, seed=8).untyped_storage(), 0, x.shape, x.stride()),
}


@both
@pytest.mark.parametrize("write", WRITES)
def test_writes_are_noticed(write: str, name: str) -> None:
    first, second = make(name), make(name, 1)
    with torch.no_grad():
        x = torch.cat([tokens(IN), tokens(seed=2)])[:IN]  # square
        first(x)
        WRITES[write](x)
        assert torch.equal(second(x), second(x.clone()))
        assert torch.equal(first(x), first(x.clone()))


def test_memory_that_is_used_again_holds_another_input() -> None:
    first, second = make("int8"), make("int8", 1)
    like = tokens()
    memory = bytearray(like.nbytes)
    for seed in range(20):
        x = torch.frombuffer(memory, dtype=like.dtype).view(like.shape).copy_(tokens(seed=seed))
        wanted = second(x.clone())
        first(x)
        assert torch.equal(second(x), wanted)
        del x


def test_modes_do_not_disturb_each_other() -> None:
    """Results of inference mode cannot be saved for a gradient, and are made anew outside."""
    layers = [make("int8", seed) for seed in range(3)]
    x = tokens().requires_grad_()
    wanted = [layer(x.detach().clone()) for layer in layers]
    with torch.inference_mode():
        assert torch.equal(layers[0](x), wanted[0])
    with torch.no_grad():
        assert torch.equal(layers[1](x), wanted[1])
    y = layers[2](x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, wanted[2], rtol=0, atol=0)
    torch.testing.assert_close(gradient, layers[2].to_linear().weight.sum(0).expand_as(x))


def test_writes_in_inference_mode_are_not_missed() -> None:
    first, second = make("int8"), make("int8", 1)
    with torch.inference_mode():
        x = tokens()
        first(x)
        x.add_(1)
        assert torch.equal(second(x), second(x.clone()))


@pytest.mark.gpu
def test_streams_and_graphs_quantize_for_themselves() -> None:
    layers = [make("int8", seed, device="cuda") for seed in range(3)]
    x = tokens(128, device="cuda")
    wanted = [layer(x.clone()) for layer in layers]
    layers[0](x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(layers[1](x), wanted[1])
    torch.cuda.current_stream().wait_stream(side)
    layers[0](x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [layer(x) for layer in layers[1:]]
    x.copy_(tokens(128, device="cuda", seed=5))
    graph.replay()
    for result, layer in zip(results, layers[1:], strict=True):
        assert torch.equal(result, layer(x.clone()))


# ---- compiled and exported ----


class Three(nn.Module):
    """Three layers with one input, which is written to before the last one if asked for."""

    def __init__(self, write: bool = False) -> None:
        super().__init__()
        self.layers, self.write = nn.ModuleList(make("int8", seed) for seed in range(3)), write

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * 2
        first, second = self.layers[0](x), self.layers[1](x)
        if self.write:
            x = x.add_(1)
        return first, second, self.layers[2](x)


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Whatever Inductor has on disk was compiled by another pass."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize(("mode", "write"), [(torch.no_grad, False), (torch.inference_mode, True)])
def test_compiled_inference_quantizes_a_shared_input_once(
    mode: Callable[[], Any], write: bool, compiled_anew: None
) -> None:
    model, x = Three(write).eval(), tokens()
    with mode():
        results, codes = run_and_get_code(torch.compile(model, fullgraph=True), x)
        for found, wanted in zip(results, model(x), strict=True):
            torch.testing.assert_close(found, wanted)
    assert sum(code.count("tilesparse.quantize.default(") for code in codes) == 1 + write


def test_exported_programs_have_one_quantization_after_cse() -> None:
    program = torch.export.export(Three(), (tokens(),))

    def count(graph: torch.fx.Graph) -> int:
        return sum(node.target is QUANTIZE for node in graph.nodes)

    assert count(program.graph) == 3
    assert count(fx_graph_cse(program.graph)) == 1
    written = torch.export.export(Three(write=True), (tokens(),)).run_decompositions()
    assert count(fx_graph_cse(written.graph)) == 2


# ---- MLPs ----


def mlp_of(name: str, gated: bool = True, bias: bool = True, **options: Any) -> BlockSparseMLP:
    wide, back = (make(name, 0, bias=bias), make(name, 2, (OUT, IN), bias=bias))
    return BlockSparseMLP(wide, back, make(name, 1, bias=bias) if gated else None, **options)


@both
def test_mlps_have_a_gradient(name: str) -> None:
    mlp, x = mlp_of(name, activation="silu"), tokens(5, 14)
    with torch.no_grad():
        y = mlp(x)
        assert torch.equal(y, mlp.down(mlp.up(x, gate=mlp.gate(x), activation="silu")))
    recorded = mlp(x.requires_grad_())
    torch.testing.assert_close(recorded, y, rtol=0.02, atol=0.02)
    recorded.sum().backward()
    assert x.grad is not None


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu", nn.Tanh()])
@on_every_device
def test_every_mlp_takes_three_products_in_8_bits(
    device: str,
    activation: Any,
    gated: bool,
    bias: bool,
    mode: Callable[[], Any],
    name: str,
    counted: list[int],
) -> None:
    mlp = mlp_of(name, gated, bias, activation=activation).to(device)
    up, down, gate = mlp.up, mlp.down, getattr(mlp, "gate", None)
    apply = activation if isinstance(activation, nn.Module) else mlp._activated
    with mode():
        x, residual = tokens(device=device), randn(TOKENS, IN, dtype=torch.float32, device=device, seed=6)
        y, added = mlp(x), mlp(x, residual=residual)
        assert len(counted) == 4, "of each call x once, and what down multiplies"
        with Recorder() as recorder:
            mlp(x)
        assert recorder.seen >= {"quantize", "dds_nt in 8 bits"} and "dds_nt" not in recorder.seen
        hidden = apply(up(x)) if gate is None else apply(gate(x)) * up(x)
        wanted = down(hidden)
    # Fused ones round the hidden activations once less, and so some of them to the next of 8 bits.
    near = 0.02 if name == "int8" else 0.1
    torch.testing.assert_close(y, wanted, rtol=near, atol=near)
    torch.testing.assert_close(added, y + residual, rtol=1e-5, atol=1e-5)


def test_gate_up_in_one_layer_quantizes_twice(counted: list[int]) -> None:
    mlp = BlockSparseMLP(
        None, make("int8", 1, (OUT, IN)), gate_up=make("int8", 0, (IN, 2 * OUT)), activation="silu"
    )
    with torch.inference_mode():
        mlp(tokens())
    assert len(counted) == 2


def test_autocast_casts_and_quantizes_an_input_of_an_mlp_once(counted: list[int]) -> None:
    mlp, x = mlp_of("int8", activation="silu"), tokens()
    with torch.no_grad():
        wanted = mlp(x)
        counted.clear()
        with torch.autocast("cpu", torch.bfloat16):
            y = mlp(x)
    assert y.dtype == torch.bfloat16 and len(counted) == 2
    torch.testing.assert_close(y.float(), wanted, rtol=0.05, atol=0.05)


def test_hooks_and_other_layers_see_an_input_that_is_current(counted: list[int]) -> None:
    """Hooks before the layer may write to x in inference mode, where nothing counts it."""
    mlp, x = mlp_of("int8", activation="silu"), tokens()
    mlp.up.register_forward_pre_hook(lambda _, args: args[0].add_(1))
    with torch.inference_mode():
        given = x.clone()
        y = mlp(given)
        assert len(counted) == 3
        factor = nn.functional.silu(mlp.gate(x))
        torch.testing.assert_close(y, mlp.down(factor * mlp.up(x.clone())), rtol=0.02, atol=0.02)
    mixed = BlockSparseMLP(make("int8"), make("int8", 2, (OUT, IN)), make("float8_e4m3fn", 1))
    counted.clear()
    with torch.inference_mode():
        mixed(tokens())
    assert len(counted) == 3


def test_nothing_is_kept_of_an_mlp_in_inference_mode() -> None:
    mlp = mlp_of("int8", activation="silu")
    with torch.inference_mode():
        mlp(tokens())
        with pytest.raises(InvalidArgumentError, match="x must have last dimension"):
            mlp(tokens()[:, :64])
    assert _last.constant is None and _last.holder[0] is None


@both
def test_prepared_models_quantize_every_input_once(name: str, counted: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    settings = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **size)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(settings).eval()
    sparsify_(model, BlockSparseConfig(1, 32, storage=name, activations=name))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(ids).logits
    report = fuse_mlps_(model, ids)
    assert len(report.layers) == 2 and not report.skipped
    tilesparse.prepare_for_inference_(model, ids)
    assert sum(isinstance(module, BlockSparseMLP) for module in model.modules()) == 2
    counted.clear()
    with torch.no_grad(), Recorder() as recorder:
        found = model(ids).logits
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert "dds_nt" not in recorder.seen
    counted.clear()
    with torch.no_grad():
        model(ids)
    assert len(counted) == 2 * 4, "of attention, its output, gate and up, down"
