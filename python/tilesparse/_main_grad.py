"""Gradients of weights that kernels add in float32 to tensors beside them.

``weight.main_grad`` is where the gradient of a `BlockSparseLinear` goes instead of ``weight.grad``, as in
Megatron-LM, whose protocol this is ("gradient accumulation fusion"):

- A float32 tensor, shaped like the weight and on its device, is added to by every backward pass.
- With ``weight.overwrite_main_grad`` true it is written anew instead.
- ``weight.grad_added_to_main_grad``, where there is such an attribute, becomes True, and autograd is given a
  tensor in place of the gradient, so that its hooks run: zeros if ``weight.zero_out_wgrad`` is true, and
  anything otherwise. Without that attribute ``weight.grad`` stays None.

``torch.autograd.grad`` adds to none of these, as it does not add to ``grad``.

The product itself is recorded without the weight; what is recorded behind it passes its gradient on. So every
way to compute the product, with masks, densely or under autocast, has this gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ._autograd import check_unchanged
from ._checks import ALIGNMENT, Index, is_misaligned
from ._launch import Prepared, prepared, sdd, write_sdd
from ._private import is_leaf_added_to, transforms_active
from .errors import InvalidArgumentError, UnsupportedError


class GradientOf:
    """In the place of a tensor: the gradient of another parameter, which may be None, as after zero_grad."""

    def __init__(self, master: nn.Parameter) -> None:
        self.master = master

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # no optimizer trains the copy of a master that comes with a saved model


class _Adding(torch.autograd.Function):
    """y as it is, and a gradient of the weight that is added to what is beside it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, x: Tensor, index: Index) -> Tensor:
        ctx.save_for_backward(x)
        pattern = prepared(index)
        ctx.of = index, pattern, pattern.generation, weight, weight.shape
        return y.detach()  # not a view for autograd, so that what follows may write to it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        check_unchanged(*ctx.of)
        _, pattern, _, weight, _ = ctx.of
        is_added = is_leaf_added_to(ctx.next_functions[1][0])
        if is_added is None:
            return grad, sdd(grad, x, pattern), None, None
        if not is_added:
            return grad, None, None, None
        _add(grad, x, weight, pattern)
        return grad, _stand_in(weight), None, None


# Function.apply looks for transforms first, which are refused here.
_adding: Callable[..., Tensor] = getattr(super(torch.autograd.Function, _Adding), "apply", _Adding.apply)


def add_gradient(y: Tensor, x: Tensor, weight: Tensor, index: Index) -> Tensor:
    """y = x Wᵀ + …, computed without a gradient of the weight, with one that is added to its main_grad."""
    if transforms_active():
        raise UnsupportedError(
            "main_grad: transforms of torch.func return gradients, and would change what is beside the "
            "weight; delete the attribute before"
        )
    _check(weight)
    return _adding(y, weight, x, index)


# Graphs have no gradient without a result, and break here. To ask for that takes a while in each call.
_disable: Any = torch.compiler.disable
add_gradient_uncompiled: Callable[..., Tensor] = _disable(add_gradient)


def _check(weight: Any) -> None:
    """That the gradient can be added to what is beside the weight."""
    main_grad = weight.main_grad
    if isinstance(main_grad, GradientOf):
        return
    if not isinstance(main_grad, Tensor) or type(main_grad.detach()) is not Tensor:
        raise InvalidArgumentError(f"main_grad: a plain tensor expected, got {type(main_grad).__name__}")
    given = main_grad.shape, main_grad.dtype, main_grad.device
    if given != (weight.shape, torch.float32, weight.device) or not main_grad.is_contiguous():
        raise InvalidArgumentError(
            f"main_grad: a contiguous tensor {list(weight.shape)} of torch.float32 on {weight.device} "
            f"expected, as the weight is, got shape {list(main_grad.shape)} with strides "
            f"{main_grad.stride()} of {main_grad.dtype} on {main_grad.device}"
        )
    if main_grad.requires_grad or is_misaligned(main_grad):
        raise InvalidArgumentError(
            f"main_grad: a tensor without gradient, on CUDA aligned to {ALIGNMENT} bytes, expected"
        )


def _add(grad: Tensor, x: Tensor, weight: Any, pattern: Prepared) -> None:
    _check(weight)  # another one may have been put there since the forward pass
    main_grad = weight.main_grad
    if not isinstance(main_grad, GradientOf):
        write_sdd(grad, x, main_grad, pattern, not getattr(weight, "overwrite_main_grad", False))
        return
    master = main_grad.master
    if master.grad is not None:
        write_sdd(grad, x, master.grad, pattern, True)
        return
    first = torch.empty_like(master, requires_grad=False)
    write_sdd(grad, x, first, pattern, False)
    master.grad = first


def _stand_in(weight: Any) -> Tensor | None:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    like = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return like(weight.detach())
