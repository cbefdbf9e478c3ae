"""Properties that PyTorch users rely on beside the numbers: streams, graphs, memory, errors, compilation."""

from __future__ import annotations

import copy
import fcntl
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_product_close,
    assert_within,
    blocks_of_dense,
    dense_weight,
    make_pattern,
    product_with_bound,
    randn,
    random_values,
    seeded,
    use_kernel,
    written_sdd,
)
from torch import Tensor

from tilesparse import _C, BlockPattern, BlockSparseLinear, functional
from tilesparse._checks import BLOCK_SIZES, DTYPES
from tilesparse._runtime import pattern_cache
from tilesparse._runtime.device import ACTIVATIONS, DDS_NN, DDS_NT, SDD_TN
from tilesparse._runtime.pattern_cache import prepared
from tilesparse.errors import InvalidArgumentError, InvalidPatternError, PatternChangedError, UnsupportedError
from tilesparse.nn.weight import INDEX_NAMES, layer_index

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SLEEP = 100_000_000  # GPU cycles, far longer than it takes to launch what follows


def make_layer(in_features: int = 256, out_features: int = 384, **options: Any) -> BlockSparseLinear:
    options = {"density": 0.4, "device": "cuda", "dtype": BF16, "generator": seeded(), **options}
    return BlockSparseLinear(in_features, out_features, **{"block_shape": 32, **options})


def numbers(*size: int, seed: int = 0) -> Tensor:
    return randn(*size, dtype=BF16, device="cuda", seed=seed)


@contextmanager
def side_stream() -> Iterator[None]:
    """A stream of its own, which begins after the current one and is waited for by it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def step(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The output of a layer and all gradients."""
    y = layer(x)
    return (y, *torch.autograd.grad(y, (x, *layer.parameters()), grad))


def captured_step(
    layer: torch.nn.Module, x: Tensor, grad: Tensor
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A graph of a step, and what its replays give, after one on another stream as PyTorch advises."""
    with side_stream():
        step(layer, x, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(layer, x, grad)
    return graph, results


def calls_of(
    x: Tensor, y: Tensor, values: Tensor, pattern: BlockPattern, bias: Tensor | None = None
) -> dict[int, Callable[[], Tensor]]:
    return {
        DDS_NT: lambda: functional.linear(x, values, pattern, bias),
        DDS_NN: lambda: functional.dds(y, values, pattern, transpose=False),
        SDD_TN: lambda: functional.sdd(y, x, pattern),
    }


def products(x: Tensor, y: Tensor, values: Tensor, pattern: BlockPattern) -> tuple[Tensor, ...]:
    return tuple(call() for call in calls_of(x, y, values, pattern).values())


def all_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_a_captured_training_step_follows_its_inputs() -> None:
    layer = make_layer()
    x = numbers(200, 256).requires_grad_()
    grad = numbers(200, 384, seed=1)
    graph, captured = captured_step(layer, x, grad)
    for seed in (10, 20):
        with torch.no_grad():
            for offset, tensor in enumerate((x, grad, *layer.parameters())):
                tensor.copy_(numbers(*tensor.shape, seed=seed + offset))
        graph.replay()
        assert all_equal(captured, step(layer, x, grad))


def test_a_capture_that_needs_a_new_plan_is_refused() -> None:
    layer, x = make_layer(), numbers(200, 256)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        fine = x + 1
        with pytest.raises(UnsupportedError, match="before the capture"):
            layer(x)
    graph.replay()
    assert torch.equal(fine, x + 1)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x))


def captured_build(
    arrays: list[Tensor], kernel: int, op: int, operands: tuple[Tensor, ...], workspaces: list[Tensor]
) -> None:
    """Enqueues the transpose of a pattern in square blocks, a plan and the product on x, y and values."""
    x, y, values = operands
    side = values.shape[1]
    stream = torch.cuda.current_stream().cuda_stream
    shape = (y.shape[1], x.shape[1])
    pattern = _C.Pattern(side, side, *shape, len(arrays[1]), *(array.data_ptr() for array in arrays))

    def memory(size: int) -> tuple[int, int]:
        workspaces.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        return workspaces[-1].data_ptr(), size

    columns = [array.data_ptr() for array in arrays[3:]]
    transpose_size = _C.pattern_device_transpose_size(pattern)
    _C.pattern_device_transpose(pattern, *columns, *memory(transpose_size), stream)
    plan_size, build_size = _C.plan_device_size(pattern, kernel, op)
    plan = memory(plan_size)
    _C.plan_device_build(pattern, kernel, op, *plan, *memory(build_size), stream)
    multiply = _C.Product(pattern, op, 4, 1, len(x), kernel=kernel + 1, ldx=shape[1], ldy=shape[0])
    multiply.use_plan(*plan, _C.plan_key(pattern, kernel, op))
    workspace, _ = memory(multiply.workspace_size())
    multiply.run(*(tensor.data_ptr() for tensor in operands), 0, 0, workspace, stream)


def rows_of(pattern: BlockPattern) -> tuple[Tensor, Tensor, Tensor]:
    return pattern.crow_indices, pattern.col_indices, pattern.slot


def test_a_captured_pattern_follows_its_arrays() -> None:
    """A graph of all there is to do for a pattern that changes on the GPU."""
    patterns_by_side = {
        side: [
            BlockPattern.random((1280, 896), block_shape=side, density=0.3, generator=seeded(seed))
            for seed in (1, 2, 3)
        ]
        for side in (16, 128)
    }
    capability = _C.device_info(1).compute_capability
    x, y = (numbers(300, size, seed=size) for size in (896, 1280))
    checked = 0
    for (index, kernel), op in product(enumerate(_C.kernels()), (DDS_NT, DDS_NN, SDD_TN)):
        takes_values = kernel.storages & 1 and not kernel.values_dtypes  # plain, in the dtype of x
        does_it = kernel.plan and takes_values and kernel.ops >> op & kernel.dtypes >> 4 & 1
        grouped = "grouped" in kernel.name  # these compute grouped products alone
        if not does_it or grouped or kernel.min_compute_capability not in (80, capability):
            continue
        checked += 1
        patterns = patterns_by_side[128 if "pingpong" in kernel.name else 16]  # others take small blocks
        values = random_values(patterns[0], dtype=BF16, device="cuda")
        operands = [x, y, values]
        operands[(1, 0, 2)[op]] = result = torch.zeros_like(operands[(1, 0, 2)[op]])
        arrays = [array.cuda() for array in rows_of(patterns[0])]
        columns = prepared(patterns[0].index_on(arrays[0].device)).columns()
        arrays += [torch.zeros_like(array) for array in columns]
        workspaces: list[Tensor] = []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured_build(arrays, index, op, tuple(operands), workspaces)
        for pattern in patterns[::-1]:
            for array, now in zip(arrays, rows_of(pattern), strict=False):
                array.copy_(now)
            graph.replay()
            with use_kernel(kernel.name):
                expected = calls_of(x, y, values, pattern)[op]()
            assert torch.equal(result, expected), kernel.name
    assert checked


def test_captured_products_follow_their_inputs() -> None:
    pattern = make_pattern("power-law rows", (6, 8), (32, 64))
    values = random_values(pattern, dtype=BF16, device="cuda")
    x = numbers(1000, pattern.in_features, seed=1)
    y = numbers(1000, pattern.out_features, seed=2)
    bias = numbers(pattern.out_features, seed=3)
    total = torch.zeros_like(values)

    def run() -> tuple[Tensor, ...]:
        written_sdd(y, x, pattern, total, True)
        return (functional.linear(x, values, pattern, bias, "silu"), *products(x, y, values, pattern))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (11, 12):
        for tensor in (x, y, values, bias):
            tensor.copy_(numbers(*tensor.shape, seed=seed))
        total.zero_()
        graph.replay()
        graph.replay()
        replayed = total.clone()
        total.zero_()
        run()
        assert all_equal(captured, run())
        assert torch.equal(total, replayed)


def test_products_run_on_the_current_stream() -> None:
    """Their input is written late on a stream of its own; any other stream would read zeros."""
    pattern = make_pattern("random 50%", (4, 6), (64, 64))
    values = random_values(pattern, dtype=BF16, device="cuda")
    late: list[Any] = [numbers(500, size) for size in pattern.shape[::-1]]
    expected = products(*late, values, pattern)
    x, y = (torch.zeros_like(tensor) for tensor in late)
    with side_stream():
        torch.cuda._sleep(SLEEP)
        x.copy_(late[0])
        y.copy_(late[1])
        results = products(x, y, values, pattern)
    assert all_equal(results, expected)


def test_backward_runs_on_the_stream_of_forward() -> None:
    layer = make_layer()
    late = numbers(500, 256)
    grad = numbers(500, 384, seed=1)
    expected = step(layer, late.clone().requires_grad_(), grad)
    x = torch.zeros_like(late).requires_grad_()
    with side_stream():
        torch.cuda._sleep(SLEEP)
        with torch.no_grad():
            x.copy_(late)
        results = step(layer, x, grad)
    assert all_equal(results, expected)


def test_two_streams_share_a_pattern() -> None:
    pattern = make_pattern("random 50%", (16, 12), (32, 32))
    values = random_values(pattern, dtype=BF16, device="cuda")
    inputs = [[numbers(1500, size, seed=seed) for size in pattern.shape[::-1]] for seed in (1, 2)]
    # A copy of the pattern, so that its plans are first built while both streams are at work.
    expected = [products(x, y, values, copy.deepcopy(pattern)) for x, y in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[list[tuple[Tensor, ...]]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, (x, y), result in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(products(x, y, values, pattern))
    torch.cuda.synchronize()
    for result, right in zip(results, expected, strict=True):
        assert all(all_equal(run, right) for run in result)


@pytest.mark.parametrize("tokens", [1500, 8])  # kernels for few tokens read the pattern itself, not a plan
def test_a_dropped_pattern_leaves_launched_work_alone(tokens: int) -> None:
    """Nobody but the library knows the copy of a pattern that another stream reads."""
    pattern = make_pattern("random 50%", (16, 16), (64, 64))
    values = random_values(pattern, dtype=BF16, device="cuda")
    x = numbers(tokens, pattern.in_features)
    expected = functional.linear(x, values, pattern)
    sizes = [len(tensor) for tensor in rows_of(pattern)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        results = [functional.linear(x, values, pattern) for _ in range(3)]
    del pattern
    trash = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in 100 * sizes]
    torch.cuda.synchronize()
    assert len(trash) == 300 and all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_products_in_quick_succession(block_size: int) -> None:
    """One after another without waiting, as in a model: none hangs, the last gives what the first gave."""
    x, y = (torch.randn(64 * 257, 1280, dtype=BF16, device="cuda") for _ in range(2))
    bias = numbers(1280)
    for seed in range(4):
        pattern = BlockPattern.random(
            (1280, 1280), block_shape=(block_size, block_size), density=0.25, generator=seeded(seed)
        )
        values = random_values(pattern, dtype=BF16, device="cuda")
        for call in calls_of(x, y, values, pattern, bias).values():
            first = call()
            for _ in range(300):
                last = call()
            assert torch.equal(last, first)


@pytest.fixture
def sync_is_an_error() -> Iterator[Callable[[], None]]:
    """A function after which PyTorch raises on synchronisation, until the test ends."""
    before = torch.cuda.get_sync_debug_mode()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode(before)


@contextmanager
def asleep(sync_is_an_error: Callable[[], None]) -> Iterator[None]:
    """The GPU sleeps, far longer than it takes to launch what follows, for which the host must not wait.

    The library's own calls are beyond PyTorch's eyes, but cannot return before the sleep ends if they wait.
    """
    torch.cuda.synchronize()
    sync_is_an_error()
    torch.cuda._sleep(20 * SLEEP)
    sleeping = torch.cuda.Event()
    sleeping.record()
    yield
    assert not sleeping.query(), "the host waited for the GPU"
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.alone
def test_forward_and_backward_do_not_wait_for_the_gpu(sync_is_an_error: Callable[[], None]) -> None:
    layer, new_layer = make_layer(), make_layer()
    x = numbers(2000, 256).requires_grad_()
    grad = numbers(2000, 384, seed=1)
    for _ in range(3):
        step(layer, x, grad)
    expected = step(copy.deepcopy(new_layer), x, grad)
    with asleep(sync_is_an_error):
        step(layer, x, grad)
        results = step(new_layer, x, grad)
    assert all_equal(results, expected)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("tokens", [512, 4096])
def test_every_square_of_large_products(tokens: int, block_size: int) -> None:
    """Loads of a tile meet stores of others, which neither a small layer nor a norm of all results shows."""
    layer = make_layer(4096, 8192, density=0.25, block_shape=block_size, bias=False)
    pattern, weight = layer.pattern, dense_weight(layer.weight.cpu(), layer.pattern).float().cuda()
    x, y = (numbers(tokens, n, seed=n) for n in (4096, 8192))
    results = x.float() @ weight.t() + y, y.float() @ weight, y.float().t() @ x.float()
    blocks = blocks_of_dense(results[2].cpu(), pattern).cuda()
    sums = torch.zeros_like(blocks)
    for _ in range(3):
        assert worst_square(functional.linear(x, layer.weight, pattern, residual=y), results[0]) < 0.01
        assert worst_square(functional.dds(y, layer.weight, pattern, transpose=False), results[1]) < 0.01
        assert worst_square(functional.sdd(y, x, pattern).flatten(0, 1), blocks.flatten(0, 1)) < 0.01
        written_sdd(y, x, pattern, sums.zero_(), True)
        assert worst_square(sums.flatten(0, 1), blocks.flatten(0, 1)) < 1e-3


def worst_square(actual: Tensor, expected: Tensor) -> float:
    """The greatest relative error, by the Frobenius norm, of any 16 by 16 elements side by side."""

    def norms(matrix: Tensor) -> Tensor:
        return matrix.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).norm(dim=(1, 3))

    return float((norms(actual.float() - expected) / norms(expected)).max())


@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("block_shape", [(64, 64), (32, 64)])
def test_no_copy_of_the_weight(block_shape: tuple[int, int], column_major: bool) -> None:
    # So large that no product takes partial sums: nothing but the weight is large. Kernels for narrow blocks
    # pack it, but not these.
    layer = make_layer(16384, 16384, density=0.25, block_shape=block_shape)
    x = numbers(16384, 64).t()
    x = (x if column_major else x.contiguous()).requires_grad_()
    grad = numbers(64, 16384, seed=1)
    weight_bytes = layer.weight.numel() * layer.weight.itemsize
    step(layer, x, grad)
    y = layer(x)
    assert peak_bytes(lambda: layer(x)) < weight_bytes / 4
    # The gradient of the weight itself is as large as the weight.
    assert peak_bytes(lambda: torch.autograd.grad(y, layer.weight, grad)) < weight_bytes * 1.25
    layer.weight.requires_grad_(False)
    y = layer(x)
    assert peak_bytes(lambda: torch.autograd.grad(y, x, grad)) < weight_bytes / 4


def peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes PyTorch allocates at once in a call, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture
def set_float32_precision() -> Iterator[Callable[[str], None]]:
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_every_float32_product_follows_pytorchs_precision(
    set_float32_precision: Callable[[str], None],
) -> None:
    pattern = BlockPattern.full((256, 256), block_shape=(64, 64))
    values = random_values(pattern, dtype=torch.float32, device="cuda")
    x = randn(256, 256, dtype=torch.float32, device="cuda", seed=1)
    y = randn(256, 256, dtype=torch.float32, device="cuda", seed=2)
    weight = dense_weight(values, pattern)
    results = {}
    for precision in ("highest", "high", "highest"):
        set_float32_precision(precision)
        results[precision] = products(x, y, values, pattern)
    factors = ((x, weight.t()), (y, weight), (y.t(), x))
    for i, (left, right) in enumerate(factors):
        expected, tolerance = product_with_bound(left, right, torch.float32)
        if i == 2:
            expected, tolerance = blocks_of_dense(expected, pattern), blocks_of_dense(tolerance, pattern)
        assert_within(results["highest"][i], expected, tolerance)
        exact, rough = (
            (results[precision][i].cpu() - expected).abs().max() for precision in ("highest", "high")
        )
        # Factors rounded to 2^-11: the sums of 256 products err by 0.005 on the average, 0.02 at most.
        assert 20 * exact < rough < 0.2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step(dynamic: bool) -> None:
    torch.compiler.reset()
    model = torch.nn.Sequential(
        make_layer(256, 384, dtype=torch.float32), torch.nn.GELU(), make_layer(384, 256, dtype=torch.float32)
    )
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for tokens in (33, 64):
        x = randn(2, tokens, 256, dtype=torch.float32, device="cuda").requires_grad_()
        grad = randn(2, tokens, 256, dtype=torch.float32, device="cuda", seed=1)
        parameters = (x, *model.parameters())
        eager, fused = ((y, *torch.autograd.grad(y, parameters, grad)) for y in (model(x), compiled(x)))
        torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-4)


def results_of(
    run: Callable[[Tensor], Tensor], model: torch.nn.Module, x: Tensor, grad: Tensor, training: bool
) -> list[Tensor]:
    with torch.set_grad_enabled(training):
        y = run(x)
    gradients = torch.autograd.grad(y, tuple(model.parameters()), grad) if training else ()
    return [tensor.clone() for tensor in (y, *gradients)]


@pytest.mark.parametrize("training", [False, True])
def test_compiled_graphs_make_the_plans_they_need(training: bool) -> None:
    """Memory that a graph's first run allocates is taken back, but for the results."""
    torch.compiler.reset()
    layers = [make_layer(256, 384), make_layer(384, 384), make_layer(384, 256)]
    layers[1].policy = "dense"
    model = torch.nn.Sequential(*layers)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    batches = [[numbers(70, 256, seed=seed + i) for i in (0, 1)] for seed in range(5)]
    of_graphs = [results_of(compiled, model, x, grad, training) for x, grad in batches]
    for (x, grad), result in zip(batches, of_graphs, strict=True):
        expected = results_of(model, model, x, grad, training)
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=5e-2)


Call = Callable[[BlockPattern, Tensor, Tensor, Tensor, Tensor], object]


def with_kernel(name: str, pattern: BlockPattern, x: Tensor, values: Tensor) -> None:
    with use_kernel(name):
        functional.linear(x, values, pattern)


def a_kernel(device: int, op: int) -> str:
    return next(kernel.name for kernel in _C.kernels() if kernel.device == device and kernel.ops >> op & 1)


# The mistake -> (call, what the message names).
BAD_CALLS: dict[str, tuple[Call, str]] = {
    "values on the CPU": (lambda p, x, y, v, b: functional.linear(x, v.cpu(), p), "x must be on cpu"),
    "x on the CPU": (lambda p, x, y, v, b: functional.linear(x.cpu(), v, p), "x must be on cuda:0"),
    "bias on the CPU": (
        lambda p, x, y, v, b: functional.linear(x, v, p, b.cpu()),
        "bias must be on cuda:0 like x",
    ),
    "x of sdd on the CPU": (lambda p, x, y, v, b: functional.sdd(y, x.cpu(), p), "y must be on cpu like x"),
    "wrong in_features": (
        lambda p, x, y, v, b: functional.linear(x[:, :-32], v, p),
        "x must have last dimension",
    ),
    "the kernel of another product": (
        lambda p, x, y, v, b: with_kernel(a_kernel(1, SDD_TN), p, x, v),
        "it computes another product",
    ),
    "a kernel for the CPU": (
        lambda p, x, y, v, b: with_kernel(a_kernel(0, DDS_NT), p, x, v),
        "it is for another kind of device",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_refused_call_leaves_the_gpu_usable(name: str) -> None:
    call, message = BAD_CALLS[name]
    error = UnsupportedError if "kernel" in name else InvalidArgumentError
    pattern = make_pattern("random 50%", (4, 6), (32, 32))
    values = random_values(pattern, dtype=BF16, device="cuda")
    x = numbers(100, pattern.in_features, seed=1)
    y = numbers(100, pattern.out_features, seed=2)
    bias = numbers(pattern.out_features, seed=3)
    with pytest.raises(error, match=message):
        call(pattern, x, y, values, bias)
    torch.cuda.synchronize()
    assert_product_close(
        functional.linear(x, values, pattern, bias), x, dense_weight(values, pattern).t(), bias
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    layer = make_layer()
    x, grad = numbers(100, 256), numbers(100, 384)
    expected = step(layer, x.requires_grad_(), grad)
    twin = copy.deepcopy(layer).to("cuda:1")
    results = step(twin, x.detach().to("cuda:1").requires_grad_(), grad.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert all(result.device == torch.device("cuda", 1) for result in results)
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), right.cpu())
    with pytest.raises(InvalidArgumentError, match="x must be on cuda:1 like values, got cuda:0"):
        twin(x)


@pytest.fixture
def free_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Bytes of free GPU memory; one process at a time looks at them and takes them."""
    with open(tmp_path_factory.getbasetemp().parent / "gpu_memory", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield torch.cuda.mem_get_info()[0]
        torch.cuda.empty_cache()


@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
def test_more_than_2_to_the_31_elements(column_major: bool, free_memory: int) -> None:
    """The last tokens alone are not zero, so that little is enough to know the results."""
    if free_memory < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    pattern = make_pattern("random 50%", (2, 64), (32, 32))
    tokens, last = 2**31 // pattern.in_features + 104, slice(-100, None)
    values = random_values(pattern, dtype=BF16, device="cuda")
    weight = dense_weight(values, pattern)
    x, y = (big_matrix(tokens, size, column_major) for size in pattern.shape[::-1])
    assert x.numel() > 2**31
    x[last] = numbers(100, pattern.in_features, seed=1)
    y[last] = numbers(100, pattern.out_features, seed=2)
    assert_product_close(functional.linear(x, values, pattern)[last], x[last], weight.t())
    expected, tolerance = product_with_bound(y[last].t(), x[last], BF16)
    assert_within(
        functional.sdd(y, x, pattern), blocks_of_dense(expected, pattern), blocks_of_dense(tolerance, pattern)
    )
    del x
    dx = torch.ops.tilesparse.dds_nn(y, values, *pattern.index_on(y.device), column_major)
    assert_product_close(dx[last], y[last], weight)
    assert not dx[:-100].any()


@pytest.mark.parametrize("kernel", ["sm80_dds_nt_bf16_128x128", "sm80_dds_nt_bf16_32x128"])
def test_more_than_2_to_the_30_tokens_of_column_major_activations(kernel: str, free_memory: int) -> None:
    """The first tokens alone are not zero: as many bytes are left behind them as 32 bits do not count."""
    if free_memory < 72 * 2**30:
        pytest.skip("needs 72 GiB of free GPU memory")
    pattern = make_pattern("full", (1, 1), (16, 16))
    values = random_values(pattern, dtype=BF16, device="cuda")
    x = big_matrix(2**30 + 1024, pattern.in_features, True)
    x[:100] = numbers(100, pattern.in_features, seed=1)
    with use_kernel(kernel):
        y = functional.linear(x, values, pattern)
    assert_product_close(y[:100], x[:100], dense_weight(values, pattern).t())
    assert not y[100 : 2**16].any() and not y[-(2**16) :].any()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for 9.0"
)
@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("kernel", ["sm90_narrow_bf16_256x256", "sm90_narrow_bf16_128x512"])
def test_more_work_than_a_launch_can_count_takes_several(
    kernel: str, column_major: bool, free_memory: int
) -> None:
    if free_memory < 32 * 2**30:
        pytest.skip("needs 32 GiB of free GPU memory")
    pattern = BlockPattern.random((2**17, 2**19), block_shape=16, nnz=2**15).to("cuda")
    values = random_values(pattern, dtype=BF16, device="cuda")
    x = torch.randn(4096, pattern.in_features, dtype=BF16, device="cuda")
    if column_major:
        x = x.t().contiguous().t()
    with use_kernel(kernel), torch.no_grad():
        y = functional.linear(x, values, pattern)
        for tokens in (slice(0, 1024), slice(1800, 1928), slice(3072, 4096)):  # in one launch
            some = x[tokens].t().contiguous().t() if column_major else x[tokens]
            assert torch.equal(functional.linear(some, values, pattern), y[tokens])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_a_pending_error_stays_with_the_caller(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    elementwise = root / "cuda/elementwise"
    sources = [root / "tests/cpp/test_pending.cu", elementwise / "gate.cu", elementwise / "sums.cu"]
    flags = ["-std=c++17", "-arch=native", "--expt-relaxed-constexpr", f"-I{root / 'cuda'}"]
    program = tmp_path / "pending"
    subprocess.run(["nvcc", *flags, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def big_matrix(tokens: int, features: int, column_major: bool) -> Tensor:
    """Zeros, tokens x features."""
    size = (features, tokens) if column_major else (tokens, features)
    zeros = torch.zeros(size, dtype=BF16, device="cuda")
    return zeros.t() if column_major else zeros


def free_places(pattern: BlockPattern, count: int) -> Tensor:
    """So many (row, column) where the pattern has no block, on its device."""
    return (~pattern.to_block_mask()).nonzero()[:count]


# Kernels with a plan, and those for few tokens, which read the pattern itself.
@pytest.mark.parametrize("tokens", [200, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_captured_graphs_follow_updates(tokens: int, block_size: int) -> None:
    layer = make_layer(1024, 768, density=0.25, block_shape=block_size)
    x = numbers(tokens, 1024).requires_grad_()
    grad = numbers(tokens, 768, seed=1)
    graph, captured = captured_step(layer, x, grad)
    options: dict[str, Any] = {"density": 0.25, "block_shape": block_size}
    others = [make_layer(1024, 768, generator=seeded(seed), **options) for seed in (1, 2)]
    for other in others:
        layer.pattern.update_(other.pattern)
        graph.replay()
        assert all_equal(captured, step(layer, x, grad))
        layer.pattern.move_blocks_([0, 1], free_places(layer.pattern, 2), check=False)
        graph.replay()
        assert all_equal(captured, step(layer, x, grad))
    layer.load_state_dict(others[0].state_dict())
    graph.replay()
    assert all_equal(captured, step(layer, x, grad))


@pytest.mark.parametrize("training", [False, True])
def test_compiled_graphs_follow_updates_without_compiling_again(training: bool) -> None:
    torch.compiler.reset()
    layers = [make_layer(256, 384), make_layer(384, 384), make_layer(384, 256)]
    model = torch.nn.Sequential(*layers)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    x, grad = numbers(70, 256), numbers(70, 256, seed=1)

    for _ in range(4):
        results_of(compiled, model, x, grad, training)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(4):
            layers[1].pattern.update_(make_layer(384, 384, generator=seeded(10 + seed)).pattern)
            found, expected = (results_of(run, model, x, grad, training) for run in (compiled, model))
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-2)


def write(layer: Any, pattern: BlockPattern, counted: bool = False) -> None:
    """Write a pattern into the buffers of a layer, past PyTorch's counter or not."""
    for buffer, array in zip(map(layer.get_buffer, INDEX_NAMES), rows_of(pattern), strict=True):
        (buffer if counted else buffer.data).copy_(array)


def another(layer: Any, seed: int) -> BlockPattern:
    index = layer.pattern
    return BlockPattern.random(
        index.shape, block_shape=index.block_shape, nnz=index.nnz, generator=seeded(seed), device="cuda"
    )


def twin(layer: Any, pattern: BlockPattern) -> Any:
    """A layer with the same weight and that pattern."""
    made = make_layer(pattern=pattern)
    with torch.no_grad():
        made.weight.copy_(layer.weight)
        made.bias.copy_(layer.bias)
    return made


def follows(layer: Any, pattern: BlockPattern, x: Tensor) -> bool:
    return torch.equal(layer(x), twin(layer, pattern)(x))


def assert_found(call: Callable[[], object], interval: float = pattern_cache.INTERVAL) -> None:
    """A write that PyTorch does not count is found once the first call after the interval has compared."""
    time.sleep(interval)
    call()
    torch.cuda.synchronize()
    time.sleep(pattern_cache.PAUSE)
    with pytest.raises(PatternChangedError, match=r"between .* ms ago.* may have read the former one since"):
        call()


@pytest.fixture
def no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every call begin a comparison, or ask for the answer."""
    monkeypatch.setattr(pattern_cache, "INTERVAL", 0.0)
    monkeypatch.setattr(pattern_cache, "PAUSE", 0.0)


def through_another_library(buffer: Tensor, value: Tensor) -> None:
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(buffer)).copy_(value)


def through_a_collective(buffer: Tensor, value: Tensor) -> None:
    torch.distributed.all_gather_into_tensor(buffer, value.cuda())


@pytest.mark.alone
@pytest.mark.parametrize("through", [through_another_library, through_a_collective])
@torch.no_grad()
def test_a_write_of_others_is_found_at_the_next_call_after_the_interval(
    through: Callable[[Tensor, Tensor], None],
) -> None:
    layer, x = make_layer(), numbers(64, 256)
    pattern = another(layer, 7)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer(x)
        for buffer, array in zip(map(layer.get_buffer, INDEX_NAMES), rows_of(pattern), strict=True):
            version = buffer._version
            through(buffer, array)
            assert buffer._version == version
        assert_found(lambda: layer(x))
    finally:
        torch.distributed.destroy_process_group()
    assert follows(layer, pattern, x)


@pytest.mark.alone
def test_a_write_that_is_not_counted_is_found_in_every_layer() -> None:
    x = numbers(64, 256)
    layers = [make_layer() for _ in range(40)]  # more than there is room for at first
    for turn in range(3):
        patterns = [another(layer, 100 * turn + i) for i, layer in enumerate(layers)]
        time.sleep(pattern_cache.INTERVAL)  # the calls below begin a comparison: none is due at the writes
        for layer in layers:
            layer(x)
        torch.cuda.synchronize()
        time.sleep(pattern_cache.PAUSE)
        layers[0](x)
        for layer, pattern in zip(layers, patterns, strict=True):
            write(layer, pattern)
        for layer in layers[1:]:
            layer(x)
        assert_found(lambda: layers[0](x))
        for layer, pattern in zip(layers, patterns, strict=True):
            assert follows(layer, pattern, x)
        del layers[1::2], layer
        torch.cuda.empty_cache()


@pytest.mark.alone
def test_a_write_is_followed_where_nothing_has_read_the_former_pattern(no_interval: None) -> None:
    layer, other = make_layer(), make_layer()
    x = numbers(64, 256)
    for called in (layer, layer, other, other, other):  # the last has the answer that nothing was written
        called(x)
        torch.cuda.synchronize()
    pattern = another(layer, 7)
    write(layer, pattern)
    for _ in range(3):
        other(x)
        torch.cuda.synchronize()
    assert follows(layer, pattern, x)


@pytest.mark.alone
def test_the_host_does_not_wait_for_a_comparison(
    no_interval: None, sync_is_an_error: Callable[[], None]
) -> None:
    layer, x = make_layer(), numbers(64, 256)
    before, pattern = layer(x), another(layer, 7)
    for _ in range(3):
        layer(x)
        torch.cuda.synchronize()
    torch.cuda._sleep(20 * SLEEP)
    asleep = torch.cuda.Event()
    asleep.record()
    write(layer, pattern)
    sync_is_an_error()
    results = [layer(x) for _ in range(100)]
    assert not asleep.query(), "the host waited for the GPU"
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(y, before) for y in results)
    torch.cuda.synchronize()
    with pytest.raises(PatternChangedError, match=r"between .* ms ago"):
        layer(x)
    assert follows(layer, pattern, x)


@pytest.mark.alone
def test_what_is_written_and_no_pattern_is_refused(no_interval: None) -> None:
    layer, other = make_layer(), make_layer()
    x, pattern = numbers(64, 256), another(layer, 7)
    layer(x)
    torch.cuda.synchronize()
    layer.slot.data.fill_(10**6)
    layer(x)
    assert_found(lambda: other(x), 0.0)
    for _ in range(2):
        other(x)
        with pytest.raises(InvalidPatternError, match="slot"):
            layer(x)
    write(layer, pattern)
    assert follows(layer, pattern, x)


def test_a_counted_write_that_another_pattern_sees_is_followed(no_interval: None) -> None:
    layer, other = make_layer(), make_layer()
    x = numbers(64, 256)
    pattern, before = another(layer, 7), layer(x)
    other(x)
    torch.cuda._sleep(SLEEP)
    with torch.no_grad():
        write(layer, pattern, counted=True)
    for _ in range(3):
        other(x)
        torch.cuda.synchronize()
    found = layer(x)
    assert torch.equal(found, twin(layer, pattern)(x)) and not torch.equal(found, before)


def test_a_counted_write_on_another_stream_is_not_lost() -> None:
    """The call of another pattern compares all that were written, and does not wait for that stream."""
    layer, other, side = make_layer(), make_layer(), torch.cuda.Stream()
    x, pattern = numbers(64, 256), another(layer, 7)
    other(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side), torch.no_grad():
        layer(x)
        torch.cuda._sleep(SLEEP)
        write(layer, pattern, counted=True)
    other.slot.copy_(other.slot.clone())
    other(x)
    with torch.cuda.stream(side):
        found = layer(x)
    torch.cuda.synchronize()
    assert torch.equal(found, twin(layer, pattern)(x))


@pytest.mark.alone
def test_nothing_is_compared_while_a_graph_is_captured(
    no_interval: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make_layer(), numbers(64, 256)
    begun: list[object] = []
    compare = _C.arrays_compare
    monkeypatch.setattr(_C, "arrays_compare", lambda *args: (begun.append(args), compare(*args)))
    with torch.no_grad():
        for _ in range(2):
            before = layer(x)
        torch.cuda.synchronize()
        count, graph = len(begun), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [layer(x) for _ in range(3)]
        assert len(begun) == count > 0
        pattern = another(layer, 7)
        write(layer, pattern)
        for _ in range(2):
            graph.replay()
        assert all(torch.equal(y, before) for y in captured)
        assert_found(lambda: layer(x), 0.0)
        graph.replay()
        assert all(torch.equal(y, twin(layer, pattern)(x)) for y in captured)


def test_a_graph_is_captured_while_another_thread_compares(no_interval: None) -> None:
    layer, other = make_layer(), make_layer(generator=seeded(1))
    x = numbers(64, 256)
    expected, done = other(x).detach(), threading.Event()
    errors: list[Exception] = []

    def call() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                while not done.is_set():
                    other(x)
        except Exception as error:
            errors.append(error)

    with torch.no_grad():
        before = layer(x)
        thread = threading.Thread(target=call)
        thread.start()
        try:
            for _ in range(20):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    captured = layer(x)
                graph.replay()
                assert torch.equal(captured, before)
        finally:
            done.set()
            thread.join()
    assert errors == [] and torch.equal(other(x), expected)


def test_updates_on_other_streams_are_no_writes_of_others(no_interval: None) -> None:
    """For a second each thread changes a layer of its own, while its calls compare those of all others."""
    x = numbers(64, 256)
    end, errors, rounds = time.monotonic() + 1, list[BaseException](), list[int]()
    layers = [make_layer(generator=seeded(seed)) for seed in range(4)]

    def change(layer: Any, turn: int, patterns: list[BlockPattern], states: list[Any]) -> None:
        other = turn % 2
        if turn % 5 == 0:
            layer.load_state_dict(states[other])
        elif turn % 5 == 1:
            write(layer, patterns[other], counted=True)
        elif turn % 5 == 2:
            for buffer in layer.buffers():
                buffer.copy_(buffer.clone())
            layer(x)
            layer.pattern = patterns[other]
        else:
            layer.pattern.update_(patterns[other])

    def run(layer: Any) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                patterns, states, expected, turn = [another(layer, seed) for seed in (1, 2)], [], [], 0
                for pattern in patterns:
                    layer.pattern = pattern
                    states.append({name: tensor.clone() for name, tensor in layer.state_dict().items()})
                    expected.append(layer(x))
                while time.monotonic() < end:
                    change(layer, turn, patterns, states)
                    assert all(torch.equal(layer(x), expected[turn % 2]) for _ in range(3))
                    turn += 1
                rounds.append(turn)
        except BaseException as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert min(rounds) > 5
    torch.cuda.synchronize()
    for layer in layers:
        layer(x)
        torch.cuda.synchronize()
        pattern = another(layer, 7)
        write(layer, pattern)
        assert_found(lambda layer=layer: layer(x), 0.0)
        assert follows(layer, pattern, x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.no_grad()
def test_each_device_is_compared_by_itself() -> None:
    layers = [make_layer(device=f"cuda:{device}") for device in range(2)]
    inputs = [randn(64, 256, dtype=BF16, device=f"cuda:{device}") for device in range(2)]
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)
    pattern = BlockPattern.random((384, 256), block_shape=32, nnz=layers[1].pattern.nnz, generator=seeded(7))
    write(layers[1], pattern)
    time.sleep(pattern_cache.INTERVAL)
    for device in (0, 1, 0):
        layers[device](inputs[device])
    torch.cuda.synchronize(1)
    time.sleep(pattern_cache.PAUSE)
    with pytest.raises(PatternChangedError):
        layers[1](inputs[1])
    assert torch.cuda.current_device() == 0
    weight = dense_weight(layers[1].weight.cpu(), pattern)
    y = inputs[1].double().cpu() @ weight.t() + layers[1].bias.double().cpu()
    torch.testing.assert_close(layers[1](inputs[1]).double().cpu(), y, rtol=2e-2, atol=2e-2)


@pytest.mark.alone
def test_rewiring_does_not_wait_for_the_gpu(sync_is_an_error: Callable[[], None]) -> None:
    layer, twin = make_layer(1024, 768, density=0.25), make_layer(1024, 768, density=0.25)
    x = numbers(200, 1024).requires_grad_()
    grad = numbers(200, 768, seed=1)
    step(layer, x, grad)
    slots, places = torch.arange(5, device="cuda"), free_places(layer.pattern, 5)
    layer.pattern.move_blocks_(slots, places, check=False)
    twin.pattern.move_blocks_(slots, places)
    expected = step(twin, x, grad)
    layer.pattern.move_blocks_(slots, places, check=False)
    with asleep(sync_is_an_error):
        layer.pattern.move_blocks_(slots, places, check=False)
        results = step(layer, x, grad)
    assert all_equal(results, expected)


def test_weights_packed_for_another_kernel_are_refused() -> None:
    layer = make_layer(1024, 2048, density=0.25, block_shape=32)
    x = numbers(8192, 1024)
    with torch.no_grad():
        expected = layer(x)
        layer.prepack()
        assert torch.equal(layer(x), expected)
        kept = prepared(layer_index(layer))
        (packed,) = kept._prepacked.values()
        key = packed.plan_key
        for wrong in (key + 1, _C.plan_key(kept.descriptor, packed.product.resolve()[0], DDS_NN)):
            packed.plan_key = wrong
            kept._forget_calls()
            with pytest.raises(InvalidArgumentError, match=f"prepacked.key must be {key}, .* got {wrong};"):
                layer(x)
        packed.plan_key = key
        kept._forget_calls()
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("tokens", [8192, 512])
def test_packed_weights_give_the_same_and_follow_changes(block_size: int, tokens: int) -> None:
    options: dict[str, Any] = {"density": 0.25, "block_shape": block_size}
    layer = make_layer(1024, 2048, **options)
    twin, other = copy.deepcopy(layer), make_layer(1024, 2048, generator=seeded(5), **options)
    both = (layer, twin)
    x = numbers(tokens, 1024)

    def same() -> bool:
        with torch.no_grad():
            return all(torch.equal(layer(x), twin(x)) for _ in range(2))

    assert same()
    twin.prepack()
    assert same()
    copies = [packed.memory.nbytes for packed in prepared(layer_index(twin))._prepacked.values()]
    is_copied = sum(copies) >= layer.weight.nbytes
    if tokens > 512:  # with fewer other kernels may be faster
        assert is_copied == (block_size < 64)
    with torch.no_grad():
        for changed in both:
            changed.weight.mul_(1.5)
        assert same()
        for changed in both:
            changed.pattern.update_(other.pattern)
        assert same()
        for changed in both:
            changed.weight = torch.nn.Parameter(changed.weight * 2)
        assert same()
        for changed in both:
            changed.weight.data.add_(1)
        twin.prepack()
        assert same()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = twin(x)
        for changed in both:
            changed.weight.mul_(0.5)
        graph.replay()
        assert torch.equal(captured, layer(x))


def test_ddp_like_writes_of_buffers_make_no_plan_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [make_layer(256, 384, generator=seeded(seed)) for seed in range(3)]
    x = numbers(200, 256).requires_grad_()
    grad = numbers(200, 384, seed=1)
    expected = [step(layer, x, grad) for layer in layers]
    built: list[object] = []
    build = _C.plan_device_build

    def counted(*args: Any) -> None:
        built.append(args)
        build(*args)

    monkeypatch.setattr(_C, "plan_device_build", counted)
    for _ in range(3):
        for layer in layers:
            for buffer in layer.buffers():
                buffer.copy_(buffer.clone())
        results = [step(layer, x, grad) for layer in layers]
        assert all(all_equal(result, right) for result, right in zip(results, expected, strict=True))
    assert not built
    layers[1].col_indices.copy_(layers[2].col_indices)  # not a pattern with the rows of the other
    with pytest.raises(InvalidPatternError):
        step(layers[1], x, grad)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("tokens", "features"), [(1, 16), (77, 48), (4099, 1040)])
def test_gradients_of_an_activation_of_the_c_interface(
    activation: str, dtype: torch.dtype, tokens: int, features: int
) -> None:
    z, grad = (randn(tokens, features, dtype=dtype, device="cuda", seed=seed) for seed in (0, 1))
    code, stream = ACTIVATIONS[activation], torch.cuda.current_stream().cuda_stream
    size = _C.activation_gradient_workspace_size(DTYPES[dtype], tokens, features)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    result, of_bias = torch.full_like(z, torch.nan), z.new_full((features,), torch.nan)
    _C.activation_gradient(
        *(DTYPES[dtype], code, tokens, features, z.data_ptr(), grad.data_ptr(), result.data_ptr()),
        *(of_bias.data_ptr(), workspace.data_ptr(), size, stream),
    )
    exact = z.cpu().double().requires_grad_()
    getattr(torch.nn.functional, activation)(exact).backward(grad.cpu().double())
    of_z, eps = exact.grad, torch.finfo(dtype).eps
    assert of_z is not None
    assert_within(result, of_z, 4 * eps * grad.cpu().double().abs() + 1e-6)
    assert_within(of_bias, of_z.sum(0), eps * of_z.sum(0).abs() + 1e-5 * of_z.abs().sum(0) + 1e-6)
