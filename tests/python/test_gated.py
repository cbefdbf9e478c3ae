"""`functional.gated` and products with gates, by kernels and by what takes their place on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    DEVICE_DTYPES,
    DEVICES,
    assert_within,
    make_pattern,
    randn,
    random_values,
    rounded,
    rounding_unit,
    sums_unit,
)
from torch import Tensor

from tilesparse import _C, InvalidArgumentError, _launch, functional
from tilesparse._checks import DTYPES
from tilesparse._layout import row_pitch

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


def gate_by_pytorch(y: Tensor, by: Tensor, code: int) -> Tensor:
    return y * list(FUNCTIONS.values())[code](by)


def gradient_by_pytorch(
    grad: Tensor, y: Tensor, by: Tensor, code: int, results: tuple[Tensor, Tensor], sums: bool
) -> Tensor | None:
    with torch.enable_grad():
        leaves = y, by = y.detach().requires_grad_(), by.detach().requires_grad_()
        found = torch.autograd.grad(gate_by_pytorch(y, by, code), leaves, grad)
    for result, gradient in zip(results, found, strict=True):
        result.copy_(gradient)
    return found[0].reshape(-1, y.shape[-1]).sum(0) if sums else None


@pytest.fixture
def calls(device: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of kernels, which take all gates they can; on the CPU PyTorch takes their place."""
    called: list[str] = []
    kernels: list[Any] = [_launch.gate, _launch.gate_gradient]
    if device == "cpu":
        kernels = [gate_by_pytorch, gradient_by_pytorch]
        by_rows = lambda y, by: None not in (row_pitch(y), row_pitch(by))  # noqa: E731
        monkeypatch.setattr(_launch, "multiplies_by_gate", by_rows)
        by_bias = lambda x, bias: bias is not None and bias.requires_grad  # noqa: E731
        monkeypatch.setattr(functional, "_sums_with_activation", by_bias)
    for kernel, name in zip(kernels, ("gate", "gate_gradient"), strict=True):

        def counted(*arguments: Any, kernel: Any = kernel, name: str = name) -> Any:
            called.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(_launch, name, counted)
    monkeypatch.setattr(_launch, "MANY_GATED", 0)
    monkeypatch.setattr(_launch, "MANY_ELEMENTS", 0)
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


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize(("device", "dtype"), DEVICE_DTYPES)
def test_a_bias_is_summed_with_the_gradient(
    device: str, dtype: torch.dtype, activation: str, calls: list[str]
) -> None:
    pattern = make_pattern("empty rows and columns", (21, 4), (16, 16))
    values = random_values(pattern, dtype=dtype, device=device).requires_grad_()
    bias = randn(pattern.out_features, dtype=dtype, device=device, seed=3).requires_grad_()
    for tokens in (700, 3):
        x = randn(tokens, pattern.in_features, dtype=dtype, device=device, seed=1)
        gate, dy = (randn(tokens, pattern.out_features, dtype=dtype, device=device, seed=s) for s in (4, 2))
        y = functional.linear(x, values, pattern, bias, activation, gate=gate)
        first, again = (torch.autograd.grad(y, (values, bias), dy, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, again))
        of_y = dy.double() * FUNCTIONS[activation](gate.double())
        unit = rounding_unit(dtype) + (1e-4 if dtype.itemsize == 2 else 8 * sums_unit(dtype))
        bound = (unit + tokens * sums_unit(dtype)) * (dy.double().abs() * (1 + gate.double().abs())).sum(0)
        assert_within(first[1], of_y.sum(0).cpu(), rounded(of_y.sum(0), bound, dtype).cpu())
    assert (calls.count("gate_gradient") == 4) == (device == "cpu" or dtype != torch.float64)


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


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_second_gradients_are_those_of_pytorch(
    device: str, activation: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, whichever way the first ones are computed."""
    pattern = make_pattern("random 50%", (4, 3), (16, 16))
    like: Any = {"dtype": torch.float32, "device": device}
    x, gate = randn(9, 48, seed=1, **like), randn(9, 64, seed=5, **like)
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(_launch, "multiplies_by_gate", lambda *_: False)
        leaves = [random_values(pattern, **like), randn(64, seed=3, **like), gate.clone()]
        values, bias, by = (leaf.requires_grad_() for leaf in leaves)
        y = functional.linear(x, values, pattern, bias, activation, gate=by)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        square: Any = torch.cat([gradient.flatten() for gradient in first]).square().sum()
        square.backward()
        found.append([*first, *(leaf.grad for leaf in leaves)])
    assert "gate" in calls
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


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
    compiled: Any = torch.compile(functional.gated, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(y, gate, "silu").sum(), y)
    torch.testing.assert_close(found, right[0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_bias_may_change_before_its_gradient_is_computed(device: str, calls: list[str]) -> None:
    pattern = make_pattern("random 50%", (4, 3), (16, 16))
    like: Any = {"dtype": torch.float32, "device": device}
    x, gate = randn(9, 48, seed=1, **like), randn(9, 64, seed=5, **like)
    values, found = random_values(pattern, **like).requires_grad_(), []
    for change in (0.0, 1.0):
        bias = randn(64, seed=3, **like).requires_grad_()
        y = functional.linear(x, values, pattern, bias, "gelu", gate=gate)
        with torch.no_grad():
            bias.add_(change)
        found.append(torch.autograd.grad(y.sum(), (values, bias)))
    assert all(map(torch.equal, *found)) and "gate_gradient" in calls


def test_bad_arguments() -> None:
    y = torch.randn(3, 32)
    for match, arguments in (
        ("activation: one of", (y, y, "swish")),
        (r"gate: shape \(3, 32\) expected", (y, y[:, :16])),
        (r"gate: dtype torch.float32", (y, y.double())),
        ("y: last dimension of two halves expected", (y[:, :31],)),
        ("y: last dimension of two halves expected", (y[0, 0],)),
    ):
        with pytest.raises(InvalidArgumentError, match=match):
            functional.gated(*arguments)


def rows(matrix: Tensor) -> tuple[int, int]:
    return matrix.data_ptr(), matrix.stride(0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_nothing_is_written_beside_the_gradients(activation: str, dtype: torch.dtype) -> None:
    """Between other columns, with sums of both, in a captured graph; the same as without."""
    tokens, features = 331, 528
    wide = randn(3, tokens, 2 * features + 64, dtype=dtype, device="cuda")
    by, y, dy = (part[:, 16 : 16 + features] for part in wide)
    room = torch.full((2, tokens, features + 32), 7.0, dtype=dtype, device="cuda")
    sums = torch.full((2, features + 32), 7.0, dtype=dtype, device="cuda")
    code = _launch.ACTIVATIONS[activation]
    workspace = torch.empty(
        _C.gate_gradient_workspace_size(DTYPES[dtype], tokens, features),
        dtype=torch.uint8,
        device="cuda",
    )
    results = [part[:, 16 : 16 + features] for part in room]

    def run() -> None:
        _C.gate_gradient(
            DTYPES[dtype],
            code,
            tokens,
            features,
            rows(by),
            rows(y),
            rows(dy),
            rows(results[0]),
            rows(results[1]),
            sums[0, 16:].data_ptr(),
            sums[1, 16:].data_ptr(),
            workspace.data_ptr(),
            len(workspace),
            torch.cuda.current_stream().cuda_stream,
        )

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    plain = [torch.empty(tokens, features, dtype=dtype, device="cuda") for _ in range(2)]
    _launch.gate_gradient(dy, y, by, code, (plain[1], plain[0]), False)
    for result, expected, total in zip(results, plain, sums, strict=True):
        assert torch.equal(result, expected)
        bound = tokens * 2 * rounding_unit(dtype) * expected.double().abs().amax()
        assert (total[16:-16].double() - expected.double().sum(0)).abs().amax() <= bound
        assert (total[:16] == 7).all() and (total[-16:] == 7).all()
    assert (room[..., :16] == 7).all() and (room[..., -16:] == 7).all()
