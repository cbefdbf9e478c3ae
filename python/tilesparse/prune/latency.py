"""Times of layers on this device, dense and block-sparse: measured, tabulated, and kept in a file."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._arguments import checked, shown
from .._checks import DTYPES, as_integer, checked_count, checked_device, is_sequence
from .._progress import Progress
from .._runtime.timing import medians, name_of, own_numbers
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, TileSparseError
from ..nn.convert import is_conv1d
from ..nn.linear import BlockSparseLinear
from .measured import (
    config_of_json,
    random_layer,
    read_document,
    time_of_json,
    versions_of,
    write_document,
)
from .targets import (
    check_names,
    checked_config,
    checked_configs,
    dense_layers,
    described,
    shape_of,
)

VERSION = 1  # of the file


@dataclass(frozen=True)
class LatencyTable:
    """Table of milliseconds of one call of a layer, by shape and config, measured on one device.

    Attributes:
        device: its name, also of a CPU.
        tokens: rows of x.
        dtype: of x and the weights, as "bfloat16".
        versions: of tilesparse and torch, and how many threads the CPU used.
        times: by (out_features, in_features) and config, None being the dense layer.
    """

    device: str
    tokens: int
    dtype: str
    versions: Mapping[str, str]
    times: Mapping[tuple[int, int], Mapping[BlockSparseConfig | None, float]]

    @checked
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
                other.density: milliseconds
                for other, milliseconds in measured.items()
                if other is not None and _form(other) == _form(config)
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

    @checked
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
        text = f"measured on {self.device} with {self.tokens} tokens in {self.dtype}"
        here = {name_of(torch.device("cpu"))}
        here |= {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
        if self.device not in here:
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
            for config, milliseconds in times.items():
                density, block, storage = described(config)
                lines.append(f"  {density:8}{block:>8}  {storage:18}{milliseconds:10.4f} ms")
        return "\n".join(lines)

    @checked
    def save(self, path: str | Path) -> None:
        """Write the table as JSON, which `load` reads on any machine.

        Raises:
            InvalidArgumentError: the file cannot be written.
        """
        times = [
            {"shape": shape, "choice": None if config is None else asdict(config), "ms": milliseconds}
            for shape, of in self.times.items()
            for config, milliseconds in of.items()
        ]
        about = {"device": self.device, "tokens": self.tokens, "dtype": self.dtype}
        document = {"version": VERSION, **about, "versions": dict(self.versions), "times": times}
        write_document(path, document)

    @classmethod
    @checked
    def load(cls, path: str | Path) -> LatencyTable:
        """Read what `save` wrote.

        Raises:
            CheckpointNotFoundError: the file cannot be read.
            InvalidArgumentError: it is no such table, or a newer one.
        """
        return read_document(path, VERSION, "table of latencies", cls._of_document)

    @classmethod
    def _of_document(cls, document: Any) -> LatencyTable:
        times: dict[tuple[int, int], dict[BlockSparseConfig | None, float]] = {}
        for entry in document["times"]:
            rows, columns = map(as_integer, entry["shape"])
            times.setdefault((rows, columns), {})[config_of_json(entry["choice"])] = time_of_json(entry["ms"])
        about = str(document["device"]), as_integer(document["tokens"]), str(document["dtype"])
        return cls(*about, dict(document["versions"]), times)


@checked
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
    without a bias, packed for inference (`BlockSparseLinear.pack`); those of one shape take turns, so that a
    device which changes its speed does so for all, and the median is kept.

    On CUDA devices this is the time of the GPU between two events, with a cold L2 cache: clearing that takes
    longer than the host needs for a call, whose time is therefore not part of it. On the CPU it is the time
    of a call by the clock, and weights may be in its caches.

    Args:
        model: its shapes are read, and dtype and device where they are not given.
        configs: by layer name; the result of `measure_errors` is such a mapping.
        tokens: rows of x in a call: batch times sequence length, or 1 for each sequence that is decoded.
        dtype: of x and the weights; None is that of the first layer's weight.
        device: None is that of the first layer's weight.
        repetitions: of which the median is taken.

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
    on, dtype = _checked_device(like.device if device is None else device), dtype or like.dtype
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype must be one of {[str(each) for each in DTYPES]}, got {dtype}")
    progress, times = Progress(len(by_shape)), {}
    for done, (shape, options) in enumerate(by_shape.items(), 1):
        with own_numbers(on):
            x = torch.randn(tokens, shape[1], device=on, dtype=dtype)
            modules = [_module(shape, config, on, dtype) for config in options]
        found = medians([partial(module, x) for module in modules], on, repetitions)
        times[shape] = dict(zip(options, found, strict=True))
        progress.show(done, f"shapes measured, {shape[0]}x{shape[1]} the last")
    return LatencyTable(name_of(on), tokens, str(dtype).removeprefix("torch."), versions_of(on), times)


@checked
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
        repetitions: of which the median is taken.

    Raises:
        InvalidArgumentError: a name is not that of such a layer, or another argument is not allowed.
    """
    check_names("layers", layers)
    tokens, repetitions = checked_count("tokens", tokens), checked_count("repetitions", repetitions)
    modules = dict(model.named_modules(remove_duplicate=False))
    calls: dict[str, Callable[[], Any]] = {}
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
    device = _checked_device(devices.pop())
    return dict(zip(calls, medians(list(calls.values()), device, repetitions), strict=True))


def _form(config: BlockSparseConfig) -> tuple[Any, ...]:
    stored = config.storage, config.scales, config.activations
    return config.block_shape, config.nm, *stored, config.policy


def _module(
    shape: tuple[int, int], config: BlockSparseConfig | None, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Return a layer with random values, packed for inference."""
    out_features, in_features = shape
    if config is None:
        return nn.Linear(in_features, out_features, bias=False, device=device, dtype=dtype).eval()
    try:
        return random_layer(shape, config, device, dtype).pack()
    except TileSparseError as error:
        raise type(error)(f"configs: {config}: {error}") from error


def _checked_device(device: object) -> torch.device:
    found = checked_device(device)
    if found.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device must be cpu or cuda, got {device!r}")
    return found
