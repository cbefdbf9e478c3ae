"""The layers of a model that are pruned, and the configuration of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from .._names import NamePattern
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, TileSparseError
from ..nn.convert import dense_weight, is_conv1d
from ..nn.known_experts import stacked_parameters
from ..nn.linear import BlockSparseLinear
from ..patch.building import CannotBeCutError, check_blocks_can_be_chosen
from ..patch.matching import check_rules, match_modules, reason_not_linear
from ..patch.modules import names_of_modules
from ..patch.reports import SkippedLayer
from ..patch.rules import LayerOptions, Rule
from ..patch.weight_reads import Read, weight_reads
from ..pattern.block_pattern import BlockPattern
from ._checks import checked_config
from .configs import block_shape_of

STAYS_DENSE = "its config is None"  # why a layer is skipped


def targets_matching(
    model: nn.Module,
    layers: str | Sequence[str] | None,
    config: BlockSparseConfig,
    strict: bool = True,
    cut: bool = True,
    reads: Mapping[nn.Module, Read] | None = None,
) -> tuple[dict[str, BlockSparseConfig], list[SkippedLayer]]:
    """Return the layers that a config is for, and the linear ones that stay dense.

    Args:
        model: only read.
        layers: regular expressions, or None for all.
        config: for all of them.
        strict: each expression has to find a layer.
        cut: one that is named has to fit the blocks.
        reads: `weight_reads` of the model, where it is known.
    """
    regexes = [".*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    options = LayerOptions(config)
    rules = [Rule(NamePattern.parse(regex, argument="layers"), options) for regex in regexes]
    names = names_of_modules(model)
    reads = weight_reads(model) if reads is None else reads
    matched, others = match_modules(
        model, names, rules, reads, lambda name, module: reason_not_linear(module)
    )
    targets: dict[str, BlockSparseConfig] = {}
    for module, aliases, _, named in matched:
        try:
            with naming_layer(aliases[0]):
                check_blocks_can_be_chosen(module, block_shape_of(config))
        except CannotBeCutError as error:
            if cut and named:
                raise
            others.append(SkippedLayer(aliases[0], type(module).__name__, str(error.__cause__)))
        else:
            targets[aliases[0]] = config
    if strict and layers is not None and targets:
        check_rules(rules, names, {model.get_submodule(name) for name in targets}, others)
    return targets, [layer for layer in others if _has_weights(model, layer.name)]


def targets_named(
    model: nn.Module, configs: Mapping[str, BlockSparseConfig | None], argument: str
) -> tuple[dict[str, BlockSparseConfig], list[SkippedLayer]]:
    """Return layers with a config each, in the order of the model, and those that stay dense."""
    modules = dict(model.named_modules(remove_duplicate=False))
    reads = weight_reads(model)
    targets: dict[str, BlockSparseConfig] = {}
    skipped: list[SkippedLayer] = []
    for name, config in configs.items():
        if name not in modules:
            raise InvalidArgumentError(f"{argument} must name layers, got {name!r}")
        if config is None:
            skipped.append(SkippedLayer(name, type(modules[name]).__name__, STAYS_DENSE))
            continue
        config = checked_config(f"{argument}[{name!r}]", config)
        found, refused = targets_matching(model, f"{re.escape(name)}$", config, strict=False, reads=reads)
        if not found:
            reason = refused[0].reason if refused else "not nn.Linear"
            raise InvalidArgumentError(f"{argument}: layer {name!r} cannot be pruned: {reason}")
        first = next(iter(found))
        if first != name:
            raise InvalidArgumentError(f"{argument}: {name!r} is another name of {first!r}; use that one")
        targets[first] = config
    return {name: targets[name] for name, _ in model.named_modules() if name in targets}, skipped


def _has_weights(model: nn.Module, name: str) -> bool:
    """Return True for what reports name where it stays dense: linear layers, and 3-D weights."""
    module = model.get_submodule(name)
    linear = isinstance(module, nn.Linear | BlockSparseLinear) or is_conv1d(module)
    return linear or bool(stacked_parameters(module))


def config_of(name: str, pattern: BlockPattern, **stored: Any) -> BlockSparseConfig:
    """Return how a layer with a given pattern is to be stored."""
    if pattern.nnz == 0:
        raise InvalidArgumentError(f"patterns[{name!r}] must have at least one block, got {pattern!r}")
    return BlockSparseConfig(pattern.density, pattern.block_shape, **stored)


def check_shapes_of(model: nn.Module, patterns: Mapping[str, BlockPattern]) -> None:
    """Raise InvalidArgumentError unless each pattern has the shape of its layer."""
    for name, pattern in patterns.items():
        shape = tuple(dense_weight(model.get_submodule(name)).shape)
        if pattern.shape != shape:
            raise InvalidArgumentError(f"patterns[{name!r}] must have shape {shape}, got {pattern.shape}")


def reasons(skipped: Sequence[SkippedLayer]) -> str:
    """Say why layers were skipped, of the first three."""
    if not skipped:
        return "no linear layer is named so"
    return "; ".join(dict.fromkeys(f"{layer.name!r}: {layer.reason}" for layer in skipped[:3]))


@contextmanager
def naming_layer(name: str) -> Iterator[None]:
    """Add the name of a layer to errors."""
    try:
        yield
    except TileSparseError as error:
        raise type(error)(f"layer {name!r}: {error}") from error
