"""What calibration data say about the inputs of layers, gathered block by block of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..linear import dense_weight
from .compensation import exact_products

Forward: TypeAlias = Callable[[nn.Module, Any], Any]
_HIDDEN = "hidden_states"  # the name of a block's input where it is not the first positional argument


class Moments:
    """Sums over the tokens that a layer has met: XᵀX, and the sum of X, both in float64.

    Products are computed in float32, or float64 for inputs in that, and added up in float64. All are of X
    less the mean of the first call, so that nothing is lost where inputs vary little about a large mean.

    Args:
        features: the layer's in_features.
        device: of the sums.
    """

    def __init__(self, features: int, device: torch.device) -> None:
        self._products = torch.zeros(features, features, dtype=torch.float64, device=device)
        self._sums = torch.zeros(features, dtype=torch.float64, device=device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=device)
        self._origin: Tensor | None = None
        self._finite: dict[int, Tensor] = {}

    def add(self, x: Tensor, number: int, keep: Tensor | None = None) -> None:
        """Counts the inputs of one call; nothing waits for a GPU.

        Args:
            x: [..., features].
            number: of the batch.
            keep: bools [...], False for tokens that do not count, such as padding; those of another shape
                are for other tokens.
        """
        x = x.detach().to(self._sums.device, torch.promote_types(x.dtype, torch.float32))
        if keep is None or keep.shape != x.shape[:-1]:
            keep = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        x, keep = x.reshape(-1, x.shape[-1]), keep.to(x.device).reshape(-1, 1)
        if self._origin is None:
            total = torch.where(keep, x, 0).sum(0, dtype=torch.float64)
            self._origin = (total / keep.sum().clamp(min=1)).to(x.dtype)
        x = torch.where(keep, x - self._origin, 0)
        self._tokens += keep.sum()
        sums = x.sum(0, dtype=torch.float64)
        with exact_products(x.device):
            self._products += x.T @ x
        self._sums += sums
        self._finite[number] = self._finite.get(number, True) & sums.isfinite().all()

    def tokens(self) -> int:
        """How many tokens were counted; waits for the GPU, as `not_finite` does."""
        return int(self._tokens)

    def not_finite(self) -> int | None:
        """The first batch with NaN or infinities."""
        if not self._finite:
            return None
        good = torch.stack(list(self._finite.values())).tolist()
        return next((number for number, fine in zip(self._finite, good, strict=True) if not fine), None)

    def second(self) -> Tensor:
        """XᵀX / tokens [features, features]."""
        mean = self.mean()
        return self.centred().addr_(mean, mean)

    def centred(self) -> Tensor:
        """XᵀX / tokens [features, features] of the inputs less their mean."""
        off = self._sums / self._tokens
        return (self._products / self._tokens).addr_(off, off, alpha=-1)

    def mean(self) -> Tensor:
        """The mean input [features]."""
        off = self._sums / self._tokens
        return off if self._origin is None else off + self._origin

    def reordered(self, order: Tensor) -> Moments:
        """Of the same inputs, whose feature order[i] has become feature i."""
        other, order = copy(self), order.to(self._sums.device)
        other._products, other._sums = self._products[order][:, order], self._sums[order]
        other._origin = None if self._origin is None else self._origin[order]
        return other


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
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward,
        layers: Sequence[str],
        device: torch.device,
    ) -> None:
        self._model, self._batches, self._forward, self._device = model, batches, forward, device
        self._keep = [_moved(_kept_tokens(batch), device) for batch in batches]
        self._blocks: list[nn.Module] = []
        self._calls: list[list[_Call]] = []  # of each batch: of each block, or one for all of them
        self._hidden: list[Tensor] = []  # of each batch: what the next block takes
        self.stack = next((name for name in _stacks(model, layers) if self._reach(name)), None)
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

    def moments(self, unit: Unit, parameters: Mapping[str, Tensor]) -> dict[str, Moments]:
        """Of the inputs of a unit's layers.

        Args:
            unit: the next one.
            parameters: what takes the places of the model's own, by their names.
        """
        found: dict[str, Moments] = {}
        number = 0

        def hook(name: str, features: int) -> Callable[..., None]:
            def add(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if name not in found:
                    found[name] = Moments(features, self._device)
                x = args[0] if args else next(iter(kwargs.values()))
                found[name].add(x, number, self._keep[number])

            return add

        with ExitStack() as handles:
            for name in unit.layers:
                layer: Any = self._model.get_submodule(name)
                features = dense_weight(layer).shape[1]
                handle = layer.register_forward_pre_hook(hook(name, features), with_kwargs=True)
                handles.callback(handle.remove)
            for _ in self._outputs(unit, parameters):
                number += 1
        return found

    def advance(self, unit: Unit, parameters: Mapping[str, Tensor]) -> None:
        """Lets the data go on behind a unit, with other parameters as in `moments`."""
        if unit.number is not None:
            for number, output in enumerate(self._outputs(unit, parameters)):
                self._hidden[number] = _first(output)

    @torch.no_grad()
    def _outputs(self, unit: Unit, parameters: Mapping[str, Tensor]) -> Iterator[Any]:
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
        state = _moved({**own, **dict(block.named_buffers())}, self._device)
        for calls, hidden in zip(self._calls, self._hidden, strict=True):
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
            found.append(_moved((calls[0].hidden(), rest), self._device))
        self._blocks = blocks
        self._hidden, self._calls = [hidden for hidden, _ in found], [rest for _, rest in found]
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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout and the like; then as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def call_model(model: nn.Module, batch: Any) -> Any:
    """A mapping gives keyword arguments, a tuple or list positional ones, anything else is the one argument.

    Tensors go to the device of the model's first parameter.
    """
    batch = _moved(batch, next(model.parameters()).device)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _stacks(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Names of modules that may be stacks: those first that share most layers out among their items."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            prefix = f"{name}." if name else ""
            inside = [layer.removeprefix(prefix) for layer in layers if layer.startswith(prefix)]
            items = Counter(layer.partition(".")[0] for layer in inside)
            if len(items) > 1:
                found.append((len(inside) - max(items.values()), name))
    return [name for _, name in sorted(found, key=lambda stack: -stack[0])]


def _kept_tokens(batch: Any) -> Tensor | None:
    """Which tokens of a batch are not padding: bools [sequences, tokens]."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _shapes(batch: Any) -> str:
    def shape(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, Tensor) else _mapped(value, shape)

    return repr(shape(batch))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) else output


def _without_caches(value: Any) -> Any:
    """Without keys and values of former calls, since a block runs more than once."""
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return None
    return _mapped(value, _without_caches)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return _mapped(value, lambda item: _moved(item, device))


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A tuple, list or mapping of what the function makes of its items; other values as they are."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if isinstance(value, tuple | list):
        return type(value)(map(function, value))
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device)))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a is b or (type(a) is type(b) and isinstance(a, str | int | float | bool) and a == b)
