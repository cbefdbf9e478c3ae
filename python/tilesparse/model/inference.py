"""Everything that makes a loaded model faster in inference, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .._arguments import checked, shown
from .._listeners import layers_changed
from .._reports import aligned, listed, without_numbers
from ..calibrate.stream import call, call_apart, device_of, tensors_in, uncompiled
from ..errors import InvalidArgumentError, InvalidTypeError
from ..nn.experts import stacked_in
from ..nn.linear import BlockSparseLinear, evaluating
from ..storage.formats import storage_of
from ..tuning.choose import choose, is_converted_in_calls, stored_for_kernels
from ..tuning.measure import tune
from ..tuning.product import Product
from ..tuning.store import Measurement
from ..tuning.timing import milliseconds
from .fuse import FusedEncoder, SharedProduct, fuse_encoders, merge_layers
from .patcher import BlockSparseModelPatcher
from .report import FuseReport

_CANDIDATES = 3  # kernels to measure for each product
_REPETITIONS = 5  # calls of the whole model

_Tokens = dict[BlockSparseLinear, list[int]]


@checked
@torch.no_grad()
def prepare_for_inference(model: nn.Module, batch: Any = None) -> InferenceReport:
    """Make a model with block-sparse layers ready for inference, in place, once it is on its device.

    In this order:

    - The model is put into evaluation mode, and its parameters record no gradients.
    - MLPs are fused, see `BlockSparseModelPatcher.fuse_mlps`.
    - On CUDA devices weights in a storage that no kernel of the device reads are stored as kernels read them.
    - With a batch, layers that their module calls with one x in each of its calls, such as q, k and v, share
      one product, where they differ in nothing but their rows. The same kernel gives the same bits; where
      another one is chosen for the larger product, sums may be in another order. What they share is compared
      with products of their own.
    - On the CPU, with a batch, the layers of an encoder of Transformers whose weights and activations are in
      int8 become one operator (docs/embeddings.md). What it gives is compared with what each layer gives.
    - On CUDA devices weights are prepacked, see `BlockSparseLinear.pack`. On the CPU those in a storage that
      no kernel reads are kept expanded as well; those of int4 only if the batch has more than the 8 tokens
      that kernels for it take.
    - With a batch, the three kernels with the least estimates and the dense product are measured for every
      product and its number of tokens in that batch, and kept for later programs, see `tune`.
    - Layers with the policy "sparse" get "auto" where the dense product may be faster: each call then takes
      the faster one for its tokens, by measurements or else by estimates. On the CPU, which has no
      estimates, that is where it was measured to be faster with the batch, or anywhere without a batch.

    Experts have one product and one form, and nothing to choose; the report names them.

    Names, hooks, state dicts and checkpoints stay as they are, except for what was stored in another way.
    Nothing is undone but by loading the model again, and a model that is made anew has to be prepared anew.
    Layers that are changed afterwards compute by themselves again, see the page on serving.

    Args:
        model: changed in place; on an error it is as it was.
        batch: what the model is called with: a mapping of keywords, a tuple or list of arguments, or one
            tensor, on the model's device. None measures nothing and merges no layers; of MLPs only those
            are fused that are known without a call. Choices then rest on estimates, and the report has no
            times.

    Returns:
        What was done to each layer or why not, and the time of a call before and after.

    Raises:
        InvalidArgumentError: the model has no block-sparse layer, or one on the meta device, or a parameter
            with a gradient, as in training.
        InvalidTypeError: the batch has no tensor.
        UnsupportedError: no kernel computes a product on the device of a layer.
        TuneFileError: the file of measurements is damaged or cannot be written.

    Examples:
        >>> model = AutoModelForCausalLM.from_pretrained("pruned").cuda()
        >>> print(prepare_for_inference(model, tokenizer("A text", return_tensors="pt").to("cuda")))
    """
    layers = _checked_layers(model)
    if batch is not None and next(tensors_in(batch), None) is None:
        raise InvalidTypeError(
            f"batch must be a tensor, or a mapping, tuple or list of tensors, got {shown(batch)}"
        )
    before, tokens = None, _Tokens()
    if batch is not None:
        with evaluating(model):
            tokens = _tokens_of(model, batch, layers)
            before = _seconds(model, batch)
    with torch.inference_mode(False), ExitStack() as undo:
        _remember(model, layers, undo)
        model.eval().requires_grad_(False)
        patcher = BlockSparseModelPatcher()
        mlps = patcher.fuse_mlps(model, batch)
        if mlps.mlps:
            undo.callback(patcher.undo, model)
        stored = {layer for layer in layers if layer.weight.is_cuda and _store_for_kernels(layer)}
        if stored:
            layers_changed(model)
            model.requires_grad_(False)  # of what they hold now, too
        shared: list[SharedProduct] = []
        encoders: list[FusedEncoder] = []
        if batch is not None:
            shared, merged = merge_layers(model, partial(call_apart, model, batch))
            for product in merged:
                undo.callback(product.undo)
            encoders = fuse_encoders(model, partial(call_apart, model, batch), undo)
        steps = [_step(*product, tokens, stored) for product in _products(model)]
        measured = _measured(steps)
        for step in steps:
            _choose_policy(step)
            undo.callback(step.layer.pack, False)
            step.layer.pack(step.expanded or not step.layer.weight.is_cpu)
        products = [entry for step in steps for entry in _entries(step, measured)]
        products += [_line((name,), layer, ("nothing to choose",)) for name, layer in _experts(model)]
        after = None if batch is None else _seconds(model, batch)
        stacked = [f"{name}.{own}".lstrip(".") for name, owns in stacked_in(model).items() for own in owns]
        undo.pop_all()
    return InferenceReport(products, mlps, shared, before, after, stacked, encoders)


def _remember(model: nn.Module, layers: Sequence[BlockSparseLinear], undo: ExitStack) -> None:
    """Have a model get back its modes, what its parameters record, and what its layers hold."""
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.requires_grad for parameter in model.parameters()}
    states = []
    for layer in layers:
        own = dict(vars(layer))
        states.append((layer, own | {name: dict(own[name]) for name in ("_parameters", "_buffers")}))

    def restore() -> None:
        for layer, own in states:
            changed = layer.weight is not own["_parameters"]["weight"]
            vars(layer).update(own)
            if changed:
                layers_changed(model)
        for module, mode in modes.items():
            module.training = mode
        for parameter, records in gradients.items():
            parameter.requires_grad_(records)

    undo.callback(restore)


class _Step(NamedTuple):
    """A product of the prepared model.

    Attributes:
        members: the layers that share it, by name.
        layer: the layer that computes it.
        tokens: numbers of tokens to measure it with.
        done: what was done, in words.
        expanded: True if it multiplies dense blocks that are kept beside the stored ones.
    """

    members: dict[str, BlockSparseLinear]
    layer: BlockSparseLinear
    tokens: list[int]
    done: tuple[str, ...]
    expanded: bool

    def products(self) -> list[Product]:
        """Return what kernels compute, for each number of tokens."""
        layer = self.layer
        if not self.expanded:
            return [Product.of(layer, tokens=count) for count in self.tokens]
        sizes, spec = (layer.in_features, layer.out_features), layer.spec
        return [Product(*sizes, count, layer.density, spec.block_shape, spec.dtype) for count in self.tokens]


def _checked_layers(model: nn.Module) -> list[BlockSparseLinear]:
    layers = [module for module in model.modules() if isinstance(module, BlockSparseLinear)]
    if not layers:
        raise InvalidArgumentError("model must have a block-sparse layer, got none")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise InvalidArgumentError(
                f"model must not be in training, got a gradient of {name}; end the training with "
                "model.zero_grad(), or prepare a copy.deepcopy of the model"
            )
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear) and module.weight.is_meta:
            raise InvalidArgumentError(f"model must be on its device, got {name} on the meta device")
    return [layer for layer in layers if not layer.of_experts]


def _experts(model: nn.Module) -> Iterator[tuple[str, BlockSparseLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear) and module.of_experts:
            yield name, module


def _tokens_of(model: nn.Module, batch: Any, layers: Iterable[BlockSparseLinear]) -> _Tokens:
    """Call the model, and return the numbers of tokens that each layer was called with."""
    found: _Tokens = {}

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        counts = found.setdefault(layer, [])
        if x.numel() and (count := x.numel() // layer.in_features) not in counts:
            counts.append(count)

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with uncompiled():
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _seconds(model: nn.Module, batch: Any) -> float:
    return 1e-3 * milliseconds([lambda: call(model, batch)], device_of(model), _REPETITIONS)[0]


def _store_for_kernels(layer: BlockSparseLinear) -> bool:
    """Store a weight that every call would convert as kernels read it; return True if it was converted."""
    if layer.shard is not None or not is_converted_in_calls(layer):
        return False
    made = stored_for_kernels(layer)
    if made is not layer:
        layer.take_over(made)
    return True


def _products(model: nn.Module) -> Iterator[tuple[dict[str, BlockSparseLinear], BlockSparseLinear]]:
    """Yield the layers that have one product, by name, and the layer that computes it."""
    found: dict[BlockSparseLinear, dict[str, BlockSparseLinear]] = {}
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear) and not module.of_experts:
            found.setdefault(module if module.merged is None else module.merged[0].whole, {})[name] = module
    yield from ((members, layer) for layer, members in found.items())


def _step(
    members: dict[str, BlockSparseLinear],
    layer: BlockSparseLinear,
    tokens: _Tokens,
    stored: set[BlockSparseLinear],
) -> _Step:
    """Return what becomes of a product: kernels may multiply something else than the stored weight."""
    counts = [count for each in members.values() for count in tokens.get(each, ())]
    whole, on_cpu = layer.shard is None, layer.weight.is_cpu
    expanded = whole and on_cpu and is_converted_in_calls(layer, counts)
    done = ["merged"] if len(members) > 1 else []
    done += ["stored as kernels read it"] if stored & set(members.values()) else []
    done += ["expanded once"] if expanded else [] if on_cpu else ["prepacked"]
    measurable = dict.fromkeys(counts if whole and layer.density else ())
    return _Step(members, layer, list(measurable), tuple(done), expanded)


def _measured(steps: Iterable[_Step]) -> Mapping[Product, Measurement]:
    """Measure kernels for all products, each on its device."""
    wanted: dict[torch.device, list[Product]] = {}
    for step in steps:
        wanted.setdefault(step.layer.weight.device, []).extend(step.products())
    found: dict[Product, Measurement] = {}
    for device, products in wanted.items():
        if products:
            found |= {one.product: one for one in tune(products, device, candidates=_CANDIDATES)}
    return found


def _choose_policy(step: _Step) -> None:
    """Let calls decide between the sparse and the dense product, where either may be faster."""
    layer = step.layer
    if layer.policy != "sparse" or step.expanded or layer.activations is not None:
        return
    if step.tokens and layer.weight.is_cpu:  # which has no estimates: other numbers of tokens stay sparse
        choices = [choose(product, layer.weight.device, policy="auto") for product in step.products()]
        if all(choice.kernel is not None for choice in choices):
            return
    for each in (layer, *step.members.values()):
        each.policy = "auto"


def _entries(step: _Step, measured: Mapping[Product, Measurement]) -> Iterator[PreparedProduct]:
    """Yield the lines of a report about a product, one for each number of tokens."""
    layer, names = step.layer, tuple(step.members)
    for count, product in zip(step.tokens, step.products(), strict=True):
        kernel = choose(product, layer.weight.device, policy=layer.policy).kernel or "dense"
        times = measured[product]
        least = times.microseconds[times.kernel]
        yield _line(names, layer, step.done, count, kernel, least, times.dense_microseconds)
    if not step.tokens:
        yield _line(names, layer, step.done)


def _line(
    names: tuple[str, ...], layer: BlockSparseLinear, done: tuple[str, ...], *measured: Any
) -> PreparedProduct:
    storage = storage_of(layer.storage).describe(layer.nm, layer.activations)
    shape = layer.out_features, layer.in_features
    return PreparedProduct(names, shape, storage, layer.policy, done, *measured)


@dataclass(frozen=True)
class PreparedProduct:
    """One product of a prepared model, and the number of tokens that the batch gave it.

    Attributes:
        names: names of the layers whose product it is, several if they share it.
        shape: (out_features, in_features), of all of them together.
        storage: storage of the layers as tables name it, such as "2:4 int8".
        policy: policy of the layers.
        done: what was done, in words.
        tokens: number of tokens of its x in the batch; None without a batch, or if nothing was measured: the
            batch does not call the layers, they have no blocks, or processes have parts of them.
        kernel: name of the kernel that computes it for so many tokens, "dense" if W is written out and
            multiplied densely; None without tokens.
        microseconds: measured time of the fastest sparse kernel; None without tokens.
        dense_microseconds: measured time of writing W out and multiplying densely; None likewise.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    storage: str
    policy: str
    done: tuple[str, ...]
    tokens: int | None = None
    kernel: str | None = None
    microseconds: float | None = None
    dense_microseconds: float | None = None


@dataclass(frozen=True)
class InferenceReport:
    """What `prepare_for_inference` did to each layer, or why not; ``str()`` makes a table of it.

    Attributes:
        products: the products of block-sparse layers, in the order of the model; one that the batch calls
            with several numbers of tokens has an entry for each.
        mlps: MLPs that were fused, and those that were not, with the reason.
        shared: layers that are called with one x: whether they share a product, or why not.
        seconds_before: time of a call of the model with the batch before, in evaluation mode; None without.
        seconds_after: the same afterwards.
        stacked: names of floating parameters of three dimensions, such as those of dense experts, which stay
            as they are.
        encoders: encoders of layers that are known: whether the layers are one operator, or why not.
    """

    products: list[PreparedProduct]
    mlps: FuseReport
    shared: list[SharedProduct]
    seconds_before: float | None
    seconds_after: float | None
    stacked: Sequence[str] = ()
    encoders: Sequence[FusedEncoder] = ()

    def __str__(self) -> str:
        columns = "shape", "storage", "policy", "tokens", "kernel", "us", "dense us", "done"
        rows: list[tuple[str, ...]] = [("layers", *columns)]
        for names, product, count in _groups(self.products):
            times = product.microseconds, product.dense_microseconds
            rows.append(
                (
                    names + (f" ({count})" if count > 1 else ""),
                    "x".join(map(str, product.shape)),
                    product.storage,
                    product.policy,
                    "" if product.tokens is None else str(product.tokens),
                    product.kernel or "",
                    *("" if time is None else f"{time:.1f}" for time in times),
                    ", ".join(product.done),
                )
            )
        lines = [*aligned(rows), f"{len(self.mlps.mlps)} MLPs fused"]
        lines += [f"not fused: {line}" for line in str(self.mlps).splitlines()[1 + len(self.mlps.mlps) :]]
        lines += [f"not merged: {', '.join(one.names)}: {one.reason}" for one in self.shared if one.reason]
        for one in self.encoders:
            text = f"{one.name}: {one.count} {one.kind}"
            lines.append(f"not fused: {text}: {one.reason}" if one.reason else f"{text} as one operator")
        if self.seconds_before is None:
            lines.append("pass a batch to merge layers of one x, to fuse more MLPs and to measure")
        if self.stacked:
            lines.append(f"3-D parameters that stay dense: {listed(self.stacked)}")
        if self.seconds_before is not None and self.seconds_after is not None:
            before, after = 1e3 * self.seconds_before, 1e3 * self.seconds_after
            lines.append(f"a call took {before:.2f} ms before, {after:.2f} ms after")
        return "\n".join(lines)


def _groups(products: Sequence[PreparedProduct]) -> list[tuple[str, PreparedProduct, int]]:
    """Return products whose lines differ in numbers of names alone together: names, the first, and how many.

    Measurements are of kinds of products, so those that are alike have the same times.
    """
    found: dict[tuple[object, ...], tuple[str, PreparedProduct, int]] = {}
    for one in products:
        parent = one.names[0].rpartition(".")[0]
        short = [one.names[0], *(name.removeprefix(f"{parent}.") for name in one.names[1:])]
        what = one.shape, one.storage, one.policy, one.done, one.tokens, one.kernel
        key = (without_numbers(", ".join(short)), *what, one.microseconds, one.dense_microseconds)
        name, first, count = found.get(key, (", ".join(short), one, 0))
        found[key] = (key[0] if count else name, first, count + 1)
    return list(found.values())


__all__ = ["InferenceReport", "PreparedProduct", "SharedProduct", "prepare_for_inference"]
