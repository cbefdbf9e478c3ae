"""Values from one storage to another, and to and from a dense W."""

from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._checks import (
    COMPRESSIBLE,
    DTYPES,
    QUANTIZED,
    SCALED,
    block_columns,
    check_dense,
    check_feature_scales,
    check_stored,
    check_values,
)
from ..errors import InvalidArgumentError
from .device import on
from .indices import blocks_of
from .layout import aligned
from .native import DDS_NT, SCALES_PER_BLOCK, SCALES_PER_ROW
from .prepared import Prepared
from .private import current_stream


def expand(values: Tensor, pattern: Prepared) -> Tensor:
    """Return the dense W."""
    check_values("values", values, pattern.index())
    dense = values.new_zeros(pattern.shape)
    # Written through a view: building the blocks and then transposing them takes twice as long.
    with pattern.launching():
        blocks_of(dense, pattern.block_shape)[pattern.block_indices()] = values
    return dense


def gather(dense: Tensor, pattern: Prepared) -> Tensor:
    """Return the values of a dense W."""
    check_dense(dense, pattern.index())
    with pattern.launching():
        return blocks_of(dense, pattern.block_shape)[pattern.block_indices()].contiguous()


def expand_values(
    values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantize and decompress values to dense blocks; ``dtype`` counts for values with scales."""
    nnz, bn, bk = values.shape[0], values.shape[1], block_columns(values, metadata)
    if scales is None:
        dtype = values.dtype
    plain = values.new_empty(nnz, bn, bk, dtype=dtype)
    device, stream = values.device, 0
    product = _C.Product(
        _blocks(nnz, (bn, bk)),
        DDS_NT,
        DTYPES[dtype],
        int(values.is_cuda),
        0,
        **storage_of(values, metadata, scales),
    )
    with on(device):
        if values.is_cuda:
            values, stream = aligned(values), torch.cuda.current_stream(device).cuda_stream
            metadata = None if metadata is None else aligned(metadata)
        metadata_at = 0 if metadata is None else metadata.data_ptr()
        scales_at = 0 if scales is None else scales.data_ptr()
        product.dequantize(values.data_ptr(), metadata_at, scales_at, plain.data_ptr(), plain.nbytes, stream)
    return plain


def expanded(values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Check stored values and make dense blocks of them, see `expand_values`."""
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"x must have one of the dtypes {list(DTYPES)}, got {dtype}")
    check_stored(values, metadata, scales)
    return expand_values(values, metadata, scales, dtype)


def decompressed(values: Tensor, metadata: Tensor) -> Tensor:
    """Return dense blocks of 2:4 values in 8 bits, as they are."""
    check_stored(values, metadata, values.new_ones(values.shape[:1], dtype=torch.float32))
    return expand_values(values.float(), metadata, None, torch.float32).to(values.dtype)


def row_scales(scales: Tensor, pattern: Prepared) -> Tensor:
    """Return float32 [nnz, bn]: for each row of a block the scale of its output feature."""
    check_feature_scales(scales, pattern.index())
    with pattern.launching():
        rows, _ = pattern.block_indices()
        return scales.view(-1, pattern.block_shape[0]).index_select(0, rows)


def kept_row_scales(scales: Tensor, pattern: Prepared) -> Tensor:
    """Return the same, only to be read.

    They are made in every call, because not every write to scales can be seen, unless the layer is packed,
    and in every replay of a CUDA graph.
    """
    with pattern.launching():
        if not pattern.packs or (scales.is_cuda and torch.cuda.is_current_stream_capturing()):
            return row_scales(scales, pattern)
        stream = current_stream(scales.get_device()) if scales.is_cuda else 0
        return pattern.scales.follow(
            lambda scales, *_: row_scales(scales, pattern), scales, pattern.generation, stream
        )


def compress(values: Tensor, mask: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return (compressed, metadata) of dense blocks with a 2:4 mask, or those of the transposed blocks."""
    nnz, bn, bk = values.shape
    compressed, metadata = empty_compressed(values, transposed)
    dtype, stream = {**DTYPES, **QUANTIZED}[values.dtype], 0
    with on(values.device):
        if values.is_cuda:
            values, mask = aligned(values), aligned(mask)
            stream = torch.cuda.current_stream(values.device).cuda_stream
        _C.values_compress(
            _blocks(nnz, (bn, bk)),
            int(values.is_cuda),
            dtype,
            values.data_ptr(),
            mask.data_ptr(),
            transposed,
            compressed.data_ptr(),
            metadata.data_ptr(),
            stream,
        )
    return compressed, metadata


def empty_compressed(values: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Allocate (compressed, metadata) for dense blocks."""
    nnz, rows, columns = values.shape
    if transposed:
        rows, columns = columns, rows
    compressed = values.new_empty(nnz, rows, columns // 2)
    return compressed, values.new_empty(nnz, columns // COMPRESSIBLE, rows, dtype=torch.int32)


def storage_of(values: Tensor, metadata: Tensor | None, scales: Tensor | None) -> dict[str, Any]:
    """Return the storage of values as arguments of `_C.Product`."""
    return {
        "storage": int(metadata is not None),
        "values_dtype": 0 if scales is None else SCALED[values.dtype],
        "granularity": 0 if scales is None else (SCALES_PER_BLOCK, SCALES_PER_ROW)[scales.dim() - 1],
    }


def _blocks(nnz: int, block_shape: tuple[int, int]) -> _C.Pattern:
    """Return a pattern of that many blocks, of which only sizes are read."""
    (bn, bk), rows = block_shape, min(nnz, 1 << 16)
    columns = -(-nnz // rows) if rows else 0
    return _C.Pattern(bn, bk, rows * bn, columns * bk, nnz, 0, 0, 0)
