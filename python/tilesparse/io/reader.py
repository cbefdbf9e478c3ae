"""Loading a checkpoint into a model: everything is read and checked before the model changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import is_parametrized

from .._checks import DTYPES, Index, check_module, checked_device
from .._files import StoredTensor, few, in_threads, named, read_tensor, shown
from ..config import LayerSpec
from ..errors import CheckpointError, InvalidArgumentError, InvalidTypeError
from ..model.match import (
    Target,
    check_can_change,
    layers_changed,
    layers_in,
    names_of_modules,
    reason_from_parents,
    references,
    replace_modules,
    what_would_be_lost,
)
from ..nn.experts import BlockSparseExperts, ExpertsLinear, experts_like, projections_of, reason_not_known
from ..nn.linear import BlockSparseLinear, is_conv1d
from ..nn.weight import INDEX_NAMES, checked_pattern, declare_shared, resize, take_over
from ..storage.formats import STORED_NAMES, storage_of
from .manifest import (
    CONFIG,
    checked_folder,
    joined,
    own_tensors,
    parsed_layers,
    read_headers,
    read_section,
    state_of,
)

Model = TypeVar("Model", bound=nn.Module)


class _Place(NamedTuple):
    """The place of a tensor of the checkpoint in the model."""

    owner: nn.Module  # the layer that is to be installed, or a module of the model
    attribute: str
    tensor: Tensor  # what is there now
    device: torch.device  # where the new one goes
    kept: Tensor | None  # what is there in the model, stays the same object and gets the contents


def load(
    model_or_class: Model | Callable[[], Model],
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | int | None = None,
) -> Model:
    """Load a checkpoint that `save`, or Transformers with this package, has written.

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

    Returns:
        The model.

    Raises:
        CheckpointNotFoundError: a file is missing.
        CheckpointError: the checkpoint is damaged, newer than this library, or does not fit the model.
    """
    if not callable(model_or_class):
        raise InvalidTypeError(
            f"model_or_class must be a torch.nn.Module or make one, got {shown(model_or_class)}"
        )
    folder = checked_folder(path)
    while True:
        before = state_of(folder)
        try:
            return _load(model_or_class, folder, device)
        except CheckpointError:
            if state_of(folder) == before:
                raise


def _load(
    model_or_class: Model | Callable[[], Model], folder: Path, device: torch.device | str | int | None
) -> Model:
    forms, ties, files = read_section(folder)
    stored = read_headers(folder, files)
    model = _built(model_or_class)
    check_can_change(model)
    with named(CONFIG):
        targets = targets_of(model, forms)
    device = None if device is None else checked_device(device)
    places = _places(model, targets, device)
    _check_buffers(model, places)
    sources, doubles = _sources(places, stored, ties)
    _check_forms(places, sources)
    _check_doubles(doubles)
    _check_references(model, targets, places)
    contents = _read(targets, places, sources)
    install(model, targets)
    contents = _written(places, contents)
    moved = _other_buffers(model, places, contents, device)
    for name, place in places.items():
        setattr(place.owner, place.attribute, contents[name])
    for owner, attribute, buffer in moved:
        setattr(owner, attribute, buffer)
    for name in _layers(targets):
        installed = model.get_submodule(name)
        assert isinstance(installed, BlockSparseLinear)
        declare_shared(installed)
    layers_changed(model)
    return model


def _places(model: nn.Module, targets: Iterable[Target], device: torch.device | None) -> dict[str, _Place]:
    """Return the places of tensors, by all their names, once the layers are replaced."""
    layers = {target.module: target.replacement for target in targets}
    places = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        owner = layers.get(module, module)
        owners = {prefix: owner}
        if isinstance(owner, BlockSparseExperts) and owner is not module:
            owners = {joined(prefix, own): layer for own, layer in owner.projections().items()}
        tensors = ((place, one, *own) for place, one in owners.items() for own in own_tensors(one))
        for place, one, attribute, tensor in tensors:
            name = joined(place, attribute)
            if type(tensor) not in (Tensor, nn.Parameter):
                raise CheckpointError(
                    f"model: {name!r} must be a plain tensor, got {type(tensor).__name__}; load before a "
                    f"model is sharded or converted"
                )
            before = tensor if one is module else next(module.parameters(recurse=False))
            there = torch.device("cpu") if before.is_meta else before.device
            places[name] = _Place(one, attribute, tensor, device or there, _kept(module, one, attribute))
    return places


def _kept(module: nn.Module, owner: nn.Module, attribute: str) -> Tensor | None:
    """Return the tensor that stays the same object though a layer may take the place of its module.

    A pattern that takes the place of another one has tensors of its own, so that graphs of autograd keep that
    which they were made with.
    """
    if owner is module or attribute == "bias":
        return module._parameters.get(attribute, module._buffers.get(attribute))
    return module._parameters.get(attribute) if isinstance(module, BlockSparseLinear) else None


def _check_references(model: nn.Module, targets: Iterable[Target], places: Mapping[str, _Place]) -> None:
    """Check that no plain attribute goes on to hold what is replaced, or a tensor without contents."""
    kept = {id(place.kept) for place in places.values()}
    gone: dict[nn.Module | Tensor, str] = {}
    for target in targets:
        if not isinstance(target.module, BlockSparseLinear):
            gone[target.module] = target.names[0]
            gone |= {one: joined(target.names[0], own) for own, one in target.module.named_parameters()}
    for held, (place, can_follow) in references(names_of_modules(model)).items():
        if held in gone and not can_follow and id(held) not in kept:
            raise CheckpointError(
                f"model: {place!r} refers to {gone[held]!r}, which load replaces by a block-sparse layer; "
                "set this attribute after loading"
            )
        tensors = [held] if isinstance(held, Tensor) else [*held.parameters(), *held.buffers()]
        if any(tensor.is_meta and id(tensor) not in kept for tensor in tensors):
            raise CheckpointError(
                f"model: {place!r} is on the meta device, and the checkpoint has no tensor for it; pass "
                "an instance of the model whose tensors have contents"
            )


def _non_persistent(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield buffers that are not saved under these names: name, owner, attribute and tensor."""
    for prefix, module in model.named_modules():
        for attribute in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(attribute)
            if buffer is not None:
                yield joined(prefix, attribute), module, attribute, buffer


def _check_buffers(model: nn.Module, places: Mapping[str, _Place]) -> None:
    """Check that non-persistent buffers are materialized."""
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
    """Return the new buffers of those not saved; one that is saved under another name stays the same."""
    new = {place.tensor: contents[name] for name, place in places.items()}
    return [
        (owner, attribute, new[buffer] if buffer in new else buffer.to(device))
        for _, owner, attribute, buffer in _non_persistent(model)
    ]


def _sources(
    places: Mapping[str, _Place], stored: Mapping[str, StoredTensor], ties: Mapping[str, str]
) -> tuple[dict[str, StoredTensor], list[tuple[StoredTensor, StoredTensor]]]:
    """Return what is stored of each tensor of the model, and pairs that are one tensor there."""
    if wrong := [name for name, other in ties.items() if name in stored or other not in stored]:
        raise CheckpointError(f"{CONFIG}: ties: {few(wrong)} must be another name for a stored tensor")
    names: dict[Tensor, list[str]] = {}  # of each tensor, by identity
    for name, place in places.items():
        names.setdefault(place.tensor, []).append(name)
    sources: dict[str, StoredTensor] = {}
    doubles: list[tuple[StoredTensor, StoredTensor]] = []
    missing: list[str] = []
    used: set[str] = set()
    for aliases in names.values():
        known = dict.fromkeys(ties.get(name, name) for name in aliases)
        found = [stored[name] for name in known if name in stored]
        if not found:
            missing.append(aliases[0])
            continue
        doubles += [(found[0], other) for other in found[1:]]
        used.update(known)
        sources.update(dict.fromkeys(aliases, found[0]))
    for others, text in (
        (missing, "missing"),
        ([*stored.keys() - used, *ties.keys() - places.keys()], "not in the model"),
    ):
        if others:
            raise CheckpointError(f"tensors: {few(sorted(others))}: {text}")
    return sources, doubles


def _check_forms(places: Mapping[str, _Place], sources: Mapping[str, StoredTensor]) -> None:
    """Check that stored tensors have the shapes and dtypes of the layers."""
    for name, place in places.items():
        source, (shape, dtype) = sources[name], (tuple(place.tensor.shape), place.tensor.dtype)
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
    targets: Iterable[Target], places: Mapping[str, _Place], sources: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """Return the new tensors of the model by name; what is one there or in the checkpoint is one."""
    arrays: dict[StoredTensor, Tensor] = {}
    for prefix, layer in _layers(targets).items():
        stored = [sources[joined(prefix, array)] for array in INDEX_NAMES]
        crow, col, slot = map(read_tensor, stored)
        with named(f"{stored[-1].file.name}: {prefix!r}"):
            pattern = checked_pattern(Index(crow, col, slot, layer.spec.shape, layer.block_shape))
        arrays |= {one: getattr(pattern, array) for one, array in zip(stored, INDEX_NAMES, strict=True)}

    def kind(name: str) -> tuple[StoredTensor, bool, torch.device]:
        return sources[name], isinstance(places[name].tensor, nn.Parameter), places[name].device

    def read(name: str) -> Tensor:
        place, source = places[name], sources[name]
        tensor = arrays[source] if source in arrays else read_tensor(source)
        own = place.attribute if isinstance(place.owner, BlockSparseLinear) else None
        if own == "mask" and len(tensor) and int(tensor.view(*tensor.shape[:2], -1, 4).sum(-1).max()) > 2:
            raise CheckpointError(f"{name!r} must have at most two of each four neighbours, got more")
        tensor = tensor.to(place.device)
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


def _built(model_or_class: Model | Callable[[], Model]) -> Model:
    """Return the model, made on the meta device if it is given as what makes it."""
    model: Any = model_or_class
    try:
        if callable(model) and not isinstance(model, nn.Module):
            with torch.device("cpu"), _parameters_on_meta():
                model = model()
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise CheckpointError(
            "model_or_class must not move or read parameters, which are on the meta device while load makes "
            f"the model: {error}; pass an instance of the model"
        ) from error
    check_module(model, "what model_or_class makes")
    return model  # type: ignore[no-any-return]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Have modules that this thread makes keep their parameters on the meta device, and all else where it is.

    What becomes of other tensors no checkpoint says, so they need contents. A parameter moves when its module
    gets it, before anything has been written to the memory of most. It stays the same object, so whatever
    else refers to it gets the weights of the checkpoint as well. One that has views stays where it is.
    """
    thread = threading.get_ident()

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if threading.get_ident() == thread and type(parameter) is nn.Parameter and parameter.is_cpu:
            with suppress(RuntimeError):
                moved = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


def _layers(targets: Iterable[Target]) -> dict[str, BlockSparseLinear]:
    """Return the empty layers by their first names in the model."""
    found: dict[str, BlockSparseLinear] = {}
    for target in targets:
        found |= layers_in(target.names[0], target.replacement)
    return found


def prepare(model: nn.Module, section: Mapping[str, Any]) -> list[str]:
    """Give a model the layers that a section describes, empty on the meta device; return their names.

    Experts of Transformers become `BlockSparseExperts`; a `torch.nn.Linear`, also of a subclass, ``Conv1D``
    or `BlockSparseLinear` of the same shape becomes a `BlockSparseLinear`, whose weight, bias and pattern
    have sizes only. It has a bias where the layer had one, and keeps its hooks, its mode and
    ``requires_grad``. A `BlockSparseLinear` stays the same object. On an error the model is as it was.
    """
    return install(model, targets_of(model, parsed_layers(section)))


def targets_of(model: nn.Module, forms: Mapping[str, LayerSpec]) -> list[Target]:
    """Make the layers of these specs, with all checks; the model is only read."""
    names = names_of_modules(model)
    modules = {alias: module for module, aliases in names.items() for alias in aliases}
    found: dict[nn.Module, LayerSpec] = {}
    experts: dict[nn.Module, dict[str, LayerSpec]] = {}  # dense ones, and the forms of their projections
    for name, form in forms.items():
        module = modules.get(name)
        parent, _, own = name.rpartition(".")
        dense = modules.get(parent)
        if dense is not None and own in layers_of_experts(dense) and form.experts is not None:
            _check_projection(model, dense, name, form)
            experts.setdefault(dense, {})[own] = form
            continue
        if module is None:
            raise InvalidArgumentError(f"layers: {shown(name)}: missing in the model")
        reason = _reason_not_replaceable(model, module, names[module], form)
        if reason is None and found.setdefault(module, form) != form:
            reason = "one layer of the model under several names, which differ"
        if reason is not None:
            raise InvalidArgumentError(f"layers: {shown(name)}: {reason}")
    for module, aliases in names.items():
        if isinstance(module, BlockSparseLinear) and module not in found:
            raise InvalidArgumentError(
                f"layers: {aliases[0]!r}: missing, but block-sparse in the model; give it a dense layer there"
            )
    made = [Target(names[module], module, _empty_like(module, form)) for module, form in found.items()]
    return made + [Target(names[dense], dense, _empty_experts(dense, own)) for dense, own in experts.items()]


def layers_of_experts(module: nn.Module) -> dict[str, str]:
    """Return the parameters of dense experts by the names of the layers that replace them; else nothing."""
    found = projections_of(module)
    return {} if found is None else {own: name for name, own in found.layers().items()}


def _check_projection(model: nn.Module, dense: Any, name: str, form: LayerSpec) -> None:
    reason = reason_not_known(dense) or what_would_be_lost(dense)
    weight = dense.get_parameter(layers_of_experts(dense)[name.rpartition(".")[2]])
    experts, out, in_ = (weight.mT if dense.is_transposed else weight).shape
    if (form.experts, form.shape) != (experts, (experts * out, in_)):
        reason = f"{form.experts} experts in {form.shape}, but {experts} in {experts * out, in_} in the model"
    if dense is model:
        reason = "the model itself cannot be replaced in place"
    if reason is not None:
        raise InvalidArgumentError(f"layers: {shown(name)}: {reason}")


def _empty_experts(dense: Any, forms: Mapping[str, LayerSpec]) -> BlockSparseExperts:
    """Return experts of these specs on the meta device, like the dense ones in all else."""
    layers = []
    for own, name in layers_of_experts(dense).items():
        if own not in forms:
            raise InvalidArgumentError(f"layers: {own!r} of experts is missing beside {sorted(forms)}")
        bias, trained = dense._parameters.get(f"{name}_bias"), dense.get_parameter(name).requires_grad
        layers.append(_empty(forms[own], bias, trained, dense.training))
    return experts_like(dense, *layers)


def _reason_not_replaceable(model: nn.Module, module: Any, aliases: list[str], form: LayerSpec) -> str | None:
    # Subclasses, too, although `sparsify_` skips them: the checkpoint says that this one was replaced.
    is_linear = isinstance(module, BlockSparseLinear | nn.Linear) or is_conv1d(module)
    if not is_linear or is_parametrized(module):
        return f"it must be a linear layer, got {type(module).__name__}"
    if type(module._parameters.get("weight")) is not nn.Parameter:
        return (
            "its weight is no plain parameter; remove parametrizations, and shard a model after it is loaded"
        )
    if form.experts != getattr(module, "experts", None):
        return f"experts must be those of the model, got {form.experts}"
    sparse = isinstance(module, BlockSparseLinear)
    weight: Any = module.weight
    shape = module.spec.shape if sparse else tuple(weight.T.shape if is_conv1d(module) else weight.shape)
    if shape != form.shape:
        return f"shape {form.shape}, but {shape} in the model"
    known = {"weight", "bias", *((*INDEX_NAMES, *STORED_NAMES, *module._modules) if sparse else ())}
    if others := sorted({*module._parameters, *module._buffers, *module._modules} - known):
        return f"it holds {', '.join(others)} besides weight and bias"
    if sparse:
        return None
    if module is model:
        return "the model itself cannot be replaced in place"
    return reason_from_parents(model, aliases) or what_would_be_lost(module)


def _empty_like(module: Any, form: LayerSpec) -> Any:
    """Return a layer of this spec on the meta device, like the module in all else."""
    stored = storage_of(getattr(module, "storage", "plain"))
    return _empty(form, module.bias, module.weight.requires_grad or not stored.trainable, module.training)


def _empty(form: LayerSpec, bias: Tensor | None, trained: bool, training: bool) -> Any:
    """Return a layer of this spec on the meta device; only a weight that can be trained has a gradient."""
    kind = ExpertsLinear if form.experts is not None else BlockSparseLinear
    layer = kind.from_spec(form, bias=bias is not None, device="meta")
    layer.weight.requires_grad_(storage_of(form.storage).trainable and trained)
    if layer.bias is not None and bias is not None:
        layer.bias.requires_grad_(bias.requires_grad)
    return layer.train(training)


def install(model: nn.Module, targets: list[Target]) -> list[str]:
    """Put the layers into the model, and return their names; nothing fails any more."""
    others = []
    for target in targets:
        module, layer = target.module, target.replacement
        if isinstance(module, BlockSparseLinear) and isinstance(layer, BlockSparseLinear):
            take_over(module, layer)
        else:
            others.append(target)
    replace_modules(model, others)
    return [*_layers(targets)]
