"""Files of models with block-sparse layers."""

from .manifest import METHOD, VERSION, check_section, forms, load, prepare, prepare_for, save, section

__all__ = [
    "METHOD",
    "VERSION",
    "check_section",
    "forms",
    "load",
    "prepare",
    "prepare_for",
    "save",
    "section",
]
