"""Training of sparse layers: patterns that move or shrink, gates, penalties, and masks of 2:4."""

from .gates import BlockGates
from .gradients import block_gradient_norms
from .gradual import Gradual, compact
from .lasso import GroupLasso
from .masks import MaskSchedule, set_nm
from .patterns import PatternSchedule, snapshot
from .scaling import learning_rate_factor, parameter_groups

__all__ = [
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
