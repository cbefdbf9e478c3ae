"""The layers of a model that something in this package trains, and what is checked of them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._checks import check_module
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.linear import BlockSparseLinear
from ..storage.formats import storage_of

Layers: TypeAlias = Mapping[str, BlockSparseLinear]
_SHARED = "model: layers {!r} and {!r} share one weight, but not their patterns"


def sparse_layers(model: nn.Module) -> dict[str, BlockSparseLinear]:
    """Return the block-sparse layers of a model by qualified name; one with several has the first."""
    check_module(model)
    return {name: module for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)}


class Removable:
    """Base of schedules that end when they are removed."""

    _removed = False

    def _check_not_removed(self) -> None:
        if self._removed:
            raise InvalidArgumentError("schedule must not be used after remove(); make a new one")


class Hooked(Removable):
    """Base of what has hooks, which copies would lose in silence."""

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            f"{type(self).__name__}: it has hooks and cannot be copied or pickled; make another one, and "
            "load the state_dict() into it if there is one"
        )


def refuse_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise UnsupportedError where a step gets a closure: before it there are no gradients to read."""
    if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
        raise UnsupportedError("optimizer must step without a closure, before which no gradients are there")


def some_sparse_layers(model: nn.Module) -> dict[str, BlockSparseLinear]:
    """Return the block-sparse layers of a model, or raise InvalidArgumentError if there are none."""
    layers = sparse_layers(model)
    if not layers:
        raise InvalidArgumentError("model must have a BlockSparseLinear, got none")
    return layers


def check_trainable(layers: Layers, *, frozen: bool = False) -> None:
    """Check that the blocks of these layers can be told apart, written to and removed."""
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        weight = layer._parameters.get("weight")
        if weight is None:
            raise UnsupportedError(
                f"model: layer {name!r}: the weight must be a parameter of its own, but is parametrized"
            )
        check_plain_weight(name, weight, "blocks of sharded weights stay where they are")
        check_plain_storage(name, layer)
        if weight.is_meta:
            raise InvalidArgumentError(f"model: layer {name!r}: its weight is on the meta device")
        if not frozen and not weight.requires_grad:
            raise InvalidArgumentError(f"model: layer {name!r}: its weight is frozen; leave the layer out")
        if id(weight) in owners:
            raise InvalidArgumentError(_SHARED.format(owners[id(weight)], name))
        owners[id(weight)] = name


def check_plain_storage(name: str, layer: BlockSparseLinear) -> None:
    if not storage_of(layer.storage).trainable:
        raise UnsupportedError(
            f"model: layer {name!r}: the storage must be 'plain', got {layer.storage!r}; "
            "call to_storage('plain')"
        )


def check_plain_weight(name: str, weight: Tensor, otherwise: str) -> None:
    if type(weight.detach()) is not Tensor:
        raise UnsupportedError(
            f"model: layer {name!r}: the weight must be a plain tensor, got "
            f"{type(weight.detach()).__name__}; {otherwise}"
        )


def checked_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer, or that which it wraps: the wrappers of Accelerate have no hooks of their own."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    inner = getattr(optimizer, "optimizer", None)
    return checked_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def check_optimized(layers: Layers, optimizer: torch.optim.Optimizer) -> None:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, layer in layers.items():
        if id(layer.weight) not in known:
            has_master = getattr(layer.weight, "main_grad", None) is not None
            why = "; another one is trained in its place, which nothing here can follow" if has_master else ""
            raise InvalidArgumentError(
                f"optimizer: the weight of layer {name!r} is not among its parameters{why}"
            )


def rates_of(
    optimizer: torch.optim.Optimizer, weights: Container[int]
) -> Iterator[tuple[Tensor, float | Tensor]]:
    """Yield parameters, given by their ids, with their learning rates; 0 in a step that is left out."""
    overflow = getattr(optimizer, "found_inf", None)  # GradScaler leaves it for fused optimizers
    for group in optimizer.param_groups:
        for weight in (one for one in group["params"] if id(one) in weights):
            counts = 1 if overflow is None else overflow.to(weight.device, non_blocking=True) == 0
            yield weight, group["lr"] * counts


def gradient_of(name: str, layer: BlockSparseLinear) -> Tensor | None:
    """Return the gradient of a layer's weight that its optimizer reads; None without one."""
    weight: Any = layer.weight
    if weight.grad is None and getattr(weight, "main_grad", None) is not None:
        raise UnsupportedError(
            f"model: layer {name!r}: the gradient must be in weight.grad, got one in weight.main_grad alone"
        )
    return layer.weight.grad


def check_keys(name: str, given: object, keys: Collection[str]) -> None:
    """Raise InvalidArgumentError unless the argument is a mapping with exactly these keys."""
    found = list(given) if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or set(given) != set(keys):
        raise InvalidArgumentError(f"{name} must be a mapping with the keys {list(keys)}, got {found!r}")


def precision_of(weight: Tensor) -> torch.dtype:
    """Return the dtype in which scores and norms are summed: float32, or float64 for float64."""
    return torch.promote_types(weight.dtype, torch.float32)
