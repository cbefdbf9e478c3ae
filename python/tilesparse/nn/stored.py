"""The state of a block-sparse layer: a pattern and the weights of its blocks.

The file is long because it is one class, most of it documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._checks import Index, check_policy, is_inside
from .._runtime.private import constant_when_compiled, with_normal_tensors
from ..config import LayerSpec, as_nm, check_nm, check_nm_blocks, checked_scales
from ..errors import InvalidArgumentError, UnsupportedError
from ..pattern.block_pattern import BlockPattern
from ..storage.base import STORED_NAMES
from ..storage.registry import forms_of, storage_of
from ..storage.traits import PER_FEATURE
from . import convert, state
from .checks import check_size, check_trainable, check_whole
from .masks import chosen_mask
from .origin import PatternOrigin, Source, has_peers
from .owners import check_weight, note_owner
from .shard import Shard
from .tensors import INDEX_NAMES, is_sharded

# What a layer takes over from another one of its shape: all but hooks and mode.
_STATE = (
    *("_parameters", "_buffers", "_non_persistent_buffers_set", "origin", "_storage", "_storage_error"),
    *("_block_shape", "_dtype", "_nm", "_transposable", "_policy", "_activations", "_thaws", "_experts"),
)


_Weight = TypeVar("_Weight", bound="StoredWeight")


class StoredWeight(nn.Module):
    """A weight [out_features, in_features] of kept blocks: its pattern, its storage, and how both change.

    The state of `BlockSparseLinear`, whose documentation says what the attributes mean: tensors, the settings
    that make up a `LayerSpec`, the origin of the pattern, and perhaps a shard.
    """

    weight: nn.Parameter
    crow_indices: Tensor
    col_indices: Tensor
    slot: Tensor
    mask: Tensor | None
    metadata: Tensor | None
    scales: Tensor | None
    shard: Shard | None = None  # of tensor parallelism
    # Takes y and x of a call and gives y, whose gradient `tilesparse.train` sees so in steps that need it.
    observe: Callable[[Tensor, Tensor], Tensor] | None = None
    merged: tuple[Any, int] | None = None  # a `MergedProduct`, and the layer's number in it
    _thaws = True  # whether the weight, stored otherwise, gets its gradient back in the storage "plain"
    _storage_error = 0.0
    _activations: str | None = None
    _experts: int | None = None
    of_experts = False  # whether W is that of several experts

    def __init__(self, pattern: BlockPattern, spec: LayerSpec, device: torch.device) -> None:
        super().__init__()
        self.register_parameter("weight", None)  # comes first
        for name in INDEX_NAMES:
            self.register_buffer(name, getattr(pattern, name).to(device, copy=True))
        self.allocate(spec, device)
        self.origin = PatternOrigin(Source.MISSING if self.slot.is_meta else Source.OWN, self.index())

    @property
    def spec(self) -> LayerSpec:
        """How the layer is stored now: shape, block shape, number of blocks, dtype, storage and policy."""
        storage = storage_of(self._storage)
        return LayerSpec(
            shape=self._shape,
            block_shape=self._block_shape,
            nnz=self.col_indices.shape[0],
            # The weight's dtype where it is the layer's: ``weight.data`` may have changed it.
            dtype=self.weight.dtype if storage.dtype is None else self._dtype,
            storage=self._storage,
            nm=self._nm,
            transposable=self._transposable,
            scales=storage.scales_of(self.scales) if self._activations is None else self._scales_beside_x(),
            policy=self._policy,
            activations=self._activations,
            experts=self._experts,
        )

    def _scales_beside_x(self) -> str:
        return "block" if self.scales is not None and is_inside(self.scales) else PER_FEATURE

    def update_spec(self, **changes: Any) -> None:
        """Change what the layer says of its tensors, which are the caller's to change."""
        self._describe(replace(self.spec, **changes))

    def _describe(self, spec: LayerSpec) -> None:
        self._end_merging()
        # Plain attributes: compiled code guards on what it reads, and must not on the number of blocks.
        self._shape, self._block_shape, self._dtype = spec.shape, spec.block_shape, spec.dtype
        self._nm, self._transposable, self._policy = spec.nm, spec.transposable, spec.policy
        self._storage, self._activations = spec.storage, spec.activations
        self._experts = spec.experts

    def assign(self, spec: LayerSpec, tensors: Mapping[str, Tensor]) -> None:
        """Become a layer of this spec, with these tensors as its weight and what is stored beside it."""
        if self._parameters["weight"] is not None and storage_of(self._storage).trainable:
            self._thaws = self.weight.requires_grad
        self._describe(spec)
        self.weight = nn.Parameter(tensors["weight"], storage_of(self._storage).trainable and self._thaws)
        for name in sorted(STORED_NAMES, key=lambda name: name not in tensors):
            self._buffers.pop(name, None)  # torch.export takes no buffer after one that is None
            self.register_buffer(name, tensors.get(name))

    def allocate(self, spec: LayerSpec, device: torch.device) -> None:
        """Become a layer of this spec whose values are still to be written."""
        tensors = {}
        for name, (shape, dtype) in forms_of(spec).items():
            make = torch.empty if name == "weight" else torch.zeros
            tensors[name] = make(shape, dtype=dtype, device=device)
        self.assign(spec, tensors)

    def _stored(self) -> dict[str, Tensor | None]:
        return {"weight": self.weight, **{name: self._buffers[name] for name in STORED_NAMES}}

    @property
    def in_features(self) -> int:
        """Size of the last dimension of x."""
        return self._shape[1]

    @in_features.setter
    def in_features(self, value: int) -> None:
        check_size("in_features", value, self._shape[1])

    @property
    def out_features(self) -> int:
        """Size of the last dimension of y."""
        return self._shape[0]

    @out_features.setter
    def out_features(self, value: int) -> None:
        check_size("out_features", value, self._shape[0])

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bn, bk): rows (out) and columns (in) of a block."""
        return self._block_shape

    @property
    def density(self) -> float:
        """Kept fraction of the blocks."""
        (out_features, in_features), (bn, bk) = self._shape, self._block_shape
        return self.col_indices.shape[0] * bn * bk / (out_features * in_features)

    @property
    def policy(self) -> str:
        """How products are computed: "sparse", "dense" or as "auto" decides, see `functional.linear`."""
        return self._policy

    @policy.setter
    def policy(self, policy: str) -> None:
        check_policy(policy)
        self._policy = replace(self.spec, policy=policy).policy

    @property
    def nm(self) -> tuple[int, int] | None:
        """(2, 4) where two of four weights in a block are multiplied, otherwise None."""
        return self._nm

    @property
    def transposable(self) -> bool:
        """True where masks keep two of four weights in columns as well."""
        return self._transposable

    @property
    def storage(self) -> str:
        """Name of the weight's storage: "plain", "compressed", "int8", "float8_e4m3fn" or "int4"."""
        return self._storage

    @property
    def activations(self) -> str | None:
        """The dtype in which x is multiplied, "int8" or "float8_e4m3fn"; None is its own."""
        return self._activations

    @property
    def storage_error(self) -> float:
        """Error of the last `to_storage`: the Frobenius norm of the change of W, over that of W."""
        return self._storage_error

    @checked
    @with_normal_tensors
    def set_nm(
        self: _Weight, nm: Sequence[int] | None, *, scores: Tensor | None = None, transposable: bool = False
    ) -> _Weight:
        """Begin or end 2:4 inside the blocks; the weight stays as it is, and so do optimizers.

        Args:
            nm: (2, 4), or None for dense blocks, in which masked weights count again.
            scores: see `update_mask_`.
            transposable: see the class.

        Raises:
            UnsupportedError: the storage is not "plain", or the weight is sharded.
            InvalidArgumentError: blocks are not 32, 64 or 128 wide, or another argument is not allowed. The
                layer is as it was.
        """
        check_nm(nm, transposable)
        check_whole(self, "set_nm")
        check_trainable(self, "set_nm")
        check_nm_blocks(nm, transposable, self._block_shape)
        self._end_merging()
        self.mask = None if nm is None else chosen_mask(self.weight, scores, transposable)
        self._nm, self._transposable = as_nm(nm), transposable
        return self

    @checked
    @torch.no_grad()
    def update_mask_(self: _Weight, scores: Tensor | None = None) -> _Weight:
        """Choose anew which two of four weights are multiplied. Nothing waits for a GPU.

        Args:
            scores: [nnz, bn, bk], higher is better; None is the magnitude of the weight.

        Raises:
            UnsupportedError: the layer is not 2:4, its storage is not "plain", or the weight is sharded.
            InvalidArgumentError: ``scores`` has another shape.
        """
        check_whole(self, "update_mask_")
        check_trainable(self, "update_mask_")
        if self.mask is None:
            raise UnsupportedError("update_mask_ needs a layer with nm=(2, 4), got None")
        self.mask.copy_(chosen_mask(self.weight, scores, self._transposable))
        return self

    @torch.no_grad()
    def plain_values(self) -> Tensor:
        """Return a copy of the dense blocks [nnz, bn, bk], zero where a mask says so, without gradient."""
        check_whole(self, "plain_values")
        pattern = None if self._activations is None else self.pattern
        return storage_of(self._storage).dense_blocks(self._stored(), self.spec, pattern)

    def kept_mask(self) -> Tensor | None:
        """Return the mask of 2:4 [nnz, bn, bk], however it is stored; None without 2:4."""
        return storage_of(self._storage).mask(self._stored())

    @checked
    @with_normal_tensors
    def to_storage(
        self: _Weight,
        storage: str,
        *,
        per: str = "row",
        activations: str | None = None,
        limits: Tensor | None = None,
        values: Tensor | None = None,
    ) -> _Weight:
        """Store the weight in another way, in place.

        ``weight`` becomes another Parameter, so optimizers have to be built again. Only "plain" has a
        gradient, which a frozen weight does not get back. `storage_error` is the error of the conversion.

        Args:
            storage: "plain"; "compressed": the kept half of 2:4, and metadata; "int8" or "float8_e4m3fn":
                8 bits and scales, of 2:4 the kept half alone; "int4": 4 bits and scales, not of 2:4.
            per: of 8 and 4 bits, what has a scale of its own: "row" of a block or "block". With `activations`
                an output feature, whatever a row is; "block" is for float8_e4m3fn in blocks of 128 x 128, and
                x then has a scale for each 128 features of a token.
            activations: the name of the storage, where that has 8 bits: products then quantize x as well, see
                `functional.quantized_linear`. None multiplies x in its dtype.
            limits: of 8 and 4 bits, the magnitude at which the weights of each scale are clipped, see
                `storage.quantize`; `quantize_` finds good ones. None clips nothing in 8 bits.
            values: of 8 and 4 bits, [nnz, bn, bk] to store in place of the weight, which may be rounded
                already, so that errors make up for each other; `quantize_` finds good ones.

        Raises:
            InvalidArgumentError: another storage, or one that is for 2:4; the weight is not finite, for 8
                or 4 bits; `activations` of another dtype; limits or values that do not fit. The layer is as
                it was.
            UnsupportedError: the weight is sharded, or offloaded by Accelerate.
        """
        check_whole(self, "to_storage")
        if self.weight.is_meta and hasattr(self, "_hf_hook"):  # which brings back the weight as it was
            raise UnsupportedError(
                "to_storage cannot convert an offloaded weight; load the model without offloading"
            )
        checked_scales("per", per, activations, self._block_shape)
        spec = self.spec
        wanted = spec.with_storage(storage, per, activations)
        if wanted != spec or limits is not None or values is not None:
            self._storage_error = convert.convert_storage(self, wanted, limits, values)
        return self

    def freeze(self) -> None:
        """Freeze the weight for good, also if it is to be stored plain."""
        self._thaws = False
        self.weight.requires_grad_(False)

    @property
    def pattern(self) -> BlockPattern:
        """Where the blocks lie: a view of the buffers.

        Another pattern of the same shape, block shape and number of blocks can be assigned: it is copied.

        Raises:
            InvalidPatternError: there is none yet, see above.
            InvalidArgumentError: what is assigned does not fit.
        """
        if self.origin.source is Source.MISSING:
            self.validate_pattern()
        return BlockPattern.from_index(self.index(), self._updated)

    @pattern.setter
    def pattern(self, other: BlockPattern) -> None:
        if not isinstance(other, BlockPattern):
            raise InvalidArgumentError(f"pattern must be a BlockPattern, got {type(other).__name__}")
        mine = self._shape, self._block_shape, self.col_indices.shape[0]
        if (other.shape, other.block_shape, other.nnz) != mine:
            raise InvalidArgumentError(
                f"pattern must have shape {mine[0]} in blocks of {mine[1]} with {mine[2]} of them kept, as "
                f"the weight has, got {other.shape} in {other.block_shape} with {other.nnz}"
            )
        if not self.col_indices.is_meta:
            BlockPattern.from_index(self.index(), self._updated).update_(other)

    def index(self) -> Index:
        """Return the pattern as operators take it."""
        buffers: dict[str, Any] = self._buffers  # __getattr__ takes longer
        return Index(
            buffers["crow_indices"], buffers["col_indices"], buffers["slot"], self._shape, self._block_shape
        )

    def declare_shared(self) -> None:
        """Record that all processes have this pattern."""
        self.origin = PatternOrigin(Source.SHARED, self.index())

    def _end_merging(self) -> None:
        """Compute an own product from now on, if it was shared with other layers."""
        if self.merged is not None:
            self.merged[0].end()

    def _updated(self) -> None:
        self._end_merging()
        self.origin = self.origin.updated(self.index())

    def validate_pattern(self) -> None:
        """Raise where a step would go wrong because the pattern is missing, or others may have another."""
        missing = self.origin.source is Source.MISSING
        trains = self.training and torch.is_grad_enabled()
        if self.origin.copied:
            self._check_copy(trains)
        if missing and not self.col_indices.is_meta:
            self._check_filled()
        elif not missing and has_peers() and trains:
            self._check_shared()

    @constant_when_compiled
    def _check_copy(self, trains: bool) -> None:
        index = self.index()
        origin = self.origin.not_averaged(index)
        if trains:  # which no average is
            origin = PatternOrigin(origin.source, index)
        if origin is not self.origin:
            self.origin = origin

    @constant_when_compiled
    def _check_filled(self) -> None:
        self.origin = self.origin.filled(self.index())

    @constant_when_compiled
    def _check_shared(self) -> None:
        self.origin = self.origin.agreed(self.index())

    def take_over(self: _Weight, other: _Weight) -> None:
        """Become another layer of this shape, tensors and all; hooks and mode stay."""
        for name in _STATE:
            setattr(self, name, getattr(other, name))
        note_owner(self)

    @with_normal_tensors
    def _apply(self: _Weight, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Weight:
        self._end_merging()
        state.move(self, fn, partial(super()._apply, fn, recurse))
        note_owner(self)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # torch.distributed.checkpoint reads into a state dict; its zeros are no pattern for who loads them.
        if self.origin.source is Source.MISSING and not is_sharded(self.weight):
            self.validate_pattern()
        if self.origin.copied:
            self._check_copy(False)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state.note_activations(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self._end_merging()
        load = partial(super()._load_from_state_dict, state_dict, prefix, *others)
        state.load(self, state_dict, prefix, others, load)

    def pattern_if_any(self) -> BlockPattern | None:
        """Return the pattern; None if it has no contents yet."""
        missing = self.col_indices.is_meta or self.origin.source is Source.MISSING
        return None if missing else self.pattern

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; a weight must be one, and not that of a layer with another pattern."""
        if name == "weight" and "origin" in self.__dict__:
            check_weight(self, param)
        super().register_parameter(name, param)
        if name == "weight" and param is not None:
            note_owner(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and value is None and "weight" in self._parameters:
            check_weight(self, value)
        if isinstance(value, nn.Module) and isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)  # which nn.Module would take for a submodule
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name not in ("observe", "merged")}
        return {**own, "origin": self.origin.source}  # the versions of copied tensors begin anew

    def __setstate__(self, own: dict[str, Any]) -> None:
        super().__setstate__(own)  # type: ignore[no-untyped-call]
        self.origin = PatternOrigin(own["origin"], self.index(), copied=True)
        note_owner(self)
