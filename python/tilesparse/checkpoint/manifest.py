"""Checkpoints of block-sparse models: safetensors files, and a section of ``config.json`` on their layers.

docs/checkpoints.md has the format.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.weak import WeakIdKeyDictionary

from .._arguments import checked
from .._checks import DTYPES, POLICIES, Index, check_block_shape, check_shapes, checked_device
from .._libraries.transformers_hooks import check_can_follow, follow
from .._runtime.tensor_files import (
    CONFIG,
    INDEX,
    STORABLE,
    StoredTensor,
    byte_limit,
    check_belongs,
    checked_texts,
    few,
    in_threads,
    named,
    put_in_place,
    read_header,
    read_headers,
    read_json,
    read_tensor,
    shown,
    staging,
    write_files,
    write_json,
)
from ..config import QUANTIZED_BY_NAME, STORAGES, check_nm, check_nm_blocks, check_storage
from ..errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError, UnsupportedError
from ..nn.convert import is_conv1d
from ..nn.linear import BlockSparseLinear
from ..nn.origin import checked_pattern
from ..nn.tensors import INDEX_NAMES, is_sharded
from ..patch.modules import (
    names_of_modules,
    reason_from_parents,
    set_submodule,
    share_hooks,
    what_would_be_lost,
)
from ..pattern.block_pattern import BlockPattern
from ..storage.base import STORED_NAMES

_Model = TypeVar("_Model", bound=nn.Module)

VERSION = 1  # of the section
METHOD = "tilesparse"  # names the section, and Transformers' quantization method
_KEYS = {"version", "layers", "ties", "files"}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_HOW_TO_GATHER = (
    "call torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) in all processes and give its result "
    "as state_dict in one"
)


class SavedForm(NamedTuple):
    """What the section says of a layer."""

    shape: tuple[int, int]
    block_shape: tuple[int, int]
    nnz: int
    dtype: torch.dtype  # of plain values
    storage: str
    nm: tuple[int, int] | None
    transposable: bool
    scales: str | None
    policy: str


class _Place(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    owner: nn.Module  # the layer that is to be installed, or a module of the model
    attribute: str
    tensor: Tensor  # what is there now
    device: torch.device  # where the new one goes


class _Replacement(NamedTuple):
    """A module of a model, all its names there, and the empty layer that is to take its place."""

    names: list[str]
    module: nn.Module
    layer: BlockSparseLinear


def section(model: nn.Module) -> dict[str, Any]:
    """What a configuration has to say of a model's block-sparse layers, ready for JSON.

    Returns:
        ``{"version": 1, "layers": {name: entry}}`` with an entry for each `BlockSparseLinear` as it is now:
        ``shape`` [out_features, in_features], ``block_shape`` [bn, bk], ``nnz``, ``dtype`` of plain values,
        ``storage``, ``nm``, ``transposable``, ``scales`` ("row", "block" or None) and ``policy``. A layer
        that the model has under several names is listed under the first.
    """
    layers = {
        name: _entry(module)
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseLinear)
    }
    return {"version": VERSION, "layers": layers}


def _entry(layer: BlockSparseLinear) -> dict[str, Any]:
    scales = None if layer.scales is None else "row" if layer.scales.dim() == 2 else "block"
    return {
        "shape": [layer.out_features, layer.in_features],
        "block_shape": list(layer.block_shape),
        "nnz": layer.col_indices.shape[0],
        "dtype": str(layer.spec.dtype).removeprefix("torch."),
        "storage": layer.storage,
        "nm": None if layer.nm is None else list(layer.nm),
        "transposable": layer.transposable,
        "scales": scales,
        "policy": layer.policy,
    }


@checked
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    state_dict: Mapping[str, Any] | None = None,
) -> None:
    """Saves a model as a folder of ``config.json`` and safetensors files.

    They hold all parameters and persistent buffers under the names of ``state_dict()``. A tensor that has
    several names is stored once. In a folder that exists the checkpoint is replaced, other keys of its
    ``config.json`` and other files stay. Wherever a save fails or is killed, what the folder loads is the
    former checkpoint or the new one, whole.

    Args:
        model: of any kind, also one `BlockSparseLinear`; the module itself and not a wrapper, whose prefix
            the names would have.
        path: of the folder, made where it is missing.
        max_shard_size: bytes of the tensors in one file, or a text as "5GB" (10⁹ bytes each); a larger tensor
            has a file of its own.
        state_dict: what to save in place of ``model.state_dict()``: full tensors of a sharded model.

    Raises:
        CheckpointError: the model has what cannot be stored: tensors on the meta device, DTensors, an extra
            state, a parametrized sparse layer; the text names it.
        InvalidArgumentError: another argument is wrong, such as the path of a file.
        OSError: writing fails.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    folder, limit = _folder(path), byte_limit(max_shard_size)
    tensors, ties = _to_save(model, state_dict)
    own: dict[str, Any] = section(model)
    if ties:
        own["ties"] = ties
    folder.mkdir(parents=True, exist_ok=True)
    config = read_json(folder / CONFIG)[0] if (folder / CONFIG).exists() else {}
    with staging(folder) as temporary:
        own["files"] = write_files(temporary, tensors, limit)
        if _is_method(config.get("quantization_config")):
            config["quantization_config"] = {"quant_method": METHOD, **own}
            config.pop(METHOD, None)  # of an earlier save
        else:
            config[METHOD] = own
        write_json(temporary / CONFIG, config)
        put_in_place(temporary, folder, own["files"])


@checked
def load(
    model_or_class: _Model | Callable[[], _Model],
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> _Model:
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
        raise InvalidArgumentError(f"dtype: one of {list(DTYPES)} or None expected, got {dtype}")
    folder = _folder(path)
    forms, ties, files = read_section(folder)
    stored = read_headers(folder, files)
    model = _built(model_or_class)
    check_can_follow(model)
    with named(CONFIG):
        replacements = _replacements(model, forms)
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
            replacement.layer.update_spec(dtype=dtype)
    _install(model, replacements)
    for name, place in places.items():
        setattr(place.owner, place.attribute, contents[name])
    for owner, attribute, buffer in moved:
        setattr(owner, attribute, buffer)
    for replacement in replacements:
        layer = model.get_submodule(replacement.names[0])
        assert isinstance(layer, BlockSparseLinear)
        layer.declare_shared()
    follow(model)
    return model


def forms(folder: Path) -> Mapping[str, SavedForm]:
    """What the configuration of a checkpoint says of each layer, by name.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    return read_section(folder)[0]


def check_section(section: object) -> None:
    """Checks what a configuration says of block-sparse layers; keys besides version and layers may be there.

    Raises:
        InvalidArgumentError: it is of a newer version, or not what `section` makes.
    """
    _forms(section)


def prepare(model: nn.Module, section: Mapping[str, Any]) -> list[str]:
    """Gives a model the layers that a section describes, empty on the meta device, to be loaded into.

    A `torch.nn.Linear`, also of a subclass, Transformers' ``Conv1D`` or `BlockSparseLinear` of the same shape
    becomes a `BlockSparseLinear` with the block shape, number of blocks and storage of the section, whose
    weight, bias and pattern have sizes only. It has a bias where the layer had one, and keeps its hooks, its
    mode and ``requires_grad``. A `BlockSparseLinear` stays the same object.

    Args:
        model: changed in place, once all is checked.
        section: see `section`.

    Returns:
        The names of the layers.

    Raises:
        InvalidArgumentError: the section is wrong, a layer is missing in the model, is of another kind or
            shape there, or is block-sparse there and not in the section. The model is as it was.
    """
    replacements = _replacements(model, _forms(section))
    _install(model, replacements)
    return [replacement.names[0] for replacement in replacements]


def prepare_for(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> list[str]:
    """Prepares a model for the checkpoint of a folder, which another library loads.

    Args:
        model: changed in place, once all is checked.
        folder: with a ``config.json``.
        dtype: what the other library casts all floating tensors to, if it does.

    Returns:
        The names of the layers; none if the checkpoint has none.

    Raises:
        CheckpointError: the checkpoint is damaged or was cut off, or does not fit the model.
        UnsupportedError: scales would be rounded. The model is as it was.
    """
    config = read_json(folder / CONFIG)[0]
    if METHOD not in config and not _is_method(config.get("quantization_config")):
        return []
    forms, _, files = read_section(folder)
    scaled = [name for name, form in forms.items() if form.scales is not None]
    if scaled and dtype not in (None, torch.float32):
        raise UnsupportedError(
            f"dtype must be None or torch.float32, got {dtype}: layer {scaled[0]!r} has 8 bits, whose "
            "scales it would round"
        )
    for name in files or ():
        read = read_json if name == INDEX else read_header
        check_belongs(name, read(folder / name)[1], files)
    with named(CONFIG):
        replacements = _replacements(model, forms)
    _install(model, replacements)
    return [replacement.names[0] for replacement in replacements]


def _forms(section: object) -> dict[str, SavedForm]:
    if not isinstance(section, Mapping):
        raise InvalidArgumentError(f"tilesparse: a section expected, got {shown(section)}")
    version, layers = section.get("version"), section.get("layers")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidArgumentError(f"version: a number from 1 expected, got {shown(version)}")
    if version > VERSION:
        raise InvalidArgumentError(
            f"version: up to {VERSION} is known here, got {shown(version)}; install a newer tilesparse"
        )
    if not isinstance(layers, Mapping) or not all(isinstance(name, str) for name in layers):
        raise InvalidArgumentError(f"layers: an entry for each layer's name expected, got {shown(layers)}")
    return {name: _form(name, entry) for name, entry in layers.items()}


def _form(name: str, entry: object) -> SavedForm:
    try:
        if not isinstance(entry, Mapping) or set(entry) != {*SavedForm._fields}:
            raise InvalidArgumentError(
                f"an entry with {', '.join(SavedForm._fields)} expected, got {shown(entry)}"
            )
        return _checked_form(entry)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"layers: {shown(name)}: {error}") from None


def _checked_form(entry: Mapping[str, Any]) -> SavedForm:
    for field in ("shape", "block_shape"):
        if not isinstance(entry[field], list | tuple) or len(entry[field]) != 2:
            raise InvalidArgumentError(f"{field}: two numbers expected, got {shown(entry[field])}")
    for field in ("shape", "block_shape", "nnz"):
        numbers = entry[field] if field != "nnz" else [entry[field]]
        if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
            raise InvalidArgumentError(f"{field}: integers from 0 to 2^31 - 1 expected, got {shown(numbers)}")
    block_shape = check_block_shape(entry["block_shape"])
    shape, _, (rows, cols) = check_shapes(entry["shape"], block_shape)
    if entry["nnz"] > rows * cols:
        raise InvalidArgumentError(f"nnz: at most {rows * cols} expected, got {entry['nnz']}")
    choices = {"dtype": tuple(_DTYPES), "storage": STORAGES, "nm": (None, [2, 4], (2, 4)), "policy": POLICIES}
    for field, allowed in choices.items():
        if entry[field] not in allowed:
            raise InvalidArgumentError(f"{field}: one of {list(allowed)} expected, got {shown(entry[field])}")
    nm, storage, transposable = entry["nm"], entry["storage"], entry["transposable"]
    if not isinstance(transposable, bool):
        raise InvalidArgumentError(f"transposable: true or false expected, got {shown(transposable)}")
    check_nm(nm, transposable)
    check_nm_blocks(nm, transposable, block_shape)
    check_storage(storage, nm)
    scales = ("row", "block") if storage in QUANTIZED_BY_NAME else (None,)
    if entry["scales"] not in scales:
        raise InvalidArgumentError(
            f"scales: one of {list(scales)} expected with storage {storage!r}, got {shown(entry['scales'])}"
        )
    checked = {"shape": shape, "block_shape": block_shape, "dtype": _DTYPES[entry["dtype"]]}
    return SavedForm(**{**entry, **checked, "nm": None if nm is None else (2, 4)})


def _replacements(model: nn.Module, forms: Mapping[str, SavedForm]) -> list[_Replacement]:
    """Everything that can fail; the model is only read."""
    names = names_of_modules(model)
    modules = {alias: module for module, aliases in names.items() for alias in aliases}
    found: dict[nn.Module, SavedForm] = {}
    for name, form in forms.items():
        module = modules.get(name)
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
    return [_Replacement(names[module], module, _empty(module, form)) for module, form in found.items()]


def _reason_not_replaceable(
    model: nn.Module, module: nn.Module, aliases: list[str], form: SavedForm
) -> str | None:
    # Also of classes that only a patcher of the user's own replaces: the checkpoint says that it did.
    is_linear = isinstance(module, BlockSparseLinear | nn.Linear) or is_conv1d(module)
    if not is_linear or is_parametrized(module):
        return f"a linear layer expected, got {type(module).__name__}"
    if type(module._parameters.get("weight")) is not nn.Parameter:
        return (
            "its weight is no plain parameter; remove parametrizations, and shard a model after it is loaded"
        )
    if (shape := _shape(module)) != form.shape:
        return f"shape {form.shape}, but {shape} in the model"
    sparse = isinstance(module, BlockSparseLinear)
    known = {"weight", "bias", *((*INDEX_NAMES, *STORED_NAMES, *module._modules) if sparse else ())}
    if others := sorted({*module._parameters, *module._buffers, *module._modules} - known):
        return f"it holds {', '.join(others)} besides weight and bias"
    if sparse:
        return None
    if module is model:
        return "the model itself cannot be replaced in place"
    return reason_from_parents(model, aliases) or what_would_be_lost(module)


def _shape(module: Any) -> tuple[int, int]:
    """(out_features, in_features) of any linear layer."""
    if isinstance(module, BlockSparseLinear):
        return module.out_features, module.in_features
    out_features, in_features = module.weight.T.shape if is_conv1d(module) else module.weight.shape
    return out_features, in_features


def _empty(module: Any, form: SavedForm) -> BlockSparseLinear:
    """The layer of that form on the meta device, alike in all that the form does not say."""
    (out_features, in_features), (bn, _) = form.shape, form.block_shape
    crow, col, slot = (
        torch.empty(size, dtype=torch.int32, device="meta")
        for size in (out_features // bn + 1, form.nnz, form.nnz)
    )
    layer = BlockSparseLinear(
        in_features,
        out_features,
        module.bias is not None,
        pattern=BlockPattern.from_index(Index(crow, col, slot, form.shape, form.block_shape)),
        policy=form.policy,
        nm=form.nm,
        transposable=form.transposable,
        device="meta",
        dtype=form.dtype,
    ).to_storage(form.storage, per=form.scales or "row")
    was_trainable = module.weight.requires_grad or getattr(module, "storage", "plain") != "plain"
    layer.weight.requires_grad_(form.storage == "plain" and was_trainable)
    if layer.bias is not None:
        layer.bias.requires_grad_(module.bias.requires_grad)
    return layer.train(module.training)


def _install(model: nn.Module, replacements: list[_Replacement]) -> None:
    for names, module, layer in replacements:
        if isinstance(module, BlockSparseLinear):
            module.take_over(layer)
            continue
        share_hooks(module, layer)
        for name in names:
            set_submodule(model, name, layer)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of its own, by their attributes."""
    for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and attribute not in module._non_persistent_buffers_set:
            yield attribute, tensor


def joined(prefix: str, attribute: str) -> str:
    """Join the name of a module and an attribute's."""
    return f"{prefix}.{attribute}" if prefix else attribute


def _folder(path: object) -> Path:
    """What is given as the path of a checkpoint, which may be missing yet."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"path must be the path of a folder, got {shown(path)}")
    folder = Path(path)
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise InvalidArgumentError(
                f"path must be the path of a folder, got {str(folder)!r}, where {str(place)!r} is a file"
            )
    return folder


# Saving.


def _to_save(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to store, and for each other name of one of them the name that it is stored under."""
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear) and "weight" not in module._parameters:
            raise CheckpointError(f"model: {name!r}: parametrized; remove its parametrizations first")
    own = {
        joined(prefix, attribute): tensor
        for prefix, module in model.named_modules(remove_duplicate=False)
        for attribute, tensor in _tensors_of(module)
    }
    for given, text in ((model.state_dict(keep_vars=True), "model"), (state_dict, "state_dict")):
        if given is not None and (others := sorted(set(given) ^ set(own))):
            raise CheckpointError(
                f"{text}: the names of the model's parameters and persistent buffers, and no extra states, "
                f"expected; they differ in {few(others)}"
            )
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[Tensor, str] = {}  # by identity
    for name, tensor in own.items():
        if first.setdefault(tensor, name) != name:
            ties[name] = first[tensor]
            continue
        value = tensor if state_dict is None else state_dict[name]
        _check_storable(name, value)
        if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"state_dict: {name!r}: {tuple(tensor.shape)} of {tensor.dtype} expected, as in the model, "
                f"got {tuple(value.shape)} of {value.dtype}"
            )
        tensors[name] = value
    if "__metadata__" in tensors:
        raise CheckpointError("model: '__metadata__': a name that safetensors has a use of its own for")
    return tensors, ties


def _check_storable(name: str, tensor: object) -> None:
    if isinstance(tensor, Tensor) and is_sharded(tensor):
        raise CheckpointError(f"model: {name!r}: a part of a sharded tensor; {_HOW_TO_GATHER}")
    if type(tensor) not in (Tensor, nn.Parameter):
        raise CheckpointError(f"model: {name!r}: a tensor expected, got {type(tensor).__name__}")
    assert isinstance(tensor, Tensor)
    if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in STORABLE.values():
        raise CheckpointError(
            f"model: {name!r}: a dense tensor that is not on the meta device expected, of one of "
            f"{list(STORABLE.values())}, got {tensor.layout} of {tensor.dtype} on {tensor.device}"
        )


# Loading.


def read_section(folder: Path) -> tuple[dict[str, SavedForm], dict[str, str], dict[str, str] | None]:
    """What the configuration says of layers, of names of one tensor, and of files."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"path: a folder expected, there is none at {str(folder)!r}")
    config = read_json(folder / CONFIG)[0]
    quantization = config.get("quantization_config")
    is_quantization = _is_method(quantization)
    if not is_quantization and METHOD not in config:
        raise CheckpointError(
            f"{CONFIG}: a section {METHOD!r} or a quantization_config of that method expected, got neither"
        )
    # Where both are there Transformers has carried the other along, from an earlier checkpoint.
    own: Any = quantization if is_quantization else config[METHOD]
    with named(CONFIG):
        forms = _forms(own)
        if not is_quantization and (others := sorted(set(own) - _KEYS)):
            raise InvalidArgumentError(f"{METHOD}: keys from {sorted(_KEYS)} expected, got {few(others)}")
        ties = checked_texts("ties", own.get("ties", {}))
        files = own.get("files")
        return forms, ties, None if files is None else checked_texts("files", files)


def _is_method(quantization: object) -> bool:
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD


def _built(model_or_class: _Model | Callable[[], _Model]) -> _Model:
    if isinstance(model_or_class, nn.Module):
        return model_or_class  # type: ignore[return-value]  # a module may be what makes one, too
    if not callable(model_or_class):
        raise InvalidArgumentError(
            f"model_or_class: a module, or what makes one, expected, got {type(model_or_class).__name__}"
        )
    with torch.device("cpu"), _parameters_on_meta():
        model = model_or_class()
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model_or_class: it has made a {type(model).__name__}, no module")
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Has modules that this thread makes keep their parameters on the meta device, and all else where it is.

    What becomes of other tensors no checkpoint says, so they need contents. A parameter moves when its module
    gets it, before anything has been written to the memory of most, and what is one parameter stays one.
    """
    thread = threading.get_ident()
    moved: Any = WeakIdKeyDictionary()

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        if threading.get_ident() != thread or type(parameter) is not nn.Parameter or not parameter.is_cpu:
            return None
        if parameter not in moved:
            moved[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return moved[parameter]

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


def _places(
    model: nn.Module, replacements: Iterable[_Replacement], device: torch.device | None
) -> dict[str, _Place]:
    """Where the tensors go, by all their names, once the layers are replaced."""
    layers = {replacement.module: replacement.layer for replacement in replacements}
    places = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        owner = layers.get(module, module)
        for attribute, tensor in _tensors_of(owner):
            name = joined(prefix, attribute)
            if type(tensor) not in (Tensor, nn.Parameter):
                raise CheckpointError(
                    f"model: {name!r}: a plain tensor expected, got {type(tensor).__name__}; load before a "
                    f"model is sharded or converted"
                )
            _check_hooks(name, getattr(module, attribute, None))
            before: Any = tensor if owner is module else module.weight
            there = torch.device("cpu") if before.is_meta else before.device
            places[name] = _Place(owner, attribute, tensor, device or there)
    return places


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
        raise CheckpointError(f"{CONFIG}: ties: {few(wrong)}: another name for a stored tensor expected")
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
                f"{source.file.name}: {name!r}: shape {shape} of {' or '.join(map(str, allowed))} expected, "
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
    replacements: Iterable[_Replacement],
    places: Mapping[str, _Place],
    sources: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """The new tensors of the model by their names; what is one there or in the checkpoint is one."""
    arrays: dict[str, Tensor] = {}
    for replacement in replacements:
        arrays |= _read_pattern(replacement, sources, stored)

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
        raise CheckpointError(f"{name!r}: at most two of each four neighbours expected, got more")


def _read_pattern(
    replacement: _Replacement, sources: Mapping[str, str], stored: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """The arrays of a layer's pattern, by the names that they are stored under."""
    prefix, layer = replacement.names[0], replacement.layer
    own = {array: sources[joined(prefix, array)] for array in INDEX_NAMES}
    arrays = {array: read_tensor(stored[source]) for array, source in own.items()}
    with named(f"{stored[own['slot']].file.name}: {prefix!r}"):
        crow, col, slot = (arrays[array] for array in INDEX_NAMES)
        pattern = checked_pattern(Index(crow, col, slot, layer.spec.shape, layer.block_shape))
    return {source: getattr(pattern, array) for array, source in own.items()}
