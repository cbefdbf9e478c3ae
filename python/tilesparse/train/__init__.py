"""Training with 2:4 inside the blocks: when masks are chosen anew, and when a model has any."""

from .masks import MaskSchedule, set_nm

__all__ = ["MaskSchedule", "set_nm"]
