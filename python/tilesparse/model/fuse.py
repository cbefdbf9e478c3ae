"""Merged layers and fused MLPs, where a run of the model shows that the result is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..calibrate.stream import call_apart, listening, recording, tensors_in
from ..errors import TileSparseError, UnsupportedError
from ..nn.encoder import BlockSparseEncoder, Call, form_of
from ..nn.experts import ExpertsLinear
from ..nn.linear import BlockSparseLinear, evaluating
from ..nn.merged import MergedProduct, product_of, reason_not_one
from ..nn.mlp import BlockSparseMLP, form_of_sequence, may_be_mlp, reason_not_fused
from ..nn.weight import is_sharded
from .match import (
    SkippedLayer,
    Target,
    names_of_modules,
    owners_of_parameters,
    replace_modules,
    set_submodule,
    what_would_be_lost,
)
from .report import Report

_NOT_MERGED = "product of one x"  # kind of skipped layers


def merge_layers(model: nn.Module, run: Callable[[], Any]) -> tuple[list[SkippedLayer], list[MergedProduct]]:
    """Have layers share products that a run of the model, whose parameters are frozen, shows to have one x.

    What a second run gives with each shared product is compared with what its layers give by themselves.
    Returns the layers of one x that keep products of their own, and the products that were made.
    """
    names = names_of_modules(model)
    apart: dict[tuple[str, ...], str] = {}  # names of layers, and why
    made: dict[MergedProduct, tuple[str, ...]] = {}
    try:
        for parent, layers in _called_with_one_x(names, run):
            named = tuple(names[layer][0] for layer in layers)
            reason = _reason_apart(layers, names)
            if reason is None and any(product_of(layer) is None for layer in layers):
                made[MergedProduct(parent, layers)] = named
            elif reason is not None:
                apart[named] = reason
        wrong = _wrong(made, run) if made else set()
        for product in wrong:
            product.undo()
            apart[made[product]] = "their results differed from those of products of their own"
    except BaseException:
        for product in made:
            product.undo()
        raise
    position = {name: number for number, aliases in enumerate(names.values()) for name in aliases[:1]}
    skipped = [
        SkippedLayer(", ".join(named), _NOT_MERGED, reason)
        for named, reason in sorted(apart.items(), key=lambda one: position[one[0][0]])
    ]
    return skipped, [product for product in made if product not in wrong]


def _called_with_one_x(
    modules: dict[nn.Module, list[str]], run: Callable[[], Any]
) -> list[tuple[nn.Module, list[BlockSparseLinear]]]:
    """Run the model; return modules and layers that they call with one x in each of their calls."""
    children: dict[nn.Module, list[str]] = {}
    for module in modules:
        own = [name for name, child in module.named_children() if _is_layer(child)]
        if len(own) > 1:
            children[module] = own
    with recording(children) as recorded:
        run()
    found = []
    for module, entries in recorded.items():
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, calls in entries.items():
            groups.setdefault(tuple(calls), []).append(name)
        for key, group in groups.items():
            if len(group) > 1 and any(call is not None for call in key):
                found.append((module, [module.get_submodule(name) for name in group]))
    return found  # type: ignore[return-value]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, BlockSparseLinear) and not isinstance(module, ExpertsLinear)


def _reason_apart(layers: Sequence[BlockSparseLinear], names: dict[nn.Module, list[str]]) -> str | None:
    """Say why layers of one x keep products of their own, or return None."""
    owners = owners_of_parameters(names)
    for layer in layers:
        if is_sharded(layer.weight):
            return "their weight is sharded"
        if type(layer) is not BlockSparseLinear or "forward" in vars(layer):
            return f"one is a {type(layer).__name__} with a forward of its own"
        if len(names[layer]) > 1:
            return "one has several places in the model"
        if "weight" not in layer._parameters or hasattr(layer, "_hf_hook"):
            return "something else gives one of them its weight in each call"
        if any(len(owners[parameter]) > 1 for parameter in layer.parameters(recurse=False)):
            return "one has a parameter that another module has, too"
    merged = {product_of(layer) for layer in layers}
    if len(merged) > 1 or (merged != {None} and len(merged.pop().layers) != len(layers)):  # type: ignore[union-attr]
        return "one shares a product with other layers"
    return reason_not_one(layers)


def _wrong(products: dict[MergedProduct, tuple[str, ...]], run: Callable[[], Any]) -> set[MergedProduct]:
    """Run the model; return the products of which a layer takes a result that is not its own."""
    wrong: set[MergedProduct] = set()

    def compare(layer: Any, args: tuple[Any, ...], y: Tensor) -> None:
        product: Any = product_of(layer)
        own = product.own_result(layer, *args)
        if not torch.allclose(y, own, *_tolerances(own), equal_nan=True):
            wrong.add(product)

    layers = [layer for product in products for layer in product.layers]
    hooks = [layer.register_forward_hook(compare, prepend=True) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return wrong


def _tolerances(y: Tensor) -> tuple[float, float]:
    """Return relative and absolute: sums of other kernels are in another order."""
    relative = 8 * torch.finfo(y.dtype).eps ** (1.0 if y.itemsize < 4 else 0.5)
    return relative, relative * float(y.abs().mean()) if y.numel() else 0.0


@dataclass(frozen=True)
class FusedMLP:
    """One MLP that became a `BlockSparseMLP`; `activation` is None where PyTorch computes it."""

    name: str
    kind: str
    gated: bool
    activation: str | None

    def row(self) -> dict[str, str]:
        """Return the cells of a table, by column."""
        return {
            "MLP": self.name,
            "class": self.kind,
            "gated": "yes" if self.gated else "no",
            "activation": self.activation or "of PyTorch",
        }


def fuse_mlps_(model: nn.Module, batch: Any = None) -> Report:
    """Replace every MLP that a call shows to be one by a `BlockSparseMLP`, see its `from_module`.

    Call it when the layers are block-sparse: replaced, pruned or loaded. They stay the same under the same
    names, so state dicts, checkpoints and optimizers do not change, and a checkpoint loads into the model
    with or without them; a model that is made again has to be fused again. Hooks of its calls move.

    Args:
        model: changed in place.
        batch: what the model is called with: a mapping of keywords, a tuple or list of arguments, or one
            tensor. None fuses only what is known without a call, a `torch.nn.Sequential`.

    Returns:
        The fused MLPs, and modules with "MLP" in the name of their class that stay, with the reason.
    """
    targets, skipped = mlps_to_fuse(model, batch)
    replace_modules(model, targets)
    fused = [
        FusedMLP(target.names[0], type(target.module).__name__, mlp.gated, mlp.activation_name)
        for target in targets
        if isinstance(mlp := target.replacement, BlockSparseMLP)
    ]
    return Report("fuse_mlps_", fused, skipped)


def unfuse(model: nn.Module, targets: Iterable[Target]) -> None:
    """Put back the modules that fused MLPs have replaced, with what these hold now."""
    back = []
    for target in targets:
        target.module._modules.update(target.replacement._modules)
        back.append(Target(target.names, target.replacement, target.module))
    replace_modules(model, back)


def mlps_to_fuse(model: nn.Module, batch: Any) -> tuple[list[Target], list[SkippedLayer]]:
    """Return the MLPs of a model with what is to replace them, and modules named so that stay."""
    reasons: dict[nn.Module, str | None] = {}
    waiting: list[nn.Module] = []  # for a call
    names = names_of_modules(model)
    for module in names:
        known = form_of_sequence(module) is not None
        if isinstance(module, BlockSparseMLP) or not (known or _is_named(module) or may_be_mlp(module)):
            continue
        reasons[module] = what_would_be_lost(module) or reason_not_fused(module)
        if module is model:
            reasons[module] = "the model itself cannot be replaced in place"
        if not known and reasons[module] is None:
            waiting.append(module)
    called = {names[module][0]: module for module in waiting}
    found = _seen(model, batch, called) if called and batch is not None else {}
    targets, skipped = [], []
    for module, reason in reasons.items():
        seen: BlockSparseMLP | str
        if reason is not None:
            seen = reason
        elif module not in waiting:
            seen = BlockSparseMLP.from_module(module)
        elif batch is None:
            seen = "a call shows what it computes: pass a batch"
        else:
            seen = found.get(names[module][0], "the batch does not call it")
        if isinstance(seen, BlockSparseMLP):
            targets.append(Target(names[module], module, seen))
        elif _is_named(module):
            skipped.append(SkippedLayer(names[module][0], type(module).__name__, seen))
    return targets, skipped


def _is_named(module: nn.Module) -> bool:
    return "mlp" in type(module).__name__.lower()


def _seen(model: nn.Module, batch: Any, modules: Mapping[str, nn.Module]) -> dict[str, BlockSparseMLP | str]:
    """Call the model; return of each module what can replace it in all of its calls, or why nothing can."""
    found: dict[str, BlockSparseMLP | str] = {}

    def look(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(found.get(name), str):
            return
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            found[name] = "it is called with more than one tensor, or by keyword"
            return
        try:
            found[name] = BlockSparseMLP.from_module(modules[name], args[0])
        except UnsupportedError as error:
            found[name] = str(error).removeprefix("module: ")

    with listening(modules, look), evaluating(model), torch.inference_mode(False), torch.no_grad():
        call_apart(model, batch)
    return found


@dataclass(frozen=True)
class FusedEncoder:
    """The layers of an encoder, as one operator: see `prepare_for_inference_`."""

    name: str  # of the list that has them
    kind: str  # class of a layer
    count: int
    reason: str | None  # why they compute by themselves


_LEAST = 0.997  # cosine of a token's features
_CLOSE = 0.05  # of what a layer returns: x and what attention reads are rounded to 8 bits
_LIKE = 0.8  # cosine of what a model gives with and without the operator, at least
_LAYERS = 4  # block-sparse ones in int8 that a layer of an encoder has at least


def encoders_in(model: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of layers that are known, and of others in int8 on the CPU, to be named."""
    found, inside = [], set[nn.Module]()
    for one in model.modules():
        if type(one) is not nn.ModuleList or not len(one) or one in inside:
            continue
        if all(map(form_of, one)) or all(map(_is_in_int8, one)):
            found.append(one)
            inside |= {*one.modules()}
    return found


def _is_in_int8(layer: nn.Module) -> bool:
    linears = (one for one in layer.modules() if isinstance(one, BlockSparseLinear) and one.weight.is_cpu)
    return sum(one.storage == one.activations == "int8" for one in linears) >= _LAYERS


def fuse_encoders(model: nn.Module, run: Callable[[], Any], undo: ExitStack) -> list[FusedEncoder]:
    """Have encoders compute their layers as one operator, where a run shows that it gives the same."""
    names = names_of_modules(model)
    layers = {one: list(one) for one in encoders_in(model)}
    calls: dict[nn.Module, _LayerCall] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        calls.setdefault(layer, _LayerCall(args, kwargs, y))

    with ExitStack() as stack:
        for layer in (layer for own in layers.values() for layer in own):
            stack.callback(layer.register_forward_hook(note, with_kwargs=True).remove)
        given = _given(run) if layers else None
    done = [one for one in names if isinstance(one, BlockSparseEncoder)]
    found = [FusedEncoder(names[one][0], type(one[0]).__name__, len(one), None) for one in done]
    for old, own in layers.items():
        (name, *others), kind = names[old], type(own[0]).__name__
        parent = model.get_submodule(name.rpartition(".")[0])
        reason = None
        if others or parent is old:
            reason = "it has several places in the model, or is the model itself"
        elif not all(layer in calls for layer in own):
            reason = "the batch does not call it"
        else:
            try:
                new = BlockSparseEncoder(own, parent, in_tuple=isinstance(calls[own[0]].y, tuple))
                new.train(old.training)
            except TileSparseError as error:
                reason = str(error)
            else:
                with ExitStack() as stack:
                    stack.callback(set_submodule, model, name, old)
                    set_submodule(model, name, new)
                    reason = _reason_differs(new, [calls[layer] for layer in own], given, run)
                    if reason is None:
                        undo.push(stack.pop_all())
        found.append(FusedEncoder(name, kind, len(own), reason))
    return found


@dataclass(frozen=True)
class _LayerCall:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    y: Any


def _given(run: Callable[[], Any]) -> Any:
    """Return what a model gives, with the same random numbers in every call."""
    with torch.random.fork_rng(()):
        torch.default_generator.manual_seed(0)
        return run()


def _reason_differs(
    encoder: BlockSparseEncoder, calls: Sequence[_LayerCall], given: Any, run: Callable[[], Any]
) -> str | None:
    """Compare an operator of each layer with what the layer gave, and see that the model uses that of all."""
    call = encoder.call(calls[0].args, calls[0].kwargs)
    if isinstance(call, str):
        return call
    last: Tensor | None = None
    for operator, layer in zip(encoder.operators(), calls, strict=True):
        x = layer.args[0] if layer.args else layer.kwargs["hidden_states"]
        if last is not None and not torch.equal(x, last):
            return "its model changes what a layer gives to the next"
        last = layer.y[0] if isinstance(layer.y, tuple) else layer.y
        mine, theirs = operator(call.pack(x), call.offsets).float(), call.pack(last).float()
        error = float((mine - theirs).norm() / theirs.norm())
        cosine = float(nn.functional.cosine_similarity(mine, theirs, -1).mean())
        if not (error <= _CLOSE and cosine >= _LEAST):  # or no numbers
            return f"its results differ from those of its layers: cosine {cosine:.4f}, error {error:.4f}"
    return _reason_not_used(encoder, call, given, run)


def _reason_not_used(
    encoder: BlockSparseEncoder, call: Call, given: Any, run: Callable[[], Any]
) -> str | None:
    """See that the model gives the same with the operator, whatever masked tokens get."""

    def kept(value: Any) -> list[Tensor]:
        found = [one for one in tensors_in(value) if one.is_floating_point()]
        if call.rows is None:
            return found
        return [one.flatten(0, 1)[call.rows] if one.shape[:2] == call.shape[:2] else one for one in found]

    results, count = [kept(given)], encoder.count
    try:
        for masked in (0.0,) if call.rows is None else (1.0, 0.0):
            encoder.masked = masked
            results.append(kept(_given(run)))
    except Exception as error:
        return f"its model cannot call all layers as one: {type(error).__name__}: {error}"
    finally:
        encoder.masked = 0.0
    if encoder.count == count:
        return "its model does not loop over it"
    if len({tuple(one.shape for one in result) for result in results}) > 1:
        return "its model gives other tensors"
    before, *after = ([one.float().nan_to_num().flatten() for one in result] for result in results)
    if not all(map(torch.equal, after[0], after[-1])):
        return "its model reads hidden states of masked tokens"
    for pair in zip(before, after[-1], strict=True):
        if not torch.equal(*pair) and nn.functional.cosine_similarity(*pair, 0) < _LIKE:
            return "its model gives other results"
    return None
