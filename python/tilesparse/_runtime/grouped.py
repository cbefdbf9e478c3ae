"""Grouped products: tokens in groups one after another, each with a weight of its own.

The weights lie below each other in one pattern. Where groups begin, only kernels read.
"""

from typing import Any

from torch import Tensor

from .. import _C
from .._checks import DTYPES, check_grouped_dds, check_grouped_sdd, check_one, group_count
from .device import on
from .kernels import preferred
from .layout import aligned, row_major
from .native import DDS_NT, SDD_TN
from .prepared import Prepared
from .private import current_stream
from .products import Context, context_of, form_of
from .requests import Call
from .values import expanded, storage_of


def grouped_dds(
    op: int,
    source: Tensor,
    values: Tensor,
    pattern: Prepared,
    offsets: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Return x Wᵀ (``op`` DDS_NT) or y W (DDS_NN), group by group; ``pattern`` is that of all weights."""
    if pattern.packs and source.is_cpu and not (metadata is None and scales is None):
        values = pattern.plain.follow(expanded, values, metadata, scales, source.dtype)
        metadata = scales = None
    if pattern.on_cpu:
        values = values.detach()  # see `products.dds`
    other, context = check_one(residual, gate), context_of(source)
    tensors = source, values, offsets, bias, other, metadata, scales
    forms = [None if tensor is None else form_of(tensor) for tensor in tensors]
    key = op, *forms, gate is not None, activation, context
    with pattern.launching():
        grouped = pattern.grouped(group_count(pattern.index(), offsets))
        call = grouped.find(key)
        if call is None:
            name, added = "x" if op == DDS_NT else "y", (bias, residual, metadata, scales, gate)
            check_grouped_dds(name, source, values, pattern.index(), offsets, *added)
        (operand, ld), weight = row_major(source), aligned(values)
        near, ldr = (None, 0) if other is None else row_major(other)
        kept = None if metadata is None else aligned(metadata)
        if call is None:
            features = pattern.shape[0] // (offsets.shape[0] - 1), pattern.shape[1]
            options = {
                "ldx": ld if op == DDS_NT else features[1],
                "ldy": features[0] if op == DDS_NT else ld,
                "residual": other is not None,
                "ldr": ldr,
                "gated": gate is not None,
                "activation": activation,
                **storage_of(weight, kept, scales),
            }
            product = _product(op, grouped, operand, context, options)
            form = (operand.shape[0], features[op]), None
            call = grouped.call(key, product, op, operand.itemsize, form)
        result = source.new_empty(call.form[0])
        x, y = (operand, result) if op == DDS_NT else (result, operand)
        bias = None if bias is None else bias.contiguous()
        _run(call, context, x, y, weight, offsets, bias, near, kept, scales)
    return result


def grouped_sdd(y: Tensor, x: Tensor, pattern: Prepared, offsets: Tensor) -> Tensor:
    """Return yᵀ x on the pattern, where tokens meet the blocks of their group alone."""
    context = context_of(x)
    key = SDD_TN, form_of(y), form_of(x), form_of(offsets), context
    with pattern.launching():
        grouped = pattern.grouped(group_count(pattern.index(), offsets))
        call = grouped.find(key)
        if call is None:
            check_grouped_sdd(y, x, pattern.index(), offsets)
        (usable_y, ldy), (usable_x, ldx) = row_major(y), row_major(x)
        if call is None:
            product = _product(SDD_TN, grouped, x, context, {"ldx": ldx, "ldy": ldy})
            call = grouped.call(key, product, SDD_TN, x.itemsize, (pattern.values_shape, None))
        out = x.new_empty(call.form[0])
        _run(call, context, usable_x, usable_y, out, offsets)
    return out


def _product(
    op: int, pattern: Prepared, like: Tensor, context: Context, options: dict[str, Any]
) -> _C.Product:
    kernel, _, device, precision = context
    return _C.Product(
        pattern.descriptor,
        op,
        DTYPES[like.dtype],
        int(device >= 0),
        like.shape[0],
        precision=precision,
        kernel=max(kernel, 0),
        prefer=preferred(kernel),
        grouped=True,
        **options,
    )


def _run(
    call: Call,
    context: Context,
    x: Tensor,
    y: Tensor,
    values: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    workspace = x.new_empty(call.workspace) if call.workspace else None
    tensors = x, y, values, bias, other, workspace
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    metadata_at = 0 if metadata is None else metadata.data_ptr()
    scales_at = 0 if scales is None else scales.data_ptr()
    call.run(*addresses, context[1], metadata_at, scales_at, 0, offsets.data_ptr())


def group_sums(y: Tensor, offsets: Tensor) -> Tensor:
    """Return [groups, features]: the sums over the tokens of each group of y [tokens, features]."""
    rows, ld = row_major(y)
    groups, features = offsets.shape[0] - 1, y.shape[1]
    sums, dtype = y.new_empty(groups, features), DTYPES[y.dtype]
    stream = current_stream(y.get_device()) if y.is_cuda else 0
    sizes, matrix = (y.shape[0], features, groups), (rows.data_ptr(), ld)
    with on(y.device):
        _C.group_sums(
            int(y.is_cuda), dtype, dtype, *sizes, matrix, offsets.data_ptr(), sums.data_ptr(), stream
        )
    return sums
