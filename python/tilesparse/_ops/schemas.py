"""Operators `torch.ops.tilesparse.*`: schemas, registration, and fake implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._checks import (
    DENSE,
    NO_EPILOGUE,
    Epilogue,
    Index,
    Operands,
    check_dds,
    check_dense,
    check_feature_scales,
    check_index,
    check_nothing_added,
    check_sdd,
    check_values,
)
from .._runtime.device import DDS_NN, DDS_NT
from .._runtime.layout import empty, result_form
from .._runtime.pattern_cache import prepared
from .._runtime.torch_private import INLINED, packaging
from ..errors import InvalidArgumentError, UnsupportedError
from .autograd import Product, autograd_of, records_of, transformable

_PATTERN = "Tensor crow_indices, Tensor col_indices, Tensor slot, int[2] shape, int[2] block_shape"
LIB: Any = torch.library.Library("tilesparse", "DEF")  # type: ignore[no-untyped-call]
# What products take after their factors and the pattern: fields of `Epilogue` and `Operands`.
OF_DDS_NN = "column_major", "metadata", "scales", "transposed", "offsets"
OF_DDS_NT = (
    *("bias", "residual", "activation", "column_major", "metadata", "scales", "transposed", "gate"),
    *("offsets", "compressed", "compressed_t", "metadata_t", "fast", "x_values", "x_scales"),
    *("threshold", "gate_threshold"),
)
OF_SDD_TN = ("offsets",)
_TYPES = {"activation": "int", "column_major": "bool", "transposed": "bool", "fast": "bool?"}
_TYPES |= {"threshold": "float?", "gate_threshold": "float?"}


def _define(name: str, factors: str, takes: Sequence[str]) -> None:
    defaults = {**NO_EPILOGUE._asdict(), **DENSE._asdict()}
    fields = (f"{_TYPES.get(field, 'Tensor?')} {field}={defaults[field]}" for field in takes)
    LIB.define(f"{name}({', '.join((factors, _PATTERN, *fields))}) -> Tensor")


_define("dds_nt", "Tensor x, Tensor values", OF_DDS_NT)
_define("dds_nn", "Tensor y, Tensor values", OF_DDS_NN)
_define("sdd_tn", "Tensor y, Tensor x", OF_SDD_TN)
_define("expand", "Tensor values", ())
_define("gather", "Tensor dense", ())
LIB.define(f"row_scales(Tensor scales, {_PATTERN}) -> Tensor")
LIB.define(f"sdd_tn_with_bias(Tensor y, Tensor x, {_PATTERN}) -> (Tensor, Tensor)")
LIB.define("group_sums(Tensor y, Tensor offsets) -> Tensor")
# Tokens and their rows, which are in the order of groups: rows int64 [tokens, choices].
LIB.define("spread(Tensor x, Tensor? weights, Tensor rows) -> Tensor")
LIB.define("combine(Tensor y, Tensor? weights, Tensor rows) -> Tensor")
LIB.define("combine_gradient(Tensor grad, Tensor y, Tensor? weights, Tensor rows) -> (Tensor, Tensor)")
LIB.define("compress(Tensor values, Tensor mask, bool transposed=False) -> (Tensor, Tensor)")
# The dtype is its number in DTYPES or QUANTIZED: AOTInductor of PyTorch 2.11 hands operators another
# ScalarType.
LIB.define("dequantize_values(Tensor values, Tensor? metadata, Tensor? scales, int dtype) -> Tensor")
LIB.define("quantize(Tensor x, int dtype) -> (Tensor, Tensor)")
LIB.define("quantize_groups(Tensor x) -> (Tensor, Tensor)")
# Operators for compiled code: Inductor would write the gradients of the halves as two tensors.
LIB.define("gated_halves(Tensor y, int activation) -> Tensor")
LIB.define("gated_halves_gradient(Tensor grad, Tensor y, int activation) -> Tensor")


DEVICES = "CPU", "CUDA"


def by_number(function: Callable[..., Any], dtypes: Mapping[torch.dtype, int]) -> Callable[..., Any]:
    """Wrap a function whose last argument is one of these dtypes to take its number."""

    def call(*arguments: Any) -> Any:
        *others, code = arguments
        for dtype, number in dtypes.items():
            if number == code:
                return function(*others, dtype)
        raise InvalidArgumentError(f"dtype must be one of {list(dtypes.values())}, got {code}")

    return call


def _with_records(
    function: Callable[..., Any],
    factors: int,
    pattern_of: Callable[[Index], Any],
    takes: Sequence[str] | None,
) -> Callable[..., Any]:
    """Wrap a function of a pattern and both records to take their fields one by one; see `register`."""
    after = factors + len(Index._fields)
    second = (None,) if factors == 1 else ()

    def flat(*arguments: Any, **named: Any) -> Any:
        crow, col, slot, shape, block_shape = arguments[factors:after]
        pattern = pattern_of(Index(crow, col, slot, tuple(shape), tuple(block_shape)))
        rest = arguments[after:] if takes is None else records_of(takes, *arguments[after:], **named)
        return function(*arguments[:factors], *second, pattern, *rest)

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
    takes: Sequence[str] | None = None,
    looks: bool = False,
    gradients: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
) -> Any:
    """Register an operator on one or two factors and a pattern, see `register_plainly`.

    Both functions take two factors, the second of which may be None, the pattern, and both records, whose
    fields ``takes`` the operator has; without these, the operator's further arguments.
    """
    flat = _with_records(kernel, factors, partial(prepared, looking=looks), takes)
    return register_plainly(name, flat, _with_records(fake, factors, _checked, takes), gradients=gradients)


def differentiable(
    name: str,
    factors: int,
    functions: tuple[Any, Any, Any],
    takes: tuple[str, ...] = (),
    looks: bool = False,
) -> Product:
    """Register a product; ``functions``: kernel, fake and gradients, see `Product`."""
    kernel, fake, gradients = functions
    recorded = autograd_of(gradients, factors, takes)
    op = register(name, factors, kernel, fake, takes, looks, recorded)
    return Product(op, takes, kernel, gradients, transformable(op, *recorded), looks)


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


def dds_fake(
    op: int, source: Tensor, values: Tensor, index: Index, epilogue: Epilogue, operands: Operands
) -> Tensor:
    if operands.transposed:  # only sizes of the pattern are read here, so its tensors need not be transposed
        check_nothing_added(epilogue)
        crow, col, slot, shape, block_shape = index
        index, op = Index(crow, col, slot, shape[::-1], block_shape[::-1]), DDS_NN - op
    check_dds("x" if op == DDS_NT else "y", source, values, index, epilogue, operands)
    features = index.shape[op]
    if operands.offsets is not None and op == DDS_NT:
        features //= operands.offsets.shape[0] - 1
    return empty(source, result_form(source, features, epilogue.column_major))


def row_scales_fake(scales: Tensor, _: None, index: Index) -> Tensor:
    check_feature_scales(scales, index)
    return scales.new_empty(index.col_indices.shape[0], index.block_shape[0])


def sdd_tn_fake(
    y: Tensor, x: Tensor, index: Index, _: Epilogue = NO_EPILOGUE, operands: Operands = DENSE
) -> Tensor:
    check_sdd(y, x, index, operands.offsets)
    return x.new_empty(index.col_indices.shape[0], *index.block_shape)


def sdd_tn_with_bias_fake(y: Tensor, x: Tensor, index: Index) -> tuple[Tensor, Tensor]:
    return sdd_tn_fake(y, x, index), y.new_empty(index.shape[0])


def expand_fake(values: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_values("values", values, index)
    return values.new_empty(index.shape)


def gather_fake(dense: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_dense(dense, index)
    return dense.new_empty(index.col_indices.shape[0], *index.block_shape)
