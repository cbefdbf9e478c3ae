"""Blocks of a model run one after the other, on inputs that were recorded."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidArgumentError, UnsupportedError
from .batches import device_of, moved, tensors_in


@dataclass
class Call:
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, device: torch.device) -> Call:
        """A copy: a module may write to what it is given, and is run again."""
        return Call(moved(self.args, device, copy=True), moved(self.kwargs, device, copy=True))

    @property
    def hidden(self) -> Any:
        """The first argument, which the blocks of a stack hand on."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    def with_hidden(self, hidden: Any) -> Call:
        if self.args:
            return Call((hidden, *self.args[1:]), self.kwargs)
        return Call((), {**self.kwargs, next(iter(self.kwargs)): hidden})

    def run(self, module: nn.Module) -> Any:
        return module(*self.args, **self.kwargs)


class Stream:
    """What goes through the blocks of one model: for every batch the inputs of the next block.

    Args:
        model: in evaluation mode.
        blocks: names of modules, each of which hands its output on to the next; ("",) for the whole model.
        batches: what `run` takes.
        run: ``run(model, batch)``.
        device: where blocks are computed; what they give is kept where the model is.

    Raises:
        InvalidArgumentError: there are caches of keys and values in the batches.
        UnsupportedError: a block runs more than once in a forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        batches: Sequence[Any],
        run: Callable[[nn.Module, Any], Any],
        device: torch.device,
    ) -> None:
        self._model, self._home, self._device = model, device_of(model), device
        self.calls: dict[str, list[Call]] = {name: [] for name in blocks}
        # Whether each block has taken what the one before it gave, and nothing else that a block gave.
        self.is_chain = True
        self.order: list[str] = []
        with _moving([model.get_submodule(name) for name in blocks], device, self._home):
            for batch in batches:
                self._record(blocks, batch, run)
        self._hidden = [one.hidden for one in self.calls[self.order[0]]] if self.order else []

    def _record(self, blocks: Sequence[str], batch: Any, run: Callable[[nn.Module, Any], Any]) -> None:
        ran: list[str] = []
        last: list[Any] = [None]
        given: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by id

        def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in ran:
                raise UnsupportedError(f"model: {name!r} runs more than once in a forward pass")
            recorded = Call(args, dict(kwargs))
            _check_no_cache(name, recorded)
            if ran:
                self.is_chain &= isinstance(recorded.hidden, Tensor) and recorded.hidden is last[0]
                recorded = recorded.with_hidden(None)  # computed anew, from reconstructed blocks
                others = tensors_in((recorded.args, recorded.kwargs))
                self.is_chain &= not any(given.get(id(one)) is one for one in others)
            else:  # the block may write to it
                recorded = recorded.with_hidden(moved(recorded.hidden, self._home, copy=True))
            ran.append(name)
            self.calls[name].append(recorded)

        def after(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            last[0] = first_of(output)
            taken = {id(one) for one in tensors_in((args, kwargs))}  # what it only hands on is none of its
            given.update((id(one), one) for one in tensors_in(output) if id(one) not in taken)

        with contextlib.ExitStack() as stack:
            for name in blocks:
                module = self._model.get_submodule(name)
                hook = module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: before(name, args, kwargs),
                    with_kwargs=True,
                    prepend=True,  # sees what the block before it gave, and not a copy on another device
                )
                stack.callback(hook.remove)
                hook = module.register_forward_hook(lambda _, *given: after(*given), with_kwargs=True)
                stack.callback(hook.remove)
            run(self._model, moved(batch, self._home, copy=True))  # which a model may write to
        if self.order and ran != self.order:
            self.is_chain = False
        self.order = self.order or ran

    def inputs(self, block: str) -> Iterator[Call]:
        """Those of the next block, batch by batch, on the device."""
        for recorded, hidden in zip(self.calls[block], self._hidden, strict=True):
            yield recorded.with_hidden(hidden).on(self._device)

    def capture(self, block: str, parts: Mapping[str, nn.Module]) -> dict[str, list[Call]]:
        """What submodules of the next block are called with, batch by batch."""
        found: dict[str, list[Call]] = {}

        def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.setdefault(name, []).append(Call(args, dict(kwargs)).on(self._home))

        with contextlib.ExitStack() as stack:
            for name, part in parts.items():
                hook = part.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
                )
                stack.callback(hook.remove)
            self._run(block)
        return found

    def outputs(self, block: str, parts: Mapping[str, nn.Module]) -> dict[str, list[Tensor]]:
        """What submodules of the next block give, batch by batch, in the order in which they have run.

        The stream then stands before the block after it.
        """
        found: dict[str, list[Tensor]] = {}

        def note(name: str, output: Any) -> None:
            found.setdefault(name, []).append(moved(tensor_of(name, output), self._home, copy=True))

        with contextlib.ExitStack() as stack:
            for name, part in parts.items():
                hook = part.register_forward_hook(lambda _, args, output, name=name: note(name, output))
                stack.callback(hook.remove)
            self._hidden = self._run(block)
        return found

    def _run(self, block: str) -> list[Any]:
        module = self._model.get_submodule(block)
        return [moved(first_of(one.run(module)), self._home) for one in self.inputs(block)]


def first_of(output: Any) -> Any:
    """The tensor of a module's output, or the first entry of a tuple or mapping."""
    if isinstance(output, Mapping):
        return next(iter(output.values()), None)
    return output[0] if isinstance(output, tuple | list) and output else output


def tensor_of(name: str, output: Any) -> Tensor:
    tensor = first_of(output)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise UnsupportedError(
            f"submodules: {name!r} gives {type(tensor).__name__}, and no tensor to compare"
        )
    return tensor


@contextlib.contextmanager
def placed(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """On a device, and afterwards where they were."""
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
def _moving(modules: Sequence[nn.Module], device: torch.device, default: torch.device) -> Iterator[None]:
    """Each of the modules is on the device while it runs, and its results come back."""
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


def _check_no_cache(name: str, recorded: Call) -> None:
    if recorded.kwargs.get("past_key_values") is not None:
        raise InvalidArgumentError(
            f"batches: {name!r} is given past_key_values, which each call of it would change; leave them and "
            "use_cache=True out"
        )
