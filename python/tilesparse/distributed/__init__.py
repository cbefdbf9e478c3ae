"""Models that several processes train together."""

from typing import TYPE_CHECKING

from .._hooks import lazily
from .sync import synchronize_patterns

if TYPE_CHECKING:
    from .parallel import ColwiseParallel, ExpertParallel, RowwiseParallel

_STYLES = ("ColwiseParallel", "ExpertParallel", "RowwiseParallel")
# The styles are imported once they are asked for: DTensors take long, and not every PyTorch has them.
__getattr__ = lazily(__name__, dict.fromkeys(_STYLES, "parallel"))

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "RowwiseParallel",
    "synchronize_patterns",
]
