"""Products with block-sparse weights as functions of tensors.

W [out_features, in_features] is given as ``values`` [nnz, bn, bk] and the BlockPattern that says
where each block lies. Everything is differentiable, to any order, with respect to tensors that
require it, unless stated otherwise. Names follow Gale et al., "MegaBlocks" (MLSys 2023): the letters
of dds, sdd and dsd say which of output, left and right factor is sparse.

Operands have dtype float64, float32, float16 or bfloat16, all the same, and lie on one device.
Sums are taken in float32, or float64 for float64. On CUDA float32 is multiplied in TF32 where
``torch.backends.cuda.matmul`` allows it, and otherwise with the error of float32. Under autocast
operands other than float64 are cast to its dtype.

A dense operand is read in place if it is row-major (last stride 1) or feature-major (strides of a
transposed matrix), with any distance between lines, and on CUDA aligned to 16 bytes; it is copied
otherwise. All functions raise InvalidArgumentError, naming the argument, for operands that do not
fit, and UnsupportedError where no kernel computes the product.

torch.compile specialises its code on the pattern and its version: it compiles again after an update.
Blocks of a model that are compiled one by one count as recompilations of the same code, so raise
``torch._dynamo.config.recompile_limit`` above their number, or compile the whole model.

A product can be captured in a CUDA graph once it has run with the same shapes. The graph reads memory
of the pattern, which must be neither dropped nor updated while the graph is in use.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from . import _ops
from ._autograd import is_plain, needs_dispatcher, recorded, records_gradient
from .errors import InvalidArgumentError
from .pattern import BlockPattern

_OPS = torch.ops.tilesparse
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
    expand: bool = False,
) -> Tensor:
    """activation(x Wᵀ + bias) + residual, as ``torch.nn.functional.linear``.

    Args:
        x: [..., in_features].
        values: [nnz, bn, bk], contiguous.
        pattern: where the blocks lie.
        bias: [out_features] or None.
        activation: "none", "relu", "gelu" (the exact one, with erf; float16 and bfloat16 on CUDA compute it
            within 6e-5) or "silu". It is fused into the product where no gradient is recorded, and
            rounding then happens once instead of twice.
        residual: [..., out_features], the shape of the result, or None. It is added by the kernel of
            the product, unless a gradient is recorded through an activation, and is read in place if
            it lies as the result does.
        feature_major_output: give the result the strides of a transposed matrix. A following layer
            reads it without a copy, and layers with small blocks read it faster.
        expand: write W out dense, zeros included, and leave products, activation and residual to
            PyTorch, for layers that are faster dense (small or hardly sparse ones). The gradient of
            ``values`` is taken from that of the dense W. Every call writes W anew, and autograd keeps
            it where it keeps ``values`` otherwise. An infinity or NaN of x meets the zeros as well.

    Returns:
        [..., out_features].
    """
    code = _ops.ACTIVATIONS.get(activation)
    if code is None:
        raise InvalidArgumentError(
            f"activation: one of {list(_ops.ACTIVATIONS)} expected, got {activation!r}"
        )
    if torch._C._is_any_autocast_enabled():
        x, values, bias, residual = _autocast(x, values, bias, residual)
    if expand:
        return _expanded_linear(x, values, pattern, bias, activation, residual, feature_major_output)
    plain, recording = is_plain(x, values, bias, residual), records_gradient(x, values, bias, residual)
    if plain and not recording:
        return _ops.dds(_ops.DDS_NT, x, values, pattern, feature_major_output, bias, code, residual)
    unfused = recording and code != 0  # a fused activation has no gradient
    fused_residual = None if unfused else residual
    rest = (pattern.handle, pattern.version, 0 if unfused else code, feature_major_output)
    y: Tensor
    if plain:
        y = recorded("dds_nt", rest, x, values, bias, fused_residual)
    else:
        y = _OPS.dds_nt.default(x, values, bias, *rest, fused_residual)
    if not unfused:
        return y
    y = _DIFFERENTIABLE[activation](y)
    return y if residual is None else y + _ops.checked_residual(residual, y)


def dds(a: Tensor, values: Tensor, pattern: BlockPattern, *, transpose: bool = True) -> Tensor:
    """Dense times sparse: a Wᵀ, or a W with ``transpose=False``.

    Args:
        a: [..., in_features], or [..., out_features] with ``transpose=False``.
        values: [nnz, bn, bk], contiguous.
        pattern: where the blocks lie.
        transpose: whether W is transposed.

    Returns:
        [..., out_features], or [..., in_features] with ``transpose=False``.
    """
    return _dds(a, values, pattern, transpose, feature_major=False)


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
    """
    if b.dim() != 2:
        raise InvalidArgumentError(f"b: a 2-D tensor expected, got shape {tuple(b.shape)}")
    # (W b)ᵀ = bᵀ Wᵀ, and the transpose of a row-major matrix is a feature-major one.
    return _dds(b.t(), values, pattern, not transpose, feature_major=True).t()


def sdd(
    y: Tensor, x: Tensor, pattern: BlockPattern, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """The blocks of yᵀ x that the pattern keeps: the gradient of W in x Wᵀ for y that of the result.

    Args:
        y: [..., out_features].
        x: [..., in_features] with the same leading dimensions, over which is summed.
        pattern: which blocks to compute.
        out: [nnz, bn, bk], contiguous, receives the result; must not share memory with x or y. With
            it nothing is differentiable, and operands that require a gradient are refused.
        accumulate: add to ``out`` instead of overwriting it.

    Returns:
        [nnz, bn, bk]; ``out`` where given.
    """
    if torch._C._is_any_autocast_enabled():
        y, x = _autocast(y, x)
    if out is None:
        if accumulate:
            raise InvalidArgumentError("out: expected with accumulate=True, got None")
        if not needs_dispatcher(y, x):
            return _ops.sdd(y, x, pattern)
        values: Tensor = _OPS.sdd_tn.default(y, x, pattern.handle, pattern.version)
        return values
    if records_gradient(y, x, out):
        raise InvalidArgumentError(
            "out: not differentiable, but an operand requires a gradient; use no_grad()"
        )
    _OPS.sdd_tn_into(y, x, out, pattern.handle, pattern.version, accumulate)
    return out


def _dds(a: Tensor, values: Tensor, pattern: BlockPattern, transpose: bool, feature_major: bool) -> Tensor:
    if torch._C._is_any_autocast_enabled():
        a, values = _autocast(a, values)
    op = _ops.DDS_NT if transpose else _ops.DDS_NN
    if not needs_dispatcher(a, values):
        return _ops.dds(op, a, values, pattern, feature_major)
    y: Tensor
    if transpose:
        y = _OPS.dds_nt.default(a, values, None, pattern.handle, pattern.version, 0, feature_major)
    else:
        y = _OPS.dds_nn.default(a, values, pattern.handle, pattern.version, feature_major)
    return y


def _expanded_linear(
    x: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    feature_major: bool,
) -> Tensor:
    _ops.check_dds(pattern, "x", x, pattern.in_features, values, bias, residual)
    weight = _OPS.expand.default(values, pattern.handle, pattern.version)
    if feature_major:
        columns = x.reshape(-1, pattern.in_features).t()
        y = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
        y = y.t().reshape(*x.shape[:-1], pattern.out_features)
    else:
        y = torch.nn.functional.linear(x, weight, bias)
    if activation != "none":
        y = _DIFFERENTIABLE[activation](y)
    return y if residual is None else y + residual


def _autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors as autocast wants them on the device of the first."""
    tensors = (first, *others)
    device = first.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) if _is_castable(tensor) else tensor for tensor in tensors)


def _is_castable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
