"""Block-sparse linear layers of vLLM: how they are loaded and what they compute.

The sizes of parts follow from patterns, which are known once they are loaded. So parameters are empty at
first, their loaders keep what they are given, and a shard is cut as soon as all of its tensors are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from ..._files import few
from ...config import METHOD, LayerSpec
from ...errors import CheckpointError, UnsupportedError
from ...io.manifest import parsed_layers
from ...nn.experts import BlockSparseExperts
from ...nn.weight import INDEX_NAMES
from ...storage.formats import forms_of
from .serving import (
    Span,
    dense_part,
    experts_for_serving,
    experts_part,
    for_serving,
    merged,
    multiplied,
    sparse_part,
)

# Models whose checkpoints have q, k and v, or gate and up, fused in this order. Others have them by heads,
# and put the rows of dense weights in order while they load them, but not those of block-sparse ones.
IN_ORDER = {"Phi3ForCausalLM", "Glm4ForCausalLM"}
# Models that rewrite tensors of linear layers by name while they load them, and would those of patterns.
REWRITING = {"GPT2LMHeadModel", "BloomForCausalLM"}
TRIED_FORMATS = ("auto", "hf", "safetensors")  # of weights that reach the layers as they are on disk
PLACES = {None: 0, "q": 0, "k": 1, "v": 2}  # of shards that vLLM does not number


class TileSparseMethod(LinearMethodBase):
    """The method of a layer of which at least one shard, by its name in the checkpoint, is block-sparse.

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
        """Register an empty parameter for each tensor of the shards; see vLLM's `LinearMethodBase`."""
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
        """Make the shards ready to compute; vLLM calls it once everything is loaded."""
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


# Layers that models of vLLM merge without saying so, or say so only when their layers are made.
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# Modules that Transformers renames while it reads and writes checkpoints, whose names vLLM keeps.
RENAMED = {"block_sparse_moe": "mlp"}
logger = init_logger("vllm.tilesparse")  # below "vllm", whose messages are shown


class TileSparseConfig(QuantizationConfig):
    """The block-sparse layers of a checkpoint, by vLLM's names of them.

    Args:
        layers: spec of each layer.
    """

    def __init__(self, layers: Mapping[str, LayerSpec]) -> None:
        super().__init__()
        self.layers = dict(layers)
        self._claimed: set[str] = set()  # layers of the checkpoint that vLLM's model has

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TileSparseConfig:
        """Return the config that a section of ``config.json`` describes."""
        return cls(parsed_layers(config))

    def get_name(self) -> str:
        """Return the name of the method."""
        return METHOD

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the oldest compute capability with kernels, times ten."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no names: ``config.json`` says everything."""
        return []

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers as vLLM's model renames those of the checkpoint."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)
        self._claimed = set(hf_to_vllm_mapper.apply_list(sorted(self._claimed)))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a layer; None leaves it as vLLM has it."""
        # Imported only now, so that others, whose models are dense, do not wait for it.
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, RoutedExperts):
            return self._method_of_experts(layer, prefix)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        shards = {name: self.layers.get(name) for name in self._shards(prefix)}
        if not any(shards.values()):
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        self._claimed |= set(shards)
        check_can_be_served(prefix)
        return TileSparseMethod(shards, prefix, self)

    def _method_of_experts(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        parent, _, last = prefix.rpartition(".")
        before, _, module = parent.rpartition(".")
        renamed = f"{before}.{RENAMED.get(module, module)}.{last}"
        names = {own: f"{renamed}.{own}" for own in PROJECTIONS if f"{renamed}.{own}" in self.layers}
        if not names:
            logger.info("%s: experts are served dense", prefix)
            return None
        self._claimed |= set(names.values())
        check_can_be_served(prefix)
        specs = {own: self.layers[name] for own, name in names.items()}
        return TileSparseExpertsMethod(layer, specs, prefix, self)

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Return a mapper from the names of experts' tensors to those of vLLM's parameters."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(
            orig_to_new_substr={f".experts.{own}.": f".experts.routed_experts.{own}." for own in PROJECTIONS}
        )

    def check_claimed(self) -> None:
        """Raise CheckpointError unless every block-sparse layer of the checkpoint is in vLLM's model."""
        unclaimed = sorted(set(self.layers) - self._claimed)
        if unclaimed:
            raise CheckpointError(
                f"layers: {few(unclaimed)}: block-sparse in the checkpoint, but not linear "
                "layers or experts of vLLM's model"
            )

    def _shards(self, prefix: str) -> list[str]:
        """Return the names in the checkpoint of what a layer of vLLM holds."""
        parent, dot, name = prefix.rpartition(".")
        packed = {**MERGED, **self.packed_modules_mapping}
        if prefix in self.layers or name not in packed:
            return [prefix]
        return [f"{parent}{dot}{own}" for own in packed[name]]


PROJECTIONS = ("gate_up", "up", "down")


def swiglu_oai(both: Tensor) -> Tensor:
    """Compute the activation of gpt-oss, whose gates and other features take turns."""
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def gelu_tanh(both: Tensor) -> Tensor:
    """Compute the gated unit with GELU by its tanh."""
    gate, up = both.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


# Activations between the projections, by vLLM's names; None is what `BlockSparseExperts` has itself.
ACTIVATIONS = {"silu": None, "gelu": None, "gelu_tanh": gelu_tanh, "swigluoai": swiglu_oai}


class TileSparseExpertsMethod(FusedMoEMethodBase):
    """The method of a layer of block-sparse experts, with the specs of both projections by their names.

    After loading the layer has a module ``experts``, a `BlockSparseExperts`.
    """

    def __init__(
        self, layer: Any, specs: Mapping[str, LayerSpec], prefix: str, config: TileSparseConfig
    ) -> None:
        super().__init__(layer.moe_config)
        self._specs, self._prefix, self._config = dict(specs), prefix, config
        self._activation = layer.activation.value
        self._tensors: dict[str, tuple[str, ...]] = {}
        self._given: dict[str, dict[str, Tensor]] = {name: {} for name in specs}
        self._cut: dict[str, Any] = {}
        reason = self._reason_not_served(layer)
        if reason is not None:
            raise UnsupportedError(f"{prefix}: {reason}")

    def _reason_not_served(self, layer: Any) -> str | None:
        parallel = self.moe.moe_parallel_config
        if self._activation not in ACTIVATIONS:
            return f"the activation {self._activation!r} of its experts is not known"
        if self.moe.swiglu_limit is not None and self._activation != "swigluoai":
            return f"its activation has a limit of {self.moe.swiglu_limit}, which is not known"
        if layer.apply_router_weight_on_input:
            return "it multiplies the inputs of experts, not their results, by the weights of the router"
        if parallel.use_ep:
            return "expert parallelism is not supported with block-sparse experts; use tensor parallelism"
        if parallel.dp_size > 1 or parallel.is_sequence_parallel:
            return "data and sequence parallelism were not tried with block-sparse experts"
        if self.moe.is_lora_enabled:
            return "vLLM has LoRA for experts by its own kernels alone, not for block-sparse ones"
        if {"gate_up", "down"} != {*self._specs}:
            return f"its experts need down and gate_up, got {' and '.join(sorted(self._specs))}"
        return None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register an empty parameter for each tensor of both projections; see vLLM's base class."""
        self._own_features, self._dtype = intermediate_size_per_partition, params_dtype
        features = intermediate_size_per_partition * self.moe.moe_parallel_config.tp_size
        shapes = {
            name: (num_experts * hidden_size, features)
            if name == "down"
            else (num_experts * features * 2, hidden_size)
            for name in self._specs
        }
        for name, spec in self._specs.items():
            if spec.experts != num_experts or spec.shape != shapes[name]:
                raise CheckpointError(
                    f"{self._prefix}.{name}: must be {num_experts} experts of {shapes[name]} in all in vLLM, "
                    f"got {spec.experts} of {spec.shape}"
                )
            bias = ("bias",) if self.moe.has_bias else ()
            self._tensors[name] = (*tensors_of(spec), *bias)
            projection = nn.Module()
            for own in self._tensors[name]:
                parameter = nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
                parameter.weight_loader = partial(self._load, name, own)  # type: ignore[attr-defined]
                projection.register_parameter(own, parameter)
            layer.add_module(name, projection)
        # vLLM's own looks for projections by the names of dense ones.
        layer.load_weights = partial(self._load_weights, layer)

    def _load_weights(self, layer: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Keep the tensors that vLLM finds for the layer, and return their names."""
        for name, tensor in weights:
            own = name.removeprefix("routed_experts.")
            projection, _, last = own.rpartition(".")
            if last not in self._tensors.get(projection, ()):
                raise CheckpointError(f"{self._prefix}.{own}: must not be there: experts are block-sparse")
            self._load(projection, last, layer.get_parameter(own), tensor)
            yield own

    def _load(self, name: str, own: str, parameter: nn.Parameter, loaded: Tensor) -> None:
        given, spec = self._given[name], self._specs[name]
        given[own] = loaded
        if len(given) < len(self._tensors[name]):
            return
        columns = self._span_of_rank() if name == "down" else (0, spec.shape[1])
        rows = [(0, spec.shape[0])] if name == "down" else self._rows(spec)
        part = experts_part(f"{self._prefix}.{name}", spec, given, rows, columns, self._dtype)
        self._cut[name] = part.to(parameter.device)
        self._given[name] = {}

    def _span_of_rank(self) -> Span:
        rank = self.moe.moe_parallel_config.tp_rank
        return rank * self._own_features, (rank + 1) * self._own_features

    def _rows(self, spec: LayerSpec) -> list[Span]:
        """Return the features of all experts, gates and others, that this process needs."""
        begin, end = self._span_of_rank()
        assert spec.experts is not None
        parts = 2 * spec.experts
        if self._activation == "swigluoai":  # whose gates and other features take turns
            begin, end, parts = 2 * begin, 2 * end, spec.experts
        size = spec.shape[0] // parts
        if size == end - begin:
            return [(0, spec.shape[0])]
        return [(part * size + begin, part * size + end) for part in range(parts)]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the experts ready to compute; vLLM calls it once everything is loaded."""
        if "experts" in layer._modules:
            return
        self._config.check_claimed()
        for name, wanted in self._tensors.items():
            if name not in self._cut:  # which vLLM does not look for in quantized models
                missing = sorted(set(wanted) - set(self._given[name]))
                raise CheckpointError(
                    f"{self._prefix}.{name}: {', '.join(missing)} must be in the checkpoint"
                )
        down, up = (experts_for_serving(self._cut.pop(name)) for name in sorted(self._tensors))
        for name in self._tensors:
            del layer._modules[name]
        function = ACTIVATIONS[self._activation]
        if function is None:
            layer.experts = BlockSparseExperts(up, down, activation=self._activation)
        else:
            layer.experts = BlockSparseExperts(up, down, apply_gate=lambda _, both: function(both))
        layer.experts.requires_grad_(False).eval()

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        """Return vLLM's config of experts that are not quantized: its kernels do not run."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Compute the sum [tokens, hidden] of the results of each token's experts, times their weights."""
        return layer.experts(x, topk_ids, topk_weights)  # type: ignore[no-any-return]
