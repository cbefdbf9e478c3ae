"""Block-sparse matrices in JAX: `BlockSparse`, `matmul` and `sddmm`, on CPUs and CUDA devices.

The three products on a pattern are linear in each of their factors, and the derivatives of each are the other
two: derivatives of any order are defined, in both modes. PyTorch is neither needed nor imported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _C
from .errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError, NoDeviceError

_NT, _NN, _TN = range(3)  # y = x Wᵀ, x = y W, and W = yᵀ x on a pattern
_TARGET = "tilesparse_product"
_DTYPES = {"float64": 1, "float32": 2, "float16": 3, "bfloat16": 4}
_INT8, _PER_FEATURE = 5, 3
_CPU, _CUDA = 0, 1
_VECTOR = 16  # bytes, by which GPUs read rows
_IN_TF32 = {"default", "fastest", "bfloat16", "tensorfloat32", "tf32_tf32_f32"}
_EXACT = {"high", "highest", "float32", "bfloat16_3x", "tf32_tf32_f32_x3", "f32_f32_f32"}

Shape = tuple[int, int]


class Pattern:
    """The kept blocks of a matrix [rows, columns], in block compressed rows as in ``scipy.sparse.bsr_array``.

    NumPy arrays and sequences make a static pattern: it is checked here, becomes a part of compiled
    programs, and on a GPU is planned as they are compiled. Arrays of JAX make a traced one, a pytree with two
    leaves: it may change from call to call without compilation, and is planned in every call. What it holds
    is not checked: on a GPU indices out of range count as the nearest, and block rows with unsorted columns
    or duplicates have no defined product.

    Args:
        indptr: [R + 1] integers: where the entries of each block row start.
        indices: [nnz] integers: the block column of each entry, ascending in a block row.
        shape: (rows, columns); the last blocks may reach out of them, where values are never read.
        block_shape: (rows, columns) of a block, each 2 to 128, or one number for both.

    Raises:
        InvalidArgumentError: the shapes are invalid.
        InvalidPatternError: the arrays do not describe a pattern of that shape.
    """

    def __init__(
        self, indptr: Any, indices: Any, *, shape: Sequence[int], block_shape: int | Sequence[int]
    ) -> None:
        self.shape = _pair("shape", shape)
        self.block_shape = _pair("block_shape", block_shape)
        self.is_static = not (isinstance(indptr, jax.Array) or isinstance(indices, jax.Array))
        array = np.asarray if self.is_static else jnp.asarray
        self.indptr, self.indices = (
            _integers(name, array(given)) for name, given in (("indptr", indptr), ("indices", indices))
        )
        self._kept: dict[Any, Any] = {}
        self._described()
        if len(self.indptr) != self.grid[0] + 1:
            raise InvalidPatternError(f"indptr must have {self.grid[0] + 1} entries, got {len(self.indptr)}")
        if self.is_static:
            rows = self._rows()
            _C.pattern_validate(self._described(*rows))

    @classmethod
    def from_mask(cls, mask: Any, *, block_shape: int | Sequence[int]) -> Pattern:
        """Make a static pattern of the blocks in which a mask [rows, columns], or a matrix, has a nonzero."""
        mask, (bn, bk) = np.asarray(mask) != 0, _pair("block_shape", block_shape)
        if mask.ndim != 2 or min(bn, bk) < 1:
            raise InvalidArgumentError(f"mask must be 2-D, in blocks, got {mask.shape} in {bn}x{bk}")
        rows, cols = mask.shape
        blocks = (
            np.pad(mask, ((0, -rows % bn), (0, -cols % bk))).reshape(-(-rows // bn), bn, -1, bk).any((1, 3))
        )
        indptr = np.concatenate([[0], blocks.sum(1).cumsum()])
        return cls(indptr, blocks.nonzero()[1], shape=mask.shape, block_shape=(bn, bk))

    @property
    def grid(self) -> Shape:
        """(R, C): block rows and block columns, of which the last ones may reach out of the matrix."""
        (rows, cols), (bn, bk) = self.shape, self.block_shape
        return -(-rows // bn), -(-cols // bk)

    @property
    def nnz(self) -> int:
        """Number of kept blocks."""
        return int(self.indices.shape[0])

    def __repr__(self) -> str:
        kind = "static" if self.is_static else "traced"
        return f"Pattern(shape={self.shape}, block_shape={self.block_shape}, nnz={self.nnz}, {kind})"

    def __hash__(self) -> int:
        if "hash" not in self._kept:
            self._kept["hash"] = hash((self.shape, self.block_shape, *map(bytes, self._static_arrays())))
        return int(self._kept["hash"])

    def __eq__(self, other: object) -> bool:
        """Return True for equal static patterns; traced ones equal themselves alone."""
        if self is other:
            return True
        if not isinstance(other, Pattern) or not (self.is_static and other.is_static):
            return False
        return (self.shape, self.block_shape) == (other.shape, other.block_shape) and all(
            map(np.array_equal, self._static_arrays(), other._static_arrays())
        )

    def block_rows(self) -> Any:
        """Return the block row [nnz] of each entry."""
        rows = self.indptr.shape[0] - 1
        if self.is_static:
            return np.repeat(np.arange(rows, dtype=np.int32), np.diff(self.indptr))
        every = jnp.arange(rows, dtype=jnp.int32)
        return jnp.repeat(every, jnp.diff(self.indptr), total_repeat_length=self.nnz)

    def _described(self, *arrays: Any) -> _C.Pattern:
        """Describe the pattern, with arrays that the caller keeps alive, after a check of its sizes."""
        addresses = [array.ctypes.data for array in arrays] or [0, 0, 0]
        pattern = _C.Pattern(*self.block_shape, *self.shape, self.nnz, *addresses)
        _C.plan_key(pattern, 0, _NT)
        return pattern

    def _static_arrays(self) -> tuple[Any, Any]:
        if not self.is_static:
            raise InvalidTypeError("a traced pattern cannot be hashed: make it an argument of the function")
        return self.indptr, self.indices

    def _rows(self) -> tuple[Any, Any, Any]:
        if self.is_static:
            return self.indptr, self.indices, np.arange(self.nnz, dtype=np.int32)
        indptr = jax.lax.cummax(jnp.clip(self.indptr, 0, self.nnz))
        indices = jnp.clip(self.indices, 0, self.grid[1] - 1)
        return indptr, indices, jnp.arange(self.nnz, dtype=jnp.int32)

    def _columns(self) -> tuple[Any, Any, Any]:
        """Return the same three arrays by column, where entries are sorted by row."""
        if "columns" in self._kept:
            columns: tuple[Any, Any, Any] = self._kept["columns"]
            return columns
        xp: Any = np if self.is_static else jnp
        indices = self._rows()[1]
        slot = xp.argsort(indices, stable=True).astype(xp.int32)
        starts = xp.arange(self.grid[1] + 1, dtype=xp.int32)
        ptr = xp.searchsorted(indices[slot], starts).astype(xp.int32)
        columns = ptr, self.block_rows()[slot], slot
        if self.is_static:
            self._kept["columns"] = columns
        return columns

    def _plan(
        self, op: int, dtype: str, result: str, tokens: int, layouts: Shape, tf32: bool
    ) -> tuple[int, Any]:
        """Return the kernel for a product on this machine's GPU, and its plan; (0, nothing) without one."""
        key = op, dtype, result, tokens, layouts, tf32
        if key not in self._kept:
            self._kept[key] = self._new_plan(*key)
        plan: tuple[int, Any] = self._kept[key]
        return plan

    def _new_plan(
        self, op: int, dtype: str, result: str, tokens: int, layouts: Shape, tf32: bool
    ) -> tuple[int, Any]:
        try:
            device = _C.device_info(_CUDA, jax.local_devices(backend="cuda")[0].local_hardware_id or 0)
        except (NoDeviceError, RuntimeError):  # compiled for other machines
            return 0, np.zeros(0, np.uint8)
        arrays = (*self._rows(), *self._columns())
        pattern = self._described(*arrays)
        (rows, cols), (x_layout, y_layout) = self.shape, layouts
        product = _C.Product(
            pattern,
            op,
            _INT8 if dtype == "int8" else _DTYPES[dtype],
            _CUDA,
            tokens,
            granularity=_PER_FEATURE if dtype == "int8" else 0,
            result_dtype=_DTYPES[result],
            precision=int(tf32),
            x_layout=x_layout,
            ldx=tokens if x_layout else cols,
            y_layout=y_layout,
            ldy=tokens if y_layout else rows,
        )
        kernel = product.select(device)[0]
        plan_key = kernel, op
        if plan_key not in self._kept:
            plan = np.empty(_C.plan_size(pattern, kernel, op), np.uint8)
            _C.plan_build(pattern, kernel, op, plan.ctypes.data, plan.nbytes)
            self._kept[plan_key] = kernel + 1, plan
        kept: tuple[int, Any] = self._kept[plan_key]
        return kept


class BlockSparse:
    """A matrix [rows, columns] that stores some of its blocks; a pytree of its values and a traced pattern.

    ``W @ x``, ``x @ W`` and both with ``W.T`` are `matmul`.

    Args:
        values: [nnz, rows, columns] of blocks, in the order of the pattern's entries; float64, float32,
            bfloat16, float16 or int8. Arrays of other libraries are taken through DLPack.
        pattern: their places.
    """

    def __init__(self, values: Any, pattern: Pattern) -> None:
        if not isinstance(pattern, Pattern):
            raise InvalidTypeError(f"pattern must be a tilesparse.jax.Pattern, got {type(pattern).__name__}")
        values = _array("values", values)
        expected = (pattern.nnz, *pattern.block_shape)
        if values.shape != expected:
            raise InvalidArgumentError(f"values must have shape {expected}, got {values.shape}")
        self.values, self.pattern, self._transposed = values, pattern, False

    @classmethod
    def from_dense(cls, dense: Any, pattern: Pattern) -> BlockSparse:
        """Take the blocks of a pattern from a dense matrix [rows, columns]; differentiable."""
        dense = _array("dense", dense)
        if dense.shape != pattern.shape:
            raise InvalidArgumentError(f"dense must be {pattern.shape}, got shape {dense.shape}")
        (rows, cols), (bn, bk) = pattern.grid, pattern.block_shape
        padding = (0, rows * bn - dense.shape[0]), (0, cols * bk - dense.shape[1])
        blocks = jnp.pad(dense, padding).reshape(rows, bn, cols, bk).swapaxes(1, 2)
        return cls(blocks[pattern.block_rows(), pattern.indices], pattern)

    @classmethod
    def from_scipy(cls, matrix: Any, *, block_shape: int | Sequence[int] | None = None) -> BlockSparse:
        """Convert a scipy.sparse matrix of any format, with a static pattern; duplicates are summed.

        Args:
            matrix: [rows, columns].
            block_shape: of the result; None takes the block shape of a BSR matrix.
        """
        if not hasattr(matrix, "tobsr"):
            raise InvalidTypeError(f"matrix must be a scipy.sparse matrix, got {type(matrix).__name__}")
        if block_shape is None and matrix.format != "bsr":
            raise InvalidArgumentError(
                f"block_shape must be given for the format {matrix.format!r}, got None"
            )
        if hasattr(matrix, "check_format"):
            matrix.check_format()  # conversions of scipy write out of bounds otherwise
        blocks = None if block_shape is None else _pair("block_shape", block_shape)
        matrix = matrix.tobsr(blocksize=blocks, copy=True)
        matrix.sum_duplicates()
        matrix.sort_indices()
        shape, block = matrix.shape, matrix.blocksize
        return cls(matrix.data, Pattern(matrix.indptr, matrix.indices, shape=shape, block_shape=block))

    @property
    def shape(self) -> Shape:
        """(rows, columns)."""
        rows, cols = self.pattern.shape
        return (cols, rows) if self._transposed else (rows, cols)

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def T(self) -> BlockSparse:
        """The transposed matrix, of the same values and pattern."""
        return _made(self.values, self.pattern, not self._transposed)

    def to_dense(self) -> jax.Array:
        """Return the dense matrix; differentiable."""
        shape, (rows, cols), (bn, bk) = self.pattern.shape, self.pattern.grid, self.pattern.block_shape
        blocks = jnp.zeros((rows, cols, bn, bk), self.dtype)
        blocks = blocks.at[self.pattern.block_rows(), self.pattern.indices].set(self.values)
        dense = blocks.swapaxes(1, 2).reshape(rows * bn, cols * bk)[: shape[0], : shape[1]]
        return dense.T if self._transposed else dense

    def __matmul__(self, other: Any) -> jax.Array:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> jax.Array:
        return matmul(other, self)

    __array_ufunc__ = None  # so that NumPy leaves ``x @ W`` to this class

    def __repr__(self) -> str:
        shape = getattr(self.values, "shape", None)
        return f"BlockSparse(values={shape}, {self.pattern!r}{', transposed' if self._transposed else ''})"


def _made(values: Any, pattern: Pattern, transposed: bool) -> BlockSparse:
    """Make a matrix without checks: leaves of pytrees may be anything."""
    matrix = object.__new__(BlockSparse)
    matrix.values, matrix.pattern, matrix._transposed = values, pattern, transposed
    return matrix


def _flat_pattern(pattern: Pattern) -> tuple[tuple[Any, ...], Any]:
    if pattern.is_static:
        return (), pattern
    return (pattern.indptr, pattern.indices), (pattern.shape, pattern.block_shape)


def _restored_pattern(form: Any, arrays: Sequence[Any]) -> Pattern:
    if isinstance(form, Pattern):
        return form
    pattern = object.__new__(Pattern)
    pattern.shape, pattern.block_shape = form
    pattern.indptr, pattern.indices = arrays
    pattern.is_static, pattern._kept = False, {}
    return pattern


jax.tree_util.register_pytree_node(Pattern, _flat_pattern, _restored_pattern)
jax.tree_util.register_pytree_node(
    BlockSparse,
    lambda matrix: ((matrix.values, matrix.pattern), matrix._transposed),
    lambda transposed, parts: _made(parts[0], parts[1], transposed),
)


def matmul(a: Any, b: Any, *, precision: Any = None, preferred_element_type: Any = None) -> jax.Array:
    """Multiply a `BlockSparse` with a dense array, or a dense array with it; differentiable.

    int8 has the products ``W @ x`` and ``x @ W.T``, with sums that are exact until they are rounded to
    ``preferred_element_type``: scales of tokens and of outputs are factors of the result.

    Args:
        a: [..., m, k] or [k]; or a matrix.
        b: [..., k, n] or [k]; or a matrix, if ``a`` is none. Both get the dtype that JAX gives a sum of them.
        precision: of float32 on a GPU, as in ``jax.numpy.matmul``; None is
            ``jax.default_matmul_precision``, which is TF32 unless it is set.
        preferred_element_type: dtype of the result where ``a`` and ``b`` are int8: float32, bfloat16 or
            float16.
    """
    left = isinstance(a, BlockSparse)
    if left == isinstance(b, BlockSparse):
        raise InvalidTypeError("exactly one of a and b must be a tilesparse.jax.BlockSparse")
    matrix, x = (a, _array("b", b)) if left else (b, _array("a", a))
    features = matrix.shape[1] if left else matrix.shape[0]
    axis = -1 if not left or x.ndim == 1 else -2
    if x.ndim == 0 or x.shape[axis] != features:
        name = "b" if left else "a"
        raise InvalidArgumentError(
            f"{name} must have {features} elements on axis {axis}, got shape {x.shape}"
        )
    dtype, op = jnp.result_type(x, matrix.values), _NN if left == matrix._transposed else _NT
    result = _result_dtype(dtype, preferred_element_type)
    if dtype == jnp.int8:
        _check_int8(matrix.pattern, op)
    x, values = x.astype(dtype), matrix.values.astype(dtype)[None]
    if axis == -1:
        rows = x.reshape(1, math.prod(x.shape[:-1]), features)
        y: jax.Array = _bind(matrix.pattern, op, rows, values, (0, 0), precision, result)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    if x.ndim == 2 and x.shape[1] * dtype.itemsize % _VECTOR == 0 and dtype != jnp.int8:
        columns: jax.Array = _bind(matrix.pattern, op, x[None], values, (1, 1), precision, result)
        return columns[0]
    swapped = jnp.swapaxes(x, -1, -2)
    return matmul(swapped, matrix.T, precision=precision, preferred_element_type=result).swapaxes(-1, -2)


def _check_int8(pattern: Pattern, op: int) -> None:
    (rows, cols), (bn, bk) = pattern.shape, pattern.block_shape
    if op == _NN:
        raise InvalidArgumentError("a and b of int8 must be W @ x or x @ W.T, got x @ W or W.T @ x")
    if not {bn, bk} <= {16, 32, 64, 128} or rows % bn or cols % bk or cols >= 2**17:
        raise InvalidArgumentError(
            "blocks of int8 must have sides of 16, 32, 64 or 128 that divide a matrix of fewer than 2^17 "
            f"columns, got {bn}x{bk} in {rows}x{cols}"
        )


def _result_dtype(dtype: Any, preferred: Any) -> Any:
    """Return the dtype of a product of operands of one dtype."""
    allowed = list(_DTYPES)[1:] if dtype == jnp.int8 else [dtype.name]
    if dtype.name not in _DTYPES and dtype != jnp.int8:
        raise InvalidArgumentError(f"a and b must have a dtype of {[*_DTYPES, 'int8']}, got {dtype.name}")
    result = dtype if preferred is None else jnp.dtype(preferred)
    if result.name not in allowed:
        raise InvalidArgumentError(
            f"preferred_element_type must be one of {allowed} for {dtype.name}, got {preferred}"
        )
    return result


def sddmm(a: Any, b: Any, pattern: Pattern, *, precision: Any = None) -> BlockSparse:
    """Return the blocks of ``a @ b`` on a pattern, and compute no other; differentiable.

    Args:
        a: [rows, k].
        b: [k, columns].
        pattern: the blocks to compute.
        precision: as in `matmul`.
    """
    if not isinstance(pattern, Pattern):
        raise InvalidTypeError(f"pattern must be a tilesparse.jax.Pattern, got {type(pattern).__name__}")
    a, b = _array("a", a), _array("b", b)
    rows, cols = pattern.shape
    if a.ndim != 2 or b.ndim != 2 or (a.shape[0], b.shape[1]) != (rows, cols) or a.shape[1] != b.shape[0]:
        raise InvalidArgumentError(
            f"a and b must have shapes ({rows}, k) and (k, {cols}), got {a.shape} and {b.shape}"
        )
    dtype = jnp.result_type(a, b)
    if dtype.name not in _DTYPES:
        raise InvalidArgumentError(f"a and b must have a dtype of {list(_DTYPES)}, got {dtype.name}")
    a, b = a.astype(dtype), b.astype(dtype)
    columns = a.shape[1] * dtype.itemsize % _VECTOR == 0
    y = (a if columns else a.T)[None]
    values = _bind(pattern, _TN, y, b[None], (0, int(columns)), precision, dtype)[0]
    return _made(values, pattern, False)


def _bind(
    pattern: Pattern, op: int, first: Any, second: Any, layouts: Shape, precision: Any, result: Any
) -> Any:
    tf32 = _in_tf32(precision) and first.dtype == np.float32
    index = () if pattern.is_static else (*pattern._rows()[:2], *pattern._columns())
    return _primitive.bind(
        *_varying_alike((first, second, *index)),
        op=op,
        shape=pattern.shape,
        block_shape=pattern.block_shape,
        layouts=layouts,
        tf32=tf32,
        dtype=result,
        pattern=pattern if pattern.is_static else None,
    )


def _varying_axes(kind: Any) -> frozenset[Any]:
    """Return the axes of a mesh over which an array varies inside of ``jax.shard_map``."""
    axes: Any = getattr(kind, "manual_axis_type", kind)
    return frozenset(getattr(axes, "varying", getattr(axes, "vma", ())))


def _varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """Have all vary over the same axes, so that gradients of those that do not are summed over them."""
    own = [_varying_axes(jax.typeof(array)) for array in arrays]
    every = frozenset[Any]().union(*own)
    cast = getattr(jax.lax, "pcast", None)
    vary = functools.partial(cast, to="varying") if cast else getattr(jax.lax, "pvary", None)
    return [
        array if axes == every or vary is None else vary(array, tuple(every - axes))
        for array, axes in zip(arrays, own, strict=True)
    ]


# The primitive. Its operands are two factors, each with a batch in front, of one product or as many as the
# other's: dense ones [batch, tokens, features], or [batch, features, tokens] where `layouts` (of x and of y)
# says so; values [batch, nnz, bn, bk]. Traced patterns follow: ptr and indices of rows; ptr, indices and
# slots of columns.
_primitive = Primitive(_TARGET)


@functools.lru_cache(1024)  # of calls without jit
def _compiled(**params: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = jax.jit(functools.partial(_primitive.bind, **params))
    return compiled


def _run_at_once(*operands: Any, **params: Any) -> Any:
    return _compiled(**params)(*operands)


def _result_shape(first: Any, second: Any, nnz: int, params: dict[str, Any]) -> tuple[int, ...]:
    batch = second.shape[0] if first.shape[0] == 1 else first.shape[0]
    op, (of_x, of_y) = params["op"], params["layouts"]
    if op == _TN:
        return (batch, nnz, *params["block_shape"])
    source, target = (of_x, of_y) if op == _NT else (of_y, of_x)
    tokens, features = first.shape[2 if source else 1], params["shape"][op]
    return (batch, features, tokens) if target else (batch, tokens, features)


def _abstract(first: Any, second: Any, *index: Any, **params: Any) -> Any:
    pattern = params["pattern"]
    nnz = pattern.nnz if pattern is not None else index[1].shape[0]
    shape = _result_shape(first, second, nnz, params)
    # Inside of jax.shard_map it varies as the operands do; elsewhere its sharding is left to XLA.
    replicated = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(first.sharding.mesh, replicated)
    return first.update(shape=shape, dtype=params["dtype"], weak_type=False, sharding=sharding)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    first, second, *index = primals
    of_first, of_second = tangents[:2]
    result = _primitive.bind(*primals, **params)
    parts = []
    if type(of_first) is not ad.Zero:
        parts.append(_primitive.bind(of_first, second, *index, **params))
    if type(of_second) is not ad.Zero:
        parts.append(_primitive.bind(first, of_second, *index, **params))
    return result, functools.reduce(ad.add_jaxvals, parts) if parts else jnp.zeros_like(result)


def _transpose(cotangent: Any, first: Any, second: Any, *index: Any, op: int, **params: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(one.aval) if ad.is_undefined_primal(one) else None for one in (first, second, *index)]
    bind = _primitive.bind
    if ad.is_undefined_primal(first):
        # The gradient of x from y and W, of y from x and W, of y from W and x.
        to = (_NN, _NT, _NT)[op]
        factors = (second, cotangent) if op == _TN else (cotangent, second)
        wanted = first.aval
    else:
        # The gradient of W from x and y, of W from x and y, of x from W and y.
        to = (_TN, _TN, _NN)[op]
        factors = (cotangent, first) if op == _NT else (first, cotangent)
        wanted = second.aval
    result = bind(*factors, *index, op=to, **params)
    if wanted.shape[0] == 1 != result.shape[0]:  # one factor of all products
        result = result.sum(0, keepdims=True)
    of_index: list[Any] = [None] * len(index)
    return [result, None, *of_index] if ad.is_undefined_primal(first) else [None, result, *of_index]


def _batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    bind = functools.partial(_primitive.bind, **params)
    first, second, *index = operands
    size = next(one.shape[axis] for one, axis in zip(operands, axes, strict=True) if axis is not None)
    if any(axis is not None for axis in axes[2:]):  # patterns of their own
        mapped = [
            jnp.moveaxis(one, axis, 0) for one, axis in zip(operands, axes, strict=True) if axis is not None
        ]

        def one_by_one(parts: Sequence[Any]) -> Any:
            rest = iter(parts)
            return bind(
                *(one if axis is None else next(rest) for one, axis in zip(operands, axes, strict=True))
            )

        return jax.lax.map(one_by_one, tuple(mapped)), 0
    op, layouts = params["op"], params["layouts"]
    if op != _TN and axes[1] is None and second.shape[0] == 1:  # more tokens
        source, target = (2 if layouts[one] else 1 for one in ((0, 1) if op == _NT else (1, 0)))
        first = jnp.moveaxis(first, axes[0], source)
        sizes = first.shape
        folded = first.reshape(*sizes[:source], sizes[source] * sizes[source + 1], *sizes[source + 2 :])
        result = bind(folded, second, *index)
        sizes = (*result.shape[:target], size, -1, *result.shape[target + 1 :])
        return result.reshape(sizes), target
    leads = [one.shape[int(axis == 0)] for one, axis in zip((first, second), axes[:2], strict=True)]
    lead = leads[1] if leads[0] == 1 else leads[0]
    stacked = []
    for one, axis in zip((first, second), axes[:2], strict=True):
        if axis is not None:
            one = jnp.moveaxis(one, axis, 0)
        elif one.shape[0] != 1:
            one = jnp.broadcast_to(one, (size, *one.shape))
        else:
            stacked.append(one)
            continue
        if one.shape[1] != lead:
            one = jnp.broadcast_to(one, (size, lead, *one.shape[2:]))
        stacked.append(one.reshape(size * lead, *one.shape[2:]))
    result = bind(*stacked, *index)
    return result.reshape(size, lead, *result.shape[1:]), 0


_primitive.def_impl(_run_at_once)
_primitive.def_abstract_eval(_abstract)
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch


def _lowering(platform: str) -> Callable[..., Any]:
    def call(first: Any, second: Any, *index: Any, **params: Any) -> Any:
        op, layouts, tf32, pattern = (params[name] for name in ("op", "layouts", "tf32", "pattern"))
        if pattern is not None:
            arrays = pattern._columns() if op == _NN else pattern._rows()
        elif op == _NN:
            arrays = index[2:]
        else:
            arrays = *index[:2], jnp.arange(index[1].shape[0], dtype=jnp.int32)
        kernel, plan = 0, np.zeros(0, np.uint8)
        scales: list[Any] = []
        if first.dtype == jnp.int8:
            scales = [jnp.ones(size, jnp.float32) for size in (first.shape[1], params["shape"][0])]
        if platform == "cuda" and pattern is not None:
            columns = layouts[0] if op == _NT else layouts[1]
            tokens = first.shape[2 if columns else 1]
            result = jnp.dtype(params["dtype"]).name
            kernel, plan = pattern._plan(op, first.dtype.name, result, tokens, layouts, tf32)
        attributes = {
            "op": op,
            "out_features": params["shape"][0],
            "in_features": params["shape"][1],
            "x_layout": layouts[0],
            "y_layout": layouts[1],
            "precision": tf32,
            "kernel": kernel,
        }
        shape = _result_shape(first, second, arrays[1].shape[0], params)
        product = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(shape, params["dtype"]))
        numbers = {name: np.int32(number) for name, number in attributes.items()}
        return product(first, second, *arrays, plan, *scales, **numbers)

    return call


for _platform, _name, _device in (("cpu", "cpu", _CPU), ("cuda", "CUDA", _CUDA)):
    jax.ffi.register_ffi_target(_TARGET, _C.xla_handler(_device), platform=_name)
    _lowered = mlir.lower_fun(_lowering(_platform), multiple_results=False)
    mlir.register_lowering(_primitive, _lowered, platform=_platform)


def _in_tf32(precision: Any) -> bool:
    """Return True if JAX multiplies float32 on GPUs in TF32 at that precision."""
    if precision is None:
        precision = getattr(jax.config, "jax_default_matmul_precision", None)
    name = "default" if precision is None else str(getattr(precision, "name", precision)).lower()
    if name not in _IN_TF32 | _EXACT:
        raise InvalidArgumentError(f"precision must be one of {sorted(_IN_TF32 | _EXACT)}, got {precision!r}")
    return name in _IN_TF32


def _array(name: str, given: Any) -> Any:
    """Return an array of JAX: arrays of other libraries through DLPack, which shares memory where it can."""
    try:
        if hasattr(given, "__dlpack__") and not isinstance(given, jax.Array | np.ndarray):
            return jnp.from_dlpack(given)
        return jnp.asarray(given)
    except TypeError as error:
        raise InvalidTypeError(f"{name} must be an array, got {type(given).__name__}") from error


def _integers(name: str, array: Any) -> Any:
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidPatternError(
            f"{name} must be a 1-D array of integers, got shape {array.shape} of {array.dtype}"
        )
    if isinstance(array, np.ndarray):
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
            raise InvalidPatternError(f"{name} must have entries from 0 to 2^31 - 1")
        array = np.ascontiguousarray(array, np.int32)
        if array.base is not None or array.flags.writeable:
            array = array.copy()
            array.flags.writeable = False
        return array
    return array.astype(jnp.int32)


def _pair(name: str, given: Any) -> Shape:
    try:
        first, second = (given, given) if isinstance(given, int) else given
        return int(first), int(second)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} must be two integers, got {given!r}") from error


__all__ = ["BlockSparse", "Pattern", "matmul", "sddmm"]
