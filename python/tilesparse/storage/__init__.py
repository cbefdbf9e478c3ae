"""How the values of kept blocks are stored: plain, 2:4 compressed, or in 8 or 4 bits with scales."""

from .quantize import compress, expand, quantize, quantize_int4, row_scales, two_of_four
from .traits import STORAGES as STORAGES

__all__ = [
    "compress",
    "expand",
    "quantize",
    "quantize_int4",
    "row_scales",
    "two_of_four",
]
