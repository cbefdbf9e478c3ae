"""The choice of kernels: the import path of 0.1.0 for what is now in `tilesparse.tuning`."""

from .tuning.devices import KINDS, Device, default_device, runs_on
from .tuning.products import OPS, Product, dtype_name, multiplied
from .tuning.selection import Candidate, KernelChoice, KernelInfo, choose, kernels, prefer

__all__ = [
    "KINDS",
    "OPS",
    "Candidate",
    "Device",
    "KernelChoice",
    "KernelInfo",
    "Product",
    "choose",
    "default_device",
    "dtype_name",
    "kernels",
    "multiplied",
    "prefer",
    "runs_on",
]
