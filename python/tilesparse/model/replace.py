"""Dense layers replaced by block-sparse ones, and the other way round."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_block_shape, check_flag
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, TileSparseError, UnsupportedError
from ..nn.experts import BlockSparseExperts, ExpertsLinear, Projections, projections_of
from ..nn.linear import BlockSparseLinear, best_blocks, dense_weight, is_conv1d
from ..storage.formats import storage_of
from .match import (
    CannotBeCutError,
    Match,
    Replacement,
    SkippedLayer,
    Target,
    check_blocks_can_be_chosen,
    check_can_be_cut,
    check_can_be_ranked,
    check_can_change,
    check_rules,
    hidden_attribute,
    layers_changed,
    match_modules,
    matching,
    names_of_modules,
    parsed,
    reason_from_holders,
    reason_not_patchable,
    references,
    refusal_of,
    replace_modules,
    rules_of,
    weight_reads,
)
from .report import Report, patch_report, warn_of_empty


def _made(matched: Sequence[Match]) -> tuple[list[Target], list[SkippedLayer]]:
    """Make all replacements; layers that cannot be cut are skipped unless a rule writes their name out."""
    targets: list[Target] = []
    skipped: list[SkippedLayer] = []
    for module, names, config, named in matched:
        name = names[0]
        try:
            made = sparse_layer(module, config)
            reason = hidden_attribute(module, made)
            if reason is None:
                targets.append(Target(names, module, made))
            else:
                skipped.append(SkippedLayer(name, type(module).__name__, reason))
        except TileSparseError as error:
            if named or not isinstance(error, CannotBeCutError):
                kind = InvalidArgumentError if isinstance(error, CannotBeCutError) else type(error)
                raise kind(f"layer {name!r}: {error}") from error
            skipped.append(SkippedLayer(name, type(module).__name__, str(error)))
    return targets, skipped


def sparse_layer(module: nn.Module, config: BlockSparseConfig) -> Replacement:
    """Return the block-sparse layer, or experts, that replace dense ones, which stay as they are."""
    projections, block_shape = projections_of(module), check_block_shape(config.block_shape)
    if projections is not None:
        return _sparse_experts(module, projections, config)
    check_blocks_can_be_chosen(module, block_shape)
    weight = dense_weight(module)
    _check_can_be_stored(weight, config.storage)
    # Chosen here, as the report names what that leaves empty.
    pattern = best_blocks(weight, None, config.density, block_shape, (1, 1))
    return BlockSparseLinear.from_linear(
        module, pattern=pattern, policy=config.policy, nm=config.nm, transposable=config.transposable
    ).to_storage(config.storage, granularity=config.granularity, activations=config.activations)


def _sparse_experts(
    module: nn.Module, projections: Projections, config: BlockSparseConfig
) -> BlockSparseExperts:
    block_shape = check_block_shape(config.block_shape)
    for name in projections.names():
        weight = module.get_parameter(name)
        rows, columns = (-1, -2) if projections.transposed else (-2, -1)
        check_can_be_cut((weight.shape[rows], weight.shape[columns]), block_shape)
        check_can_be_ranked(weight)
        _check_can_be_stored(weight, config.storage)
    return BlockSparseExperts.from_experts(
        module,
        config.density,
        block_shape=block_shape,
        nm=config.nm,
        transposable=config.transposable,
        storage=config.storage,
        granularity=config.granularity,
        activations=config.activations,
    )


def _check_can_be_stored(weight: Tensor, storage: str) -> None:
    if storage_of(storage).dtype is not None and not weight.is_meta and not bool(weight.isfinite().all()):
        raise InvalidArgumentError(f"its weight must be finite for the storage {storage!r}, got inf or nan")


def sparsify_(
    model: nn.Module,
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    *,
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    batch: Any = None,
    dry_run: bool = False,
    strict: bool = True,
) -> Report:
    """Make the linear layers and the experts of a model block-sparse, in place; on an error, none.

    They become `BlockSparseLinear` and `BlockSparseExperts`. The blocks of largest Frobenius norm are kept,
    with their values. `densify_` is the way back. Build the optimizer afterwards: the layers have new
    parameters. To train from scratch, call `reset_parameters` on them, which scales their weights to the
    smaller fan-in. Hooks of calls move to the new layers. docs/models.md says what stays dense.

    Args:
        model: changed in place.
        config: how layers are stored; or a config for each name or regular expression of layers, of which
            the first that matches a layer counts, and None leaves it dense.
        layers: names or regular expressions. A name such as "q_proj" matches modules whose last components
            equal it, with everything inside them: "l1" does not match "l10". The full name of a module
            matches that module alone, with everything inside. A regular expression, which has other special
            characters than dots, is matched against the start of names (`re.match`). None is all layers, or
            those that a mapping names.
        exclude: likewise, of layers that stay dense.
        filter_fn: takes a linear layer, or experts, and its qualified name, and returns True to make it
            block-sparse. None takes all but output embeddings, which take a config of their name.
        batch: what the model is called with, as of `prepare_for_inference_`. Layers whose weight other
            modules then read themselves, as Mamba's do, stay dense.
        dry_run: only report what would be done.
        strict: raise if a config makes no layer block-sparse. False leaves that to the report.

    Returns:
        The replaced layers, and the skipped ones with the reason.

    Examples:
        >>> report = sparsify_(model, BlockSparseConfig(density=0.5), filter_fn=lambda _, name: "mlp" in name)
        >>> print(report)
    """
    check_flag("dry_run", dry_run)
    check_flag("strict", strict)
    rules, names = rules_of(config, layers), names_of_modules(model)
    refusal = refusal_of(names, reason_not_patchable, exclude, filter_fn)
    reads, spare_outputs = weight_reads(model, batch), filter_fn is None
    matched, skipped = match_modules(model, names, rules, refusal, reads=reads, spare_outputs=spare_outputs)
    targets, uncut = _made(matched)
    skipped += uncut
    if strict:
        check_rules(rules, names, {target.module for target in targets}, skipped)
    used = {place for own in matching([rule.layers for rule in rules], names).values() for place in own}
    unused = [
        f"no layer matches {rule.layers.text!r}" for place, rule in enumerate(rules) if place not in used
    ]
    report = patch_report("sparsify_", names, targets, skipped, unused)
    if not dry_run:
        check_can_change(model)
        replace_modules(model, targets)
        layers_changed(model)
    warn_of_empty(layer for layer in report.layers if layer.density)
    return report


def densify_(
    model: nn.Module,
    *,
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> Report:
    """Give a model dense layers in place of block-sparse ones, zero where no block was kept.

    They are `torch.nn.Linear`. Models of Transformers get the kinds of layers back that their class has,
    ``Conv1D`` and experts among them. Hooks move, and the optimizer has to be built afterwards. On an error
    the model is as it was.

    Args:
        model: changed in place.
        layers: names or regular expressions, as of `sparsify_`; None is all block-sparse layers.
        exclude: likewise, of layers that stay.
        filter_fn: takes a block-sparse layer, or experts, and its name, and returns True to make it dense.

    Raises:
        UnsupportedError: weights are offloaded, layers have adapters, a model has no dense experts to take
            the places of sparse ones, or something else describes the model, such as another quantization.
    """
    check_can_change(model)
    names, twin = names_of_modules(model), _twin(model)
    there = {} if twin is None else dict(twin.named_modules(remove_duplicate=False))
    patterns = parsed("layers", ".*" if layers is None else layers)
    held = references(names)
    # Hooks that offload a weight hold its layer as well: _dense() says so.
    refusal = refusal_of(
        names, lambda one: None if _is_offloaded(one) else reason_from_holders(one, held), exclude, filter_fn
    )
    places = {module: own for module, own in matching(patterns, names).items() if _is_whole(module)}
    for place, pattern in enumerate(patterns if layers is not None else ()):
        if not any(place in own for own in places.values()):
            raise InvalidArgumentError(f"layers must name block-sparse layers, got {pattern.text!r}")
    targets: list[Target] = []
    skipped: list[SkippedLayer] = []
    for module in (module for module, own in places.items() if own):
        name = names[module][0]
        if (reason := refusal(name, module)) is not None:
            skipped.append(SkippedLayer(name, type(module).__name__, reason))
        else:
            targets.append(Target(names[module], module, _dense(name, module, there.get(name))))
    report = patch_report("densify_", names, targets, skipped)
    replace_modules(model, targets)
    layers_changed(model)
    return report


def _is_whole(module: nn.Module) -> bool:
    """Return True for layers that are replaced by themselves, unlike projections of experts."""
    return isinstance(module, Replacement) and not isinstance(module, ExpertsLinear)


def _is_offloaded(layer: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in layer.parameters())


def _twin(model: Any) -> Any:
    """Return a model of Transformers as its class makes it, without weights; None for others."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _dense(name: str, layer: Any, there: Any) -> nn.Module:
    """Return the dense layer of the kind that a model's class has there, which is None if it is not known."""
    if not name:
        raise InvalidArgumentError("model must hold the layer, got the layer itself; call its to_linear()")
    if _is_offloaded(layer):
        raise UnsupportedError(f"layer {name!r}: its weight is offloaded; load the model without")
    if name.endswith(".base_layer"):
        raise UnsupportedError(f"layer {name!r}: has an adapter; merge or remove it first")
    if isinstance(layer, BlockSparseExperts):
        if projections_of(there) is None:
            raise UnsupportedError(f"experts {name!r}: the model has no dense experts there")
        for own, tensor in layer.to_dense().items():
            setattr(there, own, nn.Parameter(tensor))
        for own, child in layer.named_children():
            if own not in layer.projections():
                there.add_module(own, child)
        there.config = layer.config
        return there.train(layer.training)  # type: ignore[no-any-return]
    linear: nn.Linear = layer.to_linear()
    if not storage_of(layer.storage).trainable:
        linear.weight.requires_grad_(True)  # values in that storage cannot be trained, dense ones can
    if is_conv1d(there) or (isinstance(there, nn.Linear) and type(there) is not nn.Linear):
        weight = linear.weight.detach()
        there.weight = nn.Parameter(
            weight.T.contiguous() if is_conv1d(there) else weight, linear.weight.requires_grad
        )
        there.bias = linear.bias
        return there.train(linear.training)  # type: ignore[no-any-return]
    return linear
