"""Parts of pruning beside `prune_`: densities, orders of features, and the refit of one weight."""

from .allocation import allocate, erk, measure_errors
from .obs import refit
from .permutation import PermutationGroup, permute_

__all__ = ["PermutationGroup", "allocate", "erk", "measure_errors", "permute_", "refit"]
