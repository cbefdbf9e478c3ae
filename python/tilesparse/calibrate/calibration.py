"""Moments of the inputs of layers on calibration data, gathered block by block of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .._reports import MOST, listed, warn_user
from ..errors import InvalidArgumentError, TileSparseError
from ..nn.dense import dense_weight
from .experts import ExpertMoments, LinearExperts, Place
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
Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]


class Unit(NamedTuple):
    """A part of the model whose layers are pruned together: a block of a stack, or the model itself."""

    number: int | None  # of the block, or None for the model
    layers: list[str]  # names of layers in it


class Calibration:
    """Calibration data on their way through a model, of which nothing changes.

    Where the model has a stack of blocks, each of which takes what the one before gives, the data wait before
    the first block and go on block by block. Everything else runs with the model as a whole.

    Methods take the next unit and names of layers in it. ``parameters`` are tensors in place of the model's
    own, by their names.

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
        self._layers, self._compare = layers, compare
        self._keep = [moved(_kept_tokens(batch), device) for batch in batches]
        self.stack: str | None = None
        self._blocks: list[str] = []
        for stack in stacks(model, layers):
            container = model.get_submodule(stack)
            blocks = [f"{stack}.{key}".lstrip(".") for key, _ in container.named_children()]
            stream = Stream(model, blocks, batches, forward, device, keep=device)
            if stream.is_chain and stream.order == blocks:
                self.stack, self._blocks = stack, blocks
                self._pruned, self._dense = stream, stream.fork()
                break

    def units(self) -> list[Unit]:
        """Return the units to prune, in order; each is passed before the next is looked at."""
        inside = [Unit(number, []) for number in range(len(self._blocks))]
        outside = Unit(None, [])
        homes: dict[nn.Module, list[Unit]] = {}
        for unit, block in zip(inside, self._blocks, strict=True):
            for module in self._model.get_submodule(block).modules():
                homes.setdefault(module, []).append(unit)
        for name in self._layers:
            own = homes.get(self._model.get_submodule(name), [])
            (own[0] if len(own) == 1 else outside).layers.append(name)
        return [*inside, outside] if outside.layers else inside

    def groups(self, unit: Unit) -> list[list[str]]:
        """Return the layers of a unit in the order in which they run, those with the same input together."""
        inputs: dict[str, list[Input]] = {}
        self.trial(unit, unit.layers, lambda name, x: inputs.setdefault(name, []).append(Input.of(x)))
        groups: dict[Any, list[str]] = {}
        for name, own in inputs.items():
            groups.setdefault(self._projection(name) or tuple(one.key for one in own), []).append(name)
        for name in unit.layers:
            if name not in inputs:  # which other batches may run
                groups.setdefault(self._projection(name) or name, []).append(name)
        return list(groups.values())

    def _projection(self, name: str) -> tuple[str, str] | None:
        """Return the experts and the projection of a layer, which are pruned together, or None."""
        parent = self._model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
        return Place.of(name)[:2] if isinstance(parent, LinearExperts) else None

    def moments_of_experts(
        self, unit: Unit, layer: str, parameters: Mapping[str, Tensor]
    ) -> ExpertMoments | None:
        """Return the moments of all experts of a layer's projection, None for a layer of another kind."""
        projection = self._projection(layer)
        if projection is None:
            return None
        experts = self._model.get_submodule(projection[0])
        assert isinstance(experts, LinearExperts)
        found = ExpertMoments(self._device)

        def note(name: str, x: Tensor, number: int, keep: Tensor | None) -> None:
            if keep is not None and keep.numel() == experts.rows:
                keep = keep.reshape(-1)[experts.tokens]
            found.add(name, x, number, keep)

        prefix = ".".join(projection)
        names = [f"{prefix}.{key}" for key, _ in self._model.get_submodule(prefix).named_children()]
        self.visit(unit, names, note, parameters)
        return found

    def trial(
        self,
        unit: Unit,
        layers: Sequence[str],
        note: Callable[[str, Tensor], None],
        parameters: Mapping[str, Tensor] | None = None,
        *,
        until: str | None = None,
    ) -> Any:
        """Run the next unit on the first batch; return its output.

        ``note(name, x)`` is called at each call of a layer. The first call of the layer ``until`` ends the
        run; there is no output then.
        """

        def tell(name: str, x: Tensor) -> None:
            note(name, x)
            if name == until:
                raise ForwardEnded

        with self._listening(layers, tell), contextlib.suppress(ForwardEnded):
            return next(self._results(unit, parameters))

    def visit(
        self,
        unit: Unit,
        layers: Sequence[str],
        note: Callable[[str, Tensor, int, Tensor | None], None],
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Run the next unit on all batches.

        ``note(name, x, number, keep)`` is called at each call of a layer: with its input, the number of the
        batch, and which of its tokens count, [sequences, tokens] of bools or None.
        """
        number = 0
        with self._listening(layers, lambda name, x: note(name, x, number, self._keep[number])):
            for current, _ in enumerate(self._results(unit, parameters), 1):
                number = min(current, len(self._batches) - 1)

    def moments(self, unit: Unit, layer: str, parameters: Mapping[str, Tensor]) -> Moments | None:
        """Return the moments of the inputs of a layer, and so of its group; None if nothing calls it."""
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
            pruned = self._results(unit, parameters)
            beside = self._results(unit, dense=True) if self._compare else None
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
        """Move the data on behind a unit."""
        if unit.number is None:
            return
        self._pruned.advance(self._blocks[unit.number], parameters)
        if self._compare:
            self._dense.advance(self._blocks[unit.number])

    def outputs(self, parameters: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield what the whole model gives for each batch."""
        return self._results(Unit(None, []), parameters)

    def _listening(
        self, layers: Sequence[str], note: Callable[[str, Tensor], None]
    ) -> AbstractContextManager[None]:
        """Call `note` with the name and input of a layer at each of its calls."""

        def tell(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            note(name, args[0] if args else next(iter(kwargs.values())))

        return listening({name: self._model.get_submodule(name) for name in layers}, tell)

    @torch.no_grad()
    def _results(
        self, unit: Unit, parameters: Mapping[str, Tensor] | None = None, *, dense: bool = False
    ) -> Iterator[Any]:
        """Yield what a unit gives for each batch."""
        if unit.number is not None:
            stream = self._dense if dense else self._pruned
            yield from stream.results(self._blocks[unit.number], parameters)
            return
        given: dict[Tensor, Tensor] = {
            self._model.get_parameter(name): tensor for name, tensor in (parameters or {}).items()
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


def own_loss(output: Any) -> Tensor:
    """Return the ``loss`` of a model's output."""
    value = getattr(output, "loss", None)
    if not isinstance(value, Tensor):
        raise InvalidArgumentError(
            "loss must be given: the model gives none with these batches; Transformers' models do where a "
            "batch has labels"
        )
    return value


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
