"""Calls of products: the dispatcher path, and the fast path past it.

The gradients of each product are the other two, and expanding values to a dense matrix and gathering them
from one are each other's, so every order of differentiation is available.

On the dispatcher path a product is an operator of PyTorch, which modes, transforms, compilers and tracers
see. That takes longer than the rest of a call. Where only autograd and a kernel would act on a product, the
fast path calls these directly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .. import _checks
from .._checks import DENSE, NO_EPILOGUE, QUANTIZED, Epilogue, Index, Operands
from .._runtime.device import DDS_NN, DDS_NT
from .._runtime.layout import empty, result_form
from .._runtime.pattern_cache import Prepared, prepared
from .._runtime.torch_private import (
    INLINED,
    is_any_autocast_enabled,
    is_forward_mode,
    may_be_watched,
    packaging,
    transforms_active,
)
from ..errors import InvalidArgumentError, PatternChangedError, UnsupportedError

Tensors = Sequence[Tensor | None]
SAVED, TENSORS = (Operands._fields.index(name) for name in ("x_values", "transposed"))


class Product(NamedTuple):
    """An operator on two factors, or one and None, and a pattern."""

    op: Callable[..., Tensor]  # takes the fields of the pattern one by one
    takes: Sequence[str]  # and then these fields of `Epilogue` and `Operands`
    kernel: Callable[..., Tensor]  # computes it on plain tensors, a prepared pattern and both records
    # Returns the gradients of both factors, bias and residual, or of the first of them, from the gradient of
    # the result, the factors that are needed, the pattern, which tensors need one, and the operands.
    gradients: Callable[..., Tensors]
    transformed: Callable[..., Tensor]  # the operator for the transforms of ``torch.func``
    looks: bool  # whether it begins a forward pass, see `pattern_cache.prepared`


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


_PATTERN = "Tensor crow_indices, Tensor col_indices, Tensor slot, int[2] shape, int[2] block_shape"
LIB: Any = torch.library.Library("tilesparse", "DEF")  # type: ignore[no-untyped-call]
# Arguments of products after their factors and the pattern: fields of `Epilogue` and `Operands`.
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
LIB.define("quantize(Tensor x, int dtype) -> (Tensor, Tensor)")  # 0: by groups of features
# Operators for compiled code: Inductor would write the gradients of the halves as two tensors.
LIB.define("gated_halves(Tensor y, int activation) -> Tensor")
LIB.define("gated_halves_gradient(Tensor grad, Tensor y, int activation) -> Tensor")


def by_number(function: Callable[..., Any], dtypes: Mapping[Any, int]) -> Callable[..., Any]:
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
    _checks.check_index(index)
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
    name: str, factors: int, functions: tuple[Any, Any, Any], takes: tuple[str, ...] = (), looks: bool = False
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
    devices: tuple[str, ...] = ("CPU", "CUDA"),
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
        _checks.check_nothing_added(epilogue)
        crow, col, slot, shape, block_shape = index
        index, op = Index(crow, col, slot, shape[::-1], block_shape[::-1]), DDS_NN - op
    _checks.check_dds("x" if op == DDS_NT else "y", source, values, index, epilogue, operands)
    features = index.shape[op]
    if operands.offsets is not None and op == DDS_NT:
        features //= operands.offsets.shape[0] - 1
    return empty(source, result_form(source, features, epilogue.column_major))


def row_scales_fake(scales: Tensor, _: None, index: Index) -> Tensor:
    _checks.check_feature_scales(scales, index)
    return scales.new_empty(index.col_indices.shape[0], index.block_shape[0])


def sdd_tn_fake(
    y: Tensor, x: Tensor, index: Index, _: Epilogue = NO_EPILOGUE, operands: Operands = DENSE
) -> Tensor:
    _checks.check_sdd(y, x, index, operands.offsets)
    return x.new_empty(index.col_indices.shape[0], *index.block_shape)


def sdd_tn_with_bias_fake(y: Tensor, x: Tensor, index: Index) -> tuple[Tensor, Tensor]:
    return sdd_tn_fake(y, x, index), y.new_empty(index.shape[0])


def expand_fake(values: Tensor, _: None, index: Index, *__: object) -> Tensor:
    _checks.check_values("values", values, index)
    return values.new_empty(index.shape)


def gather_fake(dense: Tensor, _: None, index: Index, *__: object) -> Tensor:
    _checks.check_dense(dense, index)
    return dense.new_empty(index.col_indices.shape[0], *index.block_shape)
