"""Recovery of pruned models: submodules fitted to those of the dense model, then distillation from it.

`tilesparse.recover.trainer`, which needs Transformers, has the same for its Trainer.
"""

from .distillation import DistillationLoss

__all__ = ["DistillationLoss"]
