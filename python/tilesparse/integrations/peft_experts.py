"""LoRA of PEFT on the experts of a mixture: factors of their own for each expert of a projection."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F

from .._checks import BLOCK_SIZES, Index
from .._ops.autocast import autocast
from .._ops.grouped import grouped_linear_on, grouped_sdd_on
from .._ops.linear import combined
from ..errors import UnsupportedError
from ..nn.experts_linear import ExpertsLinear
from ..nn.tensors import INDEX_NAMES
from .peft import LoraLinear

_LEAST = min(BLOCK_SIZES)  # of a rank that is multiplied


class LoraExperts(LoraLinear):
    """y[t] = base_layer(x)[t] + scaling (x[t] A_eᵀ) B_eᵀ for the tokens t of each expert e.

    Both narrow products are grouped ones: a token meets the factors of its expert alone. Merging keeps what
    the pattern keeps, see `LoraLinear`.

    Attributes:
        base_layer: the `ExpertsLinear`.
        lora_A: by adapter, weight [r · experts, in_features]: A_e below each other.
        lora_B: by adapter, weight [out, r · experts], out of one expert: column i · experts + e is column i
            of B_e. PEFT lays out the factors of 3-D parameters in the same way.
    """

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter.

        Raises:
            UnsupportedError: what `LoraLinear` refuses, ``lora_bias``, or the initialisation "eva".
        """
        name = kwargs.get("target_name", "")
        if config.lora_bias:
            raise UnsupportedError(f"lora_bias must be False, since layer {name!r} has weights of experts")
        init = config.init_lora_weights
        if init == "eva":
            raise UnsupportedError(
                f"init_lora_weights must not be 'eva', since layer {name!r} has weights of experts"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        ranks = r * self._experts
        self.lora_A[adapter_name] = nn.Linear(self.in_features, ranks, bias=False)
        self.lora_B[adapter_name] = nn.Linear(ranks, self.out_features, bias=False)
        if init:
            self.reset_lora_parameters(adapter_name, init)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        self._add_grids(-(-r // _LEAST) * _LEAST)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: str = "none",
        adapter_names: list[str] | None = None,
    ) -> Tensor:
        """Compute what `ExpertsLinear.forward` does, with the active adapters.

        Args:
            x: [tokens, in_features], sorted by expert.
            offsets: int32 [experts + 1]: the tokens of expert e are offsets[e] to offsets[e + 1] - 1.
            residual: [tokens, out], added to the result, or None.
            gate: [tokens, out], by which the result is multiplied in the place of a residual, or None.
            activation: of the result, or of the gate where there is one.
            adapter_names: None; PEFT's adapters by row are not told which rows experts meet.

        Raises:
            UnsupportedError: ``adapter_names`` are given.
        """
        if adapter_names is not None:
            raise UnsupportedError("adapter_names must be None: experts meet rows in another order")
        base: Any = self.base_layer
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = [] if self.disable_adapters or self.merged else self._present(None)
        if not active:
            y = base(x, offsets, residual=residual, gate=gate, activation=activation)
            return y  # type: ignore[no-any-return]
        y = base(x, offsets)
        assert offsets is not None
        dtype = y.dtype
        for name in active:
            a, b = self._factors_of(name)
            inputs = self.lora_dropout[name](self._cast_input_dtype(x, a.dtype))
            y = self._narrow(inputs, a, b * self.scaling[name], offsets, y.to(a.dtype))
        y, residual, gate = autocast(y.to(dtype), residual, gate)
        return combined(y, activation, residual, gate)

    @property
    def _experts(self) -> int:
        base: Any = self.get_base_layer()
        experts: int = base.experts
        return experts

    def _factors_of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return A [experts, r, in_features] and B [experts, out, r] of an adapter."""
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return (
            a.view(self._experts, -1, self.in_features),
            b.view(self.out_features, -1, self._experts).permute(2, 0, 1),
        )

    def _narrow(self, x: Tensor, a: Tensor, b: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
        """Return y [tokens, out] + x A_eᵀ B_eᵀ, by grouped products in which every block is kept."""
        more = -a.shape[1] % _LEAST
        grids, (bn, bk) = self._grids_of(a.shape[1] + more), self.get_base_layer().block_shape
        first, second = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
        none = None, None
        for weight, shape, grid, added in (
            (first, (_LEAST, bk), grids[0], None),
            (second, (bn, _LEAST), grids[1], y),
        ):
            x = grouped_linear_on(x, _blocks(weight, shape), grid, offsets, None, "none", added, none, None)
        return x

    def _add_grids(self, rank: int) -> None:
        """Make the patterns of all blocks of both factors; buffers, to move with the layer."""
        base: Any = self.get_base_layer()
        (bn, bk), device = base.block_shape, base.weight.device
        for number, (rows, columns) in enumerate(
            (
                (self._experts * rank // _LEAST, self.in_features // bk),
                (self._experts * self.out_features // bn, rank // _LEAST),
            )
        ):
            arrays = (
                torch.arange(rows + 1, device=device) * columns,
                torch.arange(columns, device=device).repeat(rows),
                torch.arange(rows * columns, device=device),
            )
            for name, array in zip(INDEX_NAMES, arrays, strict=True):
                self.register_buffer(f"{name}_{rank}_{number}", array.int(), persistent=False)

    def _grids_of(self, rank: int) -> list[Index]:
        """Return the patterns of both factors of this rank."""
        (bn, bk), experts = self.get_base_layer().block_shape, self._experts
        shapes = (
            ((experts * rank, self.in_features), (_LEAST, bk)),
            ((experts * self.out_features, rank), (bn, _LEAST)),
        )
        grids = []
        for number, (shape, block_shape) in enumerate(shapes):
            crow, col, slot = (self.get_buffer(f"{name}_{rank}_{number}") for name in INDEX_NAMES)
            grids.append(Index(crow, col, slot, shape, block_shape))
        return grids

    def _factors(self, names: list[str]) -> tuple[Tensor, Tensor]:
        """Return these adapters as one: A [experts, R, in_features], scaled B [experts, out, R]."""
        precision = torch.promote_types(self.lora_A[names[0]].weight.dtype, torch.float32)
        both = [[part.detach().to(precision) for part in self._factors_of(name)] for name in names]
        a = torch.cat([a for a, _ in both], 1)
        return a, torch.cat([b * self.scaling[name] for name, (_, b) in zip(names, both, strict=True)], 2)

    def _kept_of(self, a: Tensor, b: Tensor) -> Tensor:
        base: Any = self.get_base_layer()
        experts, ranks, _ = a.shape
        offsets = torch.arange(experts + 1, device=a.device, dtype=torch.int32) * ranks
        delta = grouped_sdd_on(b.mT.flatten(0, 1), a.flatten(0, 1), base.index(), offsets)
        mask = base.kept_mask()
        return delta if mask is None else torch.where(mask, delta, 0)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        layer: Any = module
        if isinstance(module, BaseTunerLayer):
            layer = module.get_base_layer()
        assert isinstance(layer, ExpertsLinear)
        return layer.in_features, layer.out_features // layer.experts


def _blocks(weight: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return all blocks [nnz, bn, bk] of weights [experts, out, in], row by row."""
    (bn, bk), columns = block_shape, weight.shape[2] // block_shape[1]
    return weight.reshape(-1, bn, columns, bk).transpose(1, 2).reshape(-1, bn, bk).contiguous()
