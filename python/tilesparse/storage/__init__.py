"""How the values of kept blocks are stored: plain, 2:4 compressed, or in 8 or 4 bits with scales."""

from .int4 import quantize_int4
from .traits import STORAGES as STORAGES
from .values import compress, expand, quantize, row_scales, two_of_four

__all__ = [
    "compress",
    "expand",
    "quantize",
    "quantize_int4",
    "row_scales",
    "two_of_four",
]
