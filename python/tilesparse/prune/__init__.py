"""Pruning of trained models: the blocks to keep, and their weights."""

from .allocation import AllocatedLayer, Allocation, allocate, erk, uniform
from .driver import PrunedLayer, PruneReport, prune_
from .groups import PermutationGroup, Rows, find_permutation_groups, permute_
from .latency import LatencyTable, measure_latency, time_layers
from .obs import refit
from .permutation import PermutationReport, PermutedGroup, permute_model
from .profiles import measure_errors
from .targets import ErrorProfiles

__all__ = [
    "AllocatedLayer",
    "Allocation",
    "ErrorProfiles",
    "LatencyTable",
    "PermutationGroup",
    "PermutationReport",
    "PermutedGroup",
    "PruneReport",
    "PrunedLayer",
    "Rows",
    "allocate",
    "erk",
    "find_permutation_groups",
    "measure_errors",
    "measure_latency",
    "permute_",
    "permute_model",
    "prune_",
    "refit",
    "time_layers",
    "uniform",
]
