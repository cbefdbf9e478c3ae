"""The storages of values: dense, 2:4 compressed, 8 bits, and 4 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .._checks import COMPRESSIBLE, DTYPES, PACKED, SCALED, is_inside
from .._ops.epilogue import masked
from .._runtime.device import SCALES_PER_FEATURE, SCALES_PER_ROW
from ..config import PER_FEATURE, Traits, traits_of
from .quantize import (
    clamped_scales,
    compress,
    dequantize,
    limits_int4,
    quantize_int4,
    quantize_weights,
    rounded,
    row_scales,
)

if TYPE_CHECKING:
    from ..config import LayerSpec
    from ..pattern import BlockPattern


Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor
Tensors: TypeAlias = Mapping[str, Tensor | None]  # by the names that a layer and its state_dict have for them
STORED_NAMES = ("mask", "metadata", "scales")  # what some storages keep besides the weight


def smaller_blocks(blocks: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Divide blocks [nnz, bn, bk] into smaller ones, the parts of each one after the other, row by row."""
    (nnz, bn, bk), (rows, columns) = blocks.shape, block_shape
    parts = blocks.reshape(nnz, bn // rows, rows, bk // columns, columns).transpose(2, 3)
    return parts.reshape(-1, rows, columns)


class Storage:
    """One way to store the kept blocks [nnz, bn, bk] of a weight: its tensors, packing and conversions.

    This one has the weight in the layer's dtype, and with 2:4 a mask of bools of the same shape. Attributes
    are those of `Traits`. Tensors are "weight" and some of `STORED_NAMES`.
    """

    def __init__(self, traits: Traits) -> None:
        self.name, self.dtype = traits.name, traits.dtype
        self.trainable, self.allows_nm = traits.trainable, traits.allows_nm

    def forms(self, spec: LayerSpec) -> dict[str, Form]:
        """Return shape and dtype of each tensor of a layer with this spec."""
        forms: dict[str, Form] = {"weight": (spec.values_shape, spec.dtype)}
        return forms if spec.nm is None else {**forms, "mask": (spec.values_shape, torch.bool)}

    def store(
        self,
        blocks: Tensor,
        mask: Tensor | None,
        spec: LayerSpec,
        pattern: BlockPattern | None = None,
        limits: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors that store dense blocks."""
        return {"weight": blocks} if mask is None else {"weight": blocks, "mask": mask}

    def dense_blocks(self, tensors: Tensors, spec: LayerSpec, pattern: BlockPattern | None = None) -> Tensor:
        """Return a copy [nnz, bn, bk] of what products multiply by; 8 and 4 bits become the spec's dtype."""
        weight, mask = tensors["weight"], tensors.get("mask")
        assert weight is not None
        return weight.detach().clone() if mask is None else masked(weight.detach(), mask)

    def refined(
        self, tensors: Mapping[str, Tensor], spec: LayerSpec, block_shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the tensors of the same weight in smaller blocks, in the order of `BlockPattern.refined`."""
        return {name: smaller_blocks(tensors[name], block_shape) for name in self.forms(spec)}

    def mask(self, tensors: Tensors) -> Tensor | None:
        """Return the mask of 2:4 [nnz, bn, bk], None without 2:4."""
        return tensors.get("mask")

    def block_shape(self, weight: Tensor, nm: tuple[int, int] | None) -> tuple[int, int]:
        """Return (bn, bk) of the blocks that a stored weight holds."""
        halved = self.dtype == PACKED or (nm is not None and not self.trainable)
        return weight.shape[1], weight.shape[2] * (1 + halved)

    def multiplied(self, nm: tuple[int, int] | None) -> str:
        """Return the name of the storage in which kernels read the values; conversions are done before."""
        return COMPRESSED.name if self.trainable and nm is not None else self.name

    def describe(self, nm: Sequence[int] | None, activations: str | None = None) -> str:
        """Return the storage as reports name it: "int8", "2:4 int8", with activations "int8 W8A8"."""
        if nm is not None and self.trainable:
            return "2:4"
        name = self.name if activations is None else f"{self.name} W8A8"
        return name if nm is None else f"2:4 {name}"

    def product_fields(self, nm: tuple[int, int] | None, activations: str | None = None) -> dict[str, Any]:
        """Return the arguments of `_C.Product` that describe values as kernels read them."""
        code = granularity = 0
        if self.dtype is not None:
            code = SCALED[self.dtype]
            granularity = SCALES_PER_ROW if activations is None else SCALES_PER_FEATURE
        return {"storage": int(nm is not None), "values_dtype": code, "granularity": granularity}


class CompressedStorage(Storage):
    """Weight [nnz, bn, bk / 2] in the layer's dtype and int32 metadata [nnz, bk / 32, bn]."""

    def forms(self, spec: LayerSpec) -> dict[str, Form]:
        """Return shape and dtype of each tensor."""
        nnz, bn, bk = spec.values_shape
        return {
            "weight": ((nnz, bn, bk // 2), self.dtype or spec.dtype),
            "metadata": ((nnz, bk // COMPRESSIBLE, bn), torch.int32),
        }

    def store(self, blocks: Tensor, mask: Tensor | None, *_: Any) -> dict[str, Tensor]:
        """Return the tensors that store dense blocks."""
        assert mask is not None
        weight, metadata = compress(blocks, mask)
        return {"weight": weight, "metadata": metadata}

    def dense_blocks(self, tensors: Tensors, spec: LayerSpec, pattern: BlockPattern | None = None) -> Tensor:
        """Return dense blocks, which are zero where the mask is."""
        weight, metadata, scales = (tensors.get(name) for name in ("weight", "metadata", "scales"))
        assert weight is not None
        return dequantize(weight, metadata, scales, spec.dtype)

    def refined(
        self, tensors: Mapping[str, Tensor], spec: LayerSpec, block_shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the tensors of the same weight in smaller blocks."""
        weight, mask = tensors["weight"], COMPRESSED.mask(tensors)
        assert mask is not None
        exact = weight if weight.dtype in DTYPES else weight.float()  # which holds every value in 8 bits
        blocks = smaller_blocks(dequantize(exact, tensors["metadata"]).to(weight.dtype), block_shape)
        return COMPRESSED.store(blocks, smaller_blocks(mask, block_shape))

    def mask(self, tensors: Tensors) -> Tensor | None:
        """Return the mask of 2:4, None without 2:4."""
        weight, metadata = tensors["weight"], tensors.get("metadata")
        if weight is None or metadata is None:
            return None
        ones = torch.ones(weight.shape, dtype=torch.float32, device=weight.device)
        return dequantize(ones, metadata) != 0


COMPRESSED = CompressedStorage(traits_of("compressed"))


class QuantizedStorage(CompressedStorage):
    """Weight in 8 bits [nnz, bn, bk] or 4 [nnz, bn, bk / 2], with float32 scales; 2:4 is compressed as well.

    Scales are [nnz, bn] or [nnz]. Where x has 8 bits, too, they are [out_features], or [nnz, 1] of blocks:
    two dimensions tell them from those of features.
    """

    dtype: torch.dtype

    def forms(self, spec: LayerSpec) -> dict[str, Form]:
        """Return shape and dtype of each tensor."""
        nnz, bn, bk = spec.values_shape
        packed = (nnz, bn, bk // 2 if self.dtype == PACKED else bk)
        forms: dict[str, Form] = {"weight": (packed, self.dtype)} if spec.nm is None else super().forms(spec)
        of_blocks = (nnz,) if spec.activations is None else (nnz, 1)
        shapes = {"block": of_blocks, PER_FEATURE: spec.shape[:1]}
        return {**forms, "scales": (shapes.get(spec.granularity or "row", (nnz, bn)), torch.float32)}

    def store(
        self,
        blocks: Tensor,
        mask: Tensor | None,
        spec: LayerSpec,
        pattern: BlockPattern | None = None,
        limits: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors that store dense blocks."""
        granularity = spec.granularity or "row"
        if self.dtype == PACKED:
            weight, scales = quantize_int4(blocks, granularity=granularity, limits=limits)
        else:
            pattern = pattern if granularity == PER_FEATURE else None
            weight, scales = quantize_weights(
                blocks, self.dtype, granularity=granularity, pattern=pattern, limits=limits
            )
        stored = {"weight": weight} if mask is None else COMPRESSED.store(weight, mask)
        inside = spec.activations is not None and granularity == "block"
        return {**stored, "scales": scales[:, None] if inside else scales}

    def dense_blocks(self, tensors: Tensors, spec: LayerSpec, pattern: BlockPattern | None = None) -> Tensor:
        """Return a copy [nnz, bn, bk] of the weight, dequantized to the spec's dtype."""
        scales = tensors["scales"]
        if spec.activations is not None and scales is not None:
            if spec.granularity == PER_FEATURE and pattern is not None:
                scales = row_scales(scales, pattern)
            elif spec.granularity == "block":
                scales = scales.flatten()
        return super().dense_blocks({**tensors, "scales": scales}, spec)

    def limits_of(self, groups: Tensor) -> Tensor:
        """Return the magnitude at which `store` clips each group that shares a scale, from values alone."""
        return limits_int4(groups) if self.dtype == PACKED else groups.abs().amax(-1).float()

    def rounded(self, groups: Tensor, limits: Tensor) -> Tensor:
        """Return groups [..., n, k] in float32 as products see them: clipped at limits [..., n], rounded."""
        scales = clamped_scales(limits, self.dtype)[..., None]
        return rounded(groups.float() / scales, self.dtype).float() * scales

    def refined(
        self, tensors: Mapping[str, Tensor], spec: LayerSpec, block_shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the tensors of the same weight in smaller blocks, with the scales of the larger ones."""
        (bn, bk), (rows, columns) = spec.block_shape, block_shape
        weight, scales = tensors["weight"], tensors["scales"]
        if spec.nm is None:
            packed = columns * weight.shape[2] // bk
            stored = {"weight": smaller_blocks(weight, (rows, packed))}
        else:
            stored = super().refined(tensors, spec, block_shape)
        if spec.granularity == "block":
            scales = scales.repeat_interleave(bn // rows * (bk // columns))
        elif spec.granularity == "row":
            of_rows = scales.reshape(-1, bn // rows, 1, rows).expand(-1, -1, bk // columns, -1)
            scales = of_rows.reshape(-1, rows)
        return {**stored, "scales": scales}


_BY_NAME: dict[str, Storage] = {
    "plain": Storage(traits_of("plain")),
    "compressed": COMPRESSED,
    **{name: QuantizedStorage(traits_of(name)) for name in ("int8", "float8_e4m3fn", "int4")},
}


def granularity_of(scales: Tensor | None, activations: str | None) -> str | None:
    """Return what has a scale of its own, from the scales of a layer; None without any."""
    if activations is not None:
        return "block" if scales is not None and is_inside(scales) else PER_FEATURE
    return None if scales is None else "block" if scales.dim() == 1 else "row"


def storage_of(name: str) -> Storage:
    """Return the storage of this name, one of `STORAGES`."""
    return _BY_NAME[name]


def forms_of(spec: LayerSpec) -> dict[str, Form]:
    """Return shape and dtype of a layer's weight, and of what is stored with it, by name."""
    return _BY_NAME[spec.storage].forms(spec)
