"""Models that several processes train together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .sync import synchronize_patterns

if TYPE_CHECKING:
    from .parallel import ColwiseParallel, ExpertParallel, RowwiseParallel


__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "RowwiseParallel",
    "synchronize_patterns",
]


def __getattr__(name: str) -> Any:
    """The styles, imported once they are asked for: DTensors take long, and not every PyTorch has them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".parallel", __name__), name)
