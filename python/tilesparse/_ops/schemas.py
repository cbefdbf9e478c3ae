"""Operators `torch.ops.tilesparse.*`: schemas, registration, and fake implementations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import (
    Index,
    check_dds,
    check_dense,
    check_feature_scales,
    check_index,
    check_nothing_added,
    check_quantized_dds,
    check_quantized_x,
    check_sdd,
    check_values,
)
from .._runtime.device import DDS_NN, DDS_NT
from .._runtime.layout import empty, result_form
from .._runtime.pattern_cache import prepared
from .._runtime.torch_private import INLINED, packaging
from ..errors import UnsupportedError
from .autograd import Product, autograd_of, transformable

_PATTERN = "Tensor crow_indices, Tensor col_indices, Tensor slot, int[2] shape, int[2] block_shape"
# Storage of values: metadata of 2:4, scales of 8 or 4 bits, and whether the values are those of the
# transposed weight.
_STORED = "Tensor? metadata=None, Tensor? scales=None, bool transposed=False"
LIB: Any = torch.library.Library("tilesparse", "DEF")  # type: ignore[no-untyped-call]
LIB.define(
    f"dds_nt(Tensor x, Tensor values, {_PATTERN}, Tensor? bias=None, Tensor? residual=None, "
    f"int activation=0, bool column_major=False, {_STORED}, Tensor? gate=None) -> Tensor"
)
LIB.define(
    f"dds_nt_through(Tensor x, Tensor values, {_PATTERN}, Tensor? bias, Tensor? residual, int activation, "
    "bool column_major, Tensor compressed, Tensor metadata, Tensor? transposed, "
    "Tensor? transposed_metadata) -> Tensor"
)
LIB.define(
    f"dds_nt_quantized(Tensor x, Tensor values, {_PATTERN}, Tensor? bias, Tensor? residual, int activation, "
    "bool column_major, Tensor scales, Tensor? gate, Tensor? metadata, Tensor x_values, Tensor x_scales, "
    "bool fast) -> Tensor"
)
LIB.define(f"row_scales(Tensor scales, {_PATTERN}) -> Tensor")
LIB.define(f"dds_nn(Tensor y, Tensor values, {_PATTERN}, bool column_major=False, {_STORED}) -> Tensor")
LIB.define(f"sdd_tn(Tensor y, Tensor x, {_PATTERN}) -> Tensor")
LIB.define(f"sdd_tn_with_bias(Tensor y, Tensor x, {_PATTERN}) -> (Tensor, Tensor)")
LIB.define(f"sdd_tn_into(Tensor y, Tensor x, {_PATTERN}, Tensor(a!) out, bool accumulate) -> ()")
# Tokens in groups, each with a weight of its own: offsets [groups + 1] say where they begin.
LIB.define(
    f"grouped_dds_nt(Tensor x, Tensor values, {_PATTERN}, Tensor? bias, Tensor? residual, int activation, "
    "Tensor offsets, Tensor? metadata, Tensor? scales, Tensor? gate) -> Tensor"
)
LIB.define(
    f"grouped_dds_nn(Tensor y, Tensor values, {_PATTERN}, Tensor offsets, Tensor? metadata, "
    "Tensor? scales) -> Tensor"
)
LIB.define(f"grouped_sdd_tn(Tensor y, Tensor x, {_PATTERN}, Tensor offsets) -> Tensor")
LIB.define("group_sums(Tensor y, Tensor offsets) -> Tensor")
# Tokens and their rows, which are in the order of groups: rows int64 [tokens, choices].
LIB.define("spread(Tensor x, Tensor? weights, Tensor rows) -> Tensor")
LIB.define("combine(Tensor y, Tensor? weights, Tensor rows) -> Tensor")
LIB.define("combine_gradient(Tensor grad, Tensor y, Tensor? weights, Tensor rows) -> (Tensor, Tensor)")
LIB.define(f"expand(Tensor values, {_PATTERN}) -> Tensor")
LIB.define(f"gather(Tensor dense, {_PATTERN}) -> Tensor")
LIB.define("compress(Tensor values, Tensor mask, bool transposed=False) -> (Tensor, Tensor)")
# The dtype is its number in DTYPES or QUANTIZED: AOTInductor of PyTorch 2.11 hands operators another
# ScalarType.
LIB.define("dequantize_values(Tensor values, Tensor? metadata, Tensor? scales, int dtype) -> Tensor")
LIB.define("quantize(Tensor x, int dtype) -> (Tensor, Tensor)")
LIB.define("quantize_groups(Tensor x) -> (Tensor, Tensor)")
# Operators for compiled code: Inductor would write the gradients of the halves as two tensors.
LIB.define("gated_halves(Tensor y, int activation) -> Tensor")
LIB.define("gated_halves_gradient(Tensor grad, Tensor y, int activation) -> Tensor")


class DdsOptions(NamedTuple):
    """What dds_nt takes after its factors and the pattern, and dds_nn from column_major on, without gate."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: int = 0
    column_major: bool = False
    metadata: Tensor | None = None
    scales: Tensor | None = None
    transposed: bool = False
    gate: Tensor | None = None


DEVICES = "CPU", "CUDA"


def _rebundled(
    function: Callable[..., Any], factors: int, pattern_of: Callable[[Index], Any], absent: tuple[Any, ...]
) -> Callable[..., Any]:
    """Wrap a function to take the fields of the pattern one by one, and without the absent arguments."""
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
    """Raise for settings under which AOTInductor would silently break patterns."""
    if settings.aot_inductor.use_runtime_constant_folding:
        raise UnsupportedError(
            "aot_inductor.use_runtime_constant_folding must be False, got True: AOTInductor calls other "
            "operators than these in the code that it folds"
        )
    if min(sizes) <= INLINED and not settings.always_keep_tensor_constants:
        raise UnsupportedError(
            f"pattern must have arrays of more than {INLINED} entries, got {sizes}: AOTInductor writes "
            "smaller arrays into its code, where load_constants does not reach them and every call prepares "
            'the pattern anew; compile with inductor_configs={"always_keep_tensor_constants": True}'
        )


def register(
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
    for device in DEVICES:
        LIB.impl(name, _rebundled(kernel, factors, pattern_of, absent), device)
    return getattr(torch.ops.tilesparse, name).default


_REST = None, None, 0, False  # bias, residual, activation and column_major, of which operators take the last


def differentiable(
    name: str,
    factors: int,
    functions: tuple[Any, Any, Any],
    optional: int = 0,
    options: int = 0,
    looks: bool = False,
    kept: slice = slice(None),
) -> Product:
    kernel, fake, gradients = functions
    absent = _REST[: len(_REST) - optional - options]
    op = register(name, factors, kernel, fake, absent, looks)
    backward, setup_context = autograd_of(gradients, factors, optional, options, kept)
    torch.library.register_autograd(f"tilesparse::{name}", backward, setup_context=setup_context, lib=LIB)
    rest = slice(len(absent), None)
    return Product(op, rest, kernel, gradients, transformable(op, backward, setup_context), looks, kept)


def register_plainly(
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    devices: tuple[str, ...] = DEVICES,
    gradients: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
) -> Any:
    """Register an operator without a pattern; ``gradients``: (backward, setup_context)."""
    torch.library.register_fake(f"tilesparse::{name}", fake, lib=LIB)
    for device in devices:
        LIB.impl(name, kernel, device)
    if gradients is not None:
        backward, setup_context = gradients
        torch.library.register_autograd(f"tilesparse::{name}", backward, setup_context=setup_context, lib=LIB)
    return getattr(torch.ops.tilesparse, name).default


def dds_fake(op: int, source: Tensor, values: Tensor, index: Index, *options: Any) -> Tensor:
    bias, residual, activation, column_major, metadata, scales, transposed, gate = DdsOptions(*options)
    if transposed:  # only sizes of the pattern are read here, so its tensors need not be transposed
        check_nothing_added(bias, residual, activation, gate)
        crow, col, slot, shape, block_shape = index
        index, op = Index(crow, col, slot, shape[::-1], block_shape[::-1]), DDS_NN - op
    name = "x" if op == DDS_NT else "y"
    check_dds(name, source, values, index, bias, residual, metadata, scales, gate)
    return empty(source, result_form(source, index.shape[op], column_major))


dds_nt_fake = partial(dds_fake, DDS_NT)
dds_nn_fake = partial(dds_fake, DDS_NN)


def dds_nt_through_fake(x: Tensor, values: Tensor, index: Index, *rest: Any) -> Tensor:
    check_values("values", values, index)
    bias, residual, activation, column_major, compressed, metadata, *_ = rest
    return dds_nt_fake(x, compressed, index, bias, residual, activation, column_major, metadata)


def dds_nt_quantized_fake(x: Tensor, values: Tensor, index: Index, *rest: Any) -> Tensor:
    bias, residual, _, column_major, scales, gate, metadata, x_values, x_scales, _ = rest
    check_quantized_dds(x, values, index, bias, residual, scales, gate, metadata)
    check_quantized_x(x, x_values, x_scales, values.dtype, scales)
    return empty(x, result_form(x, index.shape[0], column_major))


def row_scales_fake(scales: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_feature_scales(scales, index)
    return scales.new_empty(index.col_indices.shape[0], index.block_shape[0])


def sdd_tn_fake(y: Tensor, x: Tensor, index: Index, *_: object) -> Tensor:
    check_sdd(y, x, index)
    return x.new_empty(index.col_indices.shape[0], *index.block_shape)


def sdd_tn_with_bias_fake(y: Tensor, x: Tensor, index: Index) -> tuple[Tensor, Tensor]:
    return sdd_tn_fake(y, x, index), y.new_empty(index.shape[0])


def sdd_tn_into_fake(y: Tensor, x: Tensor, index: Index, out: Tensor, accumulate: bool) -> None:
    check_sdd(y, x, index, out)


def expand_fake(values: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_values("values", values, index)
    return values.new_empty(index.shape)


def gather_fake(dense: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_dense(dense, index)
    return dense.new_empty(index.col_indices.shape[0], *index.block_shape)
