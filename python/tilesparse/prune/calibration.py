"""What calibration data say about the inputs of layers, gathered block by block of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._replay.batches import call, device_of, mapped, mask_of, moved, stacks
from ..errors import InvalidArgumentError
from .moments import Moments

Forward: TypeAlias = Callable[[nn.Module, Any], Any]
Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]
_HIDDEN = "hidden_states"  # the name of a block's input where it is not the first positional argument


class Unit(NamedTuple):
    """A part of the model whose layers are pruned together: a block of a stack, or the model itself."""

    number: int | None  # of the block, or None for the model
    layers: list[str]  # names of layers in it


class _Call(NamedTuple):
    """What a block is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def hidden(self) -> Any:
        return self.args[0] if self.args else self.kwargs.get(_HIDDEN)

    def with_hidden(self, hidden: Any) -> _Call:
        if self.args:
            return _Call((hidden, *self.args[1:]), self.kwargs)
        return _Call((), {**self.kwargs, _HIDDEN: hidden})


class _Reached(Exception):
    """The first block was reached; what comes after need not run."""


class _Whole(nn.Module):
    """The model, called with a batch."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, batch: Any) -> Any:
        return self._forward(self.model, batch)


class Calibration:
    """Calibration data on their way through a model, of which nothing changes.

    Where the model has a stack of blocks, each of which takes what the one before gives, the data wait before
    the first block and go on block by block. Everything else runs with the model as a whole.

    Args:
        model: in evaluation mode.
        batches: what the model is called with.
        forward: calls the model with a batch.
        layers: names of the layers that are of interest.
        device: where blocks of a stack compute, and where sums are kept.
        compare: whether the data go through the dense model beside the pruned one.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward,
        layers: Sequence[str],
        device: torch.device,
        compare: bool,
    ) -> None:
        self._model, self._batches, self._forward, self._device = model, batches, forward, device
        self._compare = compare
        self._keep = [moved(_kept_tokens(batch), device) for batch in batches]
        self._blocks: list[nn.Module] = []
        self._calls: list[list[_Call]] = []  # of each batch: of each block, or one for all of them
        self._hidden: list[Tensor] = []  # of each batch: what the next block takes
        self._dense: list[Tensor] = []  # likewise, in the dense model
        self.stack = next((name for name in stacks(model, layers) if self._reach(name)), None)
        self._layers = layers

    def units(self) -> list[Unit]:
        """What to prune, in order; each is passed before the next is looked at."""
        inside = [Unit(number, []) for number in range(len(self._blocks))]
        outside = Unit(None, [])
        members = [set(block.modules()) for block in self._blocks]
        for name in self._layers:
            layer = self._model.get_submodule(name)
            homes = [unit for unit, modules in zip(inside, members, strict=True) if layer in modules]
            (homes[0] if len(homes) == 1 else outside).layers.append(name)
        return [*inside, outside] if outside.layers else inside

    def groups(self, unit: Unit) -> list[list[str]]:
        """The layers of a unit in the order in which they run, those together that have the same input."""
        inputs: dict[str, list[Tensor]] = {}

        def note(name: str, x: Tensor) -> None:
            inputs.setdefault(name, []).append(x)

        with self._listening(unit.layers, note):
            next(self._outputs(unit, {}, self._hidden))
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, tensors in inputs.items():
            groups.setdefault(tuple(map(id, tensors)), []).append(name)
        others = [[name] for name in unit.layers if name not in inputs]  # which other batches may run
        return [*groups.values(), *others]

    def moments(self, unit: Unit, layer: str, parameters: Mapping[str, Tensor]) -> Moments | None:
        """Of the inputs of a layer, and so of all in its group; None if nothing calls it.

        Args:
            unit: the next one.
            layer: its name.
            parameters: what takes the places of the model's own, by their names.
        """
        found: list[Moments] = []
        dense: list[Tensor] = []
        number, in_dense = 0, False

        def note(name: str, x: Tensor) -> None:
            if in_dense:
                dense.append(x)
                return
            if not found:
                found.append(Moments(x.shape[-1], self._device, self._compare))
            found[0].add(x, dense.pop(0) if dense else None, number, self._keep[number])

        with self._listening([layer], note):
            pruned = self._outputs(unit, parameters, self._hidden)
            beside = self._outputs(unit, {}, self._dense) if self._compare else None
            for current in range(len(self._batches)):
                number = current
                if beside is not None:
                    dense.clear()
                    in_dense = True
                    next(beside)
                    in_dense = False
                next(pruned)
        return found[0] if found else None

    def advance(self, unit: Unit, parameters: Mapping[str, Tensor]) -> None:
        """Lets the data go on behind a unit, with other parameters as in `moments`."""
        if unit.number is None:
            return
        for number, output in enumerate(self._outputs(unit, parameters, self._hidden)):
            self._hidden[number] = _first(output)
        if self._compare:
            for number, output in enumerate(self._outputs(unit, {}, self._dense)):
                self._dense[number] = _first(output)

    @contextmanager
    def _listening(self, layers: Sequence[str], note: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Tells of each call of a layer: its name and input."""

        def hook(name: str) -> Callable[..., None]:
            def tell(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                note(name, args[0] if args else next(iter(kwargs.values())))

            return tell

        with ExitStack() as handles:
            for name in layers:
                layer = self._model.get_submodule(name)
                handles.callback(layer.register_forward_pre_hook(hook(name), with_kwargs=True).remove)
            yield

    @torch.no_grad()
    def _outputs(
        self, unit: Unit, parameters: Mapping[str, Tensor], given_hidden: Sequence[Tensor]
    ) -> Iterator[Any]:
        """Of each batch, what a unit gives."""
        if unit.number is None:
            whole = _Whole(self._model, self._forward)
            given = {f"model.{name}": tensor for name, tensor in parameters.items()}
            for batch in self._batches:
                yield functional_call(whole, given, (batch,))
            return
        block = self._blocks[unit.number]
        # By identity: the model may know a layer by another name than that of the block and its own in it.
        new = {self._model.get_parameter(name): tensor for name, tensor in parameters.items()}
        own = {name: new.get(parameter, parameter) for name, parameter in block.named_parameters()}
        state = moved({**own, **dict(block.named_buffers())}, self._device)
        for calls, hidden in zip(self._calls, given_hidden, strict=True):
            call = calls[unit.number if len(calls) > 1 else 0]
            args, kwargs = call.with_hidden(hidden.clone())  # which some blocks write to
            yield functional_call(block, state, args, kwargs)

    @torch.no_grad()
    def _reach(self, name: str) -> bool:
        """Runs the model up to the blocks of a stack; False if they are no chain."""
        blocks = list(self._model.get_submodule(name).children())
        alike: dict[str, bool] = {}  # by shapes of batches, for masks of long sequences differ in more
        found: list[tuple[Tensor, list[_Call]]] = []
        for batch in self._batches:
            shapes = _shapes(batch)
            calls, chained = self._run_through(blocks, batch, stop=alike.get(shapes, False))
            if not chained:
                return False
            rest = [call.with_hidden(None) for call in calls]
            if alike.setdefault(shapes, all(_same(call, rest[0]) for call in rest)):
                rest = rest[:1]
            found.append(moved((calls[0].hidden(), rest), self._device))
        self._blocks = blocks
        self._hidden, self._calls = [hidden for hidden, _ in found], [rest for _, rest in found]
        self._dense = list(self._hidden)
        return True

    def _run_through(self, blocks: list[nn.Module], batch: Any, stop: bool) -> tuple[list[_Call], bool]:
        """What the blocks are called with, and whether each takes what the one before gives."""
        order: list[nn.Module] = []
        calls: list[_Call] = []
        chained = True
        last: Any = None

        def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal chained
            call = _Call(*_without_caches((args, kwargs)))
            hidden = call.hidden()
            if calls:
                chained = chained and _same(hidden, last)
            elif isinstance(hidden, Tensor):
                call = call.with_hidden(hidden.clone())
            chained = chained and isinstance(hidden, Tensor)
            calls.append(call)
            order.append(block)
            if stop:
                raise _Reached

        def after(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            nonlocal last
            last = _first(output)

        with ExitStack() as handles:
            for block in dict.fromkeys(blocks):
                handles.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                handles.callback(block.register_forward_hook(after).remove)
            with suppress(_Reached):
                self._forward(self._model, batch)
        expected = blocks[:1] if stop else blocks
        return calls, chained and [*map(id, order)] == [*map(id, expected)]


def call_model(model: nn.Module, batch: Any) -> Any:
    """A mapping gives keyword arguments, a tuple or list positional ones, anything else is the one argument.

    Tensors are copies, which the model may write to, on the device of its first parameter.
    """
    return call(model, moved(batch, device_of(model), copy=True))


def own_loss(output: Any) -> Tensor:
    """The ``loss`` that a model gives, or an error."""
    value = getattr(output, "loss", None)
    if not isinstance(value, Tensor):
        raise InvalidArgumentError(
            "loss: expected, for the model gives none with these batches; Transformers' models do where a "
            "batch has labels"
        )
    return value


def _kept_tokens(batch: Any) -> Tensor | None:
    """Which tokens of a batch are not padding: bools [sequences, tokens]."""
    mask = mask_of(batch)
    return None if mask is None else mask != 0


def _shapes(batch: Any) -> str:
    def shape(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, Tensor) else mapped(value, shape)

    return repr(shape(batch))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) else output


def _without_caches(value: Any) -> Any:
    """Without keys and values of former calls, since a block runs more than once."""
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return None
    return mapped(value, _without_caches)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device)))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a is b or (type(a) is type(b) and isinstance(a, str | int | float | bool) and a == b)
