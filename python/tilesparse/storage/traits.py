"""Traits of each storage: what can be said of it without its conversions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._checks import PACKED

GRANULARITIES = ("row", "block")  # what may have a scale of its own in 8 and 4 bits
PER_FEATURE = "feature"  # what has one where x has 8 bits as well


class Traits(NamedTuple):
    """One storage of values.

    Attributes:
        name: as in `LayerSpec.storage`.
        dtype: of the stored values, which are finite and have scales; None is the layer's, without scales.
        trainable: True where the weight is its dense blocks, the only form that has a gradient.
        needs_nm: True where only 2:4 can be stored.
        allows_nm: False where 2:4 cannot be stored.
    """

    name: str
    dtype: torch.dtype | None = None
    trainable: bool = False
    needs_nm: bool = False
    allows_nm: bool = True


_BY_NAME = {
    traits.name: traits
    for traits in (
        Traits("plain", trainable=True),
        Traits("compressed", needs_nm=True),
        Traits("int8", torch.int8),
        Traits("float8_e4m3fn", torch.float8_e4m3fn),
        Traits("int4", PACKED, allows_nm=False),
    )
}
STORAGES = tuple(_BY_NAME)
STORED_DTYPES = frozenset(traits.dtype for traits in _BY_NAME.values()) - {None}  # not those of layers


def traits_of(storage: str) -> Traits:
    """Return the traits of the storage of this name, one of `STORAGES`."""
    return _BY_NAME[storage]
