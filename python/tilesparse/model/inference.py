"""Preparing a loaded model for inference, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .._checks import check_module, listed
from ..calibrate.stream import call, call_apart, device_of, listening, uncompiled
from ..errors import InvalidArgumentError
from ..nn.experts import ExpertsLinear
from ..nn.linear import BlockSparseLinear, evaluating
from ..nn.merged import product_of
from ..nn.weight import is_sharded, take_over
from ..tuning.measure import milliseconds, tune
from ..tuning.product import Product, choose, is_converted_in_calls, stored_for_kernels
from ..tuning.store import Measurement
from .fuse import FusedEncoder, fuse_encoders, merge_layers, mlps_to_fuse, unfuse
from .match import SkippedLayer, check_batch, layers_changed, replace_modules
from .report import Report

_CANDIDATES = 3  # kernels to measure for each product
_REPETITIONS = 5  # calls of the whole model

_Tokens = dict[BlockSparseLinear, list[int]]


@torch.no_grad()
def prepare_for_inference_(model: nn.Module, batch: Any = None) -> Report:
    """Make a model with block-sparse layers ready for inference, in place, once it is on its device.

    It is put into evaluation mode without gradients. MLPs are fused, see `fuse_mlps_`. On CUDA devices
    weights are stored as kernels read them and prepacked; on the CPU those that no kernel reads are kept
    dequantized as well. Layers with the policy "sparse" get "auto" where the dense product may be faster.
    With a batch

    - layers that their module calls with one x, such as q, k and v, share one product;
    - on the CPU, the layers of an encoder of Transformers in int8 become one operator (docs/embeddings.md);
    - the three kernels with the least estimates and the dense product are measured for every product and its
      number of tokens in that batch, and kept for later programs, see `tune`.

    What is merged or fused is compared with what the layers give by themselves. Names, hooks, state dicts and
    checkpoints stay as they are, except for what was stored in another way. Nothing is undone but by loading
    the model again. Layers that are changed afterwards compute by themselves again, see docs/serving.md.

    Args:
        model: changed in place; on an error it is as it was.
        batch: what the model is called with: a mapping of keywords, a tuple or list of arguments, or one
            tensor, on the model's device. None measures nothing and merges no layers.

    Returns:
        A `PreparedProduct` for each product of block-sparse layers, in the order of the model; what was not
        fused or merged, with the reason; and as ``facts`` "mlps" and "encoders", the names of fused MLPs and
        encoders, and with a batch "seconds_before" and "seconds_after", the times of a call of the model.

    Raises:
        UnsupportedError: no kernel computes a product on the device of a layer.
        TuneFileError: the file of measurements is damaged or cannot be written.

    Examples:
        >>> model = AutoModelForCausalLM.from_pretrained("pruned").cuda()
        >>> print(prepare_for_inference_(model, tokenizer("A text", return_tensors="pt").to("cuda")))
    """
    check_module(model)
    layers = _checked_layers(model)
    if batch is not None:
        check_batch(batch)
    before, tokens = None, _Tokens()
    if batch is not None:
        with evaluating(model):
            tokens = _tokens_of(model, batch, layers)
            before = _seconds(model, batch)
    with torch.inference_mode(False), ExitStack() as undo:
        _remember(model, layers, undo)
        model.eval().requires_grad_(False)
        mlps, skipped = mlps_to_fuse(model, batch)
        replace_modules(model, mlps)
        undo.callback(unfuse, model, mlps)
        stored = {layer for layer in layers if layer.weight.is_cuda and _store_for_kernels(layer)}
        if stored:
            layers_changed(model)
            model.requires_grad_(False)  # of what they hold now, too
        encoders: list[FusedEncoder] = []
        if batch is not None:
            apart, merged = merge_layers(model, partial(call_apart, model, batch))
            skipped += apart
            for product in merged:
                undo.callback(product.undo)
            encoders = fuse_encoders(model, partial(call_apart, model, batch), undo)
        steps = [_step(*product, tokens, stored) for product in _products(model).items()]
        measured = _measured(steps)
        for step in steps:
            _choose_policy(step)
            undo.callback(step.layer.prepack, False)
            step.layer.prepack(step.dequantized or not step.layer.weight.is_cpu)
        products = [entry for step in steps for entry in _entries(step, measured)]
        products += [
            PreparedProduct((name,), layer.policy, ("nothing to choose",))
            for name, layer in model.named_modules()
            if isinstance(layer, ExpertsLinear)
        ]
        after = None if batch is None else _seconds(model, batch)
        undo.pop_all()
    mlp_names = [target.names[0] for target in mlps]
    return _report(products, mlp_names, encoders, skipped, (before, after))


def _report(
    products: list[PreparedProduct],
    mlps: list[str],
    encoders: list[FusedEncoder],
    skipped: list[SkippedLayer],
    seconds: tuple[float | None, float | None],
) -> Report:
    notes = [f"{len(mlps)} MLPs fused" + (f": {listed(mlps)}" if mlps else "")]
    facts: dict[str, Any] = {"mlps": mlps}
    facts["encoders"] = [one.name for one in encoders if one.reason is None]
    for one in encoders:
        if one.reason is None:
            notes.append(f"{one.name}: {one.count} {one.kind} as one operator")
        else:
            skipped.append(SkippedLayer(one.name, f"{one.count} {one.kind}", one.reason))
    before, after = seconds
    if before is None or after is None:
        notes.append("pass a batch to merge layers of one x, to fuse more MLPs and to measure")
    else:
        notes.append(f"a call took {1e3 * before:.2f} ms before, {1e3 * after:.2f} ms after")
        facts |= {"seconds_before": before, "seconds_after": after}
    return Report("prepare_for_inference_", products, skipped, notes=notes, facts=facts)


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
    """A product of the prepared model, and the layers that share it."""

    members: dict[str, BlockSparseLinear]
    layer: BlockSparseLinear  # which computes it
    tokens: list[int]  # to measure it with
    done: tuple[str, ...]  # in words
    dequantized: bool  # it multiplies dense blocks that are kept beside the stored ones

    def products(self) -> list[Product]:
        """Return what kernels compute, for each number of tokens."""
        layer = self.layer
        if not self.dequantized:
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
    return [layer for layer in layers if not isinstance(layer, ExpertsLinear)]


def _tokens_of(model: nn.Module, batch: Any, layers: Sequence[BlockSparseLinear]) -> _Tokens:
    """Call the model, and return the numbers of tokens that each layer was called with."""
    found: _Tokens = {}
    own = {str(number): layer for number, layer in enumerate(layers)}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        counts = found.setdefault(own[name], [])
        if x.numel() and (count := x.numel() // own[name].in_features) not in counts:
            counts.append(count)

    with listening(own, note), uncompiled():
        call(model, batch)
    return found


def _seconds(model: nn.Module, batch: Any) -> float:
    return 1e-3 * milliseconds([lambda: call(model, batch)], device_of(model), _REPETITIONS)[0]


def _store_for_kernels(layer: BlockSparseLinear) -> bool:
    """Store a weight that every call would convert as kernels read it; return True if it was converted."""
    if is_sharded(layer.weight) or not is_converted_in_calls(layer):
        return False
    made = stored_for_kernels(layer)
    if made is not layer:
        take_over(layer, made)
    return True


def _products(model: nn.Module) -> dict[BlockSparseLinear, dict[str, BlockSparseLinear]]:
    """Return the layers that have one product, by name, by the layer that computes it."""
    found: dict[BlockSparseLinear, dict[str, BlockSparseLinear]] = {}
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear) and not isinstance(module, ExpertsLinear):
            product = product_of(module)
            found.setdefault(module if product is None else product.whole, {})[name] = module
    return found


def _step(
    layer: BlockSparseLinear,
    members: dict[str, BlockSparseLinear],
    tokens: _Tokens,
    stored: set[BlockSparseLinear],
) -> _Step:
    """Return what becomes of a product: kernels may multiply something else than the stored weight."""
    counts = [count for each in members.values() for count in tokens.get(each, ())]
    whole, on_cpu = not is_sharded(layer.weight), layer.weight.is_cpu
    dequantized = whole and on_cpu and is_converted_in_calls(layer, counts)
    done = ["merged"] if len(members) > 1 else []
    done += ["stored as kernels read it"] if stored & set(members.values()) else []
    done += ["dequantized once"] if dequantized else [] if on_cpu else ["prepacked"]
    measurable = dict.fromkeys(counts if whole and layer.density else ())
    return _Step(members, layer, list(measurable), tuple(done), dequantized)


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
    if layer.policy != "sparse" or step.dequantized or layer.activations is not None:
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
        both = times.microseconds[times.kernel], times.dense_microseconds
        yield PreparedProduct(names, layer.policy, step.done, count, kernel, *both)
    if not step.tokens:
        yield PreparedProduct(names, layer.policy, step.done)


@dataclass(frozen=True)
class PreparedProduct:
    """One product of a prepared model, and the number of tokens that the batch gave it.

    Attributes:
        names: names of the layers whose product it is, several if they share it.
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
    policy: str
    done: tuple[str, ...]
    tokens: int | None = None
    kernel: str | None = None
    microseconds: float | None = None
    dense_microseconds: float | None = None

    def row(self) -> dict[str, str]:
        """Return the cells of a table, by column."""
        parent = self.names[0].rpartition(".")[0] + "."
        times = self.microseconds, self.dense_microseconds
        us, dense_us = ("" if time is None else f"{time:.1f}" for time in times)
        return {
            "layers": ", ".join([self.names[0], *(name.removeprefix(parent) for name in self.names[1:])]),
            "policy": self.policy,
            "tokens": "" if self.tokens is None else str(self.tokens),
            "kernel": self.kernel or "",
            "us": us,
            "dense us": dense_us,
            "done": ", ".join(self.done),
        }
