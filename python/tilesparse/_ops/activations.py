"""Activations and their gradients by PyTorch, to any order, and their numbers for operators."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._arguments import shown
from .._runtime.native import ACTIVATIONS
from ..errors import InvalidArgumentError, UnsupportedError

_BY_PYTORCH = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def _gradient_of_silu(grad: Tensor, z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(z)
    return grad * sigmoid * (1 + z * (1 - sigmoid))


# Gradients of z from that of activation(z).
ACTIVATION_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda grad, z: grad,
    "relu": lambda grad, z: torch.ops.aten.threshold_backward(grad, z, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": _gradient_of_silu,
}


def activation_code(activation: str) -> int:
    """Return the number of an activation for operators."""
    try:
        return ACTIVATIONS[activation]
    except (KeyError, TypeError):
        pass
    if isinstance(activation, torch.fx.Proxy):
        raise UnsupportedError(
            "activation must be known when torch.fx.symbolic_trace traces a layer by itself: trace a module "
            "that contains it, or give concrete_args for all arguments but x"
        )
    raise InvalidArgumentError(f"activation must be one of {list(ACTIVATIONS)}, got {shown(activation)}")


def activated(y: Tensor, activation: str) -> Tensor:
    """Apply an activation by PyTorch."""
    return y if activation == "none" else _BY_PYTORCH[activation](y)
