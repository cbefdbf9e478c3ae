"""Tokens copied to the rows of their experts, such rows added up, and the gradients of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICE_DTYPES, DEVICES, Recorder, assert_within, randn, rounding_unit, seeded, sums_unit
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tilesparse._ops.epilogue import combine, spread
from tilesparse.errors import InvalidArgumentError

OPS: Any = torch.ops.tilesparse
# Tokens, choices, features: a vector, many of a warp, and what is not a multiple of what threads read.
SIZES = [(1, 1, 16), (5, 3, 48), (17, 8, 2048), (129, 2, 1040), (3, 11, 16), (1000, 5, 80)]


def rows_of(tokens: int, choices: int, device: str = "cpu") -> Tensor:
    return torch.randperm(tokens * choices, generator=seeded()).view(tokens, choices).to(device)


def operands(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    tokens, choices, features = size
    y = randn(tokens * choices, features, dtype=dtype, device=device)
    weights = randn(tokens, choices, dtype=dtype, device=device, seed=1)
    grad = randn(tokens, features, dtype=dtype, device=device, seed=2)
    return y, weights, rows_of(tokens, choices, device), grad


def assert_sums(actual: Tensor, terms: Tensor, dtype: torch.dtype) -> None:
    """Compare with the sums over dimension 1 of terms in float64, which are rounded once."""
    expected = terms.sum(1).cpu()
    sums = terms.abs().sum(1).cpu() * (terms.shape[1] + 1) * sums_unit(dtype)
    assert_within(actual, expected, sums + rounding_unit(dtype) * expected.abs() + torch.finfo(dtype).tiny)


@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weighted", [True, False])
def test_sums_match_float64(
    device: str, dtype: torch.dtype, size: tuple[int, int, int], weighted: bool
) -> None:
    y, weights, rows, _ = operands(size, dtype, device)
    actual = combine(y, weights if weighted else None, rows)
    terms = y.double()[rows] * (weights.double()[..., None] if weighted else 1)
    assert actual.dtype == dtype
    assert_sums(actual, terms, dtype)
    assert torch.equal(combine(y, weights if weighted else None, rows), actual)


@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_match_float64(device: str, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    y, weights, rows, grad = operands(size, dtype, device)
    inputs = y.requires_grad_(), weights.requires_grad_()
    of_y, of_weights = torch.autograd.grad(combine(*inputs, rows), inputs, grad)
    slopes, factors = grad.double()[:, None], weights.detach().double()[..., None]
    expected_y = torch.empty_like(of_y, dtype=torch.float64)
    expected_y[rows.flatten()] = (slopes * factors).flatten(0, 1)
    expected_y = expected_y.cpu()
    assert_within(of_y, expected_y, 2 * rounding_unit(dtype) * expected_y.abs() + torch.finfo(dtype).tiny)
    terms = (slopes * y.detach().double()[rows]).transpose(1, 2)
    assert_sums(of_weights, terms, dtype)
    # Without a gradient of the weights that of y has the same bits.
    (alone,) = torch.autograd.grad(combine(y, weights.detach(), rows), (y,), grad)
    assert torch.equal(alone, of_y)


@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_copied_bit_by_bit(device: str, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    tokens, choices, features = size
    x, rows = randn(tokens, features, dtype=dtype, device=device), rows_of(tokens, choices, device)
    x[0, 0], x[-1, -1] = float("nan"), float("-inf")
    x.requires_grad_()
    copied = spread(x, None, rows)
    assert torch.equal(copied[rows].nan_to_num(), x[:, None].expand(tokens, choices, features).nan_to_num())
    assert bool(copied[rows[0, 0], 0].isnan()) and bool(copied[rows[-1, -1], -1] == float("-inf"))
    grad = randn(*copied.shape, dtype=dtype, device=device, seed=3)
    (of_x,) = torch.autograd.grad(copied, (x,), grad)
    terms = grad.double()[rows]
    assert_sums(of_x, terms, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_every_order(device: str) -> None:
    tokens, choices = 3, 2
    rows = rows_of(tokens, choices, device)
    y = randn(tokens * choices, 16, dtype=torch.float64, device=device).requires_grad_()
    x = randn(tokens, 16, dtype=torch.float64, device=device, seed=1).requires_grad_()
    weights = randn(tokens, choices, dtype=torch.float64, device=device, seed=2).requires_grad_()
    functions: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda y, weights: combine(y, weights, rows), (y, weights)),
        (lambda x, weights: spread(x, weights, rows), (x, weights)),
        (lambda y: combine(y, None, rows), (y,)),
        (lambda x: spread(x, None, rows), (x,)),
    ]
    for function, inputs in functions:
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    y, weights, rows, grad = operands((4, 3, 32), torch.float32, device)
    for op, arguments in (
        (OPS.combine, (y.requires_grad_(), weights.requires_grad_(), rows)),
        (OPS.combine, (y, None, rows)),
        (OPS.spread, (grad.requires_grad_(), weights, rows)),
        (OPS.spread, (grad.detach(), None, rows)),
        (OPS.combine_gradient, (grad, y, weights, rows)),
    ):
        assert set(torch.library.opcheck(op.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("device", DEVICES)
def test_modes_and_transforms_see_the_operators(device: str) -> None:
    y, weights, rows, _ = operands((4, 3, 32), torch.float32, device)
    recorder = Recorder()
    inputs = y.requires_grad_(), weights.requires_grad_()
    with recorder:
        combine(*inputs, rows).square().sum().backward()
    assert recorder.seen == {"combine", "combine_gradient"}
    of_both = torch.func.grad(lambda y, weights: combine(y, weights, rows).square().sum(), (0, 1))
    for actual, expected in zip(of_both(y.detach(), weights.detach()), inputs, strict=True):
        torch.testing.assert_close(actual, expected.grad)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_follows_the_number_of_tokens(device: str) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        return combine(spread(x, None, rows).sin(), weights, rows)

    for tokens in (4, 9, 30):
        x = randn(tokens, 32, dtype=torch.float32, device=device).requires_grad_()
        weights = randn(tokens, 3, dtype=torch.float32, device=device, seed=1).requires_grad_()
        rows = rows_of(tokens, 3, device)
        expected = combine(spread(x, None, rows).sin(), weights, rows)
        y = compiled(x, weights, rows)
        torch.testing.assert_close(y, expected)
        for one, other in zip(
            torch.autograd.grad(y.square().sum(), (x, weights)),
            torch.autograd.grad(expected.square().sum(), (x, weights)),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_operands_lie_anywhere(device: str) -> None:
    """Slices, transposed matrices and gradients without memory of their own."""
    y, weights, rows, grad = operands((6, 2, 64), torch.float32, device)
    expected = combine(y, weights, rows)
    wide = torch.cat((y, y), 1)
    wide[:, 64:] = float("nan")
    for same in (wide[:, :64], y.t().contiguous().t(), torch.cat((y[:1], y))[1:]):
        assert torch.equal(combine(same, weights, rows), expected)
    transposed = weights.t().contiguous().t(), rows.t().contiguous().t()
    assert torch.equal(combine(y, *transposed), expected)
    one = grad.flatten()[:1].clone().requires_grad_()
    (of_one,) = torch.autograd.grad(combine(one.expand(y.shape), weights, rows).sum(), one)
    torch.testing.assert_close(of_one, weights.sum()[None] * 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(0, 2, 32), (3, 0, 32), (3, 2, 0)])
def test_nothing_to_add(device: str, size: tuple[int, int, int]) -> None:
    y, weights, rows, _ = operands(size, torch.float32, device)
    tokens, choices, features = size
    inputs = y.requires_grad_(), weights.requires_grad_()
    result = combine(*inputs, rows)
    assert torch.equal(result, torch.zeros(tokens, features, device=device))
    for gradient, given in zip(torch.autograd.grad(result.sum(), inputs), inputs, strict=True):
        assert gradient.shape == given.shape and not bool(gradient.any())
    x = torch.ones(tokens, features, device=device).requires_grad_()
    copied = spread(x, None, rows)
    assert copied.shape == (tokens * choices, features)
    (of_x,) = torch.autograd.grad(copied.sum(), (x,))
    assert of_x.shape == x.shape and not bool((of_x != choices).any())


def test_what_does_not_fit_is_refused() -> None:
    y, weights, rows, grad = operands((4, 3, 32), torch.float32, "cpu")
    cases: list[tuple[Callable[[], Tensor], str]] = [
        (lambda: combine(y[1:], weights, rows), r"y must be \[12, features\]"),
        (lambda: combine(y[:, :24], weights, rows), "multiple of 16 features"),
        (lambda: combine(y.int(), weights, rows), "y must have dtype"),
        (lambda: combine(y, weights, rows.int()), r"rows must be \[tokens, choices\] of int64"),
        (lambda: combine(y, weights, rows.flatten()), "rows must be"),
        (lambda: combine(y, weights.double(), rows), r"weights must have shape \(4, 3\) of torch.float32"),
        (lambda: combine(y, weights[:, :2], rows), "weights must have shape"),
        (lambda: combine(y, weights.to("meta"), rows), "weights must be on"),
        (lambda: spread(y, None, rows), r"x must be \[4, features\]"),
        (lambda: OPS.combine_gradient(y, y, weights, rows), r"grad must be \[4, features\]"),
        (lambda: combine(y, weights, rows + 1), r"rows\[\d+\] must be 0 to 11, got 12"),
        (lambda: spread(grad, None, rows - 1), r"rows\[\d+\] must be 0 to 11, got -1"),
    ]
    for call, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            call()


@pytest.mark.gpu
def test_rows_that_there_are_not_count_as_zeros() -> None:
    y, weights, rows, grad = operands((4, 3, 32), torch.float32, "cuda")
    rows[1, 2], rows[3, 0] = 1 << 40, -1
    none = torch.zeros_like(rows, dtype=torch.bool)
    none[1, 2] = none[3, 0] = True
    actual = combine(y.requires_grad_(), weights.requires_grad_(), rows)
    zeroed = weights.detach().masked_fill(none, 0)
    torch.testing.assert_close(actual, combine(y, zeroed, rows.masked_fill(none, 0)))
    of_weights = torch.autograd.grad(actual, (weights,), grad)[0]
    assert not bool(of_weights[none].any()) and bool(of_weights[~none].all())


@pytest.mark.gpu
def test_a_graph_follows_rows_and_weights() -> None:
    y, weights, rows, grad = operands((300, 4, 128), torch.bfloat16, "cuda")
    inputs = y.requires_grad_(), weights.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        result = combine(spread(grad, None, rows) + inputs[0], inputs[1], rows)
        return result, *torch.autograd.grad(result, inputs, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = run()
    for seed in range(3):
        with torch.no_grad():
            rows.copy_(torch.randperm(1200, generator=seeded(seed)).view(300, 4))
            weights.copy_(randn(300, 4, dtype=torch.bfloat16, device="cuda", seed=seed))
        graph.replay()
        for one, other in zip(results, run(), strict=True):
            assert torch.equal(one, other)
