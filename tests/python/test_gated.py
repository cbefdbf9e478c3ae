"""`functional.gated` and products with gates, by kernels and by what takes their place on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    DEVICE_DTYPES,
    DEVICES,
    FUNCTIONS,
    assert_within,
    make_pattern,
    randn,
    random_values,
    rounding_unit,
)
from torch import Tensor

from tilesparse import _C, functional
from tilesparse._checks import DTYPES
from tilesparse._runtime import launch
from tilesparse._runtime.device import ACTIVATIONS
from tilesparse._runtime.layout import row_stride
from tilesparse.errors import InvalidArgumentError


def gate_by_pytorch(y: Tensor, by: Tensor | None, code: int) -> Tensor:
    gate, factor = y.chunk(2, -1) if by is None else (by, y)
    result: Tensor = factor * list(FUNCTIONS.values())[code](gate)
    return result


def gradient_by_pytorch(grad: Tensor, y: Tensor, by: Tensor | None, code: int) -> tuple[Tensor | None, ...]:
    y, by = y.detach().requires_grad_(), None if by is None else by.detach().requires_grad_()
    with torch.enable_grad():
        result = gate_by_pytorch(y, by, code)
    found = torch.autograd.grad(result, (y,) if by is None else (y, by), grad)
    return found[0], found[1] if len(found) > 1 else None


@pytest.fixture
def calls(device: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of kernels, which take all gates they can; on the CPU PyTorch takes their place."""
    called: list[str] = []
    kernels: list[Any] = [launch.gate, launch.gate_gradient]
    if device == "cpu":
        kernels = [gate_by_pytorch, gradient_by_pytorch]
        monkeypatch.setattr(
            launch,
            "multiplies_by_gate",
            lambda y, by: row_stride(y) is not None and (by is None or row_stride(by) is not None),
        )
    for kernel, name in zip(kernels, ("gate", "gate_gradient"), strict=True):

        def counted(*arguments: Any, kernel: Any = kernel, name: str = name) -> Any:
            called.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(launch, name, counted)
    monkeypatch.setattr(launch, "MANY_ELEMENTS", 0)
    return called


@pytest.mark.parametrize("halves", [False, True], ids=["two", "halves"])
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_against_float64(
    device: str, dtype: torch.dtype, activation: str, halves: bool, calls: list[str]
) -> None:
    """Values and gradients, of few tokens and many, one after the other; the same every time."""
    for leading, features in (((1,), 16), ((5, 3), 272), ((700,), 1040), ((0,), 32)):
        made = randn(*leading, 2 * features, dtype=dtype, device=device, seed=1) * 3
        dy = randn(*leading, features, dtype=dtype, device=device, seed=2)
        by, y = made.chunk(2, -1)
        given: Any = [made] if halves else [y.contiguous(), by]
        for tensor in given:
            tensor.requires_grad_()
        exact = [tensor.detach().double().requires_grad_() for tensor in (y, by)]
        gate = FUNCTIONS[activation](exact[1])
        of: Any = partial(functional.gated, activation=activation)
        calls.clear()
        results = []
        for _ in range(2):
            result = of(*given)
            results.append((result, *torch.autograd.grad(result, given, dy)))
        is_kernels = result.numel() > 0 and (device == "cpu" or dtype != torch.float64)
        assert calls == (["gate", "gate_gradient"] * 2 if is_kernels else [])
        assert all(map(torch.equal, *results))
        result, *found = results[0]
        with torch.no_grad():
            assert torch.equal(of(*given), result)
        unit = 2 * rounding_unit(dtype) + (
            1e-4 if dtype.itemsize == 2 else 1e-5 if dtype.itemsize == 4 else 1e-14
        )
        expected = exact[0] * gate
        assert_within(
            result, expected.detach().cpu(), (unit * exact[0].abs() * (1 + gate.abs()) + unit).detach().cpu()
        )
        right = torch.autograd.grad(expected, exact, dy.double())
        found = [*found[0].chunk(2, -1)][::-1] if halves else found
        scale = [
            dy.double().abs() * (1 + gate.abs()),
            dy.double().abs() * exact[0].abs() * (2 + exact[1].abs()),
        ]
        for one, other, size in zip(found, right, scale, strict=True):
            assert_within(one, other.cpu(), (unit * size + unit).detach().cpu())


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_second_gradients(device: str, activation: str, calls: list[str]) -> None:
    """In float64 where kernels have it, which is where PyTorch takes their place; of every operand."""
    pattern = make_pattern("diagonal", (2, 2), (16, 16))
    like: Any = {"dtype": torch.float64, "device": device}
    x, y, gate = (randn(3, 32, seed=seed, **like).requires_grad_() for seed in (1, 2, 3))
    values, bias = random_values(pattern, **like).requires_grad_(), randn(32, seed=4, **like).requires_grad_()

    def linear(x: Tensor, values: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
        return functional.linear(x, values, pattern, bias, activation, gate=gate)

    def halves(y: Tensor) -> Tensor:
        return functional.gated(y, activation=activation)

    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda y, by: functional.gated(y, by, activation), (y, gate), fast_mode=True)
        assert check(halves, (y,), fast_mode=True)
        assert check(linear, (x, values, bias, gate), fast_mode=True)
        assert check(
            lambda gate: linear(x.detach(), values.detach(), bias.detach(), gate), (gate,), fast_mode=True
        )
        assert check(
            lambda bias: linear(x.detach(), values.detach(), bias, gate.detach()), (bias,), fast_mode=True
        )
    assert ("gate_gradient" in calls) == (device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_ways_of_differentiating(device: str, calls: list[str]) -> None:
    """One gradient alone, of expanded gradients, many at once, and by transforms."""
    y, gate = (randn(6, 32, dtype=torch.float32, device=device, seed=s).requires_grad_() for s in (1, 2))
    result = functional.gated(y, gate, "silu")
    right = [torch.nn.functional.silu(gate), torch.autograd.grad(torch.nn.functional.silu(gate), gate, y)[0]]
    for leaf, gradient in zip((y, gate), right, strict=True):
        (found,) = torch.autograd.grad(result.sum(), leaf, retain_graph=True)
        torch.testing.assert_close(found, gradient)
    assert "gate_gradient" in calls
    (many,) = torch.autograd.grad(
        result, y, torch.ones(2, 6, 32, device=device), is_grads_batched=True, retain_graph=True
    )
    torch.testing.assert_close(many, right[0].expand(2, 6, 32))
    function = torch.func.grad(lambda t: functional.gated(t, gate.detach(), "silu").sum())
    torch.testing.assert_close(function(y.detach()), right[0])
    torch.testing.assert_close(
        torch.func.vmap(lambda t: functional.gated(t, activation="relu"))(y), y[:, 16:] * y[:, :16].relu()
    )


def test_bad_arguments() -> None:
    y = torch.randn(3, 32)
    for match, arguments in (
        ("activation must be one of", (y, y, "swish")),
        (r"gate must have shape \(3, 32\)", (y, y[:, :16])),
        (r"gate must have dtype torch.float32", (y, y.double())),
        ("y must have an even number of features", (y[:, :31],)),
        ("y must have an even number of features", (y[0, 0],)),
    ):
        with pytest.raises(InvalidArgumentError, match=match):
            functional.gated(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_columns_of_wider_matrices(activation: str, dtype: torch.dtype) -> None:
    """Nothing is written beside the results; in a captured graph, and the same as of copies."""
    tokens, features = 331, 528
    wide = randn(3, tokens, 2 * features + 64, dtype=dtype, device="cuda")
    room = torch.full((3, tokens, features + 32), 7.0, dtype=dtype, device="cuda")
    by, y, dy = (part[:, 16 : 16 + features] for part in wide)
    results: list[Any] = [part[:, 16 : 16 + features] for part in room]
    rows: Any = [(matrix.data_ptr(), matrix.stride(0)) for matrix in (by, y, dy, *results)]
    code = ACTIVATIONS[activation]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        common: Any = DTYPES[dtype], code, tokens, features, rows[0], rows[1]
        for run, others in ((_C.gate_gradient, rows[2:5]), (_C.gate, rows[5:])):
            kernel: Any = run
            kernel(*common, *others, stream)
    graph.replay()
    dy, y, by = (matrix.contiguous() for matrix in (dy, y, by))
    of_y, of_by = launch.gate_gradient(dy, y, by, code)
    for result, expected in zip(results, (of_by, of_y, launch.gate(y, by, code)), strict=True):
        assert expected is not None and torch.equal(result, expected)
    assert (room[..., :16] == 7).all() and (room[..., -16:] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_halves_in_compiled_code(activation: str, dtype: torch.dtype) -> None:
    """Operators of their own, whose gradients are one tensor, also of the second order; also of no tokens."""
    y = randn(37, 96, dtype=dtype, device="cuda", seed=1).requires_grad_()
    dy = randn(37, 48, dtype=dtype, device="cuda", seed=2)
    for backend in ("aot_eager", "eager"):
        torch._dynamo.reset()  # which counts compilations of one function
        compiled: Any = torch.compile(functional.gated, backend=backend, fullgraph=True, dynamic=False)
        for tokens in (0, 37):
            right = functional.gated(y[:tokens], None, activation)
            result = compiled(y[:tokens], None, activation)
            torch.testing.assert_close(result, right)
            expected, found = (
                torch.autograd.grad(each, y, dy[:tokens].mT.contiguous().mT) for each in (right, result)
            )
            torch.testing.assert_close(found, expected)
        with torch.no_grad():
            torch.testing.assert_close(compiled(y, None, activation), right)
    orders = []
    for function in (functional.gated, compiled):
        (first,) = torch.autograd.grad(function(y, None, activation), y, dy, create_graph=True)
        orders.append(torch.autograd.grad(first.square().sum(), y)[0])
    torch.testing.assert_close(*orders)
