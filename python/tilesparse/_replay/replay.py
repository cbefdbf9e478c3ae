"""A model run block by block on batches: the engine that pruning and recovery share."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .batches import device_of, moved, swapped, tensors_in
from .calls import Call, first_of, same, shapes_of, tensor_of
from .devices import visiting


class Stream:
    """The inputs of a model's next block, for every batch.

    The batches run through the model once, up to the first block: what it is called with waits, and goes on
    block by block. How the other blocks are called is recorded from the first batch of each shape, and only
    where their arguments differ from those of the first block from every batch.

    Args:
        model: in evaluation mode.
        blocks: names of modules, each of which hands its output on to the next; ("",) for the whole model.
        batches: what `run` takes.
        run: ``run(model, batch)``.
        device: where blocks are computed.
        keep: where the inputs of the next block wait; None is where the model is.

    Attributes:
        order: the blocks in the order in which they run.
        is_chain: each block takes as its input what the one before it gave. Recording ends where one does
            not.
        shares: a block takes something else, too, that another block gave, such as a position bias.
        repeated: a block that runs more than once in a forward pass, or None.
        cached: a block that was given keys and values of former calls, or None; they are left out.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        batches: Sequence[Any],
        run: Callable[[nn.Module, Any], Any],
        device: torch.device,
        keep: torch.device | None = None,
    ) -> None:
        self._model, self._blocks, self._run, self._device = model, blocks, run, device
        self._home = device_of(model)
        self._keep = self._home if keep is None else keep
        self.order: list[str] = []
        self.is_chain, self.shares = True, False
        self.repeated: str | None = None
        self.cached: str | None = None
        self._calls: list[list[Call]] = []  # of each batch: of each block, or one for all of them
        self._hidden: list[Any] = []  # of each batch: the input of the next block
        alike: dict[str, bool] = {}  # by shapes of batches, for masks of long sequences differ in more
        with visiting([model.get_submodule(name) for name in blocks], device, self._home):
            for batch in batches:
                shapes = shapes_of(batch)
                calls = self._record(batch, first_only=alike.get(shapes, False))
                if not self.is_chain or not calls:
                    break
                rest = [call.with_hidden(None) for call in calls]
                if alike.setdefault(shapes, all(same(call, rest[0]) for call in rest)):
                    rest = rest[:1]
                self._calls.append(rest)
                self._hidden.append(moved(calls[0].hidden, self._keep))

    def _record(self, batch: Any, first_only: bool) -> list[Call]:
        """Return the calls of the blocks for a batch, and note how they hang together."""
        ran: list[str] = []
        calls: list[Call] = []
        last: Any = None
        given: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by id

        def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(args, dict(kwargs))
            self.cached = self.cached or (name if call.has_cache() else None)
            call = call.without_caches()
            if name in ran:
                self.repeated, self.is_chain = name, False
            if ran:
                self.is_chain &= isinstance(call.hidden, Tensor) and same(call.hidden, last)
                call = call.with_hidden(None)  # computed anew, from blocks that have changed
                self.shares |= any(given.get(id(one)) is one for one in tensors_in((call.args, call.kwargs)))
            else:  # the block may write to it
                call = call.with_hidden(moved(call.hidden, self._home, copy=True))
            ran.append(name)
            calls.append(call)
            if first_only:
                raise _FirstBlockReached

        def after(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal last
            last = first_of(output)
            taken = {id(one) for one in tensors_in((args, kwargs))}  # handed on, not made here
            given.update((id(one), one) for one in tensors_in(output) if id(one) not in taken)

        with contextlib.ExitStack() as stack:
            for name in self._blocks:
                module = self._model.get_submodule(name)
                hook = module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: before(name, args, kwargs),
                    with_kwargs=True,
                    prepend=True,  # sees what the block before it gave, and not a copy on another device
                )
                stack.callback(hook.remove)
                hook = module.register_forward_hook(lambda _, *given: after(*given), with_kwargs=True)
                stack.callback(hook.remove)
            with contextlib.suppress(_FirstBlockReached):
                self._run(self._model, batch)
        self.order = self.order or ran
        self.is_chain &= ran == self.order[: 1 if first_only else None]
        return calls

    def fork(self) -> Stream:
        """Return a second stream that stands before the same block, to go through other blocks."""
        other = copy(self)
        other._hidden = list(self._hidden)
        return other

    @torch.no_grad()
    def results(self, block: str, parameters: Mapping[str, Tensor] | None = None) -> Iterator[Any]:
        """Run the next block on one batch after the other, on the device.

        Args:
            block: its name.
            parameters: tensors in place of the model's parameters, by their names in the model.
        """
        module = self._model.get_submodule(block)
        # By identity: the model may know a layer by another name than that of the block and its own in it.
        new: dict[Tensor, Tensor] = {
            self._model.get_parameter(name): tensor for name, tensor in (parameters or {}).items()
        }
        for tensor in chain(module.parameters(), module.buffers()):
            on_device = moved(new.get(tensor, tensor), self._device)
            if on_device is not tensor:
                new[tensor] = on_device
        position = self.order.index(block)
        for calls, hidden in zip(self._calls, self._hidden, strict=True):
            call = calls[position if len(calls) > 1 else 0].with_hidden(hidden).on(self._device)
            with swapped(module, new):
                output = module(*call.args, **call.kwargs)
            yield output

    def advance(self, block: str, parameters: Mapping[str, Tensor] | None = None) -> None:
        """Run the next block, so that the stream then stands before the block after it."""
        for number, output in enumerate(self.results(block, parameters)):
            self._hidden[number] = moved(first_of(output), self._keep)

    def capture(self, block: str, parts: Mapping[str, nn.Module]) -> dict[str, list[Call]]:
        """Return the calls of submodules of the next block, batch by batch."""
        found: dict[str, list[Call]] = {}

        def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.setdefault(name, []).append(Call(args, dict(kwargs)).on(self._home))

        with listening(parts, note):
            for _ in self.results(block):
                pass
        return found

    def outputs(self, block: str, parts: Mapping[str, nn.Module]) -> dict[str, list[Tensor]]:
        """Advance, and return the outputs of submodules, batch by batch, in the order in which they ran."""
        found: dict[str, list[Tensor]] = {}

        def note(name: str, output: Any) -> None:
            found.setdefault(name, []).append(moved(tensor_of(name, output), self._home, copy=True))

        with contextlib.ExitStack() as stack:
            for name, part in parts.items():
                hook = part.register_forward_hook(lambda _, args, output, name=name: note(name, output))
                stack.callback(hook.remove)
            self.advance(block)
        return found


@contextlib.contextmanager
def listening(
    modules: Mapping[str, nn.Module], note: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """Call ``note(name, args, kwargs)`` before each call of a module."""
    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
            )
            stack.callback(hook.remove)
        yield


class _FirstBlockReached(BaseException):
    """Ends a forward pass; no Exception, which a model or its caller might catch."""
