"""Layers that are moved or loaded, or get another number of blocks; models in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._checks import Index, is_inside
from .._runtime.lookup import update_of
from .._runtime.private import with_normal_tensors
from ..config import LayerSpec
from ..errors import InvalidArgumentError
from ..pattern.block_pattern import BlockPattern
from ..pattern.indices import index_of
from ..storage.base import STORED_NAMES
from ..storage.registry import forms_of, storage_of
from ..storage.traits import STORED_DTYPES
from .origin import PatternOrigin, Source, checked_pattern
from .tensors import INDEX_NAMES, align, is_sharded, resize, with_contents, zeros_like

if TYPE_CHECKING:
    from .stored import StoredWeight


def move(layer: StoredWeight, fn: Callable[[Tensor], Tensor], apply: Callable[[], Any]) -> None:
    """Move a layer's tensors by ``fn``, which ``apply`` has `torch.nn.Module` do; contents stay exact."""
    before: dict[str, Any] = {name: layer._buffers[name] for name in (*INDEX_NAMES, *STORED_NAMES)}
    quantized = None if storage_of(layer.storage).dtype is None else layer.weight.detach()
    if quantized is not None:
        dense = torch.empty(0, dtype=layer.spec.dtype, device=quantized.device)
        layer.update_spec(dtype=fn(dense).dtype)
    apply()
    for name, old in before.items():
        new: Any = layer._buffers[name]
        # to_empty leaves them uninitialised, type() may round them.
        if new is not old:
            layer._buffers[name] = with_contents(new, old)
    if quantized is not None and layer.weight.dtype != quantized.dtype:
        kept = with_contents(layer.weight.detach(), quantized)
        if is_sharded(kept):  # whose dtype cannot be set
            layer.weight = nn.Parameter(kept, requires_grad=False)
        else:
            layer.weight.data = kept
    empty = before["slot"].is_meta or layer.slot.is_meta
    source, copied = Source.MISSING if empty else layer.origin.source, layer.origin.copied
    layer.origin = PatternOrigin(source, layer.index(), copied=copied)


def note_activations(layer: StoredWeight, destination: Any, prefix: str) -> None:
    """Note 8-bit activations in the metadata that PyTorch keeps beside a state dict."""
    noted = getattr(destination, "_metadata", {}).get(prefix.removesuffix("."))
    if noted is not None and layer.activations is not None:
        noted["activations"] = layer.activations


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
        pattern = _checked(layer, own, noted)
        if pattern is not None:
            make_room(layer, pattern, own, _scales(layer, own))
    except (ValueError, TypeError, RuntimeError) as error:
        errors.append(f"{prefix}{error}")
        for name in [name for name in state_dict if name.startswith(f"{prefix}parametrizations.")]:
            del state_dict[name]  # PyTorch's copy: what parametrizes the weight is not loaded, either
        return
    with nullcontext() if pattern is None or layer.slot.is_meta else update_of(layer.index()):
        load()
    align(layer)  # what was assigned
    if pattern is not None and not layer.slot.is_meta:
        for name in INDEX_NAMES:  # those assigned may have another dtype
            if layer.get_buffer(name).dtype != torch.int32:
                layer._buffers[name] = getattr(pattern, name).to(layer.slot.device)
        layer.origin = PatternOrigin.loaded(layer.index(), copied=layer.origin.copied)


def _checked(layer: StoredWeight, state: Mapping[str, Any], noted: Mapping[str, Any]) -> BlockPattern | None:
    """Return the pattern of a saved layer, None without one, once all that is saved fits together."""
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
        spec = replace(spec, nnz=pattern.nnz, block_shape=pattern.block_shape, scales=_scales(layer, state))
        if layer.shard is not None:
            layer.shard.check(pattern)
    _check_shapes(layer, state, spec)
    return pattern


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


def _scales(layer: StoredWeight, state: Mapping[str, Any]) -> str | None:
    """Return what has a scale of its own in a saved layer."""
    if layer.activations is not None:
        return layer.spec.scales
    return storage_of(layer.storage).scales_of(state.get("scales", layer.scales))


@with_normal_tensors
def make_room(
    layer: StoredWeight, pattern: BlockPattern, contents: Mapping[str, Tensor], scales: str | None = None
) -> None:
    """Give the weight, the same Parameter, and the buffers the sizes that another pattern needs.

    Other threads may be calling the layer: tensors are filled before they are put in their places. The weight
    comes first and the pattern last, so that a call which meets tensors of both finds that they do not fit.

    Args:
        layer: keeps its storage.
        pattern: has another number of blocks, or other ones, perhaps.
        contents: what tensors of another size are filled with, by name; others are zeros.
        scales: as of `LayerSpec`; None keeps them.
    """
    before = layer.spec
    spec = replace(before, nnz=pattern.nnz, block_shape=pattern.block_shape, scales=scales or before.scales)
    resized = before.values_shape != spec.values_shape
    made: dict[str, Tensor] = {}
    for name, (shape, _) in forms_of(spec).items():
        tensor: Tensor = getattr(layer, name)
        if resized or tensor.shape != shape:
            made[name] = tensor.new_empty(shape) if name == "weight" else zeros_like(tensor, shape)
    if resized:  # all of the pattern, so that graphs of autograd keep the one that they were made with
        indices = {name: getattr(pattern, name) for name in INDEX_NAMES}
        made |= {name: layer.get_buffer(name).new_empty(given.shape) for name, given in indices.items()}
        contents = {**contents, **indices}
    for name, tensor in made.items():
        if name in contents and not contents[name].is_meta:
            tensor.copy_(contents[name])
    if "weight" in made:
        resize(layer.weight, made.pop("weight"))
    layer.update_spec(block_shape=spec.block_shape, nnz=spec.nnz)
    layer._buffers.update(made)


@torch.no_grad()
def keep_blocks(layer: StoredWeight, slots: Tensor) -> None:
    """Drop all blocks but those at ``slots`` [n], ascending, which get the slots 0 to n - 1.

    The weight stays the same Parameter, and its gradient goes with it; the states that an optimizer has
    of it are the caller's. On a CUDA device the host does not wait. All of the pattern's tensors are new,
    so that a graph of autograd made before keeps the pattern it was made with, and refuses to go on.
    """
    index, gradient = layer.index(), layer.weight.grad
    rows, columns = layer.pattern.block_indices()
    kept = index_of((rows * layer.pattern.grid[1] + columns)[slots], index)
    resize(layer.weight, layer.weight.detach()[slots])
    if gradient is not None:
        layer.weight.grad = gradient[slots]
    if layer.mask is not None:
        layer._buffers["mask"] = layer.mask[slots]
    for name in INDEX_NAMES:
        layer._buffers[name] = getattr(kept, name)
    layer.origin = layer.origin.updated(layer.index())


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode, and afterwards every module back into its own."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
