"""Learning rates of sparse weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .._arguments import checked
from .._checks import checked_fraction, checked_number
from ..errors import InvalidArgumentError
from ._layers import checked_choice, sparse_layers


def _fitted(density: float) -> float:
    s = 1 - density
    return math.exp(1.969 * s**2 + 0.2905 * s)


RULES: Mapping[str, Callable[[float], float]] = {"fitted": _fitted, "mup": lambda density: 1 / density}


@checked
def learning_rate_factor(density: float, rule: str = "fitted") -> float:
    """Return the factor of the learning rate of a weight of this density over a dense one.

    Args:
        density: kept fraction of the blocks, above 0.
        rule: "fitted": exp(1.969 s² + 0.2905 s), where s = 1 - density: what was best for static random masks
            of BERT (Dietrich et al., "Towards Structured Dynamic Sparse Pre-Training of BERT", 2021), 3.8 at
            a density of 0.25 and 6.4 at 0.1. "mup": 1 / density, for Adam, with an initial variance that is
            proportional to 1 / density as well, which that of `BlockSparseLinear` is (Dey et al., "Sparse
            maximal update parameterization", 2024).

    Raises:
        InvalidArgumentError: the density is not above 0 and at most 1, or there is no such rule.
    """
    checked_choice("rule", rule, RULES)
    if not checked_fraction("density", density) > 0:
        raise InvalidArgumentError(f"density must be above 0, got {density}")
    return RULES[rule](density)


@checked
def parameter_groups(model: nn.Module, lr: float, *, rule: str = "fitted") -> list[dict[str, Any]]:
    """A model's parameters for an optimizer: weights of sparse layers learn faster, the sparser they are.

    Densities are those at the moment; a layer without any block has nothing to learn. Where `Gradual` lowers
    them, set the rate of their group anew after each of its events, by `learning_rate_factor`.

    An AdamW decays weights by lr · weight_decay, that is in the same proportion.

    Args:
        model: any, also without sparse layers.
        lr: the learning rate of dense weights, biases and everything else.
        rule: see `learning_rate_factor`.

    Returns:
        Groups with "params" and "lr": all else first, then one for each density of sparse layers, also for 1.

    Raises:
        InvalidArgumentError: ``lr`` is no finite number of at least 0, or there is no such rule.

    Examples:
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, lr=3e-4), weight_decay=0.1)
    """
    rate = checked_number("lr", lr)
    checked_choice("rule", rule, RULES)
    densities = {
        id(parameter): layer.density
        for layer in sparse_layers(model).values()
        for parameter in layer.parameters()
        if parameter.dim() == 3 and layer.density > 0  # weights, also those that are parametrized
    }
    groups: dict[float | None, list[nn.Parameter]] = {None: []}
    for parameter in model.parameters():
        groups.setdefault(densities.get(id(parameter)), []).append(parameter)
    return [
        {"params": parameters, "lr": rate if density is None else rate * learning_rate_factor(density, rule)}
        for density, parameters in groups.items()
        if parameters
    ]
