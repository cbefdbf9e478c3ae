"""Gradients of the operators.

Those of each product are the other two products, so every order of differentiation is available.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import UnsupportedError
from .pattern import lookup

Run = Callable[..., Tensor]

_OPS = torch.ops.tilesparse
_PLAIN_KEYS = {
    torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
}


class _DdsNt(torch.autograd.Function):
    """y = x Wᵀ + bias."""

    @staticmethod
    def forward(ctx: Any, run: Run, x: Tensor, values: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        handle, version, *options = rest
        if any(options[:1]):
            raise UnsupportedError(
                "activation: a fused one has no gradient; functional.linear applies it after the product"
            )
        _save(ctx, x, values, handle, version)
        return run(x, values, bias, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values = ctx.saved_tensors
        _, need_x, need_values, need_bias, *rest = ctx.needs_input_grad
        return (
            None,
            _OPS.dds_nn(grad, values, *ctx.key) if need_x else None,
            _OPS.sdd_tn(grad, x, *ctx.key) if need_values else None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if need_bias else None,
            *(None for _ in rest),
        )


class _DdsNn(torch.autograd.Function):
    """x = y W."""

    @staticmethod
    def forward(ctx: Any, run: Run, y: Tensor, values: Tensor, *rest: Any) -> Tensor:
        _save(ctx, y, values, *rest[:2])
        return run(y, values, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, values = ctx.saved_tensors
        _, need_y, need_values, *rest = ctx.needs_input_grad
        return (
            None,
            _OPS.dds_nt(grad, values, None, *ctx.key) if need_y else None,
            _OPS.sdd_tn(y, grad, *ctx.key) if need_values else None,
            *(None for _ in rest),
        )


class _SddTn(torch.autograd.Function):
    """W = yᵀ x on the pattern."""

    @staticmethod
    def forward(ctx: Any, run: Run, y: Tensor, x: Tensor, handle: int, version: int) -> Tensor:
        _save(ctx, y, x, handle, version)
        return run(y, x, handle, version)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, x = ctx.saved_tensors
        _, need_y, need_x, *rest = ctx.needs_input_grad
        values = grad.contiguous()
        return (
            None,
            _OPS.dds_nt(x, values, None, *ctx.key) if need_y else None,
            _OPS.dds_nn(y, values, *ctx.key) if need_x else None,
            *(None for _ in rest),
        )


def _save(ctx: Any, first: Tensor, second: Tensor, handle: int, version: int) -> None:
    """Keeps each factor only if the gradient of the other one is asked for."""
    _, need_first, need_second, *_ = ctx.needs_input_grad
    ctx.save_for_backward(first if need_second else None, second if need_first else None)
    ctx.pattern, ctx.key = lookup(handle), (handle, version)  # the pattern must outlive its last name


def records_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record a product of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def with_autograd(name: str, kernel: Run) -> Run:
    """The kernel of an operator as autograd's dispatch key takes it.

    ``torch.library.register_autograd`` would take twice the time per call. Where nothing but the
    kernel follows in the dispatcher (no mode, no transform), it is called right away, which saves a
    second pass through the dispatcher.
    """
    op = getattr(_OPS, name).default
    function, tensors = _PRODUCTS[name]

    def redispatch(*args: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = op(*args)
        return result

    def product(keys: torch._C.DispatchKeySet, *args: Any) -> Tensor:
        plain = (keys & torch._C._after_autograd_keyset).raw_repr() in _PLAIN_KEYS
        run = kernel if plain else redispatch
        return function.apply(run, *args) if records_gradient(*args[:tensors]) else run(*args)

    return product


# The autograd function of each operator, and how many tensors it takes.
_PRODUCTS: dict[str, tuple[Any, int]] = {"dds_nt": (_DdsNt, 3), "dds_nn": (_DdsNn, 2), "sdd_tn": (_SddTn, 2)}
