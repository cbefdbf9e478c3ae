"""`StoredWeight`: the kept blocks of W, their pattern and its origin, their storage and loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .._checks import ALIGNMENT, Index, check_policy, shown
from .._files import checksum
from .._runtime.pattern_cache import update_of
from .._runtime.torch_private import (
    constant_when_compiled,
    default_store,
    is_exporting,
    transforms_active,
    version,
    with_normal_tensors,
)
from ..config import PER_FEATURE, STORED_DTYPES, LayerSpec
from ..errors import (
    InvalidArgumentError,
    InvalidPatternError,
    PatternChangedError,
    UnsupportedError,
    UnsynchronizedPatternError,
)
from ..pattern import BlockPattern, index_of
from ..storage.formats import STORED_NAMES, forms_of, granularity_of, storage_of


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor; not every build of PyTorch has the class."""
    return hasattr(tensor, "device_mesh")


def is_everywhere(tensor: Any) -> bool:
    """Return True if every process has a shard of the tensor."""
    return is_sharded(tensor) and tensor.device_mesh.size() == torch.distributed.get_world_size()


def zeros_like(tensor: Any, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of another shape, sharded as the tensor is; `Tensor.new_zeros` replicates them."""
    if not is_sharded(tensor):
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    from torch.distributed.tensor import zeros

    mesh, placements = tensor.device_mesh, tensor.placements
    return zeros(shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)


def with_contents(moved: Tensor, old: Tensor) -> Tensor:
    """Return a moved tensor with the contents and dtype of the old one; zeros if that was on meta."""
    return torch.zeros_like(moved, dtype=old.dtype) if old.is_meta else old.to(moved.device, copy=True)


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Write a whole tensor to the target; to a sharded one, this process's shard of it."""
    if not is_sharded(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = (getattr(target, name) for name in ("device_mesh", "placements"))
    here = whole.to(target.device)
    everywhere = DTensor.from_local(here, mesh, [Replicate()] * mesh.ndim, run_check=False)
    target.copy_(everywhere.redistribute(placements=placements))


def align(layer: nn.Module) -> None:
    """Copy tensors of a layer that kernels cannot read where they lie, as in files that were mapped."""
    held: dict[str, Any] = {**layer._parameters, **layer._buffers}
    for name, tensor in held.items():
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
        if not is_plain or tensor.data_ptr() % ALIGNMENT == 0:
            continue
        if name in layer._parameters:
            tensor.data = tensor.detach().clone()
        else:
            layer._buffers[name] = tensor.clone()


def resize(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, and no gradient.

    As long as a graph lives that was recorded before, such as that of the last step's loss, PyTorch takes
    gradients for the shape of that time. It forgets this shape where the dtype changes.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_states))
    _resized[parameter] = None
    parameter.grad = None
    other = torch.float16 if data.dtype != torch.float16 else torch.float32
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


_resized: Any = WeakIdKeyDictionary()  # weights whose states are checked before every step of an optimizer
_hooks: list[Any] = []  # one, for all optimizers, from the first resized weight on


def has_slots(state: Tensor, weight: Tensor) -> bool:
    """Return True if a state has one part for each block of a weight [nnz, bn, bk]."""
    nnz, bn, bk = weight.shape
    factored = {(nnz, bn, 1), (nnz, 1, bk), (nnz, 1, 1), (nnz, bn), (nnz, bk), (nnz,)}
    return state.shape == weight.shape or tuple(state.shape) in factored


def _check_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise PatternChangedError, before anything is written, for states of another number of blocks."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight in _resized]
    for weight in weights:
        for name, state in optimizer.state.get(weight, {}).items():
            if isinstance(state, Tensor) and state.numel() != 1 and not has_slots(state, weight):
                raise PatternChangedError(
                    f"{type(optimizer).__name__} keeps {name!r} of shape {list(state.shape)} for a "
                    f"block-sparse weight that now is {list(weight.shape)}: its number of blocks changed; "
                    "build the optimizer again, or load its own state_dict after that of the model"
                )


_owners: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by ids of weights, perhaps former ones


def check_weight(layer: Any, weight: object) -> None:
    """Refuse a weight that another layer has, with another pattern, and None."""
    if not isinstance(weight, Tensor):
        raise InvalidArgumentError(f"weight must be a Parameter [nnz, bn, bk], got {shown(weight)}")
    other: Any = _owners.get(id(weight))
    if other is not layer and hasattr(other, "_pattern_if_any") and other._parameters.get("weight") is weight:
        mine, theirs = layer._pattern_if_any(), other._pattern_if_any()
        if mine is not None and theirs is not None and mine != theirs:
            raise InvalidArgumentError(
                "weight must not be that of a layer with another pattern, whose blocks lie elsewhere, got "
                f"{theirs} for {mine}; assign layer.pattern first"
            )


def note_owner(layer: nn.Module) -> None:
    """Have `torch.nn.init` know the layer by its weight."""
    weight = layer._parameters.get("weight")
    if weight is not None:
        _owners[id(weight)] = layer


def _owner_of(tensor: Tensor) -> Any:
    """Return the layer of a weight, or of its ``data``."""
    if tensor.dim() != 3:
        return None
    for reference in _owners.valuerefs():
        layer: Any = reference()
        weight = None if layer is None else layer._parameters.get("weight")
        if weight is tensor or _is_data_of(weight, tensor):
            return layer
    return None


def _is_data_of(weight: Tensor | None, tensor: Tensor) -> bool:
    if weight is None or weight.shape != tensor.shape or weight.is_meta or weight.device != tensor.device:
        return False
    return not is_sharded(weight) and not is_sharded(tensor) and weight.data_ptr() == tensor.data_ptr() != 0


def _fans(calculate: Callable[[Tensor], tuple[int, int]], tensor: Tensor) -> tuple[int, int]:
    layer = _owner_of(tensor)
    if layer is None:
        return calculate(tensor)
    kept = tensor.numel() if getattr(layer, "nm", None) is None else tensor.numel() // 2
    fan_out = kept / (layer.in_features * getattr(layer, "experts", 1))
    return max(1, round(kept / layer.out_features)), max(1, round(fan_out))


def _refuse(initialise: Callable[..., Tensor], tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    if _owner_of(tensor) is not None:
        raise UnsupportedError(
            f"torch.nn.init.{initialise.__name__} takes the kept blocks [nnz, bn, bk] for another kind of "
            "weight; initialise an nn.Linear and convert it by BlockSparseLinear.from_linear"
        )
    return initialise(tensor, *args, **options)


for _name in ("_calculate_fan_in_and_fan_out", "orthogonal_", "dirac_"):
    _function: Any = getattr(torch.nn.init, _name)
    _adapted = partial(_fans if _name.startswith("_") else _refuse, _function)
    setattr(torch.nn.init, _name, wraps(_function)(_adapted))


class Source(Enum):
    """Origin of a pattern."""

    SHARED = "every process is known to have it, or there is one process"
    OWN = "this process, so that others may have another one"
    MISSING = "nowhere yet"
    CHANGED = "this process, since all had one pattern: others must have changed theirs alike"
    LOADED = "a file or another process, of which the others are to be told"


AVERAGES = (  # what to do about them
    "averages of all buffers change it: use tilesparse.train.AveragedModel, or leave buffers out, as "
    "use_buffers=False does"
)


class PatternOrigin:
    """The source of a pattern, with the versions that its tensors had when this was recorded."""

    def __init__(self, source: Source, index: Index, *, copied: bool = False) -> None:
        """Record the tensors' versions, and of a ``copied`` layer their contents, for `not_averaged`."""
        self.source = source
        self._recorded = [(tensor, version(tensor)) for tensor in index[:3]]
        self.copied = copied and source is not Source.MISSING and not index.col_indices.is_meta
        self._contents = torch.cat(index[:3]).detach() if self.copied else None
        self.pending = self.copied or source is not Source.SHARED  # whether a call has something to validate

    @classmethod
    def loaded(cls, index: Index, *, copied: bool = False) -> PatternOrigin:
        """Return the origin of a pattern that was read from a file or received."""
        return cls(Source.LOADED if has_peers() else Source.SHARED, index, copied=copied)

    def updated(self, index: Index) -> PatternOrigin:
        """Return the origin once this process wrote a pattern: where others train, theirs may differ now."""
        source = Source.OWN if self.source is Source.MISSING else self.source
        if source is Source.SHARED and has_peers():
            source = Source.CHANGED
        return PatternOrigin(source, index, copied=self.copied)

    def not_averaged(self, index: Index) -> PatternOrigin:
        """Return the origin once a copied layer is known to have no average of patterns; waits for a GPU.

        An average of integers is computed in float32 and rounded down: some of 11, 22, 29 … become one less,
        with a decay of .9999. Where there are few blocks, that is a pattern again.
        """
        if self._contents is None or self._is_unchanged(index) or transforms_active() or is_exporting():
            return self
        now = torch.cat(index[:3])
        if now.shape == self._contents.shape:
            lost = self._contents - now
            if ((lost == 0) | (lost == 1)).all() & lost.any():
                raise InvalidPatternError(f"pattern was averaged; {AVERAGES}")
        return PatternOrigin(self.source, index, copied=True)

    def lacks_pattern(self, index: Index) -> bool:
        """Return True if the pattern has no contents; waits for a GPU where they have to be looked at."""
        return self.source is Source.MISSING and (index.col_indices.is_meta or self._is_blank(index))

    def filled(self, index: Index) -> PatternOrigin:
        """Return the origin of buffers that were filled since the layer left the meta device."""
        if transforms_active():  # their tensors have no contents to check
            return self
        if self._is_blank(index):
            raise InvalidPatternError(
                "pattern is missing: the layer left the meta device empty; call load_state_dict or "
                "reset_parameters, or assign layer.pattern"
            )
        checked_pattern(index)
        return PatternOrigin.loaded(index)

    def agreed(self, index: Index) -> PatternOrigin:
        """Return the origin once the other processes are known to have the same pattern."""
        alone = self._is_unchanged(index)
        if self.source is Source.CHANGED and not alone:
            pass  # DistributedDataParallel has broadcast it, or another broadcast has
        elif self.source in (Source.OWN, Source.CHANGED) and alone:
            check_agreement(index)
        else:  # written by a broadcast or read from a file: processes without may have to know
            publish(index)
        return PatternOrigin(Source.SHARED, index)

    def _is_blank(self, index: Index) -> bool:
        """Return True for the zeros with which a layer leaves the meta device."""
        return self._is_unchanged(index) and len(index.col_indices) > 0 and not index.crow_indices.any()

    def _is_unchanged(self, index: Index) -> bool:
        for place, (recorded, count) in enumerate(self._recorded):
            if index[place] is not recorded or version(recorded) != count:
                return False
        return True


def checked_pattern(index: Index) -> BlockPattern:
    """Return a copy on the CPU of what the tensors hold, or raise if that is not a pattern."""
    crow, col, slot, shape, block_shape = index
    return BlockPattern(crow, col, shape=shape, block_shape=block_shape, slot=slot, device="cpu")


def has_peers() -> bool:
    """Return True if other processes may train with this one."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


PATIENCE = timedelta(minutes=2)  # the first step of another process may compile
_REMEDY = (
    "call tilesparse.distributed.synchronize_patterns(model) before training, or let DistributedDataParallel "
    "broadcast buffers"
)
_counted: tuple[Any, int] = None, 0  # the store, and how many layers were published in it


def publish(index: Index) -> str:
    """Tell the other processes the checksum of a pattern; return its key, but for the rank at the end."""
    global _counted
    store = default_store()
    count = _counted[1] if _counted[0] is store else 0
    _counted = store, count + 1
    key = f"tilesparse/pattern/{count}/"
    if store is not None:
        said = f"{index.shape} in {index.block_shape}: {checksum(torch.cat(index[:3]))}"
        store.set(f"{key}{dist.get_rank()}", said)
    return key


def check_agreement(index: Index) -> None:
    """Raise UnsynchronizedPatternError unless all processes have this pattern.

    Checksums go through the store of ``torch.distributed``, not through collectives: a process that trains
    other layers makes the others raise after a while, not wait for ever, and disturbs no collective of the
    training.
    """
    key, store, ranks = publish(index), default_store(), range(dist.get_world_size())
    if store is None:
        raise UnsynchronizedPatternError(f"pattern was drawn in this process only; {_REMEDY}")
    try:
        store.wait([f"{key}{rank}" for rank in ranks], PATIENCE)
    except RuntimeError as error:
        silent = [rank for rank in ranks if not store.check([f"{key}{rank}"])]
        raise UnsynchronizedPatternError(
            f"pattern was drawn in this process only, and processes {silent} have not said within "
            f"{PATIENCE.seconds} s which one they have; {_REMEDY}"
        ) from error
    own = store.get(f"{key}{dist.get_rank()}")
    others = [rank for rank in ranks if store.get(f"{key}{rank}") != own]
    if others:
        raise UnsynchronizedPatternError(
            f"pattern was drawn in this process only, and processes {others} have another one; {_REMEDY}"
        )


INDEX_NAMES = ("crow_indices", "col_indices", "slot")
# Attributes that a layer takes over from another one of its shape: all but hooks and mode.
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
    if "weight" not in layer._parameters:
        raise UnsupportedError(f"{method} needs the weight as a parameter; remove what parametrizes it first")
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


def load(
    layer: StoredWeight,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    others: tuple[Any, ...],
    load: Callable[[], Any],
) -> None:
    """Check a layer's entries of a state dict, make room for them, and have PyTorch ``load`` them."""
    noted, *_, errors = others
    own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    try:
        pattern, granularity = _checked(layer, own, noted)
        if pattern is not None:
            make_room(layer, pattern, own, granularity)
    except (ValueError, TypeError, RuntimeError) as error:
        errors.append(f"{prefix}{error}")
        for name in [name for name in state_dict if name.startswith(f"{prefix}parametrizations.")]:
            del state_dict[name]  # PyTorch's copy: what parametrizes the weight is not loaded, either
        return
    with nullcontext() if pattern is None or layer.slot.is_meta else update_of(layer_index(layer)):
        load()
    align(layer)  # what was assigned
    if pattern is not None and not layer.slot.is_meta:
        for name in INDEX_NAMES:  # those assigned may have another dtype
            if layer.get_buffer(name).dtype != torch.int32:
                layer._buffers[name] = getattr(pattern, name).to(layer.slot.device)
        layer._origin = PatternOrigin.loaded(layer_index(layer), copied=layer._origin.copied)


def _checked(
    layer: StoredWeight, state: Mapping[str, Any], noted: Mapping[str, Any]
) -> tuple[BlockPattern | None, str | None]:
    """Return the pattern of a saved layer, None without one, and what has a scale of its own; all fits."""
    for name in ("weight", "bias", *INDEX_NAMES, *STORED_NAMES):
        if name in state and not isinstance(state[name], Tensor):
            raise InvalidArgumentError(f"{name} must be a tensor, got {type(state[name]).__name__}")
    _check_activations(layer, state, noted)
    # With parametrizations and the like the weight has other names.
    there = [name for name in state if name.startswith(("weight", "parametrizations.weight."))]
    there += [name for name in INDEX_NAMES if name in state]
    spec, pattern = layer.spec, None
    if there:
        pattern = _checked_pattern(layer, state, there[0])
        granularity = granularity_of(state.get("scales", layer.scales), layer.activations)
        spec = replace(spec, nnz=pattern.nnz, block_shape=pattern.block_shape, granularity=granularity)
        if layer._shard is not None:
            layer._shard.check(pattern)
    _check_shapes(layer, state, spec)
    return pattern, spec.granularity


def _checked_pattern(layer: StoredWeight, state: Mapping[str, Any], there: str) -> BlockPattern:
    for name in INDEX_NAMES:
        if name not in state:
            raise InvalidArgumentError(
                f"{name} is missing, but {there} is there; a weight is loaded with its pattern"
            )
    weight, spec = state.get("weight"), layer.spec
    if weight is not None and weight.dim() != 3:
        raise InvalidArgumentError(f"weight must be [nnz, bn, bk], got shape {tuple(weight.shape)}")
    _check_stored(layer, state)
    storage, block_shape = storage_of(spec.storage), spec.block_shape
    if weight is not None:
        block_shape = storage.block_shape(weight, spec.nm)
    crow, col, slot = (state[name] for name in INDEX_NAMES)
    pattern = checked_pattern(Index(crow, col, slot, spec.shape, block_shape))
    shape, own = (pattern.nnz, *pattern.block_shape), spec.values_shape
    if shape != own and (weight is None or type(layer._parameters.get("weight")) is not nn.Parameter):
        why = "missing" if weight is None else "not a plain parameter whose shape can change"
        raise InvalidArgumentError(
            f"col_indices must have {own[0]} blocks of {own[1:]}, because the weight is {why}, got "
            f"{shape[0]} of {shape[1:]}"
        )
    return pattern


def _check_stored(layer: StoredWeight, state: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError unless the state is stored as the layer is."""
    own = f"the layer has nm={layer.nm} and storage {layer.storage!r}"
    for name in STORED_NAMES:
        if (name in state) != (layer._buffers[name] is not None):
            given = "is there" if name in state else "is missing"
            raise InvalidArgumentError(
                f"{name} {given}, but {own}; call to_storage or set_nm to have them alike"
            )
    weight = state.get("weight")
    dtypes = {layer.weight.dtype if weight is None else weight.dtype, layer.weight.dtype}
    if len(dtypes) > 1 and not dtypes.isdisjoint(STORED_DTYPES):
        raise InvalidArgumentError(f"weight must be {layer.weight.dtype}, got {state['weight'].dtype}; {own}")


def _check_activations(layer: StoredWeight, state: Mapping[str, Any], noted: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError unless x was multiplied as the layer does; without metadata sizes tell."""
    scales, mine = state.get("scales"), layer.activations
    if scales is None or layer.scales is None:
        return
    by_feature = scales.shape == (layer.out_features,) and len(state.get("col_indices", ())) != len(scales)
    saved = noted.get("activations") if "version" in noted else mine
    alike = scales.dim() == layer.scales.dim() if mine is not None else not by_feature
    if saved != mine or not alike:
        raise InvalidArgumentError(
            f"scales must be those of a layer with activations={mine!r}, got shape {tuple(scales.shape)} and "
            f"activations={saved!r}; call to_storage to have them alike"
        )


def _check_shapes(layer: StoredWeight, state: Mapping[str, Any], spec: LayerSpec) -> None:
    shapes = {name: shape for name, (shape, _) in forms_of(spec).items()}
    for name, expected in (*shapes.items(), ("bias", (layer.out_features,))):
        if name in state and state[name].shape != expected:
            raise InvalidArgumentError(f"{name} must have shape {expected}, got {tuple(state[name].shape)}")
        mine = layer._parameters.get(name, layer._buffers.get(name))
        if name in state and mine is not None and is_sharded(mine) and not is_sharded(state[name]):
            raise InvalidArgumentError(
                f"{name} must be a DTensor, because the layer is sharded, got a plain tensor; use "
                "set_model_state_dict of torch.distributed.checkpoint"
            )
