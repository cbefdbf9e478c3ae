"""LoRA of block-sparse layers for PEFT."""

from .integrations.peft import LoraLinear, MergeLossWarning, merge_loss, unregister

__all__ = [
    "LoraLinear",
    "MergeLossWarning",
    "merge_loss",
    "unregister",
]
