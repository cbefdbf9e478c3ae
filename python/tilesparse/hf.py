"""Transformers' quantization method for block-sparse layers, and model cards."""

from .integrations.transformers import (
    TAGS,
    TileSparseConfig,
    TileSparseHfQuantizer,
    check_can_follow,
    follow,
    follow_to_save,
    model_card,
    to_dense,
    unregister,
)

__all__ = [
    "TAGS",
    "TileSparseConfig",
    "TileSparseHfQuantizer",
    "check_can_follow",
    "follow",
    "follow_to_save",
    "model_card",
    "to_dense",
    "unregister",
]
