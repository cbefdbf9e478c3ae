"""Measure kernels on the device at hand and keep the times."""

from .document import VARIABLE as VARIABLE
from .document import Measurement, file
from .loading import load, status
from .loading import load_on_import as load_on_import
from .measuring import products_of, tune

__all__ = [
    "Measurement",
    "file",
    "load",
    "products_of",
    "status",
    "tune",
]
