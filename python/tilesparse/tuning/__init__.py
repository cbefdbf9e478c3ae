"""Measure kernels and layers on the device at hand, choose kernels by the times, and keep them."""

from typing import TYPE_CHECKING

from .._hooks import lazily

if TYPE_CHECKING:
    from .advise import AdviceReport
    from .measure import tune
    from .product import Device, Product, choose, prefer
    from .store import load

_PRODUCT = dict.fromkeys(("Device", "Product", "choose", "prefer"), "product")
__getattr__ = lazily(__name__, {"AdviceReport": "advise", "load": "store", "tune": "measure", **_PRODUCT})

__all__ = [
    "AdviceReport",
    "Device",
    "Product",
    "choose",
    "load",
    "prefer",
    "tune",
]
