"""Files of models with block-sparse layers."""

from ..config import METHOD
from .conversion import convert
from .manifest import VERSION, check_section, forms, section
from .reader import load, prepare, prepare_for
from .writer import save

__all__ = [
    "METHOD",
    "VERSION",
    "check_section",
    "convert",
    "forms",
    "load",
    "prepare",
    "prepare_for",
    "save",
    "section",
]
