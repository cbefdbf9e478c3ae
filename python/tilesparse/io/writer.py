"""Saving a model as safetensors files and a manifest."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_module
from .._files import STORABLE, few, read_json, write_json
from ..config import METHOD
from ..errors import CheckpointError, InvalidTypeError
from ..integrations.hooks import configurations
from ..nn.linear import BlockSparseLinear
from ..nn.weight import is_sharded
from .manifest import (
    CONFIG,
    SAVING,
    Shards,
    byte_limit,
    checked_folder,
    is_method,
    joined,
    own_tensors,
    put_in_place,
    section,
)

_HOW_TO_GATHER = (
    "call torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) in all processes and give its result "
    "as state_dict in one"
)


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    state_dict: Mapping[str, Any] | None = None,
) -> None:
    """Save a model as a folder of ``config.json`` and safetensors files.

    They hold all parameters and persistent buffers under the names of ``state_dict()``. A tensor that has
    several names is stored once. In a folder that exists the checkpoint is replaced, other keys of its
    ``config.json`` and other files stay. Wherever a save fails or is killed, what the folder loads is the
    former checkpoint or the new one, whole. A model of Transformers gets the configurations that
    ``save_pretrained`` writes as well, so that ``from_pretrained`` loads the folder.

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
        OSError: writing fails.
    """
    check_module(model)
    if not isinstance(state_dict, Mapping | None):
        raise InvalidTypeError(f"state_dict must be a mapping or None, got {type(state_dict).__name__}")
    folder, limit = checked_folder(path), byte_limit(max_shard_size)
    tensors, ties = _to_save(model, state_dict)
    own: dict[str, Any] = section(model)
    if ties:
        own["ties"] = ties
    folder.mkdir(parents=True, exist_ok=True)
    config = read_json(folder / CONFIG)[0] if (folder / CONFIG).exists() else {}
    others = configurations(model)
    config |= others.pop(CONFIG, {})
    with tempfile.TemporaryDirectory(prefix=SAVING, dir=folder) as name:
        temporary = Path(name)
        shards = Shards(temporary, limit)
        for stored, tensor in tensors.items():
            shards.add(stored, tensor)
        own["files"] = shards.finish()
        for file, content in others.items():
            write_json(temporary / file, content)
        if is_method(config.get("quantization_config")):
            config["quantization_config"] = {"quant_method": METHOD, **own}
            config.pop(METHOD, None)  # of an earlier save
        else:
            config[METHOD] = own
        write_json(temporary / CONFIG, config)
        put_in_place(temporary, folder, [*own["files"], *others])


def _to_save(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to store, and the stored name for each other name of one of them."""
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear) and "weight" not in module._parameters:
            raise CheckpointError(f"model: {name!r}: parametrized; remove its parametrizations first")
    own = {
        joined(prefix, attribute): tensor
        for prefix, module in model.named_modules(remove_duplicate=False)
        for attribute, tensor in own_tensors(module)
    }
    for given, text in ((model.state_dict(keep_vars=True), "model"), (state_dict, "state_dict")):
        if given is not None and (others := sorted(set(given) ^ set(own))):
            raise CheckpointError(
                f"{text} must have the names of the model's parameters and persistent buffers, and no extra "
                f"states; they differ in {few(others)}"
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
                f"state_dict: {name!r} must have shape {tuple(tensor.shape)} of {tensor.dtype}, as in the "
                f"model, got {tuple(value.shape)} of {value.dtype}"
            )
        tensors[name] = value
    if "__metadata__" in tensors:
        raise CheckpointError("model: '__metadata__': a name that safetensors has a use of its own for")
    return tensors, ties


def _check_storable(name: str, tensor: object) -> None:
    if isinstance(tensor, Tensor) and is_sharded(tensor):
        raise CheckpointError(f"model: {name!r}: a part of a sharded tensor; {_HOW_TO_GATHER}")
    if type(tensor) not in (Tensor, nn.Parameter):
        raise CheckpointError(f"model: {name!r} must be a tensor, got {type(tensor).__name__}")
    assert isinstance(tensor, Tensor)
    if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in STORABLE.values():
        raise CheckpointError(
            f"model: {name!r} must be a dense tensor that is not on the meta device, of one of "
            f"{list(STORABLE.values())}, got {tensor.layout} of {tensor.dtype} on {tensor.device}"
        )
