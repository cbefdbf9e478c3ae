"""Batches of any form, models that are run on them for a while, and their stacks of blocks."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import shown
from .._checks import checked_device
from ..errors import InvalidArgumentError, InvalidTypeError


def call(model: nn.Module, batch: Any, **options: Any) -> Any:
    """Return ``model(**batch)`` of a mapping, ``model(*batch)`` of a tuple or list, else ``model(batch)``.

    Raises:
        InvalidTypeError: the model fails at a batch in which there is no tensor.
    """
    try:
        if isinstance(batch, Mapping):
            return model(**{**batch, **options})
        if isinstance(batch, tuple | list):
            return model(*batch, **options)
        return model(batch, **options)
    except Exception as error:
        if next(tensors_in(batch), None) is None:
            raise InvalidTypeError(
                f"batches must be tensors, or mappings, tuples or lists of them, got {shown(batch)}: {error}"
            ) from error
        raise


def checked_batch(batch: Any) -> Any:
    """Return a batch whose tensors all have data."""
    if any(tensor.is_meta for tensor in tensors_in(batch)):
        raise InvalidArgumentError("batches must have tensors with data, got one on the meta device")
    return batch


def call_apart(model: nn.Module, batch: Any) -> Any:
    """Do as `call` with copies of all tensors, which the model may write to, on the model's device."""
    return call(model, moved(batch, device_of(model), copy=True))


def check_batches(batches: object) -> None:
    """Raise InvalidArgumentError for a single mapping, whose keys would be taken for batches."""
    if isinstance(batches, Mapping):
        raise InvalidArgumentError(
            f"batches must be an iterable of batches, such as a list, got {type(batches).__name__}"
        )


def moved(value: Any, device: torch.device, *, copy: bool = False) -> Any:
    """Return a nested value with all tensors in it on a device, or with copies of them."""
    if isinstance(value, Tensor):
        # To the CPU the host waits: it may read the memory at once.
        return value.to(device, non_blocking=device.type != "cpu", copy=copy)
    return mapped(value, lambda item: moved(item, device, copy=copy))


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tuple, list or mapping with the function applied to its items; other values as they are.

    `torch.utils._pytree.tree_map` does so for types that are registered alone: it leaves the tensors of a
    BatchEncoding, which tokenizers give, a UserDict and subclasses of dict and list where they are.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if isinstance(value, tuple | list):
        return type(value)(map(function, value))
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested mappings, tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def mask_of(batch: Any) -> Tensor | None:
    """Return the attention mask [batch, tokens] of a batch, or None."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def mask_of_outputs(model: nn.Module, batch: Any) -> Tensor | None:
    """Return the mask [batch, tokens] of what a model gives; of an encoder-decoder that of the decoder."""
    config = getattr(model, "config", None)
    if not isinstance(batch, Mapping) or not getattr(config, "is_encoder_decoder", False):
        return mask_of(batch)
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    return labels.ne(-100) if mask is None and isinstance(labels, Tensor) else mask


def device_of(module: nn.Module, default: torch.device | None = None) -> torch.device:
    """Return the device of the first parameter or buffer; without any, the default or the CPU."""
    tensor = next(chain(module.parameters(), module.buffers()), None)
    if tensor is not None:
        return tensor.device
    return torch.device("cpu") if default is None else default


def stacks(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """Return names of modules that may be stacks of blocks, the most promising first.

    A stack is the better, the more of the layers are not in its largest item.

    Args:
        model: any.
        layers: names of its layers.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            prefix = f"{name}." if name else ""
            inside = [layer.removeprefix(prefix) for layer in layers if layer.startswith(prefix)]
            items = Counter(layer.partition(".")[0] for layer in inside)
            if len(items) > 1:
                found.append((len(inside) - max(items.values()), name))
    return [name for _, name in sorted(found, key=lambda stack: -stack[0])]


def chosen_device(model: nn.Module, device: torch.device | str | int | None) -> torch.device:
    """Return a checked device, or the model's where it is None."""
    return device_of(model) if device is None else checked_device(device)


def check_distinct(model: nn.Module, teacher: nn.Module) -> None:
    """Raise InvalidArgumentError where training the model would change the teacher."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for name, parameter in teacher.named_parameters():
        if id(parameter) in trained:
            raise InvalidArgumentError(
                f"teacher must have parameters of its own, but the model trains {name!r}, too; take "
                "copy.deepcopy(model) before it is pruned"
            )


@contextlib.contextmanager
def swapped(model: nn.Module, tensors: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Have a model hold other tensors in place of some parameters and buffers, under all of their names.

    `torch.func.functional_call` would leave them in a module that is registered under two names.

    Args:
        model: any; afterwards it holds the same objects as before, whatever happens.
        tensors: new tensors by those that they replace; others than the model's are passed over.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (held, name, tensor)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor in tensors
    ]
    try:
        for held, name, tensor in places:
            held[name] = tensors[tensor]
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def uncompiled() -> AbstractContextManager[Any]:
    """Have compiled modules run as they are: compiled code does not call hooks that are set afterwards."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes seconds
        return contextlib.nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


@contextlib.contextmanager
def observing(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode, in which hooks see all of their modules."""
    with evaluating(*models), uncompiled():
        yield


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode, and afterwards every module back into its own."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
