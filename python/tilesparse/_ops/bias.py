"""Gradients of biases: sums over tokens, taken together with other gradients where that saves time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._checks import Index, is_misaligned
from .._runtime import activations as _activations
from .._runtime.lookup import prepared
from .._runtime.prepared import Prepared
from .._runtime.private import transforms_active
from .._runtime.products import sdd_with_bias
from .activations import ACTIVATION_GRADIENTS, activated, activation_code
from .autograd import is_plain, records_gradient
from .fakes import sdd_tn_with_bias_fake
from .register import register


def bias_gradient(grad: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum the gradient of a product over tokens."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=dtype)


def weight_and_bias_gradients(grad: Tensor, x: Tensor, index: Index) -> tuple[Tensor, Tensor] | None:
    """Return both gradients from one pass over ``grad``, or None where each is computed by itself."""
    if not grad.is_cuda or transforms_active() or records_gradient((grad, x)):
        return None
    if not is_plain((grad, x)):
        both: tuple[Tensor, Tensor] = _SDD_TN_WITH_BIAS(grad, x, *index)
        return both
    if grad.numel() >= _activations.MANY_ELEMENTS:
        return sdd_with_bias(grad, x, prepared(index))
    return None


def _sdd_tn_with_bias(y: Tensor, x: Tensor, pattern: Prepared) -> tuple[Tensor, Tensor]:
    return sdd_with_bias(y, x, pattern)


_SDD_TN_WITH_BIAS = register("sdd_tn_with_bias", 2, _sdd_tn_with_bias, sdd_tn_with_bias_fake)


def sums_with_activation(x: Tensor, bias: Tensor | None) -> bool:
    """Return True if the kernel of the activation's gradient also sums that of the bias."""
    if bias is None or not bias.requires_grad or not x.is_cuda or x.dtype == torch.float64:
        return False
    return is_plain((x, bias)) and x.shape[:-1].numel() * bias.shape[0] >= _activations.MANY_ELEMENTS


class _Activated(torch.autograd.Function):
    """activation(z), where z contains a bias: its backward gives the gradients of both in one pass.

    So z is computed with the bias detached; only a second derivative connects it again.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(z)
        ctx.activation = activation
        ctx.bias = (
            bias  # not saved as z is: its values are not needed, and may change before the backward pass
        )
        return activated(z, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (z,), grad = ctx.saved_tensors, grads[0]
        if torch.is_grad_enabled():
            z = z + (ctx.bias - ctx.bias.detach())
        tensors = grad, z
        if records_gradient(tensors) or not all(map(_is_whole, tensors)) or not is_plain(tensors):
            of_z = ACTIVATION_GRADIENTS[ctx.activation](grad, z)  # which can be differentiated again
            return of_z, bias_gradient(of_z), None
        return *_activations.activation_gradient(grad, z, activation_code(ctx.activation)), None


activate: Callable[..., Tensor] = _Activated.apply


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() > 0 and not is_misaligned(tensor)
