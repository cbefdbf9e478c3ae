"""LoRA of PEFT on block-sparse layers (Hu et al., "LoRA", ICLR 2022).

`peft.get_peft_model` and `peft.PeftModel.from_pretrained` adapt `BlockSparseLinear` as they adapt
`torch.nn.Linear`, wherever ``import tilesparse`` stands in the program. This module has the class they use,
and says what merging would lose.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F

from .._checks import BLOCK_SIZES, Index, Operands
from .._ops.autograd import autocast
from .._ops.products import combined, grouped_sdd_on, linear_on
from ..errors import InvalidArgumentError, UnsupportedError
from ..functional import sdd
from ..nn.experts import ExpertsLinear
from ..nn.linear import BlockSparseLinear
from ..nn.weight import INDEX_NAMES, freeze, kept_mask, layer_index
from ..storage.formats import storage_of

try:
    from peft import __version__ as peft_version
    from peft.tuners.lora.layer import Linear
    from peft.tuners.tuners_utils import check_adapters_to_merge
except ImportError as error:
    raise ImportError(f"tilesparse needs PEFT 0.20 or newer (pip install peft): {error}") from error
if tuple(map(int, peft_version.split(".")[:2])) < (0, 20):  # older ones do not say what a variant of LoRA is
    raise ImportError(f"tilesparse needs PEFT 0.20 or newer, got {peft_version}")
for _name in ("_get_in_out_features", "_get_base_layer_device_and_dtype"):
    if not hasattr(Linear, _name):  # what replaces it would read a block-sparse weight as a dense one
        raise ImportError(f"tilesparse needs PEFT with lora.Linear.{_name}, got {peft_version}")

# Those that do not read the weight: the others take it for a dense matrix.
_INITS = (True, False, "gaussian", "eva")
_ROUNDING = 0.01  # of a product in TF32, as a loss


class MergeLossWarning(UserWarning):
    """Merging keeps the zeros of a layer zero, and what its adapter had there is gone."""


class LoraLinear(Linear):
    """y = base_layer(x) + scaling (x Aᵀ) Bᵀ for a `BlockSparseLinear` in any storage.

    B A is dense, and merging adds only those blocks of it that the layer keeps, and of 2:4 those entries: see
    `merge_loss`. After `unmerge` the weight is as it was, bit for bit: a copy is kept while it is merged.

    Attributes:
        base_layer: the `BlockSparseLinear`.
        lora_A: by adapter, `torch.nn.Linear` with weight A [r, in_features].
        lora_B: by adapter, `torch.nn.Linear` with weight B [out_features, r].
    """

    unmerged_weight: Tensor | None
    unmerged_bias: Tensor | None

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: Any,
        *,
        parameter_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if parameter_name is not None:
            raise UnsupportedError(
                f"target_parameters: {parameter_name!r} of a block-sparse layer is no matrix; name the layer "
                "in target_modules"
            )
        super().__init__(base_layer, adapter_name, config, **kwargs)
        base: Any = base_layer
        if not storage_of(base.storage).trainable:
            freeze(base)
        self.fan_in_fan_out = False  # block-sparse layers that were a Conv1D are not transposed
        # Buffers, to move with the layer, but not part of what is saved.
        self.register_buffer("unmerged_weight", None, persistent=False)
        self.register_buffer("unmerged_bias", None, persistent=False)
        self._merged_blocks: list[Tensor] = []  # the pattern that the copy of the weight belongs to

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter."""
        self._name = kwargs.get("target_name", "")
        variants = [
            field.name
            for field in dataclasses.fields(config)
            if field.metadata.get("is_lora_variant") and getattr(config, field.name)
        ]
        if variants:
            raise UnsupportedError(f"{variants[0]} must be off, since layer {self._name!r} is block-sparse")
        if config.init_lora_weights not in _INITS:
            raise UnsupportedError(
                f"init_lora_weights must be one of {list(_INITS)}, since layer {self._name!r} is "
                f"block-sparse, got {config.init_lora_weights!r}"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def merge_loss(self, adapter_names: list[str] | None = None) -> float:
        """Return the fraction of B A, by Frobenius norm, that falls outside of what the layer keeps.

        Args:
            adapter_names: whose sum is meant; None is the active ones.
        """
        names = self._present(adapter_names)
        if not names:
            return 0.0
        factors = self._factors(names)
        return _loss(*factors, self._kept_of(*factors))

    def check_mergeable(self, adapter_names: list[str] | None = None) -> None:
        """Raise what `merge` would. PEFT merges one layer after the other: all are asked before the first."""
        names, base = self._present(adapter_names), self.get_base_layer()
        if names and not storage_of(base.storage).trainable:
            raise UnsupportedError(
                f"merge needs the storage 'plain' of layer {self._name!r}, got {base.storage!r}; call "
                "to_storage('plain') on the layer first, and to_storage after merging"
            )
        if base.bias is None and any(self.lora_bias[name] for name in names):
            raise UnsupportedError(
                f"merge needs a bias of layer {self._name!r}, because lora_bias is True, got None"
            )

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add to the weight what the layer keeps of the adapters, and warn of what it does not.

        Sums are taken in float32 and rounded once to the dtype of the weight.

        Args:
            safe_merge: check that the sum is finite.
            adapter_names: what to merge; None is the active ones.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        self.check_mergeable(names)
        base: BlockSparseLinear = self.get_base_layer()
        factors = self._factors(names)
        delta = self._kept_of(*factors)
        weight, bias = base.weight + delta, self._bias_with(names)
        if safe_merge and not all(bool(sum_.isfinite().all()) for sum_ in (weight, bias) if sum_ is not None):
            raise InvalidArgumentError(f"safe_merge: the sum with {names} is not finite")
        if not self.merged:
            self.unmerged_weight = base.weight.detach().clone()
            self.unmerged_bias = None if base.bias is None else base.bias.detach().clone()
            self._merged_blocks = _blocks(base)
        base.weight.copy_(weight)
        if base.bias is not None and bias is not None:
            base.bias.copy_(bias)
        self.merged_adapters.extend(names)
        loss = _loss(*factors, delta)
        if loss > _ROUNDING:
            warnings.warn(self._about(loss, names), MergeLossWarning, stacklevel=3)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put back the weight, and the bias, from before the first merge; the storage is "plain" again."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=3)
            return
        base = self.get_base_layer()
        self._check_pattern()
        base.to_storage("plain")
        base.weight.copy_(self.unmerged_weight)
        if base.bias is not None and self.unmerged_bias is not None:
            base.bias.copy_(self.unmerged_bias)
        self.unmerged_weight = self.unmerged_bias = None
        self._merged_blocks = []
        self.merged_adapters.clear()

    def _check_pattern(self) -> None:
        now = _blocks(self.get_base_layer())
        if not all(map(torch.equal, now, self._merged_blocks)):
            raise UnsupportedError(
                f"unmerge needs the pattern that layer {self._name!r} had when it was merged, got "
                "another one; load the weights without the adapter again"
            )

    def _kept_of(self, a: Tensor, b: Tensor) -> Tensor:
        """[nnz, bn, bk] of b a: the entries that the layer keeps, and zeros."""
        base: BlockSparseLinear = self.get_base_layer()
        delta = sdd(b.t(), a, base.pattern)
        mask = kept_mask(base)
        return delta if mask is None else torch.where(mask, delta, 0)

    def _factors(self, names: list[str]) -> tuple[Tensor, Tensor]:
        """These adapters as one of the sum of their ranks: A [r, in_features], scaled B [out_features, r]."""
        precision = torch.promote_types(self.lora_A[names[0]].weight.dtype, torch.float32)
        a = [self.lora_A[name].weight.detach().to(precision) for name in names]
        b = [self.lora_B[name].weight.detach().to(precision) * self.scaling[name] for name in names]
        return torch.cat(a), torch.cat(b, dim=1)

    def _present(self, names: list[str] | None) -> list[str]:
        """Return the named adapters, or the active ones, that this layer has."""
        return [name for name in (self.active_adapters if names is None else names) if name in self.lora_A]

    def _bias_with(self, names: list[str]) -> Tensor | None:
        bias: Tensor | None = self.get_base_layer().bias
        for name in names:
            if bias is not None and self.lora_bias[name]:
                bias = bias + self.lora_B[name].bias * self.scaling[name]
        return bias

    def _about(self, loss: float, names: list[str]) -> str:
        return (
            f"layer {self._name!r}: zeros stay zero, and merging {', '.join(names)} has lost {loss:.1%} of "
            "the change, by Frobenius norm; tilesparse.integrations.peft.merge_loss(model) says so before"
        )

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        layer: Any = module
        return layer.in_features, layer.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        """Return device and dtype of new adapters: 8 bits are no dtype for them."""
        layer: Any = base_layer
        return layer.weight.device, layer.spec.dtype


def merge_loss(model: nn.Module, adapter_names: list[str] | None = None) -> dict[str, float]:
    """Return what `merge_adapter` and `merge_and_unload` would lose of each block-sparse layer's adapters.

    Args:
        model: a `peft.PeftModel`, or any model with such layers; it is only read.
        adapter_names: whose sum is meant; None is the active ones.

    Returns:
        By name of the layer, the Frobenius norm of that part of B A that the layer does not keep, over the
        norm of B A: 0 if nothing gets lost, 1 if everything does.
    """
    return {
        name: layer.merge_loss(adapter_names)
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLinear)
    }


def _blocks(layer: BlockSparseLinear) -> list[Tensor]:
    """Return copies of the pattern's arrays on the host, and the shape of a block."""
    arrays = [layer.get_buffer(name).to("cpu", copy=True) for name in INDEX_NAMES]
    return [*arrays, torch.tensor(layer.block_shape, device=arrays[0].device)]


def _loss(a: Tensor, b: Tensor, kept: Tensor) -> float:
    a, b = a.double(), b.double()
    whole = float(((b.mT @ b) * (a @ a.mT)).sum())  # ‖b a‖², as a trace of r x r matrices, of each expert
    inside = float(torch.linalg.vector_norm(kept, dtype=torch.float64)) ** 2
    return math.sqrt(max(0.0, 1 - inside / whole)) if whole > 0 else 0.0


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
        """Add an adapter."""
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
        """Compute what `ExpertsLinear.forward` does, with the active adapters; arguments are its.

        ``adapter_names`` are refused: PEFT's adapters by row are not told which rows experts meet.
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
        operands = Operands(offsets=offsets)
        for weight, shape, grid, added in (
            (first, (_LEAST, bk), grids[0], None),
            (second, (bn, _LEAST), grids[1], y),
        ):
            blocks = _expert_blocks(weight, shape)
            x = linear_on(x, blocks, grid, residual=added, operands=operands)
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
        delta = grouped_sdd_on(b.mT.flatten(0, 1), a.flatten(0, 1), layer_index(base), offsets)
        mask = kept_mask(base)
        return delta if mask is None else torch.where(mask, delta, 0)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        layer: Any = module
        if isinstance(module, BaseTunerLayer):
            layer = module.get_base_layer()
        assert isinstance(layer, ExpertsLinear)
        return layer.in_features, layer.out_features // layer.experts


def _expert_blocks(weight: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return all blocks [nnz, bn, bk] of weights [experts, out, in], row by row."""
    (bn, bk), columns = block_shape, weight.shape[2] // block_shape[1]
    return weight.reshape(-1, bn, columns, bk).transpose(1, 2).reshape(-1, bn, bk).contiguous()
