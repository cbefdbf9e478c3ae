"""Layers by their weights: a tensor [nnz, bn, bk] alone does not say of which matrix it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from .._arguments import shown
from .._libraries.hooks import adapt
from ..errors import InvalidArgumentError, UnsupportedError
from .tensors import is_sharded

_owners: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by ids of weights, perhaps former ones


def check_weight(layer: Any, weight: object) -> None:
    """Refuse a weight that another layer has, with another pattern, and None.

    Raises:
        InvalidArgumentError: see above. The layer is as it was.
    """
    if not isinstance(weight, Tensor):
        raise InvalidArgumentError(f"weight must be a Parameter [nnz, bn, bk], got {shown(weight)}")
    other: Any = _owners.get(id(weight))
    if other is not layer and hasattr(other, "pattern_if_any") and other._parameters.get("weight") is weight:
        mine, theirs = layer.pattern_if_any(), other.pattern_if_any()
        if mine is not None and theirs is not None and mine != theirs:
            raise InvalidArgumentError(
                "weight must not be that of a layer with another pattern, whose blocks lie elsewhere, got "
                f"{theirs} for {mine}; assign layer.pattern first"
            )


def note_owner(layer: nn.Module) -> None:
    """Have `torch.nn.init` know the layer by its weight."""
    weight = layer._parameters.get("weight")
    if weight is not None:
        _owners[id(weight)] = layer


def _owner_of(tensor: Tensor) -> Any:
    """Return the layer of a weight, or of its ``data``."""
    if tensor.dim() != 3:
        return None
    for reference in _owners.valuerefs():
        layer: Any = reference()
        weight = None if layer is None else layer._parameters.get("weight")
        if weight is tensor or _is_data_of(weight, tensor):
            return layer
    return None


def _is_data_of(weight: Tensor | None, tensor: Tensor) -> bool:
    if weight is None or weight.shape != tensor.shape or weight.is_meta or weight.device != tensor.device:
        return False
    return not is_sharded(weight) and not is_sharded(tensor) and weight.data_ptr() == tensor.data_ptr() != 0


def _with_fans(calculate: Callable[[Tensor], tuple[int, int]]) -> Callable[[Tensor], tuple[int, int]]:
    @wraps(calculate)
    def fans(tensor: Tensor) -> tuple[int, int]:
        layer = _owner_of(tensor)
        if layer is None:
            return calculate(tensor)
        out_features, in_features = layer.out_features, layer.in_features
        experts = getattr(layer, "experts", 1)
        kept = tensor.numel() if getattr(layer, "nm", None) is None else tensor.numel() // 2
        return max(1, round(kept / out_features)), max(1, round(kept / (in_features * experts)))

    return fans


def _refusing(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def refusing(initialise: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(initialise)
        def call(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if _owner_of(tensor) is not None:
                raise UnsupportedError(
                    f"torch.nn.init.{name} takes the kept blocks [nnz, bn, bk] for another kind of weight; "
                    "initialise an nn.Linear and convert it by BlockSparseLinear.from_linear"
                )
            return initialise(tensor, *args, **options)

        return call

    return refusing


adapt("torch", torch.nn.init, "_calculate_fan_in_and_fan_out", _with_fans)
for _name in ("orthogonal_", "dirac_"):
    adapt("torch", torch.nn.init, _name, _refusing(_name))
