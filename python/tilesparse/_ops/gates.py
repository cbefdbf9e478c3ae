"""GLU gates and their gradients, by kernels on CUDA and by PyTorch elsewhere."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._runtime import activations as _activations
from .._runtime.layout import row_stride
from .._runtime.native import ACTIVATIONS
from .._runtime.private import transforms_active
from .activations import ACTIVATION_GRADIENTS, activated, activation_code
from .autograd import is_plain, records_gradient
from .register import register_plainly


def gated(y: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """Multiply by a GLU gate whose shape was checked, see `functional.gated`."""
    given = (y,) if gate is None else (y, gate)
    if is_plain(given) and _activations.multiplies_by_gate(y, gate):
        if not records_gradient(given):
            return _activations.gate(y, gate, activation_code(activation))
        if gate is None or y.numel() >= _activations.MANY_ELEMENTS:
            return _gate(y, gate, activation)
    if (
        gate is None
        and is_compiling()
        and _activations.may_multiply_by_gate(y, 32)
        and not transforms_active()
    ):
        halves: Tensor = _GATED_HALVES(y, activation_code(activation))
        return halves
    factor, by = _halves(y, gate)
    return factor * activated(by, activation)


def _halves(y: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the factor and the gate."""
    if gate is not None:
        return y, gate
    by, factor = y.chunk(2, -1)
    return factor, by


class _Gated(torch.autograd.Function):
    """`gated`, which saves only its arguments; one pass computes both gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(y, gate)
        ctx.activation = activation
        return _activations.gate(y, gate, activation_code(activation))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (y, gate), grad = ctx.saved_tensors, grads[0]
        tensors = (grad, y) if gate is None else (grad, y, gate)
        if records_gradient(tensors) or not is_plain(tensors):
            return *_gate_gradients(grad, y, gate, ctx.activation), None
        return *_activations.gate_gradient(_in_rows(grad), y, gate, activation_code(ctx.activation)), None


_gate: Callable[..., Tensor] = _Gated.apply


def _gate_gradients(
    grad: Tensor, y: Tensor, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of y and the gate by PyTorch, so that they can be differentiated again."""
    factor, by = _halves(y, gate)
    of_factor = grad * activated(by, activation)
    of_gate = ACTIVATION_GRADIENTS[activation](grad * factor, by)
    return (torch.cat((of_gate, of_factor), -1), None) if gate is None else (of_factor, of_gate)


def _gated_halves(y: Tensor, code: int) -> Tensor:
    return _activations.gate(_in_rows(y), None, code) if y.numel() else _gated_halves_fake(y, code)


def _gated_halves_gradient(grad: Tensor, y: Tensor, code: int) -> Tensor:
    if y.numel() == 0:
        return y.new_empty(y.shape)
    return _activations.gate_gradient(_in_rows(grad), _in_rows(y), None, code)[0]


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if row_stride(tensor) is not None else tensor.clone(memory_format=torch.contiguous_format)


def _gated_halves_fake(y: Tensor, code: int) -> Tensor:
    return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)


def _gated_halves_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    y, ctx.code = inputs
    ctx.save_for_backward(y)


def _gated_halves_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    if records_gradient((grad, y)):
        return _gate_gradients(grad, y, None, list(ACTIVATIONS)[ctx.code])[0], None
    return _GATED_HALVES_GRADIENT(grad, y, ctx.code), None


_GATED_HALVES = register_plainly(
    "gated_halves",
    _gated_halves,
    _gated_halves_fake,
    ("CUDA",),
    (_gated_halves_backward, _gated_halves_context),
)
_GATED_HALVES_GRADIENT = register_plainly(
    "gated_halves_gradient", _gated_halves_gradient, lambda grad, y, code: y.new_empty(y.shape), ("CUDA",)
)
