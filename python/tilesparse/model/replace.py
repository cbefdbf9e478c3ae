"""Dense layers replaced by block-sparse ones, and the other way round."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import Progress, check_block_shape, check_text, shown
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, InvalidTypeError, TileSparseError, UnsupportedError
from ..nn.experts import BlockSparseExperts, ExpertsLinear, Projections, projections_of
from ..nn.linear import BlockSparseLinear, best_blocks, dense_weight, is_conv1d
from ..nn.reference import ReferenceBlockSparseLinear
from ..storage.formats import storage_of
from .match import (
    CannotBeCutError,
    LayerOptions,
    Match,
    NamePattern,
    Refusal,
    Replacement,
    Rule,
    SkippedLayer,
    Target,
    check_blocks_can_be_chosen,
    check_can_be_cut,
    check_can_be_ranked,
    check_can_change,
    check_rules,
    hidden_attribute,
    is_linear,
    layers_changed,
    match_modules,
    matching,
    names_of_modules,
    parsed,
    reason_not_patchable,
    refusal_of,
    replace_modules,
    rules_of,
    weight_reads,
)
from .report import Report, patch_report, warn_of_empty


def patch(
    model: nn.Module,
    rules: Sequence[Rule],
    refusal: Refusal,
    make: Callable[[str, nn.Module, LayerOptions], Replacement],
    *,
    batch: Any,
    dry_run: bool,
    strict: bool,
    spare_outputs: bool = True,
) -> Report:
    """Replace the layers that rules match by what `make` returns; on an error, none.

    Other arguments are those of `sparsify_` and `match_modules`.
    """
    names, reads = names_of_modules(model), weight_reads(model, batch)
    matched, skipped = match_modules(model, names, rules, refusal, reads=reads, spare_outputs=spare_outputs)
    targets, uncut = _made(matched, make)
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
    chosen = {target.names[0] for target in targets if target.chosen}
    of_chosen = [
        one for one in report.layers if not chosen.isdisjoint((one.name, one.name.rpartition(".")[0]))
    ]
    warn_of_empty(layer for layer in of_chosen if layer.density)
    return report


def _made(
    matched: Sequence[Match], make: Callable[[str, nn.Module, LayerOptions], Replacement]
) -> tuple[list[Target], list[SkippedLayer]]:
    """Make all replacements; layers that cannot be cut are skipped unless a rule writes their name out."""
    progress = Progress(len(matched))
    targets: list[Target] = []
    skipped: list[SkippedLayer] = []
    for done, (module, names, options, named) in enumerate(matched, 1):
        name = names[0]
        try:
            made = make(name, module, options)
            reason = hidden_attribute(module, made)
            if reason is not None:
                skipped.append(SkippedLayer(name, type(module).__name__, reason))
                continue
            targets.append(Target(names, module, made, options.pattern is None))
        except TileSparseError as error:
            if named or not isinstance(error, CannotBeCutError):
                kind = InvalidArgumentError if isinstance(error, CannotBeCutError) else type(error)
                raise kind(f"layer {name!r}: {error}") from error
            skipped.append(SkippedLayer(name, type(module).__name__, str(error)))
        progress.show(done, f"layers made block-sparse, {name} the last")
    return targets, skipped


def sparse_layer(module: nn.Module, options: LayerOptions) -> Replacement:
    """Return the block-sparse layer, or experts, that replace dense ones, which stay as they are."""
    config, pattern = options.config, options.pattern
    projections = projections_of(module)
    if projections is not None:
        return _sparse_experts(module, projections, options)
    if isinstance(module, nn.Linear) or is_conv1d(module):
        if pattern is None:  # chosen here, as the report names what that leaves empty
            block_shape = check_block_shape(config.block_shape)
            check_blocks_can_be_chosen(module, block_shape)
            weight = dense_weight(module)
            pattern = best_blocks(weight, None, config.density, block_shape, options.parts)
        _check_can_be_stored(dense_weight(module), config.storage)
    layer = BlockSparseLinear.from_linear(
        module, pattern=pattern, policy=config.policy, nm=config.nm, transposable=config.transposable
    ).to_storage(config.storage, granularity=config.granularity, activations=config.activations)
    return ReferenceBlockSparseLinear(layer) if options.reference_layers else layer


def _sparse_experts(module: nn.Module, projections: Projections, options: LayerOptions) -> BlockSparseExperts:
    config = options.config
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
        parts=options.parts,
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
    with their values. `BlockSparseModelPatcher` has more options; `densify_` is the way back. Build the
    optimizer afterwards: the layers have new parameters.

    Args:
        model: changed in place.
        config: how layers are stored; or a config for each name or regular expression of layers, of which
            the first that matches a layer counts, and None leaves it dense.
        layers: names or regular expressions. A name such as "q_proj" matches modules whose last components
            equal it, and the full name of a module that module alone, with everything inside: see
            `BlockSparseModelPatcher.add_pattern`. None is all layers, or those that a mapping names.
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
    rules = rules_of(config, layers)
    refusal = refusal_of(names_of_modules(model), reason_not_patchable, exclude, filter_fn)

    return patch(
        model,
        rules,
        refusal,
        lambda _, module, options: sparse_layer(module, options),
        batch=batch,
        dry_run=dry_run,
        strict=strict,
        spare_outputs=filter_fn is None,
    )


def densify_(
    model: nn.Module,
    *,
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    dry_run: bool = False,
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
        dry_run: only report what would be done.

    Raises:
        UnsupportedError: weights are offloaded, layers have adapters, a model has no dense experts to take
            the places of sparse ones, or something else describes the model, such as another quantization.
    """
    check_can_change(model)
    names, twin = names_of_modules(model), _twin(model)
    there = {} if twin is None else dict(twin.named_modules(remove_duplicate=False))
    patterns = parsed("layers", ".*" if layers is None else layers)
    refusal = refusal_of(names, lambda _: None, exclude, filter_fn)
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
    if not dry_run:
        replace_modules(model, targets)
        layers_changed(model)
    return report


def _is_whole(module: nn.Module) -> bool:
    """Return True for layers that are replaced by themselves, unlike projections of experts."""
    return isinstance(module, Replacement) and not isinstance(module, ExpertsLinear)


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
    if any(parameter.is_meta for parameter in layer.parameters()):
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
    if isinstance(layer, BlockSparseLinear) and not storage_of(layer.storage).trainable:
        linear.weight.requires_grad_(True)  # values in that storage cannot be trained, dense ones can
    if is_conv1d(there) or (isinstance(there, nn.Linear) and type(there) is not nn.Linear):
        weight = linear.weight.detach()
        there.weight = nn.Parameter(
            weight.T.contiguous() if is_conv1d(there) else weight, linear.weight.requires_grad
        )
        there.bias = linear.bias
        return there.train(linear.training)  # type: ignore[no-any-return]
    return linear


class BlockSparseModelPatcher:
    r"""Replaces `torch.nn.Linear` layers of a model by `BlockSparseLinear`, in place.

    The blocks of largest Frobenius norm are kept, with their values. To train from scratch, call
    `reset_parameters` on the new layers, which scales their weights to the smaller fan-in. Build
    the optimizer after patching: the layers have new parameters.

    `torch.nn.Linear` itself is replaced, Transformers' ``Conv1D``, and its experts, by `BlockSparseExperts`.
    Hooks of calls move to the new layers, and their handles keep working. The report lists as skipped what
    docs/models.md says: subclasses, layers that cannot be cut into blocks or would lose something, and output
    embeddings unless a pattern writes out the last part of their name.

    Examples:
        >>> patcher = BlockSparseModelPatcher()
        >>> patcher.add_pattern(r"encoder\.layer\.\d+\.intermediate", {"density": 0.25})
        >>> report = patcher.patch_model(model)
        >>> print(report)
    """

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def add_pattern(
        self,
        regex: str,
        options: Mapping[str, Any] | BlockSparseConfig | None = None,
        *,
        fullmatch: bool = False,
    ) -> None:
        """Set how the layers are patched whose qualified name matches `regex`; the first match wins.

        Args:
            regex: a name or a regular expression. A name, such as "q_proj" or "mlp.up_proj", matches modules
                whose last components equal it, and everything inside them: "l1" does not match "l10". A
                regular expression, which has other special characters than dots, is matched against the start
                of the names of ``model.named_modules()`` (`re.match`).
            options: a `BlockSparseConfig`, or a mapping with any of its fields (``density``, ``block_shape``,
                ``nm``, ``storage``, ``transposable``, ``granularity``, ``policy``) and of

                - ``pattern``: the `BlockPattern` to use, which also sets density and block shape. Layers
                  on the meta device need one, as there is nothing to choose blocks by.
                - ``parts``: (r, c): keep as many blocks of each of r parts of the block rows and c of the
                  block columns, for tensor parallelism over so many processes; (1, 1), as beside ``pattern``.
                - ``reference_layers``: use `ReferenceBlockSparseLinear`; False.
                - ``untie``: patch a layer even if it shares a parameter with another module, which then
                  keeps the dense one; False.

                Layers of which the density would keep no block are skipped, except for density 0 itself.
            fullmatch: the whole name has to match.
        """
        self._rules.append(Rule(NamePattern.parse(regex, fullmatch=fullmatch), LayerOptions.parse(options)))

    def is_patchable(self, name: str, module: nn.Module) -> bool:
        """Return True if `new_child_module` can replace a module of this kind. Override to change it.

        Args:
            name: its qualified name in the model.
            module: the module.
        """
        check_text("name", name)
        return is_linear(module) or projections_of(module) is not None

    def new_child_module(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> Replacement:
        """Make the replacement of one layer. Override to change it.

        An override returns a layer of one of these classes or their subclasses; `is_patchable` leaves layers
        out.

        Args:
            name: its qualified name in the model.
            module: the dense layer, which stays as it is.
            options: those of `add_pattern`, with a value for every one.
        """
        return sparse_layer(module, LayerOptions.parse(options))

    def get_patchable_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers of `model` that patterns can apply to, by qualified name."""
        return {name: module for name, module in model.named_modules() if self.is_patchable(name, module)}

    def patch_model(
        self, model: nn.Module, *, batch: Any = None, dry_run: bool = False, strict: bool = True
    ) -> Report:
        """Replace every layer that a pattern matches; on an error, none.

        A module registered under several names is replaced by one module under all of them. A warning names
        layers whose chosen blocks leave block rows or columns empty.

        Args:
            model: changed in place.
            batch: as of `sparsify_`.
            dry_run: only report what would be done.
            strict: raise if there is no pattern, or if one makes no layer block-sparse; layers that are
                block-sparse already count. False leaves that to the report.
        """

        def refusal(name: str, module: nn.Module) -> str | None:
            if self.is_patchable(name, module):
                return None
            return reason_not_patchable(module) or "is_patchable refuses it"

        def make(name: str, module: nn.Module, options: LayerOptions) -> Replacement:
            made: object = self.new_child_module(name, module, options.to_mapping())
            if not isinstance(made, Replacement):
                raise InvalidTypeError(
                    "new_child_module must return a BlockSparseLinear, ReferenceBlockSparseLinear or "
                    f"BlockSparseExperts, got {shown(made)}; is_patchable leaves layers out"
                )
            return made

        return patch(model, self._rules, refusal, make, batch=batch, dry_run=dry_run, strict=strict)
