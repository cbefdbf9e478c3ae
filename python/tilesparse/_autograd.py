"""Gradients of the operators.

Those of each product are the other two products, and expanding values to a dense matrix and gathering
them from one are each other's, so every order of differentiation is available.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.compiler import is_compiling

from .errors import UnsupportedError
from .pattern import lookup

Run = Callable[..., Tensor]
Rest = tuple[Any, ...]  # arguments of an operator after its tensors: handle, version, options

_OPS = torch.ops.tilesparse
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset.raw_repr()
_PLAIN_KEYS = {
    torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
}


def _keys(*names: str) -> int:
    keys = 0
    for name in names:
        keys |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return keys


# What the dispatcher sees where nothing but a kernel would act: no mode or transform, and tensors that
# are neither wrapped nor lazy. Inference mode leaves autograd's keys out.
_PLAIN_MODES = {_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect")}
_PLAIN_TENSORS = {
    _keys(device, f"Autocast{device}", *autograd)
    for device in ("CPU", "CUDA")
    for autograd in ((), (f"Autograd{device}", "ADInplaceOrView"))
}
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class _DdsNt(torch.autograd.Function):
    """y = x Wᵀ + bias + residual."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        rest: Rest,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        *residual: Tensor | None,
    ) -> Tensor:
        if any(rest[2:3]):
            raise UnsupportedError(
                "activation: a fused one has no gradient; functional.linear applies it after the product"
            )
        _save(ctx, x, values, rest)
        return run(x, values, bias, *rest, *residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values = ctx.saved_tensors
        _, _, need_x, need_values, need_bias, *need_residual = ctx.needs_input_grad
        products = _products(grad, x, values)
        return (
            None,
            None,
            products["dds_nn"](grad, values, *ctx.key) if need_x else None,
            products["sdd_tn"](grad, x, *ctx.key) if need_values else None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if need_bias else None,
            grad if any(need_residual) else None,
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
        products = _products(grad, y, values)
        return (
            None,
            None,
            products["dds_nt"](grad, values, None, *ctx.key) if need_y else None,
            products["sdd_tn"](y, grad, *ctx.key) if need_values else None,
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
        products = _products(values, y, x)
        return (
            None,
            None,
            products["dds_nt"](x, values, None, *ctx.key) if need_y else None,
            products["dds_nn"](y, values, *ctx.key) if need_x else None,
        )


class _Expand(torch.autograd.Function):
    """The dense W of values."""

    @staticmethod
    def forward(ctx: Any, run: Run, rest: Rest, values: Tensor) -> Tensor:
        _keep_pattern(ctx, rest)
        return run(values, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _OPS.gather(grad, *ctx.key)


class _Gather(torch.autograd.Function):
    """The values of a dense W."""

    @staticmethod
    def forward(ctx: Any, run: Run, rest: Rest, dense: Tensor) -> Tensor:
        _keep_pattern(ctx, rest)
        return run(dense, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _OPS.expand(grad.contiguous(), *ctx.key)


def _save(ctx: Any, first: Tensor, second: Tensor, rest: Rest) -> None:
    """Keeps each factor only if the gradient of the other one is asked for."""
    _, _, need_first, need_second, *_ = ctx.needs_input_grad
    ctx.save_for_backward(first if need_second else None, second if need_first else None)
    _keep_pattern(ctx, rest)


def _keep_pattern(ctx: Any, rest: Rest) -> None:
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


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nothing but autograd and a kernel would act on a product of these.

    It need not be called as an operator then: the dispatcher takes about as long as all the rest of a call.
    """
    if (
        is_compiling()
        or torch._C._dispatch_tls_local_include_set().raw_repr() not in _PLAIN_MODES
        or torch._C._len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    ):
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN_TYPES
            or torch._C._dispatch_keys(tensor).raw_repr() not in _PLAIN_TENSORS
        ):
            return False
    return True


def needs_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether a product of these must be called as an operator, or its kernel alone does the same."""
    return records_gradient(*tensors) or not is_plain(*tensors)


def recorded(name: str, rest: Rest, *tensors: Tensor | None) -> Tensor:
    """A plain product of these, recorded by autograd."""
    result: Tensor = _PLAIN_APPLY[name](_KERNELS[name], rest, *tensors)
    return result


def _products(*tensors: Tensor | None) -> dict[str, Run]:
    """How to multiply these, so that a gradient is recorded of what is itself one, if any is."""
    return _OPERATORS if needs_dispatcher(*tensors) else _KERNELS


def with_autograd(name: str, kernel: Run) -> Run:
    """The kernel of an operator as autograd's dispatch key takes it.

    ``torch.library.register_autograd`` would take twice the time per call. Where nothing but the
    kernel follows in the dispatcher (no mode, no transform), it is called right away, which saves a
    second pass through the dispatcher and the care that ``Function.apply`` takes of transforms.
    """
    op = getattr(_OPS, name).default
    function, first, last = _FUNCTIONS[name]
    plain_apply = super(torch.autograd.Function, function).apply
    _OPERATORS[name], _KERNELS[name], _PLAIN_APPLY[name] = op, kernel, plain_apply

    def redispatch(*args: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = op(*args)
        return result

    def product(keys: torch._C.DispatchKeySet, *args: Any) -> Tensor:
        tensors, rest = args[:first] + args[last:], args[first:last]
        if forward_ad._current_level >= 0:
            _refuse_tangents(*tensors)
        plain = keys.raw_repr() & _AFTER_AUTOGRAD in _PLAIN_KEYS
        run, apply = (kernel, plain_apply) if plain else (redispatch, function.apply)
        if not records_gradient(*tensors):
            return run(*args)
        result: Tensor = apply(run, rest, *tensors)
        return result

    return product


_OPERATORS: dict[str, Run] = {}
_KERNELS: dict[str, Run] = {}
_PLAIN_APPLY: dict[str, Run] = {}  # of the autograd functions, without the care of transforms

# The autograd function of each operator, and which of its arguments are no tensors. Arguments at their
# defaults may be missing at the end.
_FUNCTIONS: dict[str, tuple[Any, int, int]] = {
    "dds_nt": (_DdsNt, 3, 7),
    "dds_nn": (_DdsNn, 2, 5),
    "sdd_tn": (_SddTn, 2, 4),
    "expand": (_Expand, 1, 3),
    "gather": (_Gather, 1, 3),
}
