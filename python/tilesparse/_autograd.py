"""Gradients of the products, and the two routes by which a product is called.

The gradients of each product are the other two, and expanding values to a dense matrix and gathering them
from one are each other's, so every order of differentiation is available.

PyTorch's operators are one route: whatever acts on operators, modes, transforms, compilers and tracers,
finds them there. The dispatcher takes longer than all the rest of a call, though, and where a gradient is
recorded several times that (docs/performance.md, "Time of the host"). Where nothing but autograd and a kernel
would act on a product, these are called right away: the other route.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ._checks import Index
from ._launch import Prepared, prepared
from ._private import is_forward_mode, may_be_watched, transforms_active
from .errors import PatternChangedError, UnsupportedError

Tensors = Sequence[Tensor | None]
Gradients = Callable[[Tensor, Tensor, Tensor, Index, Sequence[bool]], Tensors]


class Product(NamedTuple):
    """An operator on two factors, or one and None, a pattern, and more.

    Attributes:
        op: as the dispatcher knows it, with the fields of the pattern one by one.
        rest: which of bias, residual, activation and feature_major follow these.
        kernel: what computes it on plain tensors and a pattern that is prepared, given all four of them.
        gradients: of the arguments that are tensors, from that of the result and the factors, each of which
            is there if it is needed.
        transformed: the operator for the transforms of ``torch.func``.
    """

    op: Callable[..., Tensor]
    rest: slice
    kernel: Callable[..., Tensor]
    gradients: Gradients
    transformed: Callable[..., Tensor]


def call(
    product: Product,
    first: Tensor,
    second: Tensor | None,
    index: Index,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    feature_major: bool = False,
) -> Tensor:
    """The product by the shorter route that does the same."""
    tensors = first, second, bias, residual
    if not is_plain(tensors):
        _refuse_tangents(tensors)
        factors = (first,) if second is None else (first, second)
        op = product.transformed if transforms_active() else product.op
        rest: tuple[Any, ...] = bias, residual, activation, feature_major
        return op(*factors, *index, *rest[product.rest])
    pattern = prepared(index)
    if records_gradient(tensors):
        return _record((product, pattern, index, activation, feature_major), *tensors)
    return product.kernel(first, second, pattern, bias, residual, activation, feature_major)


# ---- the short route ----


class _Recorded(torch.autograd.Function):
    """What autograd records of a product."""

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Product, Prepared, Index, int, bool],  # one argument, as each takes time
        first: Tensor,
        second: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        need = ctx.needs_input_grad
        ctx.save_for_backward(first if need[2] else None, second if need[1] else None)
        product, pattern, index, activation, feature_major = how
        # A layer that loads another number of blocks gives its parameter other memory and another shape.
        weight = second if type(second) is torch.nn.Parameter else None
        ctx.of = product, index, pattern, pattern.generation, weight
        return product.kernel(first, second, pattern, bias, residual, activation, feature_major)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        product, index = _unchanged(*ctx.of)
        first, second = ctx.saved_tensors
        gradients = product.gradients(grads[0], first, second, index, ctx.needs_input_grad[1:])
        return None, *gradients, *(None,) * (4 - len(gradients))


# Function.apply looks for transforms first, which is_plain excludes.
_record: Callable[..., Tensor] = getattr(super(torch.autograd.Function, _Recorded), "apply", _Recorded.apply)


def _unchanged(
    product: Product, index: Index, pattern: Prepared, generation: int, weight: Tensor | None
) -> tuple[Product, Index]:
    """The product and its pattern, unless a gradient would be that of other blocks."""
    now = prepared(index)
    if now is not pattern or now.generation != generation:
        raise PatternChangedError("the pattern was updated between this product's forward and backward pass")
    if weight is not None and weight.shape != pattern.values_shape:
        raise PatternChangedError(
            f"the weight was {list(pattern.values_shape)} in the forward pass and is now "
            f"{list(weight.shape)}: another pattern was loaded in between"
        )
    return product, index


def is_plain(tensors: Tensors) -> bool:
    """Whether nothing but autograd and a kernel would act on a product of these."""
    if is_compiling() or may_be_watched():
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN_TYPES or not (tensor.is_cuda or tensor.is_cpu) or tensor.is_neg()
        ):
            return False
    return True


def records_gradient(tensors: Tensors) -> bool:
    """Whether autograd would record a product of these."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() takes longer
            if tensor is not None and tensor.requires_grad:
                return True
    return False


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


# ---- the long route ----


def autograd_of(gradients: Gradients, factors: int, optional: int, options: int) -> Any:
    """(backward, setup_context) for ``torch.library.register_autograd``.

    Args:
        gradients: see `Product`.
        factors: how many tensors come before the pattern.
        optional: how many may come after it.
        options: how many arguments follow that are no tensors.
    """
    fields = len(Index._fields)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        index = Index(*inputs[factors : factors + fields])
        if optional and any(inputs[factors + fields + optional :][:1]):
            raise UnsupportedError(
                "activation: a fused one has no gradient; functional.linear applies it after the product"
            )
        second = inputs[1] if factors > 1 else None
        need = ctx.needs_input_grad
        first = inputs[0] if factors > 1 and need[1] else None
        ctx.save_for_backward(first, second if need[0] else None, *index[:3])
        ctx.shapes = index[3:]

    def backward(ctx: Any, grad: Tensor) -> Any:
        first, second, *tensors = ctx.saved_tensors
        index = Index(*tensors, *(tuple(shape) for shape in ctx.shapes))
        need = ctx.needs_input_grad
        needs = (*need[:factors], *need[factors + fields : factors + fields + optional])
        of_tensors = gradients(grad, first, second, index, (*needs, *(False,) * optional))
        return (*of_tensors[:factors], *(None,) * fields, *of_tensors[factors:], *(None,) * options)

    return backward, setup_context


def transformable(op: Callable[..., Tensor], backward: Any, setup_context: Any) -> Callable[..., Tensor]:
    """The operator as the transforms of ``torch.func`` differentiate it, which those registered are not."""
    members = {
        "generate_vmap_rule": True,
        "forward": staticmethod(op),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
    }
    function: Any = type("_Transformed", (torch.autograd.Function,), members)
    apply: Callable[..., Tensor] = function.apply
    return apply


def _refuse_tangents(tensors: Tensors) -> None:
    """Raises where forward-mode differentiation would silently lose a tangent."""
    if not is_forward_mode():
        return
    unpack_dual: Callable[..., Any] = forward_ad.unpack_dual
    for tensor in tensors:
        if tensor is not None and unpack_dual(tensor).tangent is not None:
            raise UnsupportedError("forward-mode differentiation of block-sparse products is not supported")
