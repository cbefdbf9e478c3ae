"""Models made for a checkpoint, whose parameters take no memory before it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import InvalidArgumentError

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
    with torch.device("cpu"), _parameters_on_meta():
        model = model_or_class()
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model_or_class: it has made a {type(model).__name__}, no module")
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Has modules that this thread makes keep their parameters on the meta device, and all else where it is.

    What becomes of other tensors no checkpoint says, so they need contents. A parameter moves when its module
    gets it, before anything has been written to the memory of most, and what is one parameter stays one.
    """
    thread = threading.get_ident()
    moved: Any = WeakIdKeyDictionary()

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        if threading.get_ident() != thread or type(parameter) is not nn.Parameter or not parameter.is_cpu:
            return None
        if parameter not in moved:
            moved[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return moved[parameter]

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()
