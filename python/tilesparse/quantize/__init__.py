"""Layers with weights and activations in 8 bits, with scales chosen on calibration data."""

from .driver import quantize_

__all__ = ["quantize_"]
