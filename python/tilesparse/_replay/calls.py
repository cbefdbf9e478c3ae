"""Calls of modules: their arguments, what they give, and whether two are alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .batches import mapped, moved, tensors_in

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
    """Return the tensor of a module's output, or the first entry of a tuple or mapping that is no scalar.

    The loss of a model is one, which comes first where a batch has labels.
    """
    if not isinstance(output, Mapping | tuple | list) or not output:
        return output
    entries = [*(output.values() if isinstance(output, Mapping) else output)]
    return next((one for one in entries if not isinstance(one, Tensor) or one.dim()), entries[0])


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


def differences(output: Any, expected: Any) -> list[tuple[torch.dtype, float]]:
    """Return the relative differences of the floating-point tensors of two outputs, with their dtypes.

    Scalars, such as a loss, count only where there is nothing else. Without any tensor, or with tensors of
    other shapes, the difference is infinite; NaN and infinities are equal to each other.
    """
    ours, theirs = (
        [tensor for tensor in tensors_in(one) if tensor.is_floating_point()] for one in (output, expected)
    )
    if not theirs or [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return [(torch.float32, math.inf)]
    pairs = list(zip(ours, theirs, strict=True))
    return [(b.dtype, _difference(a, b)) for a, b in [pair for pair in pairs if pair[1].dim()] or pairs]


def _difference(output: Tensor, expected: Tensor) -> float:
    finite, dtype = expected.isfinite(), torch.promote_types(expected.dtype, torch.float32)
    if not torch.equal(finite, output.isfinite()):
        return math.inf
    output, expected = (torch.where(finite, one, 0).to(dtype) for one in (output, expected))
    difference = float(torch.linalg.vector_norm(output - expected, dtype=torch.float64))
    size = float(torch.linalg.vector_norm(expected, dtype=torch.float64))
    return difference / size if size else math.inf if difference else 0.0


def shapes_of(batch: Any) -> str:
    """Return the shapes of all tensors in a batch, and its other values, as one text."""

    def shape(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, Tensor) else mapped(value, shape)

    return repr(shape(batch))


def _without_caches(value: Any) -> Any:
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return None
    return mapped(value, _without_caches)
