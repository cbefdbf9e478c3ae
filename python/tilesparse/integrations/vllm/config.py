"""What ``config.json`` says of block-sparse layers, as vLLM's quantization config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from ..._runtime.tensor_files import few
from ...checkpoint.manifest import parsed_layers
from ...config import METHOD, LayerSpec
from ...errors import CheckpointError

# What models of vLLM merge that do not say so, or say so only when their layers are made.
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
        """Return the config that a section of ``config.json`` describes.

        Raises:
            InvalidArgumentError: the section is of a newer version, or wrong.
        """
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
        """Return the method of a layer; None leaves it as vLLM has it.

        Raises:
            UnsupportedError: the layer is block-sparse, and the model or the way it is served would make of
                its tensors what they are not.
        """
        # Imported only now, so that others, whose models are dense, do not wait for it.
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from .method import TileSparseMethod, check_can_be_served

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
        from .experts import PROJECTIONS, TileSparseExpertsMethod
        from .method import check_can_be_served

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

        from .experts import PROJECTIONS

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
