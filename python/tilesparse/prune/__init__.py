"""Pruning of trained models: the blocks to keep, and their weights."""

from .allocation import allocate, erk, measure_errors
from .driver import prune_
from .obs import refit
from .permutation import PermutationGroup, permute_

__all__ = ["PermutationGroup", "allocate", "erk", "measure_errors", "permute_", "prune_", "refit"]
