"""Dense layers in place of block-sparse ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..._listeners import check_can_change, layers_changed
from ...errors import UnsupportedError
from ...model.modules import follow, set_submodule, share_hooks
from ...nn.dense import is_conv1d
from ...nn.experts import BlockSparseExperts, projections_of
from ...nn.linear import BlockSparseLinear
from ...storage.formats import storage_of


def to_dense(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Gives a model of Transformers its dense layers back, zero where no block was kept, in place.

    ``model.dequantize()`` does the same where layers are not stored plain; a model with plain layers alone
    is not quantised to Transformers, which refuses there.

    Args:
        model: a ``PreTrainedModel``.
        dtype: of the whole model then; None leaves it.

    Returns:
        The model.

    Raises:
        UnsupportedError: weights are offloaded, layers have adapters, or `follow` refuses the model. It is as
            it was.
    """
    check_can_change(model)
    layers = list(sparse_layers(model))
    for name, layer in layers:
        if layer.weight.is_meta:
            raise UnsupportedError(f"layer {name!r}: its weight is offloaded; load the model without")
        if name.endswith(".base_layer"):
            raise UnsupportedError(f"layer {name!r}: has an adapter; merge or remove it first")
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    there = dict(twin.named_modules(remove_duplicate=False))
    dense: dict[nn.Module, Any] = {}
    for name, experts in model.named_modules():
        if isinstance(experts, BlockSparseExperts):
            dense[experts] = _as_dense_experts(name, experts, there.get(name))
    inside = {layer for experts in dense for layer in experts.children()}
    dense |= {layer: _as_dense(layer, there.get(name)) for name, layer in layers if layer not in inside}
    names = [
        (name, module) for name, module in model.named_modules(remove_duplicate=False) if module in dense
    ]
    for name, layer in names:  # a layer that the model shares has several
        share_hooks(layer, dense[layer])
        set_submodule(model, name, dense[layer])
    follow(model, dense)
    layers_changed(model)
    return model if dtype is None else model.to(dtype)


def _as_dense_experts(name: str, experts: BlockSparseExperts, there: Any) -> nn.Module:
    """The experts that a model has there, with these weights."""
    if projections_of(there) is None:
        raise UnsupportedError(f"experts {name!r}: the model has no dense experts there")
    for own, tensor in experts.to_dense().items():
        setattr(there, own, nn.Parameter(tensor))
    for own, child in experts.named_children():
        if own not in experts.projections():
            there.add_module(own, child)
    there.config = experts.config
    return there.train(experts.training)  # type: ignore[no-any-return]


def _as_dense(layer: BlockSparseLinear, there: Any) -> Any:
    """The dense layer of the kind that a model has there, which is None for layers put in by hand."""
    linear = layer.to_linear()
    if not storage_of(
        layer.storage
    ).trainable:  # whose values cannot be trained, but those of dense layers can
        linear.weight.requires_grad_(True)
    if not is_conv1d(there) and (type(there) is nn.Linear or not isinstance(there, nn.Linear)):
        return linear
    weight = linear.weight.detach()
    weight = weight.T.contiguous() if is_conv1d(there) else weight
    there.weight = nn.Parameter(weight, linear.weight.requires_grad)
    there.bias = linear.bias
    there.train(linear.training)
    return there


def sparse_layers(model: nn.Module) -> Iterator[tuple[str, BlockSparseLinear]]:
    """Yield the block-sparse layers of a model with their names."""
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear):
            yield name, module


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names."""
    yield from model.named_parameters()
    yield from model.named_buffers()
