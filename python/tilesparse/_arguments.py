"""Type checks of arguments by the annotations of public functions.

`checked` refuses by name an argument of another type than its annotation. The function itself checks numbers,
strings and values of the right type (`_checks`): it knows their range or the allowed names.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number, Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ._checks import as_integer, is_sequence, is_tensor
from .errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])


class Kind(NamedTuple):
    """Values that one annotation allows."""

    words: str
    fits: Callable[[Any], bool]
    items: tuple[Kind, ...] = ()  # what elements, or the values of a mapping, may be; empty: anything
    of_values: bool = False


def checked(function: F) -> F:
    """Raise `InvalidTypeError` for arguments of another type than they are annotated with.

    Use it for functions that are not called in every step: a call takes a few microseconds more.
    """
    code = inspect.unwrap(function).__code__
    names = code.co_varnames[: code.co_argcount]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            check_types(function, {**dict(zip(names, args, strict=False)), **kwargs})
        return function(*args, **kwargs)

    return typing.cast(F, call)


def check_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise `InvalidTypeError` for the first argument that its annotation in the function does not allow."""
    kinds = _kinds_of(function)
    for name, value in given.items():
        if name in kinds:
            _check(name, value, kinds[name])


def check_types_after(error: Exception, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check types once a function has raised, so that correct calls spend no time on it.

    An `UnsupportedError` says itself what is wrong; any other may be PyTorch's about an argument of a wrong
    type. The caller raises it again.
    """
    if not isinstance(error, UnsupportedError):
        check_types(function, given)


def shown(value: object) -> str:
    """Return a value for a message: its text if that is short, otherwise its type."""
    if _is_short(value) or (isinstance(value, list | tuple) and all(map(_is_short, value))):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return f"a {value.layout} tensor"
    if isinstance(value, Tensor) and value.is_nested:
        return "a nested tensor"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", __name__) else f"{_module(kind)}{kind.__name__}"


def _is_short(value: object) -> bool:
    return value is None or isinstance(value, str | Number | torch.dtype | torch.device)


def _check(name: str, value: Any, kinds: Sequence[Kind]) -> None:
    fitting = [kind for kind in kinds if kind.fits(value)]
    if not fitting:
        allowed = " or ".join(kind.words for kind in kinds)
        raise InvalidTypeError(f"{name} must be {allowed}, got {shown(value)}")
    is_path = isinstance(value, str | os.PathLike) and any(kind.words in _PATHS for kind in kinds)
    if is_path and "\0" in os.fsdecode(value):
        raise InvalidArgumentError(f"{name} must be a path without null characters, got {value!r}")
    items = fitting[0].items
    if all(map(_is_left, items)):
        return
    if fitting[0].of_values:
        for key, item in value.items():
            _check(f"{name}[{key!r}]", item, items)
    elif not isinstance(value, Tensor) and is_sequence(value):
        for number, item in enumerate(value):
            _check(f"{name}[{number}]", item, items)


@functools.cache
def _kinds_of(function: Callable[..., Any]) -> dict[str, tuple[Kind, ...]]:
    kinds, names = {}, inspect.unwrap(function).__globals__
    for name, annotation in function.__annotations__.items():
        allowed = tuple(_kinds(_evaluated(annotation, names)))
        if not all(map(_is_left, allowed)) and name != "return":
            kinds[name] = allowed
    return kinds


def _is_left(kind: Kind) -> bool:
    """Return True for what functions check themselves: numbers, strings, and sequences of numbers."""
    of_numbers = kind.fits is is_sequence and kind.items == (_KINDS[int],)
    return of_numbers or kind in (_KINDS[int], _KINDS[float], _KINDS[str], _KINDS[type(None)])


def _evaluated(annotation: object, names: dict[str, Any]) -> object:
    """Evaluate an annotation that is a string; names that only type checkers import allow anything."""
    try:
        return eval(annotation, names) if isinstance(annotation, str) else annotation
    except NameError:
        return Any


def _kinds(annotation: Any) -> Iterator[Kind]:
    """Yield what an annotation allows; nothing if it allows anything."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        members = [tuple(_kinds(argument)) for argument in arguments]
        if torch.device in arguments and {*arguments} <= _OF_DEVICES:
            yield _DEVICE_OR_NONE if type(None) in arguments else _DEVICE
        elif all(members):
            yield from (kind for member in members for kind in member)
    elif isinstance(annotation, TypeVar):
        yield from _kinds(annotation.__bound__) if annotation.__bound__ else ()
    elif annotation in _KINDS:
        yield _KINDS[annotation]
    elif origin in _COLLECTIONS:
        of = {*arguments} - {Ellipsis} if origin is tuple else {*arguments[-1:]}
        yield _COLLECTIONS[origin]._replace(items=tuple(_kinds(*of)) if len(of) == 1 else ())
    elif origin is os.PathLike:
        yield Kind(_PATHS[0], lambda value: isinstance(value, os.PathLike))
    elif origin is Callable:
        yield Kind("a function", callable)
    elif isinstance(annotation, type) and annotation is not Any:
        name = _module(annotation) + annotation.__name__
        article = "an" if name[0] in "AEIOU" else "a"
        yield Kind(f"{article} {name}", lambda value: isinstance(value, annotation))


def _module(kind: type) -> str:
    """Return the module that users import a class from, with a dot; nothing for this package."""
    for package in ("torch.nn.", "torch.optim."):
        if kind.__module__.startswith(package):
            return package
    own = kind.__module__.split(".")[0] in ("builtins", "collections", __package__)
    return "" if own else f"{kind.__module__}."


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # those of NumPy


def _is_integer(value: object) -> bool:
    try:
        as_integer(value)
    except (RuntimeError, TypeError):  # the first of tensors without elements
        return False
    return True


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not _is_flag(value)


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Tensor | nn.Module)


def _is_device(value: object) -> bool:
    try:
        torch.empty(0, device=value)  # type: ignore[call-overload]
    except (AssertionError, RuntimeError, TypeError):  # the first of a PyTorch without that device
        return False
    return value is not None and not isinstance(value, bool)


_KINDS: dict[Any, Kind] = {
    type(None): Kind("None", lambda value: value is None),
    bool: Kind("True or False", _is_flag),
    int: Kind("an integer", _is_integer),
    float: Kind("a number", _is_real),
    str: Kind("a string", lambda value: isinstance(value, str)),
    Tensor: Kind("a dense tensor", is_tensor),
}
_PATHS = ("a path", "a pathlib.Path")
_DEVICE = Kind("a device that PyTorch has here", _is_device)
_DEVICE_OR_NONE = Kind(f"{_DEVICE.words}, or None", lambda value: value is None or _is_device(value))
_OF_DEVICES = {torch.device, str, int, type(None)}
_COLLECTIONS = {
    Mapping: Kind("a mapping", lambda value: isinstance(value, Mapping), of_values=True),
    dict: Kind("a dict", lambda value: isinstance(value, dict), of_values=True),
    Sequence: Kind("a sequence", is_sequence),
    tuple: Kind("a tuple", is_sequence),
    list: Kind("a list", is_sequence),
    Iterable: Kind("an iterable, such as a list", _is_iterable),
}
