"""Recovery of pruned models: submodules fitted to those of the dense model, then distillation from it.

`tilesparse.recover.trainer`, which needs Transformers, has the same for its Trainer.
"""

from .distillation import distill_
from .losses import DistillationLoss
from .reconstruction import reconstruct_

__all__ = ["DistillationLoss", "distill_", "reconstruct_"]
