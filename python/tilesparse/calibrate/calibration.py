"""Moments of the inputs of layers on calibration data, gathered block by block of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._reports import MOST, listed, warn_user
from ..errors import InvalidArgumentError, TileSparseError
from ..nn.dense import dense_weight
from .experts import ExpertMoments, LinearExperts
from .moments import Moments
from .stream import (
    ForwardEnded,
    Input,
    Stream,
    call_apart,
    check_batches,
    checked_batch,
    device_of,
    listening,
    mask_of,
    moved,
    stacks,
    swapped,
    visiting,
)

Forward: TypeAlias = Callable[[nn.Module, Any], Any]


class Calibration:
    """Calibration data on their way through a model, of which nothing changes.

    Where the model has a stack of blocks, each of which takes what the one before gives, the data wait before
    the first block and go on block by block; each block is a unit. What lies outside is the last unit, and
    runs with the model as a whole. `units` and `groups` walk along; all other methods run the unit at hand.

    Args:
        model: in evaluation mode.
        batches: what the model is called with.
        forward: calls the model with a batch.
        layers: names of the layers that are of interest.
        device: where blocks of a stack compute, and where sums are kept.
        compare: whether the data go through the dense model beside the changed one.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward,
        layers: Sequence[str],
        device: torch.device,
        compare: bool = False,
    ) -> None:
        self._model, self._batches, self._forward, self._device = model, batches, forward, device
        self._layers, self._compare = layers, compare
        self._keep = [moved(_kept_tokens(batch), device) for batch in batches]
        self.stack: str | None = None
        self._blocks: list[str] = []
        self._block: str | None = None  # the unit at hand; None is the model
        self._parameters: dict[str, Tensor] = {}  # in place of the model's own, by their names
        for stack in stacks(model, layers):
            container = model.get_submodule(stack)
            blocks = [f"{stack}.{key}".lstrip(".") for key, _ in container.named_children()]
            stream = Stream(model, blocks, batches, forward, device, keep=device)
            if stream.is_chain and stream.order == blocks:
                self.stack, self._blocks = stack, blocks
                self._changed, self._dense = stream, stream.fork()
                break

    def units(self) -> Iterator[list[str]]:
        """Yield the layers of one unit after the other; the data move on when the next is asked for."""
        inside: dict[str, list[str]] = {block: [] for block in self._blocks}
        outside: list[str] = []
        homes: dict[nn.Module, list[list[str]]] = {}
        for block, layers in inside.items():
            for module in self._model.get_submodule(block).modules():
                homes.setdefault(module, []).append(layers)
        for name in self._layers:
            own = homes.get(self._model.get_submodule(name), [])
            (own[0] if len(own) == 1 else outside).append(name)
        for block, layers in inside.items():
            self._block, self._parameters = block, {}
            yield layers
            self._changed.advance(block, self._parameters)
            if self._compare:
                self._dense.advance(block)
        self._block, self._parameters = None, {}
        if outside:
            yield outside

    def groups(
        self, changed: Callable[[Sequence[str]], dict[str, Tensor]] = lambda layers: {}
    ) -> Iterator[list[str]]:
        """Yield layers in the order in which they run, those with the same input together.

        ``changed(layers)`` gives tensors in place of the model's own, by their names, for layers that were
        yielded before: what comes after them runs with these.
        """
        done: list[str] = []
        for layers in self.units():
            groups = self._with_same_input(layers)
            if self._block is None:
                self._parameters = changed(done)
            for group in groups:
                yield group
                self._parameters |= changed(group)
                done += group

    def _with_same_input(self, layers: Sequence[str]) -> list[list[str]]:
        inputs: dict[str, list[Input]] = {}
        self.trial(layers, lambda name, x: inputs.setdefault(name, []).append(Input.of(x)))
        groups: dict[Any, list[str]] = {}
        for name, own in inputs.items():
            groups.setdefault(self._projection(name) or tuple(one.key for one in own), []).append(name)
        for name in layers:
            if name not in inputs:  # which other batches may run
                groups.setdefault(self._projection(name) or name, []).append(name)
        return list(groups.values())

    def _projection(self, name: str) -> str | None:
        """Return the projection of an expert's layer, whose experts are one group, or None."""
        projection = name.rpartition(".")[0]
        experts = self._model.get_submodule(projection.rpartition(".")[0])
        return projection if isinstance(experts, LinearExperts) else None

    def trial(
        self,
        layers: Sequence[str],
        note: Callable[[str, Tensor], None],
        parameters: Mapping[str, Tensor] | None = None,
        *,
        until: str | None = None,
    ) -> Any:
        """Run the unit on the first batch, with some parameters in place of its own; return its output.

        ``note(name, x)`` is called at each call of a layer. The first call of the layer ``until`` ends the
        run; there is no output then.
        """

        def tell(name: str, x: Tensor) -> None:
            note(name, x)
            if name == until:
                raise ForwardEnded

        with self._listening(layers, tell), contextlib.suppress(ForwardEnded):
            return next(self._results(self._block, parameters or {}))

    def visit(self, layers: Sequence[str], note: Callable[[str, Tensor, int, Tensor | None], None]) -> None:
        """Run the unit on all batches.

        ``note(name, x, number, keep)`` is called at each call of a layer: with its input, the number of the
        batch, and which of its tokens count, [sequences, tokens] of bools or None.
        """
        number = 0
        with self._listening(layers, lambda name, x: note(name, x, number, self._keep[number])):
            for current, _ in enumerate(self._results(self._block, self._parameters), 1):
                number = min(current, len(self._batches) - 1)

    def moments(self, group: Sequence[str]) -> Iterator[tuple[str, Moments]]:
        """Yield the layers of a group, or some of them, each with the moments of its inputs."""
        projection = self._projection(group[0]) if group else None
        if projection is not None:
            of_experts = self._moments_of_experts(projection)
            yield from ((name, checked_moments(name, of_experts.of(name))) for name in group)
        elif group:
            moments = self._moments_of(group[0])
            yield from ((name, checked_moments(name, moments)) for name in group)

    def _moments_of_experts(self, projection: str) -> ExpertMoments:
        """Return the moments of all experts of a projection."""
        experts, layers = map(self._model.get_submodule, (projection.rpartition(".")[0], projection))
        assert isinstance(experts, LinearExperts)
        found = ExpertMoments(self._device)

        def note(name: str, x: Tensor, number: int, keep: Tensor | None) -> None:
            if keep is not None and keep.numel() == experts.rows:
                keep = keep.reshape(-1)[experts.tokens]
            found.add(name, x, number, keep)

        self.visit([f"{projection}.{key}" for key, _ in layers.named_children()], note)
        return found

    def _moments_of(self, layer: str) -> Moments | None:
        """Return the moments of the inputs of a layer; None if nothing calls it."""
        found: list[Moments] = []
        dense: list[Tensor] = []
        number, in_dense = 0, False

        def note(name: str, x: Tensor) -> None:
            if in_dense:
                dense.append(x.clone())  # the model may write to it later
                return
            if not found:
                found.append(Moments(x.shape[-1], self._device, self._compare))
            found[0].add(x, dense.pop(0) if dense else None, number, self._keep[number])

        with self._listening([layer], note):
            changed = self._results(self._block, self._parameters)
            beside = self._results(self._block, {}, dense=True) if self._compare else None
            for current in range(len(self._batches)):
                number = current
                if beside is not None:
                    dense.clear()
                    in_dense = True
                    next(beside)
                    in_dense = False
                next(changed)
        return found[0] if found else None

    def outputs(self, parameters: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield what the whole model gives for each batch."""
        return self._results(None, parameters)

    def _listening(
        self, layers: Sequence[str], note: Callable[[str, Tensor], None]
    ) -> AbstractContextManager[None]:
        """Call `note` with the name and input of a layer at each of its calls."""

        def tell(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            note(name, args[0] if args else next(iter(kwargs.values())))

        return listening({name: self._model.get_submodule(name) for name in layers}, tell)

    @torch.no_grad()
    def _results(
        self, block: str | None, parameters: Mapping[str, Tensor], *, dense: bool = False
    ) -> Iterator[Any]:
        """Yield what a block, or the model, gives for each batch."""
        if block is not None:
            yield from (self._dense if dense else self._changed).results(block, parameters)
            return
        given: dict[Tensor, Tensor] = {
            self._model.get_parameter(name): tensor for name, tensor in parameters.items()
        }
        blocks, home = [self._model.get_submodule(name) for name in self._blocks], device_of(self._model)
        for batch in self._batches:
            with swapped(self._model, given), visiting(blocks, self._device, home):
                output = self._forward(self._model, batch)
            yield output


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a mapping as keywords, a tuple or list as arguments, anything else as the argument.

    Tensors are copies, which the model may write to, on the device of its first parameter.
    """
    return call_apart(model, batch)


def _kept_tokens(batch: Any) -> Tensor | None:
    """Return which tokens of a batch are not padding: bools [sequences, tokens]."""
    mask = mask_of(batch)
    return None if mask is None else mask != 0


def check_model(model: nn.Module) -> None:
    """Raise InvalidArgumentError where parameters have no data."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidArgumentError("model must not have parameters on the meta device: they have no weights")


def collected(batches: Iterable[Any]) -> list[Any]:
    """Return the batches as a list, which is not empty."""
    check_batches(batches)
    data = [checked_batch(batch) for batch in batches]
    if not data:
        raise InvalidArgumentError("batches must have at least one batch, got none")
    return data


def checked_moments(name: str, moments: Moments | None) -> Moments:
    """Return the moments of a layer's inputs, which are finite and not of no token."""
    if moments is None:
        raise InvalidArgumentError(f"batches must run layer {name!r}, or layers must leave it out")
    check_inputs(name, moments.weight(), moments.not_finite())
    return moments


def check_inputs(name: str, tokens: float, not_finite: int | None) -> None:
    """Raise InvalidArgumentError unless a layer meets tokens that count, all of them finite."""
    if not tokens:
        raise InvalidArgumentError(
            f"batches must have tokens at every layer, got none for layer {name!r} that attention_mask keeps"
        )
    if not_finite is not None:
        raise InvalidArgumentError(
            f"batches must be finite at every layer: batch {not_finite} (counted from 0) gives layer "
            f"{name!r} inputs with NaN or infinities"
        )


@contextlib.contextmanager
def naming_layer(name: str) -> Iterator[None]:
    """Add the name of a layer to errors."""
    try:
        yield
    except TileSparseError as error:
        raise type(error)(f"layer {name!r}: {error}") from error


def warn_of_few_tokens(model: nn.Module, tokens: Mapping[str, int]) -> None:
    """Warn of layers whose XᵀX cannot have full rank, with the tokens that they have met and need."""
    short: dict[tuple[int, int], list[str]] = {}
    for name, met in tokens.items():
        layer: Any = model.get_submodule(name)
        in_features = layer.in_features if hasattr(layer, "in_features") else dense_weight(layer).shape[1]
        needed = in_features + (layer.bias is not None)  # the mean takes one
        if met < needed:
            short.setdefault((met, needed), []).append(name)
    if short:
        texts = [f"{met} of {needed} at {listed(names)}" for (met, needed), names in short.items()]
        warn_user(
            "batches must give a layer at least as many tokens as it has inputs, and one more for a bias, or "
            f"its weights fit these tokens alone and its error is too small, got {'; '.join(texts[:MOST])}"
        )
