"""Weights stored as kernels of their device read them, in models and in the plugin for vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..nn.linear import BlockSparseLinear
from ..nn.tensors import INDEX_NAMES
from ..storage.registry import storage_of
from .products import Product
from .selection import choose


def is_converted_in_calls(layer: BlockSparseLinear, tokens: Iterable[int] = ()) -> bool:
    """Return True if products with so many tokens would convert a layer's values in every call.

    Without numbers of tokens that of decode counts, 1: some kernels of the CPU read 4 bits of few tokens.
    """
    if storage_of(layer.storage).multiplied(layer.nm) != layer.storage:
        return True
    products = [Product.of(layer, tokens=count) for count in tokens or (1,)]
    return any(choose(product, layer.weight.device).expands for product in products)


def stored_for_kernels(layer: BlockSparseLinear, tokens: int = 1) -> BlockSparseLinear:
    """Return a layer whose values no call of so many tokens has to convert: kernels read them so."""
    if choose(Product.of(layer, tokens=tokens), layer.weight.device).expands:
        spec = replace(
            layer.spec, storage="plain", nm=None, transposable=False, scales=None, activations=None
        )
        own = {name: layer.get_buffer(name) for name in INDEX_NAMES}
        own |= {} if layer.bias is None else {"bias": layer.bias}
        return type(layer).from_state(spec, {"weight": layer.plain_values(), **own})
    multiplied = storage_of(layer.storage).multiplied(layer.nm)
    return layer if multiplied == layer.storage else layer.to_storage(multiplied)
