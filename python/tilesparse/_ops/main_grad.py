"""Gradients of weights that kernels add in float32 to tensors beside them.

``weight.main_grad`` is where the gradient of a `BlockSparseLinear` goes instead of ``weight.grad``, by
Megatron-LM's protocol ("gradient accumulation fusion"): every backward pass adds to it, or with
``weight.overwrite_main_grad`` writes it anew. ``weight.grad_added_to_main_grad``, where there is such an
attribute, becomes True, and autograd is given a tensor in place of the gradient, so that its hooks run: zeros
if ``weight.zero_out_wgrad`` is true, and anything otherwise. A bias beside such a weight may have the same
attributes; in either case the kernel sums its gradient in the same pass.

The product itself is recorded without weight and bias; what is recorded behind it passes its gradient on. So
every way to compute the product, with masks, densely or under autocast, has these gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._checks import ALIGNMENT, Index, is_misaligned, is_regular
from .._runtime.launch import write_sdd
from .._runtime.pattern_cache import prepared
from .._runtime.torch_private import is_leaf_added_to, transforms_active
from ..errors import InvalidArgumentError, UnsupportedError
from .autograd import check_unchanged
from .epilogue import bias_gradient


class _Adding(torch.autograd.Function):
    """Identity of y whose backward adds the gradients of weight and bias to their ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, index: Index) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bias = bias
        pattern = prepared(index)
        ctx.of = index, pattern, pattern.generation, weight, weight.shape
        return y.detach()  # not a view for autograd, so that what follows may write to it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        check_unchanged(*ctx.of)
        _, pattern, _, weight, _ = ctx.of
        nodes = ctx.next_functions
        of_weight = _target("weight.main_grad", weight, nodes[1][0], x)
        of_bias = _NOWHERE
        if ctx.needs_input_grad[2]:
            of_bias = _target("bias.main_grad", ctx.bias, nodes[2][0], grad)
        together = False
        if of_weight.memory is not None:
            together = is_regular(pattern.shape, pattern.block_shape)
            beside = (of_bias.memory, of_bias.adds) if together else ()
            write_sdd(grad, x, of_weight.memory, pattern, of_weight.adds, *beside)
        if of_bias.memory is not None and not together:
            sums = bias_gradient(grad, of_bias.memory.dtype)
            of_bias.memory.add_(sums) if of_bias.adds else of_bias.memory.copy_(sums)
        return grad, of_weight.given(), of_bias.given(), None, None


# Function.apply looks for transforms first, which are refused here.
_adding: Callable[..., Tensor] = getattr(super(torch.autograd.Function, _Adding), "apply", _Adding.apply)


def add_gradient(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, index: Index) -> Tensor:
    """Return y, which was computed without gradients of weight and bias, with those of this module.

    ``bias``: with a ``main_grad``, or any other tensor that has its gradient, in the dtype of y.
    """
    if transforms_active():
        raise UnsupportedError(
            "main_grad cannot be added to under transforms of torch.func, which return gradients; delete the "
            "attribute before"
        )
    _check("weight.main_grad", weight)
    if bias is not None and has_main_grad(bias):
        _check("bias.main_grad", bias)
    return _adding(y, weight, bias, x, index)


def has_main_grad(parameter: Any) -> bool:
    """Return True if the parameter has a ``main_grad``."""
    return getattr(parameter, "main_grad", None) is not None


# Graphs have no gradient without a result, and break here. To ask for that takes a while in each call.
_disable: Any = torch.compiler.disable
add_gradient_uncompiled: Callable[..., Tensor] = _disable(add_gradient)


def _check(name: str, parameter: Any) -> None:
    """Raise unless the gradient can be added to the parameter's ``main_grad``."""
    main_grad = parameter.main_grad
    if not isinstance(main_grad, Tensor) or type(main_grad.detach()) is not Tensor:
        raise InvalidArgumentError(f"{name} must be a plain tensor, got {type(main_grad).__name__}")
    given = main_grad.shape, main_grad.dtype, main_grad.device
    if given != (parameter.shape, torch.float32, parameter.device) or not main_grad.is_contiguous():
        raise InvalidArgumentError(
            f"{name} must be a contiguous tensor {list(parameter.shape)} of torch.float32 on "
            f"{parameter.device}, as the parameter is, got shape {list(main_grad.shape)} with strides "
            f"{main_grad.stride()} of {main_grad.dtype} on {main_grad.device}"
        )
    if main_grad.requires_grad:
        raise InvalidArgumentError(f"{name} must not require a gradient")
    if main_grad.dim() > 1 and is_misaligned(main_grad):
        raise InvalidArgumentError(f"{name} must be aligned to {ALIGNMENT} bytes on CUDA")


class _Target(NamedTuple):
    """Destination of a parameter's gradient; None: it is not asked for.

    ``of``: the parameter, where that is beside it and not given to autograd.
    """

    memory: Tensor | None
    adds: bool
    of: Any

    def given(self) -> Tensor | None:
        """Return the tensor that autograd is given for what was written."""
        parameter = self.of
        if parameter is None:
            return self.memory
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        like = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
        return like(parameter.detach())


_NOWHERE = _Target(None, False, None)


def _target(name: str, parameter: Any, node: Any, like: Tensor) -> _Target:
    """Return the target of a leaf, given by its node; ``like`` has the dtype of autograd's gradient."""
    added = is_leaf_added_to(node) if has_main_grad(parameter) else None
    if added is None:
        return _Target(like.new_empty(parameter.shape), False, None)
    if not added:
        return _NOWHERE
    _check(name, parameter)  # another one may have been put there since the forward pass
    return _Target(parameter.main_grad, not getattr(parameter, "overwrite_main_grad", False), parameter)
