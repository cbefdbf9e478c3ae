"""Which blocks of a trained model to keep, and what their weights become."""

from .allocation import AllocatedLayer, Allocation, allocate, erk, uniform
from .choice import Choice, ErrorCurves
from .latency import LatencyTable, measure_latency, time_layers
from .permutation import Fold, Rows, find_folds, permute_

__all__ = [
    "AllocatedLayer",
    "Allocation",
    "Choice",
    "ErrorCurves",
    "Fold",
    "LatencyTable",
    "Rows",
    "allocate",
    "erk",
    "find_folds",
    "measure_latency",
    "permute_",
    "time_layers",
    "uniform",
]
