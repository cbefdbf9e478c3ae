"""Tokens copied to the rows of their experts, and such rows added up, as operators with their gradients.

Both are linear in each of their factors, and with the gradients of a sum, which one pass computes, the
gradients of each are the others.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._checks import check_combination
from .._runtime import combine as _combine
from .._runtime.private import transforms_active
from .autograd import is_plain, records_gradient, transformable
from .register import register_plainly

Weights = Tensor | None


def combine(y: Tensor, weights: Weights, rows: Tensor) -> Tensor:
    """Add up rows of y: [tokens, features], Σ_c weights[t, c] y[rows[t, c]].

    Args:
        y: [tokens · choices, features].
        weights: [tokens, choices] in the dtype of y, or None for ones.
        rows: int64 [tokens, choices], with each row of y once.
    """
    result: Tensor = _COMBINE(y, weights, rows)
    return result


def spread(x: Tensor, weights: Weights, rows: Tensor) -> Tensor:
    """Copy each token to its rows: row rows[t, c] of the result is weights[t, c] x[t].

    Args:
        x: [tokens, features].
        weights: [tokens, choices] in the dtype of x, or None for ones.
        rows: as of `combine`.
    """
    result: Tensor = _SPREAD(x, weights, rows)
    return result


def _combine_fake(y: Tensor, weights: Weights, rows: Tensor) -> Tensor:
    check_combination("y", y, weights, rows, rows.numel())
    return y.new_empty(rows.shape[0], y.shape[1])


def _spread_fake(x: Tensor, weights: Weights, rows: Tensor) -> Tensor:
    check_combination("x", x, weights, rows, rows.shape[0])
    return x.new_empty(rows.numel(), x.shape[1])


def _gradient_fake(grad: Tensor, y: Tensor, weights: Weights, rows: Tensor) -> tuple[Tensor, Tensor]:
    check_combination("grad", grad, weights, rows, rows.shape[0])
    check_combination("y", y, weights, rows, rows.numel())
    return y.new_empty(y.shape), y.new_empty(rows.shape)


def _keep(ctx: Any, inputs: tuple[Weights, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _of_combine(ctx: Any, grad: Tensor) -> tuple[Weights, ...]:
    y, weights, rows = ctx.saved_tensors
    if ctx.needs_input_grad[1]:
        return *_GRADIENT(grad, y, weights, rows), None
    return spread(grad, weights, rows), None, None


def _of_spread(ctx: Any, grad: Tensor) -> tuple[Weights, ...]:
    x, weights, rows = ctx.saved_tensors
    of_weights = _GRADIENT(x, grad, weights, rows)[1] if ctx.needs_input_grad[1] else None
    return combine(grad, weights, rows), of_weights, None


def _of_gradient(ctx: Any, of_y: Tensor, of_weights: Tensor) -> tuple[Weights, ...]:
    grad, y, weights, rows = ctx.saved_tensors
    return (
        combine(of_y, weights, rows) + combine(y, of_weights, rows),
        spread(grad, of_weights, rows),
        _GRADIENT(grad, of_y, weights, rows)[1] if ctx.needs_input_grad[2] else None,
        None,
    )


def _operator(
    name: str, kernel: Callable[..., Any], fake: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an operator; return a call of it that passes by the dispatcher where only autograd acts."""
    op = register_plainly(name, kernel, fake, gradients=(backward, _keep))
    recorded = transformable(kernel, backward, _keep)
    transformed = transformable(op, backward, _keep)

    def run(*tensors: Weights) -> Any:
        if is_plain(tensors):
            return recorded(*tensors) if records_gradient(tensors) else kernel(*tensors)
        return transformed(*tensors) if transforms_active() else op(*tensors)

    return run


_COMBINE = _operator("combine", _combine.combine, _combine_fake, _of_combine)
_SPREAD = _operator("spread", _combine.spread, _spread_fake, _of_spread)
_GRADIENT = _operator("combine_gradient", _combine.combine_gradient, _gradient_fake, _of_gradient)
