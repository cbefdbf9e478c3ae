"""Transformers' quantization method for block-sparse layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from ..._libraries.hooks import TRANSFORMERS, revert
from ..._listeners import layers_changed
from ...checkpoint.manifest import VERSION
from ...checkpoint.prepare import prepare
from ...config import METHOD, BlockSparseConfig
from ...errors import CheckpointError, InvalidArgumentError, UnsupportedError
from ...patch.sparsify import sparsify_
from .checks import check_files, named_as_in, settle
from .config import TileSparseConfig
from .dense import to_dense
from .layers import tensors_of

for _name in ("_process_model_before_weight_loading", "_process_model_after_weight_loading", "_dequantize"):
    if not hasattr(HfQuantizer, _name):
        raise ImportError(
            f"tilesparse needs Transformers with HfQuantizer.{_name}, got {transformers.__version__}"
        )


@register_quantizer(METHOD)
class TileSparseHfQuantizer(HfQuantizer):
    """Makes `from_pretrained` load block-sparse layers, and tells the Trainer what it may train.

    A model whose layers are all stored plain is an ordinary one once it is loaded: it keeps no quantizer, and
    ``is_quantized`` is False. Other storages are trained by adapters alone, so such a model keeps it.
    """

    def __init__(self, quantization_config: TileSparseConfig | BlockSparseConfig, **kwargs: Any) -> None:
        """Take the section of a checkpoint, or a config by which a dense one becomes block-sparse."""
        self._wanted: BlockSparseConfig | None = None
        if isinstance(quantization_config, BlockSparseConfig):
            self._wanted = quantization_config
            quantization_config = TileSparseConfig(version=VERSION, layers={})
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized and self._wanted is None:
            raise InvalidArgumentError(
                "quantization_config must be a BlockSparseConfig for a dense checkpoint, got "
                f"{type(quantization_config).__name__}"
            )

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` may write the model: always."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters are: x has a gradient in every storage."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """The layers themselves are in the storage "plain" alone."""
        plain: bool = self.quantization_config.is_plain()
        return plain

    @property
    def is_compileable(self) -> bool:
        """Whether generation may be compiled: always."""
        return True

    def _process_model_before_weight_loading(
        self,
        model: Any,
        dtype: torch.dtype | None = None,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise UnsupportedError(
                "distributed_config, tp_plan: Transformers cannot split block-sparse layers; load the model "
                "without, and see tilesparse.parallel"
            )
        if self._wanted is not None:
            return
        given = self.quantization_config.to_dict()
        layers = named_as_in(model, given["layers"])
        prepare(model, {"version": VERSION, "layers": {own: entry for own, (_, entry) in layers.items()}})
        self._empty = {own: model.get_submodule(own) for own in layers}
        sparse = {name: self._empty[own] for own, (name, _) in layers.items()}
        check_files(sparse, checkpoint_files or (), given.get("files", {}))
        self._shapes = {name: tensor.shape for name, tensor in tensors_of(model)}
        # Transformers then casts floating tensors to the dtypes of the model, and only those. Before it had
        # get_new_dtype, it left tensors whose names change, as with another head, in the dtype of the file.
        self.pre_quantized = hasattr(self, "get_new_dtype")

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.pre_quantized = True
        if self._wanted is not None:
            sparsify_(model, self._wanted)
            return
        for name, tensor in tensors_of(model):
            if name in self._shapes and tensor.shape != self._shapes[name]:  # which 5.17 does not compare
                raise CheckpointError(
                    f"{name} must have shape {tuple(self._shapes[name])}, as in the model, got "
                    f"{tuple(tensor.shape)}"
                )
        for name, layer in self._empty.items():
            settle(name, layer)
        del self._empty, self._shapes
        layers_changed(model)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return to_dense(model, dtype)


def unregister() -> None:
    """Make Transformers forget the method "tilesparse", so that `from_pretrained` refuses such checkpoints.

    Models that are there keep their configurations. ``import tilesparse`` in a new process registers again.
    """
    AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    revert(TRANSFORMERS)
