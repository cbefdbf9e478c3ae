"""Files of models with block-sparse layers."""

from .reader import load
from .writer import save

__all__ = ["load", "save"]
