"""Measure the layers of a model as a call uses them, dense and block-sparse, and say what that is worth."""

from __future__ import annotations

import contextlib
import copy
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from .._checks import aligned, check_block_shape, checked_fraction, items_of, listed, shown
from .._runtime.select import DECODE_TOKENS
from ..calibrate.calibration import check_model
from ..calibrate.stream import call as call_model
from ..calibrate.stream import call_apart, device_of, listening, uncompiled
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, TileSparseError, UnsupportedError
from ..model.fuse import encoders_in, fuse_encoders
from ..model.match import check_batch, chosen_layers, kept_blocks, matching, names_of_modules, parsed, reasons
from ..model.replace import sparsify_
from ..nn.experts import BlockSparseExperts, projections_of, reason_not_known
from ..nn.linear import BlockSparseLinear, dense_weight, evaluating
from .measure import Call, device_to_measure, layer_call, milliseconds, own_numbers
from .product import Device, Way, describe_way, dtype_name, in_own_dtype, is_converted_in_calls, recorded

DENSITIES = (0.5, 0.25, 0.1)
WORTH = 1.1  # times as fast as dense, from which sparse layers are recommended
UNSTEADY = 1.1  # times as long as the call, from which layers were disturbed
HOST_BOUND = 1.25  # times as long as the GPU works, from which a call waits for the host
CAVEATS = (
    "Times of whole models are estimates: the sum of the measured products and of everything else, which is",
    "taken to be constant; with a fused encoder it was measured. Other runtimes were not. Quality was not:",
    "it depends on the model, on pruning and on training, in 8 bits as well. docs/pruning.md and",
    "docs/recovery.md have what was measured for some models, and on which texts.",
)
_BLOCKS = {"cpu": 32, "cuda": 64}
_DENSE_8_BITS = {"cpu": torch.int8, "cuda": torch.float8_e4m3fn}  # what PyTorch multiplies fastest
_SPARSE_8_BITS = {"cpu": ("int8",), "cuda": ("int8", "float8_e4m3fn")}
_CPU_DECODE_TOKENS = 8  # that kernels for int4 take there
_SECONDS = 40.0  # for the calls of all layers, about
_REPETITIONS = 3, 21  # of a call, at least and at most
_CALLS = 7  # of the whole model
_FUSED = ", the encoder fused"  # in tables


@torch.no_grad()
def advise(
    model: nn.Module,
    batch: Any,
    *,
    densities: Sequence[float] = DENSITIES,
    block_shapes: Sequence[int | Sequence[int]] | None = None,
    layers: str | Sequence[str] | None = None,
) -> AdviceReport:
    """Measure whether block sparsity pays for a dense model, on its device and for its batch.

    Each product that a call of the model computes is measured once and counted as often as it is called:
    dense, dense in 8 bits as PyTorch has it, and sparse at each density, in the dtype of the model, in 8
    bits with activations in 8 bits, and for decode with weights in int4. Blocks and values are random. A
    call of the whole model is measured as well, and one in which these layers return zeros, which counts as
    constant.

    The report recommends the highest density at which the model is estimated to be at least 1.1 times as
    fast as the fastest dense one, or to stay dense. It knows nothing of quality. Nothing is changed,
    converted or written. It takes about a minute, longer where single calls take seconds.

    Args:
        model: dense, on its device; experts of Transformers count, see `BlockSparseExperts.from_experts`.
        batch: what the model is called with: a mapping of keywords, a tuple or list of arguments, or one
            tensor, on the model's device.
        densities: kept fractions of the blocks.
        block_shapes: sizes of blocks, each (bn, bk) or one number for both; None is 64 on CUDA devices and
            32 on the CPU.
        layers: regular expressions of names, or None for all that can become block-sparse, as of
            `prune_`; all others count as the rest of the model.

    Returns:
        Times by layer and contender, estimates of the whole model, and a recommendation; ``print`` it.

    Examples:
        >>> model = AutoModel.from_pretrained("sentence-transformers/all-MiniLM-L6-v2").eval()
        >>> print(advise(model, tokenizer(["A text"] * 32, return_tensors="pt")))
    """
    device = _checked_device(model)
    check_batch(batch)
    densities = _checked_densities(densities)
    shapes = _checked_shapes((_BLOCKS[device.type],) if block_shapes is None else block_shapes)
    configs = [BlockSparseConfig(densities[0], shape) for shape in shapes]
    with evaluating(model), own_numbers(device):
        groups = _called_layers(model, batch, layers, configs)
        whole, busy = milliseconds_of_call(model, batch, device)
        with left_out(model, {name for group in groups for name in group.calls}):
            rest, busy_in_rest = milliseconds_of_call(model, batch, device)
        dtype = max(groups, key=lambda group: len(group.calls)).dtype
        tokens = max(group.tokens for group in groups)
        contenders = contenders_for(device, dtype, densities, shapes, tokens)
        measured, refused = _measured(groups, contenders, device)
        fused, apart = _fused(model, batch, groups, contenders)
    return AdviceReport(
        recorded(device),
        _versions(device),
        tuple(measured),
        whole,
        busy,
        rest if busy_in_rest is None else busy_in_rest,
        {describe_way(contender): reason for contender, reason in refused.items()} | apart,
        fused,
    )


def _fused(
    model: nn.Module, batch: Any, groups: Sequence[_Called], contenders: Sequence[Way]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return milliseconds of copies whose encoder is one operator, on a CPU, and why others have none."""
    found: dict[str, float] = {}
    apart: dict[str, str] = {}
    names = [re.escape(name) for group in groups if group.experts is None for name in group.calls]
    device = device_of(model)
    for contender in contenders if device.type == "cpu" and encoders_in(model) else ():
        if not isinstance(contender, BlockSparseConfig) or contender.activations != "int8":
            continue
        twin, name = copy.deepcopy(model), describe_way(contender)
        with warnings.catch_warnings(), contextlib.ExitStack() as undo:
            warnings.simplefilter("ignore")  # of empty blocks
            sparsify_(twin, dict.fromkeys(names, contender), strict=False)
            encoders = fuse_encoders(twin.requires_grad_(False), partial(call_apart, twin, batch), undo)
            if any(encoder.reason is None for encoder in encoders):
                (found[name],) = milliseconds([partial(call_model, twin, batch)], device, _CALLS)
            else:
                apart[name + _FUSED] = "; ".join(f"{encoder.name}: {encoder.reason}" for encoder in encoders)
    return found, apart


def _measured(
    groups: Sequence[_Called], contenders: Sequence[Way], device: torch.device
) -> tuple[list[MeasuredLayers], dict[Way, str]]:
    """Measure all layers by every contender that computes them; also say why some compute none."""
    found = []
    refused: dict[Way, str] = {}
    for group in groups:
        calls, why = _calls_of(group, contenders, device)
        refused = {**why, **refused}
        times = _milliseconds(list(calls.values()), device, _SECONDS / len(groups))
        of = dict(zip(calls, times, strict=True))
        sizes, names = (group.shape, group.tokens, dtype_name(group.dtype)), dict.fromkeys(group.calls)
        found.append(MeasuredLayers(*sizes, of, tuple(names), len(group.calls)))
    known = {contender for measured in found for contender in measured.milliseconds}
    return found, {contender: reason for contender, reason in refused.items() if contender not in known}


def _calls_of(
    group: _Called, contenders: Sequence[Way], device: torch.device
) -> tuple[dict[Way, Call], dict[Way, str]]:
    """Return a call of each contender that computes these layers, and why others do not."""
    calls: dict[Way, Call] = {}
    refused: dict[Way, str] = {}
    *_, out_features, in_features = group.shape
    x = torch.randn(group.tokens, in_features, device=device, dtype=group.dtype)
    for contender in contenders:
        try:
            if group.experts is not None:
                calls[contender] = _call_of_experts(contender, group.experts)
            else:
                calls[contender] = call_of(contender, (out_features, in_features), x)
        except UnsupportedError as error:
            refused[contender] = str(error)
        except TileSparseError:  # its shape does not fit the blocks
            continue
    return calls, refused


def call_of(contender: Way, shape: tuple[int, int], x: Tensor) -> Call:
    """Return a call of a layer, but of none that has no block or whose storage no kernel reads."""
    if isinstance(contender, BlockSparseConfig):
        kept_blocks(contender, shape)
    call = layer_call(contender, shape, x)
    layer = getattr(call, "func", None)
    if isinstance(layer, BlockSparseLinear) and is_converted_in_calls(layer, [len(x)]):
        raise UnsupportedError("no kernel reads weights that are stored so with as many tokens")
    return call


def _call_of_experts(contender: Way, dense: partial[Any]) -> Call:
    if contender is None:
        return dense
    if not isinstance(contender, BlockSparseConfig) or (
        contender != in_own_dtype(contender) and contender.activations is None
    ):
        raise UnsupportedError("experts are measured in their own dtype, and sparse ones in 8 bits, too")
    module, shape = dense.func, contender.block_shape
    assert isinstance(module, nn.Module)
    stored: Any = {"storage": contender.storage, "activations": contender.activations}
    experts = BlockSparseExperts.from_experts(module, contender.density, block_shape=shape, **stored)
    return partial(experts.eval(), *dense.args, **dense.keywords)


def _milliseconds(calls: Sequence[Call], device: torch.device, seconds: float) -> list[float]:
    """Return the time of each call, of as many calls as fit into so many seconds."""
    for call in calls:
        call()
    start = time.perf_counter()
    for call in calls:
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    least, most = _REPETITIONS
    fitting = int(seconds / (time.perf_counter() - start))
    return milliseconds(calls, device, min(most, max(least, fitting)))


def _checked_device(model: nn.Module) -> torch.device:
    check_model(model)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise InvalidArgumentError(f"model must be on one device, got {sorted(map(str, devices))}")
    return device_to_measure(device_of(model))


def _checked_densities(densities: Sequence[float]) -> list[float]:
    found = [
        checked_fraction("densities", density) for density in items_of("densities", densities, "fractions")
    ]
    if not found or 0 in found:
        raise InvalidArgumentError(f"densities must be numbers above 0 and at most 1, got {shown(densities)}")
    return sorted(dict.fromkeys(found), reverse=True)


def _checked_shapes(block_shapes: Sequence[Any]) -> list[tuple[int, int]]:
    found = [check_block_shape(shape) for shape in items_of("block_shapes", block_shapes, "sizes")]
    if not found:
        raise InvalidArgumentError("block_shapes must have at least one block shape, got none")
    return list(dict.fromkeys(found))


def contenders_for(
    device: torch.device,
    dtype: torch.dtype,
    densities: Sequence[float],
    block_shapes: Sequence[tuple[int, int]],
    tokens: int,
) -> list[Way]:
    """Return the contenders for layers of a dtype: dense ones first, then those of the highest density.

    Weights in 4 bits are for few tokens, which are the most that a layer is called with.
    """
    eight = () if dtype == torch.float64 else _SPARSE_8_BITS[device.type]
    stored: list[dict[str, Any]] = [{}, *({"storage": name, "activations": name} for name in eight)]
    if tokens <= (DECODE_TOKENS if device.type == "cuda" else _CPU_DECODE_TOKENS):
        stored.append({"storage": "int4"})
    dense: list[Way] = [None, *([_DENSE_8_BITS[device.type]] if eight else [])]
    return dense + [
        BlockSparseConfig(density, shape, None, **options)
        for density in sorted(densities, reverse=True)
        for shape in block_shapes
        for options in stored
    ]


# ---- the model and its layers ----


@dataclass
class _Called:
    """The layers of one shape that a call of the model gives one number of tokens: see `MeasuredLayers`."""

    shape: tuple[int, ...]
    tokens: int
    dtype: torch.dtype
    experts: partial[Any] | None  # a call of such experts; None for linear layers
    calls: list[str] = field(default_factory=list)  # the name of the layer that each is of


def _called_layers(
    model: nn.Module,
    batch: Any,
    layers: str | Sequence[str] | None,
    configs: Iterable[BlockSparseConfig],
) -> list[_Called]:
    """Call a model once, and return the layers that any of the configs can be for."""
    modules = _candidates(model, layers, configs)
    found: dict[Any, _Called] = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module: Any = modules[name]
        x = args[0] if args else next(iter(kwargs.values()))
        projections = projections_of(module)
        if projections is None:
            out_features, in_features = dense_weight(module).shape
            shape, dtype, experts = (out_features, in_features), module.weight.dtype, None
        else:
            weight = module.get_parameter(projections.up)
            shape = (weight.mT if projections.transposed else weight).shape
            dtype, experts = weight.dtype, partial(module, *args, **kwargs)
        tokens = x.numel() // shape[-1]
        if tokens:
            key = type(module) if experts else None, *shape, tokens, dtype
            found.setdefault(key, _Called(tuple(shape), tokens, dtype, experts)).calls.append(name)

    with listening(modules, note), uncompiled():
        call_model(model, batch)
    if not found:
        names = ", ".join([*modules][:3])
        raise InvalidArgumentError(
            f"batch must call a layer that can become block-sparse: {names} get no token"
        )
    return list(found.values())


@contextlib.contextmanager
def left_out(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Have layers and experts return zeros, made once for each shape, in place of what they compute."""
    with contextlib.ExitStack() as stack:
        for name in names:
            module: Any = model.get_submodule(name)
            own = vars(module).get("forward")
            module.forward = _zeros(None if projections_of(module) else dense_weight(module).shape[0])
            stack.callback(setattr, module, "forward", own) if own else stack.callback(
                delattr, module, "forward"
            )
        yield


def _zeros(features: int | None) -> Callable[..., Tensor]:
    """Return a function of x that returns zeros of so many features, or of as many as x has."""
    made: dict[Any, Tensor] = {}

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if x.shape not in made:
            made[x.shape] = x.new_zeros((*x.shape[:-1], features or x.shape[-1]))
        return made[x.shape]

    return forward


def milliseconds_of_call(model: nn.Module, batch: Any, device: torch.device) -> tuple[float, float | None]:
    """Return the time of a call of a model, and how long a GPU works in it, if PyTorch's profiler knows."""
    run = partial(call_model, model, batch)
    (time,) = milliseconds([run], device, _CALLS)
    return time, _busy_milliseconds(run) if device.type == "cuda" else None


def _busy_milliseconds(run: Callable[[], Any]) -> float | None:
    """Return the sum of the times of the kernels that a call launches."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        events: Any = profile.events()
    except RuntimeError:  # where CUPTI may not be used
        return None
    on_gpu = [one for one in events or () if one.device_type.name == "CUDA"]
    return 1e-3 * sum(one.time_range.elapsed_us() for one in on_gpu) or None


def _candidates(
    model: nn.Module, layers: str | Sequence[str] | None, configs: Iterable[BlockSparseConfig]
) -> dict[str, nn.Module]:
    """Return the linear layers and experts that can become block-sparse, by name."""
    names: set[str] = set()
    skipped = []
    for config in configs:
        targets, others = chosen_layers(model, config, layers, strict=False, cut=False)
        names.update(targets)
        skipped += others
    places = matching(parsed("layers", ".*" if layers is None else layers), names_of_modules(model))
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_experts = projections_of(module) is not None and reason_not_known(module) is None
        if name in names or (is_experts and places[module]):
            found[name] = module
    if not found:
        raise InvalidArgumentError(
            f"model must have a linear layer that can become block-sparse, got none: {reasons(skipped)}"
        )
    return found


def _versions(device: torch.device) -> dict[str, str]:
    """Return the versions that times depend on, and the number of threads of a CPU."""
    found = {"tilesparse": _C.version(), "torch": torch.__version__}
    return found | ({"threads": str(torch.get_num_threads())} if device.type == "cpu" else {})


# ---- report ----


@dataclass(frozen=True)
class MeasuredLayers:
    """Layers of one shape that are called with as many tokens, and the time of one of their calls.

    Attributes:
        shape: (out_features, in_features); of experts (experts, out_features, in_features) of the first
            projection.
        tokens: rows of x.
        dtype: of x and the weights, as "bfloat16".
        milliseconds: time by the way to compute the layer: a `BlockSparseConfig`, None for dense, or
            torch.int8 or torch.float8_e4m3fn for dense with both factors in 8 bits; without those that do
            not fit.
        names: names of the layers in a model; none for a shape alone.
        calls: how often a call of the model computes it.
    """

    shape: tuple[int, ...]
    tokens: int
    dtype: str
    milliseconds: Mapping[Way, float]
    names: tuple[str, ...] = ()
    calls: int = 1

    def time(self, way: BlockSparseConfig | torch.dtype | None) -> float:
        """Return milliseconds of a call.

        Without a measurement of that way for this shape it is the time of the same blocks in the dtype of the
        model, or of the dense layer.
        """
        times = self.milliseconds
        return times.get(way, times.get(in_own_dtype(way), times[None]))

    @property
    def is_experts(self) -> bool:
        """True for all projections of a mixture of experts together."""
        return len(self.shape) == 3


@dataclass(frozen=True)
class Estimate:
    """Estimated time of a call of the model, all measured layers computed by one contender.

    Attributes:
        contender: how the layers are computed: a config, or a dense one, see `MeasuredLayers`.
        layers: milliseconds in these layers: the sum of what was measured.
        total: milliseconds of the call: ``layers`` and the rest, which is taken to be constant, or what was
            measured where an encoder is one operator.
    """

    contender: Way
    layers: float
    total: float


@dataclass(frozen=True)
class AdviceReport:
    """The measurements of `advise`; ``str()`` makes tables of it, with the recommendation.

    Attributes:
        device: the device; a CPU by its marketing name.
        versions: of tilesparse and torch, and how many threads the CPU used.
        layers: times of the layers that the model calls.
        call: milliseconds of a call of the dense model.
        busy: milliseconds that a GPU works in it; None on the CPU, or where the profiler does not know.
        rest: milliseconds of a call outside the measured layers, of a GPU those that it works.
        refused: contenders that nothing here computes, and why.
        fused: milliseconds of a call of the model whose encoder `prepare_for_inference_` makes one operator,
            by the words for a contender.
    """

    device: Device
    versions: Mapping[str, str]
    layers: tuple[MeasuredLayers, ...]
    call: float
    busy: float | None
    rest: float
    refused: Mapping[str, str]
    fused: Mapping[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Dtype of the layers that are called most, as "bfloat16"."""
        return max(self.layers, key=lambda measured: measured.calls).dtype

    @property
    def contenders(self) -> list[Way]:
        """The contenders that were measured, dense ones first, then those of the highest density."""
        found = dict.fromkeys(contender for measured in self.layers for contender in measured.milliseconds)
        return sorted(found, key=lambda contender: -(_density(contender) or 2))

    @property
    def densities(self) -> list[float]:
        """The densities that were measured, the highest first."""
        found = {one.density for one in self.contenders if isinstance(one, BlockSparseConfig)}
        return sorted(found, reverse=True)

    def estimates(self) -> list[Estimate]:
        """Return an estimate for each contender, in their order."""
        times = {contender: self._in_layers(contender) for contender in self.contenders}
        totals = (self.fused.get(describe_way(one), time + self.rest) for one, time in times.items())
        return [Estimate(*own, total) for own, total in zip(times.items(), totals, strict=True)]

    @property
    def best_dense(self) -> Estimate:
        """The fastest dense contender."""
        return min(self._of_density(None), key=lambda one: one.total)

    @property
    def recommended(self) -> Estimate | None:
        """The fastest contender of the highest density that is worth it; None recommends to stay dense."""
        for density in self.densities:
            best = min(self._of_density(density), key=lambda one: one.total)
            if best.total * WORTH <= self.best_dense.total:
                return best
        return None

    def milliseconds(self, name: str, config: BlockSparseConfig | None) -> float:
        """Return milliseconds of one call of a layer that is stored by a config; None is dense."""
        times = [one.milliseconds for one in self.layers if name in one.names]
        if not times or not all(config in own for own in times):
            raise InvalidArgumentError(
                f"report must have a time of layer {name!r} for {describe_way(config)}: have advise measure "
                "that density and block shape"
            )
        return sum(own[config] for own in times)

    def __str__(self) -> str:
        return "\n".join(
            [
                *self._heading(),
                "",
                *self._rows_of_layers(),
                "",
                *self._rows_of_models(),
                "",
                *self._recommendation(),
            ]
        )

    def _in_layers(self, contender: Way) -> float:
        return sum(measured.calls * measured.time(contender) for measured in self.layers)

    def _of_density(self, density: float | None) -> list[Estimate]:
        return [one for one in self.estimates() if _density(one.contender) == density]

    def _heading(self) -> Iterator[str]:
        count = self.versions.get("threads")
        threads = "" if count is None else f", {count} thread{'s' * (count != '1')}"
        yield f"{self.device.name}{threads}, {self.dtype}, PyTorch {self.versions['torch']}"
        calls = sum(measured.calls for measured in self.layers)
        busy = "" if self.busy is None else f", of which the GPU works {self.busy:.4g} ms"
        yield (
            f"a call of the dense model takes {self.call:.4g} ms{busy}; measured apart, {calls} calls of "
            f"layers that can become block-sparse take {self._in_layers(None):.4g} ms, everything else "
            f"{self.rest:.4g} ms"
        )
        if self._in_layers(None) > UNSTEADY * (self.busy or self.call):
            yield (
                "these layers alone took longer than the call they are in: the device may be busy with other "
                "work, measure again"
            )
        if self.busy is not None and self.call > HOST_BOUND * self.busy:
            yield (
                "the GPU waits for the host: what follows holds for a model in a CUDA graph or compiled with "
                'mode="reduce-overhead"'
            )

    def _rows_of_layers(self) -> list[str]:
        """Return a table of layers, with the fastest contender at each density."""
        dense = [contender for contender in self.contenders if _density(contender) is None]
        header = "ms of one call", "shape", "tokens", *map(describe_way, dense)
        rows: list[tuple[str, ...]] = [(*header, *(f"density {density:g}" for density in self.densities))]
        for measured in self.layers:
            times = [measured.milliseconds.get(contender) for contender in dense]
            times += [_fastest(measured, density) for density in self.densities]
            cells = "x".join(map(str, measured.shape)), str(measured.tokens)
            shown = ("" if time is None else f"{time:.4f}" for time in times)
            rows.append((listed(measured.names), *cells, *shown))
        return aligned(rows)

    def _rows_of_models(self) -> list[str]:
        """Return a table of contenders, each in all layers."""
        dense, best = self.estimates()[0].total, self.best_dense.total
        header = "all layers (estimated)", "layers, ms", "model, ms", "over dense", "over the fastest dense"
        rows: list[tuple[str, ...]] = [header]
        for one in self.estimates():
            times = f"{one.layers:.3f}", f"{one.total:.3f}"
            speedups = f"{dense / one.total:.2f}x", f"{best / one.total:.2f}x"
            name = describe_way(one.contender)
            rows.append((name + _FUSED * (name in self.fused), *times, *speedups))
        return [*aligned(rows), *(f"not measured: {name}: {why}" for name, why in self.refused.items())]

    def _recommendation(self) -> Iterator[str]:
        found, best = self.recommended, self.best_dense
        dense = describe_way(best.contender)
        if found is None:
            yield (
                f"recommendation: stay dense ({dense}); no density measured makes the model "
                f"{WORTH:g} times as fast as that"
            )
        else:
            yield (
                f"recommendation: {describe_way(found.contender)}: about {best.total / found.total:.2f} "
                f"times as fast as the fastest dense model ({dense})"
            )
        yield from CAVEATS


def _density(contender: Way) -> float | None:
    return contender.density if isinstance(contender, BlockSparseConfig) else None


def _fastest(measured: MeasuredLayers, density: float | None) -> float:
    """Return the least time of the contenders of a density; None is that of the dense ones."""
    times = measured.milliseconds
    return min((times[one] for one in times if _density(one) == density), default=times[None])
