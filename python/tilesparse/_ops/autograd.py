"""Calls of products: the dispatcher path, and the fast path past it.

The gradients of each product are the other two, and expanding values to a dense matrix and gathering them
from one are each other's, so every order of differentiation is available.

On the dispatcher path a product is an operator of PyTorch, which modes, transforms, compilers and tracers
see. The dispatcher takes longer than the rest of a call, and several times as long where a gradient is
recorded (docs/performance.md, "Time of the host"). Where only autograd and a kernel would act on a product,
the fast path calls these directly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .._checks import DENSE, NO_EPILOGUE, QUANTIZED, Epilogue, Index, Operands
from .._runtime.pattern_cache import Prepared, prepared
from .._runtime.torch_private import (
    is_any_autocast_enabled,
    is_forward_mode,
    may_be_watched,
    transforms_active,
)
from ..errors import PatternChangedError, UnsupportedError

Tensors = Sequence[Tensor | None]
SAVED, TENSORS = (Operands._fields.index(name) for name in ("x_values", "transposed"))


class Product(NamedTuple):
    """An operator on two factors, or one and None, and a pattern.

    Attributes:
        op: the operator, which takes the fields of the pattern one by one.
        takes: what it takes next: fields of `Epilogue` and `Operands`.
        kernel: computes it on plain tensors and a prepared pattern, and takes both records.
        gradients: returns the gradients of both factors, bias and residual, or of the first of them, from the
            gradient of the result, the factors, each of which is there if it is needed, the pattern, for
            which of the tensors they are needed, and the operands.
        transformed: the operator for the transforms of ``torch.func``.
        looks: True for products that begin a forward pass, see `pattern_cache.prepared`.
    """

    op: Callable[..., Tensor]
    takes: Sequence[str]
    kernel: Callable[..., Tensor]
    gradients: Callable[..., Tensors]
    transformed: Callable[..., Tensor]
    looks: bool


def call(
    product: Product,
    first: Tensor,
    second: Tensor | None,
    index: Index,
    epilogue: Epilogue = NO_EPILOGUE,
    operands: Operands = DENSE,
) -> Tensor:
    """Call a product on the fast path if nothing but autograd would intercept it, else by the dispatcher."""
    tensors = first, second, epilogue.bias, epilogue.residual
    # Operands without a gradient; their first fields are `Operands.tensors`, with a frame less.
    others = (epilogue.gate,) if operands is DENSE else (epilogue.gate, *operands[:8])
    if not is_plain((*tensors, *others)):
        _refuse_tangents((*tensors, *others))
        factors = (first,) if second is None else (first, second)
        op = product.transformed if transforms_active() else product.op
        fields = dict(zip(_FIELDS, (*epilogue, *operands), strict=True))
        return op(*factors, *index, *(fields[name] for name in product.takes))
    pattern = prepared(index, product.looks)
    if records_gradient(tensors):
        return _record((product, pattern, index, epilogue, operands), *tensors)
    return product.kernel(first, second, pattern, epilogue, operands)


# ---- records, as arguments of operators ----

_FIELDS = (*Epilogue._fields, *Operands._fields)
_DEFAULTS = (*NO_EPILOGUE, *DENSE)


def records_of(takes: Sequence[str], *given: Any, **named: Any) -> tuple[Epilogue, Operands]:
    """Return the records with these fields, the first of them given by position."""
    fields = dict(zip(_FIELDS, _DEFAULTS, strict=True)) | dict(zip(takes, given, strict=False)) | named
    values = list(fields.values())
    count = len(Epilogue._fields)
    operands, is_dense = values[count:], all(map(operator.is_, values[count:], DENSE))
    return Epilogue(*values[:count]), DENSE if is_dense else Operands(*operands)


# ---- the fast path ----


class _Recorded(torch.autograd.Function):
    """A product as autograd records it."""

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Product, Prepared, Index, Epilogue, Operands],  # one argument, as each takes time
        first: Tensor,
        second: Tensor | None,
        *_: Tensor | None,  # bias and residual
    ) -> Tensor:
        need = ctx.needs_input_grad
        product, pattern, index, epilogue, operands = how
        kept = () if operands is DENSE else operands[:SAVED]
        ctx.save_for_backward(first if need[2] else None, second if need[1] else None, *kept)
        # A layer that loads another number of blocks gives its parameter other memory and another shape.
        weight = second if type(second) is torch.nn.Parameter else None
        shape = None if weight is None else weight.shape
        ctx.of = product, index, pattern, pattern.generation, weight, shape
        ctx.flags = None if operands is DENSE else operands[TENSORS:]
        return product.kernel(first, second, pattern, epilogue, operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        product, *of = ctx.of
        check_unchanged(*of)
        first, second, *tensors = ctx.saved_tensors
        operands = operands_saved(tensors, ctx.flags)
        gradients = product.gradients(grads[0], first, second, of[0], ctx.needs_input_grad[1:], operands)
        return None, *gradients, *(None,) * (4 - len(gradients))


# Function.apply looks for transforms first, which is_plain excludes.
_record: Callable[..., Tensor] = getattr(super(torch.autograd.Function, _Recorded), "apply", _Recorded.apply)


def check_unchanged(
    index: Index, pattern: Prepared, generation: int, weight: Tensor | None, shape: torch.Size | None
) -> None:
    """Raise if the pattern or the number of blocks has changed since the forward pass."""
    now = prepared(index)
    if now is not pattern or now.generation != generation:
        raise PatternChangedError("the pattern was updated between this product's forward and backward pass")
    if weight is not None and shape is not None and weight.shape != shape:
        raise PatternChangedError(
            f"the weight was {list(shape)} in the forward pass and is now "
            f"{list(weight.shape)}: another pattern was loaded in between"
        )


def operands_saved(tensors: Sequence[Tensor | None], flags: tuple[Any, ...] | None) -> Operands:
    """Return the operands for gradients: without x in 8 bits."""
    return DENSE if flags is None else Operands._make((*tensors, None, None, *flags))


def is_plain(tensors: Tensors, profiled: bool = False) -> bool:
    """Return True if only autograd would intercept a call with these, so the dispatcher can be bypassed.

    ``profiled``: whether a profiler may see it.
    """
    if is_compiling() or may_be_watched(profiled):
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in PLAIN_TYPES or not (tensor.is_cuda or tensor.is_cpu) or tensor.is_neg()
        ):
            return False
    return True


def records_gradient(tensors: Tensors) -> bool:
    """Return True if autograd would record a product of these."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() takes longer
            if tensor is not None and tensor.requires_grad:
                return True
    return False


PLAIN_TYPES = (Tensor, torch.nn.Parameter)


# ---- the dispatcher path ----


def autograd_of(gradients: Callable[..., Tensors], factors: int, takes: Sequence[str]) -> Any:
    """Make (backward, setup_context) for ``torch.library.register_autograd``; see `Product`."""
    after = factors + len(Index._fields)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        index = Index(*inputs[factors:after])
        epilogue, operands = records_of(takes, *inputs[after:])
        if epilogue.activation != 0 or epilogue.gate is not None:
            name, nothing = ("activation", "'none'") if epilogue.gate is None else ("gate", "None")
            raise UnsupportedError(
                f"{name} must be {nothing} where a gradient is recorded: a fused {name} has none; "
                "functional.linear applies it after the product"
            )
        need = ctx.needs_input_grad
        first = inputs[0] if factors > 1 and need[1] else None
        second = inputs[1] if factors > 1 and need[0] else None
        ctx.save_for_backward(first, second, *index[:3], *operands[:SAVED])
        ctx.flags = None if operands is DENSE else operands[TENSORS:]
        ctx.shapes, ctx.count = index[3:], len(inputs)

    def backward(ctx: Any, grad: Tensor) -> Any:
        first, second, crow, col, slot, *tensors = ctx.saved_tensors
        index = Index(crow, col, slot, *(tuple(shape) for shape in ctx.shapes))
        # Which of the inputs need a gradient: of factors, and of bias and residual where they are taken.
        need = ctx.needs_input_grad
        added = need[after : after + 2] if "bias" in takes else ()
        operands = operands_saved(tensors, ctx.flags)
        needs = (*need[:factors], *added, False, False)
        of_tensors = gradients(grad, first, second, index, needs, operands)
        given = [*of_tensors[:factors], *(None,) * (after - factors), *of_tensors[factors:]]
        return (*given, *(None,) * (ctx.count - len(given)))

    return backward, setup_context


def transformable(op: Callable[..., Tensor], backward: Any, setup_context: Any) -> Callable[..., Tensor]:
    """Wrap an operator for ``torch.func``, whose transforms do not differentiate registered operators."""
    members = {
        "generate_vmap_rule": True,
        "forward": staticmethod(op),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "jvp": staticmethod(_refuse_forward_mode),
    }
    function: Any = type("_Transformed", (torch.autograd.Function,), members)
    apply: Callable[..., Tensor] = function.apply
    return apply


def _refuse_tangents(tensors: Tensors) -> None:
    """Raise where forward-mode differentiation would silently lose a tangent."""
    if not is_forward_mode():
        return
    unpack_dual: Callable[..., Any] = forward_ad.unpack_dual
    for tensor in tensors:
        if tensor is not None and unpack_dual(tensor).tangent is not None:
            _refuse_forward_mode()


def _refuse_forward_mode(*_: Any) -> NoReturn:
    raise UnsupportedError(
        "forward-mode differentiation of block-sparse products is not supported; "
        "torch.func.hessian needs it, and jacrev(jacrev(f)) gives the same"
    )


def autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors as autocast casts them on the device of the first."""
    tensors = (first, *others)
    device = first.device.type
    if not is_any_autocast_enabled() or device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) if _is_castable(tensor) else tensor for tensor in tensors)


def _is_castable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return (
        tensor is not None
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.dtype not in QUANTIZED
    )
