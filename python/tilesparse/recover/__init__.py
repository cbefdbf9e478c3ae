"""Recovery of pruned models: submodules fitted to those of the dense model, then distillation from it.

`tilesparse.recover.trainer`, which needs Transformers, has the same for its Trainer.
"""

from .distillation import DistillationHistory, distill_
from .losses import DistillationLoss
from .reconstruction import FittedSubmodule, ReconstructionReport, SkippedSubmodule, reconstruct_

__all__ = [
    "DistillationHistory",
    "DistillationLoss",
    "FittedSubmodule",
    "ReconstructionReport",
    "SkippedSubmodule",
    "distill_",
    "reconstruct_",
]
