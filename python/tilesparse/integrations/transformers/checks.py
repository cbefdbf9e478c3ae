"""What loading checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._checks import DTYPES
from ..._runtime.tensor_files import StoredTensor, read_header
from ...checkpoint.files import check_belongs
from ...errors import CheckpointError, InvalidArgumentError, InvalidPatternError, UnsupportedError
from ...nn.linear import BlockSparseLinear
from ...nn.tensors import INDEX_NAMES, align
from ...storage.base import STORED_NAMES
from ...storage.registry import forms_of, storage_of
from .layers import tensors_of

OWN = ("weight", "bias", *INDEX_NAMES, *STORED_NAMES)  # names of a layer's tensors


def named_as_in(model: Any, layers: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Of each layer that a model has, by its name there: the name in the checkpoint, and the entry.

    A model without the head of the one that was saved, or with another, has names with or without the prefix
    of the base model, and lacks some, which Transformers reports as unexpected. A layer with an adapter does
    not lack but has another name: it would be dense and random.
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    prefix, found = f"{model.base_model_prefix}.", {}

    def find(name: str, experts: bool = False) -> str | None:
        if experts:  # projections of dense experts are no modules
            parent, _, own = name.rpartition(".")
            there = find(parent)
            return find(name) or (None if there is None else f"{there}.{own}")
        return next((own for own in (name, prefix + name, name.removeprefix(prefix)) if own in modules), None)

    for name, entry in layers.items():
        own = find(name, entry.get("experts") is not None)
        outer = find(name.removesuffix(".base_layer"))
        if own is None and outer is not None:
            raise CheckpointError(
                f"layers: {name!r} lies inside {outer!r}, which is a {type(modules[outer]).__name__} here: "
                "the model was saved with an adapter in it; merge or remove the adapter before saving"
            )
        if own is not None:  # of another kind of module, `prepare` refuses it
            dtype = _dtype_of(modules, own, entry["dtype"])
            found[own] = name, {**entry, "dtype": str(dtype).removeprefix("torch.")}
    if layers and not found:
        raise InvalidArgumentError(
            f"layers: none of them is in {type(model).__name__}, as {next(iter(layers))!r}"
        )
    return found


def _dtype_of(modules: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the dtype of the weight of a layer, or of the parameters that are dense experts' there."""
    if name in modules:
        return getattr(getattr(modules[name], "weight", None), "dtype", default)
    dense = modules[name.rpartition(".")[0]]
    return next((parameter.dtype for parameter in dense.parameters(recurse=False)), default)


def check_files(layers: Mapping[str, nn.Module], files: Sequence[str], checksums: Mapping[str, str]) -> None:
    """That files hold what layers need, before anything is read, and belong to the configuration.

    Layers that Transformers stores under other names are only checked once they are loaded.
    """
    stored: dict[str, StoredTensor] = {}
    for file in map(Path, files):
        if file.suffix == ".safetensors":
            tensors, checksum = read_header(file)
            check_belongs(file.name, checksum, checksums)
            stored |= tensors
    for name, layer in layers.items():
        given = {own: stored[f"{name}.{own}"] for own in OWN if f"{name}.{own}" in stored}
        if given:
            _check_forms(name, given, dict(tensors_of(layer)))


def _check_forms(name: str, given: Mapping[str, StoredTensor], expected: Mapping[str, Tensor]) -> None:
    different = sorted(given.keys() ^ expected.keys())
    if different:
        there = "there, but not" if different[0] in given else "missing, but"
        raise CheckpointError(f"{name}.{different[0]}: {there} in the form that the configuration describes")
    for own, source in given.items():
        shape, dtype = tuple(expected[own].shape), expected[own].dtype
        alike = source.dtype == dtype or (source.dtype in DTYPES and dtype in DTYPES)
        if source.shape != shape or not alike:
            raise CheckpointError(
                f"{source.file.name}: '{name}.{own}' must have shape {shape} of {dtype}, as the "
                f"configuration describes it, got {source.shape} of {source.dtype}"
            )


def settle(name: str, layer: BlockSparseLinear) -> None:
    """Checks what was loaded into a layer, and undoes what Transformers does to tensors of other kinds."""
    if not hasattr(layer, "_hf_hook"):  # tensors that were moved to be offloaded have lost the mark
        for own, tensor in tensors_of(layer):
            if not hasattr(tensor, "_is_hf_initialized"):
                raise CheckpointError(f"{name}.{own}: missing in the checkpoint")
    dtypes = {own: dtype for own, (_, dtype) in forms_of(layer.spec).items()} | dict.fromkeys(
        INDEX_NAMES, torch.int32
    )
    weight = layer.weight.detach().to(dtypes.pop("weight"))
    layer.weight = nn.Parameter(weight, storage_of(layer.storage).trainable)
    if layer.metadata is not None and layer.metadata.is_floating_point():
        raise UnsupportedError(
            f"{name}.metadata: rounded by Transformers, which keeps this layer in float32; load the model "
            "with dtype=torch.float32, or store the layer plain"
        )
    for own, dtype in dtypes.items():  # others have survived that
        layer._buffers[own] = layer.get_buffer(own).to(dtype)
    align(layer)
    try:
        _ = layer.pattern
    except InvalidPatternError as error:
        raise CheckpointError(f"layer {name!r}: {error}") from error
