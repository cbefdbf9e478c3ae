"""Loading a layer from a state dict: nothing is changed unless all of it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import Index, is_inside
from .._runtime.pattern_cache import update_of
from ..config import LayerSpec
from ..errors import InvalidArgumentError
from ..pattern import BlockPattern
from ..storage.formats import STORED_NAMES, forms_of, granularity_of, storage_of
from ..storage.traits import STORED_DTYPES
from .origin import PatternOrigin, checked_pattern
from .parameters import align, is_sharded
from .weight import INDEX_NAMES, StoredWeight, layer_index, make_room


def load(
    layer: StoredWeight,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    others: tuple[Any, ...],
    load: Callable[[], Any],
) -> None:
    """Check a layer's entries of a state dict, make room for them, and have PyTorch ``load`` them.

    ``others``: what `torch.nn.Module` passes on: metadata first, and the list of errors last.
    """
    noted, *_, errors = others
    own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    try:
        pattern, granularity = _checked(layer, own, noted)
        if pattern is not None:
            make_room(layer, pattern, own, granularity)
    except (ValueError, TypeError, RuntimeError) as error:
        errors.append(f"{prefix}{error}")
        for name in [name for name in state_dict if name.startswith(f"{prefix}parametrizations.")]:
            del state_dict[name]  # PyTorch's copy: what parametrizes the weight is not loaded, either
        return
    with nullcontext() if pattern is None or layer.slot.is_meta else update_of(layer_index(layer)):
        load()
    align(layer)  # what was assigned
    if pattern is not None and not layer.slot.is_meta:
        for name in INDEX_NAMES:  # those assigned may have another dtype
            if layer.get_buffer(name).dtype != torch.int32:
                layer._buffers[name] = getattr(pattern, name).to(layer.slot.device)
        layer._origin = PatternOrigin.loaded(layer_index(layer), copied=layer._origin.copied)


def _checked(
    layer: StoredWeight, state: Mapping[str, Any], noted: Mapping[str, Any]
) -> tuple[BlockPattern | None, str | None]:
    """Return the pattern of a saved layer, None without one, and what has a scale of its own; all fits."""
    for name in ("weight", "bias", *INDEX_NAMES, *STORED_NAMES):
        if name in state and not isinstance(state[name], Tensor):
            raise InvalidArgumentError(f"{name} must be a tensor, got {type(state[name]).__name__}")
    _check_activations(layer, state, noted)
    # With parametrizations and the like the weight has other names.
    there = [name for name in state if name.startswith(("weight", "parametrizations.weight."))]
    there += [name for name in INDEX_NAMES if name in state]
    spec, pattern = layer.spec, None
    if there:
        pattern = _checked_pattern(layer, state, there[0])
        granularity = granularity_of(state.get("scales", layer.scales), layer.activations)
        spec = replace(spec, nnz=pattern.nnz, block_shape=pattern.block_shape, granularity=granularity)
        if layer._shard is not None:
            layer._shard.check(pattern)
    _check_shapes(layer, state, spec)
    return pattern, spec.granularity


def _checked_pattern(layer: StoredWeight, state: Mapping[str, Any], there: str) -> BlockPattern:
    for name in INDEX_NAMES:
        if name not in state:
            raise InvalidArgumentError(
                f"{name} is missing, but {there} is there; a weight is loaded with its pattern"
            )
    weight, spec = state.get("weight"), layer.spec
    if weight is not None and weight.dim() != 3:
        raise InvalidArgumentError(f"weight must be [nnz, bn, bk], got shape {tuple(weight.shape)}")
    _check_stored(layer, state)
    storage, block_shape = storage_of(spec.storage), spec.block_shape
    if weight is not None:
        block_shape = storage.block_shape(weight, spec.nm)
    crow, col, slot = (state[name] for name in INDEX_NAMES)
    pattern = checked_pattern(Index(crow, col, slot, spec.shape, block_shape))
    shape, own = (pattern.nnz, *pattern.block_shape), spec.values_shape
    if shape != own and (weight is None or type(layer._parameters.get("weight")) is not nn.Parameter):
        raise InvalidArgumentError(
            f"col_indices must have {own[0]} blocks of {own[1:]}, because the weight is not a plain "
            f"parameter whose shape can change, got {shape[0]} of {shape[1:]}"
        )
    return pattern


def _check_stored(layer: StoredWeight, state: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError unless the state is stored as the layer is."""
    own = f"the layer has nm={layer.nm} and storage {layer.storage!r}"
    for name in STORED_NAMES:
        if (name in state) != (layer._buffers[name] is not None):
            given = "is there" if name in state else "is missing"
            raise InvalidArgumentError(
                f"{name} {given}, but {own}; call to_storage or set_nm to have them alike"
            )
    weight = state.get("weight")
    dtypes = {layer.weight.dtype if weight is None else weight.dtype, layer.weight.dtype}
    if len(dtypes) > 1 and not dtypes.isdisjoint(STORED_DTYPES):
        raise InvalidArgumentError(f"weight must be {layer.weight.dtype}, got {state['weight'].dtype}; {own}")


def _check_activations(layer: StoredWeight, state: Mapping[str, Any], noted: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError unless scales are of features where the layer's are, and only there.

    A state dict without metadata tells by their number alone.
    """
    scales, mine = state.get("scales"), layer.activations
    if scales is None or layer.scales is None:
        return
    of_features = tuple(scales.shape) == (layer.out_features,)
    if mine is not None and is_inside(layer.scales):
        of_features = is_inside(scales) and scales.shape[1] == 1
    if mine is None:  # those of blocks may be as many
        of_features = of_features and len(state.get("col_indices", ())) != layer.out_features
    saved = noted.get("activations") if "version" in noted else mine
    if of_features != (mine is not None) or saved != mine:
        wanted = "[nnz, bn] or [nnz]" if mine is None else "[out_features]"
        wanted = "[nnz, 1]" if mine is not None and is_inside(layer.scales) else wanted
        raise InvalidArgumentError(
            f"scales must be {wanted} of a layer with activations={mine!r}, got shape "
            f"{tuple(scales.shape)} and activations={saved!r}; call to_storage to have them alike"
        )


def _check_shapes(layer: StoredWeight, state: Mapping[str, Any], spec: LayerSpec) -> None:
    shapes = {name: shape for name, (shape, _) in forms_of(spec).items()}
    for name, expected in (*shapes.items(), ("bias", (layer.out_features,))):
        if name in state and state[name].shape != expected:
            raise InvalidArgumentError(f"{name} must have shape {expected}, got {tuple(state[name].shape)}")
        mine = layer._parameters.get(name, layer._buffers.get(name))
        if name in state and mine is not None and is_sharded(mine) and not is_sharded(state[name]):
            raise InvalidArgumentError(
                f"{name} must be a DTensor, because the layer is sharded, got a plain tensor; use "
                "set_model_state_dict of torch.distributed.checkpoint"
            )
