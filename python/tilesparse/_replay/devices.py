"""Modules that visit a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .batches import device_of, moved


@contextlib.contextmanager
def placed(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Keep modules on a device, and put them back where they were."""
    homes = {module: device_of(module, device) for module in modules}
    away = {module: home for module, home in homes.items() if home != device}
    try:
        for module in away:
            module.to(device)
        yield
    finally:
        for module, home in away.items():
            module.to(home)


@contextlib.contextmanager
def visiting(modules: Sequence[nn.Module], device: torch.device, default: torch.device) -> Iterator[None]:
    """Move each module to a device while it runs, and its results back; `default` is for empty modules."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            home = device_of(module, default)
            if home == device:
                continue

            def bring(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
                module.to(device)
                return moved(args, device), moved(kwargs, device)

            def back(module: nn.Module, args: Any, output: Any, home: torch.device = home) -> Any:
                module.to(home)
                return moved(output, home)

            stack.callback(module.register_forward_pre_hook(bring, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(back).remove)
            stack.callback(module.to, home)  # where it has raised
        yield
