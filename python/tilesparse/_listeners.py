"""Listeners to changes of models: integrations describe a model anew when its layers change.

The patcher, pruning and checkpoints call them, and so need not know which libraries there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class Listener(NamedTuple):
    """What one library does about a model; without that library imported there is none."""

    check: Callable[[nn.Module], None]  # raises where `describe` would
    describe: Callable[[nn.Module], None]


_LISTENERS: list[Listener] = []


def add_listener(listener: Listener) -> None:
    """Call the listener from now on; models that were changed before are not described."""
    _LISTENERS.append(listener)


def check_can_change(model: nn.Module) -> None:
    """Raise where `layers_changed` would; the model is only read."""
    for listener in _LISTENERS:
        listener.check(model)


def layers_changed(model: nn.Module) -> None:
    """Tell the listeners that layers of a model were replaced, or are stored in another way."""
    for listener in _LISTENERS:
        listener.describe(model)
