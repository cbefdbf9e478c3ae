"""Gradients of weights in float32 beside them: main_grad, as in Megatron-LM."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from helpers import DEVICES, assert_within, blocks_of_dense, rounding_unit, seeded, written_sdd
from torch import Tensor, nn

from tilesparse import BlockPattern, BlockSparseLinear, functional
from tilesparse.errors import InvalidArgumentError, PatternChangedError, UnsupportedError

HALVES = [torch.bfloat16, torch.float16]
BLOCKS = [(16, 16), (32, 32), (64, 64), (128, 128), (128, 32), (16, 64)]


def make(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **options: Any) -> BlockSparseLinear:
    options = {"density": 0.5, "block_shape": 32, "generator": seeded(1), **options}
    return BlockSparseLinear(256, 384, dtype=dtype, device=device, **options)


def batch(layer: BlockSparseLinear, seed: int, tokens: int = 40) -> tuple[Tensor, Tensor]:
    """x and the gradient of y."""
    sizes = ((layer.in_features, seed), (layer.out_features, seed + 100))
    x, dy = (torch.randn(tokens, size, generator=seeded(number)) for size, number in sizes)
    return x.to(layer.weight), dy.to(layer.weight)


def exact_gradient(pattern: BlockPattern, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of the weight, sum of magnitudes) in float64 on the host."""
    x, dy = x.detach().double().cpu(), dy.detach().double().cpu()
    host = pattern.to("cpu")
    return blocks_of_dense(dy.t() @ x, host), blocks_of_dense(dy.abs().t() @ x.abs(), host)


def summed(layer: BlockSparseLinear, before: Tensor, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """(expected, tolerance) of a main_grad that these were added to."""
    expected, magnitude = before.double().cpu(), before.double().cpu().abs()
    unit = rounding_unit(torch.float32)
    tolerance = torch.zeros_like(expected)
    for x, dy in batches:
        gradient, size = exact_gradient(layer.pattern, x, dy)
        expected, magnitude = expected + gradient, magnitude + size
        tolerance += 2 * (len(x) + 4) * unit * size + unit * magnitude
    return expected, tolerance


def with_main_grad(layer: BlockSparseLinear, seed: int = 9) -> Tensor:
    """Give a layer's weight a main_grad, and return a copy of it."""
    before, weight = torch.randn(layer.weight.shape, generator=seeded(seed)), cast(Any, layer.weight)
    weight.main_grad = before.to(weight.device, copy=True)
    return before


def assert_added(layer: BlockSparseLinear, before: Tensor, batches: list[tuple[Tensor, Tensor]]) -> None:
    assert_within(cast(Any, layer.weight).main_grad, *summed(layer, before, batches))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("block_shape", BLOCKS, ids=str)
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_products_in_float32(
    device: str, dtype: torch.dtype, block_shape: tuple[int, int], tokens: int
) -> None:
    """Kernels write and add float32, bit by bit the same each time, from either layout."""
    pattern = BlockPattern.random((512, 768), block_shape=block_shape, density=0.3, generator=seeded(3)).to(
        device
    )
    y, x = (torch.randn(tokens, n, generator=seeded(n)).to(device, dtype) for n in (512, 768))
    before = torch.randn(pattern.nnz, *block_shape, generator=seeded(4)).to(device)
    expected, size = exact_gradient(pattern, x, y)
    unit = rounding_unit(torch.float32)
    tolerance = 2 * (tokens + 4) * unit * size
    for left, right in ((y, x), (y.t().contiguous().t(), x), (y, x.t().contiguous().t())):
        written = written_sdd(left, right, pattern, torch.full_like(before, torch.nan))
        assert written.dtype == torch.float32
        assert_within(written, expected, tolerance + unit * expected.abs())
        added = written_sdd(left, right, pattern, before.clone(), True)
        total = before.double().cpu() + expected
        assert_within(added, total, tolerance + unit * (total.abs() + tolerance))
        again = written_sdd(left, right, pattern, before.clone(), True)
        assert torch.equal(added, again)
    rounded = functional.sdd(y, x, pattern)
    written = written_sdd(y, x, pattern, torch.empty_like(before))
    assert torch.equal(rounded, written.to(dtype))  # the same sums, rounded once more


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_micro_batches(device: str, dtype: torch.dtype) -> None:
    """They are added up in float32, each rounded once, the same in every run; the rest is as without."""
    results = []
    for _ in range(2):
        layer = make(device, dtype)
        before = with_main_grad(layer)
        batches = [batch(layer, seed) for seed in range(5)]
        for x, dy in batches:
            layer(x.requires_grad_()).backward(dy)
        main_grad: Tensor = layer.weight.main_grad
        assert layer.weight.grad is None
        assert_added(layer, before, batches)
        results.append(main_grad)
        plain = make(device, dtype)
        x, dy = batches[0]
        other = x.detach().requires_grad_()
        y = plain(other)
        y.backward(dy)
        assert torch.equal(y, layer(x)) and torch.equal(other.grad, x.grad)  # type: ignore[arg-type]
        for x, dy in batches[1:]:
            plain(x.detach()).backward(dy)
        assert torch.equal(plain.bias.grad, layer.bias.grad)  # type: ignore[arg-type]
    assert torch.equal(*results)


WAYS: dict[str, Callable[[BlockSparseLinear], Any]] = {
    "dense": lambda layer: setattr(layer, "policy", "dense"),
    "masked": lambda layer: layer.set_nm((2, 4)),
    "masked, transposable": lambda layer: layer.set_nm((2, 4), transposable=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_compute(device: str, way: str) -> None:
    layer = make(device)
    WAYS[way](layer)
    plain = copy.deepcopy(layer)
    assert not hasattr(plain.weight, "main_grad")
    before, (x, dy) = with_main_grad(layer), batch(layer, 1)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, given in zip((layer, plain), inputs, strict=True):
        module(given, residual=dy).backward(dy)
    assert layer.weight.grad is None
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert_added(layer, before, [(x, dy)])


def assert_summed(bias_gradient: Any, before: Tensor, batches: list[tuple[Tensor, Tensor]]) -> None:
    """In float32, the sums over tokens added one by one, or rounded to its dtype."""
    parts = [dy.double().cpu().reshape(-1, dy.shape[-1]) for _, dy in batches]
    expected = before.double().cpu() + sum(part.sum(0) for part in parts)
    unit = rounding_unit(torch.float32)
    bound = before.double().cpu().abs() + sum((len(part) + 2) * part.abs().sum(0) for part in parts)
    assert_within(bias_gradient, expected, unit * bound + rounding_unit(bias_gradient.dtype) * expected.abs())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("block_shape", BLOCKS, ids=str)
def test_biases(device: str, dtype: torch.dtype, block_shape: tuple[int, int]) -> None:
    """In the same pass: to their main_grad, or rounded to grad; the same in every run."""
    results = []
    for own in (True, True, False):
        layer = make(device, dtype, block_shape=block_shape)
        with_main_grad(layer)
        bias: Any = layer.bias
        before = torch.randn(384, generator=seeded(8))
        if own:
            bias.main_grad = before.to(device, copy=True)
        batches = [batch(layer, seed, 300) for seed in range(3)]
        for x, dy in batches:
            layer(x).backward(dy)
            if not own:
                assert_summed(bias.grad, torch.zeros(384), [(x, dy)])
                bias.grad = None
        if own:
            assert bias.grad is None
            assert_summed(bias.main_grad, before, batches)
            results.append(bias.main_grad)
    assert torch.equal(*results)


def test_only_the_gradients_that_are_wanted_are_added() -> None:
    layer = make()
    before, ones = with_main_grad(layer), torch.ones(384)
    bias: Any = layer.bias
    bias.main_grad = ones.clone()
    (x, dy), weight = batch(layer, 1), layer.weight
    of_bias, of_weight = torch.autograd.grad(layer(x), (bias, weight), dy)
    assert_summed(of_bias, torch.zeros(384), [(x, dy)])
    assert of_bias.dtype == of_weight.dtype == torch.bfloat16
    assert torch.equal(bias.main_grad, ones) and torch.equal(weight.main_grad, before)
    layer(x).backward(dy, inputs=[bias])
    assert_summed(bias.main_grad, ones, [(x, dy)])
    assert torch.equal(weight.main_grad, before)
    layer(x).backward(dy, inputs=[weight])
    assert_summed(bias.main_grad, ones, [(x, dy)])
    assert_added(layer, before, [(x, dy)])
    bias.requires_grad_(False)
    layer(x).backward(dy)
    assert_summed(bias.main_grad, ones, [(x, dy)])


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_does_not_fit_is_refused(name: str) -> None:
    layer = make()
    (x, dy), parameter = batch(layer, 1), layer.get_parameter(name)
    shape, held = parameter.shape, cast(Any, parameter)
    weight: Any = layer.weight
    weight.main_grad = torch.zeros(weight.shape)
    for given in (
        [1.0],
        torch.zeros(shape, dtype=torch.bfloat16),
        torch.zeros(shape[0] + 1, *shape[1:]),
        torch.zeros(shape, device="meta"),
        torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2],
        torch.zeros(shape, requires_grad=True),
    ):
        held.main_grad = given
        with pytest.raises(InvalidArgumentError, match=rf"{name}\.main_grad"):
            layer(x)
    held.main_grad = torch.zeros(shape)
    y = layer(x)
    held.main_grad = torch.zeros(1)
    with pytest.raises(InvalidArgumentError, match=rf"{name}\.main_grad"):
        y.backward(dy)
    assert weight.grad is None and not weight.main_grad.any() and not held.main_grad.any()
    held.main_grad = torch.zeros(shape)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    y = layer(x)
    layer.pattern = BlockPattern.random((384, 256), block_shape=32, density=0.5, generator=seeded(7))
    with pytest.raises(PatternChangedError):
        y.backward(dy)
    assert not weight.main_grad.any() and not held.main_grad.any()


@pytest.mark.parametrize("zero_out", [False, True])
def test_protocol_of_megatron(zero_out: bool) -> None:
    layer = make()
    before, ones, ran = with_main_grad(layer), torch.ones(384), list[Tensor]()
    weight: Any = layer.weight
    bias: Any = layer.bias
    bias.main_grad = ones.clone()
    for held in (weight, bias):
        held.grad_added_to_main_grad, held.zero_out_wgrad = False, zero_out
        held.register_post_accumulate_grad_hook(ran.append)
    x, dy = batch(layer, 1)
    layer(x).backward(dy)
    assert len(ran) == 2
    for held in (weight, bias):
        assert held.grad_added_to_main_grad
        assert held.grad.shape == held.shape and held.grad.dtype == held.dtype
        assert not zero_out or not held.grad.any()
    assert_added(layer, before, [(x, dy)])
    assert_summed(bias.main_grad, ones, [(x, dy)])
    for held, once in ((bias, 2), (weight, 1)):
        held.overwrite_main_grad = True
        layer(x).backward(dy)
        assert_summed(bias.main_grad, torch.zeros(384), [(x, dy)])
        assert_added(layer, before if once == 2 else torch.zeros_like(before), [(x, dy)] * once)


def test_gradients_that_are_asked_for_are_not_added() -> None:
    layer, plain = make(), make()
    before = with_main_grad(layer)
    (x, dy), results = batch(layer, 1), []
    for module in (layer, plain):
        leaves = x.detach().requires_grad_(), module.weight
        y = module(leaves[0])
        (of_x,) = torch.autograd.grad(y, leaves[:1], dy, retain_graph=True)
        results.append((of_x, *torch.autograd.grad(y, leaves, dy, retain_graph=True)))
        y.backward(dy, inputs=leaves[:1])
    assert all(map(torch.equal, *results))
    with torch.no_grad():
        layer(x)
    layer.weight.requires_grad_(False)
    layer(x.requires_grad_()).backward(dy)
    assert torch.equal(cast(Any, layer.weight).main_grad, before) and x.grad is not None


def test_results_may_be_changed_in_place_and_recomputed() -> None:
    layer, plain = make(), make()
    before = with_main_grad(layer)
    x, dy = batch(layer, 1)
    y = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    y.relu_().backward(dy)
    active = dy * (plain(x) > 0)
    assert_added(layer, before, [(x, active)])


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_breaks_its_graph(device: str) -> None:
    layer = make(device)
    before = with_main_grad(layer)
    x, dy = batch(layer, 1)
    model = nn.Sequential(layer, nn.ReLU())
    torch.compile(model, backend="aot_eager")(x).backward(dy)
    assert layer.weight.grad is None
    active = dy * (layer(x) > 0)
    assert_added(layer, before, [(x, active)])


@pytest.mark.gpu
def test_graphs() -> None:
    """A replay adds once more."""
    layer = make("cuda")
    before = with_main_grad(layer)
    main_grad: Tensor = layer.weight.main_grad
    x, dy = batch(layer, 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(x).backward(dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x).backward(dy)
    main_grad.copy_(before)
    for _ in range(3):
        graph.replay()
    assert_within(main_grad, *summed(layer, before, [(x, dy)] * 3))


@pytest.mark.parametrize("option", ["gate", "activation", "residual"])
def test_what_follows_the_product_has_its_gradient_too(option: str) -> None:
    """A gate, an activation or a residual of the same call."""
    layer = make(dtype=torch.float32)
    x, dy = batch(layer, 5)
    other = torch.randn(len(x), layer.out_features, generator=seeded(6))
    options: dict[str, Any] = {option: "gelu" if option == "activation" else other}
    options |= {"activation": "silu"} if option == "gate" else {}
    layer(x, **options).backward(dy)
    expected, layer.weight.grad = layer.weight.grad, None
    assert expected is not None
    before = with_main_grad(layer)
    layer(x, **options).backward(dy)
    weight: Any = layer.weight
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, before + expected, rtol=1e-5, atol=1e-5)
