"""Block-sparse drop-in replacements of `torch.nn.Linear`.

The file is long because it is one class, most of it documentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._arguments import check_types_after, checked
from .._checks import check_one
from .._ops.activations import activation_code
from .._ops.autocast import autocast
from .._ops.autograd import records_gradient
from .._ops.linear import combined, linear_on
from .._ops.scaled import quantized_linear_on
from .._runtime.lookup import prepared
from .._runtime.private import refuse_fakes, with_normal_tensors
from ..config import LayerSpec, as_nm, check_nm
from ..errors import InvalidArgumentError, InvalidPatternError
from ..pattern.block_pattern import BlockPattern
from ..storage.registry import storage_of
from . import convert, initial
from .checks import refuse_norms
from .masks import masked_linear
from .origin import AVERAGES
from .parts import cut, from_state
from .stored import StoredWeight


class BlockSparseLinear(StoredWeight):
    """y = x Wᵀ + bias, where only some blocks of W [out_features, in_features] are kept.

    Takes x [..., in_features] and gives [..., out_features], like `torch.nn.Linear`.

    The int32 buffers `crow_indices`, `col_indices` and `slot` are the pattern, see `BlockPattern`;
    `layer.pattern` is a view of them, whose `update_` changes them in place. A state_dict with another
    pattern, even of other size or block shape, can be loaded: `weight` then changes its shape, and the next
    step of an optimizer that keeps states of another number of blocks raises `PatternChangedError`.

    Where processes train one model together, all must have one pattern. DistributedDataParallel sees to it
    with its default arguments, otherwise `tilesparse.parallel.synchronize_patterns` does: the first training
    step of a layer that has drawn or changed its pattern by itself raises where neither has.

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

    @checked
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
        return convert.from_spec(cls, spec, bias, device)

    @classmethod
    @checked
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

    @checked
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
    @checked
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
        return convert.from_linear(cls, linear, density, **stored, **blocks, **options)

    def to_linear(self) -> nn.Linear:
        """Return the dense layer with the same weight, zero where no block is kept; parameters are copies."""
        return convert.to_linear(self)

    def to_semi_structured(self) -> Tensor:
        """Return the weight [out_features, in_features] as PyTorch's 2:4 tensor, for a pattern without gaps.

        Raises:
            UnsupportedError: the layer is not 2:4, blocks are missing, or PyTorch cannot make one here.
        """
        return convert.to_semi_structured(self)

    @checked
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
        initial.reset(self, generator)

    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: str = "none",
        feature_major_output: bool = False,
    ) -> Tensor:
        """Compute y = x Wᵀ + bias from the kept blocks; all else is as in `functional.linear`.

        Args:
            input: x [..., in_features].
            residual: [..., out_features], added to the result, or None.
            gate: [..., out_features], by which the result is multiplied in the place of a residual, or None.
            activation: of the result, or of the gate where there is one.
            feature_major_output: the layout of the result; that of tensor parallelism is row-major always.

        Returns:
            y [..., out_features].
        """
        if self.merged is not None and activation == "none" and not feature_major_output:
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
                    y = self._product(input, None, None, "none", feature_major_output)
                    y, residual, gate = autocast(y, residual, gate)
                    return combined(y, activation, residual, gate)
            return self._product(input, residual, gate, activation, feature_major_output)
        except InvalidPatternError as error:
            raise InvalidPatternError(
                f"{error}; something has written to the buffers of BlockSparseLinear({self.extra_repr()}): "
                f"{AVERAGES}"
            ) from error
        except Exception as error:
            check_types_after(error, BlockSparseLinear.forward, locals())
            raise

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
        elif self._activations is not None:
            of_y = bias, activation, residual, column_major, self._policy, gate, True, buffers["metadata"]
            y = quantized_linear_on(x, weight, buffers["scales"], index, *of_y)
        else:
            stored = buffers["metadata"], buffers["scales"]
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

    @checked
    def pack(self, enabled: bool = True) -> BlockSparseLinear:
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
            prepared(index).keep_packed(enabled)
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
