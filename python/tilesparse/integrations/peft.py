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
from torch import Tensor, nn

from ..errors import InvalidArgumentError, UnsupportedError
from ..functional import sdd
from ..nn.linear import BlockSparseLinear
from ..nn.weight import INDEX_NAMES, freeze, kept_mask
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

# Initializations that do not read the weight: others take it for a dense matrix.
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
    whole = float(((b.mT @ b) * (a @ a.mT)).sum())  # ‖b a‖², as a trace of r x r matrices
    inside = float(torch.linalg.vector_norm(kept, dtype=torch.float64)) ** 2
    return math.sqrt(max(0.0, 1 - inside / whole)) if whole > 0 else 0.0
