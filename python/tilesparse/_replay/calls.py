"""Calls of modules: their arguments, what they give, and whether two are alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .batches import mapped, moved

# Keywords of Transformers' models: of a block's input, and of caches, whose name is another one since 5.24.
_HIDDEN = "hidden_states"
_CACHES = ("past_key_values", "cache")


@dataclass
class Call:
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, device: torch.device) -> Call:
        """Return a copy on a device: a module may write to its arguments, and is run again."""
        return Call(moved(self.args, device, copy=True), moved(self.kwargs, device, copy=True))

    @property
    def hidden(self) -> Any:
        """The argument that the blocks of a stack hand on: the first, or ``hidden_states``."""
        return self.args[0] if self.args else self.kwargs.get(self._keyword())

    def with_hidden(self, hidden: Any) -> Call:
        """Return the same call with another input."""
        if self.args:
            return Call((hidden, *self.args[1:]), self.kwargs)
        return Call((), {**self.kwargs, self._keyword(): hidden})

    def without_caches(self) -> Call:
        """Return the same call without keys and values of former calls: a block runs more than once."""
        return Call(_without_caches(self.args), _without_caches(self.kwargs))

    def has_cache(self) -> bool:
        """Return True if the module is given keys and values that it would append to."""
        return any(self.kwargs.get(name) is not None for name in _CACHES)

    def _keyword(self) -> str:
        return _HIDDEN if _HIDDEN in self.kwargs else next(iter(self.kwargs), _HIDDEN)


def first_of(output: Any) -> Any:
    """Return the tensor of a module's output, or the first entry of a tuple or mapping."""
    if isinstance(output, Mapping):
        return next(iter(output.values()), None)
    return output[0] if isinstance(output, tuple | list) and output else output


def tensor_of(name: str, output: Any) -> Tensor:
    """Return the tensor of a submodule's output.

    Raises:
        UnsupportedError: there is none of floating point.
    """
    tensor = first_of(output)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise UnsupportedError(
            f"submodules must give floating-point tensors, got {type(tensor).__name__} from {name!r}"
        )
    return tensor


def same(a: Any, b: Any) -> bool:
    """Return True if two nested values are equal; objects of other classes only equal themselves."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device)))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Call) and isinstance(b, Call):
        return same(a.args, b.args) and same(a.kwargs, b.kwargs)
    return a is b or (type(a) is type(b) and isinstance(a, str | int | float | bool) and a == b)


def shapes_of(batch: Any) -> str:
    """Return the shapes of all tensors in a batch, and its other values, as one text."""

    def shape(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, Tensor) else mapped(value, shape)

    return repr(shape(batch))


def _without_caches(value: Any) -> Any:
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return None
    return mapped(value, _without_caches)
