"""Which blocks of a trained model to keep, and what their weights become."""

from .choice import Choice, ErrorCurves

__all__ = ["Choice", "ErrorCurves"]
