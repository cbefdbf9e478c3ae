"""Pruning of trained models: the blocks to keep, and their weights."""

from .allocation import AllocatedLayer, Allocation, allocate, erk, uniform
from .driver import PrunedLayer, PruneReport, prune_
from .groups import PermutationGroup, Rows, find_permutation_groups, permute_
from .obs import refit
from .permutation import PermutationReport, PermutedGroup, permute_model
from .profiles import ErrorProfiles, measure_errors

__all__ = [
    "AllocatedLayer",
    "Allocation",
    "ErrorProfiles",
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
    "permute_",
    "permute_model",
    "prune_",
    "refit",
    "uniform",
]
