"""Products with block-sparse weights as functions of tensors.

W [out_features, in_features] is given as ``values`` [nnz, bn, bk] and the BlockPattern that says
where each block lies. Everything is differentiable, to any order, with respect to tensors that
require it, unless stated otherwise. Names follow Gale et al., "MegaBlocks" (MLSys 2023): the letters
of dds, sdd and dsd say which of output, left and right factor is sparse.

Values may also be stored in fewer bytes, see `tilesparse.storage`: 2:4, with ``metadata``, or in 8 or 4
bits, with ``scales``. Such values have no gradient.

Operands have dtype float64, float32, float16 or bfloat16, all the same, and lie on one device.
Sums are taken in float32, or float64 for float64. On CUDA float32 is multiplied in TF32 where
``torch.backends.cuda.matmul`` allows it, and otherwise with the error of float32. Under autocast
operands other than float64 are cast to its dtype.

A dense operand is read in place if it is row-major (last stride 1) or column-major (strides of a
transposed matrix), with any leading dimension, and on CUDA aligned to 16 bytes; it is copied
otherwise. All functions raise InvalidArgumentError, naming the argument, for operands that do not
fit the pattern or each other in shape, dtype or device, UnsupportedError where no kernel computes the
product, and NoDeviceError for tensors on a GPU if the library was built without CUDA or finds no device.

The pattern may lie on another device than the values: it is copied there once, and the copy follows its
updates. torch.compile takes patterns as inputs of its graphs, so that an update costs no compilation.

A product can be captured in a CUDA graph once it has run with the same shapes. The graph reads memory of
the pattern: it follows `BlockPattern.update_`, and the pattern must not be dropped while it is in use.
"""

import torch
from torch import Tensor

from ._checks import (
    DENSE,
    Epilogue,
    Operands,
    check_flag,
    check_like_product,
    check_policy,
    checked_threshold,
    is_tensor,
    operands_of,
    shown,
)
from ._ops import epilogue
from ._ops.autograd import autocast, call, is_plain, records_gradient
from ._ops.epilogue import activation_code
from ._ops.products import DDS_NN, DDS_NT, SDD_TN, linear_on, refuse_gradient
from ._runtime.torch_private import is_any_autocast_enabled
from .errors import InvalidArgumentError, InvalidTypeError
from .pattern import BlockPattern


def linear(
    x: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    residual: Tensor | None = None,
    column_major_output: bool = False,
    policy: str = "sparse",
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    gate: Tensor | None = None,
    threshold: float | None = None,
    gate_threshold: float | None = None,
) -> Tensor:
    """Return activation(x Wᵀ + bias) + residual, as ``torch.nn.functional.linear``.

    With a GLU gate it is (x Wᵀ + bias) ⊙ activation(gate).

    Args:
        x: [..., in_features].
        values: [nnz, bn, bk], contiguous; [nnz, bn, bk / 2] with ``metadata`` or of int4 (uint8).
        pattern: positions of the blocks.
        bias: [out_features] or None.
        activation: "none", "relu", "gelu" (exact, with erf; float16 and bfloat16 on CUDA compute it within
            1e-5) or "silu", of the result, or of the gate if there is one. It is fused into the product where
            no gradient is recorded, and rounding then happens once instead of twice.
        residual: [..., out_features], the shape of the result, or None. It is added by the kernel of
            the product, unless a gradient is recorded through an activation, and is read in place if
            it lies as the result does.
        column_major_output: make the result column-major: give it the strides of a transposed matrix. A
            following layer reads it without a copy, and layers with small blocks read it faster.
        policy: "sparse" multiplies the kept blocks alone. "dense" writes W out, zeros included, and leaves
            products, activation and residual to PyTorch, for layers that are faster dense (small or hardly
            sparse ones): the gradient of ``values`` is taken from that of the dense W, every call writes W
            anew, autograd keeps it where it keeps ``values`` otherwise, and an infinity or NaN of x meets
            the zeros as well. "auto" is whichever of the two the library estimates to be faster for so
            many tokens on the GPU at hand, sparse where it has no estimate; TILESPARSE_LOG=1 tells which,
            and compiled code settles on one when it is traced.
        metadata: of 2:4 values, int32 [nnz, bk / 32, bn], see `storage.compress`.
        scales: of int8, float8_e4m3fn or int4 (uint8) values, float32 [nnz, bn] or [nnz], see
            `storage.quantize_weights` and `storage.quantize_int4`.
        gate: [..., out_features], the shape of the result, or None; in the place of a residual. Where no
            gradient is recorded the kernel of the product multiplies by it, which spares reading and writing
            the result once more; activation(gate) is rounded to its dtype before. It is read in place if it
            lies as the result does.
        threshold: magnitude up to which numbers of x count as zero, token by token; NaN and infinities never
            do. One or two tokens without a gradient read only the weights of inputs that are on for one
            of them, see [neurons that are off](../activations.md). None multiplies all numbers.
        gate_threshold: the same of activation(gate); weights of outputs that are off are not read.

    Returns:
        [..., out_features].
    """
    check_policy(policy)
    index, stored = pattern.index_on(values.device), operands_of(metadata, scales)
    if threshold is not None or gate_threshold is not None:
        stored = stored._replace(
            threshold=checked_threshold("threshold", threshold),
            gate_threshold=checked_threshold("gate_threshold", gate_threshold),
        )
    return linear_on(x, values, index, bias, activation, residual, column_major_output, policy, stored, gate)


def quantized_linear(
    x: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    scales: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    residual: Tensor | None = None,
    column_major_output: bool = False,
    policy: str = "sparse",
    metadata: Tensor | None = None,
    gate: Tensor | None = None,
    use_fast_accum: bool = False,
    offsets: Tensor | None = None,
) -> Tensor:
    """Return activation(x Wᵀ + bias) + residual, multiplied in 8 bits on both sides.

    x is quantized as by `quantize`, in the dtype of ``values``, and the product is
    ``x_scales[:, None] * (x_values valuesᵀ) * scales``: scales stay outside of the sums. Sums of int8 are
    exact, and all of them are rounded once, after bias, activation and residual. A token with an infinity or
    a NaN has NaN. Scales of blocks are inside of the sums, as in DeepSeek's checkpoints: x is quantized by
    groups of 128 features, and the sum over each is multiplied by both scales and added in float32.

    On CUDA devices up to 64 tokens are multiplied in their own dtype by dequantized weights, as by `linear`:
    quantizing x does not shorten reading the weight. On the CPU all numbers of tokens are quantized.

    The gradient of x is that of x Wᵀ with the dequantized W (straight-through); values and scales have none.

    Args:
        x: [..., in_features] of float32, float16 or bfloat16, copied if it is not row-major.
        values: int8 or float8_e4m3fn [nnz, bn, bk], with ``metadata`` half of bk; int8 for in_features < 2¹⁷.
        pattern: positions of the blocks.
        scales: float32 [out_features], see `storage.quantize_weights` with ``granularity="feature"``; or of
            values in float8_e4m3fn and blocks of 128 x 128 [nnz, 1], a scale for each block.
        bias: [out_features] or None.
        activation: as in `linear`.
        residual: [..., out_features], or None.
        column_major_output: make the result column-major.
        policy: "sparse" or "auto" multiply in 8 bits. "dense" writes the dequantized W out, and multiplies x
            in its own dtype by it.
        metadata: of 2:4 values, see `linear`.
        gate: [..., out_features], or None; in the place of a residual.
        use_fast_accum: on GPUs of compute capability 9.0 let tensor cores add all products of float8. They
            keep 13 bits of a sum: of positive products 1.5 % are lost for 1024 features, 25 % for 16384.
            False carries sums over to float32 every 512 products: .25 %, whatever the number of features.
        offsets: as of `grouped_linear`, of a grouped product, or None. Then x is [tokens, in_features];
            scales are those of the features of all experts, not of blocks; the policy is not "dense", and the
            result row-major.

    Returns:
        [..., out_features] in the dtype of x.
    """
    check_policy(policy)
    check_flag("use_fast_accum", use_fast_accum)
    check_flag("column_major_output", column_major_output)
    if offsets is not None:
        _check_grouped(offsets, policy, column_major_output)
    index = pattern.index_on(values.device)
    operands = Operands(metadata, scales, offsets, fast=use_fast_accum)
    return linear_on(
        x, values, index, bias, activation, residual, column_major_output, policy, operands, gate
    )


def grouped_linear(
    x: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    offsets: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    residual: Tensor | None = None,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Return activation(x Wₑᵀ + biasₑ) + residual, where each token meets the weight of its expert e.

    The weights of E experts, all [out_features, in_features], lie below each other in one pattern of
    [E * out_features, in_features]. Tokens are sorted by expert. No token enters a result, or a gradient of
    a weight, of another expert. On CUDA the host does not read ``offsets``, so that routing may change
    between replays of a graph. E is at most 1024.

    Args:
        x: [tokens, in_features], copied if it is not row-major.
        values: of the blocks of all experts, as in `linear`.
        pattern: positions of the blocks, [E * out_features, in_features].
        offsets: int32 [E + 1], contiguous, on the device of x: tokens ``offsets[e]`` to
            ``offsets[e + 1] - 1`` belong to expert e. They ascend from 0 to the number of tokens. On CUDA
            nobody checks that they do; results of tokens in no expert or in several are then undefined.
        bias: [E, out_features] or [E * out_features] or None.
        activation: as in `linear`.
        residual: [tokens, out_features] or None.
        metadata: of 2:4 values, see `linear`.
        scales: of values in 8 or 4 bits, see `linear`; `quantized_linear` multiplies x in 8 bits, too.
        gate: [tokens, out_features], or None; in the place of a residual.

    Returns:
        [tokens, out_features].
    """
    _check_grouped(offsets)
    index, operands = pattern.index_on(values.device), Operands(metadata, scales, offsets=offsets)
    return linear_on(x, values, index, bias, activation, residual, operands=operands, gate=gate)


def _check_grouped(offsets: object, policy: str = "sparse", column_major: bool = False) -> None:
    if not is_tensor(offsets):
        raise InvalidTypeError(f"offsets must be a dense tensor, got {shown(offsets)}")
    if policy == "dense" or column_major:
        name, given = ("policy", policy) if policy == "dense" else ("column_major_output", True)
        raise InvalidArgumentError(f"{name} must be left out of a grouped product, got {given!r}")


def gated(y: Tensor, gate: Tensor | None = None, activation: str = "none") -> Tensor:
    """Return y ⊙ activation(gate); without a gate both are halves of y, and the first is the gate.

    On CUDA one kernel computes the product, and another one both gradients, those of halves as one tensor,
    if the tensors are row-major and not float64. PyTorch computes the same elsewhere, under a profiler, mode
    or transform, and, except for halves, under ``torch.compile`` and for fewer than 2²³ elements where a
    gradient is recorded.

    Args:
        y: [..., features], or without a gate [..., 2 features].
        gate: like y, or None.
        activation: of the gate: "none", "relu", "gelu" or "silu"; activation(gate) is rounded to its dtype.

    Returns:
        [..., features].
    """
    activation_code(activation)
    if gate is not None:
        check_like_product("gate", gate, y)
    elif y.dim() == 0 or y.shape[-1] % 2:
        raise InvalidArgumentError(
            f"y must have an even number of features without a gate, got shape {tuple(y.shape)}"
        )
    return epilogue.gated(y, gate, activation)


def quantize_activations(
    x: Tensor, dtype: torch.dtype = torch.int8, *, granularity: str = "token"
) -> tuple[Tensor, Tensor]:
    """Quantize activations to 8 bits with a scale for each token, in one pass over memory.

    ``scales = max(|x|.amax(-1) / m, 2⁻¹¹⁶)`` with m = 127 for int8 and 448 for float8, and ``values`` is
    ``x * (1 / scales)`` rounded to the nearest, ties to even. CPU and CUDA give the same bits. A token of
    zeros has zeros. One with an infinity or a NaN has zeros and the scale NaN, so that whatever is computed
    of it is NaN. With ``granularity="group"`` so does each 128 features of a token. Results have no gradient.

    Args:
        x: [..., features] of float32, float16 or bfloat16; features is a multiple of 16, with "group" of 128.
        dtype: torch.int8 or torch.float8_e4m3fn, with "group" the latter.
        granularity: what has a scale of its own, a "token" or a "group" of 128 features of it.

    Returns:
        (values, scales): [..., features], row-major, and float32 [...], of groups [..., features / 128].

    Raises:
        InvalidArgumentError: another dtype or `granularity`, or another number of features.
        NoDeviceError: x is on a GPU, and the library was built without CUDA.
    """
    if granularity != "token" and (granularity != "group" or dtype != torch.float8_e4m3fn):
        raise InvalidArgumentError(
            "granularity must be 'token', or 'group' with dtype torch.float8_e4m3fn, got "
            f"{shown(granularity)} with {dtype}"
        )
    return epilogue.quantized(x, dtype if granularity == "token" else None, is_plain((x,)))


def dds(
    a: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    *,
    transpose: bool = True,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Multiply dense by sparse: a Wᵀ, or a W with ``transpose=False``.

    Args:
        a: [..., in_features], or [..., out_features] with ``transpose=False``.
        values: [nnz, bn, bk], contiguous.
        pattern: positions of the blocks.
        transpose: multiply by Wᵀ.
        metadata: of 2:4 values, see `linear`.
        scales: of values in 8 or 4 bits, see `linear`.

    Returns:
        [..., out_features], or [..., in_features] with ``transpose=False``.
    """
    check_flag("transpose", transpose)
    return _dds(a, values, pattern, transpose, False, operands_of(metadata, scales))


def dsd(values: Tensor, pattern: BlockPattern, b: Tensor, *, transpose: bool = False) -> Tensor:
    """Multiply sparse by dense: W b, or Wᵀ b with ``transpose=True``.

    Args:
        values: [nnz, bn, bk], contiguous.
        pattern: positions of the blocks.
        b: [in_features, n], or [out_features, n] with ``transpose=True``.
        transpose: multiply by Wᵀ.

    Returns:
        [out_features, n], or [in_features, n] with ``transpose=True``; last stride 1. On CUDA rows
        are padded to 16 bytes, so they are contiguous only if a row is a multiple of 16 bytes.
    """
    check_flag("transpose", transpose)
    if b.dim() != 2:
        raise InvalidArgumentError(f"b must be 2-D, got shape {tuple(b.shape)}")
    # (W b)ᵀ = bᵀ Wᵀ, and the transpose of a row-major matrix is column-major.
    return _dds(b.t(), values, pattern, not transpose, column_major=True).t()


def sdd(y: Tensor, x: Tensor, pattern: BlockPattern) -> Tensor:
    """Return the blocks of yᵀ x that the pattern keeps: the gradient of W in x Wᵀ, if y is that of x Wᵀ.

    ``sdd(a.T, b, pattern)`` are those of a @ b, a sampled product (SDDMM).

    Args:
        y: [..., out_features].
        x: [..., in_features] with the same leading dimensions, over which is summed.
        pattern: which blocks to compute.

    Returns:
        [nnz, bn, bk].
    """
    if is_any_autocast_enabled():
        y, x = autocast(y, x)
    return call(SDD_TN, y, x, pattern.index_on(x.device))


def _dds(
    a: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    transpose: bool,
    column_major: bool,
    operands: Operands = DENSE,
) -> Tensor:
    if is_any_autocast_enabled():
        a, values = autocast(a, values)
    refuse_gradient(records_gradient((values,)), operands)
    product, index = DDS_NT if transpose else DDS_NN, pattern.index_on(values.device)
    return call(product, a, values, index, Epilogue(column_major=column_major), operands)
