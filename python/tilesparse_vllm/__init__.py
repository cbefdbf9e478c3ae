"""The entry point of the plugin for vLLM, a package of its own so that it loads at once.

vLLM calls `register` in each of its processes, also for models without block-sparse layers. These do not wait
for the import of `tilesparse`, which is left to the first checkpoint that has such layers.
"""

from __future__ import annotations

from typing import Any

METHOD = "tilesparse"  # quant_method in the quantization_config of config.json


def register() -> None:
    """Tell vLLM of the quantization method "tilesparse"; it may be called again."""
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class TileSparse(QuantizationConfig):
        """Answer what vLLM asks before it has a config; the config is of another class."""

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            """Return the config that a section of ``config.json`` describes."""
            from tilesparse.integrations.vllm.method import TileSparseConfig

            return TileSparseConfig.from_config(config)

        @staticmethod
        def get_config_filenames() -> list[str]:
            """Return no names: ``config.json`` says everything."""
            return []

    if METHOD not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(METHOD)(TileSparse)
