"""Measure kernels and layers on the device at hand, choose kernels by the times, and keep them."""

from .advise import AdviceReport, Estimate
from .choose import Candidate, KernelChoice, KernelInfo
from .latency import LatencyTable, measure_latency, time_layers
from .measure import products_of, tune
from .product import Device, Product
from .store import VARIABLE as VARIABLE
from .store import MeasuredLayers, Measurement, file, load, status
from .store import load_on_import as load_on_import

__all__ = [
    "AdviceReport",
    "Candidate",
    "Device",
    "Estimate",
    "KernelChoice",
    "KernelInfo",
    "LatencyTable",
    "MeasuredLayers",
    "Measurement",
    "Product",
    "file",
    "load",
    "measure_latency",
    "products_of",
    "status",
    "time_layers",
    "tune",
]
