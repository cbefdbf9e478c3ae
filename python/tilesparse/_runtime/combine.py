"""Tokens copied to the rows of their experts, and such rows added up, by the library's kernels."""

from collections.abc import Callable

from torch import Tensor

from .. import _C
from .._checks import DTYPES, check_combination
from .device import on
from .layout import row_major
from .private import current_stream

_Rows = tuple[int, int]  # address and leading dimension
_NONE = 0, 0


def combine(y: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    """Return [tokens, features]: Σ_c weights[t, c] y[rows[t, c]], or without weights the sum of the rows."""
    check_combination("y", y, weights, rows, rows.numel())
    result = y.new_empty(rows.shape[0], y.shape[1])
    if result.numel():
        y, of_y = _rows_of(y)
        _run(_C.combine, rows, weights, y, of_y, _rows_of(result)[1])
    return result


def spread(x: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    """Return [tokens · choices, features]: row rows[t, c] is weights[t, c] x[t], or without weights x[t]."""
    check_combination("x", x, weights, rows, rows.shape[0])
    result = x.new_empty(rows.numel(), x.shape[1])
    if result.numel():
        x, of_x = _rows_of(x)
        _run(_C.combine_gradient, rows, weights, x, _NONE, of_x, _rows_of(result)[1], 0)
    return result


def combine_gradient(grad: Tensor, y: Tensor, weights: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and the weights of `combine` from that of its result."""
    check_combination("grad", grad, weights, rows, rows.shape[0])
    check_combination("y", y, weights, rows, rows.numel())
    of_y, of_weights = y.new_empty(y.shape), y.new_empty(rows.shape)
    if of_y.numel():
        (grad, of_grad), (y, of_rows) = _rows_of(grad), _rows_of(y)
        written = _rows_of(of_y)[1], of_weights.data_ptr()
        _run(_C.combine_gradient, rows, weights, y, of_rows, of_grad, *written)
    return of_y, of_weights.zero_() if y.shape[1] == 0 else of_weights


def _rows_of(matrix: Tensor) -> tuple[Tensor, _Rows]:
    """Return a matrix that kernels can read, and where it is."""
    matrix, ld = row_major(matrix)
    return matrix, (matrix.data_ptr(), ld)


def _run(
    run: Callable[..., None], rows: Tensor, weights: Tensor | None, like: Tensor, y: _Rows, *rest: _Rows | int
) -> None:
    rows = rows.contiguous()
    weights = None if weights is None else weights.contiguous()
    stream = current_stream(like.get_device()) if like.is_cuda else 0
    sizes = *rows.shape, like.shape[1]
    addresses = rows.data_ptr(), 0 if weights is None else weights.data_ptr()
    with on(like.device):
        run(int(like.is_cuda), DTYPES[like.dtype], *sizes, y, *addresses, *rest, stream)
