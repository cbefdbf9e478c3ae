"""Block-sparse drop-in replacements of `torch.nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import functional
from .errors import InvalidArgumentError, InvalidPatternError
from .matrix import BlockSparseMatrix
from .pattern import BlockPattern, blocks_of

# The arrays of a pattern, which every layer also holds as buffers for checkpoints and broadcasts.
_ARRAYS = ("row_ptr", "col_idx", "slot")


class BlockSparseLinear(nn.Module):
    """y = x Wᵀ + bias, where only some blocks of W [out_features, in_features] are kept.

    Takes x [..., in_features] and gives [..., out_features], like `torch.nn.Linear`.

    `pattern` says which blocks there are; the int32 buffers `row_ptr`, `col_idx` and `slot` are its
    copy in ``state_dict()``. Each follows the other: a new or updated `pattern` is written to the
    buffers, and buffers changed in place (as by the broadcast of DistributedDataParallel, where
    ``broadcast_buffers=False`` saves comparing them in every step) replace the pattern. A state_dict
    with another pattern, even of other size or block shape, can be loaded: `weight` then changes its
    shape, and optimizers that already saw it have to be built again.

    Args:
        in_features: size of the last dimension of x, a multiple of bk.
        out_features: size of the last dimension of y, a multiple of bn.
        bias: whether to add a learned bias [out_features].
        density: fraction of the blocks to keep, drawn at random.
        block_shape: (bn, bk), rows (out) and columns (in) of a block; each 16, 32, 64 or 128.
        pattern: the blocks to keep; `density` and `block_shape` are then taken from it.
        expand: whether to compute with the weight written out dense in every call. Parameters, their
            gradients and checkpoints are the same; it pays where the dense layer is the faster one.
        device: of the parameters and buffers.
        dtype: of the parameters: float64, float32, float16 or bfloat16.
        generator: a CPU generator for the pattern and the initial values.

    Attributes:
        weight: Parameter [nnz, bn, bk], the kept blocks.
        bias: Parameter [out_features] or None.
        pattern: the `BlockPattern`.
        expand: as given; may be changed at any time, and is not part of ``state_dict()``.

    Raises:
        InvalidArgumentError: a size, the density or the block shape is not allowed, or `pattern` has
            another shape.
    """

    in_features: int
    out_features: int
    pattern: BlockPattern
    expand: bool
    weight: nn.Parameter
    bias: nn.Parameter | None
    row_ptr: Tensor
    col_idx: Tensor
    slot: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        density: float = 0.5,
        *,
        block_shape: Sequence[int] = (32, 32),
        pattern: BlockPattern | None = None,
        expand: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if pattern is None:
            pattern = BlockPattern.random(
                (out_features, in_features), block_shape=block_shape, density=density, generator=generator
            )
        elif pattern.shape != (out_features, in_features):
            raise InvalidArgumentError(
                f"pattern: shape {(out_features, in_features)} expected, got {pattern.shape}"
            )
        self.out_features, self.in_features = pattern.shape
        self.pattern = pattern
        self.expand = expand
        self.weight = nn.Parameter(torch.empty(pattern.nnz, *pattern.block_shape, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        for name in _ARRAYS:
            self.register_buffer(name, getattr(pattern, name).to(self.weight.device, copy=True))
        self._mark_synced()
        self.reset_parameters(generator)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        density: float = 0.5,
        *,
        block_shape: Sequence[int] = (32, 32),
        pattern: BlockPattern | None = None,
        scores: Tensor | None = None,
        expand: bool = False,
    ) -> BlockSparseLinear:
        """A layer with the best blocks of a dense one: same values, dtype, device and mode.

        Nothing is rescaled. Parameters are copied, with their ``requires_grad``.

        Args:
            linear: a `torch.nn.Linear`.
            density: fraction of the blocks to keep.
            block_shape: (bn, bk).
            pattern: the blocks to keep; `density` and `block_shape` are then taken from it.
            scores: what to keep, higher is better: one number per block [out_features / bn,
                in_features / bk], or one per weight [out_features, in_features], which are summed
                over each block. None scores blocks by their Frobenius norm.
            expand: whether the layer computes with the weight written out dense.

        Raises:
            InvalidArgumentError: `linear` is no `torch.nn.Linear` or cannot be cut into these blocks,
                `scores` has another shape, or there is nothing to score because `linear` is on the
                meta device.
        """
        if not isinstance(linear, nn.Linear):
            raise InvalidArgumentError(f"linear: torch.nn.Linear expected, got {type(linear).__name__}")
        weight, bias = linear.weight.detach(), linear.bias
        if pattern is None:
            pattern = _best_blocks(weight, scores, density, block_shape)
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias is not None,
            pattern=pattern,
            expand=expand,
            device="meta",
            dtype=weight.dtype,
        ).to_empty(device=weight.device)
        with torch.no_grad():
            layer.weight.copy_(BlockSparseMatrix.from_dense(weight, pattern).values)
            layer.weight.requires_grad_(linear.weight.requires_grad)
            if layer.bias is not None:
                layer.bias.copy_(bias)
                layer.bias.requires_grad_(bias.requires_grad)
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The dense layer with the same weight, zero where no block is kept; parameters are copies."""
        self._sync()
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        dense = BlockSparseMatrix(self.weight.detach(), self.pattern).to_dense()
        linear.weight = nn.Parameter(dense, self.weight.requires_grad)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return linear.train(self.training)

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bn, bk): rows (out) and columns (in) of a block."""
        return self.pattern.block_shape

    @property
    def density(self) -> float:
        """Kept fraction of the blocks."""
        return self.pattern.density

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws weight and bias anew, uniformly from ±1/√fan_in.

        This is the initialisation of `torch.nn.Linear` (Kaiming uniform with a = √5; He et al.,
        "Delving Deep into Rectifiers", 2015) with the fan-in that is left: each output counts the
        inputs of the blocks in its own block row, so that every output starts with the variance it
        would have in a dense layer. Outputs without any block get bias 0.

        Args:
            generator: drawn from on its own device, so equal on all devices; None is PyTorch's default
                generator of the layer's device.
        """
        if self.weight.is_meta:
            return
        bn, bk = self.block_shape
        fan_in = self.pattern.row_ptr.diff() * bk
        bound = torch.where(fan_in > 0, fan_in.rsqrt(), 0.0)
        block_rows, _ = self.pattern.block_indices()
        _draw(self.weight, bound[block_rows, None, None], generator)
        if self.bias is not None:
            _draw(self.bias, bound.repeat_interleave(bn), generator)

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """x [..., in_features] -> [..., out_features], to which a residual of that shape is added."""
        self._sync()
        return functional.linear(
            x, self.weight, self.pattern, self.bias, residual=residual, expand=self.expand
        )

    def extra_repr(self) -> str:
        return _representation(self) + (", expand=True" if self.expand else "")

    # Pattern and buffers. `_synced` is what they were when they last agreed: handle and version of the
    # pattern; and the buffers, held so that no other tensor can be taken for one, with their versions.

    def _mark_synced(self) -> None:
        buffers = {name: self.get_buffer(name) for name in _ARRAYS}
        arrays = [(name, array, _version(array)) for name, array in buffers.items()]
        self._synced = (self.pattern.handle, self.pattern.version, arrays)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _sync(self) -> None:
        """Carries a change of the pattern to the buffers, or one of the buffers to the pattern.

        A compiled forward does so only while it is traced.
        """
        handle, version, arrays = self._synced
        if self.pattern.handle != handle or self.pattern.version != version:
            self._write_buffers()
            return
        for name, array, array_version in arrays:
            if self._buffers[name] is not array or _version(array) != array_version:
                self._read_buffers()
                return

    def _read_buffers(self) -> None:
        if type(self.row_ptr) is not Tensor or self.row_ptr.is_meta:  # fake ones hold no numbers
            return
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        pattern = self._new_pattern(arrays, self.block_shape)
        if pattern.nnz != len(self.weight):
            raise InvalidPatternError(f"col_idx: {len(self.weight)} entries expected, got {pattern.nnz}")
        self.pattern = pattern
        self._mark_synced()

    def _new_pattern(self, arrays: Mapping[str, Tensor], block_shape: Sequence[int]) -> BlockPattern:
        """A pattern of these arrays, or the present one if it has the same content."""
        row_ptr, col_idx, slot = (arrays[name] for name in _ARRAYS)
        shape = (self.out_features, self.in_features)
        pattern = BlockPattern(row_ptr, col_idx, shape=shape, block_shape=block_shape, slot=slot)
        return self.pattern if pattern == self.pattern else pattern

    def _write_buffers(self) -> None:
        for name in _ARRAYS:
            buffer, array = self._buffers[name], getattr(self.pattern, name)
            assert buffer is not None
            fits = buffer.shape == array.shape and buffer.dtype == array.dtype
            if fits and not buffer.is_inference():
                buffer.copy_(array)
            else:
                self._buffers[name] = array.to(buffer.device, copy=True)
        self._mark_synced()

    # What torch.nn.Module calls to move, save, copy and load a layer.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSparseLinear:
        self._sync()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._write_buffers()  # to_empty leaves them uninitialised, type() may round them
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._sync()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getstate__(self) -> dict[str, Any]:
        self._sync()
        return self.__dict__

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {name: state_dict[prefix + name] for name in self._own_names() if prefix + name in state_dict}
        try:
            pattern = self._checked_pattern(own)
        except (ValueError, TypeError, RuntimeError) as error:
            error_msgs.append(f"{prefix}{error}")
            return
        if pattern is not self.pattern:
            self._adopt(pattern)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if "col_idx" in own:
            self._mark_synced()

    def _own_names(self) -> list[str]:
        return ["weight", *(["bias"] if self.bias is not None else []), *_ARRAYS]

    def _checked_pattern(self, state: Mapping[str, Any]) -> BlockPattern:
        """The pattern of a saved layer, once everything saved is known to fit together."""
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise InvalidArgumentError(f"{name}: a tensor expected, got {type(value).__name__}")
        arrays = {name: state[name] for name in _ARRAYS if name in state}
        pattern = self.pattern
        if arrays:
            missing = [name for name in ("weight", *_ARRAYS) if name not in state]
            if missing:
                raise InvalidArgumentError(f"{missing[0]}: missing, but {next(iter(arrays))} is there")
            if state["weight"].dim() != 3:
                raise InvalidArgumentError(
                    f"weight: [nnz, bn, bk] expected, got shape {tuple(state['weight'].shape)}"
                )
            pattern = self._new_pattern(arrays, state["weight"].shape[1:])
        expected = {"weight": (pattern.nnz, *pattern.block_shape), "bias": (self.out_features,)}
        for name, shape in expected.items():
            if name in state and state[name].shape != shape:
                raise InvalidArgumentError(f"{name}: shape {shape} expected, got {tuple(state[name].shape)}")
        return pattern

    def _adopt(self, pattern: BlockPattern) -> None:
        """Takes another pattern; the same Parameter gets room for its blocks."""
        shape = (pattern.nnz, *pattern.block_shape)
        if self.weight.shape != shape:
            self.weight.grad = None
            self.weight.data = self.weight.new_empty(shape)
        self.pattern = pattern
        self._write_buffers()


class PseudoBlockSparseLinear(nn.Module):
    """The same function as a `BlockSparseLinear`, in plain PyTorch: slow, and simple to trust.

    The dense weight is built from the kept blocks in every call, so that results, gradients and
    optimizer states of the two layers correspond one to one. Use it to tell whether a problem lies
    in the sparse kernels or elsewhere.

    Args:
        layer: copied: parameters with their ``requires_grad``, device, dtype and mode.

    Attributes:
        weight: Parameter [nnz, bn, bk].
        bias: Parameter [out_features] or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    block_rows: Tensor
    block_cols: Tensor

    def __init__(self, layer: BlockSparseLinear) -> None:
        super().__init__()
        layer._sync()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.block_shape, self.density = layer.block_shape, layer.density
        self._grid = layer.pattern.grid
        for name, parameter in (("weight", layer.weight), ("bias", layer.bias)):
            if parameter is not None:
                parameter = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            self.register_parameter(name, parameter)
        for name, indices in zip(("block_rows", "block_cols"), layer.pattern.block_indices(), strict=True):
            self.register_buffer(name, indices.to(layer.weight.device))
        self.train(layer.training)

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """x [..., in_features] -> [..., out_features], to which a residual of that shape is added."""
        blocks = self.weight.new_zeros(*self._grid, *self.block_shape)
        blocks = blocks.index_put((self.block_rows, self.block_cols), self.weight)
        y = F.linear(x, blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1), self.bias)
        return y if residual is None else y + residual

    def extra_repr(self) -> str:
        return _representation(self)


def _version(array: Tensor) -> int:
    """Counts changes in place, which are not counted in inference mode."""
    return -1 if array.is_inference() else array._version


def _representation(layer: BlockSparseLinear | PseudoBlockSparseLinear) -> str:
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, "
        f"bias={layer.bias is not None}, density={layer.density:.4g}, block_shape={layer.block_shape}"
    )


def _best_blocks(
    weight: Tensor, scores: Tensor | None, density: float, block_shape: Sequence[int]
) -> BlockPattern:
    if weight.is_meta and scores is None:
        raise InvalidArgumentError("linear: on the meta device there is nothing to score, give pattern")
    if scores is None:
        return BlockPattern.from_dense(weight, block_shape=block_shape, density=density)
    grid = BlockPattern.full(weight.shape, block_shape=block_shape).grid
    if scores.shape == weight.shape:
        precision = torch.promote_types(scores.dtype, torch.float32)
        scores = blocks_of(scores, block_shape).sum((2, 3), dtype=precision)
    if scores.shape != grid:
        raise InvalidArgumentError(
            f"scores: shape {grid} or {tuple(weight.shape)} expected, got {tuple(scores.shape)}"
        )
    return BlockPattern.from_scores(scores, block_shape=block_shape, density=density)


def _draw(parameter: nn.Parameter, bound: Tensor, generator: torch.Generator | None) -> None:
    """Fills a parameter uniformly from ±bound, which is broadcast."""
    device = parameter.device if generator is None else generator.device
    numbers = torch.empty_like(parameter, device=device, requires_grad=False)
    with torch.no_grad():
        parameter.copy_(numbers.uniform_(-1, 1, generator=generator).mul_(bound.to(numbers)))
