"""Block-sparse linear layers of vLLM: how they are loaded and what they compute.

The sizes of parts follow from patterns, which are known once they are loaded. So parameters are empty at
first, their loaders keep what they are given, and a shard is cut as soon as all of its tensors are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from ...config import LayerSpec
from ...errors import CheckpointError, UnsupportedError
from ...nn.tensors import INDEX_NAMES
from ...storage.registry import forms_of
from .serving import Span, dense_part, for_serving, merged, multiplied, sparse_part

if TYPE_CHECKING:
    from .config import TileSparseConfig

# Models whose checkpoints have q, k and v, or gate and up, fused in this order. Others have them by heads,
# and put the rows of dense weights in order while they load them, but not those of block-sparse ones.
IN_ORDER = {"Phi3ForCausalLM", "Glm4ForCausalLM"}
# Models that rewrite tensors of linear layers by name while they load them, and would those of patterns.
REWRITING = {"GPT2LMHeadModel", "BloomForCausalLM"}
TRIED_FORMATS = ("auto", "hf", "safetensors")  # of weights that reach the layers as they are on disk
PLACES = {None: 0, "q": 0, "k": 1, "v": 2}  # of shards that vLLM does not number


class TileSparseMethod(LinearMethodBase):
    """The method of a layer of which at least one shard is block-sparse.

    Args:
        shards: spec of each shard by its name in the checkpoint; None for dense ones.
        prefix: vLLM's name of the layer.
        config: of the model.

    After loading the layer has a list of modules ``parts``, one where all shards are alike.
    """

    def __init__(self, shards: Mapping[str, LayerSpec | None], prefix: str, config: TileSparseConfig) -> None:
        self._names, self._specs = list(shards), list(shards.values())
        self._prefix, self._config = prefix, config
        self._given: list[dict[str, Tensor]] = [{} for _ in shards]
        self._cut: dict[int, nn.Module] = {}

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register an empty parameter for each tensor of the shards; see vLLM's `LinearMethodBase`.

        Raises:
            UnsupportedError: the checkpoint has several layers in one whose order is not known.
        """
        if len(output_partition_sizes) > len(self._names) == 1 and architecture() not in IN_ORDER:
            raise UnsupportedError(
                f"{self._prefix}: the order of its fused rows in checkpoints of {architecture()} is not known"
            )
        for own in sorted({own for spec in self._specs for own in tensors_of(spec)}):
            parameter = nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            parameter.weight_loader = partial(self._load, layer, own)  # type: ignore[attr-defined]
            layer.register_parameter(own, parameter)
        self._own_rows, self._rows = list(output_partition_sizes), output_size
        self._own_columns, self._columns = input_size_per_partition, input_size
        self._dtype = params_dtype

    def _load(
        self,
        layer: nn.Module,
        own: str,
        parameter: nn.Parameter,
        loaded: Tensor,
        shard_id: Any = None,
    ) -> None:
        """Keep a tensor of a shard; vLLM calls this with its own numbers or letters for shards."""
        place = PLACES.get(shard_id, shard_id)
        if place not in range(len(self._names)):
            raise UnsupportedError(f"{self._prefix}: loading its shard {shard_id} is not known")
        name, spec, given = self._names[place], self._specs[place], self._given[place]
        if own not in tensors_of(spec):
            kind = "dense" if spec is None else f"stored {spec.storage!r} with nm={spec.nm}"
            raise CheckpointError(f"{name}: {own} must not be there, because the layer is {kind}")
        given[own] = loaded
        if len(given) == len(tensors_of(spec)):
            self._cut[place] = self._part(layer, place).to(parameter.device)
            self._given[place] = {}

    def _part(self, layer: nn.Module, place: int) -> nn.Module:
        """Return what this process needs of a shard."""
        name, spec, state = self._names[place], self._specs[place], self._given[place]
        rows, columns = self._spans_of_rows(layer, place), self._span_of_columns(layer)
        if spec is None:
            return dense_part(state["weight"], rows, columns, self._dtype)
        return sparse_part(name, spec, state, rows, columns, self._dtype)

    def _span_of_columns(self, layer: Any) -> Span:
        own = self._own_columns
        return (0, own) if own == self._columns else (layer.tp_rank * own, (layer.tp_rank + 1) * own)

    def _spans_of_rows(self, layer: Any, place: int) -> list[Span]:
        """Return the rows of a shard that this process needs: several spans if fused on disk."""
        if isinstance(layer, ParallelLMHead):
            return [(layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index)]
        own, wholes, spec = self._own_rows, _whole_sizes(layer, self._rows), self._specs[place]
        if len(self._names) == len(own):
            own, wholes = own[place : place + 1], wholes[place : place + 1]
        if spec is not None and spec.shape[0] != sum(wholes):
            raise CheckpointError(
                f"{self._names[place]}: shape must have {sum(wholes)} rows in vLLM's {self._prefix}, got "
                f"{spec.shape[0]}"
            )
        spans, begin = [], 0
        for size, whole in zip(own, wholes, strict=True):
            part = layer.tp_rank * (whole // size) // layer.tp_size  # heads of k and v may be in several
            spans.append((begin + part * size, begin + (part + 1) * size))
            begin += whole
        return spans

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the shards ready to compute; vLLM calls it once everything is loaded.

        Raises:
            CheckpointError: a tensor is missing, or a layer of the checkpoint is not in the model.
        """
        if "parts" in layer._modules:
            return
        self._config.check_claimed()
        for place, (name, spec) in enumerate(zip(self._names, self._specs, strict=True)):
            if place not in self._cut:  # which vLLM does not look for in quantized models
                missing = sorted(set(tensors_of(spec)) - set(self._given[place]))
                raise CheckpointError(f"{name}: {', '.join(missing)} must be in the checkpoint")
        parts = [self._cut.pop(place) for place in range(len(self._names))]
        made = [for_serving(part) for part in merged(parts)]
        for own in {own for spec in self._specs for own in tensors_of(spec)}:
            del layer._parameters[own]
        layer.parts = nn.ModuleList(made).requires_grad_(False).eval()
        layer.register_parameter("weight", made[0].weight)  # of which LoRA asks the device

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute y = x Wᵀ + bias of all shards, [..., rows of this process]."""
        y = multiplied(layer.parts, x)
        if isinstance(layer, ParallelLMHead):  # whose vocabulary vLLM rounds up
            y = F.pad(y, (0, layer.output_size_per_partition - y.shape[-1]))
        return y if bias is None else y + bias


def architecture() -> str:
    """Return the class name of the model that vLLM is making."""
    name: str = get_current_vllm_config().model_config.architecture
    return name


def check_can_be_served(prefix: str) -> None:
    """Raise UnsupportedError, with the layer's name, if vLLM would not give tensors as they are stored."""
    config = get_current_vllm_config()
    load_format, reason = config.load_config.load_format, None
    if architecture() in REWRITING:
        reason = f"vLLM's {architecture()} rewrites weights while it loads them, and not their patterns"
    elif load_format not in TRIED_FORMATS:
        reason = f"load_format must be one of {list(TRIED_FORMATS)}, got {load_format!r}"
    elif config.parallel_config.pipeline_parallel_size > 1:
        reason = "pipeline parallelism was not tried with block-sparse layers; use tensor parallelism"
    if reason is not None:
        raise UnsupportedError(f"{prefix}: {reason}")


def tensors_of(spec: LayerSpec | None) -> tuple[str, ...]:
    """Return the names of a shard's tensors, but for its bias, which vLLM loads by itself."""
    return ("weight",) if spec is None else (*forms_of(spec), *INDEX_NAMES)


def _whole_sizes(layer: Any, output_size: int) -> list[int]:
    """Return the rows in the checkpoint of each part of a layer."""
    if hasattr(layer, "total_num_kv_heads"):  # whose output_sizes count such heads twice
        heads = layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads
        sizes = layer.head_size, layer.head_size, getattr(layer, "v_head_size", layer.head_size)
        return [count * size for count, size in zip(heads, sizes, strict=True)]
    return list(getattr(layer, "output_sizes", [output_size]))
