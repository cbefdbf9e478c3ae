"""Measure kernels and layers on the device at hand; all that this package measures is measured here.

Estimates of kernels were fitted to an H100 and an H200. For given products, `tune` measures the kernels with
the least estimates and the dense product, and writes the times to a file. Programs read the file when they
import this package; a measured time then comes before estimates, in C++ as well as here.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import functional
from .._checks import check_kind, checked_count, checked_device, items_of
from .._files import tune_file
from .._runtime import launch
from .._runtime.launch import ask_for, gather
from .._runtime.pattern_cache import prepared
from .._runtime.select import DECODE_TOKENS, measurements_changed
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, UnsupportedError
from ..io import manifest
from ..nn.linear import BlockSparseLinear
from ..pattern import BlockPattern
from ..storage.formats import storage_of
from ..storage.quantize import dequantize, row_scales
from .product import (
    KINDS,
    OPS,
    Device,
    Product,
    Way,
    choose,
    default_device,
    is_converted_in_calls,
    product_of_spec,
)
from .store import Measurement, add_to_file, count_measurement, kernel_number, measurements, read, write

FLUSH_BYTES = 512 << 20  # several L2 caches of any GPU; reading them takes it longer than the host a call
WARM_UP = 3  # calls
ROUND_SECONDS = 2e-3  # of calls in a row on the CPU, for one reading of the clock
CYCLES_PER_SECOND = 2e9  # a little more than GPUs run at, so that a delay is not too short

Call = Callable[[], Any]

_cuda: Any = torch.cuda  # parts of it have no types


def milliseconds(
    calls: Sequence[Call], device: torch.device, repetitions: int, *, head_start: float | None = 0.0
) -> list[float]:
    """Return the milliseconds of each call; the calls take turns.

    On CUDA devices this is the median of the GPU's times between two events, with a cold L2 cache. The cache
    is flushed by reading, so that no call has to write back what a flush left there, and for longer than the
    host needs for a call: the time of the host is not part of it. On the CPU it is the least of the
    wall-clock times, as other programs may use it, too; weights may be in the caches.

    With a `head_start` the GPU sleeps so many seconds first, for calls that take the host longer than a
    flush. None has every call begin on an idle GPU, and what it waits for the host is part of its time.
    """
    for call in calls:
        for _ in range(WARM_UP):
            call()
    if device.type == "cuda":
        return _on_cuda(calls, device, repetitions, head_start)
    return _on_cpu(calls, repetitions)


def own_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Keep random numbers drawn in this context from changing those of the program."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _on_cuda(
    calls: Sequence[Call], device: torch.device, repetitions: int, head_start: float | None
) -> list[float]:
    events = [
        [(_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(repetitions)]
        for _ in calls
    ]
    with torch.cuda.device(device):
        flush = torch.zeros(FLUSH_BYTES >> 2, dtype=torch.float32, device=device)
        torch.cuda.synchronize()
        if head_start:
            torch.cuda._sleep(int(head_start * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        for turn in range(repetitions):
            for call, of_call in zip(calls, events, strict=True):
                start, end = of_call[turn]
                flush.sum()
                if head_start is None:
                    torch.cuda.synchronize()
                start.record()
                call()
                end.record()
        torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in of_call) for of_call in events]


def _on_cpu(calls: Sequence[Call], repetitions: int) -> list[float]:
    in_a_row = [max(1, round(ROUND_SECONDS / _seconds(call, 1))) for call in calls]
    rounds = [
        [_seconds(call, count) for call, count in zip(calls, in_a_row, strict=True)]
        for _ in range(repetitions)
    ]
    return [1e3 * min(seconds) for seconds in zip(*rounds, strict=True)]


def _seconds(call: Call, count: int) -> float:
    """Return the mean time of so many calls in a row."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


@torch.no_grad()
def tune(
    products: Iterable[Product],
    device: torch.device | str | int | None = None,
    *,
    candidates: int = 3,
    repetitions: int = 21,
) -> list[Measurement]:
    """Measure kernels for products on a device that is there, and keep the fastest.

    For each product the kernels with the least estimates and the dense product are measured; on the CPU,
    which has no estimates, the first kernels that the library prefers. The result counts in this process
    from then on and is written to the file after each product. The policy "auto" then compares measured
    times, also on the CPU.

    Args:
        products: products of any number of layers; see `Product.of`. Equal products are measured once.
        device: None is the current CUDA device if kernels of the library run there, otherwise the CPU; a
            warning says so if there is a GPU all the same.
        candidates: number of kernels to measure for each product.
        repetitions: number of times each call is measured; on a GPU the median counts, on the CPU the least.

    Raises:
        UnsupportedError: no kernel computes a product there.
        TuneFileError: the file is damaged or cannot be written; nothing was measured.
    """
    wanted = list(dict.fromkeys(items_of("products", products, "tuning.Product")))
    candidates = checked_count("candidates", candidates)
    repetitions = checked_count("repetitions", repetitions)
    on = device_to_measure(device)
    described = Device.find(on)
    for product in wanted:
        _check_measurable(product, on)
        choose(product, described)
    path = tune_file()
    if path is not None:
        measurements(path)
        write(path, read(path))  # fail before anything is measured
    found = []
    for product in wanted:
        found.append(_measured(product, on, described, candidates, repetitions))
        count_measurement(found[-1])
        measurements_changed()
        if path is not None:
            add_to_file(path, found[-1])
    return found


def device_to_measure(device: object) -> torch.device:
    """Return a device that can be measured on, the CPU or a CUDA device; None is that of `default_device`."""
    found = checked_device(default_device() if device is None else device)
    if found.type not in KINDS:
        raise InvalidArgumentError(f"device must be cpu or cuda, got {device!r}")
    return found


def _check_measurable(product: Any, device: torch.device) -> None:
    check_kind("products", product, Product)
    if product.column_major and not storage_of(product.storage).trainable:
        raise InvalidArgumentError(f"products must be stored 'plain' if they are column-major, got {product}")
    now = Product(16, 16, 1, block_shape=16, dtype=product.dtype).tf32
    if device.type == "cuda" and product.tf32 != now:
        raise InvalidArgumentError(
            f"products must have tf32={now}, as torch.backends.cuda.matmul has now, got {product}"
        )


def _measured(
    product: Product, device: torch.device, described: Device, count: int, repetitions: int
) -> Measurement:
    names = [*choose(product, described).candidates][:count]
    with own_numbers(device):
        one = product_calls(product, device)
    calls = [_on_kernel(1 + kernel_number(name), one.sparse) for name in names]
    calls.append(_on_kernel(0, one.expanded))  # so that none has more to do than another
    *times, dense_time = (1e3 * time for time in milliseconds(calls, device, repetitions))
    fastest_first = dict(sorted(zip(names, times, strict=True), key=lambda each: each[1]))
    return Measurement(product, described, fastest_first, dense_time)


def _on_kernel(asked: int, call: Call) -> Call:
    def on_kernel() -> Any:
        with ask_for(asked):
            return call()

    return on_kernel


class ProductCalls(NamedTuple):
    """Calls of one product with random operands."""

    sparse: Call
    expanded: Call  # writes W out and computes the dense product
    dense: Call  # of a weight of the same shape, which is there


def product_calls(product: Product, device: torch.device) -> ProductCalls:
    """Return calls of a product, and of the dense products that replace it."""
    shape = product.out_features, product.in_features
    generator = torch.Generator().manual_seed(0)
    layer = BlockSparseLinear(
        product.in_features,
        product.out_features,
        bias=False,
        pattern=BlockPattern.random(
            shape, block_shape=product.block_shape, nnz=product.nnz, generator=generator
        ),
        nm=product.nm,
        device=device,
        dtype=product.dtype,
        generator=generator,
    ).to_storage(product.storage, activations=product.activations)
    pattern, values = layer.pattern, layer.weight.detach()

    @cache
    def full() -> Tensor:
        generator = torch.Generator(device).manual_seed(0)
        return torch.randn(shape, generator=generator, device=device, dtype=product.dtype)

    def activations(features: int) -> Tensor:
        size = (features, product.tokens) if product.column_major else (product.tokens, features)
        made = torch.randn(size, device=device, dtype=product.dtype)
        return made.t() if product.column_major else made

    x, y = activations(product.in_features), activations(product.out_features)
    kept = prepared(pattern.index_on(device))
    if product.op == "wgrad":
        return ProductCalls(
            lambda: functional.sdd(y, x, pattern), lambda: gather(y.t() @ x, kept), lambda: y.t() @ x
        )
    metadata, scales = getattr(layer, "metadata", None), getattr(layer, "scales", None)
    forward = product.op == "forward"
    source = x if forward else y

    def sparse() -> Tensor:
        if product.activations is not None and scales is not None:
            return functional.quantized_linear(
                source, values, pattern, scales, metadata=metadata, use_fast_accum=product.use_fast_accum
            )
        if product.column_major:
            return functional.dsd(values, pattern, source.t(), transpose=not forward).t()
        return functional.dds(source, values, pattern, transpose=forward, metadata=metadata, scales=scales)

    def dense(weight: Tensor) -> Tensor:
        return F.linear(source, weight) if forward else source @ weight

    def expanded() -> Tensor:
        stored = metadata is not None or scales is not None
        of_blocks = scales
        if scales is not None and product.activations is not None:
            of_blocks = row_scales(scales, pattern)
        plain = dequantize(values, metadata, of_blocks, product.dtype) if stored else values
        return dense(launch.expand(plain, kept))

    return ProductCalls(sparse, expanded, lambda: dense(full()))


def random_layer(
    shape: tuple[int, int], config: BlockSparseConfig, device: torch.device, dtype: torch.dtype
) -> BlockSparseLinear:
    """Return a layer without a bias, with random values and the same random blocks in every run."""
    return (
        BlockSparseLinear(
            shape[1],
            shape[0],
            bias=False,
            density=config.density,
            block_shape=config.block_shape,
            nm=config.nm,
            policy=config.policy,
            device=device,
            dtype=dtype,
            generator=torch.Generator().manual_seed(0),
        )
        .to_storage(config.storage, granularity=config.granularity, activations=config.activations)
        .eval()
    )


def layer_call(way: Way, shape: tuple[int, int], x: Tensor) -> Call:
    """Return a call of a layer [out_features, in_features] of random values, packed as for inference."""
    if isinstance(way, BlockSparseConfig):
        layer = random_layer(shape, way, x.device, x.dtype)
        layer.prepack(x.is_cuda or is_converted_in_calls(layer, [len(x)]))
        layer(x)  # raises where no kernel computes it
        return partial(layer, x)
    weight = torch.randn(shape, device=x.device, dtype=x.dtype)
    if way is None:
        return partial(F.linear, x, weight)
    try:
        call = (_dense_float8 if x.is_cuda else _dense_int8)(weight, x)
        call()
    except (RuntimeError, NotImplementedError) as error:  # PyTorch's own, by device and version
        raise UnsupportedError(f"PyTorch does not compute it here: {str(error).splitlines()[0]}") from error
    return call


def _dense_float8(weight: Tensor, x: Tensor) -> Call:
    """Multiply with a scale for each row of both factors, and quantize x in every call."""
    w, of_w = functional.quantize_activations(weight, torch.float8_e4m3fn)

    def call() -> Tensor:
        q, of_x = functional.quantize_activations(x, torch.float8_e4m3fn)
        # With scales of rows PyTorch gives bfloat16 alone.
        y: Any = torch._scaled_mm(
            q, w.t(), of_x[:, None], of_w[None], out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return y.to(x.dtype)  # type: ignore[no-any-return]

    return call


def _dense_int8(weight: Tensor, x: Tensor) -> Call:
    """Multiply by PyTorch's dynamically quantized layer, whose x is float32."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.float(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it will move to torchao
        from torch.ao.quantization import quantize_dynamic

        layer = quantize_dynamic(nn.Sequential(linear), {nn.Linear})  # type: ignore[no-untyped-call]
    return lambda: layer(x.float()).to(x.dtype)


def products_of(folder: str | Path, tokens: Iterable[int], ops: Iterable[str] = OPS) -> list[Product]:
    """Return the products of a checkpoint's layers for each number of tokens, each once; no weight is read.

    ``ops`` are some of "forward", "dgrad" (the gradient of x) and "wgrad" (the gradient of W), which layers
    that are not stored plain do not have.
    """
    tokens, ops = list(tokens), list(ops)
    found: dict[Product, None] = {}
    for spec in manifest.read_section(Path(folder))[0].values():
        gradients = storage_of(spec.storage).trainable
        for op in [op for op in ops if spec.nnz and (op != "wgrad" or gradients)]:
            for count in tokens:
                # Few tokens are multiplied in their own dtype on a GPU, and in 8 bits on the CPU.
                if spec.activations is None or op != "forward" or count <= DECODE_TOKENS:
                    found[product_of_spec(spec, count, op, None)] = None
                found[product_of_spec(spec, count, op, spec.activations)] = None
    return list(found)
