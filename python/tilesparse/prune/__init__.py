"""Which blocks of a trained model to keep, and what their weights become."""

from .allocation import AllocatedLayer, Allocation, allocate, erk, uniform
from .choice import Choice, ErrorCurves
from .compensation import refit
from .driver import measure_errors, prune_model
from .latency import LatencyTable, measure_latency, time_layers
from .permutation import Fold, Rows, find_folds, permute_
from .report import PrunedLayer, PruneReport

__all__ = [
    "AllocatedLayer",
    "Allocation",
    "Choice",
    "ErrorCurves",
    "Fold",
    "LatencyTable",
    "PruneReport",
    "PrunedLayer",
    "Rows",
    "allocate",
    "erk",
    "find_folds",
    "measure_errors",
    "measure_latency",
    "permute_",
    "prune_model",
    "refit",
    "time_layers",
    "uniform",
]
