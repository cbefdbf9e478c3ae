"""Activations that kernels have."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._runtime.native import ACTIVATIONS
from ..errors import InvalidArgumentError


def name_of_activation(activation: Any) -> str | None:
    """The name of the activation that kernels have, if it is one."""
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise InvalidArgumentError(
                f"activation must be one of {list(ACTIVATIONS)} or a module, got {activation!r}"
            )
        return activation
    if not isinstance(activation, nn.Module):
        raise InvalidArgumentError(
            f"activation must be one of {list(ACTIVATIONS)} or a module, got {type(activation).__name__}"
        )
    kind = type(activation)
    if kind in (nn.ReLU, nn.SiLU, nn.Identity):
        return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(kind, "none")
    if kind is nn.GELU:
        return "gelu" if activation.approximate == "none" else None
    of_transformers = kind.__module__ == "transformers.activations"
    if of_transformers and kind.__name__ == "GELUActivation":
        return "gelu" if getattr(activation, "act", None) is nn.functional.gelu else None
    return "silu" if of_transformers and kind.__name__ == "SiLUActivation" else None
