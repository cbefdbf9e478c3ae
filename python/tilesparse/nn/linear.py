"""`BlockSparseLinear`: construction, products, the stored weight and its pattern, conversions, loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .._checks import (
    ALIGNMENT,
    BLOCK_SIZES,
    COMPRESSIBLE,
    DENSE,
    DTYPES,
    Index,
    Operands,
    as_integer,
    check_block_shape,
    check_one,
    check_policy,
    check_shapes,
    is_inside,
    shown,
)
from .._hooks import adapt
from .._ops.autograd import autocast, is_plain, records_gradient
from .._ops.epilogue import activation_code, masked, straight_through
from .._ops.linear import combined, linear_on
from .._ops.products import COMPRESS
from .._reports import empty_of, warn_user
from .._runtime.pattern_cache import blocks_of, prepared, update_of
from .._runtime.select import multiplies_compressed
from .._runtime.torch_private import (
    constant_when_compiled,
    refuse_fakes,
    transforms_active,
    version,
    with_normal_tensors,
)
from ..config import (
    LayerSpec,
    as_nm,
    check_nm,
    check_nm_blocks,
    check_quantized_activations,
    check_storage,
    checked_scales,
)
from ..errors import (
    InvalidArgumentError,
    InvalidPatternError,
    InvalidTypeError,
    PatternChangedError,
    UnsupportedError,
)
from ..matrix import BlockSparseMatrix
from ..pattern import BlockPattern, check_parts_beside, index_of
from ..storage.formats import STORED_NAMES, Form, forms_of, storage_of
from ..storage.quantize import two_of_four
from ..storage.traits import PER_FEATURE, STORED_DTYPES

_Layer = TypeVar("_Layer", bound="BlockSparseLinear")


@with_normal_tensors
def from_spec(
    cls: type[_Layer], spec: LayerSpec, bias: bool, device: torch.device | str | int | None
) -> _Layer:
    """Return a layer of this spec without contents, see `BlockSparseLinear.from_spec`."""
    if (spec.experts is not None) != cls.of_experts:
        raise InvalidArgumentError(f"spec.experts must fit {cls.__name__}, got {spec.experts}")
    own: Any = {} if spec.experts is None else {"experts": spec.experts}
    sizes = spec.grid[0] + 1, spec.nnz, spec.nnz
    crow, col, slot = (torch.empty(size, dtype=torch.int32, device="meta") for size in sizes)
    layer = cls(
        spec.shape[1],
        spec.shape[0],
        bias,
        pattern=BlockPattern.from_index(Index(crow, col, slot, spec.shape, spec.block_shape)),
        policy=spec.policy,
        nm=spec.nm,
        transposable=spec.transposable,
        device="meta",
        dtype=spec.dtype,
        **own,
    ).to_storage(spec.storage, per=spec.scales or "row", activations=spec.activations)
    device = torch.empty(0, device=device).device
    return layer if device.type == "meta" else layer.to_empty(device=device)


@with_normal_tensors
def from_linear(
    cls: type[_Layer],
    linear: nn.Module,
    density: float,
    *,
    block_shape: Any,
    pattern: BlockPattern | None,
    scores: Tensor | None,
    parts: tuple[int, int],
    storage: str,
    activations: str | None,
    **options: Any,
) -> _Layer:
    """Return a layer with the best blocks of a dense one, see `BlockSparseLinear.from_linear`."""
    refuse_fakes("a layer")
    if not isinstance(linear, nn.Linear) and not is_conv1d(linear):
        raise InvalidArgumentError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
    dense: Any = linear
    reason = reason_not_dense(dense.weight)
    if reason is not None:
        raise InvalidArgumentError(f"linear must have a weight that can be read: {reason}")
    weight, bias, nm = dense_weight(dense), dense.bias, options["nm"]
    parts = check_parts_beside(pattern, parts)
    if pattern is None:
        pattern = best_blocks(weight, scores, density, check_block_shape(block_shape), parts)
        _warn_of_empty(pattern)
    check_nm(nm, options["transposable"])
    check_storage(storage, nm)
    check_quantized_activations(activations, storage)
    (out_features, in_features), has_bias = weight.shape, bias is not None
    options |= {"pattern": pattern, "device": "meta", "dtype": weight.dtype}
    layer = cls(in_features, out_features, has_bias, **options).to_empty(device=weight.device)
    layer.pattern = pattern
    on_device = pattern.to(weight.device)
    with torch.no_grad():
        layer.weight.copy_(BlockSparseMatrix.from_dense(weight, on_device).values)
        layer.weight.requires_grad_(dense.weight.requires_grad)
        if layer.bias is not None:
            layer.bias.copy_(bias)
            layer.bias.requires_grad_(bias.requires_grad)
        if nm is not None and not weight.is_meta:
            by_weight = scores if scores is not None and scores.shape == weight.shape else weight.abs()
            layer.update_mask_(BlockSparseMatrix.from_dense(by_weight, on_device).values)
    layer.to_storage(storage, activations=activations).train(linear.training)
    return layer


def _warn_of_empty(pattern: BlockPattern) -> None:
    rows, columns = empty_of(pattern.block_indices(), pattern.shape, pattern.block_shape)
    if pattern.nnz and (rows or columns):
        warn_user(
            f"the blocks that were chosen leave {rows} block rows (outputs that are the bias alone) "
            f"and {columns} block columns (inputs that nothing reads) empty"
        )


def best_blocks(
    weight: Tensor,
    scores: Tensor | None,
    density: float,
    block_shape: tuple[int, int],
    parts: tuple[int, int],
) -> BlockPattern:
    """Return the pattern of the blocks with the highest scores, by default their Frobenius norms."""
    if weight.is_meta and scores is None:
        raise InvalidArgumentError(
            "linear must not be on the meta device, where there is nothing to score; give pattern"
        )
    if scores is None:
        if bool(weight.isnan().any()):
            raise InvalidArgumentError(
                "linear must not hold NaN in its weight, which cannot be ranked; give pattern"
            )
        return BlockPattern.from_dense(weight, block_shape=block_shape, density=density, parts=parts)
    grid = check_shapes(weight.shape, block_shape)[2]
    if scores.shape == weight.shape:
        precision = torch.promote_types(scores.dtype, torch.float32)
        scores = blocks_of(scores, block_shape).sum((2, 3), dtype=precision)
    if scores.shape != grid:
        raise InvalidArgumentError(
            f"scores must have shape {grid} or {tuple(weight.shape)}, got {tuple(scores.shape)}"
        )
    return BlockPattern.from_scores(scores, block_shape=block_shape, density=density, parts=parts)


def to_linear(layer: BlockSparseLinear) -> nn.Linear:
    """Return the dense layer with the same weight, zero where no block is kept."""
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    dense = BlockSparseMatrix(layer.plain_values(), layer.pattern).to_dense()
    linear.weight = nn.Parameter(dense, layer.weight.requires_grad)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
    return linear.train(layer.training)


def to_semi_structured(layer: BlockSparseLinear) -> Tensor:
    """Return the weight as PyTorch's 2:4 tensor, see `BlockSparseLinear.to_semi_structured`."""
    if layer.nm is None or layer.density < 1:
        raise UnsupportedError(
            f"to_semi_structured needs 2:4 with every block kept, got nm={layer.nm} with density "
            f"{layer.density:.4g}"
        )
    try:
        return torch.sparse.to_sparse_semi_structured(to_linear(layer).weight.detach())
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UnsupportedError(
            f"to_semi_structured: PyTorch cannot represent this weight: {error}"
        ) from error


def convert_storage(
    layer: StoredWeight, spec: LayerSpec, limits: Tensor | None = None, values: Tensor | None = None
) -> float:
    """Store a layer's weight as a spec says that differs in nothing else; return the relative error."""
    storage = storage_of(spec.storage)
    for name, given in (("limits", limits), ("values", values)):
        if given is not None and not storage.scales:
            raise InvalidArgumentError(
                f"{name} must be None with storage {spec.storage!r}, which has no scales"
            )
    if values is not None and values.shape != (spec.nnz, *spec.block_shape):
        raise InvalidArgumentError(
            f"values must be {[spec.nnz, *spec.block_shape]}, as the blocks of the layer, got "
            f"{list(values.shape)}"
        )
    if layer.weight.is_meta:
        layer.allocate(spec, layer.weight.device)
        return layer.storage_error
    blocks = layer.plain_values()
    pattern = None if spec.activations is None else layer.pattern
    given = blocks if values is None else values.to(blocks.device)
    layer.assign(spec, storage.store(given, layer.kept_mask(), spec, pattern, limits))
    norm = torch.linalg.vector_norm(blocks, dtype=torch.float64)
    lost = torch.linalg.vector_norm(layer.plain_values().double() - blocks.double())
    return float(lost / norm) if float(norm) > 0 else 0.0


def is_conv1d(module: nn.Module) -> bool:
    """Return True for Transformers' Conv1D, a linear layer with weight [in_features, out_features]."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def dense_weight(linear: Any) -> Tensor:
    """Return W [out_features, in_features] of a dense layer without gradient: a view, or a copy.

    It is a copy of weights that `is_stored_otherwise`, in the dtype of the bias or PyTorch's default if they
    have 8 bits.
    """
    weight: Tensor = linear.weight.detach()
    if is_stored_otherwise(weight):
        weight = weight.to_dense() if weight.layout != torch.strided or _is_two_of_four(weight) else weight
        dtype = torch.get_default_dtype() if linear.bias is None else linear.bias.dtype
        weight = weight.to(dtype) if weight.dtype in _FLOAT8 else weight
    return weight.T if is_conv1d(linear) else weight


_SPARSE = (torch.sparse_bsr, torch.sparse_csr, torch.sparse_bsc, torch.sparse_csc, torch.sparse_coo)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def is_stored_otherwise(weight: Tensor) -> bool:
    """Return True for a weight that is no plain tensor, or not of a dtype that layers have."""
    plain = type(weight.detach()) is Tensor or is_sharded(weight)
    return not plain or weight.layout != torch.strided or weight.dtype not in DTYPES


def reason_not_dense(weight: Tensor) -> str | None:
    """Say why a weight that `is_stored_otherwise` has no dense form that is known here, or return None."""
    if not is_stored_otherwise(weight):
        return None
    kind = type(weight.detach())
    if kind is not Tensor and not is_sharded(weight) and not _is_two_of_four(weight):
        return f"its weight is a {kind.__module__}.{kind.__name__}; make it a plain tensor first"
    if weight.layout not in (torch.strided, *_SPARSE):
        return f"its weight has the layout {weight.layout}; make it dense first"
    if weight.dtype not in (*DTYPES, *_FLOAT8):
        return f"its weight is {weight.dtype}, for which there are no sparse layers"
    return None


def _is_two_of_four(weight: Tensor) -> bool:
    return isinstance(weight, torch.sparse.SparseSemiStructuredTensor)


_OF_MATRICES = (
    "torch.nn.utils.parametrizations.",  # spectral_norm, weight_norm, orthogonal
    "torch.nn.utils.spectral_norm.",
    "torch.nn.utils.weight_norm.",
    "torch.nn.utils.prune.RandomStructured",
    "torch.nn.utils.prune.LnStructured",
)


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


def check_size(name: str, value: object, size: int) -> None:
    """Raise InvalidArgumentError unless a size that is assigned is the one there is."""
    if not isinstance(value, int) or value != size:
        raise InvalidArgumentError(
            f"{name} must stay {size}, as weight and pattern have it, got {shown(value)}; make another layer"
        )


def reset(layer: BlockSparseLinear, generator: torch.Generator | None) -> None:
    """Draw weight and bias of a layer, and its pattern if it has none; see `reset_parameters`."""
    if layer.weight.is_meta:
        return
    on_cpu = generator is not None and generator.device.type == "cpu"
    for_pattern, sharded = generator if on_cpu else None, is_sharded(layer.weight)
    if sharded:
        check_trainable(layer, "reset_parameters of a sharded layer")
        for_pattern, generator = _common_generators(layer.weight, generator)
    if layer.origin.source is Source.MISSING:
        layer.pattern = _random_pattern(layer, for_pattern)
        if is_everywhere(layer.weight):
            layer.declare_shared()
    bn, bk = layer.block_shape
    fan_in = layer.crow_indices.diff() * bk
    if layer.nm is not None:
        fan_in = fan_in // 2
    bound = torch.where(fan_in > 0, fan_in.rsqrt(), 0.0)
    block_rows, _ = layer.pattern.block_indices()
    wanted = layer.spec
    if not storage_of(wanted.storage).trainable:
        layer.allocate(wanted.with_storage("plain"), layer.weight.device)
    drawn = _draw(layer.weight, bound[block_rows, None, None], generator)
    if layer.mask is not None:
        fill(layer.mask, two_of_four(drawn.abs(), transposable=layer.transposable))
    if not sharded:
        layer.to_storage(wanted.storage, per=wanted.scales or "row", activations=wanted.activations)
    if layer.bias is not None:
        _draw(layer.bias, bound.repeat_interleave(bn, output_size=layer.out_features), generator)


def _random_pattern(layer: BlockSparseLinear, generator: torch.Generator | None) -> BlockPattern:
    if layer.shard is not None:
        return layer.shard.random(layer.index(), generator)
    spec = layer.spec
    experts = spec.experts or 1
    parts = (experts, 1) if spec.nnz % experts == 0 else (1, 1)
    return BlockPattern.random(
        spec.shape, block_shape=spec.block_shape, nnz=spec.nnz, parts=parts, generator=generator
    )


def _draw(parameter: nn.Parameter, bound: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill a parameter uniformly from ±bound, which is broadcast; return the whole tensor."""
    device = parameter.device if generator is None else generator.device
    numbers = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    numbers.uniform_(-1, 1, generator=generator).mul_(bound.to(numbers))
    fill(parameter, numbers)
    return numbers.to(parameter.device)


def _common_generators(
    sharded: Any, generator: torch.Generator | None
) -> tuple[torch.Generator, torch.Generator]:
    """Return generators on the CPU and the tensor's device, with one seed in all processes of its mesh."""
    device = generator.device if generator is not None else "cpu"
    seed = torch.randint(2**62, (), generator=generator, device=device).to(sharded.device)
    for dim in range(sharded.device_mesh.ndim):
        group = sharded.device_mesh.get_group(dim)
        torch.distributed.broadcast(seed, torch.distributed.get_global_rank(group, 0), group)
    devices = torch.device("cpu"), sharded.device
    on_cpu, on_device = (torch.Generator(device).manual_seed(int(seed)) for device in devices)
    return on_cpu, on_device


_Part = TypeVar("_Part", bound="BlockSparseLinear")


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
    cls: type[_Part], spec: LayerSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> _Part:
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


def _layer_of(cls: type[_Part], stored: Stored) -> _Part:
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


def layer_like(layer: _Part, stored: Stored) -> _Part:
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
def cut(layer: _Part, rows: Sequence[int] | None, columns: Sequence[int] | None) -> _Part:
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


class Shard(Protocol):
    """This process's shard of a layer's weight, whose pattern buffers describe the whole weight."""

    def random(self, like: Index, generator: torch.Generator | None) -> BlockPattern:
        """Return a random pattern of the whole weight, with equally many blocks in each shard."""

    def check(self, pattern: BlockPattern) -> None:
        """Raise InvalidPatternError unless the blocks of each shard have the slots of its process."""

    def index(self, layer: StoredWeight) -> Index:
        """Return the pattern of this process's blocks, kept in sync with the layer's."""

    def linear(self, layer: BlockSparseLinear, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute the layer's forward pass."""


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
            self._storage_error = convert_storage(self, wanted, limits, values)
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
        if self.origin.copied:
            self._check_copy(self._trains())
        if missing and not self.col_indices.is_meta:
            self._check_filled()
        elif not missing and has_peers() and self._trains():
            self._check_shared()

    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

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
        move(self, fn, partial(super()._apply, fn, recurse))
        note_owner(self)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # torch.distributed.checkpoint reads into a state dict; its zeros are no pattern for who loads them.
        if self.origin.source is Source.MISSING and not is_sharded(self.weight):
            self.validate_pattern()
        if self.origin.copied:
            self._check_copy(False)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note_activations(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self._end_merging()
        load_rest = partial(super()._load_from_state_dict, state_dict, prefix, *others)
        load(self, state_dict, prefix, others, load_rest)

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


class BlockSparseLinear(StoredWeight):
    """y = x Wᵀ + bias, where only some blocks of W [out_features, in_features] are kept.

    Takes x [..., in_features] and gives [..., out_features], like `torch.nn.Linear`.

    The int32 buffers `crow_indices`, `col_indices` and `slot` are the pattern, see `BlockPattern`;
    `layer.pattern` is a view of them, whose `update_` changes them in place. A state_dict with another
    pattern, even of other size or block shape, can be loaded: `weight` then changes its shape, and the next
    step of an optimizer that keeps states of another number of blocks raises `PatternChangedError`.

    Where processes train one model together, all must have one pattern. DistributedDataParallel sees to it
    with its default arguments, otherwise `tilesparse.distributed.synchronize_patterns` does: the first
    training step of a layer that has drawn or changed its pattern by itself raises where neither has.

    With ``nm=(2, 4)`` only two of each four neighbours in a row of a block are multiplied, those of largest
    magnitude at first. In the storage "plain", the one that can be trained, the weight keeps all of them and
    the bool buffer `mask` says which: the gradient passes straight to the weight as if there were no mask
    (Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", ICLR 2021), see
    `tilesparse.train.MaskSchedule`. Other storages take fewer bytes, for inference and for adapters beside
    the layer: their weight has no gradient, and x has its own.

    On the meta device a layer has sizes only. Once it has left it (`to_empty`), the pattern comes from
    `load_state_dict`, `layer.pattern = pattern` or `reset_parameters`; forward raises before.

    Args:
        in_features: size of the last dimension of x, a multiple of bk.
        out_features: size of the last dimension of y, a multiple of bn.
        bias: whether to add a learned bias [out_features].
        density: fraction of the blocks to keep, drawn at random by `BlockPattern.random`: every block row and
            column gets a block where there are enough.
        block_shape: (bn, bk), rows (out) and columns (in) of a block, each 16, 32, 64 or 128; or one number
            for both.
        pattern: the blocks to keep, copied; `density` and `block_shape` are then taken from it.
        policy: "sparse", "auto" or "dense", see `functional.linear`.
        nm: (2, 4) for 2:4 inside the blocks, or None.
        transposable: whether two of each four neighbours in a column are kept as well, so that the gradient
            of x is a 2:4 product, too.
        storage: "plain", "compressed" (2:4 alone), "int8", "float8_e4m3fn" or "int4" (without 2:4), see
            `to_storage`.
        activations: None, or with a storage of 8 bits its name: x is multiplied in 8 bits, too.
        device: of the parameters and buffers.
        dtype: of the parameters: float64, float32, float16 or bfloat16.
        generator: a CPU generator for the pattern and the initial values.

    Attributes:
        weight: Parameter [nnz, bn, bk], the kept blocks; [nnz, bn, bk / 2] where 2:4 is not stored plain, and
            of int4, two values to a byte of uint8.
        bias: Parameter [out_features] or None.
        mask: bools [nnz, bn, bk] of plain 2:4, otherwise None.
        metadata: int32 [nnz, bk / 32, bn] of 2:4 that is not plain, otherwise None; see `storage.compress`.
        scales: float32 [nnz, bn] or [nnz] of 8 and 4 bits, [out_features] with `activations`, otherwise None;
            see `storage.quantize` and `storage.quantize_int4`.
        policy: as given; may be changed at any time, and is not part of ``state_dict()``.

    Raises:
        InvalidArgumentError: a size, the density, the block shape or the policy is not allowed, or `pattern`
            has another shape.
    """

    bias: nn.Parameter | None

    @with_normal_tensors
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        density: float = 0.5,
        *,
        block_shape: int | Sequence[int] = (64, 64),
        pattern: BlockPattern | None = None,
        policy: str = "sparse",
        nm: Sequence[int] | None = None,
        transposable: bool = False,
        storage: str = "plain",
        activations: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        refuse_fakes("a layer")
        check_nm(nm, transposable)
        shape = out_features, in_features
        if pattern is None:
            pattern = BlockPattern.random(
                shape, block_shape=block_shape, density=density, generator=generator
            )
        elif pattern.shape != shape:
            raise InvalidArgumentError(f"pattern must have shape {shape}, got {pattern.shape}")
        like = torch.empty(0, device=device, dtype=dtype)
        spec = LayerSpec(
            shape=pattern.shape,
            block_shape=pattern.block_shape,
            nnz=pattern.nnz,
            dtype=like.dtype,
            nm=as_nm(nm),
            transposable=transposable,
            policy=policy,
        ).with_storage(storage, activations=activations)
        super().__init__(pattern, spec, like.device)
        self.register_parameter("bias", nn.Parameter(like.new_empty(spec.shape[0])) if bias else None)
        self.reset_parameters(generator)

    @classmethod
    def from_spec(
        cls, spec: LayerSpec, *, bias: bool = True, device: torch.device | str | int | None = None
    ) -> BlockSparseLinear:
        """Return a layer of this spec without a pattern and with uninitialized parameters.

        Its pattern and values come from `load_state_dict`, or from `reset_parameters`; forward raises before.

        Args:
            spec: shape, number of blocks, storage and dtype of the layer.
            bias: whether the layer has a bias [out_features].
            device: of the parameters and buffers; None is PyTorch's default device.
        """
        return from_spec(cls, spec, bias, device)

    @classmethod
    def from_state(
        cls, spec: LayerSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> BlockSparseLinear:
        """Return a layer of stored tensors, such as those of a checkpoint that describes it by the spec.

        Args:
            spec: of the layer.
            tensors: by the names of `state_dict`, with or without a bias; those of the pattern are copied.
            dtype: of weight and bias, but for values in 8 bits; None is the spec's.

        Raises:
            InvalidArgumentError: a tensor is missing, foreign, or not as the spec says; there is no pattern.
        """
        return from_state(cls, spec, tensors, dtype)

    def cut(
        self, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None
    ) -> BlockSparseLinear:
        """Return a layer of copies of some rows and columns of W, for tensor parallelism in other libraries.

        Blocks that a cut goes through are divided with all others, see `BlockPattern.refined`. A bias stays
        with the first column, so that parts along columns add up to the layer's result.

        Args:
            rows: (begin, end) of output features; None is all, as for columns.
            columns: (begin, end) of input features.

        Raises:
            InvalidArgumentError: a span is outside, or its ends are no multiples of 16, in 2:4 of 32.
            UnsupportedError: the weight is sharded.
        """
        return cut(self, rows, columns)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        density: float = 0.5,
        *,
        block_shape: int | Sequence[int] = (64, 64),
        pattern: BlockPattern | None = None,
        scores: Tensor | None = None,
        parts: tuple[int, int] = (1, 1),
        policy: str = "sparse",
        nm: Sequence[int] | None = None,
        transposable: bool = False,
        storage: str = "plain",
        activations: str | None = None,
    ) -> BlockSparseLinear:
        """Return a layer with the best blocks of a dense one: same values, dtype, device and mode.

        Nothing is rescaled. Parameters are copied, with their ``requires_grad``. A warning says how many
        block rows and columns are left empty, unless `pattern` is given.

        Args:
            linear: a `torch.nn.Linear`, or Transformers' ``Conv1D``, whose weight is the transpose of W.
            scores: what to keep, higher is better: one number per block [out_features / bn,
                in_features / bk], or one per weight [out_features, in_features], which are summed
                over each block, and by which ``nm`` chooses. None scores blocks by their Frobenius norm,
                and weights by their magnitude.
            parts: (r, c): keep as many blocks of each part, for tensor parallelism over r or c processes, see
                `BlockPattern.random`; (1, 1) beside `pattern`.
            density: see the class, as for the arguments below.
            block_shape: (bn, bk), or one number for both.
            pattern: the blocks to keep; `density` and `block_shape` are then taken from it.
            policy: "sparse", "auto" or "dense".
            nm: (2, 4) or None.
            transposable: whether masks keep two of four weights in columns as well.
            storage: "plain", "compressed", "int8", "float8_e4m3fn" or "int4".
            activations: None, or the name of a storage of 8 bits.

        Raises:
            InvalidArgumentError: `linear` is neither of the two or cannot be cut into these blocks, its
                weight holds NaN, `scores` has another shape, `parts` are given beside `pattern`, or there is
                nothing to score because `linear` is on the meta device.
        """
        options: Any = {"policy": policy, "nm": nm, "transposable": transposable}
        blocks: Any = {"block_shape": block_shape, "pattern": pattern, "scores": scores, "parts": parts}
        stored: Any = {"storage": storage, "activations": activations}
        return from_linear(cls, linear, density, **stored, **blocks, **options)

    def to_linear(self) -> nn.Linear:
        """Return the dense layer with the same weight, zero where no block is kept; parameters are copies."""
        return to_linear(self)

    def to_semi_structured(self) -> Tensor:
        """Return the weight [out_features, in_features] as PyTorch's 2:4 tensor, for a pattern without gaps.

        Raises:
            UnsupportedError: the layer is not 2:4, blocks are missing, or PyTorch cannot make one here.
        """
        return to_semi_structured(self)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weight and bias anew, uniformly from ±1/√fan_in, and the pattern if there is none yet.

        This is the initialisation of `torch.nn.Linear` (Kaiming uniform with a = √5; He et al.,
        "Delving Deep into Rectifiers", 2015) with the fan-in that is left: each output counts the
        inputs of the blocks in its own block row, so that every output starts with the variance it
        would have in a dense layer. Outputs without any block get bias 0.

        Of a layer that several processes have parts of all call it, and agree on what is drawn: pattern, and
        values as one process would draw them, of which each keeps its own.

        Args:
            generator: drawn from on its own device, so equal on all devices; None is PyTorch's default
                generator of the layer's device. A missing pattern is drawn on the CPU. Where the layer is
                sharded only a seed is drawn from it, and that of the first process counts.

        Raises:
            UnsupportedError: the weight is sharded and its storage not "plain".
        """
        reset(self, generator)

    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: str = "none",
        column_major_output: bool = False,
    ) -> Tensor:
        """Compute y = x Wᵀ + bias from the kept blocks; all else is as in `functional.linear`.

        Args:
            input: x [..., in_features].
            residual: [..., out_features], added to the result, or None.
            gate: [..., out_features], by which the result is multiplied in the place of a residual, or None.
            activation: of the result, or of the gate where there is one.
            column_major_output: the layout of the result; that of tensor parallelism is row-major always.

        Returns:
            y [..., out_features].
        """
        if self.merged is not None and activation == "none" and not column_major_output:
            product, number = self.merged
            if residual is None and gate is None and (y := product.result(number, input)) is not None:
                return y  # type: ignore[no-any-return]
        if self.origin.pending:
            self.validate_pattern()
        try:
            if gate is not None or activation != "none":
                activation_code(activation)
                check_one(residual, gate)
                if self._needs_own_product():
                    y = self._product(input, None, None, "none", column_major_output)
                    y, residual, gate = autocast(y, residual, gate)
                    return combined(y, activation, residual, gate)
            return self._product(input, residual, gate, activation, column_major_output)
        except InvalidPatternError as error:
            raise InvalidPatternError(
                f"{error}; something has written to the buffers of BlockSparseLinear({self.extra_repr()}): "
                f"{AVERAGES}"
            ) from error

    def _product(
        self, x: Tensor, residual: Tensor | None, gate: Tensor | None, activation: str, column_major: bool
    ) -> Tensor:
        if self.shard is not None:
            return self.shard.linear(self, x, residual)
        parameters: dict[str, Any] = self._parameters
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrizations and the like put attributes in their places
            refuse_norms(self)
            weight, bias = self.weight, self.bias
        index = self.index()
        buffers: dict[str, Any] = self._buffers
        mask = buffers["mask"]
        beside = None  # the weight, and the bias, where gradients go to tensors beside them
        if getattr(weight, "main_grad", None) is not None and records_gradient((weight,)):
            x, cast_bias, residual = autocast(x, bias, residual)
            beside = weight, bias if getattr(bias, "main_grad", None) is not None else cast_bias
            weight, bias = weight.detach(), None if cast_bias is None else cast_bias.detach()
        if mask is not None:
            how: Any = {"policy": self._policy, "transposable": self._transposable}
            y = masked_linear(x, weight, mask, index, bias, residual, column_major=column_major, **how)
        else:
            metadata, scales, stored = buffers["metadata"], buffers["scales"], DENSE
            if metadata is not None or scales is not None:
                fast = None if self._activations is None else True
                stored = Operands(metadata, scales, None, None, None, None, None, None, False, fast)
            y = linear_on(
                x, weight, index, bias, activation, residual, column_major, self._policy, stored, gate
            )
        if beside is not None:
            # Only now: with it comes PyTorch's compiler, which takes long to import.
            from .._ops.main_grad import add_gradient, add_gradient_uncompiled

            y = (add_gradient_uncompiled if is_compiling() else add_gradient)(y, x, *beside, index)
        return y if self.observe is None else self.observe(y, x)

    def _needs_own_product(self) -> bool:
        """Return True if something looks at the product itself, or at its gradient."""
        beside = getattr(self.weight, "main_grad", None)
        lookers = self.shard, self.observe, self._buffers["mask"], beside
        return any(each is not None for each in lookers)

    def prepack(self, enabled: bool = True) -> BlockSparseLinear:
        """Keep a copy of the weight in the form in which kernels multiply it, for inference.

        On CUDA devices kernels for blocks of 16 and 32 copy the weight so in every call, or read it block by
        block where tokens are few, which takes less; the others have no use for it. The copy takes as much
        memory as the weight, one for each stream. On the CPU it is the plain weight, in the dtype of the
        activations, of one that is 2:4 or stored in fewer bytes, which otherwise is made in every call (see
        docs/storages.md); a plain one needs none. Calls that record a gradient of the weight do not use it.

        The copy is made in the next call, and anew after every change of weight, mask or pattern that PyTorch
        counts, which those through ``weight.data`` are not: call this again then. Of a weight that was made
        in inference mode it counts none, so the copy is made in every call; nothing is gained then, nor in
        calls that a CUDA graph captures. The copy is not part of ``state_dict()``, and a moved or copied
        layer does not have it.

        Args:
            enabled: False drops the copy.

        Returns:
            The layer.
        """
        if not self.col_indices.is_meta:
            self.validate_pattern()
            index = self.index() if self.shard is None else self.shard.index(self)
            prepared(index).keep_prepacked(enabled)
        return self

    def extra_repr(self) -> str:
        """Return sizes, density and whatever else differs from its default, for ``print(layer)``."""
        text = representation(self) + ("" if self.policy == "sparse" else f", policy={self.policy!r}")
        text += "" if self._nm is None else f", nm={self._nm}"
        text += ", transposable=True" if self._transposable else ""
        text += "" if storage_of(self.storage).trainable else f", storage={self.storage!r}"
        return text + ("" if self.activations is None else f", activations={self.activations!r}")


def representation(layer: Any) -> str:
    """Return the repr of any block-sparse layer, without what differs from defaults."""
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, "
        f"bias={layer.bias is not None}, nnz={len(layer.weight)}, density={layer.density:.4g}, "
        f"block_shape={layer.block_shape}, dtype={layer.weight.dtype}"
    )


def move(layer: StoredWeight, fn: Callable[[Tensor], Tensor], apply: Callable[[], Any]) -> None:
    """Move a layer's tensors by ``fn``, which ``apply`` has `torch.nn.Module` do; contents stay exact."""
    before: dict[str, Any] = {name: layer._buffers[name] for name in (*INDEX_NAMES, *STORED_NAMES)}
    quantized = None if storage_of(layer.storage).dtype is None else layer.weight.detach()
    if quantized is not None:
        dense = torch.empty(0, dtype=layer.spec.dtype, device=quantized.device)
        layer.update_spec(dtype=fn(dense).dtype)
    apply()
    for name, old in before.items():
        new: Any = layer._buffers[name]
        # to_empty leaves them uninitialised, type() may round them.
        if new is not old:
            layer._buffers[name] = with_contents(new, old)
    if quantized is not None and layer.weight.dtype != quantized.dtype:
        kept = with_contents(layer.weight.detach(), quantized)
        if is_sharded(kept):  # whose dtype cannot be set
            layer.weight = nn.Parameter(kept, requires_grad=False)
        else:
            layer.weight.data = kept
    empty = before["slot"].is_meta or layer.slot.is_meta
    source, copied = Source.MISSING if empty else layer.origin.source, layer.origin.copied
    layer.origin = PatternOrigin(source, layer.index(), copied=copied)


def note_activations(layer: StoredWeight, destination: Any, prefix: str) -> None:
    """Note 8-bit activations in the metadata that PyTorch keeps beside a state dict."""
    noted = getattr(destination, "_metadata", {}).get(prefix.removesuffix("."))
    if noted is not None and layer.activations is not None:
        noted["activations"] = layer.activations


def load(
    layer: StoredWeight,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    others: tuple[Any, ...],
    load: Callable[[], Any],
) -> None:
    """Check a layer's entries of a state dict, make room for them, and have PyTorch ``load`` them.

    ``others``: what `torch.nn.Module` passes on: metadata first, and the list of errors last.
    """
    noted, *_, errors = others
    own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    try:
        pattern = _checked(layer, own, noted)
        if pattern is not None:
            make_room(layer, pattern, own, _scales(layer, own))
    except (ValueError, TypeError, RuntimeError) as error:
        errors.append(f"{prefix}{error}")
        for name in [name for name in state_dict if name.startswith(f"{prefix}parametrizations.")]:
            del state_dict[name]  # PyTorch's copy: what parametrizes the weight is not loaded, either
        return
    with nullcontext() if pattern is None or layer.slot.is_meta else update_of(layer.index()):
        load()
    align(layer)  # what was assigned
    if pattern is not None and not layer.slot.is_meta:
        for name in INDEX_NAMES:  # those assigned may have another dtype
            if layer.get_buffer(name).dtype != torch.int32:
                layer._buffers[name] = getattr(pattern, name).to(layer.slot.device)
        layer.origin = PatternOrigin.loaded(layer.index(), copied=layer.origin.copied)


def _checked(layer: StoredWeight, state: Mapping[str, Any], noted: Mapping[str, Any]) -> BlockPattern | None:
    """Return the pattern of a saved layer, None without one, once all that is saved fits together."""
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
        spec = replace(spec, nnz=pattern.nnz, block_shape=pattern.block_shape, scales=_scales(layer, state))
        if layer.shard is not None:
            layer.shard.check(pattern)
    _check_shapes(layer, state, spec)
    return pattern


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
        raise InvalidArgumentError(
            f"col_indices must have {own[0]} blocks of {own[1:]}, because the weight is not a plain "
            f"parameter whose shape can change, got {shape[0]} of {shape[1:]}"
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
    """Raise InvalidArgumentError unless scales are of features where the layer's are, and only there.

    A state dict without metadata tells by their number alone.
    """
    scales, mine = state.get("scales"), layer.activations
    if scales is None or layer.scales is None:
        return
    of_features = tuple(scales.shape) == (layer.out_features,)
    if mine is not None and is_inside(layer.scales):
        of_features = is_inside(scales) and scales.shape[1] == 1
    if mine is None:  # those of blocks may be as many
        of_features = of_features and len(state.get("col_indices", ())) != layer.out_features
    saved = noted.get("activations") if "version" in noted else mine
    if of_features != (mine is not None) or saved != mine:
        wanted = "[nnz, bn] or [nnz]" if mine is None else "[out_features]"
        wanted = "[nnz, 1]" if mine is not None and is_inside(layer.scales) else wanted
        raise InvalidArgumentError(
            f"scales must be {wanted} of a layer with activations={mine!r}, got shape "
            f"{tuple(scales.shape)} and activations={saved!r}; call to_storage to have them alike"
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


def _scales(layer: StoredWeight, state: Mapping[str, Any]) -> str | None:
    """Return what has a scale of its own in a saved layer."""
    if layer.activations is not None:
        return layer.spec.scales
    return storage_of(layer.storage).scales_of(state.get("scales", layer.scales))


@with_normal_tensors
def make_room(
    layer: StoredWeight, pattern: BlockPattern, contents: Mapping[str, Tensor], scales: str | None = None
) -> None:
    """Give the weight, the same Parameter, and the buffers the sizes that another pattern needs.

    Other threads may be calling the layer: tensors are filled before they are put in their places. The weight
    comes first and the pattern last, so that a call which meets tensors of both finds that they do not fit.

    Args:
        layer: keeps its storage.
        pattern: has another number of blocks, or other ones, perhaps.
        contents: what tensors of another size are filled with, by name; others are zeros.
        scales: as of `LayerSpec`; None keeps them.
    """
    before = layer.spec
    spec = replace(before, nnz=pattern.nnz, block_shape=pattern.block_shape, scales=scales or before.scales)
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
    if "weight" in made:
        resize(layer.weight, made.pop("weight"))
    layer.update_spec(block_shape=spec.block_shape, nnz=spec.nnz)
    layer._buffers.update(made)


@torch.no_grad()
def keep_blocks(layer: StoredWeight, slots: Tensor) -> None:
    """Drop all blocks but those at ``slots`` [n], ascending, which get the slots 0 to n - 1.

    The weight stays the same Parameter, and its gradient goes with it; the states that an optimizer has
    of it are the caller's. On a CUDA device the host does not wait. All of the pattern's tensors are new,
    so that a graph of autograd made before keeps the pattern it was made with, and refuses to go on.
    """
    index, gradient = layer.index(), layer.weight.grad
    rows, columns = layer.pattern.block_indices()
    kept = index_of((rows * layer.pattern.grid[1] + columns)[slots], index)
    resize(layer.weight, layer.weight.detach()[slots])
    if gradient is not None:
        layer.weight.grad = gradient[slots]
    if layer.mask is not None:
        layer._buffers["mask"] = layer.mask[slots]
    for name in INDEX_NAMES:
        layer._buffers[name] = getattr(kept, name)
    layer.origin = layer.origin.updated(layer.index())


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode, and afterwards every module back into its own."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


_resized: Any = WeakIdKeyDictionary()
_hooks: list[Any] = []  # one, for all optimizers, from the first resized weight on


def watch(weight: Tensor) -> None:
    """Check the states of this weight before every later step of an optimizer."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_states))
    _resized[weight] = None


def has_slots(state: Tensor, weight: Tensor) -> bool:
    """Return True if a state has one part for each block of a weight [nnz, bn, bk].

    Moments have the weight's shape, factored ones have 1 in place of some dimensions, or leave them out.
    """
    nnz, bn, bk = weight.shape
    factored = {(nnz, bn, 1), (nnz, 1, bk), (nnz, 1, 1), (nnz, bn), (nnz, bk), (nnz,)}
    return state.shape == weight.shape or tuple(state.shape) in factored


def _check_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise PatternChangedError, before anything is written, for states of another number of blocks."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight in _resized:
                _check_states_of(optimizer, weight)


def _check_states_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    for name, state in optimizer.state.get(weight, {}).items():
        if isinstance(state, Tensor) and state.numel() != 1 and not has_slots(state, weight):
            raise PatternChangedError(
                f"{type(optimizer).__name__} keeps {name!r} of shape {list(state.shape)} for a block-sparse "
                f"weight that now is {list(weight.shape)}: its number of blocks changed; build the optimizer "
                "again, or load its own state_dict after that of the model"
            )


INDEX_NAMES = ("crow_indices", "col_indices", "slot")


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor; not every build of PyTorch has the class."""
    return hasattr(tensor, "device_mesh")


def is_everywhere(tensor: Any) -> bool:
    """Return True if every process has a shard of the tensor."""
    return is_sharded(tensor) and tensor.device_mesh.size() == torch.distributed.get_world_size()


def resize(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, and no gradient.

    As long as a graph lives that was recorded before, such as that of the last step's loss, PyTorch takes
    gradients for the shape of that time. It forgets this shape where the dtype changes.
    """
    watch(parameter)
    parameter.grad = None
    other = torch.float16 if data.dtype != torch.float16 else torch.float32
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def align(layer: nn.Module) -> None:
    """Copy tensors of a layer that kernels cannot read where they lie, as in files that were mapped."""
    for parameter in layer._parameters.values():
        if parameter is not None and _is_misaligned(parameter):
            parameter.data = parameter.detach().clone()
    for name, buffer in layer._buffers.items():
        if buffer is not None and _is_misaligned(buffer):
            layer._buffers[name] = buffer.clone()


def _is_misaligned(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    return is_plain and tensor.data_ptr() % ALIGNMENT != 0


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


def chosen_mask(weight: Tensor, scores: Tensor | None, transposable: bool) -> Tensor:
    """Return the mask of the two of each four weights with the highest scores, by default magnitudes."""
    scores = weight.detach().abs() if scores is None else scores
    if scores.shape != weight.shape:
        raise InvalidArgumentError(f"scores must have shape {tuple(weight.shape)}, got {tuple(scores.shape)}")
    return two_of_four(scores, transposable=transposable)


def masked_linear(
    x: Tensor,
    weight: Tensor,
    mask: Tensor,
    index: Index,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    column_major: bool = False,
    policy: str,
    transposable: bool,
) -> Tensor:
    """Compute a product with masked dense blocks, whose gradient passes straight through the mask.

    The weight is masked in every call, unless the layer is prepacked: not every write to it can be seen.
    """
    if is_plain((x, weight, mask)) and weight.is_cpu and not records_gradient((weight,)):
        pattern = prepared(index)
        if pattern.prepacks:
            packed = pattern.plain.follow(masked, weight, mask)
            return linear_on(x, packed, index, bias, "none", residual, column_major, policy)
    x, weight, bias, residual = autocast(x, weight, bias, residual)
    if policy != "sparse" or not multiplies_compressed(x, index):
        zeroed = straight_through(weight, mask)
        return linear_on(x, zeroed, index, bias, "none", residual, column_major, policy)
    compressed, metadata = COMPRESS(weight.detach(), mask, False)
    values, stored = compressed, Operands(metadata)
    if records_gradient((weight,)):
        transposed: tuple[Tensor | None, Tensor | None] = None, None
        if transposable and x.requires_grad:
            transposed = COMPRESS(weight.detach(), mask, True)
        values, stored = weight, Operands(metadata, None, None, compressed, *transposed)
    return linear_on(x, values, index, bias, "none", residual, column_major, operands=stored)


_owners: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by ids of weights, perhaps former ones


def check_weight(layer: Any, weight: object) -> None:
    """Refuse a weight that another layer has, with another pattern, and None.

    Raises:
        InvalidArgumentError: see above. The layer is as it was.
    """
    if not isinstance(weight, Tensor):
        raise InvalidArgumentError(f"weight must be a Parameter [nnz, bn, bk], got {shown(weight)}")
    other: Any = _owners.get(id(weight))
    if other is not layer and hasattr(other, "pattern_if_any") and other._parameters.get("weight") is weight:
        mine, theirs = layer.pattern_if_any(), other.pattern_if_any()
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


def _with_fans(calculate: Callable[[Tensor], tuple[int, int]]) -> Callable[[Tensor], tuple[int, int]]:
    @wraps(calculate)
    def fans(tensor: Tensor) -> tuple[int, int]:
        layer = _owner_of(tensor)
        if layer is None:
            return calculate(tensor)
        out_features, in_features = layer.out_features, layer.in_features
        experts = getattr(layer, "experts", 1)
        kept = tensor.numel() if getattr(layer, "nm", None) is None else tensor.numel() // 2
        return max(1, round(kept / out_features)), max(1, round(kept / (in_features * experts)))

    return fans


def _refusing(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def refusing(initialise: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(initialise)
        def call(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if _owner_of(tensor) is not None:
                raise UnsupportedError(
                    f"torch.nn.init.{name} takes the kept blocks [nnz, bn, bk] for another kind of weight; "
                    "initialise an nn.Linear and convert it by BlockSparseLinear.from_linear"
                )
            return initialise(tensor, *args, **options)

        return call

    return refusing


adapt("torch", torch.nn.init, "_calculate_fan_in_and_fan_out", _with_fans)
for _name in ("orthogonal_", "dirac_"):
    adapt("torch", torch.nn.init, _name, _refusing(_name))


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
        # Whether a call has something to validate.
        self.pending = self.copied or source is not Source.SHARED

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

        Raises:
            InvalidPatternError: the pattern was averaged.
        """
        if self._contents is None or self._is_unchanged(index) or transforms_active():
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
        """Return the origin of buffers that were filled since the layer left the meta device.

        Raises:
            InvalidPatternError: nothing was written to them, or what was written is not a pattern.
        """
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
        """Return the origin once the other processes are known to have the same pattern.

        Raises:
            UnsynchronizedPatternError: another process has drawn another pattern.
        """
        from .._runtime import agreement

        alone = self._is_unchanged(index)
        if self.source is Source.CHANGED and not alone:
            pass  # DistributedDataParallel has broadcast it, or another broadcast has
        elif self.source in (Source.OWN, Source.CHANGED) and alone:
            agreement.check(index)
        else:  # written by a broadcast or read from a file: processes without may have to know
            agreement.publish(index)
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
