"""The dense layers of a model that a config is for, and what becomes of their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from .._checks import BLOCK_SIZES, check_block_shape, check_shapes, shown
from ..calibrate.calibration import naming_layer
from ..calibrate.experts import expanded
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..nn.dense import dense_weight, is_conv1d
from ..nn.experts import projections_of, reason_not_known, stacked_parameters
from ..nn.linear import BlockSparseLinear
from ..storage.formats import storage_of
from .match import (
    NOT_LINEAR,
    LayerOptions,
    Rule,
    check_rules,
    match_modules,
    reason_not_linear,
    refusal_of,
    rules_of,
)
from .modules import NamePattern, names_of_modules
from .replace import CannotBeCutError, check_blocks_can_be_chosen
from .report import SkippedLayer

Filter: TypeAlias = Callable[[nn.Module, str], bool]


def chosen_layers(
    model: nn.Module,
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Filter | None = None,
    *,
    strict: bool = True,
    cut: bool = True,
    refused: Mapping[str, str] | None = None,
) -> tuple[dict[str, BlockSparseConfig], list[SkippedLayer]]:
    """Return the linear layers that a config is for, each with its own, and those that stay dense.

    The first arguments are those of `prune_`. With `strict` each name or expression has to find a layer, and
    with `cut` one whose name is written out has to fit the blocks. `refused` are `reasons_against_experts` of
    the model, where these are linear layers.
    """
    names, rules = names_of_modules(model), rules_of(config, layers)
    refusal = refusal_of(names, reason_not_linear, exclude, filter_fn)

    def refusal_in_experts(name: str, module: nn.Module) -> str | None:
        home = name.rpartition(".")[0].rpartition(".")[0]
        return refusal(name, module) or (refused or {}).get(home)

    spare_outputs = filter_fn is None
    matched, skipped = match_modules(model, names, rules, refusal_in_experts, spare_outputs=spare_outputs)
    targets: dict[str, BlockSparseConfig] = {}
    found: set[nn.Module] = set()
    for module, aliases, options, named in matched:
        try:
            with naming_layer(aliases[0]):
                check_blocks_can_be_chosen(module, block_shape_of(options.config))
        except CannotBeCutError as error:
            if cut and named:
                raise
            skipped.append(SkippedLayer(aliases[0], type(module).__name__, str(error.__cause__)))
        else:
            targets[aliases[0]] = options.config
            found.add(module)
    named_by_mapping = not isinstance(config, BlockSparseConfig)
    if strict and (named_by_mapping or (layers is not None and targets)):
        check_rules(rules, names, found, skipped)
    return targets, [layer for layer in skipped if _has_weights(model.get_submodule(layer.name))]


def reasons_against_experts(model: nn.Module) -> dict[str, str]:
    """Say of modules of experts, by name, why sparse ones cannot take their places."""

    def refusal(name: str, module: nn.Module) -> str | None:
        return NOT_LINEAR if projections_of(module) is None else reason_not_known(module)

    names = names_of_modules(model)
    experts = {module: aliases for module, aliases in names.items() if projections_of(module) is not None}
    if not experts:
        return {}
    dense = Rule(NamePattern.parse(".*"), LayerOptions(BlockSparseConfig(1.0, min(BLOCK_SIZES))))
    skipped = match_modules(model, names, [dense], refusal)[1]
    own = {aliases[0] for aliases in experts.values()}
    return {layer.name: layer.reason for layer in skipped if layer.name in own}


def _has_weights(module: nn.Module) -> bool:
    """Return True for what reports name where it stays dense: linear layers, and 3-D weights."""
    linear = isinstance(module, nn.Linear | BlockSparseLinear) or is_conv1d(module)
    return linear or bool(stacked_parameters(module))


def reasons(skipped: Sequence[SkippedLayer]) -> str:
    """Say why layers were skipped, of the first three."""
    if not skipped:
        return "no linear layer is named so"
    return "; ".join(dict.fromkeys(f"{layer.name!r}: {layer.reason}" for layer in skipped[:3]))


def checked_config(where: str, config: object) -> BlockSparseConfig:
    """Return a config that keeps some blocks; `where` names the argument in messages."""
    if not isinstance(config, BlockSparseConfig):
        raise InvalidArgumentError(f"{where} must be a BlockSparseConfig, got {shown(config)}")
    if not config.density:
        raise InvalidArgumentError(f"{where}: density must be a number above 0 and at most 1, got 0")
    if config.transposable:
        raise InvalidArgumentError(
            f"{where}: transposable must be False: pruning chooses two of four weights in rows alone"
        )
    return config


def block_shape_of(config: BlockSparseConfig) -> tuple[int, int]:
    """Return (bn, bk) of a config, as which it keeps one number, too."""
    return check_block_shape(config.block_shape)


def check_names(argument: str, names: object) -> None:
    """Raise InvalidArgumentError unless names can be iterated over."""
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
    """Return (out_features, in_features) of a dense layer."""
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
