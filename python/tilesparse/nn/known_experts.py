"""Experts of Transformers whose function is known: found by the interface they implement, not by their names.

Transformers' ``use_experts_implementation`` marks a class of experts. Its modules say how their weights lie
(``is_transposed``, ``is_concatenated``) and what there is (``has_gate``, ``has_bias``, and in newer versions
``has_post_expert_norm``), and compute ``down(_apply_gate(gate_up(x)))`` of the tokens of each expert,
whatever implementation is chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .stored import StoredWeight
from .tensors import is_sharded

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
NORM = "post_expert_norm"


class Projections(NamedTuple):
    """Names of the parameters of experts, which are 3-D: [experts, out, in], or [experts, in, out]."""

    up: str  # of gate and up, where there is a gate
    down: str
    transposed: bool
    bias: bool

    def names(self) -> tuple[str, str]:
        """(up, down)."""
        return self.up, self.down

    def layers(self) -> dict[str, str]:
        """Return the names that sparse projections have in their places, by parameter.

        They differ: Transformers' conversions of checkpoints take names by their beginnings and ends.
        """
        return {name: name.removesuffix("_proj") for name in self.names()}

    def biases(self) -> tuple[str, ...]:
        """Names of the biases [experts, out], if there are any."""
        return tuple(f"{name}_bias" for name in self.names()) if self.bias else ()


def projections_of(module: nn.Module) -> Projections | None:
    """Return the projections of a module of dense experts, None for any other module."""
    if not all(isinstance(vars(module).get(flag), bool) for flag in FLAGS):
        return None
    if not callable(getattr(type(module), "_apply_gate", None)):
        return None
    own: Any = module
    found = Projections(
        "gate_up_proj" if own.has_gate else "up_proj", "down_proj", own.is_transposed, own.has_bias
    )
    weights = [module._parameters.get(name) for name in found.names()]
    if any(weight is None or weight.dim() != 3 for weight in weights):
        return None
    return found


def reason_not_known(module: nn.Module) -> str | None:
    """Say what keeps experts, which `projections_of` knows, from being replaced; None if nothing does."""
    found = projections_of(module)
    assert found is not None
    parameters = module.parameters(recurse=False)
    if getattr(module, "_is_expert_parallel", False) or any(map(is_sharded, parameters)):
        return "its experts are spread over processes; convert the model before they are"
    if "forward" in vars(module) or "_apply_gate" in vars(module):
        return "its forward or _apply_gate was replaced by another function, which would be lost"
    known = {*found.names(), *found.biases()}
    unknown = sorted({*module._parameters, *module._buffers} - known)
    if unknown:
        return f"it holds {', '.join(unknown)}, which would be lost"
    missing = sorted(known - {*module._parameters})
    if missing:
        return f"it lacks {', '.join(missing)}"
    experts = {len(parameter) for parameter in module._parameters.values() if parameter is not None}
    if len(experts) > 1:
        return f"its parameters are of different numbers of experts, {sorted(experts)}"
    return None


def has_norm(module: nn.Module) -> bool:
    """Return True if experts, which `projections_of` knows, have a norm behind each."""
    return bool(vars(module).get("has_post_expert_norm", False))  # Transformers 5.17 knows none


def dense_weight_of(module: nn.Module, name: str) -> Tensor:
    """Return W [experts · out, in] of a projection without gradient; a copy where it lies transposed."""
    found = projections_of(module)
    assert found is not None
    weight = module.get_parameter(name).detach()
    return (weight.mT if found.transposed else weight).flatten(0, 1)


def stacked_parameters(module: nn.Module) -> list[str]:
    """Return the names of a module's own floating parameters of three dimensions, as experts have."""
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if not nn.parameter.is_lazy(parameter)
        and parameter.dim() == 3
        and torch.is_floating_point(parameter)
        and not isinstance(module, nn.modules.conv._ConvNd)
    ]


def stacked_in(model: nn.Module) -> dict[str, list[str]]:
    """Return `stacked_parameters` of the dense modules of a model by the names of modules."""
    dense = {name: module for name, module in model.named_modules() if not isinstance(module, StoredWeight)}
    found = {name: stacked_parameters(module) for name, module in dense.items()}
    return {name: parameters for name, parameters in found.items() if parameters}
