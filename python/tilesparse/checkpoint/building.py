"""Models made for a checkpoint, whose parameters take no memory before it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import CheckpointError, InvalidArgumentError

Model = TypeVar("Model", bound=nn.Module)


def built(model_or_class: Model | Callable[[], Model]) -> Model:
    """Return the model, made on the meta device if it is given as what makes it."""
    if isinstance(model_or_class, nn.Module):
        return model_or_class  # type: ignore[return-value]  # a module may be what makes one, too
    if not callable(model_or_class):
        raise InvalidArgumentError(
            "model_or_class must be a module or a function that returns one, got "
            f"{type(model_or_class).__name__}"
        )
    try:
        with torch.device("cpu"), _parameters_on_meta():
            model = model_or_class()
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise CheckpointError(
            "model_or_class must not move or read parameters, which are on the meta device while load makes "
            f"the model: {error}; pass an instance of the model"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model_or_class: it has made a {type(model).__name__}, no module")
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Has modules that this thread makes keep their parameters on the meta device, and all else where it is.

    What becomes of other tensors no checkpoint says, so they need contents. A parameter moves when its module
    gets it, before anything has been written to the memory of most. It stays the same object, so whatever
    else refers to it gets the weights of the checkpoint as well. One that has views stays where it is.
    """
    thread = threading.get_ident()

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if threading.get_ident() == thread and type(parameter) is nn.Parameter and parameter.is_cpu:
            with suppress(RuntimeError):
                moved = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()
