"""`BlockSparseLinear`, made from sizes or from the best blocks of a dense layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._checks import (
    BLOCK_SIZES,
    COMPRESSIBLE,
    DENSE,
    DTYPES,
    Index,
    Operands,
    as_integer,
    check_block_shape,
    check_kind,
    check_one,
    check_shapes,
    empty_of,
    is_tensor,
    shown,
    warn_user,
)
from .._ops.autograd import autocast, is_plain, records_gradient
from .._ops.epilogue import activation_code, masked, straight_through
from .._ops.products import COMPRESS, combined, linear_on
from .._runtime.launch import thresholded
from .._runtime.pattern_cache import blocks_of, prepared
from .._runtime.select import multiplies_compressed
from .._runtime.torch_private import refuse_fakes, with_normal_tensors
from ..config import LayerSpec
from ..errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError, UnsupportedError
from ..pattern import BlockPattern, check_parts_beside, kept_blocks, with_blocks, zero_outside_
from ..storage.formats import forms_of, storage_of
from ..storage.quantize import two_of_four
from .weight import (
    AVERAGES,
    INDEX_NAMES,
    PatternOrigin,
    Source,
    Stored,
    StoredWeight,
    become,
    check_trainable,
    check_whole,
    checked_pattern,
    declare_shared,
    dense_blocks,
    fill,
    is_everywhere,
    is_sharded,
    kept_mask,
    layer_index,
    load,
    refuse_norms,
    stored_of,
)


def is_conv1d(module: nn.Module) -> bool:
    """Return True for Transformers' Conv1D, a linear layer with weight [in_features, out_features]."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def dense_weight(linear: Any) -> Tensor:
    """Return W [out_features, in_features] of a dense layer without gradient: a view, or a copy."""
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


def linear_of(weight: Tensor, like: Any) -> nn.Linear:
    """Return a dense layer of this weight and of copies of another layer's bias and flags."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, like.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, like.weight.requires_grad)
    if like.bias is not None:
        linear.bias = nn.Parameter(like.bias.detach().clone(), like.bias.requires_grad)
    return linear.train(like.training)


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
    grid = check_shapes(weight.shape, block_shape)[2]
    if scores is None:
        if bool(weight.isnan().any()):
            raise InvalidArgumentError(
                "linear must not hold NaN in its weight, which cannot be ranked; give pattern"
            )
        return BlockPattern.from_dense(weight, block_shape=block_shape, density=density, parts=parts)
    check_kind("scores", scores, Tensor)
    if scores.shape == weight.shape:
        precision = torch.promote_types(scores.dtype, torch.float32)
        scores = blocks_of(scores, block_shape).sum((2, 3), dtype=precision)
    if scores.shape != grid:
        raise InvalidArgumentError(
            f"scores must have shape {grid} or {tuple(weight.shape)}, got {tuple(scores.shape)}"
        )
    return BlockPattern.from_scores(scores, block_shape=block_shape, density=density, parts=parts)


_Layer = TypeVar("_Layer", bound="BlockSparseLinear")


class BlockSparseLinear(StoredWeight):
    """y = x Wᵀ + bias, where only some blocks of W [out_features, in_features] are kept.

    Takes x [..., in_features] and gives [..., out_features], like `torch.nn.Linear`.

    The int32 buffers `crow_indices`, `col_indices` and `slot` are the pattern, see `BlockPattern`;
    `layer.pattern` is a view of them, whose `update_` changes them in place. A state_dict with another
    pattern, even of other size or block shape, can be loaded: `weight` then changes its shape, and the next
    step of an optimizer that keeps states of another number of blocks raises `PatternChangedError`.

    In distributed training all processes must have one pattern, by DistributedDataParallel with its default
    arguments or `tilesparse.distributed.synchronize_patterns`: the first step raises otherwise.

    With ``nm=(2, 4)`` only two of each four neighbours in a row of a block are multiplied, those of largest
    magnitude at first. In the storage "plain", the one that can be trained, the weight keeps all of them and
    the bool buffer `mask` says which: the gradient passes straight to the weight as if there were no mask
    (Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", ICLR 2021), see
    `tilesparse.train.MaskSchedule`. Other storages take fewer bytes, for inference and for adapters beside
    the layer: their weight has no gradient, and x has its own.

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
            see `storage.quantize_weights` and `storage.quantize_int4`.
        policy: as given; may be changed at any time, and is not part of ``state_dict()``, as
            `use_fast_accum` is not, which is as of `functional.quantized_linear`.
    """

    bias: nn.Parameter | None
    use_fast_accum = False
    _of_experts = False  # whether W is that of several experts

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
        shape = out_features, in_features
        if pattern is None:
            check_shapes(shape, block_shape)
            pattern = BlockPattern.random(
                shape, block_shape=block_shape, density=density, generator=generator
            )
        else:
            _check_pattern(pattern, shape)
        like = torch.empty(0, device=device, dtype=dtype)
        spec = LayerSpec.of(pattern, like.dtype, nm=nm, transposable=transposable, policy=policy)
        spec = spec.with_storage(storage, activations=activations)
        super().__init__(pattern, spec, like.device)
        self.register_parameter("bias", nn.Parameter(like.new_empty(spec.shape[0])) if bias else None)
        self.reset_parameters(generator)

    @classmethod
    @with_normal_tensors
    def from_spec(
        cls: type[_Layer],
        spec: LayerSpec,
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
    ) -> _Layer:
        """Return a layer of this spec without a pattern and with uninitialized parameters.

        Its pattern and values come from `load_state_dict`, or from `reset_parameters`; forward raises before.
        """
        if (spec.experts is not None) != cls._of_experts:
            raise InvalidArgumentError(f"spec.experts must fit {cls.__name__}, got {spec.experts}")
        own: Any = {} if spec.experts is None else {"experts": spec.experts}
        sizes = spec.grid[0] + 1, spec.nnz, spec.nnz
        crow, col, slot = (torch.empty(size, dtype=torch.int32, device="meta") for size in sizes)
        layer = cls(
            spec.shape[1],
            spec.shape[0],
            bias,
            pattern=BlockPattern.from_index(Index(crow, col, slot, spec.shape, spec.block_shape)),
            device="meta",
            dtype=spec.dtype,
            **own,
        )
        layer._allocate(spec, layer.weight.device)
        device = torch.empty(0, device=device).device
        return layer if device.type == "meta" else layer.to_empty(device=device)

    @classmethod
    @torch.no_grad()
    def from_state(
        cls: type[_Layer], spec: LayerSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> _Layer:
        """Return a layer of stored tensors, such as those of a checkpoint that describes it by the spec.

        Tensors have the names of `state_dict`; a bias may be missing, and those of the pattern are copied.
        Weight and bias get another ``dtype`` if there is one, but for values in 8 bits.
        """
        spec = spec if dtype is None else replace(spec, dtype=dtype)
        forms = {**forms_of(spec), "bias": (spec.shape[:1], spec.dtype)}
        if "bias" not in tensors:
            del forms["bias"]
        differing = {*tensors} ^ {*forms, *INDEX_NAMES}
        if differing:
            names = ", ".join((*forms, *INDEX_NAMES))
            raise InvalidArgumentError(
                f"tensors must be {names}; they differ in {', '.join(sorted(differing))}"
            )
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise InvalidTypeError(f"tensors: {name} must be a tensor, got {type(tensor).__name__}")
        crow, col, slot = (tensors[name] for name in INDEX_NAMES)
        pattern = checked_pattern(Index(crow, col, slot, spec.shape, spec.block_shape))
        if pattern.nnz != spec.nnz:
            raise InvalidArgumentError(
                f"tensors must have {spec.nnz} blocks, as spec.nnz says, got {pattern.nnz}"
            )
        own = {}
        for name, (shape, wanted) in forms.items():
            tensor = tensors[name]
            # Only dtypes of layers are cast to each other.
            castable = name in ("weight", "bias") and {tensor.dtype, wanted} <= {*DTYPES}
            if tensor.shape != shape or not (tensor.dtype == wanted or castable):
                raise InvalidArgumentError(
                    f"tensors: {name} must be {list(shape)} of {wanted}, got {list(tensor.shape)} of "
                    f"{tensor.dtype}"
                )
            own[name] = tensor.detach().to(wanted).contiguous()
        return layer_of(cls, Stored(spec, pattern, own))

    @classmethod
    @with_normal_tensors
    def from_linear(
        cls: type[_Layer],
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
    ) -> _Layer:
        """Return a layer with the best blocks of a dense one: same values, dtype, device and mode.

        ``linear`` is a `torch.nn.Linear`, or Transformers' ``Conv1D``, whose weight is the transpose of W.
        Parameters are copied, with their ``requires_grad``. A warning says how many block rows and columns
        are left empty, unless `pattern` is given.

        ``scores`` say what to keep, higher is better: one number per block [out_features / bn,
        in_features / bk], or one per weight [out_features, in_features], which are summed over each block,
        and by which ``nm`` chooses. None scores blocks by their Frobenius norm, weights by their magnitude.
        With ``parts`` (r, c) each part keeps as many blocks, for tensor parallelism over r or c processes,
        see `BlockPattern.random`; they are (1, 1) beside `pattern`. All else is as for the class.

        Raises:
            InvalidArgumentError: `linear` is neither of the two or cannot be cut into these blocks, its
                weight holds NaN, `scores` has another shape, `parts` are given beside `pattern`, or there is
                nothing to score because `linear` is on the meta device.
        """
        refuse_fakes("a layer")
        if not isinstance(linear, nn.Linear) and not is_conv1d(linear):
            raise InvalidArgumentError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
        dense: Any = linear
        reason = reason_not_dense(dense.weight)
        if reason is not None:
            raise InvalidArgumentError(f"linear must have a weight that can be read: {reason}")
        weight = dense_weight(dense)
        parts = check_parts_beside(pattern, parts)
        if pattern is None:
            pattern = best_blocks(weight, scores, density, check_block_shape(block_shape), parts)
            rows, columns = empty_of(pattern.block_indices(), pattern.shape, pattern.block_shape)
            if pattern.nnz and (rows or columns):
                warn_user(
                    f"the blocks that were chosen leave {rows} block rows (outputs that are the bias alone) "
                    f"and {columns} block columns (inputs that nothing reads) empty"
                )
        _check_pattern(pattern, weight.shape)
        spec = LayerSpec.of(pattern, weight.dtype, nm=nm, transposable=transposable, policy=policy)
        spec = spec.with_storage(storage, activations=activations)
        by_weight = scores if scores is not None and scores.shape == weight.shape else None
        layer = layer_of_dense(cls, spec, pattern, weight, dense.weight, dense.bias, by_weight)
        return layer.train(linear.training)

    @property
    def threshold(self) -> float | None:
        """Magnitude up to which numbers of x count as zero, see `functional.linear`; None: none does."""
        return self._threshold

    @threshold.setter
    def threshold(self, threshold: float | None) -> None:
        self._end_merging()
        self._threshold = replace(self.spec, threshold=threshold).threshold

    def to_linear(self) -> nn.Linear:
        """Return the dense layer with the same weight, zero where no block is kept; parameters are copies."""
        return linear_of(with_blocks(dense_blocks(self, "to_linear"), self.pattern), self)

    @torch.no_grad()
    def cut(self: _Layer, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None) -> _Layer:
        """Return a layer of copies of some rows and columns of W, for tensor parallelism in other libraries.

        Rows (output features) and columns (input features) are (begin, end); None is all. Blocks that a cut
        goes through are divided with all others, see `BlockPattern.refined`. A bias stays with the first
        column, so that parts along columns add up to the layer's result.

        Raises:
            InvalidArgumentError: a span is outside, or its ends are no multiples of 16, in 2:4 of 32.
            UnsupportedError: the weight is sharded.
        """
        stored = stored_of(self, "cut")
        (out_features, in_features), (bn, bk) = stored.spec.shape, stored.spec.block_shape
        top, bottom = _span("rows", rows, out_features)
        left, right = _span("columns", columns, in_features)
        bn = _block_size("rows", (top, bottom), bn, self.transposable)
        bk = _block_size("columns", (left, right), bk, self.nm is not None)
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
        return layer_like(self, Stored(replace(stored.spec, shape=shape, nnz=pattern.nnz), pattern, tensors))

    @with_normal_tensors
    def set_nm(
        self: _Layer, nm: Sequence[int] | None, *, scores: Tensor | None = None, transposable: bool = False
    ) -> _Layer:
        """Begin or end 2:4 inside the blocks; the weight stays as it is, and so do optimizers.

        Args:
            nm: (2, 4), or None for dense blocks, in which masked weights count again.
            scores: see `update_mask_`.
            transposable: see the class.

        """
        check_whole(self, "set_nm")
        check_trainable(self, "set_nm")
        wanted: Any = {"nm": nm, "transposable": transposable}
        spec = replace(self.spec, **wanted)
        mask = None if spec.nm is None else chosen_mask(self.weight, scores, transposable)
        self._describe(spec)
        self.mask = mask
        return self

    @torch.no_grad()
    def update_mask_(self: _Layer, scores: Tensor | None = None) -> _Layer:
        """Choose anew which two of four weights are multiplied: those of the highest scores [nnz, bn, bk].

        None is the magnitude of the weight. Nothing waits for a GPU.
        """
        check_whole(self, "update_mask_")
        check_trainable(self, "update_mask_")
        if self.mask is None:
            raise UnsupportedError("update_mask_ needs a layer with nm=(2, 4), got None")
        self.mask.copy_(chosen_mask(self.weight, scores, self._transposable))
        return self

    @with_normal_tensors
    def to_storage(
        self: _Layer,
        storage: str,
        *,
        granularity: str = "row",
        activations: str | None = None,
        limits: Tensor | None = None,
        values: Tensor | None = None,
    ) -> _Layer:
        """Store the weight in another way, in place.

        ``weight`` becomes another Parameter, so optimizers have to be built again. Only "plain" has a
        gradient, which a frozen weight does not get back. `storage_error` is the error of the conversion.

        Args:
            storage: "plain"; "compressed": the kept half of 2:4, and metadata; "int8" or "float8_e4m3fn":
                8 bits and scales, of 2:4 the kept half alone; "int4": 4 bits and scales, not of 2:4.
            granularity: of 8 and 4 bits, what has a scale of its own: "row" of a block or "block". With
                `activations` an output feature, whatever a row is; "block" is for float8_e4m3fn in blocks of
                128 x 128, and x then has a scale for each 128 features of a token.
            activations: the name of the storage, where that has 8 bits: products then quantize x as well, see
                `functional.quantized_linear`. None multiplies x in its dtype.
            limits: of 8 and 4 bits, the magnitude at which the weights of each scale are clipped, see
                `storage.quantize_weights`; `quantize_` finds good ones. None clips nothing in 8 bits.
            values: of 8 and 4 bits, [nnz, bn, bk] to store in place of the weight, which may be rounded
                already, so that errors make up for each other; `quantize_` finds good ones.

        Raises:
            InvalidArgumentError: an argument does not fit, or the weight is not finite. The layer is as it
                was.
            UnsupportedError: the weight is sharded, or offloaded by Accelerate.
        """
        check_whole(self, "to_storage")
        if self.weight.is_meta and hasattr(self, "_hf_hook"):  # which brings back the weight as it was
            raise UnsupportedError(
                "to_storage cannot convert an offloaded weight; load the model without offloading"
            )
        spec = self.spec.with_storage(storage, granularity, activations)
        if spec != self.spec or limits is not None or values is not None:
            self._convert(spec, limits, values)
        return self

    def _convert(self, spec: LayerSpec, limits: Tensor | None = None, values: Tensor | None = None) -> None:
        """Store the weight as another spec says."""
        storage = storage_of(spec.storage)
        for name, given in (("limits", limits), ("values", values)):
            if given is not None and storage.dtype is None:
                raise InvalidArgumentError(
                    f"{name} must be None with storage {spec.storage!r}, which has no scales"
                )
        if values is not None and values.shape != (spec.nnz, *spec.block_shape):
            raise InvalidArgumentError(
                f"values must be {[spec.nnz, *spec.block_shape]}, as the blocks of the layer, got "
                f"{list(values.shape)}"
            )
        if self.weight.is_meta:
            self._allocate(spec, self.weight.device)
            return
        blocks = dense_blocks(self)
        pattern = None if spec.activations is None else self.pattern
        given = blocks if values is None else values.to(blocks.device)
        self._assign(spec, storage.store(given, kept_mask(self), spec, pattern, limits))
        norm = torch.linalg.vector_norm(blocks, dtype=torch.float64)
        lost = torch.linalg.vector_norm(dense_blocks(self).double() - blocks.double())
        self._storage_error = float(lost / norm) if float(norm) > 0 else 0.0

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weight and bias anew, uniformly from ±1/√fan_in, and the pattern if there is none yet.

        This is the initialisation of `torch.nn.Linear` (He et al., "Delving Deep into Rectifiers", 2015) with
        the fan-in that is left: each output counts the inputs of the blocks in its own block row, so that it
        starts with the variance it would have in a dense layer. Outputs without any block get bias 0.

        All processes that have a part of a sharded layer call it: they draw as one process would.

        Args:
            generator: drawn from on its own device, so equal on all devices; None is PyTorch's default
                generator of the layer's device. A missing pattern is drawn on the CPU. Where the layer is
                sharded only a seed is drawn from it, and that of the first process counts.

        """
        if self.weight.is_meta:
            return
        on_cpu = generator is not None and generator.device.type == "cpu"
        for_pattern, sharded = generator if on_cpu else None, is_sharded(self.weight)
        if sharded:
            check_trainable(self, "reset_parameters of a sharded layer")
            for_pattern, generator = _common_generators(self.weight, generator)
        if self._origin.source is Source.MISSING:
            self.pattern = self._random_pattern(for_pattern)
            if is_everywhere(self.weight):
                declare_shared(self)
        bn, bk = self.block_shape
        block_rows, block_columns = self.pattern.block_indices()
        widths = (self.in_features - block_columns * bk).clamp(max=bk)
        fan_in = widths.new_zeros(self.pattern.grid[0]).index_add(0, block_rows, widths)
        if self.nm is not None:
            fan_in = fan_in // 2
        bound = torch.where(fan_in > 0, fan_in.rsqrt(), 0.0)
        wanted = self.spec
        if not storage_of(wanted.storage).trainable:
            self._allocate(wanted.with_storage("plain"), self.weight.device)
        drawn = _draw(self.weight, bound[block_rows, None, None], generator)
        if self.mask is not None:
            fill(self.mask, two_of_four(drawn.abs(), transposable=self.transposable))
        if not sharded:
            zero_outside_(self.weight, self.pattern)
            if wanted != self.spec:
                self._convert(wanted)
        if self.bias is not None:
            _draw(self.bias, bound.repeat_interleave(bn)[: self.out_features], generator)

    def _random_pattern(self, generator: torch.Generator | None) -> BlockPattern:
        if self._shard is not None:
            return self._shard.random(layer_index(self), generator)
        spec = self.spec
        experts = spec.experts or 1
        parts = (experts, 1) if spec.nnz % experts == 0 else (1, 1)
        return BlockPattern.random(
            spec.shape, block_shape=spec.block_shape, nnz=spec.nnz, parts=parts, generator=generator
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self._end_merging()
        load_rest = partial(super()._load_from_state_dict, state_dict, prefix, *others)
        load(self, state_dict, prefix, others, load_rest)

    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: str = "none",
        column_major_output: bool = False,
    ) -> Tensor:
        """Return y [..., out_features] = x Wᵀ + bias; all else is as in `functional.linear`.

        Args:
            input: x [..., in_features].
            residual: [..., out_features], added to the result, or None.
            gate: [..., out_features], by which the result is multiplied in the place of a residual, or None.
            activation: of the result, or of the gate where there is one.
            column_major_output: the layout of the result; that of tensor parallelism is row-major always.
        """
        if self._merged is not None and activation == "none" and not column_major_output:
            product, number = self._merged
            if residual is None and gate is None and (y := product.result(number, input)) is not None:
                return y  # type: ignore[no-any-return]
        if self._origin.pending:
            self._validate_pattern()
        try:
            if gate is not None or activation != "none":
                activation_code(activation)
                check_one(residual, gate)
                if self._needs_own_product():
                    y = self._product(input, None, None, "none", column_major_output)
                    y, residual, gate = autocast(y, residual, gate)
                    return combined(y, activation, residual, gate)
            if is_compiling():
                return self._product(input, residual, gate, activation, column_major_output)
            # Another thread may load a weight of another size, and PyTorch give size and memory of either.
            while True:
                loads = self._loads
                y = self._product(input, residual, gate, activation, column_major_output)
                if loads == self._loads and not loads & 1:
                    return y
        except InvalidPatternError as error:
            raise InvalidPatternError(
                f"{error}; something has written to the buffers of BlockSparseLinear({self.extra_repr()}): "
                f"{AVERAGES}"
            ) from error
        except (AttributeError, RuntimeError, TypeError) as error:  # checked where it costs calls nothing
            if not is_tensor(input) and not isinstance(error, UnsupportedError):
                raise InvalidTypeError(f"input must be a dense tensor, got {shown(input)}") from None
            raise

    def _product(
        self,
        x: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        activation: str,
        column_major: bool,
    ) -> Tensor:
        threshold = self._threshold
        if threshold is not None and self._needs_own_product():
            x, threshold = thresholded(x, threshold), None
        if self._shard is not None:
            return self._shard.linear(self, x, residual)
        parameters: dict[str, Any] = self._parameters
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrizations and the like put attributes in their places
            refuse_norms(self)
            weight, bias = self.weight, self.bias
        index = layer_index(self)
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
            if metadata is not None or scales is not None or threshold is not None:
                fast = None if self._activations is None else self.use_fast_accum
                stored = Operands(metadata, scales, fast=fast, threshold=threshold)
            y = linear_on(
                x, weight, index, bias, activation, residual, column_major, self._policy, stored, gate
            )
        if beside is not None:
            # Only now: with it comes PyTorch's compiler, which takes long to import.
            from .._ops.main_grad import add_gradient, add_gradient_uncompiled

            y = (add_gradient_uncompiled if is_compiling() else add_gradient)(y, x, *beside, index)
        return y if self._observe is None else self._observe(y, x)

    def _needs_own_product(self) -> bool:
        """Return True if something looks at the product itself, or at its gradient."""
        beside = getattr(self.weight, "main_grad", None)
        lookers = self._shard, self._observe, self._buffers["mask"], beside
        return any(each is not None for each in lookers)

    def prepack(self, enabled: bool = True) -> BlockSparseLinear:
        """Keep a copy of the weight in the form in which kernels multiply it, for inference.

        On CUDA devices kernels for blocks of 16 and 32 otherwise pack the weight in every call, or read it
        block by block where tokens are few; the others have no use for a copy. It takes as much memory as the
        weight, for each stream. On the CPU it is the plain weight of one that is 2:4 or stored in fewer
        bytes, in the dtype of x. Calls that record a gradient of the weight do not use it.

        The copy is made in the next call, and anew after every change of weight, mask or pattern that PyTorch
        counts: call this again after changes through ``weight.data``. It is not part of ``state_dict()``, and
        a moved or copied layer does not have it. ``enabled=False`` drops it.
        """
        if not self.col_indices.is_meta:
            self._validate_pattern()
            index = layer_index(self) if self._shard is None else self._shard.index(self)
            prepared(index).keep_prepacked(enabled)
        return self

    def extra_repr(self) -> str:
        """Return sizes, density and whatever else differs from its default, for ``print(layer)``."""
        text = representation(self) + ("" if self.policy == "sparse" else f", policy={self.policy!r}")
        text += "" if self._nm is None else f", nm={self._nm}"
        text += ", transposable=True" if self._transposable else ""
        text += "" if storage_of(self.storage).trainable else f", storage={self.storage!r}"
        text += "" if self.threshold is None else f", threshold={self.threshold:.4g}"
        return text + ("" if self.activations is None else f", activations={self.activations!r}")


def representation(layer: Any) -> str:
    """Return the repr of any block-sparse layer, without what differs from defaults."""
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, "
        f"bias={layer.bias is not None}, nnz={len(layer.weight)}, density={layer.density:.4g}, "
        f"block_shape={layer.block_shape}, dtype={layer.weight.dtype}"
    )


def layer_of(
    cls: type[_Layer], stored: Stored, weight: Tensor | None = None, bias: Tensor | None = None
) -> _Layer:
    """Return a layer of these parts, with ``requires_grad`` as these parameters have it."""
    layer = cls.from_spec(stored.spec, bias="bias" in stored.tensors, device="meta")
    become(layer, stored)
    if weight is not None and storage_of(stored.spec.storage).trainable:
        layer.weight.requires_grad_(weight.requires_grad)
    if bias is not None and layer.bias is not None:
        layer.bias.requires_grad_(bias.requires_grad)
    return layer


def layer_like(layer: _Layer, stored: Stored) -> _Layer:
    """Return a layer of these parts that is trained, or not, as another one."""
    return layer_of(type(layer), stored, layer.weight, layer.bias).train(layer.training)


@torch.no_grad()
def _check_pattern(pattern: Any, shape: Sequence[int]) -> None:
    check_kind("pattern", pattern, BlockPattern)
    if pattern.shape != tuple(shape):
        raise InvalidArgumentError(f"pattern must have shape {tuple(shape)}, got {pattern.shape}")


def layer_of_dense(
    cls: type[_Layer],
    spec: LayerSpec,
    pattern: BlockPattern,
    dense: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scores: Tensor | None = None,
) -> _Layer:
    """Return a layer of copies of a dense weight's blocks and of its bias, stored as the spec says."""
    _check_pattern(pattern, dense.shape)
    plain, on_device = spec.with_storage("plain"), pattern.to(dense.device)
    tensors = {"weight": kept_blocks(dense, on_device)}
    if spec.nm is not None:
        by_block = None if scores is None else kept_blocks(scores, on_device)
        tensors["mask"] = chosen_mask(tensors["weight"], by_block, spec.transposable)
    if bias is not None:
        tensors["bias"] = bias.detach().flatten().to(spec.dtype, copy=True)
    layer = layer_of(cls, Stored(plain, pattern, tensors), weight, bias)
    layer._origin = PatternOrigin(Source.MISSING if dense.is_meta else Source.OWN, layer_index(layer))
    if spec != plain:
        layer._convert(spec)
    return layer


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
    """Compute a product with masked dense blocks, whose gradient passes straight through the mask."""
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
