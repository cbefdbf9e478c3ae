"""Measure kernels and layers on the device at hand, choose kernels by the times, and keep them."""

from .advise import AdviceReport
from .measure import tune
from .product import Device, Product, choose, prefer
from .store import load

__all__ = [
    "AdviceReport",
    "Device",
    "Product",
    "choose",
    "load",
    "prefer",
    "tune",
]
