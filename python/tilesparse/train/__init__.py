"""Training of sparse layers: patterns that move or shrink, gates, penalties, 2:4 masks, averages."""

from .averaging import AveragedModel
from .gates import BlockGates, GroupLasso, learning_rate_factor, parameter_groups
from .gradual import Gradual, compact
from .masks import MaskSchedule, set_nm
from .patterns import PatternSchedule, block_gradient_norms, snapshot

__all__ = [
    "AveragedModel",
    "BlockGates",
    "Gradual",
    "GroupLasso",
    "MaskSchedule",
    "PatternSchedule",
    "block_gradient_norms",
    "compact",
    "learning_rate_factor",
    "parameter_groups",
    "set_nm",
    "snapshot",
]
