"""Recovery of pruned models: submodules fitted to those of the dense model, then distillation from it."""

from .distillation import DistillationLoss

__all__ = ["DistillationLoss"]
