"""Which blocks of a trained model to keep, and what their weights become."""

from .choice import Choice, ErrorCurves
from .compensation import refit
from .driver import measure_errors, prune_model
from .report import PrunedLayer, PruneReport

__all__ = ["Choice", "ErrorCurves", "PruneReport", "PrunedLayer", "measure_errors", "prune_model", "refit"]
