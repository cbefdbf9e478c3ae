"""Layers of a model as budgets and tables see them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .._checks import check_shapes
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..nn.convert import dense_weight, is_conv1d
from ..storage.registry import storage_of
from ._checks import checked_config
from .configs import block_shape_of
from .experts import expanded


def check_names(argument: str, names: object) -> None:
    if not isinstance(names, Iterable):
        raise InvalidArgumentError(f"{argument} must be names of layers, got {type(names).__name__}")


def dense_layers(argument: str, model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Return the dense linear layers of these names; `argument` names their source in messages."""
    check_names(argument, names)
    with expanded(model):
        modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, Any] = {}
    seen: dict[nn.Module, str] = {}
    for name in names:
        module = modules.get(name) if isinstance(name, str) else None
        if module is None or not (isinstance(module, nn.Linear) or is_conv1d(module)):
            kind = "no layer of that name" if module is None else type(module).__name__
            raise InvalidArgumentError(f"{argument} must name dense linear layers, got {name!r}: {kind}")
        if module in seen:
            raise InvalidArgumentError(
                f"{argument}: {name!r} and {seen[module]!r} are one layer, give one name"
            )
        seen[module] = name
        found[name] = module
    if not found:
        raise InvalidArgumentError(f"{argument} must have at least one layer, got none")
    return found


def shape_of(layer: Any) -> tuple[int, int]:
    """(out_features, in_features) of a dense layer."""
    out_features, in_features = dense_weight(layer).shape
    return out_features, in_features


def kept_blocks(config: BlockSparseConfig, shape: tuple[int, int]) -> int:
    """Return how many blocks a config keeps of a weight; raise where it cannot be stored so."""
    rows, columns = check_shapes(shape, block_shape_of(config))[2]
    kept = round(config.density * rows * columns)
    if kept == 0:
        raise InvalidArgumentError(f"density: {config.density:g} of {rows * columns} blocks rounds to none")
    return kept


def checked_configs(
    argument: str, name: str, configs: Iterable[BlockSparseConfig], shape: tuple[int, int]
) -> list[BlockSparseConfig]:
    """Return the configs, after checking that a layer of this shape can become each of them."""
    try:
        checked = [checked_config("config", config) for config in configs]
        for config in checked:
            kept_blocks(config, shape)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{argument}: layer {name!r}: {error}") from error
    return checked


def described(config: BlockSparseConfig | None) -> tuple[str, str, str]:
    """Return density, block and storage as tables show them."""
    if config is None:
        return "dense", "", ""
    bn, bk = block_shape_of(config)
    storage = storage_of(config.storage).describe(config.nm, config.activations)
    return f"{config.density:.4g}", f"{bn}x{bk}", storage
