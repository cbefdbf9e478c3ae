"""Files of models with block-sparse layers."""

from .conversion import convert
from .reader import load
from .writer import save

__all__ = ["convert", "load", "save"]
