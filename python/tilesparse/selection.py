"""The import path of 0.1.0 of `tilesparse.tuning.selection`."""

from .tuning.selection import (
    KINDS,
    OPS,
    Candidate,
    Device,
    KernelChoice,
    KernelInfo,
    Product,
    choose,
    default_device,
    dtype_name,
    kernels,
    multiplied,
    prefer,
    runs_on,
)

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
