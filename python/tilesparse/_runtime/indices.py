"""The contents of index tensors: validation, places of blocks."""

import torch
from torch import Tensor

from .. import _C
from .._checks import Index
from ..errors import InvalidPatternError


def validate(index: Index) -> None:
    """Raise InvalidPatternError unless the tensors hold a pattern; the host waits for tensors on a GPU."""
    host = [tensor.cpu() for tensor in index[:3]]
    addresses = (tensor.data_ptr() for tensor in host)
    try:
        _C.pattern_validate(_C.Pattern(*index.block_shape, *index.shape, len(host[1]), *addresses))
    except InvalidPatternError as error:
        text = str(error).replace("row_ptr", "crow_indices").replace("col_idx", "col_indices")
        raise InvalidPatternError(text) from None


def block_indices(index: Index) -> tuple[Tensor, Tensor]:
    """Return (rows, cols), each [nnz] int64: the block row and column of every slot."""
    crow, col, slot = index[:3]
    nnz, rows = col.shape[0], crow.shape[0] - 1
    every_row = torch.arange(rows, device=crow.device)
    by_entry = torch.repeat_interleave(every_row, crow.diff(), output_size=nnz)
    places = slot.long()
    found = torch.empty(2, nnz, dtype=torch.int64, device=crow.device)
    found[0, places], found[1, places] = by_entry, col.long()
    return found[0], found[1]


def blocks_of(matrix: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """View [out, in] as [R, C, bn, bk]."""
    (bn, bk), (rows, cols) = block_shape, matrix.shape
    return matrix.reshape(rows // bn, bn, cols // bk, bk).transpose(1, 2)
