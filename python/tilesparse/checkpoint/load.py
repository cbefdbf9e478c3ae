"""Loading a checkpoint into a model: everything is read and checked before the model changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._checks import DTYPES, Index, checked_device
from .._listeners import check_can_change, layers_changed
from .._runtime.tensor_files import StoredTensor, few, in_threads, named, read_tensor
from ..errors import CheckpointError, InvalidArgumentError
from ..nn.experts import BlockSparseExperts
from ..nn.linear import BlockSparseLinear
from ..nn.origin import checked_pattern
from ..nn.tensors import INDEX_NAMES
from .building import Model, built
from .files import CONFIG, read_headers
from .manifest import read_section
from .names import checked_folder, joined, own_tensors
from .prepare import Replacement, install, replacements_of


class _Place(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    owner: nn.Module  # the layer that is to be installed, or a module of the model
    attribute: str
    tensor: Tensor  # what is there now
    device: torch.device  # where the new one goes


@checked
def load(
    model_or_class: Model | Callable[[], Model],
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """Loads a checkpoint that `save`, or Transformers with this package, has written.

    Layers become those of the checkpoint, whatever their density, block shape and storage were: see
    `prepare`. Everything is read and checked before the model is changed, and on an error it is as it was.
    All parameters are new ones of the same ``requires_grad``: build optimizers afterwards.

    Args:
        model_or_class: a model, on the meta device or not; or what makes one when it is called without
            arguments, whose parameters are on the meta device then, so that no other weights ever exist.
        path: of the folder.
        device: of all tensors; None leaves each where the model has it, and on the CPU if that is nowhere.
        dtype: what floating tensors are cast to, but for values in 8 bits and scales; None keeps those of the
            checkpoint.

    Returns:
        The model.

    Raises:
        CheckpointNotFoundError: a file is missing.
        CheckpointError: the checkpoint is damaged, newer than this library, or does not fit the model.
        InvalidArgumentError: another argument is wrong.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype must be one of {list(DTYPES)} or None, got {dtype}")
    folder = checked_folder(path)
    forms, ties, files = read_section(folder)
    stored = read_headers(folder, files)
    model = built(model_or_class)
    check_can_change(model)
    with named(CONFIG):
        replacements = replacements_of(model, forms)
    device = None if device is None else checked_device(device)
    places = _places(model, replacements, device)
    _check_buffers(model, places)
    sources, doubles = _sources(places, stored, ties)
    _check_forms(places, sources, stored)
    _check_doubles(doubles)
    contents = _read(replacements, places, sources, stored, dtype)
    moved = _other_buffers(model, places, contents, device)
    if dtype is not None:
        for replacement in replacements:
            for layer in replacement.layers().values():
                layer.update_spec(dtype=dtype)
    install(model, replacements)
    for name, place in places.items():
        setattr(place.owner, place.attribute, contents[name])
    for owner, attribute, buffer in moved:
        setattr(owner, attribute, buffer)
    for replacement in replacements:
        for name in replacement.layers():
            installed = model.get_submodule(name)
            assert isinstance(installed, BlockSparseLinear)
            installed.declare_shared()
    layers_changed(model)
    return model


def _places(
    model: nn.Module, replacements: Iterable[Replacement], device: torch.device | None
) -> dict[str, _Place]:
    """Where the tensors go, by all their names, once the layers are replaced."""
    layers = {replacement.module: replacement.new for replacement in replacements}
    places = {}
    for prefix, owner, attribute, tensor, module in _tensors(model, layers):
        name = joined(prefix, attribute)
        if type(tensor) not in (Tensor, nn.Parameter):
            raise CheckpointError(
                f"model: {name!r} must be a plain tensor, got {type(tensor).__name__}; load before a "
                f"model is sharded or converted"
            )
        replaced = (
            module.parameters(recurse=False) if isinstance(layers.get(module), BlockSparseExperts) else ()
        )
        for there_now in (getattr(module, attribute, None), *replaced):
            _check_hooks(name, there_now)
        before = tensor if owner is module else next(module.parameters(recurse=False))
        there = torch.device("cpu") if before.is_meta else before.device
        places[name] = _Place(owner, attribute, tensor, device or there)
    return places


def _tensors(
    model: nn.Module, new: Mapping[nn.Module, nn.Module]
) -> Iterator[tuple[str, nn.Module, str, Tensor, nn.Module]]:
    """Yield owner's name, owner, attribute and tensor once modules are replaced, and the module before."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        owner = new.get(module, module)
        owners = {prefix: owner}
        if isinstance(owner, BlockSparseExperts) and owner is not module:
            owners = {joined(prefix, own): layer for own, layer in owner.projections().items()}
        for name, one in owners.items():
            for attribute, tensor in own_tensors(one):
                yield name, one, attribute, tensor, module


def _check_hooks(name: str, tensor: object) -> None:
    if isinstance(tensor, nn.Parameter) and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
        raise CheckpointError(
            f"model: {name!r}: a hook of a parameter cannot move to the new one; remove it first"
        )


def _non_persistent(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Buffers that are not saved under these names: name, owner, attribute and tensor."""
    for prefix, module in model.named_modules():
        for attribute in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(attribute)
            if buffer is not None:
                yield joined(prefix, attribute), module, attribute, buffer


def _check_buffers(model: nn.Module, places: Mapping[str, _Place]) -> None:
    """That those which no checkpoint has are not empty."""
    saved = {place.tensor for place in places.values()}
    empty = [name for name, _, _, buffer in _non_persistent(model) if buffer.is_meta and buffer not in saved]
    if empty:
        raise CheckpointError(
            f"model: {few(empty)}: buffers without contents, which no checkpoint has; give load what makes "
            f"the model, whose buffers have contents then, in place of a model on the meta device"
        )


def _other_buffers(
    model: nn.Module,
    places: Mapping[str, _Place],
    contents: Mapping[str, Tensor],
    device: torch.device | None,
) -> list[tuple[nn.Module, str, Tensor]]:
    """What becomes of buffers that are not saved: one that is saved under another name stays the same."""
    new = {place.tensor: contents[name] for name, place in places.items()}
    return [
        (owner, attribute, new[buffer] if buffer in new else buffer.to(device))
        for _, owner, attribute, buffer in _non_persistent(model)
    ]


def _sources(
    places: Mapping[str, _Place], stored: Mapping[str, StoredTensor], ties: Mapping[str, str]
) -> tuple[dict[str, str], list[tuple[StoredTensor, StoredTensor]]]:
    """Under which name each tensor of the model is stored, and pairs that are one tensor there."""
    if wrong := [name for name, other in ties.items() if name in stored or other not in stored]:
        raise CheckpointError(f"{CONFIG}: ties: {few(wrong)} must be another name for a stored tensor")
    names: dict[Tensor, list[str]] = {}  # of each tensor, by identity
    for name, place in places.items():
        names.setdefault(place.tensor, []).append(name)
    sources: dict[str, str] = {}
    doubles: list[tuple[StoredTensor, StoredTensor]] = []
    missing, used = [], set()
    for aliases in names.values():
        found = [ties.get(name, name) for name in aliases]
        found = [name for name in dict.fromkeys(found) if name in stored]
        if not found:
            missing.append(aliases[0])
            continue
        doubles += [(stored[found[0]], stored[other]) for other in found[1:]]
        used.update(found)
        sources.update(dict.fromkeys(aliases, found[0]))
    for others, text in (
        (missing, "missing"),
        ([*stored.keys() - used, *ties.keys() - places.keys()], "not in the model"),
    ):
        if others:
            raise CheckpointError(f"tensors: {few(sorted(others))}: {text}")
    return sources, doubles


def _check_forms(
    places: Mapping[str, _Place], sources: Mapping[str, str], stored: Mapping[str, StoredTensor]
) -> None:
    """That what is stored has the shapes and dtypes that the layers have."""
    for name, place in places.items():
        source, (shape, dtype) = stored[sources[name]], (tuple(place.tensor.shape), place.tensor.dtype)
        allowed: tuple[torch.dtype, ...] = (dtype,)
        if isinstance(place.owner, BlockSparseLinear) and place.attribute != "bias":
            allowed = (torch.int32, torch.int64) if place.attribute in INDEX_NAMES else allowed
        elif dtype in DTYPES:
            allowed = tuple(DTYPES)
        if source.shape != shape or source.dtype not in allowed:
            raise CheckpointError(
                f"{source.file.name}: {name!r} must have shape {shape} of {' or '.join(map(str, allowed))}, "
                f"got {source.shape} of {source.dtype}"
            )


def _check_doubles(doubles: Iterable[tuple[StoredTensor, StoredTensor]]) -> None:
    for first, other in doubles:
        if (first.shape, first.dtype) == (other.shape, other.dtype):
            bits = (read_tensor(stored).view(-1).view(torch.uint8) for stored in (first, other))
            if torch.equal(*bits):
                continue
        raise CheckpointError(
            f"{other.file.name}: {other.name!r} is another tensor than {first.name!r}, but the same in the "
            f"model"
        )


def _read(
    replacements: Iterable[Replacement],
    places: Mapping[str, _Place],
    sources: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """The new tensors of the model by their names; what is one there or in the checkpoint is one."""
    arrays: dict[str, Tensor] = {}
    for replacement in replacements:
        for name, layer in replacement.layers().items():
            arrays |= _read_pattern(name, layer, sources, stored)

    def kind(name: str) -> tuple[str, bool, torch.device]:
        return sources[name], isinstance(places[name].tensor, nn.Parameter), places[name].device

    def read(name: str) -> Tensor:
        place, source = places[name], sources[name]
        tensor = arrays[source] if source in arrays else read_tensor(stored[source])
        if isinstance(place.owner, BlockSparseLinear) and place.attribute == "mask":
            _check_mask(name, tensor)
        is_scale = isinstance(place.owner, BlockSparseLinear) and place.attribute == "scales"
        cast = dtype if tensor.dtype in DTYPES and not is_scale else None
        tensor = tensor.to(place.device, cast)
        if not isinstance(place.tensor, nn.Parameter):
            return tensor
        return nn.Parameter(tensor, place.tensor.requires_grad)

    names = {kind(name): name for name in list(places)[::-1]}  # the first of each kind
    contents = dict(zip(names, in_threads(read, names.values()), strict=True))
    return {name: contents[kind(name)] for name in places}


def _check_mask(name: str, mask: Tensor) -> None:
    kept = mask.view(*mask.shape[:2], -1, 4).sum(-1)
    if kept.numel() and int(kept.max()) > 2:
        raise CheckpointError(f"{name!r} must have at most two of each four neighbours, got more")


def _read_pattern(
    prefix: str, layer: BlockSparseLinear, sources: Mapping[str, str], stored: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """The arrays of a layer's pattern, by the names that they are stored under."""
    own = {array: sources[joined(prefix, array)] for array in INDEX_NAMES}
    arrays = {array: read_tensor(stored[source]) for array, source in own.items()}
    with named(f"{stored[own['slot']].file.name}: {prefix!r}"):
        crow, col, slot = (arrays[array] for array in INDEX_NAMES)
        pattern = checked_pattern(Index(crow, col, slot, layer.spec.shape, layer.block_shape))
    return {source: getattr(pattern, array) for array, source in own.items()}
