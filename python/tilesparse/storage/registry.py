"""The storages by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .base import Form, Storage
from .compressed import COMPRESSED
from .dense import DenseStorage
from .packed import PackedStorage
from .quantized import QuantizedStorage

if TYPE_CHECKING:
    from ..config import LayerSpec

_BY_NAME: dict[str, Storage] = {
    storage.name: storage
    for storage in (
        DenseStorage(),
        COMPRESSED,
        QuantizedStorage(torch.int8),
        QuantizedStorage(torch.float8_e4m3fn),
        PackedStorage(),
    )
}
STORAGES = tuple(_BY_NAME)
STORED_DTYPES = frozenset(storage.dtype for storage in _BY_NAME.values()) - {None}  # not those of layers


def storage_of(name: str) -> Storage:
    """Return the storage of this name, one of `STORAGES`."""
    return _BY_NAME[name]


def forms_of(spec: LayerSpec) -> dict[str, Form]:
    """Return shape and dtype of a layer's weight, and of what is stored with it, by name."""
    return _BY_NAME[spec.storage].forms(spec)
