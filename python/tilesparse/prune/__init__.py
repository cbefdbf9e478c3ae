"""Which blocks of a trained model to keep, and what their weights become."""

from .allocation import AllocatedLayer, Allocation, allocate, erk, uniform
from .compensation import refit
from .configs import Choice, ErrorCurves, ErrorProfiles
from .driver import prune_, prune_model
from .folds import Fold, Rows, find_folds, permute_
from .latency import LatencyTable, measure_latency, time_layers
from .permutation import PermutationReport, PermutedFold, permute_model
from .profiles import measure_errors
from .report import PrunedLayer, PruneReport
from .sensitivity import measure_sensitivity

__all__ = [
    "AllocatedLayer",
    "Allocation",
    "Choice",
    "ErrorCurves",
    "ErrorProfiles",
    "Fold",
    "LatencyTable",
    "PermutationReport",
    "PermutedFold",
    "PruneReport",
    "PrunedLayer",
    "Rows",
    "allocate",
    "erk",
    "find_folds",
    "measure_errors",
    "measure_latency",
    "measure_sensitivity",
    "permute_",
    "permute_model",
    "prune_",
    "prune_model",
    "refit",
    "time_layers",
    "uniform",
]
