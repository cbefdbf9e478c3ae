"""Index tensors of a pattern: validate, move and overwrite them, and make them of block numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import INT32_MAX, Index, check_block_shape, check_content, check_shapes
from .._runtime.indices import block_indices, validate
from .._runtime.lookup import update_of
from ..errors import InvalidArgumentError, InvalidPatternError


def checked_index(
    crow_indices: Tensor | Sequence[int],
    col_indices: Tensor | Sequence[int],
    shape: Sequence[int],
    block_shape: int | Sequence[int],
    slot: Tensor | Sequence[int] | None,
    device: torch.device | str | int | None,
) -> Index:
    """Return validated copies of the arrays of a pattern."""
    if device is None:
        device = col_indices.device if isinstance(col_indices, Tensor) else "cpu"
    shape, block_shape, (block_rows, _) = check_shapes(shape, block_shape)
    crow = _index_array("crow_indices", crow_indices, block_rows + 1)
    col = _index_array("col_indices", col_indices)
    nnz = len(col)
    if slot is None:
        slot = torch.arange(nnz, dtype=torch.int32, device="cpu")
    index = Index(crow, col, _index_array("slot", slot, nnz), shape, block_shape)
    validate(index)
    return moved_index(index, torch.device(device))


def moved_index(index: Index, device: torch.device, copy: bool = False) -> Index:
    """Move an index to a device, through pinned memory on the way to a GPU so that the host does not wait."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    here = index.col_indices.device
    if device == here and not copy:
        return index
    pinned = here.type == "cpu" and device.type == "cuda" and not torch.compiler.is_compiling()
    tensors = (tensor.pin_memory() if pinned else tensor for tensor in index[:3])
    crow, col, slot = (tensor.to(device, non_blocking=pinned, copy=True) for tensor in tensors)
    return Index(crow, col, slot, index.shape, index.block_shape)


@torch.no_grad()
def overwrite_index(target: Index, source: Index) -> None:
    """Write the source over the target in place; what is derived from the target follows."""
    source = moved_index(source, target.col_indices.device)
    with update_of(target), torch.inference_mode(target.col_indices.is_inference()):
        for to, tensor in zip(target[:3], source[:3], strict=True):
            to.copy_(tensor)


def index_of(numbers: Tensor, like: Index) -> Index:
    """Make an index of the block number row * C + col at every slot; on a GPU the host does not wait."""
    (out_features, in_features), (bn, bk) = like.shape, like.block_shape
    rows, cols = out_features // bn, in_features // bk
    numbers, slot = numbers.sort()
    starts = torch.arange(rows + 1, device=numbers.device) * cols
    crow = torch.searchsorted(numbers, starts, out_int32=True)
    return Index(crow, (numbers % cols).int(), slot.int(), *like[3:])


def refined_index(index: Index, block_shape: int | Sequence[int]) -> Index:
    """Return the index of the same weight in smaller blocks; the parts of a block follow each other."""
    small, (bn, bk) = check_block_shape(block_shape), index.block_shape
    if bn % small[0] or bk % small[1]:
        raise InvalidArgumentError(f"block_shape must divide the blocks of {bn}x{bk}, got {block_shape}")
    rows, cols = block_indices(index)
    down = torch.arange(bn // small[0], device=rows.device)
    across = torch.arange(bk // small[1], device=rows.device)
    rows = rows[:, None, None] * len(down) + down[:, None]
    cols = cols[:, None, None] * len(across) + across
    numbers = (rows * (index.shape[1] // small[1]) + cols).flatten()
    return index_of(numbers, index._replace(block_shape=small))


def _index_array(name: str, array: Tensor | Sequence[int], length: int | None = None) -> Tensor:
    """Return an int32 copy of an index array on the host."""
    if isinstance(array, Tensor):
        check_content(name, array)
    given = torch.as_tensor(array, device="cpu")
    if given.numel() == 0:
        given = given.long()
    if given.dim() != 1 or not is_integer(given):
        raise InvalidPatternError(
            f"{name} must be a 1-D array of integers, got shape {tuple(given.shape)} of {given.dtype}"
        )
    if length is not None and len(given) != length:
        raise InvalidPatternError(f"{name} must have {length} entries, got {len(given)}")
    if len(given) and not 0 <= int(given.min()) <= int(given.max()) <= INT32_MAX:
        raise InvalidPatternError(
            f"{name} must have entries from 0 to 2^31 - 1, got {int(given.min())} to {int(given.max())}"
        )
    return given.to(torch.int32, copy=True).contiguous()


def is_integer(array: Tensor) -> bool:
    """Return True if a tensor holds integers; bool does not count."""
    return not (array.is_floating_point() or array.is_complex() or array.dtype == torch.bool)


def moved_blocks(
    places: Tensor,
    slots: Tensor | Sequence[int],
    blocks: Tensor | Sequence[tuple[int, int]],
    check: bool,
) -> Tensor:
    """Return the (row, col) of every slot, [nnz, 2] int64, after the blocks at ``slots`` have moved."""
    chosen, new = (_integers(n, given, places.device) for n, given in (("slots", slots), ("blocks", blocks)))
    chosen = chosen.reshape(-1)
    if new.numel() != 2 * len(chosen):
        raise InvalidArgumentError(
            f"blocks must be {len(chosen)} places, one per slot, got shape {tuple(new.shape)}"
        )
    if check:
        numbers = chosen.tolist()
        if len(set(numbers)) != len(numbers) or not all(0 <= slot < len(places) for slot in numbers):
            raise InvalidPatternError(f"slots must be different numbers from 0 to {len(places) - 1}")
    places[chosen] = new.reshape(-1, 2)
    return places


def _integers(name: str, given: Tensor | Sequence[Any], device: torch.device) -> Tensor:
    """Return given integers as an int64 tensor on a device."""
    if isinstance(given, Tensor):
        check_content(name, given)
    numbers = torch.as_tensor(given, device=device)
    if numbers.numel() and not is_integer(numbers):
        raise InvalidArgumentError(f"{name} must be integers, got {numbers.dtype}")
    return numbers.long()
