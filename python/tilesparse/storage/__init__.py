"""How the values of kept blocks are stored: plain, 2:4 compressed, or in 8 bits with scales."""

from .registry import STORAGES as STORAGES
from .values import compress, expand, quantize, row_scales, two_of_four

__all__ = [
    "compress",
    "expand",
    "quantize",
    "row_scales",
    "two_of_four",
]
