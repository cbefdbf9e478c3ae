"""Layers with weights and activations in 8 bits, with scales chosen on calibration data."""

from .driver import quantize_
from .report import QuantizedLayer, QuantizeReport

__all__ = ["QuantizeReport", "QuantizedLayer", "quantize_"]
