"""The products of a call of a model: its linear layers and experts, with as many tokens as they get."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._names import matching, names_of_modules, parsed
from ..._runtime.timing import undisturbed
from ...calibrate.stream import call, uncompiled
from ...config import BlockSparseConfig
from ...errors import InvalidArgumentError
from ...nn.convert import dense_weight
from ...nn.known_experts import projections_of, reason_not_known
from ...prune.targets import chosen_layers, reasons

_CALLS = 7  # of the whole model


@dataclass
class Product:
    """The product that layers of one shape compute with one number of tokens.

    Attributes:
        shape: (out_features, in_features), of experts (experts, out_features, in_features) of the first
            projection.
        tokens: rows of x in a call.
        dtype: of the weights.
        experts: a module of dense experts with the arguments of a call; None for a linear layer.
        names: names of the layers, in the order of the model.
        calls: number of calls of all of them in one of the model.
    """

    shape: tuple[int, ...]
    tokens: int
    dtype: torch.dtype
    experts: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
    names: list[str] = field(default_factory=list)
    calls: int = 0


def products_of(
    model: nn.Module,
    batch: Any,
    layers: str | Sequence[str] | None,
    configs: Iterable[BlockSparseConfig],
) -> list[Product]:
    """Call a model once, and return the products of the layers that any of the configs can be for.

    Raises:
        InvalidArgumentError: there is no such layer, or the batch calls none.
    """
    modules = _candidates(model, layers, configs)
    found: dict[Any, Product] = {}

    def note(name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        projections = projections_of(module)
        if projections is None:
            out_features, in_features = dense_weight(module).shape
            shape, dtype, experts = (out_features, in_features), module.weight.dtype, None
        else:
            weight = module.get_parameter(projections.up)
            shape = (weight.mT if projections.transposed else weight).shape
            dtype, experts = weight.dtype, (module, args, kwargs)
        tokens = x.numel() // shape[-1]
        if tokens:
            key = type(module) if experts else None, *shape, tokens, dtype
            product = found.setdefault(key, Product(tuple(shape), tokens, dtype, experts))
            product.calls += 1
            if name not in product.names:
                product.names.append(name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(uncompiled())
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(partial(_noted, note, name), with_kwargs=True)
            stack.callback(hook.remove)
        call(model, batch)
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
    run = partial(call, model, batch)
    (milliseconds,) = undisturbed([run], device, _CALLS)
    return milliseconds, _busy_milliseconds(run) if device.type == "cuda" else None


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


def _noted(note: Callable[..., None], name: str, module: Any, args: Any, kwargs: Any) -> None:
    note(name, module, args, kwargs)
