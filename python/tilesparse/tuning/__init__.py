"""Measure kernels and layers on the device at hand, choose kernels by the times, and keep them."""

from .advise import AdviceReport
from .measure import LatencyTable, measure_latency, tune
from .product import Device, Product, choose, kernels, prefer
from .store import load

__all__ = [
    "AdviceReport",
    "Device",
    "LatencyTable",
    "Product",
    "choose",
    "kernels",
    "load",
    "measure_latency",
    "prefer",
    "tune",
]
