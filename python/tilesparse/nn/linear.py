"""Block-sparse drop-in replacements of `torch.nn.Linear`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._arguments import check_types, checked, shown
from .._checks import Index, check_block_shape, check_one, check_policy, check_shapes
from .._ops.activations import activation_code
from .._ops.autocast import autocast
from .._ops.autograd import is_plain, records_gradient
from .._ops.linear import combined, linear_on, linear_through
from .._ops.masks import masked, straight_through
from .._ops.values import COMPRESS
from .._reports import empty_of
from .._runtime.choice import multiplies_compressed
from .._runtime.indices import blocks_of
from .._runtime.lookup import prepared, update_of
from .._runtime.private import constant_when_compiled, refuse_fakes
from ..config import QUANTIZED_BY_NAME, LayerSpec, check_nm, check_nm_blocks, check_storage
from ..errors import InvalidArgumentError, InvalidPatternError, UnsupportedError
from ..matrix import BlockSparseMatrix
from ..pattern.block_pattern import BlockPattern
from ..pattern.choosing import check_parts_beside
from ..pattern.indices import index_of
from ..storage.values import expand, forms_of, stored_as, two_of_four
from .origin import PatternOrigin, Source, checked_pattern, has_peers
from .resized import watch

if TYPE_CHECKING:
    from ..parallel.tensor import Part

INDEX_NAMES = ("crow_indices", "col_indices", "slot")
STORED_NAMES = ("mask", "metadata", "scales")  # what some storages have besides the weight

# What `BlockSparseLinear` keeps besides its shape, hooks and mode.
_FORM = (
    *("_block_shape", "_dtype", "_storage", "_storage_error", "_nm", "_transposable", "_policy", "_thaws"),
    *("_parameters", "_buffers", "_non_persistent_buffers_set", "origin"),
)


class BlockSparseLinear(nn.Module):
    """y = x Wᵀ + bias, where only some blocks of W [out_features, in_features] are kept.

    Takes x [..., in_features] and gives [..., out_features], like `torch.nn.Linear`.

    The int32 buffers `crow_indices`, `col_indices` and `slot` are the pattern, see `BlockPattern`;
    `layer.pattern` is a view of them, whose `update_` changes them in place. A state_dict with another
    pattern, even of other size or block shape, can be loaded: `weight` then changes its shape, and the next
    step of an optimizer that keeps states of another number of blocks raises `PatternChangedError`.

    Where processes train one model together, all must have one pattern. DistributedDataParallel sees to it
    with its default arguments, otherwise `tilesparse.parallel.synchronize_patterns` does: the first training
    step of a layer that has drawn its pattern by itself raises where neither has.

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
        storage: "plain", "compressed" (2:4 alone), "int8" or "float8_e4m3fn", see `to_storage`.
        device: of the parameters and buffers.
        dtype: of the parameters: float64, float32, float16 or bfloat16.
        generator: a CPU generator for the pattern and the initial values.

    Attributes:
        weight: Parameter [nnz, bn, bk], the kept blocks; [nnz, bn, bk / 2] where 2:4 is not stored plain.
        bias: Parameter [out_features] or None.
        mask: bools [nnz, bn, bk] of plain 2:4, otherwise None.
        metadata: int32 [nnz, bk / 32, bn] of 2:4 that is not plain, otherwise None; see `storage.compress`.
        scales: float32 [nnz, bn] or [nnz] of 8 bits, otherwise None; see `storage.quantize`.
        policy: as given; may be changed at any time, and is not part of ``state_dict()``.

    Raises:
        InvalidArgumentError: a size, the density, the block shape or the policy is not allowed, or `pattern`
            has another shape.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    crow_indices: Tensor
    col_indices: Tensor
    slot: Tensor
    mask: Tensor | None
    metadata: Tensor | None
    scales: Tensor | None
    shard: Part | None = None  # of tensor parallelism
    _thaws: bool = True  # whether the weight, stored otherwise, gets its gradient back in the storage "plain"
    # Takes y and x of a call and gives y, whose gradient `tilesparse.train` sees so in steps that need it.
    observe: Callable[[Tensor, Tensor], Tensor] | None = None

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        density: float = 0.5,
        *,
        block_shape: int | Sequence[int] = (32, 32),
        pattern: BlockPattern | None = None,
        policy: str = "sparse",
        nm: Sequence[int] | None = None,
        transposable: bool = False,
        storage: str = "plain",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        refuse_fakes("a layer")
        check_nm(nm, transposable)
        check_storage(storage, nm)
        if pattern is None:
            pattern = BlockPattern.random(
                (out_features, in_features), block_shape=block_shape, density=density, generator=generator
            )
        elif pattern.shape != (out_features, in_features):
            raise InvalidArgumentError(
                f"pattern: shape {(out_features, in_features)} expected, got {pattern.shape}"
            )
        self._shape = pattern.shape
        self._block_shape = pattern.block_shape
        self.policy = policy
        check_nm_blocks(nm, transposable, self._block_shape)
        self._nm, self._transposable, self._storage = _as_nm(nm), transposable, storage
        self.register_parameter("weight", None)  # comes first
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        like = torch.empty(0, device=device, dtype=dtype)
        self._dtype = like.dtype  # of plain values
        self._storage_error = 0.0
        for name in INDEX_NAMES:
            self.register_buffer(name, getattr(pattern, name).to(like.device, copy=True))
        self._allocate(pattern.nnz, like)
        self.origin = PatternOrigin(Source.MISSING if self.slot.is_meta else Source.OWN, self.index())
        self.reset_parameters(generator)

    @classmethod
    @checked
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
        refuse_fakes("a layer")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        like = torch.empty(0, device=device, dtype=spec.dtype)
        layer._shape, layer._block_shape, layer._dtype = spec.shape, spec.block_shape, spec.dtype
        layer._nm, layer._transposable, layer._storage = spec.nm, spec.transposable, spec.storage
        layer._storage_error = 0.0
        layer.policy = spec.policy
        layer.register_parameter("weight", None)  # comes first
        layer.register_parameter("bias", nn.Parameter(like.new_empty(spec.shape[0])) if bias else None)
        for name, size in zip(INDEX_NAMES, (spec.grid[0] + 1, spec.nnz, spec.nnz), strict=True):
            layer.register_buffer(name, like.new_zeros(size, dtype=torch.int32))
        layer._allocate(spec.nnz, like, spec.scales != "block")
        layer.origin = PatternOrigin(Source.MISSING, layer.index())
        return layer

    @classmethod
    @checked
    def from_linear(
        cls,
        linear: nn.Module,
        density: float = 0.5,
        *,
        block_shape: int | Sequence[int] = (32, 32),
        pattern: BlockPattern | None = None,
        scores: Tensor | None = None,
        parts: tuple[int, int] = (1, 1),
        policy: str = "sparse",
        nm: Sequence[int] | None = None,
        transposable: bool = False,
        storage: str = "plain",
    ) -> BlockSparseLinear:
        """A layer with the best blocks of a dense one: same values, dtype, device and mode.

        Nothing is rescaled. Parameters are copied, with their ``requires_grad``. A warning says how many
        block rows and columns are left empty, unless `pattern` is given.

        Args:
            linear: a `torch.nn.Linear`, or Transformers' ``Conv1D``, whose weight is the transpose of W.
            density: fraction of the blocks to keep.
            block_shape: (bn, bk), or one number for both.
            pattern: the blocks to keep; `density` and `block_shape` are then taken from it.
            scores: what to keep, higher is better: one number per block [out_features / bn,
                in_features / bk], or one per weight [out_features, in_features], which are summed
                over each block, and by which ``nm`` chooses. None scores blocks by their Frobenius norm,
                and weights by their magnitude.
            parts: (r, c): keep as many blocks of each part, for tensor parallelism over r or c processes, see
                `BlockPattern.random`; (1, 1) beside `pattern`.
            policy: "sparse", "auto" or "dense", see `functional.linear`.
            nm: (2, 4) for 2:4 inside the blocks, or None.
            transposable: see the class.
            storage: "plain", "compressed", "int8" or "float8_e4m3fn", see `to_storage`.

        Raises:
            InvalidArgumentError: `linear` is neither of the two or cannot be cut into these blocks, its
                weight holds NaN, `scores` has another shape, `parts` are given beside `pattern`, or there is
                nothing to score because `linear` is on the meta device.
        """
        refuse_fakes("a layer")
        if not isinstance(linear, nn.Linear) and not is_conv1d(linear):
            raise InvalidArgumentError(f"linear: torch.nn.Linear expected, got {type(linear).__name__}")
        dense: Any = linear
        weight, bias = dense_weight(dense), dense.bias
        out_features, in_features = weight.shape
        parts = check_parts_beside(pattern, parts)
        if pattern is None:
            pattern = best_blocks(weight, scores, density, check_block_shape(block_shape), parts)
            rows, columns = empty_of(pattern.block_indices(), pattern.shape, pattern.block_shape)
            if pattern.nnz and (rows or columns):
                warnings.warn(
                    f"the blocks that were chosen leave {rows} block rows (outputs that are the bias alone) "
                    f"and {columns} block columns (inputs that nothing reads) empty",
                    stacklevel=3,
                )
        check_nm(nm, transposable)
        check_storage(storage, nm)
        layer = cls(
            in_features,
            out_features,
            bias is not None,
            pattern=pattern,
            policy=policy,
            nm=nm,
            transposable=transposable,
            device="meta",
            dtype=weight.dtype,
        ).to_empty(device=weight.device)
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
        return layer.to_storage(storage).train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The dense layer with the same weight, zero where no block is kept; parameters are copies."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        dense = BlockSparseMatrix(self.plain_values(), self.pattern).to_dense()
        linear.weight = nn.Parameter(dense, self.weight.requires_grad)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return linear.train(self.training)

    def to_semi_structured(self) -> Tensor:
        """The weight [out_features, in_features] as PyTorch's 2:4 tensor, for a pattern without gaps.

        Raises:
            UnsupportedError: the layer is not 2:4, blocks are missing, or PyTorch cannot make one here.
        """
        if self._nm is None or self.density < 1:
            raise UnsupportedError(
                f"to_semi_structured: 2:4 with every block kept expected, got nm={self._nm} with density "
                f"{self.density:.4g}"
            )
        try:
            return torch.sparse.to_sparse_semi_structured(self.to_linear().weight.detach())
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise UnsupportedError(f"to_semi_structured: PyTorch refuses: {error}") from error

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)  # which nn.Module would take for a submodule
        else:
            super().__setattr__(name, value)

    @property
    def in_features(self) -> int:
        """Size of the last dimension of x."""
        return self._shape[1]

    @in_features.setter
    def in_features(self, value: int) -> None:
        _check_size("in_features", value, self._shape[1])

    @property
    def out_features(self) -> int:
        """Size of the last dimension of y."""
        return self._shape[0]

    @out_features.setter
    def out_features(self, value: int) -> None:
        _check_size("out_features", value, self._shape[0])

    @property
    def spec(self) -> LayerSpec:
        """How the layer is stored now: shape, block shape, number of blocks, dtype, storage and policy."""
        quantized = self._storage in QUANTIZED_BY_NAME
        return LayerSpec(
            shape=self._shape,
            block_shape=self._block_shape,
            nnz=self.col_indices.shape[0],
            # Unquantized, the weight's dtype: ``weight.data`` may have changed it.
            dtype=self._dtype if quantized else self.weight.dtype,
            storage=self._storage,
            nm=self._nm,
            transposable=self._transposable,
            scales=None if self.scales is None else "row" if self.scales.dim() == 2 else "block",
            policy=self._policy,
        )

    @property
    def nm(self) -> tuple[int, int] | None:
        """(2, 4) where two of four weights in a block are multiplied, otherwise None."""
        return self._nm

    @property
    def transposable(self) -> bool:
        """Whether masks are chosen so that two of four are kept in columns as well."""
        return self._transposable

    @property
    def storage(self) -> str:
        """How the weight is stored: "plain", "compressed", "int8" or "float8_e4m3fn"."""
        return self._storage

    @checked
    @torch.no_grad()
    def set_nm(
        self, nm: Sequence[int] | None, *, scores: Tensor | None = None, transposable: bool = False
    ) -> BlockSparseLinear:
        """Begins or ends 2:4 inside the blocks; the weight stays as it is, and so do optimizers.

        Args:
            nm: (2, 4), or None for plain blocks, in which what was masked counts again.
            scores: see `update_mask_`.
            transposable: see the class.

        Returns:
            The layer.

        Raises:
            UnsupportedError: the storage is not "plain", or the weight is sharded.
            InvalidArgumentError: blocks are not 32, 64 or 128 wide, or another argument is not allowed. The
                layer is as it was.
        """
        check_nm(nm, transposable)
        check_whole(self, "set_nm")
        self._check_trainable("set_nm")
        check_nm_blocks(nm, transposable, self._block_shape)
        self.mask = None if nm is None else self._chosen(scores, transposable)
        self._nm, self._transposable = _as_nm(nm), transposable
        return self

    @checked
    @torch.no_grad()
    def update_mask_(self, scores: Tensor | None = None) -> BlockSparseLinear:
        """Chooses anew which two of four weights are multiplied. Nothing waits for a GPU.

        Args:
            scores: [nnz, bn, bk], higher is better; None is the magnitude of the weight.

        Returns:
            The layer.

        Raises:
            UnsupportedError: the layer is not 2:4, its storage is not "plain", or the weight is sharded.
            InvalidArgumentError: ``scores`` has another shape.
        """
        check_whole(self, "update_mask_")
        self._check_trainable("update_mask_")
        if self.mask is None:
            raise UnsupportedError("update_mask_: nm=(2, 4) expected, got None")
        self.mask.copy_(self._chosen(scores, self._transposable))
        return self

    def _chosen(self, scores: Tensor | None, transposable: bool) -> Tensor:
        scores = self.weight.detach().abs() if scores is None else scores
        if scores.shape != self.weight.shape:
            raise InvalidArgumentError(
                f"scores: shape {tuple(self.weight.shape)} expected, got {tuple(scores.shape)}"
            )
        return two_of_four(scores, transposable=transposable)

    @torch.no_grad()
    def plain_values(self) -> Tensor:
        """What products multiply by: a copy [nnz, bn, bk], zero where a mask says so, without gradient."""
        check_whole(self, "plain_values")
        if self._storage == "plain":
            weight = self.weight.detach()
            return weight.clone() if self.mask is None else masked(weight, self.mask)
        return expand(self.weight, self.metadata, self.scales, self._dtype)

    @checked
    @torch.no_grad()
    def to_storage(self, storage: str, *, per: str = "row") -> BlockSparseLinear:
        """Stores the weight in another way, in place.

        ``weight`` becomes another Parameter, so optimizers have to be built again; only "plain" has a
        gradient, which a weight that was frozen does not get back. `storage_error` says afterwards what got
        lost.

        Args:
            storage: "plain"; "compressed": the kept half of 2:4, and metadata; "int8" or "float8_e4m3fn":
                8 bits and scales, of 2:4 the kept half alone.
            per: of 8 bits, what has a scale of its own: "row" of a block or "block".

        Returns:
            The layer.

        Raises:
            InvalidArgumentError: another storage, or one that is for 2:4; the weight is not finite, for 8
                bits.
            UnsupportedError: the weight is sharded, or offloaded by Accelerate.
        """
        check_whole(self, "to_storage")
        if self.weight.is_meta and hasattr(self, "_hf_hook"):  # which brings back the weight as it was
            raise UnsupportedError("to_storage: its weight is offloaded; load the model without")
        check_storage(storage, self._nm)
        if storage == self._storage and (self.scales is None or self.scales.dim() == 1 + (per == "row")):
            return self
        if self._storage == "plain":
            self._thaws = self.weight.requires_grad
        if self.weight.is_meta:
            self._storage = storage
            like = torch.empty(0, dtype=self._dtype, device="meta")
            self._allocate(self.col_indices.shape[0], like, per == "row")
            return self
        plain = self.plain_values()
        mask = self.kept_mask()
        values, stored = stored_as(plain, mask, storage, per)
        self._storage, self._dtype = storage, plain.dtype
        self.weight = nn.Parameter(values, self._has_gradient())
        self._keep(stored)
        now = self.plain_values()
        norm = torch.linalg.vector_norm(plain, dtype=torch.float64)
        lost = torch.linalg.vector_norm(now.double() - plain.double())
        self._storage_error = float(lost / norm) if float(norm) > 0 else 0.0
        return self

    @property
    def storage_error(self) -> float:
        """What the last `to_storage` lost: the Frobenius norm of what W changed by, over that of W."""
        return self._storage_error

    def kept_mask(self) -> Tensor | None:
        """Return the mask of 2:4 [nnz, bn, bk], however it is stored; None without 2:4."""
        if self._nm is None or self.mask is not None:
            return self.mask
        ones = torch.ones(self.weight.shape, dtype=torch.float32, device=self.weight.device)
        return expand(ones, self.metadata) != 0

    def _check_trainable(self, method: str) -> None:
        if self._storage != "plain":
            raise UnsupportedError(
                f"{method}: the storage 'plain' expected, got {self._storage!r}; call to_storage('plain')"
            )

    def _forms(
        self, nnz: int, block_shape: tuple[int, int], row_scales: bool = True
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the weight, and of what is stored with it, for so many blocks."""
        return forms_of(nnz, block_shape, self._nm, self._storage, self._dtype, row_scales)

    def _allocate(self, nnz: int, like: Tensor, row_scales: bool = True) -> None:
        forms = self._forms(nnz, self._block_shape, row_scales)
        shape, dtype = forms.pop("weight")
        self.weight = nn.Parameter(like.new_empty(shape, dtype=dtype), self._has_gradient())
        self._keep({name: like.new_zeros(size, dtype=dtype) for name, (size, dtype) in forms.items()})

    def forms(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the weight, and of what is stored with it, by name."""
        spec = self.spec
        return forms_of(spec.nnz, spec.block_shape, spec.nm, spec.storage, spec.dtype, spec.scales != "block")

    def update_spec(self, *, dtype: torch.dtype) -> None:
        """Change what the layer says of its tensors, which are the caller's to change."""
        self._dtype = dtype

    def _has_gradient(self) -> bool:
        return self._storage == "plain" and self._thaws

    def freeze(self) -> None:
        """Freeze the weight for good, also if the weight is to be stored plain."""
        self._thaws = False
        self.weight.requires_grad_(False)

    def _keep(self, stored: Mapping[str, Tensor]) -> None:
        """Makes these the buffers beside the weight; torch.export takes none after one that is None."""
        for name in sorted(STORED_NAMES, key=lambda name: name not in stored):
            self._buffers.pop(name, None)
            self.register_buffer(name, stored.get(name))

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
            raise InvalidArgumentError(f"pattern: a BlockPattern expected, got {type(other).__name__}")
        mine = self._shape, self._block_shape, self.col_indices.shape[0]
        if (other.shape, other.block_shape, other.nnz) != mine:
            raise InvalidArgumentError(
                f"pattern: shape {mine[0]} in blocks of {mine[1]} with {mine[2]} of them kept expected, as "
                f"the weight has them, got {other.shape} in {other.block_shape} with {other.nnz}"
            )
        if not self.col_indices.is_meta:
            BlockPattern.from_index(self.index(), self._updated).update_(other)

    @property
    def policy(self) -> str:
        """Whether products are computed "sparse", "dense" or as "auto" decides, see `functional.linear`."""
        return self._policy

    @policy.setter
    def policy(self, policy: str) -> None:
        check_policy(policy)
        self._policy = policy

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bn, bk): rows (out) and columns (in) of a block."""
        return self._block_shape

    @property
    def density(self) -> float:
        """Kept fraction of the blocks."""
        (out_features, in_features), (bn, bk) = self._shape, self._block_shape
        return self.col_indices.shape[0] * bn * bk / (out_features * in_features)

    @checked
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws weight and bias anew, uniformly from ±1/√fan_in, and the pattern if there is none yet.

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
        if self.weight.is_meta:
            return
        on_cpu = generator is not None and generator.device.type == "cpu"
        for_pattern, shared = generator if on_cpu else None, is_sharded(self.weight)
        if shared:
            self._check_trainable("reset_parameters of a sharded layer")
            for_pattern, generator = _common_generators(self.weight, generator)
        if self.origin.source is Source.MISSING:
            self.pattern = self._random_pattern(for_pattern)
            source = Source.SHARED if _is_everywhere(self.weight) else Source.OWN
            self.origin = PatternOrigin(source, self.index())
        bn, bk = self._block_shape
        fan_in = self.crow_indices.diff() * bk
        if self._nm is not None:
            fan_in = fan_in // 2
        bound = torch.where(fan_in > 0, fan_in.rsqrt(), 0.0)
        block_rows, _ = self.pattern.block_indices()
        storage = self._storage
        if storage != "plain":
            self._storage = "plain"
            self._allocate(len(block_rows), self.weight.new_empty(0, dtype=self._dtype))
        drawn = _draw(self.weight, bound[block_rows, None, None], generator)
        if self.mask is not None:
            _fill(self.mask, two_of_four(drawn.abs(), transposable=self._transposable))
        if not shared:
            self.to_storage(storage)
        if self.bias is not None:
            _draw(self.bias, bound.repeat_interleave(bn, output_size=self.out_features), generator)

    def _random_pattern(self, generator: torch.Generator | None) -> BlockPattern:
        if self.shard is not None:
            return self.shard.random(self.index(), generator)
        nnz = self.col_indices.shape[0]
        return BlockPattern.random(self._shape, block_shape=self._block_shape, nnz=nnz, generator=generator)

    def forward(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: str = "none",
        feature_major_output: bool = False,
    ) -> Tensor:
        """Computes y = x Wᵀ + bias from the kept blocks; all else is as in `functional.linear`.

        Args:
            x: [..., in_features].
            residual: [..., out_features], added to the result, or None.
            gate: [..., out_features], by which the result is multiplied in the place of a residual, or None.
            activation: of the result, or of the gate where there is one.
            feature_major_output: the layout of the result; that of tensor parallelism is row-major always.

        Returns:
            y [..., out_features].
        """
        if self.origin.pending:
            self.validate_pattern()
        try:
            if gate is not None or activation != "none":
                activation_code(activation)
                check_one(residual, gate)
                if self._needs_own_product():
                    y = self._product(x, None, None, "none", feature_major_output)
                    y, residual, gate = autocast(y, residual, gate)
                    return combined(y, activation, residual, gate)
            return self._product(x, residual, gate, activation, feature_major_output)
        except InvalidPatternError as error:
            raise InvalidPatternError(
                f"{error}; something has written to the buffers of BlockSparseLinear({self.extra_repr()}), "
                "as averages and conversions of all buffers do"
            ) from error
        except UnsupportedError:
            raise
        except Exception:  # types are looked at only now, which takes calls that are right no time
            check_types(BlockSparseLinear.forward, locals())
            raise

    def _product(
        self,
        x: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        activation: str,
        feature_major_output: bool,
    ) -> Tensor:
        if self.shard is not None:
            return self.shard.linear(self, x, residual)
        parameters: dict[str, Any] = self._parameters
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrizations and the like put attributes in their places
            _refuse_norms(self)
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
            y = self._masked_linear(x, weight, mask, index, bias, residual, feature_major_output)
        else:
            stored, layout = (buffers["metadata"], buffers["scales"]), feature_major_output
            y = linear_on(x, weight, index, bias, activation, residual, layout, self._policy, stored, gate)
        if beside is not None:
            # Only now: with it comes PyTorch's compiler, which takes long to import.
            from .._ops.main_grad import add_gradient, add_gradient_uncompiled

            y = (add_gradient_uncompiled if is_compiling() else add_gradient)(y, x, *beside, index)
        return y if self.observe is None else self.observe(y, x)

    def _needs_own_product(self) -> bool:
        """Whether something looks at the product itself, or at its gradient, before what is made of it."""
        beside = getattr(self.weight, "main_grad", None)
        lookers = self.shard, self.observe, self._buffers["mask"], beside
        return any(each is not None for each in lookers)

    def _masked_linear(
        self,
        x: Tensor,
        weight: Tensor,
        mask: Tensor,
        index: Index,
        bias: Tensor | None,
        residual: Tensor | None,
        layout: bool = False,
    ) -> Tensor:
        """Of plain 2:4. Masked anew in every call, but for `pack`: what is written is not always seen."""
        if is_plain((x, weight, mask)) and weight.is_cpu and not records_gradient((weight,)):
            pattern = prepared(index)
            if pattern.packs:
                packed = pattern.plain.follow(masked, weight, mask)
                return linear_on(x, packed, index, bias, "none", residual, layout, self._policy)
        x, weight, bias, residual = autocast(x, weight, bias, residual)
        if self._policy != "sparse" or not multiplies_compressed(x, index):
            zeroed = straight_through(weight, mask)
            return linear_on(x, zeroed, index, bias, "none", residual, layout, self._policy)
        compressed, metadata = COMPRESS(weight.detach(), mask, False)
        if not records_gradient((weight,)):
            stored = metadata, None
            return linear_on(x, compressed, index, bias, "none", residual, layout, stored=stored)
        transposed: tuple[Tensor | None, Tensor | None] = None, None
        if self._transposable and x.requires_grad:
            transposed = COMPRESS(weight.detach(), mask, True)
        kept = compressed, metadata, *transposed
        return linear_through(x, weight, index, bias, residual, kept, layout)

    @checked
    def pack(self, enabled: bool = True) -> BlockSparseLinear:
        """Keeps a copy of the weight in the form in which kernels multiply it, for inference.

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
            prepared(index).keep_packed(enabled)
        return self

    def extra_repr(self) -> str:
        """Sizes, density and whatever else differs from its default, for ``print(layer)``."""
        text = representation(self) + ("" if self.policy == "sparse" else f", policy={self.policy!r}")
        text += "" if self._nm is None else f", nm={self._nm}"
        text += ", transposable=True" if self._transposable else ""
        return text + ("" if self._storage == "plain" else f", storage={self._storage!r}")

    def index(self) -> Index:
        """Return the pattern as operators take it."""
        buffers: dict[str, Any] = self._buffers  # __getattr__ takes longer
        return Index(
            buffers["crow_indices"], buffers["col_indices"], buffers["slot"], self._shape, self._block_shape
        )

    def _values_shape(self) -> tuple[int, int, int]:
        """(nnz, bn, bk) as the buffers have it, whatever stands for the weight."""
        return self.col_indices.shape[0], *self._block_shape

    # Where the pattern comes from.

    def declare_shared(self) -> None:
        """Record that all processes have this pattern."""
        self.origin = PatternOrigin(Source.SHARED, self.index())

    def lacks_pattern(self) -> bool:
        """Return True if the layer has no pattern yet; may wait for a GPU."""
        return self.origin.lacks_pattern(self.index())

    def _updated(self) -> None:
        self.origin = self.origin.updated(self.index())

    def validate_pattern(self) -> None:
        """Raise where a step would go wrong because the pattern is missing, or others may have another."""
        missing = self.origin.source is Source.MISSING
        if missing and not self.col_indices.is_meta:
            self._check_filled()
        elif not missing and self.training and torch.is_grad_enabled() and has_peers():
            self._check_shared()

    @constant_when_compiled
    def _check_filled(self) -> None:
        self.origin = self.origin.filled(self.index())

    @constant_when_compiled
    def _check_shared(self) -> None:
        self.origin = self.origin.agreed(self.index())

    @torch.no_grad()
    def keep_blocks(self, slots: Tensor) -> None:
        """Leaves out all blocks but those at ``slots`` [n], ascending, which get the slots 0 to n - 1.

        The weight stays the same Parameter, and its gradient goes with it; the states that an optimizer has
        of it are the caller's. On a CUDA device the host does not wait. All of the pattern's tensors are new,
        so that a graph of autograd made before keeps the pattern it was made with, and refuses to go on.
        """
        index, gradient = self.index(), self.weight.grad
        rows, columns = self.pattern.block_indices()
        kept = index_of((rows * self.pattern.grid[1] + columns)[slots], index)
        _resize(self.weight, self.weight.detach()[slots])
        if gradient is not None:
            self.weight.grad = gradient[slots]
        if self.mask is not None:
            self._buffers["mask"] = self.mask[slots]
        for name in INDEX_NAMES:
            self._buffers[name] = getattr(kept, name)
        self._updated()

    def take_over(self, other: BlockSparseLinear) -> None:
        """Takes over form and tensors of another layer of this shape; hooks and mode stay."""
        for name in _FORM:
            setattr(self, name, getattr(other, name))

    # What torch.nn.Module calls to move, save, copy and load a layer.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSparseLinear:
        before: dict[str, Any] = {name: self._buffers[name] for name in (*INDEX_NAMES, *STORED_NAMES)}
        weight = self.weight.detach() if self._storage in QUANTIZED_BY_NAME else None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new: Any = self._buffers[name]
            # to_empty leaves them uninitialised, type() may round them.
            if new is not old:
                self._buffers[name] = _as_before(new, old)
        if weight is not None:
            if self.weight.dtype != weight.dtype:
                kept = _as_before(self.weight.detach(), weight)
                if is_sharded(kept):  # whose dtype cannot be set
                    self.weight = nn.Parameter(kept, requires_grad=False)
                else:
                    self.weight.data = kept
            self._dtype = fn(torch.empty(0, dtype=self._dtype, device=weight.device)).dtype
        else:
            self._dtype = self.weight.dtype
        empty = before["slot"].is_meta or self.slot.is_meta
        self.origin = PatternOrigin(Source.MISSING if empty else self.origin.source, self.index())
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # torch.distributed.checkpoint reads into a state dict; its zeros are no pattern for who loads them.
        if self.origin.source is Source.MISSING and not is_sharded(self.weight):
            self.validate_pattern()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "observe"}
        return {**state, "origin": self.origin.source}  # the versions of copied tensors begin anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.origin = PatternOrigin(state["origin"], self.index())

    def _load_from_state_dict(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {
            name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)
        }
        try:
            pattern = self._checked_pattern(own)
        except (ValueError, TypeError, RuntimeError) as error:
            error_msgs.append(f"{prefix}{error}")
            for name in [name for name in state_dict if name.startswith(f"{prefix}parametrizations.")]:
                del state_dict[name]  # PyTorch's copy: what parametrizes the weight is not loaded, either
            return
        if pattern is not None:
            self.make_room(pattern, own.get("scales"))
        with nullcontext() if pattern is None or self.slot.is_meta else update_of(self.index()):
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        if pattern is not None and not self.slot.is_meta:
            for name in INDEX_NAMES:  # those assigned may have another dtype
                if self.get_buffer(name).dtype != torch.int32:
                    self._buffers[name] = getattr(pattern, name).to(self.slot.device)
            self.origin = PatternOrigin.loaded(self.index())

    def _checked_pattern(self, state: Mapping[str, Any]) -> BlockPattern | None:
        """The pattern of a saved layer, once everything saved is known to fit together; None without one."""
        known = ("weight", "bias", *INDEX_NAMES, *STORED_NAMES)
        for name in known:
            if name in state and not isinstance(state[name], Tensor):
                raise InvalidArgumentError(f"{name}: a tensor expected, got {type(state[name]).__name__}")
        # With parametrizations and the like the weight has other names.
        weights = [name for name in state if name.startswith(("weight", "parametrizations.weight."))]
        arrays = {name: state[name] for name in INDEX_NAMES if name in state}
        own = self._values_shape()
        pattern, shape = None, own
        if arrays or weights:
            for name in INDEX_NAMES:
                if name not in state:
                    there = next(iter([*weights, *arrays]))
                    raise InvalidArgumentError(
                        f"{name}: missing, but {there} is there; a weight is loaded with its pattern"
                    )
            weight = state.get("weight")
            if weight is not None and weight.dim() != 3:
                raise InvalidArgumentError(f"weight: [nnz, bn, bk] expected, got shape {tuple(weight.shape)}")
            self._check_stored(state)
            block_shape = self._block_shape
            if weight is not None:
                bn, columns = weight.shape[1:]
                block_shape = bn, columns * (1 if self.metadata is None else 2)
            crow, col, slot = (arrays[name] for name in INDEX_NAMES)
            pattern = checked_pattern(Index(crow, col, slot, self._shape, block_shape))
            shape = (pattern.nnz, *pattern.block_shape)
            if shape != own and (weight is None or type(self._parameters.get("weight")) is not nn.Parameter):
                raise InvalidArgumentError(
                    f"col_indices: {own[0]} blocks of {own[1:]} expected, since the weight is not a "
                    f"plain parameter whose shape can change, got {shape[0]} of {shape[1:]}"
                )
        if pattern is not None and self.shard is not None:
            self.shard.check(pattern)
        scales = state.get("scales")
        forms = self._forms(shape[0], shape[1:], scales is None or scales.dim() != 1)
        shapes = {name: form for name, (form, _) in forms.items()}
        for name, expected in (*shapes.items(), ("bias", (self.out_features,))):
            if name in state and state[name].shape != expected:
                raise InvalidArgumentError(
                    f"{name}: shape {expected} expected, got {tuple(state[name].shape)}"
                )
            mine = self._parameters.get(name, self._buffers.get(name))
            if name in state and mine is not None and is_sharded(mine) and not is_sharded(state[name]):
                raise InvalidArgumentError(
                    f"{name}: a DTensor expected, as several processes have parts of the layer's, got a "
                    "plain tensor; torch.distributed.checkpoint has set_model_state_dict for it"
                )
        return pattern

    def _check_stored(self, state: Mapping[str, Any]) -> None:
        """That what is to be loaded is stored as the layer is."""
        own = f"the layer has nm={self._nm} and storage {self._storage!r}"
        for name in STORED_NAMES:
            if (name in state) != (self._buffers[name] is not None):
                given = "there" if name in state else "missing"
                raise InvalidArgumentError(
                    f"{name}: {given}, but {own}; call to_storage or set_nm to have them alike"
                )
        weight = state.get("weight")
        dtypes = {self.weight.dtype if weight is None else weight.dtype, self.weight.dtype}
        if len(dtypes) > 1 and not dtypes.isdisjoint(QUANTIZED_BY_NAME.values()):
            raise InvalidArgumentError(
                f"weight: {self.weight.dtype} expected, got {state['weight'].dtype}; {own}"
            )

    def make_room(self, pattern: BlockPattern, scales: Tensor | None = None) -> None:
        """Give the same Parameter and the buffers the sizes that a pattern needs."""
        row_scales = scales is None or scales.dim() != 1
        before, self._block_shape = self._values_shape(), pattern.block_shape
        for name, (shape, _) in self._forms(pattern.nnz, pattern.block_shape, row_scales).items():
            tensor: Tensor = getattr(self, name)
            if tensor.shape != shape and name == "weight":
                _resize(self.weight, self.weight.new_empty(shape))
            elif tensor.shape != shape:
                self._buffers[name] = _zeros_like(tensor, shape)
        if before == (pattern.nnz, *pattern.block_shape):
            return
        for (
            name
        ) in INDEX_NAMES:  # all of them, so that graphs of autograd keep the pattern they were made with
            self._buffers[name] = self.get_buffer(name).new_empty(getattr(pattern, name).shape)


def _check_size(name: str, value: object, size: int) -> None:
    if not isinstance(value, int) or value != size:
        raise InvalidArgumentError(
            f"{name} must stay {size}, as weight and pattern have it, got {shown(value)}; make another layer"
        )


def _resize(parameter: nn.Parameter, data: Tensor) -> None:
    """Gives a parameter data of another shape, and no gradient.

    As long as a graph lives that was recorded before, such as that of the last step's loss, PyTorch takes
    gradients for the shape of that time. It forgets this shape where the dtype changes.
    """
    watch(parameter)
    parameter.grad = None
    other = torch.float16 if data.dtype != torch.float16 else torch.float32
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def _as_before(new: Tensor, old: Tensor) -> Tensor:
    """What was moved, with the contents and the dtype it had; zeros, which are no pattern, from meta."""
    return torch.zeros_like(new, dtype=old.dtype) if old.is_meta else old.to(new.device, copy=True)


def _refuse_norms(layer: nn.Module) -> None:
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


_OF_MATRICES = (
    "torch.nn.utils.parametrizations.",  # spectral_norm, weight_norm, orthogonal
    "torch.nn.utils.spectral_norm.",
    "torch.nn.utils.weight_norm.",
    "torch.nn.utils.prune.RandomStructured",
    "torch.nn.utils.prune.LnStructured",
)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is Transformers' Conv1D, a linear layer with weight [in_features, out_features]."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def dense_weight(linear: Any) -> Tensor:
    """W [out_features, in_features] of a dense layer: a view without gradient, transposed where needed."""
    weight: Tensor = linear.weight.detach()
    return weight.T if is_conv1d(linear) else weight


def _as_nm(nm: Sequence[int] | None) -> tuple[int, int] | None:
    return None if nm is None else (nm[0], nm[1])


def representation(layer: Any) -> str:
    """Of any block-sparse layer, in its repr."""
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, "
        f"bias={layer.bias is not None}, nnz={len(layer.weight)}, density={layer.density:.4g}, "
        f"block_shape={layer.block_shape}, dtype={layer.weight.dtype}"
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
        raise InvalidArgumentError("linear: on the meta device there is nothing to score, give pattern")
    if scores is None:
        if bool(weight.isnan().any()):
            raise InvalidArgumentError("linear: its weight holds NaN, which cannot be ranked; give pattern")
        return BlockPattern.from_dense(weight, block_shape=block_shape, density=density, parts=parts)
    grid = check_shapes(weight.shape, block_shape)[2]
    if scores.shape == weight.shape:
        precision = torch.promote_types(scores.dtype, torch.float32)
        scores = blocks_of(scores, block_shape).sum((2, 3), dtype=precision)
    if scores.shape != grid:
        raise InvalidArgumentError(
            f"scores: shape {grid} or {tuple(weight.shape)} expected, got {tuple(scores.shape)}"
        )
    return BlockPattern.from_scores(scores, block_shape=block_shape, density=density, parts=parts)


def _draw(parameter: nn.Parameter, bound: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fills a parameter uniformly from ±bound, which is broadcast; gives the whole of it."""
    device = parameter.device if generator is None else generator.device
    numbers = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    numbers.uniform_(-1, 1, generator=generator).mul_(bound.to(numbers))
    _fill(parameter, numbers)
    return numbers.to(parameter.device)


@torch.no_grad()
def _fill(target: Tensor, whole: Tensor) -> None:
    """Writes a whole tensor; of a sharded one what this process has of it."""
    if not is_sharded(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = (getattr(target, name) for name in ("device_mesh", "placements"))
    here = whole.to(target.device)
    everywhere = DTensor.from_local(here, mesh, [Replicate()] * mesh.ndim, run_check=False)
    target.copy_(everywhere.redistribute(placements=placements))


def check_whole(layer: BlockSparseLinear, method: str) -> None:
    """Raise UnsupportedError unless this process has the whole weight, as a parameter."""
    _refuse_norms(layer)
    if is_sharded(layer.weight):
        raise UnsupportedError(
            f"{method}: a whole weight expected, got one that several processes have parts of; call it "
            "before fully_shard or parallelize_module"
        )


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; not every build of PyTorch has the class."""
    return hasattr(tensor, "device_mesh")


def _zeros_like(tensor: Any, shape: tuple[int, ...]) -> Tensor:
    """Of another shape; of a sharded one cut alike, which those of `Tensor.new_zeros` are not."""
    if not is_sharded(tensor):
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    from torch.distributed.tensor import zeros

    mesh, placements = tensor.device_mesh, tensor.placements
    return zeros(shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)


def _is_everywhere(tensor: Any) -> bool:
    """Whether all processes have a part of it."""
    return is_sharded(tensor) and tensor.device_mesh.size() == torch.distributed.get_world_size()


def _common_generators(
    sharded: Any, generator: torch.Generator | None
) -> tuple[torch.Generator, torch.Generator]:
    """On the CPU and on the tensor's device, of one seed in all processes that have a part of it."""
    of = generator.device if generator is not None else "cpu"
    seed = torch.randint(2**62, (), generator=generator, device=of).to(sharded.device)
    for dim in range(sharded.device_mesh.ndim):
        group = sharded.device_mesh.get_group(dim)
        torch.distributed.broadcast(seed, torch.distributed.get_global_rank(group, 0), group)
    devices = torch.device("cpu"), sharded.device
    on_cpu, on_device = (torch.Generator(device).manual_seed(int(seed)) for device in devices)
    return on_cpu, on_device
