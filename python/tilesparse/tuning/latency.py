"""Times of layers on this device, dense and block-sparse: measured, tabulated, and kept in a file."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._checks import DTYPES, as_integer, checked_count, is_sequence, shown
from .._reports import Progress
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, TileSparseError
from ..model.targets import check_names, checked_config, checked_configs, dense_layers, described, shape_of
from ..nn.dense import is_conv1d
from ..nn.linear import BlockSparseLinear
from .measure import device_to_measure, layer_call
from .product import Device, dtype_name, name_of_cpu, recorded
from .store import MeasuredLayers, load_layers, save_layers, versions_of
from .timing import Call, milliseconds, own_numbers


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
        what = " ".join(filter(None, described(config)))
        raise InvalidArgumentError(
            f"table: has no time of {shape[0]}x{shape[1]} {what} for {self.tokens} tokens; measured are "
            f"{self._measured(shape)}"
        )

    def _measured(self, shape: tuple[int, int]) -> str:
        if shape not in self.times:
            return "the shapes " + ", ".join(f"{rows}x{columns}" for rows, columns in self.times)
        return ", ".join(" ".join(filter(None, described(config))) for config in self.times[shape])

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
