"""Calls of products: the dispatcher path, and the fast path past it.

The gradients of each product are the other two, and expanding values to a dense matrix and gathering them
from one are each other's, so every order of differentiation is available.

On the dispatcher path a product is an operator of PyTorch, which modes, transforms, compilers and tracers
see. The dispatcher takes longer than the rest of a call, and several times as long where a gradient is
recorded (docs/performance.md, "Time of the host"). Where only autograd and a kernel would act on a product,
the fast path calls these directly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .._checks import QUANTIZED, Index
from .._runtime.pattern_cache import Prepared, prepared
from .._runtime.torch_private import (
    is_any_autocast_enabled,
    is_forward_mode,
    may_be_watched,
    transforms_active,
)
from ..errors import PatternChangedError, UnsupportedError

Tensors = Sequence[Tensor | None]
Gradients = Callable[..., Tensors]
Extras = tuple[Tensor | bool | None, ...]


class Product(NamedTuple):
    """An operator on two factors, or one and None, a pattern, and more.

    Attributes:
        op: the operator, which takes the fields of the pattern one by one.
        rest: slice of (bias, residual, activation, column_major, *extras) that the operator takes next.
        kernel: computes it on plain tensors and a prepared pattern, and takes all of these.
        gradients: returns the gradients of the tensors but extras from the gradient of the result, the
            factors, each of which is there if it is needed, and the extras.
        transformed: the operator for the transforms of ``torch.func``.
        looks: True for products that begin a forward pass, see `lookup.prepared`.
        kept: slice of the extras that gradients take; only these are saved for them.
    """

    op: Callable[..., Tensor]
    rest: slice
    kernel: Callable[..., Tensor]
    gradients: Gradients
    transformed: Callable[..., Tensor]
    looks: bool
    kept: slice = slice(None)


def call(
    product: Product,
    first: Tensor,
    second: Tensor | None,
    index: Index,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    column_major: bool = False,
    extras: Extras = (),
) -> Tensor:
    """Call a product on the fast path if nothing but autograd would intercept it, else by the dispatcher.

    Extras are further arguments of operators, without gradients.
    """
    tensors = first, second, bias, residual
    if not is_plain(tensors) or (extras and not is_plain(tensors_of(extras))):
        _refuse_tangents((*tensors, *tensors_of(extras)))
        factors = (first,) if second is None else (first, second)
        op = product.transformed if transforms_active() else product.op
        rest: tuple[Any, ...] = bias, residual, activation, column_major, *extras
        return op(*factors, *index, *rest[product.rest])
    pattern = prepared(index, product.looks)
    if records_gradient(tensors):
        return _record((product, pattern, index, activation, column_major, extras), *tensors)
    return product.kernel(first, second, pattern, bias, residual, activation, column_major, *extras)


# ---- the fast path ----


class _Recorded(torch.autograd.Function):
    """A product as autograd records it."""

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Product, Prepared, Index, int, bool, Extras],  # one argument, as each takes time
        first: Tensor,
        second: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        need = ctx.needs_input_grad
        product, pattern, index, activation, column_major, extras = how
        kept = extras[product.kept]
        ctx.save_for_backward(first if need[2] else None, second if need[1] else None, *tensors_of(kept))
        # A layer that loads another number of blocks gives its parameter other memory and another shape.
        weight = second if type(second) is torch.nn.Parameter else None
        shape = None if weight is None else weight.shape
        ctx.of = product, index, pattern, pattern.generation, weight, shape
        ctx.extras = without_tensors(kept)
        return product.kernel(first, second, pattern, bias, residual, activation, column_major, *extras)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        product, *of = ctx.of
        check_unchanged(*of)
        index = of[0]
        first, second, *tensors = ctx.saved_tensors
        extras = with_tensors(ctx.extras, tensors)
        gradients = product.gradients(grads[0], first, second, index, ctx.needs_input_grad[1:], *extras)
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


# Tensors among extras are saved as autograd saves tensors, so that it notices writes to them.


def tensors_of(extras: Extras) -> tuple[Tensor, ...]:
    """Return the tensors among extras."""
    return tuple(extra for extra in extras if isinstance(extra, Tensor)) if extras else ()


def without_tensors(extras: Extras) -> tuple[Any, ...]:
    """Return the extras with `Tensor` in place of each tensor."""
    return tuple(Tensor if isinstance(extra, Tensor) else extra for extra in extras) if extras else ()


def with_tensors(extras: tuple[Any, ...], tensors: Sequence[Tensor]) -> Extras:
    """Undo `without_tensors`."""
    if not extras:
        return ()
    following = iter(tensors)
    return tuple(next(following) if extra is Tensor else extra for extra in extras)


def is_plain(tensors: Tensors, profiled: bool = False) -> bool:
    """Return True if only autograd would intercept a call with these, so the dispatcher can be bypassed.

    ``profiled``: whether a profiler may see it.
    """
    if is_compiling() or may_be_watched(profiled):
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN_TYPES or not (tensor.is_cuda or tensor.is_cpu) or tensor.is_neg()
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


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


# ---- the dispatcher path ----


def autograd_of(
    gradients: Gradients, factors: int, optional: int, options: int, kept: slice = slice(None)
) -> Any:
    """Make (backward, setup_context) for ``torch.library.register_autograd``.

    Args:
        gradients: see `Product`.
        factors: number of tensors before the pattern.
        optional: number of optional tensors after it.
        options: number of arguments after these that are no tensors; extras follow.
        kept: see `Product`.
    """
    fields = len(Index._fields)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        index = Index(*inputs[factors : factors + fields])
        if optional and any(inputs[factors + fields + optional :][:1]):
            raise UnsupportedError(
                "activation must be 'none' where a gradient is recorded: a fused activation has none; "
                "functional.linear applies it after the product"
            )
        second = inputs[1] if factors > 1 else None
        need = ctx.needs_input_grad
        first = inputs[0] if factors > 1 and need[1] else None
        given = inputs[factors + fields + optional + options :]
        ctx.save_for_backward(first, second if need[0] else None, *index[:3], *tensors_of(given[kept]))
        ctx.shapes, ctx.extras, ctx.count = index[3:], without_tensors(given[kept]), len(given)

    def backward(ctx: Any, grad: Tensor) -> Any:
        first, second, crow, col, slot, *tensors = ctx.saved_tensors
        index = Index(crow, col, slot, *(tuple(shape) for shape in ctx.shapes))
        need = ctx.needs_input_grad
        needs = (*need[:factors], *need[factors + fields : factors + fields + optional])
        given = with_tensors(ctx.extras, tensors)
        of_tensors = gradients(grad, first, second, index, (*needs, *(False,) * optional), *given)
        rest = (None,) * (options + ctx.count)
        return (*of_tensors[:factors], *(None,) * fields, *of_tensors[factors:], *rest)

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
    return tuple(_cast(tensor, dtype) if _is_castable(tensor) else tensor for tensor in tensors)


def _is_castable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return (
        tensor is not None
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.dtype not in QUANTIZED
    )


class _Casts(dict[tuple[int, torch.dtype, bool, bool], tuple[Tensor, int, Tensor]]):
    """Casts of a region: the tensor, its version at that time, and the result."""


_casts = weakref.ref(_Casts())  # of the region that has begun last, if it has not ended


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not _is_cached(tensor):
        return tensor.to(dtype)
    casts = _casts()
    if casts is None:
        casts = _begin_region(tensor)
    key = id(tensor), dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    source, version, result = casts.get(key, (None, 0, tensor))
    if source is not tensor or version != tensor._version:
        result = tensor.to(dtype)
        casts[key] = tensor, tensor._version, result
    return result


def _is_cached(tensor: Tensor) -> bool:
    """Return True for what PyTorch's autocast caches: float32 leaves that have a gradient."""
    return (
        type(tensor) is torch.nn.Parameter
        and tensor.requires_grad
        and tensor.dtype == torch.float32
        and not tensor.is_inference()
        and torch.is_autocast_cache_enabled()
        and not (is_compiling() or may_be_watched() or transforms_active())
    )


def _begin_region(like: Tensor) -> _Casts:
    """Have PyTorch's cache, which it clears at the end of a region, keep alive what is cast in this one."""
    global _casts
    casts = _Casts()
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(1, 1, device=like.device, requires_grad=True)
        product: Any = torch.mm(leaf, leaf)  # an operator whose operands autocast casts and caches
    product.grad_fn.next_functions[0][0].metadata["tilesparse"] = casts
    _casts = weakref.ref(casts)
    return casts
