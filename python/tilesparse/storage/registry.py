"""The storages by name."""

from __future__ import annotations

from ..config import QUANTIZED_BY_NAME, LayerSpec
from .base import Form, Storage
from .compressed import COMPRESSED
from .dense import DenseStorage
from .quantized import QuantizedStorage

_QUANTIZED = [QuantizedStorage(name, dtype) for name, dtype in QUANTIZED_BY_NAME.items()]
_BY_NAME: dict[str, Storage] = {
    storage.name: storage for storage in (DenseStorage(), COMPRESSED, *_QUANTIZED)
}


def storage_of(name: str) -> Storage:
    """Return the storage of this name, one of `config.STORAGES`."""
    return _BY_NAME[name]


def forms_of(spec: LayerSpec) -> dict[str, Form]:
    """Return shape and dtype of a layer's weight, and of what is stored with it, by name."""
    return _BY_NAME[spec.storage].forms(spec)
