"""Training of sparse layers: patterns that move or shrink, gates, penalties, 2:4 masks, averages."""

from .averaging import AveragedModel
from .gates import BlockGates
from .gradients import block_gradient_norms
from .gradual import Gradual, compact
from .lasso import GroupLasso
from .masks import MaskSchedule, set_nm
from .patterns import PatternSchedule
from .scaling import learning_rate_factor, parameter_groups
from .snapshots import snapshot

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
