"""Measures kernels on the GPU at hand and keeps what was measured."""

from .measuring import VARIABLE as VARIABLE
from .measuring import Measurement, file, load, products_of, status, tune
from .measuring import load_on_import as load_on_import

__all__ = [
    "Measurement",
    "file",
    "load",
    "products_of",
    "status",
    "tune",
]
