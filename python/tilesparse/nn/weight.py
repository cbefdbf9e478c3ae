"""`StoredWeight`: the kept blocks of W, their pattern and storage, and functions that change both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .._checks import Index, check_policy
from .._runtime.torch_private import constant_when_compiled, with_normal_tensors
from ..config import LayerSpec
from ..errors import InvalidArgumentError, UnsupportedError
from ..pattern import BlockPattern, index_of
from ..storage.formats import STORED_NAMES, forms_of, granularity_of, storage_of
from ..storage.traits import PER_FEATURE
from .origin import PatternOrigin, Source, has_peers
from .parameters import check_weight, is_sharded, note_owner, resize, with_contents, zeros_like

INDEX_NAMES = ("crow_indices", "col_indices", "slot")
# What a layer takes over from another one of its shape: all but hooks and mode.
_STATE = (
    *("_parameters", "_buffers", "_non_persistent_buffers_set", "_origin", "_storage", "_storage_error"),
    *("_block_shape", "_dtype", "_nm", "_transposable", "_policy", "_activations", "_thaws", "_experts"),
    "_threshold",
)
_NOT_COPIED = ("_observe", "_merged", "_origin")
_OF_MATRICES = (
    "torch.nn.utils.parametrizations.",  # spectral_norm, weight_norm, orthogonal
    "torch.nn.utils.spectral_norm.",
    "torch.nn.utils.weight_norm.",
    "torch.nn.utils.prune.RandomStructured",
    "torch.nn.utils.prune.LnStructured",
)
_Weight = TypeVar("_Weight", bound="StoredWeight")


class Shard(Protocol):
    """This process's shard of a layer's weight, whose pattern buffers describe the whole weight."""

    def random(self, like: Index, generator: torch.Generator | None) -> BlockPattern:
        """Return a random pattern of the whole weight, with equally many blocks in each shard."""

    def check(self, pattern: BlockPattern) -> None:
        """Raise InvalidPatternError unless the blocks of each shard have the slots of its process."""

    def index(self, layer: StoredWeight) -> Index:
        """Return the pattern of this process's blocks, kept in sync with the layer's."""

    def linear(self, layer: Any, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute the layer's forward pass."""


class StoredWeight(nn.Module):
    """A weight [out_features, in_features] of kept blocks: its pattern and its storage.

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
    _shard: Shard | None = None  # of tensor parallelism
    _observe: Callable[[Tensor, Tensor], Tensor] | None = None  # see `observe`
    _merged: tuple[Any, int] | None = None  # a `MergedProduct`, and the layer's number in it
    _loads = 0  # how often the weight got another size, twice; odd while it does
    _thaws = True  # whether the weight, stored otherwise, gets its gradient back in the storage "plain"
    _storage_error = 0.0
    _activations: str | None = None
    _experts: int | None = None
    _threshold: float | None = None

    def __init__(self, pattern: BlockPattern, spec: LayerSpec, device: torch.device) -> None:
        super().__init__()
        self.register_parameter("weight", None)  # comes first
        for name in INDEX_NAMES:
            self.register_buffer(name, getattr(pattern, name).to(device, copy=True))
        self._allocate(spec, device)
        self._origin = PatternOrigin(Source.MISSING if self.slot.is_meta else Source.OWN, layer_index(self))

    @property
    def spec(self) -> LayerSpec:
        """The stored form of the layer: shape, block shape, number of blocks, dtype, storage and policy."""
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
            granularity=granularity_of(self.scales, self._activations),
            policy=self._policy,
            activations=self._activations,
            experts=self._experts,
            threshold=self._threshold,
        )

    def _describe(self, spec: LayerSpec) -> None:
        self._end_merging()
        # Plain attributes: compiled code guards on what it reads, and must not on the number of blocks.
        self._shape, self._block_shape, self._dtype = spec.shape, spec.block_shape, spec.dtype
        self._nm, self._transposable, self._policy = spec.nm, spec.transposable, spec.policy
        self._storage, self._activations = spec.storage, spec.activations
        self._experts, self._threshold = spec.experts, spec.threshold

    def _assign(self, spec: LayerSpec, tensors: Mapping[str, Tensor]) -> None:
        """Become a layer of this spec, with these tensors as its weight and what is stored beside it."""
        if self._parameters["weight"] is not None and storage_of(self._storage).trainable:
            self._thaws = self.weight.requires_grad
        self._describe(spec)
        self.weight = nn.Parameter(tensors["weight"], storage_of(self._storage).trainable and self._thaws)
        for name in sorted(STORED_NAMES, key=lambda name: name not in tensors):
            self._buffers.pop(name, None)  # torch.export takes no buffer after one that is None
            self.register_buffer(name, tensors.get(name))

    def _allocate(self, spec: LayerSpec, device: torch.device) -> None:
        """Become a layer of this spec whose values are still to be written."""
        tensors = {}
        for name, (shape, dtype) in forms_of(spec).items():
            make = torch.empty if name == "weight" else torch.zeros
            tensors[name] = make(shape, dtype=dtype, device=device)
        self._assign(spec, tensors)

    def _stored(self) -> dict[str, Tensor | None]:
        return {"weight": self.weight, **{name: self._buffers[name] for name in STORED_NAMES}}

    @property
    def in_features(self) -> int:
        """Size of the last dimension of x."""
        return self._shape[1]

    @property
    def out_features(self) -> int:
        """Size of the last dimension of y."""
        return self._shape[0]

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
        """The way products are computed: "sparse", "dense" or as "auto" decides, see `functional.linear`."""
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

    @property
    def pattern(self) -> BlockPattern:
        """Places of the blocks: a view of the buffers.

        Another pattern of the same shape, block shape and number of blocks can be assigned: it is copied.

        Raises:
            InvalidPatternError: there is none yet, see above.
            InvalidArgumentError: what is assigned does not fit.
        """
        if self._origin.source is Source.MISSING:
            self._validate_pattern()
        return BlockPattern.from_index(layer_index(self), self._updated)

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
            BlockPattern.from_index(layer_index(self), self._updated).update_(other)

    def _updated(self) -> None:
        self._end_merging()
        self._origin = self._origin.updated(layer_index(self))

    def _end_merging(self) -> None:
        """Compute an own product from now on, if it was shared with other layers."""
        if self._merged is not None:
            self._merged[0].end()

    def _pattern_if_any(self) -> BlockPattern | None:
        missing = self.col_indices.is_meta or self._origin.source is Source.MISSING
        return None if missing else self.pattern

    def _validate_pattern(self) -> None:
        """Raise where a step would go wrong because the pattern is missing, or others may have another."""
        missing = self._origin.source is Source.MISSING
        if self._origin.copied or (not self.col_indices.is_meta if missing else has_peers()):
            self._check_origin(self.training and torch.is_grad_enabled())

    @constant_when_compiled
    def _check_origin(self, trains: bool) -> None:
        index, origin = layer_index(self), self._origin
        if origin.copied:
            origin = origin.not_averaged(index)
            if trains:  # which no average is
                origin = PatternOrigin(origin.source, index)
        if origin.source is Source.MISSING:
            origin = origin.filled(index)
        elif trains and has_peers():
            origin = origin.agreed(index)
        if origin is not self._origin:
            self._origin = origin

    @with_normal_tensors
    def _apply(self: _Weight, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Weight:
        """Move the tensors as `torch.nn.Module` does; indices, masks and stored bits stay exact."""
        self._end_merging()
        before: dict[str, Any] = {name: self._buffers[name] for name in (*INDEX_NAMES, *STORED_NAMES)}
        quantized = None if storage_of(self._storage).dtype is None else self.weight.detach()
        if quantized is not None:
            dense = torch.empty(0, dtype=self.spec.dtype, device=quantized.device)
            update_spec(self, dtype=fn(dense).dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new: Any = self._buffers[name]
            # to_empty leaves them uninitialised, type() may round them.
            if new is not old:
                self._buffers[name] = with_contents(new, old)
        if quantized is not None and self.weight.dtype != quantized.dtype:
            kept = with_contents(self.weight.detach(), quantized)
            if is_sharded(kept):  # whose dtype cannot be set
                self.weight = nn.Parameter(kept, requires_grad=False)
            else:
                self.weight.data = kept
        empty = before["slot"].is_meta or self.slot.is_meta
        source = Source.MISSING if empty else self._origin.source
        self._origin = PatternOrigin(source, layer_index(self), copied=self._origin.copied)
        note_owner(self)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # torch.distributed.checkpoint reads into a state dict; its zeros are no pattern for who loads them.
        if self._origin.source is Source.MISSING and not is_sharded(self.weight):
            self._validate_pattern()
        if self._origin.copied:
            self._check_origin(False)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        beside = getattr(destination, "_metadata", {}).get(prefix.removesuffix("."))
        if beside is not None and self._activations is not None:
            beside["activations"] = self._activations

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; a weight must be one, and not that of a layer with another pattern."""
        if name == "weight" and "_origin" in self.__dict__:
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
        own = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        return {**own, "origin": self._origin.source}  # the versions of copied tensors begin anew

    def __setstate__(self, own: dict[str, Any]) -> None:
        super().__setstate__({name: own[name] for name in own if name != "origin"})  # type: ignore[no-untyped-call]
        self._origin = PatternOrigin(own["origin"], layer_index(self), copied=True)
        note_owner(self)


# ---- for the rest of the package ----


def layer_index(layer: StoredWeight) -> Index:
    """Return the pattern as operators take it."""
    buffers: dict[str, Any] = layer._buffers  # __getattr__ takes longer
    return Index(
        buffers["crow_indices"], buffers["col_indices"], buffers["slot"], layer._shape, layer._block_shape
    )


@torch.no_grad()
def dense_blocks(layer: StoredWeight, method: str = "reading the weight") -> Tensor:
    """Return a copy of the dense blocks [nnz, bn, bk], zero where a mask says so, without gradient."""
    check_whole(layer, method)
    pattern = None if layer.activations is None else layer.pattern
    return storage_of(layer.storage).dense_blocks(layer._stored(), layer.spec, pattern)


def kept_mask(layer: StoredWeight) -> Tensor | None:
    """Return the mask of 2:4 [nnz, bn, bk], however it is stored; None without 2:4."""
    return storage_of(layer.storage).mask(layer._stored())


def update_spec(layer: StoredWeight, **changes: Any) -> None:
    """Change what the layer says of its tensors, which are the caller's to change."""
    layer._describe(replace(layer.spec, **changes))


def freeze(layer: StoredWeight) -> None:
    """Freeze the weight for good, also if it is to be stored plain."""
    layer._thaws = False
    layer.weight.requires_grad_(False)


def take_over(layer: _Weight, other: _Weight) -> None:
    """Make a layer another one of its shape, tensors and all; hooks and mode stay."""
    for name in _STATE:
        setattr(layer, name, getattr(other, name))
    note_owner(layer)


def hold_shard(layer: StoredWeight, shard: Any) -> None:
    """Have a layer, whose tensors are sharded already, compute with this process's shard."""
    layer._shard = shard


def observe(layer: StoredWeight, observer: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
    """Have the layer give what an observer makes of y and x of a call; return what ends this.

    `tilesparse.train` sees the gradient of y so, in the steps that need it.
    """
    layer._observe = observer

    def end() -> None:
        if layer._observe is observer:  # and not that of a schedule made later
            del layer._observe  # compiled code tells None from nothing

    return end


def declare_shared(layer: StoredWeight) -> None:
    """Record that all processes have this pattern."""
    layer._origin = PatternOrigin(Source.SHARED, layer_index(layer))


def is_shared(layer: StoredWeight) -> bool:
    """Return True if all processes are known to have this pattern."""
    return layer._origin.source is Source.SHARED


def lacks_pattern(layer: StoredWeight) -> bool:
    """Return True if the pattern has no contents; waits for a GPU where they have to be looked at."""
    return layer._origin.lacks_pattern(layer_index(layer))


def check_whole(layer: StoredWeight, method: str) -> None:
    """Raise UnsupportedError unless this process has the whole weight, as a parameter."""
    refuse_norms(layer)
    if is_sharded(layer.weight):
        raise UnsupportedError(
            f"{method} needs the whole weight, got a sharded one; call it before fully_shard or "
            "parallelize_module"
        )


def check_trainable(layer: StoredWeight, method: str) -> None:
    """Raise UnsupportedError unless the storage of the weight can be trained."""
    if not storage_of(layer.storage).trainable:
        raise UnsupportedError(
            f"{method} needs the storage 'plain', got {layer.storage!r}; call to_storage('plain')"
        )


def refuse_norms(layer: nn.Module) -> None:
    """Raise for what PyTorch hangs on a weight and takes its blocks [nnz, bn, bk] for the matrix W."""
    if "weight" in layer._parameters:
        return
    of_weight: Any = getattr(layer, "parametrizations", {})
    acting = [*of_weight["weight"]] if "weight" in of_weight else []
    for hook in layer._forward_pre_hooks.values():
        if "weight" in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None)):
            acting += [hook, *getattr(hook, "_pruning_methods", ())]
    for one in acting:
        name = f"{type(one).__module__}.{type(one).__name__}"
        # The norm of all blocks at once is that of W.
        if name.startswith(_OF_MATRICES) and not ("WeightNorm" in name and getattr(one, "dim", 0) == -1):
            raise UnsupportedError(
                f"weight must not be under {name}, which takes the kept blocks [nnz, bn, bk] for the matrix "
                "[out_features, in_features]; remove it, or register a parametrization of blocks"
            )


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
        return name == "bias" or (name == "scales" and self.spec.granularity == PER_FEATURE)


def stored_of(layer: StoredWeight, method: str) -> Stored:
    """Return what makes up a layer, not copied; ``method`` is what needs the whole weight."""
    check_whole(layer, method)
    tensors = {**layer._stored(), "bias": getattr(layer, "bias", None)}
    own = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    return Stored(layer.spec, layer.pattern, own)


def become(layer: StoredWeight, stored: Stored) -> None:
    """Make a layer these parts, which are not copied; without a bias among them it keeps its own."""
    layer._assign(stored.spec, stored.tensors)
    pattern = stored.pattern.to(layer.weight.device)
    for name in INDEX_NAMES:
        layer._buffers[name] = getattr(pattern, name)
    if "bias" in stored.tensors:
        layer.bias = nn.Parameter(stored.tensors["bias"])
    layer._origin = PatternOrigin.loaded(layer_index(layer))


@with_normal_tensors
def make_room(
    layer: StoredWeight, pattern: BlockPattern, contents: Mapping[str, Tensor], granularity: str | None = None
) -> None:
    """Give the weight, the same Parameter, and the buffers the sizes that another pattern needs.

    Tensors of another size are filled with ``contents``, by name, or zeros; ``granularity`` is as of
    `LayerSpec`, None keeps it. Other threads may be calling the layer: tensors are filled before they are put
    in their places. The weight comes first and the pattern last, so that a call which meets tensors of both
    finds that they do not fit.
    """
    before = layer.spec
    spec = replace(
        before,
        nnz=pattern.nnz,
        block_shape=pattern.block_shape,
        granularity=granularity or before.granularity,
    )
    resized = before.values_shape != spec.values_shape
    made: dict[str, Tensor] = {}
    for name, (shape, _) in forms_of(spec).items():
        tensor: Tensor = getattr(layer, name)
        if resized or tensor.shape != shape:
            made[name] = tensor.new_empty(shape) if name == "weight" else zeros_like(tensor, shape)
    if resized:  # all of the pattern, so that graphs of autograd keep the one that they were made with
        indices = {name: getattr(pattern, name) for name in INDEX_NAMES}
        made |= {name: layer.get_buffer(name).new_empty(given.shape) for name, given in indices.items()}
        contents = {**contents, **indices}
    for name, tensor in made.items():
        if name in contents and not contents[name].is_meta:
            tensor.copy_(contents[name])
    layer._loads += 1
    try:
        if "weight" in made:
            resize(layer.weight, made.pop("weight"))
        update_spec(layer, block_shape=spec.block_shape, nnz=spec.nnz)
        layer._buffers.update(made)
    finally:
        layer._loads += 1


@torch.no_grad()
def keep_blocks(layer: StoredWeight, slots: Tensor) -> None:
    """Drop all blocks but those at ``slots`` [n], ascending, which get the slots 0 to n - 1.

    The weight stays the same Parameter, and its gradient goes with it; the states that an optimizer has
    of it are the caller's. On a CUDA device the host does not wait. All of the pattern's tensors are new,
    so that a graph of autograd made before keeps the pattern it was made with, and refuses to go on.
    """
    index, gradient = layer_index(layer), layer.weight.grad
    rows, columns = layer.pattern.block_indices()
    kept = index_of((rows * layer.pattern.grid[1] + columns)[slots], index)
    resize(layer.weight, layer.weight.detach()[slots])
    if gradient is not None:
        layer.weight.grad = gradient[slots]
    if layer.mask is not None:
        layer._buffers["mask"] = layer.mask[slots]
    for name in INDEX_NAMES:
        layer._buffers[name] = getattr(kept, name)
    layer._origin = layer._origin.updated(layer_index(layer))
