"""Values from one storage to another, as operators."""

import torch
from torch import Tensor

from .._checks import DTYPES, block_columns, check_mask, check_stored
from .._runtime import values as _values
from .._runtime.values import compress, empty_compressed
from ..errors import InvalidArgumentError
from .register import register_plainly


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
    of_values = values.dtype if scales is None else dtype
    return values.new_empty(*values.shape[:2], block_columns(values, metadata), dtype=of_values)


def _checked_dtype(values: Tensor, metadata: Tensor | None, scales: Tensor | None, code: int) -> torch.dtype:
    if not 1 <= code <= len(DTYPES):
        raise InvalidArgumentError(f"dtype must be a number from 1 to {len(DTYPES)}, got {code}")
    check_stored(values, metadata, scales)
    return list(DTYPES)[code - 1]


COMPRESS = register_plainly("compress", _compress, _compress_fake)
_EXPAND_VALUES = register_plainly("expand_values", _expand_values, _expand_values_fake)


def expand_values(
    values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantize and decompress stored values; see `storage.expand`."""
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype must be one of {list(DTYPES)}, got {dtype}")
    plain: Tensor = _EXPAND_VALUES(values, metadata, scales, DTYPES[dtype])
    return plain
