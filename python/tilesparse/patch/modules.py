"""Modules of a model: their names, what holds them in place, and putting others there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..nn.convert import is_conv1d, is_stored_otherwise
from ..nn.experts import BlockSparseExperts
from ..nn.linear import BlockSparseLinear
from ..nn.reference import PseudoBlockSparseLinear

Replacement: TypeAlias = BlockSparseLinear | PseudoBlockSparseLinear | BlockSparseExperts

# What `torch.nn.Module` keeps of the hooks of a call. A new layer shares the containers, so that the
# handles that were given out still remove their hooks.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
_OF_LINEAR = {*vars(nn.Linear(1, 1, device="meta")), "nf", "nx"}  # the last two of Conv1D
_STATE_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class Target:
    """A module to replace: all its names, its replacement, and whether blocks were chosen for that."""

    names: list[str]
    module: nn.Module
    replacement: nn.Module
    chosen: bool = False


def owners_of_parameters(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[nn.Module]]:
    """Map each parameter to the modules that hold it directly."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return owners


def output_embeddings(names: Mapping[nn.Module, list[str]]) -> set[nn.Module]:
    """Return layers named lm_head, and those that models of Transformers declare."""
    found = {
        module
        for module, aliases in names.items()
        if any(alias.rpartition(".")[2] == "lm_head" for alias in aliases)
    }
    for module in names:
        get = getattr(module, "get_output_embeddings", None)
        try:
            output = get() if callable(get) else None
        except NotImplementedError:  # a model without any
            continue
        if isinstance(output, nn.Module):
            found.add(output)
    return found


def is_linear(module: nn.Module) -> bool:
    """Return True for `torch.nn.Linear` itself and Transformers' ``Conv1D``."""
    return type(module) is nn.Linear or is_conv1d(module)


def reason_from_parents(model: nn.Module, aliases: Iterable[str]) -> str | None:
    """Say what in the modules around a layer keeps it from being replaced, or return None."""
    parents = (model.get_submodule(name.rpartition(".")[0]) for name in aliases)
    if torch.backends.mha.get_fastpath_enabled() and any(
        isinstance(parent, nn.TransformerEncoderLayer) for parent in parents
    ):
        return (
            "nn.TransformerEncoderLayer reads its weight directly in inference; call "
            "torch.backends.mha.set_fastpath_enabled(False) first"
        )
    return None


def what_would_be_lost(module: nn.Module) -> str | None:
    """Say what a module has that its replacement could not keep, or return None."""
    parameters = module.parameters(recurse=False)
    if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters):
        return "a hook on a parameter cannot move to the new parameter; remove it first"
    if any(getattr(module, attribute) for attribute in _STATE_HOOKS):
        return "a hook of its state dict cannot move to a sparse layer; remove it first"
    if module._backward_hooks and not module._is_full_backward_hook:
        return "a hook of register_backward_hook cannot move; use register_full_backward_hook"
    if "forward" in vars(module):
        return "its forward was replaced by another function, which would be lost"
    if vars(module).get("_compiled_call_impl") is not None:
        return "it is compiled by itself; compile it afterwards"
    weight = module._parameters.get("weight")
    of_weight = {} if weight is None or is_stored_otherwise(weight) else vars(weight)
    for attribute, value in of_weight.items():
        if isinstance(value, Tensor):
            return f"its weight has an attribute {attribute}, a tensor that fits the dense weight alone"
    return None


def tie_of(
    module: nn.Module,
    names: Mapping[nn.Module, list[str]],
    owners: Mapping[nn.Parameter, list[nn.Module]],
) -> str | None:
    """Say with which other modules a module shares a parameter, or return None."""
    for name, parameter in module.named_parameters(recurse=False):
        others = [names[owner][0] for owner in owners[parameter] if owner is not module]
        if others:
            return f"{name} is shared with {', '.join(others)}; the option untie patches it all the same"
    return None


def own_attributes(linear: nn.Module) -> dict[str, object]:
    """Return the attributes that someone has given to a linear layer."""
    return {name: value for name, value in vars(linear).items() if name not in _OF_LINEAR}


def hidden_attribute(module: nn.Module, replacement: nn.Module) -> str | None:
    """Say which attribute that someone has given to a layer would hide one of its replacement, or None."""
    if not is_linear(module):
        return None
    hidden = {*dir(replacement), *vars(replacement)} & own_attributes(module).keys()
    return f"its attribute {min(hidden)} would hide that of a sparse layer; rename it" if hidden else None


def hand_over(source: nn.Module, receiver: nn.Module) -> None:
    """Let the replacement of a module have its hooks, and attributes that someone has given to it."""
    share_hooks(source, receiver)
    if not is_linear(source):
        return
    vars(receiver).update(own_attributes(source))
    for name, parameter in source._parameters.items():
        taker = receiver._parameters.get(name)
        if parameter is not None and taker is not None:
            vars(taker).update(vars(parameter))


def share_hooks(source: nn.Module, receiver: nn.Module) -> None:
    """Let `receiver` have the very hooks of `source`."""
    for attribute in _HOOKS:
        setattr(receiver, attribute, getattr(source, attribute))
