"""torch.ops.tilesparse.*: opcheck, schemas, launch caching and forced kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers import (
    DEVICE_DTYPES,
    DEVICES,
    Recorder,
    make_pattern,
    randn,
    random_values,
    run_anew,
    seeded,
    use_kernel,
)
from torch import Tensor, func
from torch._subclasses.fake_tensor import FakeTensorMode

from tilesparse import _C, BlockPattern, BlockSparseLinear, functional
from tilesparse._runtime import launch
from tilesparse._runtime.device import ACTIVATIONS, TENSORS
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.errors import InvalidArgumentError, UnsupportedError

OPS = torch.ops.tilesparse
EXCHANGE = "__dlpack_c_exchange_api__"  # of PyTorch 2.10 and later


@pytest.fixture(autouse=True, params=[True, False], ids=["native", "python"])
def _reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read natively, or as with PyTorch before 2.10, which has nothing to read them with."""
    monkeypatch.setattr(TENSORS, "enabled", request.param)


def operands(
    pattern: BlockPattern, dtype: torch.dtype, device: str, *, tokens: int = 9
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, y, values, bias) that require gradients."""
    x = randn(tokens, pattern.in_features, dtype=dtype, device=device, seed=1)
    y = randn(tokens, pattern.out_features, dtype=dtype, device=device, seed=2)
    values = random_values(pattern, dtype=dtype, device=device)
    bias = randn(pattern.out_features, dtype=dtype, device=device, seed=3)
    return x.requires_grad_(), y.requires_grad_(), values.requires_grad_(), bias.requires_grad_()


def check(op: Any, *args: Any) -> None:
    assert set(torch.library.opcheck(op.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("device", "dtype"), [DEVICE_DTYPES[0], DEVICE_DTYPES[-1]])
def test_opcheck(device: str, dtype: torch.dtype) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 32))
    x, y, values, bias = operands(pattern, dtype, device)
    index = pattern.index_on(x.device)
    check(OPS.dds_nt, x, values, *index, bias)
    check(OPS.dds_nt, x.detach(), values, *index)
    check(OPS.dds_nt, x, values.detach(), *index, None, None, 0, True)
    check(OPS.dds_nt, x.detach(), values.detach(), *index, bias.detach(), None, ACTIVATIONS["gelu"])
    check(OPS.dds_nt, x, values, *index, bias, y)
    check(OPS.dds_nt, x.detach(), values.detach(), *index, None, y, 0, True)
    check(OPS.dds_nt, x.detach(), values.detach(), *index, None, y.detach(), ACTIVATIONS["relu"], True)
    check(OPS.dds_nn, y, values, *index)
    check(OPS.dds_nn, y, values, *index, True)
    check(OPS.sdd_tn, y, x, *index)
    check(OPS.sdd_tn_with_bias, y.detach(), x.detach(), *index)
    weight = randn(*pattern.shape, dtype=dtype, device=device, seed=4)
    check(OPS.expand, values, *index)
    check(OPS.gather, weight.requires_grad_(), *index)
    check(OPS.gather, weight.detach().t().contiguous().t(), *index)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_activation_records_no_gradient(device: str) -> None:
    pattern = make_pattern("full", (1, 1), (16, 16))
    x, _, values, _ = operands(pattern, torch.float32, device)
    with pytest.raises(UnsupportedError, match="activation"):
        OPS.dds_nt(x, values, *pattern.index_on(x.device), None, None, ACTIVATIONS["relu"])


@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_gate(device: str) -> None:
    """It has no gradient; without one it is an operator like others, batched and compiled."""
    pattern = make_pattern("random 50%", (2, 2), (16, 32))
    x, y, values, bias = (t.detach() for t in operands(pattern, torch.float32, device))
    index = pattern.index_on(x.device)
    options = {"activation": ACTIVATIONS["silu"], "gate": y}
    torch.library.opcheck(OPS.dds_nt, (x, values, *index, bias), options)
    expected = OPS.dds_nt(x, values, *index, bias) * torch.nn.functional.silu(y)

    def gated(x: Tensor, gate: Tensor) -> Tensor:
        return functional.linear(x, values, pattern, bias, "silu", gate=gate)

    compiled = torch.compile(gated, backend="aot_eager", fullgraph=True)
    for result in (gated(x, y), torch.vmap(gated)(x, y), compiled(x, y)):
        torch.testing.assert_close(result, expected)
    with pytest.raises(InvalidArgumentError, match="gate must be None beside a residual"):
        OPS.dds_nt(x, values, *index, None, y, gate=y)
    with pytest.raises(UnsupportedError, match="gate must be None where a gradient is recorded"):
        OPS.dds_nt(x, values, *index, gate=y.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_changing_token_counts_and_updates_use_the_right_launch(device: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 32))
    for name in ("random 50%", "empty", "full"):
        pattern.update_(make_pattern(name, (2, 3), (16, 32)))
        values = random_values(pattern, dtype=torch.float32, device=device)
        everything = randn(70, pattern.in_features, dtype=torch.float32, device=device)
        whole = functional.linear(everything, values, pattern)
        for tokens in (1, 70, 3, 64, 1, 70):
            part = functional.linear(everything[:tokens], values, pattern)
            torch.testing.assert_close(part, whole[:tokens])


BAD_ARGUMENTS: dict[str, Any] = {
    "x of another dtype": lambda x, values, bias, y: (x.double(), values, bias, y),
    "x of other features": lambda x, values, bias, y: (x[:, 16:], values, bias, y),
    "values of another dtype": lambda x, values, bias, y: (x, values.double(), bias, y),
    "values of other strides": lambda x, values, bias, y: (x, values.mT.contiguous().mT, bias, y),
    "values of another shape": lambda x, values, bias, y: (x, values[1:], bias, y),
    "bias of another dtype": lambda x, values, bias, y: (x, values, bias.double(), y),
    "bias of another shape": lambda x, values, bias, y: (x, values, bias[1:], y),
    "residual of another dtype": lambda x, values, bias, y: (x, values, bias, y.double()),
    "residual of another shape": lambda x, values, bias, y: (x, values, bias, y[:1]),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_product_that_ran_lets_no_other_operands_pass(device: str, name: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (32, 32))
    x, y, values, bias = (t.detach() for t in operands(pattern, torch.float32, device))
    index = pattern.index_on(x.device)

    def run(x: Tensor, values: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        result: Tensor = OPS.dds_nt(x, values, *index, bias, residual)
        return result

    run(x, values, bias, y)
    with pytest.raises(InvalidArgumentError, match=name.split()[0]):
        run(*BAD_ARGUMENTS[name](x, values, bias, y))


@pytest.mark.parametrize("device", DEVICES)
def test_operands_may_change_their_alignment(device: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 32))
    x, y, values, _ = (t.detach() for t in operands(pattern, torch.float32, device))
    index = pattern.index_on(x.device)

    def products() -> tuple[Tensor, ...]:
        added = OPS.dds_nt(x, values, *index, None, y)
        return added, OPS.dds_nt(x, values, *index), OPS.dds_nn(y, values, *index), OPS.sdd_tn(y, x, *index)

    expected = products()
    x, y, values = (t.new_empty(t.numel() + 1)[1:].view_as(t).copy_(t) for t in (x, y, values))
    results = products()
    assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True))


def eager_products(pattern: BlockPattern, x: Tensor, y: Tensor, values: Tensor) -> list[Tensor]:
    """Products that record no gradient may skip the dispatcher."""
    with torch.no_grad():
        return [
            functional.linear(x, values, pattern, residual=y),
            functional.dds(y, values, pattern, transpose=False),
            functional.sdd(y, x, pattern),
            functional.linear(x, values, pattern, residual=y, policy="dense"),
            functional.linear(x, values, pattern, activation="relu", gate=y),
        ]


def training_products(pattern: BlockPattern, x: Tensor, y: Tensor, values: Tensor) -> list[Tensor]:
    """Products that autograd alone acts on may skip the dispatcher, too."""
    x, values = (tensor.detach().requires_grad_() for tensor in (x, values))
    result = functional.linear(x, values, pattern)
    return list(torch.autograd.grad(result, (x, values), y.detach()))


# The products of a call, and the operators they are.
CALLS: dict[str, tuple[Any, set[str]]] = {
    "without gradients": (eager_products, {"dds_nt", "dds_nn", "sdd_tn", "expand"}),
    "training": (training_products, {"dds_nt", "dds_nn", "sdd_tn"}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", DEVICES)
def test_modes_and_profilers_see_every_product(device: str, name: str) -> None:
    products, operators = CALLS[name]
    pattern = make_pattern("random 50%", (2, 3), (16, 32))
    x, y, values, _ = operands(pattern, torch.float32, device)
    expected = products(pattern, x, y, values)
    with Recorder() as recorder:
        results = products(pattern, x, y, values)
    assert recorder.seen >= operators
    assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True))
    with torch.profiler.profile() as profile:
        products(pattern, x, y, values)
    names = {event.key for event in profile.key_averages()}
    assert names >= {f"tilesparse::{operator}" for operator in operators}


@pytest.mark.parametrize("device", DEVICES)
def test_hooks_see_what_a_training_step_saves(device: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 32))
    x, y, values, _ = operands(pattern, torch.float32, device)
    expected = training_products(pattern, x, y, values)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = training_products(pattern, x, y, values)
    assert {x.shape, values.shape} <= {tensor.shape for tensor in saved}
    assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True))


class Subclass(Tensor):
    """A tensor that the dispatcher gives its own results."""


UNUSUAL: dict[str, Any] = {
    "subclass": lambda x: x.as_subclass(Subclass),
    "inference": lambda x: torch.inference_mode()(x.clone)(),
    "negative bit": lambda x: torch.complex(x, -x).conj().imag,
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("device", DEVICES)
def test_eager_products_of_unusual_tensors(device: str, name: str) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 32))
    x, y, values, _ = (t.detach() for t in operands(pattern, torch.float32, device))
    expected = eager_products(pattern, x, y, values)
    results = eager_products(pattern, *(UNUSUAL[name](t) for t in (x, y)), values)
    assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True))
    if name == "subclass":
        assert all(type(result) is Subclass for result in results)


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize(("records", "most"), [(False, 4), (True, 6)])
def test_a_layer_reaches_native_code_through_few_frames(
    records: bool, most: int, activations: str | None
) -> None:
    layer = BlockSparseLinear(64, 64, block_shape=16)
    if activations is not None:
        layer.to_storage(activations, activations=activations)
    x, package, depths = torch.randn(3, 64, requires_grad=records), str(Path(functional.__file__).parent), []

    def note(frame: FrameType | None, event: str, _: object) -> None:
        if event == "call" and frame is not None and frame.f_code is launch.dds.__code__:
            depths.append(0)
            while frame is not None:
                depths[-1] += frame.f_code.co_filename.startswith(package)
                frame = frame.f_back

    with torch.set_grad_enabled(records):
        layer(x)
        sys.setprofile(note)
        layer(x)
        sys.setprofile(None)
    assert len(depths) == 1 and depths[0] <= most


def test_launches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilesparse._runtime.pattern_cache.MAX_CALLS", 4)
    pattern = make_pattern("full", (1, 1), (16, 16))
    values = random_values(pattern, dtype=torch.float32)
    for tokens in range(1, 12):
        functional.linear(torch.ones(tokens, 16), values, pattern)
        entry = prepared(pattern.index_on(values.device))
        assert 0 < len(entry._calls) <= 4 and len(entry.kept) <= len(entry._calls)


# Products of (x, y, values, bias), and how many calls of the kind are kept natively.
REPEATED: dict[str, tuple[Any, int]] = {
    "x Wᵀ": (lambda p, x, y, values, bias: functional.linear(x, values, p), 1),
    "relu(x Wᵀ + bias) + y": (
        lambda p, x, y, values, bias: functional.linear(x, values, p, bias, "relu", residual=y),
        1,
    ),
    "(x Wᵀ + bias) silu(y)": (
        lambda p, x, y, values, bias: functional.linear(x, values, p, bias, "silu", gate=y),
        1,
    ),
    "y W": (lambda p, x, y, values, bias: functional.dds(y, values, p, transpose=False), 1),
    "yᵀ x": (lambda p, x, y, values, bias: functional.sdd(y, x, p), 1),
    "W xᵀ": (lambda p, x, y, values, bias: functional.dsd(values, p, x.reshape(-1, x.shape[-1]).t()), 1),
    "no tokens": (lambda p, x, y, values, bias: functional.linear(x[:0], values, p, bias), 1),
    "one token": (lambda p, x, y, values, bias: functional.linear(x[0, 0], values, p, bias), 1),
    "4 dimensions": (lambda p, x, y, values, bias: functional.linear(x[None], values, p, bias), 1),
    "5 dimensions": (lambda p, x, y, values, bias: functional.linear(x[None, None], values, p, bias), 0),
    "x column-major": (lambda p, x, y, values, bias: functional.dds(x[0].t().contiguous().t(), values, p), 1),
    "tokens at varying distances": (
        lambda p, x, y, values, bias: functional.linear(torch.cat([x, x])[:, 1:], values, p),
        1,  # of the copy
    ),
    "bias with gaps": (
        lambda p, x, y, values, bias: functional.linear(x, values, p, torch.stack([bias, bias], 1)[:, 0]),
        0,
    ),
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("device", DEVICES)
def test_products_are_repeated_as_they_ran(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product, kept = REPEATED[name]
    pattern = make_pattern("random 50%", (2, 3), (32, 32))
    x, y, values, bias = (t.detach() for t in operands(pattern, torch.float32, device, tokens=15))
    x, y = x.view(3, 5, -1), y.view(3, 5, -1)
    results = [product(pattern, x, y, values, bias) for _ in range(3)]
    entry = prepared(pattern.index_on(values.device))
    assert len(entry.kept) == (kept if TENSORS.enabled and hasattr(Tensor, EXCHANGE) else 0)
    monkeypatch.setattr(TENSORS, "enabled", False)
    expected = product(pattern, x, y, values, bias)
    for result in results:
        assert torch.equal(result, expected) and result.stride() == expected.stride()
        assert type(result) is Tensor and not result.requires_grad


def test_products_of_threads_that_update_and_run() -> None:
    """Plans that one thread drops while another runs them must live on."""
    pattern = make_pattern("full", (2, 2), (16, 16))
    values, x = random_values(pattern, dtype=torch.float32), torch.ones(4, 32)
    expected = functional.linear(x, values, pattern)
    entry = prepared(pattern.index_on(values.device))

    def run(_: int) -> bool:
        entry._forget_calls()
        return all(torch.equal(functional.linear(x, values, pattern), expected) for _ in range(50))

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(run, range(40)))


@pytest.mark.parametrize("device", DEVICES)
def test_use_kernel_forces_each_kernel(device: str) -> None:
    pattern = make_pattern("random 50%", (4, 4), (64, 64))
    values = random_values(pattern, dtype=torch.float32, device=device)
    x = randn(50, pattern.in_features, dtype=torch.float32, device=device)
    expected = functional.linear(x, values, pattern)
    ran = 0
    for kernel in _C.kernels():
        try:
            with use_kernel(kernel.name):
                y = functional.linear(x, values, pattern)
        except UnsupportedError as error:
            assert kernel.name in str(error)
        else:
            ran += 1
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert ran
    assert torch.equal(functional.linear(x, values, pattern), expected)


@pytest.mark.parametrize("operand", range(2))
def test_forward_mode_is_refused(operand: int) -> None:
    pattern = make_pattern("random 50%", (2, 3), (16, 32))
    operands = [
        randn(4, pattern.in_features, dtype=torch.float32),
        random_values(pattern, dtype=torch.float32),
    ]
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
        operands[operand] = torch.autograd.forward_ad.make_dual(
            operands[operand], torch.ones_like(operands[operand])
        )
        functional.linear(operands[0], operands[1], pattern)


WITHOUT = """
import os, sys, torch, torch._dynamo

def run(owner, name):
    if hasattr(owner, name):
        delattr(owner, name)
    import tilesparse
    layer = tilesparse.BlockSparseLinear(64, 96, density=0.5, block_shape=16)
    dense, x = layer.to_linear(), torch.randn(5, 64)
    layer(x).square().sum().backward()
    dense(x).square().sum().backward()
    torch.testing.assert_close(layer(x), dense(x))
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(x))

for argument in sys.argv[1:]:
    owner, name = argument.split(".")
    if (pid := os.fork()) == 0:  # importing PyTorch takes longer than all else
        run({"profiler": torch.autograd.profiler, "_C": torch._C}[owner], name)
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0, argument
"""


@pytest.mark.parametrize("_reading", [True], indirect=True)  # for new processes it is nothing
def test_private_names_of_pytorch_may_be_missing(_reading: None) -> None:
    names = (
        "_C._cuda_getCurrentRawStream",
        "_C._cuda_getDevice",
        "_C._is_any_autocast_enabled",
        "_C._get_fp32_precision_getter",
        "_C._len_torch_function_stack",
        "_C._dispatch_tls_local_include_set",
        "profiler._is_profiler_enabled",
    )
    run_anew(WITHOUT, *names)


def test_hessians_by_reverse_mode_and_what_forward_mode_says() -> None:
    layer, x = (
        BlockSparseLinear(64, 32, generator=seeded(), block_shape=32).double(),
        torch.randn(64, dtype=torch.float64),
    )

    def loss(x: Tensor) -> Tensor:
        y: Tensor = layer(x[None]).square().sum()
        return y

    with pytest.raises(UnsupportedError, match=r"forward-mode .* jacrev\(jacrev\(f\)\)"):
        func.hessian(loss)(x)
    weight = layer.to_linear().weight.detach()
    torch.testing.assert_close(func.jacrev(func.jacrev(loss))(x), 2 * weight.T @ weight)


def test_nothing_is_made_under_fake_tensor_mode() -> None:
    made, dense = BlockSparseLinear(64, 32, block_shape=32), torch.nn.Linear(64, 32)
    makers: list[Callable[[], object]] = [
        lambda: BlockSparseLinear(64, 32, block_shape=32),
        lambda: BlockSparseLinear(64, 32, device="meta", block_shape=32),
        lambda: BlockSparseLinear.from_linear(dense, block_shape=32),
        lambda: BlockPattern.random((64, 64), block_shape=32, density=0.5),
        lambda: BlockPattern([0, 1], [0], shape=(32, 32), block_shape=32),
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for make in makers:
            with pytest.raises(UnsupportedError, match="must not be made under FakeTensorMode"):
                make()
        assert made(torch.randn(3, 64)).shape == (3, 32)  # as all models compute there
