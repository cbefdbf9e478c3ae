"""One projection of all experts of a layer: their weights below each other, tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .._arguments import check_types_after, checked
from .._checks import check_block_shape, checked_count
from .._ops.autocast import autocast
from .._ops.grouped import grouped_linear_on
from .._ops.masks import straight_through
from ..config import check_experts
from ..errors import InvalidArgumentError, UnsupportedError
from ..pattern.block_pattern import BlockPattern
from ..storage.base import STORED_NAMES
from .joined import concatenate
from .linear import BlockSparseLinear


class ExpertsLinear(BlockSparseLinear):
    """y[t] = x[t] W_eᵀ + bias_e for the tokens t of each expert e, where only some blocks of W are kept.

    W [experts · out, in_features] has the weights of all experts below each other: one pattern, one tensor of
    values, and one bias [experts · out]. Experts may keep different numbers of blocks.

    It is a `BlockSparseLinear` to all that stores, moves, trains or loads one. What needs one weight for all
    tokens raises UnsupportedError: `from_linear`, `to_linear`, `to_semi_structured`, `cut`, and policies
    other than "sparse".

    Args:
        in_features: size of the last dimension of x.
        out_features: rows of W: those of all experts.
        bias: whether each expert has a bias.
        density: fraction of the blocks to keep of each expert, drawn at random.
        experts: how many.
        options: as of `BlockSparseLinear`.
    """

    of_experts = True

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        density: float = 0.5,
        *,
        experts: int,
        block_shape: int | Sequence[int] = (64, 64),
        pattern: BlockPattern | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        experts = checked_count("experts", experts)
        if pattern is None:
            out_features = checked_count("out_features", out_features)
            check_experts(experts, out_features, check_block_shape(block_shape)[0])
            shape = out_features, in_features
            drawn: Any = {"block_shape": block_shape, "density": density, "generator": generator}
            pattern = BlockPattern.random(shape, parts=(experts, 1), **drawn)
        super().__init__(in_features, out_features, bias, pattern=pattern, generator=generator, **options)
        self.update_spec(experts=experts)

    @classmethod
    @checked
    @torch.no_grad()
    def from_layers(cls, layers: Sequence[BlockSparseLinear]) -> ExpertsLinear:
        """Return the projection of experts that are layers of their own, see `concatenate`.

        Raises:
            InvalidArgumentError: layers differ in shape, storage, dtype, device or bias.
        """
        shapes = {(layer.spec.shape, layer.bias is not None) for layer in layers}
        if len(shapes) > 1:
            raise InvalidArgumentError(f"layers must have one shape and all or none a bias, got {shapes}")
        whole = concatenate(layers)
        spec = replace(whole.spec, experts=len(layers))
        made = cls.from_state(spec, whole.state_dict())
        assert isinstance(made, ExpertsLinear)
        made.weight.requires_grad_(layers[0].weight.requires_grad)
        if made.bias is not None and layers[0].bias is not None:
            made.bias.requires_grad_(layers[0].bias.requires_grad)
        return made.train(layers[0].training)

    @property
    def experts(self) -> int:
        """Number of experts."""
        assert self._experts is not None
        return self._experts

    def densities(self) -> Tensor:
        """Return the kept fraction of the blocks of each expert [experts]."""
        rows, columns = self.spec.grid
        ends = self.crow_indices[:: rows // self.experts]
        return ends.diff() / (rows // self.experts * columns)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: str = "none",
    ) -> Tensor:
        """Compute the product, with all else as in `functional.grouped_linear`.

        Args:
            x: [tokens, in_features], sorted by expert.
            offsets: int32 [experts + 1]: the tokens of expert e are offsets[e] to offsets[e + 1] - 1.
            residual: [tokens, out], added to the result, or None.
            gate: [tokens, out], by which the result is multiplied in the place of a residual, or None.
            activation: of the result, or of the gate where there is one.

        Returns:
            y [tokens, out].
        """
        try:
            if offsets is None:
                raise InvalidArgumentError("offsets must say which tokens each expert has, got None")
            shard: Any = self.shard
            experts = self.experts if shard is None else shard.experts
            if offsets.numel() != experts + 1:
                raise InvalidArgumentError(f"offsets must have {experts + 1} entries, got {offsets.numel()}")
            if self.origin.pending:
                self.validate_pattern()
            if getattr(self.weight, "main_grad", None) is not None or self.observe is not None:
                raise UnsupportedError(
                    "weight must not have a main_grad, nor a schedule that looks at dense gradients: experts "
                    "have neither"
                )
            whole = {
                "weight": self.weight,
                "bias": self.bias,
                **{name: self._buffers[name] for name in STORED_NAMES},
            }
            tensors: Any = whole if shard is None else shard.tensors(self)
            index = self.index() if shard is None else shard.index(self)
            weight: Tensor = tensors["weight"]
            if tensors["mask"] is not None:
                (weight,) = autocast(weight)
                weight = straight_through(weight, tensors["mask"])
            stored = tensors["metadata"], tensors["scales"]
            return grouped_linear_on(
                x, weight, index, offsets, tensors["bias"], activation, residual, stored, gate
            )
        except Exception as error:
            check_types_after(error, ExpertsLinear.forward, locals())
            raise

    @classmethod
    def from_linear(cls, linear: nn.Module, *args: Any, **options: Any) -> NoReturn:
        """Raise UnsupportedError; see `from_layers`."""
        raise UnsupportedError("from_linear makes one linear layer; use BlockSparseExperts.from_experts")

    def to_linear(self) -> NoReturn:
        """Raise UnsupportedError; see `BlockSparseExperts.to_dense`."""
        raise UnsupportedError("to_linear needs one weight for all tokens; use BlockSparseExperts.to_dense")

    def to_semi_structured(self) -> NoReturn:
        """Raise UnsupportedError."""
        raise UnsupportedError("to_semi_structured needs one weight for all tokens, got those of experts")

    @checked
    def cut(
        self, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None
    ) -> BlockSparseLinear:
        """Raise UnsupportedError."""
        raise UnsupportedError("cut needs one weight for all tokens, got those of experts")

    def extra_repr(self) -> str:
        """Return the number of experts, and what `BlockSparseLinear` says."""
        return f"experts={self.experts}, {super().extra_repr()}"
