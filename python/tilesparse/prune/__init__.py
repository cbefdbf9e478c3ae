"""Parts of pruning beside `prune_`: budgets and orders of features."""

from .allocation import allocate, measure_errors
from .permutation import PermutationGroup, permute_

__all__ = ["PermutationGroup", "allocate", "measure_errors", "permute_"]
