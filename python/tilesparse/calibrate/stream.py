"""A model run block by block on batches: what calibration and recovery share."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import check_callable, checked_device, shown
from .._runtime.torch_private import version
from ..errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from ..nn.linear import evaluating

# Keywords of Transformers' models: of a block's input, and of caches, whose name is another one since 5.24.
_HIDDEN = "hidden_states"
_CACHES = ("past_key_values", "cache")


class Stream:
    """The inputs of a model's next block, for every batch.

    The batches run through the model once, up to the first block: what it is called with waits on ``keep``,
    or where the model is, and goes on block by block. How the other blocks are called is recorded from the
    first batch of each shape, and from every batch where their arguments differ. ("",) is the whole model.

    ``order`` are the blocks as they run; ``is_chain``: each takes what the one before it gave, else recording
    has ended; ``shares``: one takes something else, too, that another gave, as a position bias; ``repeated``
    and ``cached`` are blocks that run again, or were given keys and values of former calls, which are left
    out, or None.
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
            if any(kwargs.get(cache) is not None for cache in _CACHES):
                self.cached = self.cached or name
            call = Call(_without_caches(args), _without_caches(dict(kwargs)))
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
                raise ForwardEnded

        def after(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal last
            last = first_of(output)
            taken = {id(one) for one in tensors_in((args, kwargs))}  # handed on, not made here
            given.update((id(one), one) for one in tensors_in(output) if id(one) not in taken)

        modules = {name: self._model.get_submodule(name) for name in self._blocks}
        # Before hooks that move the arguments to another device: `before` compares identities.
        with listening(modules, before, prepend=True), contextlib.ExitStack() as stack:
            for module in modules.values():
                hook = module.register_forward_hook(lambda _, *given: after(*given), with_kwargs=True)
                stack.callback(hook.remove)
            with contextlib.suppress(ForwardEnded):
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
        """Run the next block on one batch after the other, on the device, with some parameters by name."""
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
    modules: Mapping[str, nn.Module],
    note: Callable[[str, tuple[Any, ...], dict[str, Any]], None],
    *,
    prepend: bool = False,
) -> Iterator[None]:
    """Call ``note(name, args, kwargs)`` before each call of a module, with prepend before other hooks."""
    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True, prepend=prepend
            )
            stack.callback(hook.remove)
        yield


class ForwardEnded(BaseException):
    """Ends a forward pass; no Exception, which a model or its caller might catch."""


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

    def _keyword(self) -> str:
        return _HIDDEN if _HIDDEN in self.kwargs else next(iter(self.kwargs), _HIDDEN)


def first_of(output: Any) -> Any:
    """Return a module's output, or the first entry of a tuple or mapping that is no scalar loss."""
    if not isinstance(output, Mapping | tuple | list) or not output:
        return output
    entries = [*(output.values() if isinstance(output, Mapping) else output)]
    return next((one for one in entries if not isinstance(one, Tensor) or one.dim()), entries[0])


def tensor_of(name: str, output: Any) -> Tensor:
    """Return the tensor of a submodule's output."""
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

    Scalars, such as a loss, count only where there is nothing else. NaN and infinities equal each other;
    tensors of other shapes, or none at all, differ by infinity.
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


def call(model: nn.Module, batch: Any, **options: Any) -> Any:
    """Return ``model(**batch)`` of a mapping, ``model(*batch)`` of a tuple or list, else ``model(batch)``."""
    batch = _in_other_containers(batch)
    try:
        if isinstance(batch, Mapping):
            return model(**{**batch, **options})
        if isinstance(batch, tuple | list):
            return model(*batch, **options)
        return model(batch, **options)
    except Exception as error:
        if next(tensors_in(batch), None) is None:
            raise InvalidTypeError(
                f"batches must be tensors, or mappings, tuples or lists of them, got {shown(batch)}: {error}"
            ) from error
        raise


def _in_other_containers(value: Any) -> Any:
    return mapped(value, _in_other_containers)


def checked_batch(batch: Any) -> Any:
    """Return a batch whose tensors all have data."""
    if any(tensor.is_meta for tensor in tensors_in(batch)):
        raise InvalidArgumentError("batches must have tensors with data, got one on the meta device")
    return batch


def call_apart(model: nn.Module, batch: Any) -> Any:
    """Do as `call` with copies of all tensors, which the model may write to, on the model's device."""
    return call(model, moved(batch, device_of(model), copy=True))


def caller(forward: Callable[[nn.Module, Any], Any] | None, default: Any = call_apart) -> Any:
    """Return what calls a model with a batch: ``forward``, or the default."""
    check_callable("forward", forward)
    return default if forward is None else forward


def check_batches(batches: object) -> None:
    """Raise InvalidArgumentError for what is not iterable, and for one batch, whose keys or rows would be."""
    is_iterable = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    if isinstance(batches, Mapping | Tensor) or not is_iterable:
        raise InvalidArgumentError(
            f"batches must be an iterable of batches, such as a list, got {type(batches).__name__}"
        )


def moved(value: Any, device: torch.device, *, copy: bool = False) -> Any:
    """Return a nested value with all tensors in it on a device, or with copies of them."""
    if isinstance(value, Tensor):
        # To the CPU the host waits: it may read the memory at once.
        return value.to(device, non_blocking=device.type != "cpu", copy=copy)
    return mapped(value, lambda item: moved(item, device, copy=copy))


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tuple, list or mapping with the function applied to its items; other values as they are.

    `torch.utils._pytree.tree_map` leaves the tensors of a BatchEncoding, which tokenizers give, where they
    are.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if isinstance(value, tuple | list):
        return type(value)(map(function, value))
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested mappings, tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def mask_of(batch: Any) -> Tensor | None:
    """Return the attention mask [batch, tokens] of a batch, or None."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def mask_of_outputs(model: nn.Module, batch: Any) -> Tensor | None:
    """Return the mask [batch, tokens] of what a model gives; of an encoder-decoder that of the decoder."""
    config = getattr(model, "config", None)
    if not isinstance(batch, Mapping) or not getattr(config, "is_encoder_decoder", False):
        return mask_of(batch)
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    return labels.ne(-100) if mask is None and isinstance(labels, Tensor) else mask


def device_of(module: nn.Module, default: torch.device | None = None) -> torch.device:
    """Return the device of the first parameter or buffer; without any, the default or the CPU."""
    tensor = next(chain(module.parameters(), module.buffers()), None)
    if tensor is not None:
        return tensor.device
    return torch.device("cpu") if default is None else default


def stacks(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """Return names of modules that may be stacks of blocks with layers, the most promising first."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            prefix = f"{name}." if name else ""
            inside = [layer.removeprefix(prefix) for layer in layers if layer.startswith(prefix)]
            items = Counter(layer.partition(".")[0] for layer in inside)
            if len(items) > 1:
                found.append((len(inside) - max(items.values()), name))
    return [name for _, name in sorted(found, key=lambda stack: -stack[0])]


def chosen_device(model: nn.Module, device: torch.device | str | int | None) -> torch.device:
    """Return a checked device, or the model's where it is None."""
    return device_of(model) if device is None else checked_device(device)


def check_distinct(model: nn.Module, teacher: nn.Module) -> None:
    """Raise InvalidArgumentError where training the model would change the teacher."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for name, parameter in teacher.named_parameters():
        if id(parameter) in trained:
            raise InvalidArgumentError(
                f"teacher must have parameters of its own, but the model trains {name!r}, too; take "
                "copy.deepcopy(model) before it is pruned"
            )


@contextlib.contextmanager
def swapped(model: nn.Module, tensors: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Have a model hold other tensors in place of some parameters and buffers, under all of their names."""
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (held, name, tensor)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor in tensors
    ]
    try:
        for held, name, tensor in places:
            held[name] = tensors[tensor]
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


@contextlib.contextmanager
def restoring(parameters: Iterable[nn.Parameter]) -> Iterator[dict[Tensor, Tensor]]:
    """Yield copies of parameters by these, and write them back if anything goes wrong."""
    copies: dict[Tensor, Tensor] = {parameter: parameter.detach().clone() for parameter in parameters}
    try:
        yield copies
    except BaseException:
        with torch.no_grad():
            for parameter, values in copies.items():
                parameter.copy_(values)
        raise


def uncompiled() -> AbstractContextManager[Any]:
    """Have compiled modules run as they are: compiled code does not call hooks that are set afterwards."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes seconds
        return contextlib.nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


@contextlib.contextmanager
def observing(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode, in which hooks see all of their modules."""
    with evaluating(*models), uncompiled():
        yield


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


class Input(NamedTuple):
    """A tensor as a layer was called with it: kept alive, so that no other one has its identity."""

    tensor: Tensor
    written: int
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> Input:
        """Return a tensor as it is now."""
        return cls(tensor, version(tensor), tensor.data_ptr())

    @property
    def key(self) -> tuple[int, int, int]:
        """Key that only the same tensor has, as long as nothing has written to it."""
        return id(self.tensor), self.written, self.address


@contextlib.contextmanager
def recording(
    children: Mapping[nn.Module, Iterable[str]],
) -> Iterator[dict[nn.Module, dict[str, list[object]]]]:
    """Record with what modules call their children, given by name.

    Yields of each module and each child an entry for every call of the module: equal for children that it
    called once, with the same tensor as their only argument; None for a child that it did not call. Children
    are in the order of their first calls; one that was called in any other way is left out.
    """
    found: dict[nn.Module, dict[str, list[object]]] = {
        module: {name: [] for name in names} for module, names in children.items()
    }
    with contextlib.ExitStack() as stack:
        for module, entries in found.items():
            _record(module, entries, stack)
        yield found


def _record(module: nn.Module, entries: dict[str, list[object]], stack: contextlib.ExitStack) -> None:
    """Have every call of a module add to the entries of its children, see `recording`."""
    calls: list[dict[str, Input]] = []  # under way
    number = 0

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in entries and not any(entries[name]):
            entries[name] = entries.pop(name)  # in the order of first calls
        alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if alone and calls and name not in calls[-1]:
            calls[-1][name] = Input.of(args[0])
        else:
            entries.pop(name, None)

    def end(*_: object) -> None:
        nonlocal number
        call, number = calls.pop(), number + 1
        for name, own in entries.items():
            own.append((number, call[name].key) if name in call else None)

    stack.callback(module.register_forward_pre_hook(lambda *_: calls.append({}), prepend=True).remove)
    stack.callback(module.register_forward_hook(end, always_call=True).remove)
    stack.enter_context(listening({name: module.get_submodule(name) for name in entries}, note))
