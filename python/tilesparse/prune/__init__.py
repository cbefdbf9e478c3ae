"""Pruning of trained models: the blocks to keep, and their weights."""

from .allocation import AllocatedLayer, Allocation, allocate, erk, uniform
from .compensation import refit
from .configs import ErrorProfiles
from .driver import prune_, prune_model
from .groups import PermutationGroup, Rows, find_permutation_groups, permute_
from .permutation import PermutationReport, PermutedGroup, permute_model
from .profiles import measure_errors
from .report import PrunedLayer, PruneReport

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
    "prune_model",
    "refit",
    "uniform",
]
