"""Storages of the values of kept blocks: plain, 2:4 compressed, or in 8 or 4 bits with scales."""

from ..config import STORAGES as STORAGES
from .quantize import compress, dequantize, quantize_int4, quantize_weights, row_scales, two_of_four

__all__ = [
    "compress",
    "dequantize",
    "quantize_int4",
    "quantize_weights",
    "row_scales",
    "two_of_four",
]
