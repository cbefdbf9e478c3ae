"""Empty block-sparse layers for a model, as a manifest describes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .._names import names_of_modules, set_submodule
from .._runtime.tensor_files import named, read_header, read_json, shown
from ..config import METHOD, LayerSpec
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.convert import is_conv1d
from ..nn.experts import BlockSparseExperts, experts_like
from ..nn.experts_linear import ExpertsLinear
from ..nn.known_experts import projections_of, reason_not_known
from ..nn.linear import BlockSparseLinear
from ..nn.tensors import INDEX_NAMES
from ..patch.modules import hand_over, reason_from_parents, what_would_be_lost
from ..patch.references import follow
from ..storage.base import STORED_NAMES
from ..storage.registry import storage_of
from .files import CONFIG, INDEX, check_belongs
from .manifest import is_method, parsed_layers, read_section


class Replacement(NamedTuple):
    """A module of a model, all its names there, and what is to take its place: an empty layer, or experts."""

    names: list[str]
    module: nn.Module
    new: BlockSparseLinear | BlockSparseExperts

    def layers(self) -> dict[str, BlockSparseLinear]:
        """Return the empty layers by their first names in the model."""
        if isinstance(self.new, BlockSparseExperts):
            return {
                f"{self.names[0]}.{own}".lstrip("."): layer for own, layer in self.new.projections().items()
            }
        return {self.names[0]: self.new}


def prepare(model: nn.Module, section: Mapping[str, Any]) -> list[str]:
    """Gives a model the layers that a section describes, empty on the meta device, to be loaded into.

    Experts of Transformers become `BlockSparseExperts`. A `torch.nn.Linear`, also of a subclass,
    Transformers' ``Conv1D`` or `BlockSparseLinear` of the same shape becomes a `BlockSparseLinear` with the
    block shape, number of blocks and storage of the section, whose weight, bias and pattern have sizes only.
    It has a bias where the layer had one, and keeps its hooks, its mode and ``requires_grad``. A
    `BlockSparseLinear` stays the same object.

    Args:
        model: changed in place, once all is checked.
        section: see `section`.

    Returns:
        The names of the layers.

    Raises:
        InvalidArgumentError: the section is wrong, a layer is missing in the model, is of another kind or
            shape there, or is block-sparse there and not in the section. The model is as it was.
    """
    replacements = replacements_of(model, parsed_layers(section))
    install(model, replacements)
    return [name for replacement in replacements for name in replacement.layers()]


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
    if METHOD not in config and not is_method(config.get("quantization_config")):
        return []
    forms, _, files = read_section(folder)
    scaled = [name for name, form in forms.items() if form.scales is not None]
    if scaled and dtype not in (None, torch.float32):
        raise UnsupportedError(
            f"dtype must be None or torch.float32, got {dtype}: layer {scaled[0]!r} has scales "
            "that it would round"
        )
    for name in files or ():
        read = read_json if name == INDEX else read_header
        check_belongs(name, read(folder / name)[1], files)
    with named(CONFIG):
        replacements = replacements_of(model, forms)
    install(model, replacements)
    return [name for replacement in replacements for name in replacement.layers()]


def replacements_of(model: nn.Module, forms: Mapping[str, LayerSpec]) -> list[Replacement]:
    """Everything that can fail; the model is only read."""
    names = names_of_modules(model)
    modules = {alias: module for module, aliases in names.items() for alias in aliases}
    found: dict[nn.Module, LayerSpec] = {}
    experts: dict[nn.Module, dict[str, LayerSpec]] = {}  # dense ones, and the forms of their projections
    for name, form in forms.items():
        module = modules.get(name)
        parent, _, own = name.rpartition(".")
        dense = modules.get(parent)
        if dense is not None and own in layers_of_experts(dense) and form.experts is not None:
            _check_projection(model, names[dense], dense, name, form)
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
    made = [Replacement(names[module], module, _empty(module, form)) for module, form in found.items()]
    return made + [
        Replacement(names[dense], dense, _empty_experts(dense, own)) for dense, own in experts.items()
    ]


def layers_of_experts(module: nn.Module) -> dict[str, str]:
    """Return the parameters of dense experts by the names of the layers that replace them; else nothing."""
    found = projections_of(module)
    return {} if found is None else {own: name for name, own in found.layers().items()}


def _check_projection(
    model: nn.Module, aliases: list[str], dense: nn.Module, name: str, form: LayerSpec
) -> None:
    found = projections_of(dense)
    assert found is not None
    reason = reason_not_known(dense) or what_would_be_lost(dense)
    weight = dense.get_parameter(layers_of_experts(dense)[name.rpartition(".")[2]])
    experts, out, in_ = (weight.mT if found.transposed else weight).shape
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
        bias = dense._parameters.get(f"{name}_bias")
        layer = ExpertsLinear.from_spec(forms[own], bias=bias is not None, device="meta")
        assert isinstance(layer, ExpertsLinear)
        trained = dense.get_parameter(name).requires_grad
        layer.weight.requires_grad_(storage_of(forms[own].storage).trainable and trained)
        if layer.bias is not None and bias is not None:
            layer.bias.requires_grad_(bias.requires_grad)
        layers.append(layer.train(dense.training))
    return experts_like(dense, *layers)


def _reason_not_replaceable(
    model: nn.Module, module: nn.Module, aliases: list[str], form: LayerSpec
) -> str | None:
    # Also of classes that only a patcher of the user's own replaces: the checkpoint says that it did.
    is_linear = isinstance(module, BlockSparseLinear | nn.Linear) or is_conv1d(module)
    if not is_linear or is_parametrized(module):
        return f"it must be a linear layer, got {type(module).__name__}"
    if type(module._parameters.get("weight")) is not nn.Parameter:
        return (
            "its weight is no plain parameter; remove parametrizations, and shard a model after it is loaded"
        )
    if form.experts != getattr(module, "experts", None):
        return f"experts must be those of the model, got {form.experts}"
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


def _empty(module: Any, form: LayerSpec) -> BlockSparseLinear:
    """Return a layer of this spec on the meta device, like the module in all else."""
    kind = ExpertsLinear if form.experts is not None else BlockSparseLinear
    layer = kind.from_spec(form, bias=module.bias is not None, device="meta")
    was_trainable = (
        module.weight.requires_grad or not storage_of(getattr(module, "storage", "plain")).trainable
    )
    layer.weight.requires_grad_(storage_of(form.storage).trainable and was_trainable)
    if layer.bias is not None:
        layer.bias.requires_grad_(module.bias.requires_grad)
    return layer.train(module.training)


def install(model: nn.Module, replacements: list[Replacement]) -> None:
    """Put the layers into the model; nothing fails any more."""
    new = {}
    for names, module, layer in replacements:
        if isinstance(module, BlockSparseLinear) and isinstance(layer, BlockSparseLinear):
            module.take_over(layer)
            continue
        new[module] = layer
        hand_over(module, layer)
        for name in names:
            set_submodule(model, name, layer)
    follow(model, new)
