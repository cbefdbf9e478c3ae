"""The storages by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Form, Storage
from .compressed import COMPRESSED
from .dense import DenseStorage
from .packed import PackedStorage
from .quantized import QuantizedStorage
from .traits import traits_of

if TYPE_CHECKING:
    from ..config import LayerSpec

_BY_NAME: dict[str, Storage] = {
    "plain": DenseStorage(traits_of("plain")),
    "compressed": COMPRESSED,
    "int8": QuantizedStorage(traits_of("int8")),
    "float8_e4m3fn": QuantizedStorage(traits_of("float8_e4m3fn")),
    "int4": PackedStorage(traits_of("int4")),
}


def storage_of(name: str) -> Storage:
    """Return the storage of this name, one of `STORAGES`."""
    return _BY_NAME[name]


def forms_of(spec: LayerSpec) -> dict[str, Form]:
    """Return shape and dtype of a layer's weight, and of what is stored with it, by name."""
    return _BY_NAME[spec.storage].forms(spec)
