"""Launches of products and of the operators around them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .. import _C, _checks
from .._checks import DENSE, DTYPES, NO_EPILOGUE, QUANTIZED, SCALED, Epilogue, Operands
from ..errors import InvalidArgumentError
from .device import (
    DDS_NN,
    DDS_NT,
    QUANTIZER,
    SCALES_PER_BLOCK,
    SCALES_PER_FEATURE,
    SCALES_PER_ROW,
    SDD_TN,
    on,
)
from .layout import (
    Lines,
    aligned,
    empty,
    empty_group_scales,
    group_scales,
    like_result,
    result_form,
    row_major,
    row_stride,
    usable,
)
from .pattern_cache import Prepared, allocations, blocks_of, kept_turned, placed, turned
from .torch_private import constant_when_compiled, current_device, current_stream, tf32_allowed


def expand(values: Tensor, pattern: Prepared) -> Tensor:
    """Return the dense W."""
    _checks.check_values("values", values, pattern.index())
    with pattern.launching():
        return placed(values, pattern.block_indices(), pattern.shape, pattern.block_shape)


def gather(dense: Tensor, pattern: Prepared) -> Tensor:
    """Return the values of a dense W."""
    _checks.check_dense(dense, pattern.index())
    with pattern.launching():
        return blocks_of(dense, pattern.block_shape)[pattern.block_indices()].contiguous()


def empty_dequantized(
    values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Check stored values, and allocate their dense blocks; ``dtype`` counts for values with scales."""
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"x must have one of the dtypes {list(DTYPES)}, got {dtype}")
    _checks.check_stored(values, metadata, scales)
    form = *values.shape[:2], _checks.block_columns(values, metadata)
    return values.new_empty(form, dtype=values.dtype if scales is None else dtype)


def dequantized(values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantize and decompress values to dense blocks, see `empty_dequantized`."""
    plain = empty_dequantized(values, metadata, scales, dtype)
    nnz, bn, bk = plain.shape
    stored, code = storage_of(values, Operands(metadata, scales)), DTYPES[plain.dtype]
    product = _C.Product(_blocks(nnz, (bn, bk)), DDS_NT, code, int(values.is_cuda), 0, **stored)
    values, metadata = aligned(values), None if metadata is None else aligned(metadata)
    addresses = values.data_ptr(), _address(metadata), _address(scales), plain.data_ptr()
    with on(values.device):
        product.dequantize(*addresses, plain.nbytes, _stream_of(values))
    return plain


def decompressed(values: Tensor, metadata: Tensor) -> Tensor:
    """Return dense blocks of 2:4 values in 8 bits, as they are."""
    return dequantized(values.float(), metadata, None, torch.float32).to(values.dtype)


def row_scales(scales: Tensor, pattern: Prepared) -> Tensor:
    """Return float32 [nnz, bn]: for each row of a block the scale of its output feature."""
    _checks.check_feature_scales(scales, pattern.index())
    with pattern.launching():
        rows, _ = pattern.block_indices()
        return scales.view(-1, pattern.block_shape[0]).index_select(0, rows)


def kept_row_scales(scales: Tensor, pattern: Prepared) -> Tensor:
    """Return the same, only to be read.

    They are made in every call, as not every write to scales is seen, unless the layer is prepacked.
    """
    with pattern.launching():
        if not pattern.prepacks or (scales.is_cuda and torch.cuda.is_current_stream_capturing()):
            return row_scales(scales, pattern)
        state = pattern.generation, _stream_of(scales)
        return pattern.scales.follow(lambda scales, *_: row_scales(scales, pattern), scales, *state)


def compress(values: Tensor, mask: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Return (compressed, metadata) of dense blocks with a 2:4 mask, or those of the transposed blocks."""
    compressed, metadata = empty_compressed(values, mask, transposed)
    nnz, bn, bk = values.shape
    values, mask = aligned(values), aligned(mask)
    blocks, dtype = _blocks(nnz, (bn, bk)), {**DTYPES, **QUANTIZED}[values.dtype]
    given, written = (values.data_ptr(), mask.data_ptr()), (compressed.data_ptr(), metadata.data_ptr())
    with on(values.device):
        stream = _stream_of(values)
        _C.values_compress(blocks, int(values.is_cuda), dtype, *given, transposed, *written, stream)
    return compressed, metadata


def empty_compressed(values: Tensor, mask: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Check dense blocks and their mask, and allocate (compressed, metadata)."""
    _checks.check_mask(values, mask, transposed)
    nnz, rows, columns = values.shape
    if transposed:
        rows, columns = columns, rows
    compressed = values.new_empty(nnz, rows, columns // 2)
    return compressed, values.new_empty(nnz, columns // _checks.COMPRESSIBLE, rows, dtype=torch.int32)


def storage_of(values: Tensor, operands: Operands) -> dict[str, Any]:
    """Return the storage of values as arguments of `_C.Product`."""
    metadata, scales = operands[:2]
    granularity = 0
    if scales is not None and operands.fast is not None:
        granularity = SCALES_PER_BLOCK if _checks.is_inside(scales) else SCALES_PER_FEATURE
    elif scales is not None:
        granularity = (SCALES_PER_BLOCK, SCALES_PER_ROW)[scales.dim() - 1]
    return {
        "storage": int(metadata is not None),
        "values_dtype": 0 if scales is None else SCALED[values.dtype],
        "granularity": granularity,
    }


def _blocks(nnz: int, block_shape: tuple[int, int]) -> _C.Pattern:
    """Return a pattern of that many blocks, of which only sizes are read."""
    (bn, bk), rows = block_shape, min(nnz, 1 << 16)
    columns = -(-nnz // rows) if rows else 0
    return _C.Pattern(bn, bk, rows * bn, columns * bk, nnz, 0, 0, 0)


# The kernel that products run on: 0 the best one; k the kernel k - 1 of ``_C.kernels()`` and no other; -k
# kernels whose names begin with ``_preferences[k - 1]``, where one of them computes the product. One for the
# process, not for a thread: backward passes run in PyTorch's threads.
asked_kernel = 0
_asked: dict[object, int] = {}  # all that are in force; the last one counts
_asking = Lock()
_preferences: list[str] = []


@contextmanager
def ask_for(kernel: int) -> Iterator[None]:
    """Run products in this context on what the number stands for, see above.

    Of several contexts the one entered last counts, whichever is left first: threads do not wait for others.
    """
    global asked_kernel
    own = object()
    with _asking:
        _asked[own] = asked_kernel = kernel
    try:
        yield
    finally:
        with _asking:
            del _asked[own]
            asked_kernel = next(reversed(_asked.values()), 0)


def prefer_kernels(prefix: str) -> AbstractContextManager[None]:
    """Run products in this context on kernels with this prefix, where one of them computes the product."""
    if prefix not in _preferences:
        _preferences.append(prefix)
    return ask_for(-1 - _preferences.index(prefix))


def preference() -> str:
    """Return the prefix of the kernels that are preferred now; empty if none are."""
    return preferred(asked_kernel)


def preferred(kernel: int) -> str:
    """Return the prefix that a number given to `ask_for` stands for; empty for none."""
    return _preferences[-1 - kernel] if kernel < 0 else ""


@cache
def known_kernels() -> list[_C.KernelInfo]:
    """List the kernels of the library."""
    return _C.kernels()


Context = tuple[int, int, int, int]  # kernel asked for, stream, current device, precision


def dds(
    op: int,
    source: Tensor,
    values: Tensor,
    pattern: Prepared,
    epilogue: Epilogue = NO_EPILOGUE,
    operands: Operands = DENSE,
) -> Tensor:
    """Return x Wᵀ (``op`` DDS_NT) or y W (DDS_NN) in the dtype of the source, x or y."""
    bias, residual, activation, column_major, gate = epilogue
    if operands is not DENSE:
        if operands.threshold is not None or operands.gate_threshold is not None:
            return _skipping(source, values, pattern, epilogue, operands)
        if operands.transposed:
            _checks.check_nothing_added(epilogue)
            pattern, op = pattern.transposed(), DDS_NN - op
        if operands.compressed is not None:
            values = operands.compressed
        if pattern.prepacks and source.is_cpu:
            values, operands = _kept_dense(source, values, pattern, operands)
    metadata, scales, offsets, _, _, _, x_values, x_scales, _, fast = operands[:10]
    if pattern.on_cpu:
        # Another thread may load a weight of another size: one shape and memory, which this keeps alive.
        values = values.detach()
    other = residual if gate is None else _checks.check_one(residual, gate)
    gated, kernel, major = gate is not None, asked_kernel, column_major
    result: Tensor | None = None
    if offsets is not None:
        pass  # such products are not kept there
    elif fast is None:
        result = pattern.kept.run(
            op, source, values, bias, other, activation, major, metadata, scales, kernel, gated
        )
    else:
        result = pattern.kept.run_quantized(
            # One by one: unpacking takes as long as the rest of the call.
            source,
            x_values,
            x_scales,
            values,
            scales,
            bias,
            other,
            activation,
            major,
            kernel,
            gated,
            fast,
            metadata,
        )
    if result is not None:
        return result
    with pattern.launching():
        return _dds(op, source, values, pattern, epilogue, operands)


def _kept_dense(
    source: Tensor, values: Tensor, pattern: Prepared, operands: Operands
) -> tuple[Tensor, Operands]:
    """Return values as the CPU keeps them of prepacked layers: dense blocks, or in 8 bits those of 2:4."""
    metadata, scales = operands[:2]
    if operands.fast is None and not (metadata is None and scales is None):
        values = pattern.plain.follow(dequantized, values, metadata, scales, source.dtype)
        return values, operands._replace(metadata=None, scales=None)
    if operands.fast is not None and metadata is not None:
        return pattern.plain.follow(decompressed, values, metadata), operands._replace(metadata=None)
    return values, operands


def _dds(
    op: int, source: Tensor, values: Tensor, pattern: Prepared, epilogue: Epilogue, operands: Operands
) -> Tensor:
    """Run a product that the native module does not know, and have it kept there."""
    bias, residual, activation, column_major, gate = epilogue
    metadata, scales, offsets, _, _, _, x_values, x_scales, _, fast = operands[:10]
    gated = gate is not None
    other = residual if gate is None else gate
    factor = source if x_values is None else x_values
    entry = pattern if offsets is None else pattern.grouped(_checks.group_count(pattern.index(), offsets))
    context = context_of(source)
    if fast is not None:  # no TF32, but fast sums of float8
        precision = int(fast and source.is_cuda and values.dtype == torch.float8_e4m3fn)
        context = *context[:3], precision
    tensors = source, values, bias, other, metadata, scales, offsets, x_values, x_scales
    forms = [None if tensor is None else form_of(tensor) for tensor in tensors]
    key: Hashable = op, *forms, gated, activation, column_major, context
    if pattern.prepacks and source.is_cuda:
        key = key, torch.cuda.is_current_stream_capturing()
    call = entry.find(key)
    if call is None or (
        source.is_cuda and any(map(_is_misaligned, (factor, values, other, metadata, x_scales)))
    ):
        name, index = "x" if op == DDS_NT else "y", pattern.index()
        _checks.check_dds(name, source, values, index, epilogue, operands._replace(compressed=None))
        layouts = (0, 1) if offsets is None and fast is None else (0,)
        usable_factor, lines = usable(name, factor, layouts)
        weight, x_scales_ld = aligned(values), 0
        usable_metadata = None if metadata is None else aligned(metadata)
        near, other_lines = (None, None) if other is None else like_result(other, column_major)
        of_x = x_scales
        if x_scales is not None and scales is not None:
            inside = _checks.is_inside(scales)
            of_x, x_scales_ld = group_scales(x_scales) if inside else (aligned(x_scales.contiguous()), 0)
        copied = (
            (usable_factor, factor),
            (weight, values),
            (usable_metadata, metadata),
            (near, other),
            (of_x, x_scales),
        )
        if any(one is not given for one, given in copied):
            epilogue = epilogue._replace(gate=near) if gated else epilogue._replace(residual=near)
            operands = operands._replace(
                metadata=usable_metadata, x_scales=of_x, transposed=False, compressed=None
            )
            if fast is None:
                source = usable_factor
            else:
                operands = operands._replace(x_values=usable_factor)
            return dds(op, source, weight, pattern, epilogue, operands)
        features = index.shape[op]
        if offsets is not None and op == DDS_NT:
            features //= offsets.shape[0] - 1
        form = result_form(source, features, column_major)
        options = storage_of(values, operands)
        options |= {"gated": gated, "activation": activation, "grouped": offsets is not None}
        if fast is not None:
            options |= {"result_dtype": DTYPES[source.dtype], "x_scales_ld": x_scales_ld}
        result_lines = (lines[0], features, 0) if form[1] is None else (lines[0], form[1][-1], 1)
        both = (lines, result_lines) if op == DDS_NT else (result_lines, lines)
        product = _product(op, entry, factor, *both, context, other_lines, **options)
        call = entry.call(key, product, op, source.itemsize, form)
        made = product, *allocations(call)
        added = bias, other, activation, column_major
        kept: Any = pattern.kept
        if offsets is None and pattern.keeps_calls():
            if fast is None:
                beside = metadata, scales, context[0], gated
                kept.keep(op, source, values, *added, *beside, *made)
            else:
                factors = source, x_values, x_scales, values, scales
                kept.keep_quantized(*factors, *added, context[0], gated, fast, metadata, *made)
    result = empty(source, call.form)
    x, y = (factor, result) if op == DDS_NT else (result, factor)
    bias = None if bias is None else bias.contiguous()
    workspace = source.new_empty(call.workspace) if call.workspace else None
    if call.prepacked is not None:
        call.prepacked.follow(values, pattern.generation, context[1])
    first = map(_address, (x, y, values, bias, other, workspace))
    call.run(*first, context[1], *map(_address, (metadata, scales, x_scales, offsets)))
    return result


_SKIP_INPUTS, _SKIP_OUTPUTS = 1, 2  # TS_SKIP_INPUTS and TS_SKIP_OUTPUTS


def _skipping(x: Tensor, values: Tensor, pattern: Prepared, epilogue: Epilogue, operands: Operands) -> Tensor:
    """Run a product with one threshold that reads the weights of neurons that are on, or multiplies zeros."""
    bias, residual, activation, column_major, gate = epilogue
    scales, offsets, of_inputs, gated = (
        operands.scales,
        operands.offsets,
        operands.threshold is not None,
        gate is not None,
    )
    entry = pattern if offsets is None else pattern.grouped(_checks.group_count(pattern.index(), offsets))
    weight = kept_turned(entry, values) if of_inputs else values
    limit: Any = limit_of(operands.threshold if of_inputs else operands.gate_threshold, x.dtype)
    added = bias, gate if gated else residual, activation, column_major
    beside = None, scales, asked_kernel, gated
    how = _SKIP_INPUTS if of_inputs else _SKIP_OUTPUTS, limit
    if weight is not None and offsets is None:
        result: Tensor | None = pattern.kept.run(DDS_NT, x, weight, *added, *beside, *how)
        if result is not None:
            return result
    plain = operands._replace(threshold=None, gate_threshold=None)
    if column_major or not skips(x, values, pattern.block_shape, operands) or values.is_inference():
        if of_inputs:
            x = thresholded(x, limit)
        elif gate is not None:
            epilogue = epilogue._replace(gate=thresholded(gate, limit))
        return dds(DDS_NT, x, values, pattern, epilogue, plain)
    _checks.check_dds("x", x, values, pattern.index(), epilogue, plain)
    other = added[1]
    with pattern.launching():
        (rows, ld), (others, ldr) = row_major(x), (None, 0) if other is None else row_major(other)
        weight = turned(entry, values) if of_inputs else aligned(values)
        context = context_of(x)
        features = pattern.shape[0] if offsets is None else pattern.shape[0] // (offsets.shape[0] - 1)
        form = result_form(x, features, False)
        forms = [None if one is None else form_of(one) for one in (x, values, scales, bias, other)]
        key: Hashable = "skip", *forms, gated, activation, context, *how
        call = entry.find(key)
        if call is None:
            options = storage_of(values, plain) | {"skip": how[0], "threshold": limit, "gated": gated}
            options |= {"activation": activation, "ldr": ldr, "residual": other is not None}
            product = _C.Product(
                *(entry.descriptor, DDS_NT, DTYPES[x.dtype], int(x.is_cuda), x.numel() // pattern.shape[1]),
                **{"ldx": ld, "ldy": features, "grouped": offsets is not None, **options},
            )
            call = entry.call(key, product, DDS_NT, x.itemsize, form, skips=True)
            if rows is x and others is other and offsets is None:
                pattern.kept.keep(DDS_NT, x, weight, *added, *beside, product, *allocations(call), *how)
        result = empty(x, call.form)
        workspace = x.new_empty(call.workspace) if call.workspace else None
        bias = None if bias is None else bias.contiguous()
        first = map(_address, (rows, result, weight, bias, others, workspace))
        call.run(*first, context[1], 0, *map(_address, (scales, None, offsets)))
    return result


# Tokens that skipping pays for, of at most 8 that kernels take. On an H200 with half of 14336 inputs off,
# weights in 16 bits are even with masked x at 2 tokens, and 1.5 times as slow at 4; int8 pays for half as
# many, int4 for none. Experts read theirs for each of their tokens, of which there may be as many as experts.
SKIPPED_TOKENS = 2


def skips(x: Tensor, values: Tensor, block_shape: tuple[int, int], operands: Operands) -> bool:
    """Return True if a kernel skips the weights of neurons that are off; see ``ts_matmul_desc.skip``."""
    if x.shape[-1] == 0 or operands.fast is not None:
        return False
    in_int8 = operands.scales is not None
    most = SKIPPED_TOKENS // (2 if in_int8 and x.is_cuda else 1)
    experts = 0 if operands.offsets is None else operands.offsets.shape[0] - 1
    if x.numel() // x.shape[-1] > max(most, experts):
        return False
    if x.dtype not in (torch.float16, torch.bfloat16) and (x.dtype != torch.float32 or x.is_cuda):
        return False
    if operands.metadata is not None or operands.compressed is not None:
        return False
    if not in_int8:
        return values.dtype == x.dtype
    if values.dtype != torch.int8:
        return False
    if x.is_cuda:  # smaller blocks gain nothing
        of_inputs = operands.gate_threshold is None and experts == 0
        return of_inputs and block_shape[0] == 128 and block_shape[1] >= 64
    return min(block_shape) >= 32


def thresholded(x: Tensor, threshold: float) -> Tensor:
    """Return x with zeros in the place of numbers up to a magnitude; never of NaN or infinities."""
    return torch.nn.functional.hardshrink(x, limit_of(threshold, x.dtype))


@constant_when_compiled
def limit_of(threshold: float | None, dtype: torch.dtype) -> float:
    """Return the largest finite number of a dtype that is at most the threshold: it gives the same zeros."""
    return _limit_of(threshold, dtype)


@cache  # inside, because some compilers look into cached functions
def _limit_of(threshold: float | None, dtype: torch.dtype) -> float:
    most = torch.finfo(dtype).max
    limit = torch.tensor(most if threshold is None else min(threshold, most), dtype=torch.float64)
    rounded = limit.to(dtype)
    if rounded > limit:
        word = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
        rounded = (rounded.view(word) - 1).view(dtype)
    return float(rounded)


def _stream_of(tensor: Tensor) -> int:
    """Return the current stream of a tensor's device; 0 on the CPU."""
    return current_stream(tensor.get_device()) if tensor.is_cuda else 0


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _is_misaligned(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.data_ptr() % _checks.ALIGNMENT != 0


def sdd(
    y: Tensor, x: Tensor, pattern: Prepared, _: Epilogue = NO_EPILOGUE, operands: Operands = DENSE
) -> Tensor:
    """Return yᵀ x on the pattern; with groups of tokens, each meets the blocks of its group alone."""
    if operands.offsets is None:
        result: Tensor | None = pattern.kept.run(
            SDD_TN, y, x, None, None, 0, False, None, None, asked_kernel, False
        )
        if result is not None:
            return result
    out = x.new_empty(*pattern.values_shape)
    write_sdd(y, x, out, pattern, False, offsets=operands.offsets)
    return out


def sdd_with_bias(y: Tensor, x: Tensor, pattern: Prepared) -> tuple[Tensor, Tensor]:
    """Return yᵀ x on the pattern and the sums over tokens of y: the gradients of weight and bias."""
    out, of_bias = x.new_empty(*pattern.values_shape), y.new_empty(pattern.shape[0])
    write_sdd(y, x, out, pattern, False, of_bias)
    return out, of_bias


def write_sdd(
    y: Tensor,
    x: Tensor,
    out: Tensor,
    pattern: Prepared,
    accumulate: bool,
    of_bias: Tensor | None = None,
    accumulate_bias: bool = False,
    offsets: Tensor | None = None,
) -> None:
    """Write or add yᵀ x to ``out``, which is known to be contiguous, aligned, and apart from y and x.

    ``of_bias``: [out_features] for the sums over tokens of y, likewise, or None.
    """
    context = context_of(x)
    sums_y = None if of_bias is None else (of_bias.dtype, accumulate_bias)
    of_groups = None if offsets is None else form_of(offsets)
    key = (SDD_TN, form_of(y), form_of(x), accumulate, sums_y, out.dtype, of_groups, context)
    with pattern.launching():
        entry = pattern if offsets is None else pattern.grouped(_checks.group_count(pattern.index(), offsets))
        call = entry.find(key)
        if call is None or (x.is_cuda and (_is_misaligned(y) or _is_misaligned(x))):
            _checks.check_sdd(y, x, pattern.index(), offsets)
            layouts = (0, 1) if offsets is None else (0,)
            (usable_y, y_lines), (usable_x, x_lines) = usable("y", y, layouts), usable("x", x, layouts)
            if usable_y is not y or usable_x is not x:
                beside = of_bias, accumulate_bias, offsets
                return write_sdd(usable_y, usable_x, out, pattern, accumulate, *beside)
            options: dict[str, Any] = {
                "grouped": offsets is not None,
                "accumulate": accumulate,
                "result_dtype": 0 if out.dtype == x.dtype else DTYPES[out.dtype],
                "bias_gradient": of_bias is not None,
                "bias_gradient_dtype": 0
                if of_bias is None or of_bias.dtype == x.dtype
                else DTYPES[of_bias.dtype],
                "accumulate_bias": accumulate_bias,
            }
            product = _product(SDD_TN, entry, x, x_lines, y_lines, context, **options)
            call = entry.call(key, product, SDD_TN, x.itemsize, (out.shape, None))
            is_simple = not accumulate and of_bias is None and offsets is None and out.dtype == x.dtype
            if is_simple and pattern.keeps_calls():
                request = SDD_TN, y, x, None, None, 0, False, None, None, context[0], False
                pattern.kept.keep(*request, product, *allocations(call))
        workspace = x.new_empty(call.workspace) if call.workspace else None
        first = map(_address, (x, y, out, of_bias, None, workspace))
        call.run(*first, context[1], 0, 0, 0, _address(offsets))


def context_of(operand: Tensor) -> Context:
    """Return the state that a call depends on besides its arguments."""
    device = operand.get_device()
    if device < 0:
        return asked_kernel, 0, device, 0
    tf32 = operand.dtype == torch.float32 and tf32_allowed()
    return asked_kernel, current_stream(device), current_device(), int(tf32)


def form_of(tensor: Tensor) -> tuple[object, ...]:
    """Return all of a tensor but its memory. Only tensors on the CPU (-1) and CUDA devices come here."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _product(
    op: int,
    pattern: Prepared,
    like: Tensor,
    x: Lines,
    y: Lines,
    context: Context,
    residual: Lines | None = None,
    **options: Any,
) -> _C.Product:
    """Describe a product whose factor has the dtype of ``like``; for groups of tokens, of their pattern."""
    kernel, _, device, precision = context
    return _C.Product(
        pattern.descriptor,
        op,
        {**DTYPES, **QUANTIZED}[like.dtype],
        int(device >= 0),
        x[0],
        precision=precision,
        kernel=max(kernel, 0),
        prefer=preferred(kernel),
        x_layout=x[2],
        ldx=x[1],
        y_layout=y[2],
        ldy=y[1],
        residual=residual is not None,
        ldr=0 if residual is None else residual[1],
        **options,
    )


def group_sums(y: Tensor, offsets: Tensor) -> Tensor:
    """Return [groups, features]: the sums over the tokens of each group of y [tokens, features]."""
    rows, ld = row_major(y)
    groups, features = offsets.shape[0] - 1, y.shape[1]
    sums, dtype, stream = y.new_empty(groups, features), DTYPES[y.dtype], _stream_of(y)
    sizes, matrix = (y.shape[0], features, groups), (rows.data_ptr(), ld)
    with on(y.device):
        _C.group_sums(
            int(y.is_cuda), dtype, dtype, *sizes, matrix, offsets.data_ptr(), sums.data_ptr(), stream
        )
    return sums


# Gradients of biases are taken together with others from this many elements on. With fewer, the host loses
# more time than the GPU saves.
MANY_ELEMENTS = 1 << 23
_GATED = (torch.float32, torch.float16, torch.bfloat16)


def gate(y: Tensor, by: Tensor | None, activation: int) -> Tensor:
    """Return y ⊙ activation(by), or that of the halves of y; `multiplies_by_gate` must hold."""
    tokens, features, gate_rows, rows = _operands(y, by)
    result = y.new_empty(*y.shape[:-1], features)
    code, here, stream = DTYPES[y.dtype], (result.data_ptr(), features), current_stream(y.get_device())
    with on(y.device):
        _C.gate(code, activation, tokens, features, gate_rows, rows, here, stream)
    return result


def gate_gradient(
    grad: Tensor, y: Tensor, by: Tensor | None, activation: int
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of y and ``by`` from that of the result of `gate`, which is row-major."""
    tokens, features, gate_rows, rows = _operands(y, by)
    of_y, of_by = y.new_empty(y.shape), None if by is None else by.new_empty(by.shape)
    *_, of_gate, of_factor = _operands(of_y, of_by)
    stride = row_stride(grad)
    assert stride is not None
    code, given, stream = DTYPES[y.dtype], (grad.data_ptr(), stride), current_stream(y.get_device())
    written = of_gate, of_factor
    with on(y.device):
        _C.gate_gradient(code, activation, tokens, features, gate_rows, rows, given, *written, stream)
    return of_y, of_by


def multiplies_by_gate(y: Tensor, by: Tensor | None) -> bool:
    """Return True if a kernel reads both in place, or without ``by`` the halves of y."""
    if not may_multiply_by_gate(y, 32 if by is None else 16) or row_stride(y) is None:
        return False
    return by is None or row_stride(by) is not None


def may_multiply_by_gate(y: Tensor, multiple: int) -> bool:
    """Return True if a kernel multiplies them once they are row-major with features of that multiple."""
    return y.is_cuda and y.dtype in _GATED and y.shape[-1] % multiple == 0


def _operands(y: Tensor, by: Tensor | None) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Return (tokens, features, rows of the gate, rows of the factor); rows: address, leading dimension."""
    stride, features, start = row_stride(y), y.shape[-1], y.data_ptr()
    assert stride is not None
    tokens = y.numel() // features
    if by is None:
        features //= 2
        return tokens, features, (start, stride), (start + features * y.itemsize, stride)
    gate_stride = row_stride(by)
    assert gate_stride is not None
    return tokens, features, (by.data_ptr(), gate_stride), (start, stride)


_Rows = tuple[int, int]  # address and leading dimension
_NONE = 0, 0


def combine(y: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    """Return [tokens, features]: Σ_c weights[t, c] y[rows[t, c]], or without weights the sum of the rows."""
    result = empty_combined(y, weights, rows)
    if result.numel():
        y, of_y = _rows_of(y)
        _run(_C.combine, rows, weights, y, of_y, _rows_of(result)[1])
    return result


def spread(x: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    """Return [tokens · choices, features]: row rows[t, c] is weights[t, c] x[t], or without weights x[t]."""
    result = empty_spread(x, weights, rows)
    if result.numel():
        x, of_x = _rows_of(x)
        _run(_C.combine_gradient, rows, weights, x, _NONE, of_x, _rows_of(result)[1], 0)
    return result


def combine_gradient(grad: Tensor, y: Tensor, weights: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and the weights of `combine` from that of its result."""
    of_y, of_weights = empty_combine_gradient(grad, y, weights, rows)
    if of_y.numel():
        (grad, of_grad), (y, of_rows) = _rows_of(grad), _rows_of(y)
        written = _rows_of(of_y)[1], of_weights.data_ptr()
        _run(_C.combine_gradient, rows, weights, y, of_rows, of_grad, *written)
    return of_y, of_weights.zero_() if y.shape[1] == 0 else of_weights


def empty_combined(y: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    """Check the operands of `combine`, and allocate its result."""
    _checks.check_combination("y", y, weights, rows, rows.numel())
    return y.new_empty(rows.shape[0], y.shape[1])


def empty_spread(x: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    """Check the operands of `spread`, and allocate its result."""
    _checks.check_combination("x", x, weights, rows, rows.shape[0])
    return x.new_empty(rows.numel(), x.shape[1])


def empty_combine_gradient(
    grad: Tensor, y: Tensor, weights: Tensor | None, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Check the operands of `combine_gradient`, and allocate its results."""
    _checks.check_combination("grad", grad, weights, rows, rows.shape[0])
    _checks.check_combination("y", y, weights, rows, rows.numel())
    return y.new_empty(y.shape), y.new_empty(rows.shape)


def _rows_of(matrix: Tensor) -> tuple[Tensor, _Rows]:
    """Return a matrix that kernels can read, and where it is."""
    matrix, ld = row_major(matrix)
    return matrix, (matrix.data_ptr(), ld)


def _run(
    run: Callable[..., None], rows: Tensor, weights: Tensor | None, like: Tensor, y: _Rows, *rest: _Rows | int
) -> None:
    rows = rows.contiguous()
    weights = None if weights is None else weights.contiguous()
    sizes, addresses = (*rows.shape, like.shape[1]), (rows.data_ptr(), _address(weights))
    with on(like.device):
        run(int(like.is_cuda), DTYPES[like.dtype], *sizes, y, *addresses, *rest, _stream_of(like))


_FEATURES = 16  # of which kernels read multiples


def quantize(x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return (values [..., features], scales [...]) of activations; what no kernel can read is refused.

    Without a dtype values are float8_e4m3fn with scales [..., features / 128] of groups of features, of which
    those of one group of all tokens lie side by side.
    """
    result: tuple[Tensor, Tensor] | None = None if dtype is None else QUANTIZER.run(x, QUANTIZED[dtype])
    return _quantized(x, dtype) if result is None else result


def _quantized(x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Quantize what the native module does not read, or what it does not know yet."""
    values, scales = empty_quantized(x, dtype)
    code = QUANTIZED[values.dtype]
    if dtype is not None:
        QUANTIZER.keep(values.new_empty(0), scales.new_empty(0), code, Tensor.new_empty)
    if x.numel() == 0:
        return values, scales.fill_(least_scale())  # of tokens without features, as of zeros
    features, scales_ld = x.shape[-1], scales.stride(-1) if dtype is None else 0
    sizes = x.numel() // features, features
    x, stride = row_major(x)
    rows, written = (x.data_ptr(), stride), (values.data_ptr(), features)
    with on(x.device):
        how = int(x.is_cuda), DTYPES[x.dtype], code
        _C.quantize(*how, *sizes, rows, written, scales.data_ptr(), _stream_of(x), scales_ld)
    return values, scales


@cache
def least_scale() -> float:
    """Return the least scale that a token can have: the one of zeros."""
    return float(_quantized(torch.zeros(1, _FEATURES, device="cpu"), torch.int8)[1])


def empty_quantized(x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Check x, and allocate what `quantize` returns."""
    _checks.check_quantizable(x)
    multiple = _FEATURES if dtype is not None else _checks.SCALE_GROUP
    if x.dim() == 0 or x.shape[-1] % multiple:
        raise InvalidArgumentError(
            f"x must be [..., features] with a multiple of {multiple} features, got shape {tuple(x.shape)}"
        )
    values = x.new_empty(x.shape, dtype=torch.float8_e4m3fn if dtype is None else dtype)
    if dtype is None:
        return values, empty_group_scales(x, x.shape[:-1], x.shape[-1] // multiple)
    return values, x.new_empty(x.shape[:-1], dtype=torch.float32)
