"""functional.linear, dds, dsd and sdd against float64 dense references, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    DEVICE_DTYPES,
    DEVICES,
    FUNCTIONS,
    PATTERNS,
    assert_product_close,
    assert_within,
    blocks_of_dense,
    dense_weight,
    make_pattern,
    product_with_bound,
    randn,
    random_values,
    rounded,
    rounding_unit,
    seeded,
    sums_unit,
    written_sdd,
)
from torch import Tensor

from tilesparse import BlockPattern, functional
from tilesparse._runtime import launch
from tilesparse.errors import InvalidArgumentError, PatternChangedError

SHAPES = [(16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (128, 32)]
TOKENS = [0, 1, 3, 17, 127, 1000]


def assert_sdd_close(actual: Tensor, y: Tensor, x: Tensor, pattern: BlockPattern) -> None:
    """Asserts that ``actual`` holds the pattern's blocks of yᵀ x."""
    y, x = y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    expected, tolerance = product_with_bound(y.t(), x, actual.dtype)
    assert_within(actual, blocks_of_dense(expected, pattern), blocks_of_dense(tolerance, pattern))


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_products_on_adversarial_patterns(device: str, dtype: torch.dtype, name: str, policy: str) -> None:
    pattern = make_pattern(name, (4, 6), (32, 32))
    values = random_values(pattern, dtype=dtype, device=device)
    x = randn(33, pattern.in_features, dtype=dtype, device=device, seed=1)
    y = randn(33, pattern.out_features, dtype=dtype, device=device, seed=2)
    bias = randn(pattern.out_features, dtype=dtype, device=device, seed=3)
    weight = dense_weight(values, pattern)
    assert_product_close(functional.linear(x, values, pattern, bias, policy=policy), x, weight.t(), bias)
    assert_product_close(functional.dds(y, values, pattern, transpose=False), y, weight)
    assert_sdd_close(functional.sdd(y, x, pattern), y, x, pattern)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("block_shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), [DEVICE_DTYPES[1], DEVICE_DTYPES[-1]])
def test_products_for_any_tokens_and_blocks(
    device: str, dtype: torch.dtype, block_shape: tuple[int, int], tokens: int
) -> None:
    pattern = make_pattern("random 50%", (3, 2), block_shape)
    values = random_values(pattern, dtype=dtype, device=device)
    x = randn(tokens, pattern.in_features, dtype=dtype, device=device, seed=1)
    y = randn(tokens, pattern.out_features, dtype=dtype, device=device, seed=2)
    weight = dense_weight(values, pattern)
    result = functional.linear(x, values, pattern)
    assert result.is_contiguous()
    assert_product_close(result, x, weight.t())
    assert_product_close(functional.dds(y, values, pattern, transpose=False), y, weight)
    assert_sdd_close(functional.sdd(y, x, pattern), y, x, pattern)


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 3, 4), (2, 0, 4)])
def test_leading_dimensions(device: str, lead: tuple[int, ...], policy: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 32))
    values = random_values(pattern, dtype=torch.float32, device=device).requires_grad_()
    x = randn(*lead, pattern.in_features, dtype=torch.float32, device=device, seed=1).requires_grad_()
    y = functional.linear(x, values, pattern, policy=policy)
    assert y.shape == (*lead, pattern.out_features)
    grad = randn(*y.shape, dtype=torch.float32, device=device, seed=2)
    y.backward(grad)
    assert values.grad is not None
    flat_x, flat_grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    weight = dense_weight(values, pattern)
    assert_product_close(y.reshape(-1, y.shape[-1]), flat_x, weight.t())
    assert_product_close(x.grad.reshape(-1, x.shape[-1]), flat_grad, weight)
    assert_sdd_close(values.grad, flat_grad, flat_x, pattern)


STRIDED: dict[str, Callable[[int, int, torch.dtype, str], Tensor]] = {
    "column-major": lambda m, k, dtype, device: randn(k, m, dtype=dtype, device=device).t(),
    "padded column-major": lambda m, k, dtype, device: randn(k, m + 8, dtype=dtype, device=device).t()[:m],
    "offset column-major": lambda m, k, dtype, device: randn(k, m + 9, dtype=dtype, device=device).t()[
        3 : m + 3
    ],
    "padded rows": lambda m, k, dtype, device: randn(m, k + 16, dtype=dtype, device=device)[:, :k],
    "offset columns": lambda m, k, dtype, device: randn(m, k + 3, dtype=dtype, device=device)[:, 3:],
    "every other token": lambda m, k, dtype, device: randn(2 * m, k, dtype=dtype, device=device)[::2],
    "every other feature": lambda m, k, dtype, device: randn(m, 2 * k, dtype=dtype, device=device)[:, ::2],
    "one token repeated": lambda m, k, dtype, device: randn(1, k, dtype=dtype, device=device).expand(m, k),
    "one number repeated": lambda m, k, dtype, device: randn(1, 1, dtype=dtype, device=device).expand(m, k),
    "overlapping windows": lambda m, k, dtype, device: randn(m + k, dtype=dtype, device=device).unfold(
        0, k, 1
    )[:m],
    "swapped batch": lambda m, k, dtype, device: randn(3, m, k, dtype=dtype, device=device).transpose(0, 1),
}


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("tokens", [1, 24, 37])
@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("device", DEVICES)
def test_strided_operands(device: str, layout: str, tokens: int, policy: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (32, 16))
    dtype = torch.bfloat16
    values = random_values(pattern, dtype=dtype, device=device)
    weight = dense_weight(values, pattern)
    x = STRIDED[layout](tokens, pattern.in_features, dtype, device)
    y = STRIDED[layout](tokens, pattern.out_features, dtype, device)
    flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    before = x.clone(), y.clone()
    result = functional.linear(x, values, pattern, policy=policy)
    assert_product_close(result.reshape(-1, result.shape[-1]), flat_x, weight.t())
    result = functional.dds(y, values, pattern, transpose=False)
    assert_product_close(result.reshape(-1, result.shape[-1]), flat_y, weight)
    assert_sdd_close(functional.sdd(y, x, pattern), flat_y, flat_x, pattern)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("lead", [(24,), (37,), (1,), (0,), (3, 5)])
@pytest.mark.parametrize("device", DEVICES)
def test_column_major_output(device: str, lead: tuple[int, ...], policy: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (32, 16))
    values = random_values(pattern, dtype=torch.float32, device=device)
    x = randn(*lead, pattern.in_features, dtype=torch.float32, device=device)
    bias = randn(pattern.out_features, dtype=torch.float32, device=device)
    y = functional.linear(x, values, pattern, bias, column_major_output=True, policy=policy)
    assert y.shape == (*lead, pattern.out_features)
    flat = y.reshape(-1, y.shape[-1])
    assert flat.t().stride(-1) == 1 or len(flat) <= 1
    assert flat.data_ptr() == y.data_ptr()
    assert_product_close(flat, x.reshape(-1, x.shape[-1]), dense_weight(values, pattern).t(), bias)


@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_fused_silu_of_neighbours(device: str, dtype: torch.dtype) -> None:
    """NaN and sums of any size leave the results beside them alone."""
    pattern = BlockPattern.from_block_mask(torch.ones(1, 1, dtype=torch.bool), block_shape=128)
    values = torch.eye(128, dtype=dtype, device=device)[None]
    sizes = torch.tensor([0.0, 1e4, -3.0, -1e4, -30.0, 2.0, -80.0], dtype=dtype, device=device)
    tokens, features = torch.arange(300, device=device)[:, None], torch.arange(128, device=device)
    x = sizes[(tokens + features // 8) % 7]
    x[7] = torch.nan
    expected = torch.nn.functional.silu(x.float()).to(dtype)
    y = functional.linear(x, values, pattern, activation="silu")
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("n", [1, 16, 33])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("device", "dtype"), [DEVICE_DTYPES[0], DEVICE_DTYPES[1], DEVICE_DTYPES[-1]])
def test_dsd(device: str, dtype: torch.dtype, transpose: bool, n: int) -> None:
    pattern = make_pattern("random 50%", (2, 3), (32, 16))
    values = random_values(pattern, dtype=dtype, device=device)
    weight = dense_weight(values, pattern)
    weight = weight.t() if transpose else weight
    b = randn(weight.shape[1], n, dtype=dtype, device=device)
    result = functional.dsd(values, pattern, b, transpose=transpose)
    assert result.stride(-1) == 1 or n == 1
    assert_product_close(result, weight, b)


ACTIVATIONS = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


@pytest.mark.parametrize("record", [False, True], ids=["fused", "differentiable"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_activations(device: str, dtype: torch.dtype, activation: str, record: bool) -> None:
    pattern = make_pattern("random 50%", (2, 3), (32, 16))
    values = random_values(pattern, dtype=dtype, device=device).requires_grad_(record)
    x = randn(19, pattern.in_features, dtype=dtype, device=device)
    bias = randn(pattern.out_features, dtype=dtype, device=device)
    y = functional.linear(x, values, pattern, bias, activation)
    assert y.requires_grad == record
    product, tolerance = product_with_bound(x, dense_weight(values, pattern).t(), dtype, bias)
    expected = ACTIVATIONS[activation](product)
    # No activation's slope exceeds 1.13; the functions themselves are good to a few units.
    accuracy = 4 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert_within(y, expected, rounded(expected, 1.13 * tolerance + accuracy * product.abs(), dtype))


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("record", [False, True], ids=["fused", "differentiable"])
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_residual(device: str, dtype: torch.dtype, record: bool, activation: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (32, 16))
    values = random_values(pattern, dtype=dtype, device=device)
    x = randn(2, 19, pattern.in_features, dtype=dtype, device=device)
    bias = randn(pattern.out_features, dtype=dtype, device=device)
    residual = randn(2, 19, pattern.out_features, dtype=dtype, device=device, seed=1).requires_grad_(record)
    y = functional.linear(x, values, pattern, bias, activation, residual=residual)
    assert y.requires_grad == record
    product, tolerance = product_with_bound(x.flatten(0, 1), dense_weight(values, pattern).t(), dtype, bias)
    activated = ACTIVATIONS.get(activation, lambda t: t)(product)
    accuracy = 4 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    tolerance = 1.13 * tolerance + accuracy * (product.abs() + residual.flatten(0, 1).cpu().double().abs())
    if record and activation != "none":
        tolerance = rounded(activated, tolerance, dtype)
    expected = activated + residual.flatten(0, 1).detach().cpu().double()
    assert_within(y.flatten(0, 1), expected, rounded(expected, tolerance, dtype))


@pytest.mark.parametrize("tokens", [0, 1, 24, 37])
@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("device", DEVICES)
def test_strided_residuals(device: str, layout: str, column_major: bool, tokens: int) -> None:
    """The result keeps its own layout whatever that of the residual is, which nothing writes."""
    pattern = make_pattern("random 50%", (2, 3), (32, 16))
    values = random_values(pattern, dtype=torch.bfloat16, device=device)
    residual = STRIDED[layout](tokens, pattern.out_features, torch.bfloat16, device)
    x = randn(*residual.shape[:-1], pattern.in_features, dtype=torch.bfloat16, device=device, seed=1)
    before = residual.clone()
    y = functional.linear(x, values, pattern, residual=residual, column_major_output=column_major)
    plain = functional.linear(x, values, pattern, column_major_output=column_major)
    assert y.stride() == plain.stride()
    flat_x, flat = x.reshape(-1, x.shape[-1]), residual.reshape(-1, residual.shape[-1])
    assert_product_close(y.reshape(flat.shape), flat_x, dense_weight(values, pattern).t(), flat)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_linear(device: str, activation: str, policy: str) -> None:
    """Against autograd through the dense layer, in the dtype training uses."""
    pattern = make_pattern("random 50%", (3, 4), (16, 32))
    values = random_values(pattern, dtype=torch.float32, device=device).requires_grad_()
    x = randn(2, 21, pattern.in_features, dtype=torch.float32, device=device, seed=1).requires_grad_()
    bias = randn(pattern.out_features, dtype=torch.float32, device=device, seed=2).requires_grad_()
    grad = randn(2, 21, pattern.out_features, dtype=torch.float32, device=device, seed=3)
    residual = randn(*grad.shape, dtype=torch.float32, device=device, seed=4).requires_grad_()
    functional.linear(x, values, pattern, bias, activation, residual=residual, policy=policy).backward(grad)

    dense = dense_weight(values, pattern).requires_grad_()
    reference_x = x.detach().cpu().double().requires_grad_()
    reference_bias = bias.detach().cpu().double().requires_grad_()
    y = torch.nn.functional.linear(reference_x, dense, reference_bias)
    ACTIVATIONS.get(activation, lambda t: t)(y).backward(grad.cpu().double())
    assert dense.grad is not None
    for actual, expected in (
        (x.grad, reference_x.grad),
        (values.grad, blocks_of_dense(dense.grad, pattern)),
        (bias.grad, reference_bias.grad),
        (residual.grad, grad.cpu().double()),
    ):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def double_tensors(pattern: BlockPattern, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, y, values, bias) in float64 that require gradients."""
    like: Any = {"dtype": torch.float64, "device": device}
    return (
        randn(3, pattern.in_features, seed=1, **like).requires_grad_(),
        randn(3, pattern.out_features, seed=2, **like).requires_grad_(),
        random_values(pattern, **like).requires_grad_(),
        randn(pattern.out_features, seed=3, **like).requires_grad_(),
    )


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_gates(device: str, dtype: torch.dtype, activation: str, column_major: bool, policy: str) -> None:
    """As PyTorch multiplies, whatever the gate's layout; the result has the one that is asked for."""
    pattern = make_pattern("random 50%", (3, 4), (32, 16))
    values = random_values(pattern, dtype=dtype, device=device)
    x = randn(2, 12, pattern.in_features, dtype=dtype, device=device, seed=1)
    bias = randn(pattern.out_features, dtype=dtype, device=device, seed=2)
    options: dict[str, Any] = {"column_major_output": column_major, "policy": policy}
    sums = functional.linear(x, values, pattern, bias, **options)
    for gate in (sums.flip(0), sums.flip(0).mT.contiguous().mT):
        y = functional.linear(x, values, pattern, bias, activation, gate=gate, **options)
        factor = ACTIVATIONS.get(activation, lambda t: t)(gate)
        assert y.stride() == sums.stride()
        error = (y - sums * factor).abs().double().amax()
        assert error <= 16 * rounding_unit(dtype) * float((sums * factor).abs().amax())


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradients_with_a_gate(check: Callable[..., bool], policy: str, activation: str) -> None:
    pattern = make_pattern("diagonal", (2, 2), (16, 16))
    x, y, values, bias = double_tensors(pattern)

    def gated(*t: Tensor) -> Tensor:
        return functional.linear(t[0], t[1], pattern, t[2], activation, gate=t[3], policy=policy)

    assert check(gated, (x, values, bias, y), fast_mode=True)
    assert check(lambda gate: gated(x.detach(), values.detach(), bias.detach(), gate), (y,), fast_mode=True)


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_bad_gates(device: str, needs_gradient: bool, policy: str) -> None:
    pattern = make_pattern("full", (2, 2), (16, 16))
    values = random_values(pattern, dtype=torch.float32, device=device).requires_grad_(needs_gradient)
    x = randn(5, 32, dtype=torch.float32, device=device)
    for gate in (x[:1], x[0], x.double()):
        with pytest.raises(InvalidArgumentError, match=r"gate must have (shape|dtype)"):
            functional.linear(x, values, pattern, gate=gate, policy=policy)
    with pytest.raises(InvalidArgumentError, match="gate must be None beside a residual"):
        functional.linear(x, values, pattern, residual=x, gate=x, policy=policy)


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_every_order(
    device: str, policy: str, column_major: bool, check: Callable[..., bool]
) -> None:
    pattern = make_pattern("diagonal", (2, 2), (16, 16))
    x, y, values, bias = double_tensors(pattern, device)
    how: dict[str, Any] = {"policy": policy, "column_major_output": column_major}
    assert check(
        lambda *t: functional.linear(t[0], t[1], pattern, t[2], **how), (x, values, bias), fast_mode=True
    )
    for activation in ("none", "silu"):
        assert check(
            lambda x, v, b, y, name=activation: functional.linear(x, v, pattern, b, name, residual=y, **how),
            (x, values, bias, y),
            fast_mode=True,
        )
    assert check(lambda y, v: functional.dds(y, v, pattern, transpose=False), (y, values), fast_mode=True)
    assert check(lambda y, x: functional.sdd(y, x, pattern), (y, x), fast_mode=True)
    assert check(
        lambda v, b: functional.dsd(v, pattern, b), (values, x.detach().t().requires_grad_()), fast_mode=True
    )


@pytest.mark.parametrize("device", DEVICES)
def test_only_needed_gradients_are_computed_and_kept(device: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 16))
    x = randn(8, pattern.in_features, dtype=torch.float32, device=device)
    values = random_values(pattern, dtype=torch.float32, device=device)
    frozen = functional.linear(x.requires_grad_(), values, pattern)
    assert [t is None for t in frozen.grad_fn.saved_tensors] == [True, False]
    frozen.sum().backward()
    assert values.grad is None and x.grad is not None
    leaf = functional.linear(x.detach(), values.requires_grad_(), pattern)
    assert [t is None for t in leaf.grad_fn.saved_tensors] == [False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_sdd_adds(device: str) -> None:
    pattern = make_pattern("random 50%", (3, 4), (16, 32))
    x = randn(40, pattern.in_features, dtype=torch.float32, device=device, seed=1)
    y = randn(40, pattern.out_features, dtype=torch.float32, device=device, seed=2)
    start = random_values(pattern, dtype=torch.float32, device=device)
    out = start.clone()
    assert torch.equal(written_sdd(y, x, pattern, out), functional.sdd(y, x, pattern))
    out = start.clone()
    written_sdd(y, x, pattern, out, True)
    expected, tolerance = product_with_bound(y.t(), x, torch.float32)
    expected = blocks_of_dense(expected, pattern) + start.cpu()
    tolerance = blocks_of_dense(tolerance, pattern)
    assert_within(out, expected, rounded(expected, tolerance, torch.float32))


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("device", DEVICES)
def test_backward_after_an_update_is_refused(device: str, policy: str) -> None:
    pattern = make_pattern("diagonal", (3, 3), (16, 16))
    values = random_values(pattern, dtype=torch.float32, device=device).requires_grad_()
    x = randn(4, pattern.in_features, dtype=torch.float32, device=device)
    y = functional.linear(x, values, pattern, policy=policy)
    pattern.update_(BlockPattern.from_blocks([(0, 2), (1, 0), (2, 1)], shape=(48, 48), block_shape=(16, 16)))
    with pytest.raises(PatternChangedError, match="updated between"):
        y.sum().backward()
    assert values.grad is None
    # The next forward pass follows the new pattern.
    assert_product_close(
        functional.linear(x, values, pattern, policy=policy), x, dense_weight(values, pattern).t()
    )


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device: str, dtype: torch.dtype, policy: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 16))
    values = random_values(pattern, dtype=torch.float32, device=device).requires_grad_()
    x = randn(9, pattern.in_features, dtype=torch.float32, device=device).requires_grad_()
    bias = randn(pattern.out_features, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=dtype):
        y = functional.linear(x, values, pattern, bias, policy=policy)
        assert y.dtype == dtype
        assert functional.dds(y, values, pattern, transpose=False).dtype == dtype
        assert functional.sdd(y, x, pattern).dtype == dtype
    assert_product_close(y, x.to(dtype), dense_weight(values.to(dtype), pattern).t(), bias.to(dtype))
    y.sum().backward()
    assert x.grad.dtype == values.grad.dtype == torch.float32


@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_results_repeat_bitwise(device: str, dtype: torch.dtype) -> None:
    pattern = make_pattern("power-law rows", (6, 8), (32, 32))
    values = random_values(pattern, dtype=dtype, device=device)
    x = randn(100, pattern.in_features, dtype=dtype, device=device)
    y = functional.linear(x, values, pattern)
    assert torch.equal(y, functional.linear(x, values, pattern))
    assert torch.equal(functional.sdd(y, x, pattern), functional.sdd(y, x, pattern))


@pytest.mark.parametrize("policy", ["sparse", "dense"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_compile_without_graph_breaks(device: str, dynamic: bool, policy: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 16))
    values = random_values(pattern, dtype=torch.float32, device=device).requires_grad_()
    bias = randn(pattern.out_features, dtype=torch.float32, device=device).requires_grad_()

    def step(x: Tensor) -> Tensor:
        y = functional.linear(x, values, pattern, bias, "gelu", column_major_output=True, policy=policy)
        y = functional.dds(y, values, pattern, transpose=False).sin()
        return functional.linear(y, values, pattern, residual=y[:, : pattern.out_features], policy=policy)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (8, 13):
        x = randn(tokens, pattern.in_features, dtype=torch.float32, device=device)
        results = []
        for function in (step, compiled):
            y = function(x)
            results.append((y, *torch.autograd.grad(y.sum(), (values, bias))))
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager)


@pytest.mark.parametrize("policy", ["sparse", "dense"])
def test_compiled_code_follows_an_update(policy: str) -> None:
    torch.compiler.reset()  # what other parameters compiled counts towards the limit
    pattern = make_pattern("diagonal", (3, 3), (16, 16))
    values = random_values(pattern, dtype=torch.float32)
    x = randn(4, 48, dtype=torch.float32)
    compiled = torch.compile(
        lambda x: functional.linear(x, values, pattern, policy=policy), fullgraph=True, backend="aot_eager"
    )
    for name in ("diagonal", "banded", "full", "banded", "diagonal"):
        pattern.update_(make_pattern(name, (3, 3), (16, 16)))
        values = random_values(pattern, dtype=torch.float32)
        assert_product_close(compiled(x), x, dense_weight(values, pattern).t())


@pytest.mark.parametrize("policy", ["sparse", "dense"])
def test_meta_tensors_give_shapes_only(policy: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 32))
    x = torch.empty(2, 5, pattern.in_features, device="meta")
    values = torch.empty(pattern.nnz, 16, 32, device="meta", requires_grad=True)
    y = functional.linear(x, values, pattern, activation="relu", policy=policy)
    assert y.device.type == "meta" and y.shape == (2, 5, pattern.out_features)
    y.sum().backward()
    assert values.grad.shape == values.shape


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4096, 8])  # kernels for few tokens read the pattern itself, not a plan
def test_an_updated_pattern_leaves_launched_work_alone(tokens: int) -> None:
    pattern = make_pattern("random 50%", (32, 32), (64, 64))
    other = BlockPattern.random(pattern.shape, block_shape=(64, 64), nnz=pattern.nnz, generator=seeded(5))
    values = random_values(pattern, dtype=torch.bfloat16, device="cuda")
    x = randn(tokens, pattern.in_features, dtype=torch.bfloat16, device="cuda")
    expected = functional.linear(x, values, pattern)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # GPU cycles: the update is asked for long before the products end
        results = [functional.linear(x, values, pattern) for _ in range(20)]
    pattern.update_(other)
    after = functional.linear(x, values, pattern)
    trash = [torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    assert len(trash) == 20 and all(torch.equal(result, expected) for result in results)
    assert_product_close(after, x, dense_weight(values, other).t())


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_gradients_of_biases_and_activations(
    device: str, dtype: torch.dtype, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, of many tokens and of none, also where block rows are empty; the same every time."""
    monkeypatch.setattr(launch, "MANY_ELEMENTS", 0)
    pattern = make_pattern("empty rows and columns", (21, 4), (16, 16))
    values = random_values(pattern, dtype=dtype, device=device).requires_grad_()
    bias = randn(pattern.out_features, dtype=dtype, device=device, seed=3).requires_grad_()
    for leading in ((1100,), (3, 5), (0,)):
        x = randn(*leading, pattern.in_features, dtype=dtype, device=device, seed=1)
        dy = randn(*leading, pattern.out_features, dtype=dtype, device=device, seed=2)
        for name in (activation, "none"):
            y = functional.linear(x, values, pattern, bias, name)
            first, again = (torch.autograd.grad(y, (values, bias), dy, retain_graph=True) for _ in range(2))
            assert all(map(torch.equal, first, again))
            z = functional.linear(x, values.detach(), pattern, bias.detach()).double().requires_grad_()
            act = FUNCTIONS[name](z)
            of_z = torch.autograd.grad(act, z, dy.double())[0].reshape(-1, pattern.out_features)
            unit = rounding_unit(dtype) + (1e-4 if dtype.itemsize == 2 else 8 * sums_unit(dtype))
            size = dy.double().abs().reshape(of_z.shape) * (1 + z.abs()).reshape(of_z.shape)
            bound = (unit + len(of_z) * sums_unit(dtype)) * size.sum(0)
            expected = of_z.sum(0)
            assert_within(first[1], expected.cpu(), rounded(expected, bound, dtype).detach().cpu())


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("device", DEVICES)
def test_second_gradients_through_activations(
    device: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same whether the gradient of the bias is computed with that of the weight or by itself."""
    pattern = make_pattern("random 50%", (4, 3), (16, 16))
    x = randn(9, pattern.in_features, dtype=torch.float32, device=device, seed=1)
    found = []
    for many in (0, 1 << 62):
        monkeypatch.setattr(launch, "MANY_ELEMENTS", many)
        values = random_values(pattern, dtype=torch.float32, device=device).requires_grad_()
        bias = randn(pattern.out_features, dtype=torch.float32, device=device, seed=3).requires_grad_()
        y = functional.linear(x, values, pattern, bias, activation)
        first = torch.autograd.grad(y.square().sum(), (values, bias), create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
        found.append([*first, values.grad, bias.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
