"""Products with block-sparse weights as functions of tensors.

W [out_features, in_features] is given as ``values`` [nnz, bn, bk] and the BlockPattern that says
where each block lies. Everything is differentiable, to any order, with respect to tensors that
require it, unless stated otherwise. Names follow Gale et al., "MegaBlocks" (MLSys 2023): the letters
of dds, sdd and dsd say which of output, left and right factor is sparse.

Values may also be stored in fewer bytes, see `tilesparse.storage`: 2:4, with ``metadata``, or in 8 bits, with
``scales``. Such values have no gradient.

Operands have dtype float64, float32, float16 or bfloat16, all the same, and lie on one device.
Sums are taken in float32, or float64 for float64. On CUDA float32 is multiplied in TF32 where
``torch.backends.cuda.matmul`` allows it, and otherwise with the error of float32. Under autocast
operands other than float64 are cast to its dtype.

A dense operand is read in place if it is row-major (last stride 1) or feature-major (strides of a
transposed matrix), with any distance between lines, and on CUDA aligned to 16 bytes; it is copied
otherwise. All functions raise InvalidArgumentError, naming the argument, for operands that do not
fit, and UnsupportedError where no kernel computes the product.

The pattern may lie on another device than the values: it is copied there once, and the copy follows its
updates. torch.compile takes patterns as inputs of its graphs, so that an update costs no compilation.

A product can be captured in a CUDA graph once it has run with the same shapes. The graph reads memory of
the pattern: it follows `BlockPattern.update_`, and the pattern must not be dropped while it is in use.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._arguments import check_types, shown
from ._checks import (
    Index,
    check_dds,
    check_like_product,
    check_one,
    check_policy,
    is_misaligned,
)
from ._ops.autocast import autocast
from ._ops.autograd import call, is_plain, records_gradient
from ._ops.register import (
    DDS_NN,
    DDS_NT,
    DDS_NT_THROUGH,
    EXPAND,
    LIB,
    SDD_TN,
    SDD_TN_INTO,
    expand_values,
    refuse_gradient,
)
from ._runtime import activations as _activations
from ._runtime.choice import prefers_dense
from ._runtime.layout import row_pitch
from ._runtime.native import ACTIVATIONS
from ._runtime.private import is_any_autocast_enabled, transforms_active
from ._runtime.values import storage_of
from .errors import InvalidArgumentError, UnsupportedError
from .pattern.block_pattern import BlockPattern

_DIFFERENTIABLE = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def linear(
    x: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    residual: Tensor | None = None,
    feature_major_output: bool = False,
    policy: str = "sparse",
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """activation(x Wᵀ + bias) + residual, as ``torch.nn.functional.linear``.

    With a gate it is (x Wᵀ + bias) ⊙ activation(gate).

    Args:
        x: [..., in_features].
        values: [nnz, bn, bk], contiguous; [nnz, bn, bk / 2] with ``metadata``.
        pattern: where the blocks lie.
        bias: [out_features] or None.
        activation: "none", "relu", "gelu" (the exact one, with erf; float16 and bfloat16 on CUDA compute it
            within 1e-5) or "silu"; of the result, or where there is a gate of that alone. It is fused into
            the product where no gradient is recorded, and rounding then happens once instead of twice.
        residual: [..., out_features], the shape of the result, or None. It is added by the kernel of
            the product, unless a gradient is recorded through an activation, and is read in place if
            it lies as the result does.
        feature_major_output: give the result the strides of a transposed matrix. A following layer
            reads it without a copy, and layers with small blocks read it faster.
        policy: "sparse" multiplies the kept blocks alone. "dense" writes W out, zeros included, and leaves
            products, activation and residual to PyTorch, for layers that are faster dense (small or hardly
            sparse ones): the gradient of ``values`` is taken from that of the dense W, every call writes W
            anew, autograd keeps it where it keeps ``values`` otherwise, and an infinity or NaN of x meets
            the zeros as well. "auto" is whichever of the two the library estimates to be faster for so
            many tokens on the GPU at hand, sparse where it has no estimate; TILESPARSE_LOG=1 tells which,
            and compiled code settles on one when it is traced.
        metadata: of 2:4 values, int32 [nnz, bk / 32, bn], see `storage.compress`.
        scales: of int8 or float8_e4m3fn values, float32 [nnz, bn] or [nnz], see `storage.quantize`.
        gate: [..., out_features], the shape of the result, or None; in the place of a residual. Where no
            gradient is recorded the kernel of the product multiplies by it, which spares reading and writing
            the result once more; activation(gate) is rounded to its dtype before. It is read in place if it
            lies as the result does.

    Returns:
        [..., out_features].
    """
    check_policy(policy)
    try:
        index, stored, layout = pattern.index_on(values.device), (metadata, scales), feature_major_output
        return linear_on(x, values, index, bias, activation, residual, layout, policy, stored, gate)
    except UnsupportedError:
        raise
    except Exception:  # types are looked at only now, which takes calls that are right no time
        check_types(linear, locals())
        raise


def linear_on(
    x: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    feature_major: bool = False,
    policy: str = "sparse",
    stored: tuple[Tensor | None, Tensor | None] = (None, None),
    gate: Tensor | None = None,
) -> Tensor:
    """`linear` for a pattern as operators take it, of values with metadata and scales."""
    code = activation_code(activation)
    if is_any_autocast_enabled():
        x, values, bias, residual, gate = autocast(x, values, bias, residual, gate)
    extras = _extras(values, *stored)
    if policy != "sparse" and (policy == "dense" or _prefers_dense(x, values, index, *stored)):
        check_dds("x", x, values, index, bias, residual, *stored, gate)
        plain = expand_values(values, *stored, x.dtype) if extras else values
        y = _expanded_linear(x, plain, index, bias, feature_major)
        return combined(y, activation, residual, gate)
    tensors = x, values, bias, residual, gate
    if (code == 0 and gate is None) or not (records_gradient(tensors) or transforms_active()):
        if gate is not None:
            extras = (*(extras or (None, None, False)), gate)
        return call(DDS_NT, x, values, index, bias, residual, code, feature_major, extras)
    # A fused activation or gate has no gradient, which transforms may ask for.
    check_one(residual, gate)
    if gate is None and not feature_major and _sums_with_activation(x, bias):
        y = call(DDS_NT, x, values, index, _detached(bias), None, 0, False, extras)
        return combined(_activate(y, bias, activation), "none", residual, None)
    y = call(DDS_NT, x, values, index, bias, None, 0, feature_major, extras)
    return combined(y, activation, residual, gate)


def _sums_with_activation(x: Tensor, bias: Tensor | None) -> bool:
    """Whether the gradient of a bias is summed by what computes the activation's: eagerly, on CUDA."""
    if bias is None or not bias.requires_grad or not x.is_cuda or x.dtype == torch.float64:
        return False
    return is_plain((x, bias)) and x.shape[:-1].numel() * bias.shape[0] >= _activations.MANY_ELEMENTS


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


class _Activated(torch.autograd.Function):
    """activation(z) of z with a bias in it, whose gradient comes from here, with that of z in one pass.

    So the graph of z knows nothing of the bias; what is differentiated again has to.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(z)
        ctx.activation = activation
        ctx.bias = bias  # not saved as z is: its values do not count, and may change before the backward pass
        return _activated(z, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (z,), grad = ctx.saved_tensors, grads[0]
        if torch.is_grad_enabled():
            z = z + (ctx.bias - ctx.bias.detach())
        tensors = grad, z
        if records_gradient(tensors) or not all(map(_is_whole, tensors)) or not is_plain(tensors):
            of_z = _GRADIENTS[ctx.activation](grad, z)  # which can be differentiated again
            return of_z, of_z.reshape(-1, z.shape[-1]).sum(0), None
        return *_activations.activation_gradient(grad, z, activation_code(ctx.activation)), None


_activate: Callable[..., Tensor] = _Activated.apply


def gated(y: Tensor, gate: Tensor | None = None, activation: str = "none") -> Tensor:
    """y ⊙ activation(gate); without a gate both are halves of y, and the first is the gate.

    On CUDA one kernel computes it, and another one the gradients of both, those of halves as one tensor, if
    both are row-major and not float64. PyTorch computes the same elsewhere, with a profiler, mode or
    transform at work, and, unless of halves, under ``torch.compile`` and of fewer than 2²³ elements where a
    gradient is recorded.

    Args:
        y: [..., features], or without a gate [..., 2 features].
        gate: like y, or None.
        activation: of the gate: "none", "relu", "gelu" or "silu"; activation(gate) is rounded to its dtype.

    Returns:
        [..., features].

    Raises:
        InvalidArgumentError: another activation, a gate unlike y, or an odd number of features without one.
    """
    activation_code(activation)
    try:
        if gate is not None:
            check_like_product("gate", gate, y)
        elif y.dim() == 0 or y.shape[-1] % 2:
            raise InvalidArgumentError(
                f"y: last dimension of two halves expected, got shape {tuple(y.shape)}"
            )
        return _gated(y, gate, activation)
    except UnsupportedError:
        raise
    except Exception:
        check_types(gated, locals())
        raise


def _gated(y: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    given = (y,) if gate is None else (y, gate)
    if is_plain(given) and _activations.multiplies_by_gate(y, gate):
        if not records_gradient(given):
            return _activations.gate(y, gate, activation_code(activation))
        if gate is None or y.numel() >= _activations.MANY_ELEMENTS:
            return _gate(y, gate, activation)
    if (
        gate is None
        and is_compiling()
        and _activations.may_multiply_by_gate(y, 32)
        and not transforms_active()
    ):
        halves: Tensor = _GATED_HALVES(y, activation_code(activation))
        return halves
    factor, by = _halves(y, gate)
    return factor * _activated(by, activation)


def _halves(y: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is multiplied, and what by once it is activated."""
    if gate is not None:
        return y, gate
    by, factor = y.chunk(2, -1)
    return factor, by


class _Gated(torch.autograd.Function):
    """`gated`, which keeps what it is given alone, and whose gradients come from one pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(y, gate)
        ctx.activation = activation
        return _activations.gate(y, gate, activation_code(activation))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (y, gate), grad = ctx.saved_tensors, grads[0]
        tensors = (grad, y) if gate is None else (grad, y, gate)
        if records_gradient(tensors) or not is_plain(tensors):
            return *_gate_gradients(grad, y, gate, ctx.activation), None
        return *_activations.gate_gradient(_in_rows(grad), y, gate, activation_code(ctx.activation)), None


_gate: Callable[..., Tensor] = _Gated.apply


def _gate_gradients(
    grad: Tensor, y: Tensor, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None]:
    """Of y and the gate, by PyTorch, so that they can be differentiated again."""
    factor, by = _halves(y, gate)
    of_factor = grad * _activated(by, activation)
    of_gate = _GRADIENTS[activation](grad * factor, by)
    return (torch.cat((of_gate, of_factor), -1), None) if gate is None else (of_factor, of_gate)


# Of halves there are operators for compiled code, since Inductor writes the gradient of each half by itself.
LIB.define("gated_halves(Tensor y, int activation) -> Tensor")
LIB.define("gated_halves_gradient(Tensor grad, Tensor y, int activation) -> Tensor")


def _gated_halves(y: Tensor, code: int) -> Tensor:
    return _activations.gate(_in_rows(y), None, code) if y.numel() else _gated_halves_fake(y, code)


def _gated_halves_gradient(grad: Tensor, y: Tensor, code: int) -> Tensor:
    if y.numel() == 0:
        return y.new_empty(y.shape)
    return _activations.gate_gradient(_in_rows(grad), _in_rows(y), None, code)[0]


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if row_pitch(tensor) is not None else tensor.clone(memory_format=torch.contiguous_format)


def _gated_halves_fake(y: Tensor, code: int) -> Tensor:
    return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)


def _gated_halves_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    y, ctx.code = inputs
    ctx.save_for_backward(y)


def _gated_halves_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    if records_gradient((grad, y)):
        return _gate_gradients(grad, y, None, list(ACTIVATIONS)[ctx.code])[0], None
    return _GATED_HALVES_GRADIENT(grad, y, ctx.code), None


torch.library.register_fake("tilesparse::gated_halves", _gated_halves_fake, lib=LIB)
torch.library.register_fake(
    "tilesparse::gated_halves_gradient", lambda grad, y, code: y.new_empty(y.shape), lib=LIB
)
LIB.impl("gated_halves", _gated_halves, "CUDA")
LIB.impl("gated_halves_gradient", _gated_halves_gradient, "CUDA")
torch.library.register_autograd(
    "tilesparse::gated_halves", _gated_halves_backward, setup_context=_gated_halves_context, lib=LIB
)
_GATED_HALVES: Any = torch.ops.tilesparse.gated_halves.default
_GATED_HALVES_GRADIENT: Any = torch.ops.tilesparse.gated_halves_gradient.default


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() > 0 and not is_misaligned(tensor)


def _gradient_of_silu(grad: Tensor, z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(z)
    return grad * sigmoid * (1 + z * (1 - sigmoid))


# Of the activations, by PyTorch.
_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda grad, z: grad,
    "relu": lambda grad, z: torch.ops.aten.threshold_backward(grad, z, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": _gradient_of_silu,
}


def activation_code(activation: str) -> int:
    """Its number for operators."""
    try:
        return ACTIVATIONS[activation]
    except (KeyError, TypeError):
        pass
    if isinstance(activation, torch.fx.Proxy):
        raise UnsupportedError(
            "activation must be known when torch.fx.symbolic_trace traces a layer by itself: trace a module "
            "that contains it, or give concrete_args for all arguments but x"
        )
    raise InvalidArgumentError(f"activation: one of {list(ACTIVATIONS)} expected, got {shown(activation)}")


def combined(y: Tensor, activation: str, residual: Tensor | None, gate: Tensor | None) -> Tensor:
    """What `linear` makes of a product y [..., out_features], by PyTorch alone."""
    if gate is not None:
        return _gated(y, check_like_product("gate", gate, y), activation)
    y = _activated(y, activation)
    return y if residual is None else y + check_like_product("residual", residual, y)


def _activated(y: Tensor, activation: str) -> Tensor:
    return y if activation == "none" else _DIFFERENTIABLE[activation](y)


def linear_through(
    x: Tensor,
    values: Tensor,
    index: Index,
    bias: Tensor | None,
    residual: Tensor | None,
    kept: tuple[Tensor | None, ...],
    feature_major: bool = False,
) -> Tensor:
    """`linear` with the compressed values, whose gradient passes to ``values`` as if those were multiplied.

    ``kept``: compressed values and metadata, and both of the transposed weight, or None twice.
    """
    return call(DDS_NT_THROUGH, x, values, index, bias, residual, 0, feature_major, kept)


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by their bytes


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight with zeros where the mask has them, whatever is there."""
    if not (weight.is_cpu and weight.shape == mask.shape and is_plain((weight, mask))):
        return torch.where(mask, weight, 0)
    # On the CPU `where` takes fifteen times as long.
    word = _WORDS[weight.itemsize]
    return mask.to(word).neg_().bitwise_and_(weight.view(word)).view(weight.dtype)


class _StraightThrough(torch.autograd.Function):
    """The weight with zeros where a mask has them, and its gradient as if it had none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, mask: Tensor) -> Tensor:
        return masked(weight, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


straight_through: Callable[[Tensor, Tensor], Tensor] = _StraightThrough.apply


def _prefers_dense(
    x: Tensor, values: Tensor, index: Index, metadata: Tensor | None, scales: Tensor | None
) -> bool:
    return prefers_dense(x, index, storage_of(values, metadata, scales))


def _extras(values: Tensor, metadata: Tensor | None, scales: Tensor | None) -> tuple[Any, ...]:
    if metadata is None and scales is None:
        return ()
    refuse_gradient(records_gradient((values,)), metadata, scales)
    return metadata, scales, False


def dds(
    a: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    *,
    transpose: bool = True,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Dense times sparse: a Wᵀ, or a W with ``transpose=False``.

    Args:
        a: [..., in_features], or [..., out_features] with ``transpose=False``.
        values: [nnz, bn, bk], contiguous.
        pattern: where the blocks lie.
        transpose: whether W is transposed.
        metadata: of 2:4 values, see `linear`.
        scales: of values in 8 bits, see `linear`.

    Returns:
        [..., out_features], or [..., in_features] with ``transpose=False``.

    Raises:
        InvalidArgumentError: an operand does not fit the pattern or the others in shape, dtype or device.
        UnsupportedError: no kernel of the library computes it on that device.
        NoDeviceError: tensors are on a GPU, and the library was built without CUDA or finds no device.
    """
    try:
        if not isinstance(transpose, bool):
            check_types(dds, locals())
        return _dds(a, values, pattern, transpose, False, (metadata, scales))
    except UnsupportedError:
        raise
    except Exception:
        check_types(dds, locals())
        raise


def dsd(values: Tensor, pattern: BlockPattern, b: Tensor, *, transpose: bool = False) -> Tensor:
    """Sparse times dense: W b, or Wᵀ b with ``transpose=True``.

    Args:
        values: [nnz, bn, bk], contiguous.
        pattern: where the blocks lie.
        b: [in_features, n], or [out_features, n] with ``transpose=True``.
        transpose: whether W is transposed.

    Returns:
        [out_features, n], or [in_features, n] with ``transpose=True``; last stride 1. On CUDA rows
        are padded to 16 bytes, so they are contiguous only if a row is a multiple of 16 bytes.

    Raises:
        InvalidArgumentError: an operand does not fit the pattern or the others in shape, dtype or device.
        UnsupportedError: no kernel of the library computes it on that device.
        NoDeviceError: tensors are on a GPU, and the library was built without CUDA or finds no device.
    """
    try:
        if not isinstance(transpose, bool):
            check_types(dsd, locals())
        if b.dim() != 2:
            raise InvalidArgumentError(f"b: a 2-D tensor expected, got shape {tuple(b.shape)}")
        # (W b)ᵀ = bᵀ Wᵀ, and the transpose of a row-major matrix is a feature-major one.
        return _dds(b.t(), values, pattern, not transpose, feature_major=True).t()
    except UnsupportedError:
        raise
    except Exception:
        check_types(dsd, locals())
        raise


def sdd(
    y: Tensor, x: Tensor, pattern: BlockPattern, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """The blocks of yᵀ x that the pattern keeps: the gradient of W in x Wᵀ for y that of the result.

    Args:
        y: [..., out_features].
        x: [..., in_features] with the same leading dimensions, over which is summed.
        pattern: which blocks to compute.
        out: [nnz, bn, bk], contiguous, of the operands' dtype, or float32 for those of 16 bits, receives the
            result; must not share memory with x or y. With it nothing is differentiable, and operands that
            require a gradient are refused.
        accumulate: add to ``out`` instead of overwriting it. Sums over tokens and what is there are added in
            float32 (float64) and rounded once.

    Returns:
        [nnz, bn, bk]; ``out`` where given.

    Raises:
        InvalidArgumentError: an operand does not fit the pattern or the others in shape, dtype or device; or
            ``out`` is missing with ``accumulate``, or given where an operand requires a gradient.
        UnsupportedError: no kernel of the library computes it on that device.
        NoDeviceError: tensors are on a GPU, and the library was built without CUDA or finds no device.
    """
    try:
        if is_any_autocast_enabled():
            y, x = autocast(y, x)
        index = pattern.index_on(x.device)
        if not isinstance(accumulate, bool):
            check_types(sdd, locals())
        if out is None:
            if accumulate:
                raise InvalidArgumentError("out: expected with accumulate=True, got None")
            return call(SDD_TN, y, x, index)
        if records_gradient((y, x, out)):
            raise InvalidArgumentError(
                "out: not differentiable, but an operand requires a gradient; use no_grad()"
            )
        SDD_TN_INTO(y, x, *index, out, accumulate)
        return out
    except UnsupportedError:
        raise
    except Exception:
        check_types(sdd, locals())
        raise


def _dds(
    a: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    transpose: bool,
    feature_major: bool,
    stored: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    if is_any_autocast_enabled():
        a, values = autocast(a, values)
    index = pattern.index_on(values.device)
    extras = _extras(values, *stored)
    product = DDS_NT if transpose else DDS_NN
    return call(product, a, values, index, feature_major=feature_major, extras=extras)


def _expanded_linear(
    x: Tensor, values: Tensor, index: Index, bias: Tensor | None, feature_major: bool
) -> Tensor:
    weight = call(EXPAND, values, None, index)
    if not feature_major:
        return torch.nn.functional.linear(x, weight, bias)
    columns = x.reshape(-1, index.shape[1]).t()
    y = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return y.t().reshape(*x.shape[:-1], index.shape[0])
