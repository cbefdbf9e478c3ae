"""Measure kernels and layers on the device at hand.

Estimates of kernels were fitted on one GPU. For given products, `tune` measures the kernels with the least
estimates and the dense product, and writes the times to a file. Programs read the file when they import this
package; a measured time then comes before estimates, in C++ as well as here.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import functional
from .._checks import DTYPES, as_integer, checked_count, checked_device, is_sequence, shown
from .._files import tune_file
from .._reports import Progress
from .._runtime import launch
from .._runtime.launch import ask_for, gather
from .._runtime.pattern_cache import prepared
from .._runtime.select import DECODE_TOKENS, measurements_changed
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, TileSparseError, UnsupportedError
from ..io import manifest
from ..model.targets import check_names, checked_config, checked_configs, dense_layers, described, shape_of
from ..nn.dense import is_conv1d
from ..nn.linear import BlockSparseLinear
from ..storage.formats import storage_of
from ..storage.quantize import dequantize, row_scales
from .product import (
    KINDS,
    OPS,
    Device,
    Product,
    Way,
    default_device,
    dtype_name,
    name_of_cpu,
    product_of_spec,
    recorded,
)
from .selection import choose, is_converted_in_calls
from .store import (
    MeasuredLayers,
    Measurement,
    add_to_file,
    count_measurement,
    kernel_number,
    load_layers,
    measurements,
    read,
    save_layers,
    versions_of,
    write,
)
from .timing import Call, milliseconds, own_numbers


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
        InvalidArgumentError: an argument is invalid; for example, a product is column-major and not stored
            plain, or its TF32 differs from PyTorch's setting.
        UnsupportedError: no kernel computes a product there.
        TuneFileError: the file is damaged or cannot be written; nothing was measured.
    """
    wanted = list(dict.fromkeys(products))
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


def _check_measurable(product: object, device: torch.device) -> None:
    if not isinstance(product, Product):
        raise InvalidArgumentError(f"products must be of tuning.Product, got {type(product).__name__}")
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
    names = [candidate.kernel for candidate in choose(product, described).candidates[:count]]
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
    config = BlockSparseConfig(
        product.nnz / product.blocks,  # a density that rounds to just that number
        product.block_shape,
        product.nm,
        product.storage,
        activations=product.activations,
    )
    shape = product.out_features, product.in_features
    layer = random_layer(shape, config, device, product.dtype)
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
    """Return a call of a layer [out_features, in_features] of random values, packed as for inference.

    Raises:
        UnsupportedError: nothing here computes it.
        InvalidArgumentError: the layer cannot be cut into such blocks.
    """
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
    for spec in manifest.read_section(Path(folder))[0].values():
        gradients = storage_of(spec.storage).trainable
        for op in [op for op in ops if spec.nnz and (op != "wgrad" or gradients)]:
            for count in tokens:
                # Few tokens are multiplied in their own dtype on a GPU, and in 8 bits on the CPU.
                if spec.activations is None or op != "forward" or count <= DECODE_TOKENS:
                    found[product_of_spec(spec, count, op, None)] = None
                found[product_of_spec(spec, count, op, spec.activations)] = None
    return list(found)


# ---- tables of layers ----


@dataclass(frozen=True)
class LatencyTable:
    """Table of milliseconds of one call of a layer, by shape and config, measured on one device.

    Attributes:
        device: the device; a CPU by its marketing name.
        tokens: rows of x.
        dtype: of x and the weights, as "bfloat16".
        versions: of tilesparse and torch, and how many threads the CPU used.
        times: by (out_features, in_features) and config, None being the dense layer.
    """

    device: Device
    tokens: int
    dtype: str
    versions: Mapping[str, str]
    times: Mapping[tuple[int, int], Mapping[BlockSparseConfig | None, float]]

    def milliseconds(self, shape: tuple[int, int], config: BlockSparseConfig | None) -> float:
        """Return milliseconds of one call of a layer of this shape.

        Between two measured densities of the same blocks and storage it is on the straight line between
        them; where a time is below that of a lower density, that one counts for both, so that times rise with
        density. Nothing is extrapolated.

        Args:
            shape: (out_features, in_features).
            config: how the layer is stored, or None for dense.

        Raises:
            InvalidArgumentError: it was not measured, and is not between two that were; or it is no config.
        """
        if not is_sequence(shape) or len(shape) != 2:
            raise InvalidArgumentError(f"shape must be (out_features, in_features), got {shown(shape)}")
        shape = as_integer(shape[0]), as_integer(shape[1])
        measured = self.times.get(shape, {})
        config = None if config is None else checked_config("config", config)
        if config in measured:
            return measured[config]
        if config is not None:
            times = {
                other.density: time
                for other, time in measured.items()
                if other is not None and replace(other, density=config.density) == config
            }
            densities = sorted(times)
            if densities and densities[0] < config.density < densities[-1]:
                rising = list(accumulate((times[density] for density in densities), max))
                right = bisect_left(densities, config.density)
                slope = (rising[right] - rising[right - 1]) / (densities[right] - densities[right - 1])
                return slope * (config.density - densities[right - 1]) + rising[right - 1]
        what, *others = (" ".join(filter(None, described(one))) for one in (config, *measured))
        if not others:
            others = ["the shapes " + ", ".join(f"{rows}x{columns}" for rows, columns in self.times)]
        raise InvalidArgumentError(
            f"table: has no time of {shape[0]}x{shape[1]} {what} for {self.tokens} tokens; measured are "
            f"{', '.join(others)}"
        )

    def total(self, model: nn.Module, configs: Mapping[str, BlockSparseConfig | None]) -> float:
        """Return milliseconds of one call of each of these layers of a dense model, stored by their configs.

        Args:
            model: whose layers are meant; only their shapes are read.
            configs: by name of a layer what it would be, or None for dense.

        Raises:
            InvalidArgumentError: a name is not that of a dense linear layer, or a time is missing.
        """
        layers = dense_layers("configs", model, configs)
        return sum(self.milliseconds(shape_of(layer), configs[name]) for name, layer in layers.items())

    def where(self) -> str:
        """Say what was measured; also if this machine has no such device, or other versions."""
        text = f"measured on {self.device.name} with {self.tokens} tokens in {self.dtype}"
        here = {name_of_cpu()}
        here |= {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
        if self.device.name not in here:
            text += f", which this machine does not have ({', '.join(sorted(here))})"
        versions = versions_of(torch.device("cpu"))
        for name, value in self.versions.items():
            if versions.get(name, value) != value:
                text += f"; with {name} {value}, where {versions[name]} is here"
        return text

    def __str__(self) -> str:
        lines = [self.where()]
        for (rows, columns), times in self.times.items():
            lines.append(f"{rows}x{columns}")
            for config, time in times.items():
                density, block, storage = described(config)
                lines.append(f"  {density:8}{block:>8}  {storage:18}{time:10.4f} ms")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the table to a file, which `load` reads on any machine.

        Raises:
            TuneFileError: the file cannot be written.
        """
        layers = [
            MeasuredLayers(shape, self.tokens, self.dtype, {way: times[way] for way in times})
            for shape, times in self.times.items()
        ]
        save_layers(path, self.device, self.versions, layers)

    @classmethod
    def load(cls, path: str | Path) -> LatencyTable:
        """Read what `save` wrote, or `AdviceReport.save` if all layers had as many tokens.

        Raises:
            TuneFileError: the file cannot be read, or has no such times.
        """
        return load_layers(path, cls._of)

    @classmethod
    def _of(
        cls, device: Device, versions: Mapping[str, str], layers: Iterable[MeasuredLayers], _: object
    ) -> LatencyTable:
        found = [measured for measured in layers if not measured.is_experts]
        sizes = {(measured.tokens, measured.dtype) for measured in found}
        if len(sizes) != 1:
            raise ValueError(f"layers must have one number of tokens and one dtype, got {sorted(sizes)}")
        ((tokens, dtype),) = sizes
        times = {
            (measured.shape[0], measured.shape[1]): {
                way: time for way, time in measured.milliseconds.items() if not isinstance(way, torch.dtype)
            }
            for measured in found
        }
        return cls(device, tokens, dtype, versions, times)


@torch.no_grad()
def measure_latency(
    model: nn.Module,
    configs: Mapping[str, Iterable[BlockSparseConfig]],
    *,
    tokens: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    repetitions: int = 21,
) -> LatencyTable:
    """Measure the layers of a model, dense and by each config, on the device at hand.

    Layers of one shape share their times. Each is a layer of its own with random blocks and values and
    without a bias, packed for inference as `prepare_for_inference_` does; those of one shape take turns, so
    that a device which changes its speed does so for all.

    On CUDA devices this is the median time of the GPU between two events, with a cold L2 cache: flushing that
    takes longer than the host needs for a call, whose time is therefore not part of it. On the CPU it is the
    least time of a call by the clock, and weights may be in its caches.

    Args:
        model: its shapes are read, and dtype and device where they are not given.
        configs: by layer name; the result of `measure_errors` is such a mapping.
        tokens: rows of x in a call: batch times sequence length, or 1 for each sequence that is decoded.
        dtype: of x and the weights; None is that of the first layer's weight.
        device: None is that of the first layer's weight.
        repetitions: number of times each call is measured.

    Raises:
        InvalidArgumentError: a name is not that of a dense linear layer, a layer cannot become a config, or
            another argument is not allowed.
        UnsupportedError: there is no kernel for one of the configs.
    """
    layers = dense_layers("configs", model, configs)
    by_shape: dict[tuple[int, int], dict[BlockSparseConfig | None, None]] = {}
    for name, layer in layers.items():
        checked = checked_configs("configs", name, configs[name], shape_of(layer))
        by_shape.setdefault(shape_of(layer), {None: None}).update(dict.fromkeys(checked))
    like = next(iter(layers.values())).weight
    tokens, repetitions = checked_count("tokens", tokens), checked_count("repetitions", repetitions)
    on, dtype = device_to_measure(like.device if device is None else device), dtype or like.dtype
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype must be one of {[str(each) for each in DTYPES]}, got {dtype}")
    progress, times = Progress(len(by_shape)), {}
    for done, (shape, options) in enumerate(by_shape.items(), 1):
        with own_numbers(on):
            x = torch.randn(tokens, shape[1], device=on, dtype=dtype)
            calls = [_call(config, shape, x) for config in options]
        times[shape] = dict(zip(options, milliseconds(calls, on, repetitions), strict=True))
        progress.show(done, f"shapes measured, {shape[0]}x{shape[1]} the last")
    return LatencyTable(recorded(on), tokens, dtype_name(dtype), versions_of(on), times)


def _call(config: BlockSparseConfig | None, shape: tuple[int, int], x: torch.Tensor) -> Call:
    try:
        return layer_call(config, shape, x)
    except TileSparseError as error:
        raise type(error)(f"configs: {config}: {error}") from error


@torch.no_grad()
def time_layers(
    model: nn.Module, layers: Iterable[str], *, tokens: int, repetitions: int = 21
) -> dict[str, float]:
    """Measure milliseconds of one call of each of these layers as they are, on their device.

    It is measured as `measure_latency` does, but of the model's own layers: their sum beside
    `LatencyTable.total` says how much the prediction is worth. What else a model does is in neither.

    Args:
        model: has these layers.
        layers: names of linear layers, dense or block-sparse.
        tokens: rows of x in a call.
        repetitions: number of times each call is measured.

    Raises:
        InvalidArgumentError: a name is not that of such a layer, or another argument is not allowed.
    """
    check_names("layers", layers)
    tokens, repetitions = checked_count("tokens", tokens), checked_count("repetitions", repetitions)
    modules = dict(model.named_modules(remove_duplicate=False))
    calls: dict[str, Call] = {}
    devices = set()
    for name in layers:
        layer: Any = modules.get(name)
        if not isinstance(layer, nn.Linear | BlockSparseLinear) and not is_conv1d(layer):
            raise InvalidArgumentError(
                f"layers must name linear layers, got {name!r}: {type(layer).__name__}"
            )
        features = layer.in_features if not is_conv1d(layer) else layer.weight.shape[0]
        dtype = layer.spec.dtype if isinstance(layer, BlockSparseLinear) else layer.weight.dtype
        with own_numbers(layer.weight.device):
            x = torch.randn(tokens, features, device=layer.weight.device, dtype=dtype)
        calls[name] = partial(layer, x)
        devices.add(x.device)
    if not calls:
        raise InvalidArgumentError("layers must have at least one name, got none")
    if len(devices) > 1:
        raise InvalidArgumentError(f"layers must all be on one device, got {sorted(map(str, devices))}")
    device = device_to_measure(devices.pop())
    return dict(zip(calls, milliseconds(list(calls.values()), device, repetitions), strict=True))
