"""Layers made of stored tensors, and parts of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .._arguments import shown
from .._checks import BLOCK_SIZES, COMPRESSIBLE, DTYPES, Index, as_integer
from ..config import LayerSpec
from ..errors import InvalidArgumentError, InvalidTypeError
from ..pattern.block_pattern import BlockPattern
from ..storage.base import STORED_NAMES, Form
from ..storage.registry import forms_of, storage_of
from ..storage.traits import PER_FEATURE
from .checks import check_whole
from .convert import from_spec
from .origin import PatternOrigin, checked_pattern
from .stored import StoredWeight
from .tensors import INDEX_NAMES

if TYPE_CHECKING:
    from .linear import BlockSparseLinear

_Layer = TypeVar("_Layer", bound="BlockSparseLinear")


class Stored(NamedTuple):
    """The parts of a layer: tensors as its state_dict names them, without those of the pattern."""

    spec: LayerSpec
    pattern: BlockPattern
    tensors: dict[str, Tensor]

    def refined(self, block_shape: tuple[int, int]) -> Stored:
        """Return the same weight in smaller blocks; nothing is rounded."""
        if block_shape == self.spec.block_shape:
            return self
        pattern = self.pattern.refined(block_shape)
        stored = storage_of(self.spec.storage).refined(self.tensors, self.spec, block_shape)
        spec = replace(self.spec, block_shape=block_shape, nnz=pattern.nnz)
        return Stored(spec, pattern, {**self.tensors, **stored})

    def is_by_feature(self, name: str) -> bool:
        """Return True for tensors [out_features]; others have one entry for each block."""
        return name == "bias" or (name == "scales" and self.spec.scales == PER_FEATURE)


@torch.no_grad()
def from_state(
    cls: type[_Layer], spec: LayerSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> _Layer:
    """Return a layer of stored tensors, see `BlockSparseLinear.from_state`."""
    spec = spec if dtype is None else replace(spec, dtype=dtype)
    forms = {**forms_of(spec), "bias": (spec.shape[:1], spec.dtype)}
    if "bias" not in tensors:
        del forms["bias"]
    differing = {*tensors} ^ {*forms, *INDEX_NAMES}
    if differing:
        wanted = ", ".join((*forms, *INDEX_NAMES))
        raise InvalidArgumentError(f"tensors must be {wanted}; they differ in {', '.join(sorted(differing))}")
    for name in INDEX_NAMES:
        _check_tensor(name, tensors[name])
    crow, col, slot = (tensors[name] for name in INDEX_NAMES)
    pattern = checked_pattern(Index(crow, col, slot, spec.shape, spec.block_shape))
    if pattern.nnz != spec.nnz:
        raise InvalidArgumentError(
            f"tensors must have {spec.nnz} blocks, as spec.nnz says, got {pattern.nnz}"
        )
    own = {name: _fitting(name, tensors[name], form) for name, form in forms.items()}
    return _layer_of(cls, Stored(spec, pattern, own))


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidTypeError(f"tensors: {name} must be a tensor, got {type(tensor).__name__}")


def _fitting(name: str, tensor: Tensor, form: Form) -> Tensor:
    """Return a tensor of this shape and dtype; only dtypes of layers are cast to each other."""
    _check_tensor(name, tensor)
    shape, dtype = form
    castable = name in ("weight", "bias") and {tensor.dtype, dtype} <= {*DTYPES}
    if tensor.shape != shape or not (tensor.dtype == dtype or castable):
        raise InvalidArgumentError(
            f"tensors: {name} must be {list(shape)} of {dtype}, got {list(tensor.shape)} of {tensor.dtype}"
        )
    return tensor.detach().to(dtype).contiguous()


def _layer_of(cls: type[_Layer], stored: Stored) -> _Layer:
    spec, pattern, tensors = stored
    layer = from_spec(cls, spec, "bias" in tensors, "meta")
    layer.assign(spec, tensors)
    on_device = pattern.to(layer.weight.device)
    for name in INDEX_NAMES:
        layer._buffers[name] = getattr(on_device, name)
    if "bias" in tensors:
        layer.bias = nn.Parameter(tensors["bias"])
    layer.origin = PatternOrigin.loaded(layer.index())
    return layer


def layer_like(layer: _Layer, stored: Stored) -> _Layer:
    """Return a layer of these tensors that is trained, or not, as another one."""
    made = _layer_of(type(layer), stored).train(layer.training)
    if storage_of(layer.storage).trainable:
        made.weight.requires_grad_(layer.weight.requires_grad)
    if made.bias is not None and layer.bias is not None:
        made.bias.requires_grad_(layer.bias.requires_grad)
    return made


def stored_of(layer: StoredWeight, method: str) -> Stored:
    """Return what makes up a layer, not copied; ``method`` is what needs the whole weight."""
    check_whole(layer, method)
    tensors = {"weight": layer.weight, "bias": getattr(layer, "bias", None)}
    tensors |= {name: layer.get_buffer(name) for name in STORED_NAMES if layer._buffers[name] is not None}
    own = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    return Stored(layer.spec, layer.pattern, own)


@torch.no_grad()
def cut(layer: _Layer, rows: Sequence[int] | None, columns: Sequence[int] | None) -> _Layer:
    """Return some rows and columns of a layer, see `BlockSparseLinear.cut`."""
    stored = stored_of(layer, "cut")
    (out_features, in_features), (bn, bk) = stored.spec.shape, stored.spec.block_shape
    top, bottom = _span("rows", rows, out_features)
    left, right = _span("columns", columns, in_features)
    nm, transposable = stored.spec.nm, stored.spec.transposable
    bn = _block_size("rows", (top, bottom), bn, transposable)
    bk = _block_size("columns", (left, right), bk, nm is not None)
    stored = stored.refined((bn, bk))
    block_rows, block_columns = stored.pattern.block_indices()
    inside = (block_rows >= top // bn) & (block_rows < bottom // bn)
    inside &= (block_columns >= left // bk) & (block_columns < right // bk)
    numbers = block_rows * stored.pattern.grid[1] + block_columns
    slots = inside.nonzero().flatten()
    slots = slots[numbers[slots].argsort()]
    blocks = torch.stack((block_rows[slots] - top // bn, block_columns[slots] - left // bk), 1)
    shape = bottom - top, right - left
    pattern = BlockPattern.from_blocks(blocks, shape=shape, block_shape=(bn, bk))
    tensors = {
        name: (tensor[top:bottom] if stored.is_by_feature(name) else tensor[slots]).clone()
        for name, tensor in stored.tensors.items()
        if name != "bias" or left == 0
    }
    return layer_like(layer, Stored(replace(stored.spec, shape=shape, nnz=pattern.nnz), pattern, tensors))


def _span(name: str, span: Sequence[int] | None, size: int) -> tuple[int, int]:
    if span is None:
        return 0, size
    try:
        begin, end = (as_integer(bound) for bound in span)
    except (TypeError, ValueError):
        begin = end = -1
    if not 0 <= begin < end <= size:
        raise InvalidArgumentError(f"{name} must be (begin, end) from 0 to {size}, got {shown(span)}")
    return begin, end


def _block_size(name: str, span: tuple[int, int], block: int, compressed: bool) -> int:
    """Return the largest block size that divides the layer's and both ends of a span."""
    least = COMPRESSIBLE if compressed else min(BLOCK_SIZES)
    for size in sorted(BLOCK_SIZES, reverse=True):
        if least <= size <= block and not any(bound % size for bound in span):
            return size
    raise InvalidArgumentError(f"{name} must begin and end at multiples of {least}, got {span}")
