"""Layers and norms whose parameters are multiplied by factors: of their rows, and of their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._names import names_of_modules
from ..matrix import BlockSparseMatrix
from ..nn.convert import dense_weight, is_conv1d, is_stored_otherwise
from ..nn.linear import BlockSparseLinear
from ..nn.tensors import is_sharded
from ..patch.modules import owners_of_parameters
from ..storage.registry import storage_of


def is_linear(module: Any) -> bool:
    """Return True for a linear layer whose weight is known, sparse or dense."""
    if type(module) is nn.Linear or is_conv1d(module):
        return not is_stored_otherwise(module.weight)
    return isinstance(module, BlockSparseLinear)


def is_norm(module: nn.Module) -> bool:
    """Return True for a module whose own parameters are a weight [features], and perhaps such a bias."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    return weight is not None and weight.dim() == 1 and own.keys() <= {"weight", "bias"}


def sizes_of(module: Any) -> tuple[int, int]:
    """Return (out_features, in_features) of a layer; of a norm both are its features."""
    if isinstance(module, BlockSparseLinear):
        return module.spec.shape
    if is_norm(module):
        return len(module.weight), len(module.weight)
    out_features, in_features = dense_weight(module).shape
    return out_features, in_features


def dense_of(layer: Any, device: torch.device) -> Tensor:
    """Return a float32 copy of W [out_features, in_features] on a device."""
    if isinstance(layer, BlockSparseLinear):
        return BlockSparseMatrix(layer.plain_values(), layer.pattern).to_dense().to(device, torch.float32)
    return dense_weight(layer).to(device, torch.float32, copy=True)


def scaled_parameters(
    module: Any, rows: Tensor | None = None, columns: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the parameters of a layer or norm, times factors, by their own names.

    Args:
        module: of `is_linear`, in plain storage, or `is_norm`.
        rows: factors of what it gives [out_features], or None.
        columns: factors of the columns of W [in_features], or None.
    """
    weight = module.weight.detach().clone()
    if isinstance(module, BlockSparseLinear):
        block_rows, block_columns = (places.to(weight.device) for places in module.pattern.block_indices())
        (bn, bk), own = module.block_shape, weight.dtype
        if rows is not None:
            weight *= rows.to(weight.device, own).view(-1, bn)[block_rows][:, :, None]
        if columns is not None:
            weight *= columns.to(weight.device, own).view(-1, bk)[block_columns][:, None, :]
    else:
        of_rows = weight.T if is_conv1d(module) else weight
        if rows is not None:
            of_rows *= rows.to(weight.device, weight.dtype).view(-1, *(1,) * (weight.dim() - 1))
        if columns is not None:
            of_rows *= columns.to(weight.device, weight.dtype)
    found = {"weight": weight}
    if rows is not None and getattr(module, "bias", None) is not None:
        found["bias"] = module.bias.detach() * rows.to(module.bias.device, module.bias.dtype)
    return found


def reasons_against_scaling(model: nn.Module, names: Sequence[str]) -> Mapping[str, str]:
    """Say of layers and norms why their parameters cannot be multiplied; those that can be are left out."""
    owners = owners_of_parameters(names_of_modules(model))
    found = {}
    for name in names:
        module = model.get_submodule(name)
        reason = _reason_against(module, owners)
        if reason is not None:
            found[name] = reason
    return found


def _reason_against(module: Any, owners: Mapping[nn.Parameter, Sequence[nn.Module]]) -> str | None:
    if "weight" not in module._parameters or hasattr(module, "parametrizations"):
        return "its weight is computed in every call"
    if isinstance(module, BlockSparseLinear) and not storage_of(module.storage).trainable:
        return f"its weight is stored as {module.storage!r}"
    for parameter in module.parameters(recurse=False):
        if is_sharded(parameter):
            return "its weight is sharded"
        if len(owners[parameter]) > 1:
            return "it shares a parameter with another module"
    return None
