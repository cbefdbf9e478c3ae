"""Measure kernels and layers on the device at hand, choose kernels by the times, and keep them."""

from .._files import VARIABLE as VARIABLE
from .._files import tune_file
from .advise import AdviceReport, Estimate
from .latency import LatencyTable, measure_latency, time_layers
from .measure import products_of, tune
from .product import Device, Product
from .selection import Candidate, KernelChoice, KernelInfo, choose, kernels, prefer
from .store import MeasuredLayers, Measurement, load, status
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
    "choose",
    "kernels",
    "load",
    "measure_latency",
    "prefer",
    "products_of",
    "status",
    "time_layers",
    "tune",
    "tune_file",
]
