"""Loading a checkpoint into a model: everything is read and checked before the model changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
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
from ..nn.tensors import INDEX_NAMES, resize
from .building import Model, built
from .files import CONFIG, read_headers, state_of
from .manifest import read_section
from .names import checked_folder, joined, own_tensors, references
from .prepare import Replacement, install, replacements_of


class _Place(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    owner: nn.Module  # the layer that is to be installed, or a module of the model
    attribute: str
    tensor: Tensor  # what is there now
    device: torch.device  # where the new one goes
    kept: Tensor | None  # what is there in the model, stays the same object and gets the contents


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
    Parameters stay the same objects with the same ``requires_grad``, written in place where shape, dtype and
    device allow. Only weights of dense layers that become sparse are new ones: build optimizers afterwards.
    A save into the folder meanwhile does no harm: one checkpoint or the other is loaded.

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
    while True:
        before = state_of(folder)
        try:
            return _load(model_or_class, folder, device, dtype)
        except CheckpointError:
            if state_of(folder) == before:
                raise


def _load(
    model_or_class: Model | Callable[[], Model],
    folder: Path,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
) -> Model:
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
    _check_references(model, replacements, places)
    contents = _read(replacements, places, sources, stored, dtype)
    if dtype is not None:
        for replacement in replacements:
            for layer in replacement.layers().values():
                layer.update_spec(dtype=dtype)
    install(model, replacements)
    contents = _written(places, contents)
    moved = _other_buffers(model, places, contents, device)
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
        before = tensor if owner is module else next(module.parameters(recurse=False))
        there = torch.device("cpu") if before.is_meta else before.device
        places[name] = _Place(owner, attribute, tensor, device or there, _kept(module, owner, attribute))
    return places


def _kept(module: nn.Module, owner: nn.Module, attribute: str) -> Tensor | None:
    """Return the tensor that stays the same object though a layer may take the place of its module.

    A pattern that takes the place of another one has tensors of its own, so that graphs of autograd keep that
    which they were made with.
    """
    if owner is module or attribute == "bias":
        return module._parameters.get(attribute, module._buffers.get(attribute))
    return module._parameters.get(attribute) if isinstance(module, BlockSparseLinear) else None


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


def _check_references(
    model: nn.Module, replacements: Iterable[Replacement], places: Mapping[str, _Place]
) -> None:
    """Check that no plain attribute refers to what is replaced, or to a tensor without contents."""
    kept = {id(place.kept) for place in places.values()}
    gone: dict[int, str] = {}
    for names, module, _ in replacements:
        if not isinstance(module, BlockSparseLinear):
            gone[id(module)] = repr(names[0])
            for own, parameter in module.named_parameters():
                gone[id(parameter)] = repr(joined(names[0], own))
    for name, value in references(model):
        if id(value) in kept:
            continue
        if id(value) in gone:
            raise CheckpointError(
                f"model: {name!r} refers to {gone[id(value)]}, which load replaces by a block-sparse layer; "
                "set this attribute after loading"
            )
        if isinstance(value, Tensor) and value.is_meta:
            raise CheckpointError(
                f"model: {name!r} is on the meta device, and the checkpoint has no tensor for it; pass an "
                "instance of the model whose tensors have contents"
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
            f"the model, whose buffers have contents then, in place of a model on the meta device; where "
            f"they are computed from parameters, pass an instance"
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


@torch.no_grad()
def _written(places: Mapping[str, _Place], contents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the model by their names, those that are kept with the contents."""
    written: dict[int, Tensor] = {}  # by the identity of the contents
    for name, place in places.items():
        content = contents[name]
        tensor = written.get(id(content), content)
        if place.kept is not None and place.kept is not tensor and _write(place.kept, tensor.detach(), place):
            tensor = written.get(id(content), place.kept)
        written[id(content)] = tensor
    return {name: written[id(contents[name])] for name in places}


def _write(kept: Tensor, content: Tensor, place: _Place) -> bool:
    """Give a tensor the contents, in place if it can be; return whether it has them."""
    trainable = place.tensor.requires_grad
    try:
        kept.requires_grad_(False)  # integers have none
        if (kept.shape, kept.dtype, kept.device) == (content.shape, content.dtype, content.device):
            kept.copy_(content)
        elif isinstance(kept, nn.Parameter) and kept.is_meta:
            new = nn.Parameter(content, False)
            torch.utils.swap_tensors(kept, new)  # type: ignore[no-untyped-call]
        elif isinstance(kept, nn.Parameter):
            resize(kept, content)
        else:
            return False
    except RuntimeError:  # of inference mode, overlapping or weakly referenced
        return False
    kept.requires_grad_(trainable)
    return True


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
