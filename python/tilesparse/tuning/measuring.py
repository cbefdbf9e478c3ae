"""Measure kernels on the device at hand.

Estimates of kernels were fitted on one GPU. For given products, `tune` measures the kernels with the least
estimates and the dense product, and writes the times to a file. Programs read the file when they import this
package; a measured time then comes before estimates, in C++ as well as here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import functional
from .._arguments import checked
from .._checks import checked_count, checked_device
from .._runtime import values as _values
from .._runtime.choice import DECODE_TOKENS, measurements_changed
from .._runtime.kernels import ask_for
from .._runtime.lookup import prepared
from .._runtime.timing import Call, medians, own_numbers
from .._runtime.values import gather
from ..checkpoint import manifest as checkpoint
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..storage.registry import storage_of
from ..storage.values import expand, row_scales
from .devices import KINDS, Device, default_device
from .document import Measurement, alone_in, file, kernel_number, measurements, merged, read, write
from .loading import count_measurement
from .products import OPS, Product, multiplied
from .selection import choose

Timer = Callable[[Sequence[Call], torch.device, int], list[float]]


@checked
@torch.no_grad()
def tune(
    products: Iterable[Product],
    device: torch.device | str | int | None = None,
    *,
    candidates: int = 3,
    repetitions: int = 21,
    timer: Timer = medians,
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
        repetitions: number of times of which the median is taken.
        timer: function of calls, a device and a number of repetitions that returns the median milliseconds
            of each call.

    Raises:
        InvalidArgumentError: an argument is invalid; for example, a product is column-major and not stored
            plain, or its TF32 differs from PyTorch's setting.
        UnsupportedError: no kernel computes a product there.
        TuneFileError: the file is damaged or cannot be written; nothing was measured.
    """
    wanted = list(dict.fromkeys(products))
    candidates, repetitions = (
        checked_count("candidates", candidates),
        checked_count("repetitions", repetitions),
    )
    on = _checked_device(device)
    described = Device.find(on)
    for product in wanted:
        _check_measurable(product, on)
        choose(product, described)
    path = file()
    if path is not None:
        measurements(path)
        write(path, read(path))  # fail before anything is measured
    found = []
    for product in wanted:
        found.append(_measured(product, on, described, candidates, repetitions, timer))
        count_measurement(found[-1])
        measurements_changed()
        if path is not None:
            with alone_in(path.parent):
                write(path, merged(read(path), found[-1]))
    return found


def _checked_device(device: object) -> torch.device:
    found = checked_device(default_device() if device is None else device)
    if found.type not in KINDS:
        raise InvalidArgumentError(f"device must be cpu or cuda, got {device!r}")
    return found


def _check_measurable(product: object, device: torch.device) -> None:
    if not isinstance(product, Product):
        raise InvalidArgumentError(f"products must be of tilesparse.Product, got {type(product).__name__}")
    if product.feature_major and not storage_of(product.storage).trainable:
        raise InvalidArgumentError(f"products must be stored 'plain' if they are column-major, got {product}")
    now = Product(16, 16, 1, block_shape=16, dtype=product.dtype).tf32
    if device.type == "cuda" and product.tf32 != now:
        raise InvalidArgumentError(
            f"products must have tf32={now}, as torch.backends.cuda.matmul has now, got {product}"
        )


def _measured(
    product: Product, device: torch.device, described: Device, count: int, repetitions: int, timer: Timer
) -> Measurement:
    names = [candidate.kernel for candidate in choose(product, described).candidates[:count]]
    with own_numbers(device):
        sparse, dense = _calls(product, device)
    calls = [_on_kernel(1 + kernel_number(name), sparse) for name in names]
    calls.append(_on_kernel(0, dense))  # so that none has more to do than another
    *times, dense_time = (1e3 * time for time in timer(calls, device, repetitions))
    fastest_first = dict(sorted(zip(names, times, strict=True), key=lambda each: each[1]))
    return Measurement(product, described, fastest_first, dense_time)


def _on_kernel(asked: int, call: Call) -> Call:
    def on_kernel() -> Any:
        with ask_for(asked):
            return call()

    return on_kernel


def _calls(product: Product, device: torch.device) -> tuple[Call, Call]:
    """Return calls of the product with random operands and of the dense product that replaces it."""
    layer = BlockSparseLinear(
        product.in_features,
        product.out_features,
        False,
        product.nnz / product.blocks,  # a density that rounds to just that number
        block_shape=product.block_shape,
        nm=product.nm,
        storage=product.storage,
        activations=product.activations,
        device=device,
        dtype=product.dtype,
        generator=torch.Generator().manual_seed(0),
    )
    pattern, values = layer.pattern, layer.weight.detach()

    def activations(features: int) -> Tensor:
        size = (features, product.tokens) if product.feature_major else (product.tokens, features)
        made = torch.randn(size, device=device, dtype=product.dtype)
        return made.t() if product.feature_major else made

    x, y = activations(product.in_features), activations(product.out_features)
    kept = prepared(pattern.index_on(device))
    if product.op == "wgrad":
        return lambda: functional.sdd(y, x, pattern), lambda: gather(y.t() @ x, kept)
    metadata, scales = getattr(layer, "metadata", None), getattr(layer, "scales", None)
    forward = product.op == "forward"
    source = x if forward else y

    def sparse() -> Tensor:
        if product.activations is not None and scales is not None:
            return functional.quantized_linear(source, values, pattern, scales, metadata=metadata)
        if product.feature_major:
            return functional.dsd(values, pattern, source.t(), transpose=not forward).t()
        return functional.dds(source, values, pattern, transpose=forward, metadata=metadata, scales=scales)

    def dense() -> Tensor:
        stored = metadata is not None or scales is not None
        of_blocks = scales
        if scales is not None and product.activations is not None:
            of_blocks = row_scales(scales, pattern)
        plain = expand(values, metadata, of_blocks, product.dtype) if stored else values
        weight = _values.expand(plain, kept)
        return F.linear(source, weight) if forward else source @ weight

    return sparse, dense


@checked
def products_of(folder: str | Path, tokens: Iterable[int], ops: Iterable[str] = OPS) -> list[Product]:
    """Return the products of a checkpoint's layers for each number of tokens; no weight is read.

    Layers that are not stored plain have no gradient of their weight, and so no product "wgrad".

    Args:
        folder: folder of the checkpoint.
        tokens: numbers of rows of x.
        ops: some of "forward", "dgrad" (the gradient of x) and "wgrad" (the gradient of W).

    Returns:
        Each product once, in the order of the layers.

    Raises:
        CheckpointError: the folder has no checkpoint, or a damaged one.
        InvalidArgumentError: an argument is invalid.
    """
    tokens, ops = list(tokens), list(ops)
    found: dict[Product, None] = {}
    for form in checkpoint.forms(Path(folder)).values():
        (rows, columns), (bn, bk) = form.shape, form.block_shape
        if form.nnz == 0:
            continue
        density = form.nnz / (rows // bn * (columns // bk))
        for op in ops:
            if op == "wgrad" and not storage_of(form.storage).trainable:
                continue
            storage, nm = multiplied(op, form.storage, form.nm)
            sizes = density, (bn, bk), form.dtype, op, storage, nm
            for count in tokens:
                if form.activations is None or op != "forward" or count <= DECODE_TOKENS:
                    found[Product(columns, rows, count, *sizes)] = None
                if form.activations is not None and op == "forward":
                    found[Product(columns, rows, count, *sizes, activations=form.activations)] = None
    return list(found)
