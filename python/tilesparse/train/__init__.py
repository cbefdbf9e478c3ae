"""Training of sparse layers: patterns that move or shrink, gates, penalties, 2:4 masks, averages."""

from .averaging import AveragedModel
from .gradual import BlockGates, Gradual, GroupLasso, compact_, learning_rate_factor, parameter_groups
from .masks import MaskSchedule
from .patterns import PatternSchedule, snapshot

__all__ = [
    "AveragedModel",
    "BlockGates",
    "Gradual",
    "GroupLasso",
    "MaskSchedule",
    "PatternSchedule",
    "compact_",
    "learning_rate_factor",
    "parameter_groups",
    "snapshot",
]
