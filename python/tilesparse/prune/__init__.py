"""Pruning of trained models: the blocks to keep, and their weights."""

from .allocation import AllocatedLayer, Allocation, ErrorProfiles, allocate, erk, measure_errors, uniform
from .driver import PrunedLayer, PruneReport, prune_
from .obs import refit
from .permutation import (
    PermutationGroup,
    PermutationReport,
    PermutedGroup,
    Rows,
    find_permutation_groups,
    permute_,
    permute_model,
)

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
