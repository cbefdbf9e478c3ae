"""The operators ``torch.ops.tilesparse.*``: schemas, kernels, fakes, gradients, and counts of their work.

A pattern travels as its three tensors and two pairs of integers, so that whatever holds a graph of these
operators holds its patterns, too. Index tensors on CUDA devices are taken as they are: `BlockPattern` checks
what is in them where it is made.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._checks import (
    DTYPES,
    Index,
    check_dds,
    check_dense,
    check_index,
    check_mask,
    check_nothing_added,
    check_sdd,
    check_stored,
    check_values,
)
from .._runtime import activations as _activations
from .._runtime import native as _native
from .._runtime import values as _values
from .._runtime.layout import empty, result_form
from .._runtime.lookup import prepared
from .._runtime.prepared import Prepared
from .._runtime.private import INLINED, packaging, transforms_active
from .._runtime.products import dds, sdd, sdd_into, sdd_with_bias
from .._runtime.values import compress, empty_compressed, expand, gather
from ..errors import InvalidArgumentError, UnsupportedError
from .autograd import Product, Tensors, autograd_of, call, is_plain, records_gradient, transformable

_PATTERN = "Tensor crow_indices, Tensor col_indices, Tensor slot, int[2] shape, int[2] block_shape"
# How values are stored that are not plain: metadata of 2:4, scales of 8 bits, and whether these are the
# values of the transposed weight.
_STORED = "Tensor? metadata=None, Tensor? scales=None, bool transposed=False"
LIB: Any = torch.library.Library("tilesparse", "DEF")  # type: ignore[no-untyped-call]
LIB.define(
    f"dds_nt(Tensor x, Tensor values, {_PATTERN}, Tensor? bias=None, Tensor? residual=None, "
    f"int activation=0, bool feature_major=False, {_STORED}, Tensor? gate=None) -> Tensor"
)
LIB.define(
    f"dds_nt_through(Tensor x, Tensor values, {_PATTERN}, Tensor? bias, Tensor? residual, int activation, "
    "bool feature_major, Tensor compressed, Tensor metadata, Tensor? transposed, "
    "Tensor? transposed_metadata) -> Tensor"
)
LIB.define(f"dds_nn(Tensor y, Tensor values, {_PATTERN}, bool feature_major=False, {_STORED}) -> Tensor")
LIB.define(f"sdd_tn(Tensor y, Tensor x, {_PATTERN}) -> Tensor")
LIB.define(f"sdd_tn_with_bias(Tensor y, Tensor x, {_PATTERN}) -> (Tensor, Tensor)")
LIB.define(f"sdd_tn_into(Tensor y, Tensor x, {_PATTERN}, Tensor(a!) out, bool accumulate) -> ()")
LIB.define(f"expand(Tensor values, {_PATTERN}) -> Tensor")
LIB.define(f"gather(Tensor dense, {_PATTERN}) -> Tensor")
LIB.define("compress(Tensor values, Tensor mask, bool transposed=False) -> (Tensor, Tensor)")
# The dtype is its number in DTYPES: AOTInductor of PyTorch 2.11 hands operators another ScalarType.
LIB.define("expand_values(Tensor values, Tensor? metadata, Tensor? scales, int dtype) -> Tensor")


# ---- kernels: of two factors, or one and None, a pattern, and what `call` takes after it ----


_dds_nt = partial(dds, _native.DDS_NT)
_dds_nn = partial(dds, _native.DDS_NN)


def _of_compressed(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The product by compressed values, in the place of the plain ones that have the gradient."""

    def through(
        x: Tensor,
        values: Tensor,
        pattern: Prepared | Index,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: int,
        feature_major: bool,
        compressed: Tensor,
        metadata: Tensor,
        *_: Tensor | None,
    ) -> Tensor:
        return product(x, compressed, pattern, bias, residual, activation, feature_major, metadata)

    return through


_dds_nt_through = _of_compressed(_dds_nt)


def _sdd_tn(y: Tensor, x: Tensor, pattern: Prepared, *_: object) -> Tensor:
    return sdd(y, x, pattern)


def _sdd_tn_with_bias(y: Tensor, x: Tensor, pattern: Prepared) -> tuple[Tensor, Tensor]:
    return sdd_with_bias(y, x, pattern)


def _sdd_tn_into(y: Tensor, x: Tensor, pattern: Prepared, out: Tensor, accumulate: bool) -> None:
    sdd_into(y, x, out, pattern, accumulate)


def _expand(values: Tensor, _: None, pattern: Prepared, *__: object) -> Tensor:
    return expand(values, pattern)


def _gather(dense: Tensor, _: None, pattern: Prepared, *__: object) -> Tensor:
    return gather(dense, pattern)


# ---- what they would give ----


def _dds_fake(
    op: int,
    source: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    feature_major: bool = False,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    transposed: bool = False,
    gate: Tensor | None = None,
) -> Tensor:
    if transposed:  # of the pattern only sizes are read here, which need no other tensors
        check_nothing_added(bias, residual, activation, gate)
        crow, col, slot, shape, block_shape = index
        index, op = Index(crow, col, slot, shape[::-1], block_shape[::-1]), _native.DDS_NN - op
    name = "x" if op == _native.DDS_NT else "y"
    check_dds(name, source, values, index, bias, residual, metadata, scales, gate)
    return empty(source, result_form(source, index.shape[op], feature_major))


_dds_nt_fake = partial(_dds_fake, _native.DDS_NT)
_dds_nn_fake = partial(_dds_fake, _native.DDS_NN)


def _dds_nt_through_fake(x: Tensor, values: Tensor, index: Index, *rest: Any) -> Tensor:
    check_values("values", values, index)
    return _of_compressed(_dds_nt_fake)(x, values, index, *rest)


def _sdd_tn_fake(y: Tensor, x: Tensor, index: Index, *_: object) -> Tensor:
    check_sdd(y, x, index)
    return x.new_empty(index.col_indices.shape[0], *index.block_shape)


def _sdd_tn_with_bias_fake(y: Tensor, x: Tensor, index: Index) -> tuple[Tensor, Tensor]:
    return _sdd_tn_fake(y, x, index), y.new_empty(index.shape[0])


def _sdd_tn_into_fake(y: Tensor, x: Tensor, index: Index, out: Tensor, accumulate: bool) -> None:
    check_sdd(y, x, index, out)


def _expand_fake(values: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_values("values", values, index)
    return values.new_empty(index.shape)


def _gather_fake(dense: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_dense(dense, index)
    return dense.new_empty(index.col_indices.shape[0], *index.block_shape)


# ---- gradients ----


def _dds_nt_gradients(
    grad: Tensor, x: Tensor, values: Tensor, index: Index, needs: Sequence[bool], *extras: Any
) -> Tensors:
    stored, gate = extras[:3], extras[3:]
    refuse_gradient(needs[1], *stored)
    if gate and gate[0] is not None:
        raise UnsupportedError(
            "gate: a fused one has no gradient; functional.linear multiplies by it after the product"
        )
    return (
        call(DDS_NN, grad, values, index, extras=stored) if needs[0] else None,
        *_other_gradients(grad, x, index, needs),
    )


def _other_gradients(grad: Tensor, x: Tensor, index: Index, needs: Sequence[bool]) -> Tensors:
    """Of values, bias and residual."""
    of_residual = grad if needs[3] else None
    if needs[1] and needs[2] and grad.is_cuda and not (transforms_active() or records_gradient((grad, x))):
        if not is_plain((grad, x)):
            return *SDD_TN_WITH_BIAS(grad, x, *index), of_residual
        if grad.numel() >= _activations.MANY_ELEMENTS:
            return *sdd_with_bias(grad, x, prepared(index)), of_residual
    return (
        call(SDD_TN, grad, x, index) if needs[1] else None,
        grad.reshape(-1, grad.shape[-1]).sum(0) if needs[2] else None,
        of_residual,
    )


def refuse_gradient(
    needed: bool, metadata: Tensor | None = None, scales: Tensor | None = None, transposed: bool = False
) -> None:
    """Of values that are stored in fewer bytes."""
    if needed and (metadata is not None or scales is not None):
        raise UnsupportedError(
            "values: those of 2:4 or 8 bits have no gradient; train plain ones, with a mask for 2:4"
        )


def _dds_nt_through_gradients(
    grad: Tensor,
    x: Tensor,
    values: Tensor,
    index: Index,
    needs: Sequence[bool],
    compressed: Tensor,
    metadata: Tensor,
    transposed: Tensor | None,
    transposed_metadata: Tensor | None,
) -> Tensors:
    kept: tuple[Any, ...] = compressed, (metadata, None, False)
    if needs[0] and records_gradient((values,)):  # of the gradient, which passes through here, too
        plain = expand_values(compressed, metadata, None, values.dtype)
        kept = plain + (values - values.detach()), ()
    elif transposed is not None:
        kept = transposed, (transposed_metadata, None, True)
    return (
        call(DDS_NN, grad, kept[0], index, extras=kept[1]) if needs[0] else None,
        *_other_gradients(grad, x, index, needs),  # as if the weight were plain
    )


def _dds_nn_gradients(
    grad: Tensor, y: Tensor, values: Tensor, index: Index, needs: Sequence[bool], *stored: Any
) -> Tensors:
    refuse_gradient(needs[1], *stored)
    return (
        call(DDS_NT, grad, values, index, extras=stored) if needs[0] else None,
        call(SDD_TN, y, grad, index) if needs[1] else None,
    )


def _sdd_tn_gradients(grad: Tensor, y: Tensor, x: Tensor, index: Index, needs: Sequence[bool]) -> Tensors:
    values = grad.contiguous()
    return (
        call(DDS_NT, x, values, index) if needs[0] else None,
        call(DDS_NN, y, values, index) if needs[1] else None,
    )


def _expand_gradients(grad: Tensor, _: Tensor, __: Tensor, index: Index, needs: Sequence[bool]) -> Tensors:
    return (call(GATHER, grad, None, index),)


def _gather_gradients(grad: Tensor, _: Tensor, __: Tensor, index: Index, needs: Sequence[bool]) -> Tensors:
    return (call(EXPAND, grad.contiguous(), None, index),)


# ---- registration ----


def _rebundled(
    function: Callable[..., Any], factors: int, pattern_of: Callable[[Index], Any], absent: tuple[Any, ...]
) -> Callable[..., Any]:
    """Takes the fields of the pattern one by one, as operators do, and not what is absent there."""
    fields = len(Index._fields)
    second = (None,) if factors == 1 else ()

    def flat(*arguments: Any) -> Any:
        crow, col, slot, shape, block_shape = arguments[factors : factors + fields]
        pattern = pattern_of(Index(crow, col, slot, tuple(shape), tuple(block_shape)))
        return function(*arguments[:factors], *second, pattern, *absent, *arguments[factors + fields :])

    return flat


def _checked(index: Index) -> Index:
    check_index(index)
    settings = packaging()
    if settings is not None:
        _check_packaging(settings, [array.shape[0] for array in index[:3]])
    return index


def _check_packaging(settings: Any, sizes: list[int]) -> None:
    """Refuses what AOTInductor would make of patterns, without a word, under these settings."""
    if settings.aot_inductor.use_runtime_constant_folding:
        raise UnsupportedError(
            "aot_inductor.use_runtime_constant_folding: False expected, got True; in what it folds, "
            "AOTInductor calls other operators than these"
        )
    if min(sizes) <= INLINED and not settings.always_keep_tensor_constants:
        raise UnsupportedError(
            f"pattern: arrays of more than {INLINED} entries expected, got {sizes}. AOTInductor writes "
            "smaller ones into its code, where load_constants leaves them as they were and every call "
            'prepares the pattern anew; compile with inductor_configs={"always_keep_tensor_constants": True}'
        )


def _register(
    name: str,
    factors: int,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    absent: tuple[Any, ...] = (),
    looks: bool = False,
) -> Any:
    pattern_of = partial(prepared, looking=looks)
    checked_fake = _rebundled(fake, factors, _checked, absent)
    torch.library.register_fake(f"tilesparse::{name}", checked_fake, lib=LIB)
    for device in ("CPU", "CUDA"):
        LIB.impl(name, _rebundled(kernel, factors, pattern_of, absent), device)
    return getattr(torch.ops.tilesparse, name).default


_REST = None, None, 0, False  # bias, residual, activation and feature_major, of which operators take the last


def _differentiable(
    name: str,
    factors: int,
    functions: tuple[Any, Any, Any],
    optional: int = 0,
    options: int = 0,
    looks: bool = False,
) -> Product:
    kernel, fake, gradients = functions
    absent = _REST[: len(_REST) - optional - options]
    op = _register(name, factors, kernel, fake, absent, looks)
    backward, setup_context = autograd_of(gradients, factors, optional, options)
    torch.library.register_autograd(f"tilesparse::{name}", backward, setup_context=setup_context, lib=LIB)
    rest = slice(len(absent), None)
    return Product(op, rest, kernel, gradients, transformable(op, backward, setup_context), looks)


DDS_NT = _differentiable("dds_nt", 2, (_dds_nt, _dds_nt_fake, _dds_nt_gradients), 2, 2, looks=True)
DDS_NN = _differentiable("dds_nn", 2, (_dds_nn, _dds_nn_fake, _dds_nn_gradients), 0, 1)
_THROUGH = _dds_nt_through, _dds_nt_through_fake, _dds_nt_through_gradients
DDS_NT_THROUGH = _differentiable("dds_nt_through", 2, _THROUGH, 2, 2, looks=True)
SDD_TN = _differentiable("sdd_tn", 2, (_sdd_tn, _sdd_tn_fake, _sdd_tn_gradients))
EXPAND = _differentiable("expand", 1, (_expand, _expand_fake, _expand_gradients), looks=True)
GATHER = _differentiable("gather", 1, (_gather, _gather_fake, _gather_gradients))
SDD_TN_WITH_BIAS = _register("sdd_tn_with_bias", 2, _sdd_tn_with_bias, _sdd_tn_with_bias_fake)
SDD_TN_INTO = _register("sdd_tn_into", 2, _sdd_tn_into, _sdd_tn_into_fake)


# ---- values from one storage to another ----


def _compress(values: Tensor, mask: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor]:
    check_mask(values, mask, transposed)
    return compress(values, mask, transposed)


def _compress_fake(values: Tensor, mask: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor]:
    check_mask(values, mask, transposed)
    return empty_compressed(values, transposed)


def _expand_values(values: Tensor, metadata: Tensor | None, scales: Tensor | None, code: int) -> Tensor:
    dtype = _checked_dtype(values, metadata, scales, code)
    return _values.expand_values(values, metadata, scales, dtype)


def _expand_values_fake(values: Tensor, metadata: Tensor | None, scales: Tensor | None, code: int) -> Tensor:
    dtype = _checked_dtype(values, metadata, scales, code)
    nnz, bn, columns = values.shape
    of_values = values.dtype if scales is None else dtype
    return values.new_empty(nnz, bn, columns * (1 if metadata is None else 2), dtype=of_values)


def _checked_dtype(values: Tensor, metadata: Tensor | None, scales: Tensor | None, code: int) -> torch.dtype:
    if not 0 <= code < len(DTYPES):
        raise InvalidArgumentError(f"dtype: a number from 0 to {len(DTYPES) - 1} expected, got {code}")
    check_stored(values, metadata, scales)
    return list(DTYPES)[code]


def _register_plainly(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    torch.library.register_fake(f"tilesparse::{name}", fake, lib=LIB)
    for device in ("CPU", "CUDA"):
        LIB.impl(name, kernel, device)
    return getattr(torch.ops.tilesparse, name).default


COMPRESS = _register_plainly("compress", _compress, _compress_fake)
_EXPAND_VALUES = _register_plainly("expand_values", _expand_values, _expand_values_fake)


def expand_values(
    values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Plain values of stored ones; see `storage.expand`."""
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype: dtype of activations expected, got {dtype}")
    plain: Tensor = _EXPAND_VALUES(values, metadata, scales, DTYPES[dtype])
    return plain


# ---- work ----


def _flops(
    first: Sequence[int], _: Sequence[int], crow: Any, col: Sequence[int], *rest: Any, **__: Any
) -> int:
    """Two for each kept element and token."""
    block_shape = rest[2]
    tokens = math.prod(first[:-1])
    return 2 * tokens * col[0] * int(block_shape[0] * block_shape[1])


for _name in ("dds_nt", "dds_nt_through", "dds_nn", "sdd_tn", "sdd_tn_with_bias", "sdd_tn_into"):
    register_flop_formula(getattr(torch.ops.tilesparse, _name))(_flops)
