"""Gradients of the operators.

Those of each product are the other two products, so every order of differentiation is available.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import UnsupportedError
from .pattern import lookup

Run = Callable[..., Tensor]
Rest = tuple[Any, ...]  # arguments of an operator after its tensors: handle, version, options

_OPS = torch.ops.tilesparse
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset.raw_repr()
_PLAIN_KEYS = {
    torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
}


class _DdsNt(torch.autograd.Function):
    """y = x Wᵀ + bias."""

    @staticmethod
    def forward(ctx: Any, run: Run, rest: Rest, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        if any(rest[2:3]):
            raise UnsupportedError(
                "activation: a fused one has no gradient; functional.linear applies it after the product"
            )
        _save(ctx, x, values, rest)
        return run(x, values, bias, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values = ctx.saved_tensors
        _, _, need_x, need_values, need_bias = ctx.needs_input_grad
        return (
            None,
            None,
            _OPS.dds_nn(grad, values, *ctx.key) if need_x else None,
            _OPS.sdd_tn(grad, x, *ctx.key) if need_values else None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if need_bias else None,
        )


class _DdsNn(torch.autograd.Function):
    """x = y W."""

    @staticmethod
    def forward(ctx: Any, run: Run, rest: Rest, y: Tensor, values: Tensor) -> Tensor:
        _save(ctx, y, values, rest)
        return run(y, values, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, values = ctx.saved_tensors
        _, _, need_y, need_values = ctx.needs_input_grad
        return (
            None,
            None,
            _OPS.dds_nt(grad, values, None, *ctx.key) if need_y else None,
            _OPS.sdd_tn(y, grad, *ctx.key) if need_values else None,
        )


class _SddTn(torch.autograd.Function):
    """W = yᵀ x on the pattern."""

    @staticmethod
    def forward(ctx: Any, run: Run, rest: Rest, y: Tensor, x: Tensor) -> Tensor:
        _save(ctx, y, x, rest)
        return run(y, x, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, x = ctx.saved_tensors
        _, _, need_y, need_x = ctx.needs_input_grad
        values = grad.contiguous()
        return (
            None,
            None,
            _OPS.dds_nt(x, values, None, *ctx.key) if need_y else None,
            _OPS.dds_nn(y, values, *ctx.key) if need_x else None,
        )


def _save(ctx: Any, first: Tensor, second: Tensor, rest: Rest) -> None:
    """Keeps each factor only if the gradient of the other one is asked for."""
    _, _, need_first, need_second, *_ = ctx.needs_input_grad
    ctx.save_for_backward(first if need_second else None, second if need_first else None)
    ctx.key = rest[:2]
    ctx.pattern = lookup(rest[0])  # must outlive its last name


def records_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record a product of these."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() takes longer
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _refuse_tangents(*tensors: Tensor | None) -> None:
    """Raises where forward-mode differentiation would silently lose a tangent."""
    unpack_dual: Callable[..., Any] = forward_ad.unpack_dual
    for tensor in tensors:
        if tensor is not None and unpack_dual(tensor).tangent is not None:
            raise UnsupportedError("forward-mode differentiation of block-sparse products is not supported")


def with_autograd(name: str, kernel: Run) -> Run:
    """The kernel of an operator as autograd's dispatch key takes it.

    ``torch.library.register_autograd`` would take twice the time per call. Where nothing but the
    kernel follows in the dispatcher (no mode, no transform), it is called right away, which saves a
    second pass through the dispatcher and the care that ``Function.apply`` takes of transforms.
    """
    op = getattr(_OPS, name).default
    function, tensors = _PRODUCTS[name]
    plain_apply = super(torch.autograd.Function, function).apply

    def redispatch(*args: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = op(*args)
        return result

    def product(keys: torch._C.DispatchKeySet, *args: Any) -> Tensor:
        if forward_ad._current_level >= 0:
            _refuse_tangents(*args[:tensors])
        plain = keys.raw_repr() & _AFTER_AUTOGRAD in _PLAIN_KEYS
        run, apply = (kernel, plain_apply) if plain else (redispatch, function.apply)
        if not records_gradient(*args[:tensors]):
            return run(*args)
        result: Tensor = apply(run, args[tensors:], *args[:tensors])
        return result

    return product


# The autograd function of each operator, and how many tensors it takes.
_PRODUCTS: dict[str, tuple[Any, int]] = {"dds_nt": (_DdsNt, 3), "dds_nn": (_DdsNn, 2), "sdd_tn": (_SddTn, 2)}
