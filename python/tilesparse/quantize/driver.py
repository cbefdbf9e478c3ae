"""Whole models quantized: weights in 8 or 4 bits, and perhaps activations in 8, by calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._checks import LARGEST
from .._listeners import check_can_change, layers_changed
from ..calibrate.calibration import call_model, check_model, collected, warn_of_few_tokens
from ..calibrate.stream import chosen_device, observing
from ..config import check_flag, check_quantized_activations, check_storage
from ..errors import InvalidArgumentError
from ..model.match import refusal_of
from ..model.modules import matching, names_of_modules, owners_of_parameters, parsed
from ..model.report import SkippedLayer, by_reason
from ..nn.experts import stacked_parameters
from ..nn.linear import BlockSparseLinear, check_whole
from ..storage.formats import QuantizedStorage, storage_of
from .report import QuantizeReport
from .smooth import Plan, is_linear
from .weights import WeightPlan, rounded_experts


def quantize_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    storage: str = "int8",
    activations: str | None = "auto",
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    smooth: bool = True,
    clip: bool = True,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    device: torch.device | str | int | None = None,
    strict: bool = True,
) -> QuantizeReport:
    """Store block-sparse layers in 8 or 4 bits, in place, by what that does to outputs on calibration data.

    `BlockSparseLinear.to_storage` does so without data. With 8-bit activations this chooses scales:

    - **Smoothing**: features of activations that are much larger than others set the scale of their token,
      and cost all others precision. They are divided by a scale, and the weights that read them multiplied by
      it, as in SmoothQuant (Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for
      Large Language Models", arXiv:2211.10438). The module before takes the inverse: a norm whose weight is
      divided, or a linear layer whose rows are, such as up_proj before down_proj or v_proj before o_proj.
      They are found by what scaling does to the model, not by names; the report says where there is none.
      Scales that change what the model gives for any batch are left out, and the report says so.
      Scales are powers of two, so the model computes the same before it is quantized, but for what float16
      rounds near its smallest numbers.
    - **Clipping** of the largest weights of an output feature, see `storage.quantize`.

    Scales of activations stay those of each token, found in every call: kernels take no others.

    With weights alone, those of experts are stored as `to_storage` does: which tokens an expert meets is not
    looked at. Beside 8-bit activations they stay as they are.

    With weights alone it rounds them one column after the other, and those behind make up for the error, as
    in GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers", arXiv:2210.17323), within the kept blocks of each row. Each row of a block is clipped where
    that costs least. Output features whose error would grow are rounded to the nearest, as `to_storage` does.

    A warning names layers that meet fewer tokens than they have inputs: their errors are then too small.

    Dense layers stay as they are; `sparsify_` with density 1 makes them block-sparse, with all their blocks.
    The model runs as in evaluation and is changed only at the very end: after an error it is as it was.
    Build optimizers afterwards.

    Args:
        model: with `BlockSparseLinear` in the storage "plain", not 2:4.
        batches: calibration data, as of `prune_`. With 8-bit activations a few thousand tokens do;
            weights alone want several tokens for each of a layer's in_features.
        storage: "int8", "float8_e4m3fn" or "int4".
        activations: the same where it has 8 bits, or None for weights alone. "auto" is None for int4 and the
            same for others.
        layers: names or regular expressions, as of `sparsify_`. None is all block-sparse layers.
        exclude: likewise, of layers that stay as they are.
        filter_fn: takes a layer and its name, and returns True to quantize it.
        smooth: False scales nothing. Without 8-bit activations nothing is scaled.
        clip: False takes the scales that `to_storage` finds, by weights alone.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        device: where blocks of the model run and errors are computed; None is that of its first parameter.
        strict: raise where no layer is left to quantize, or a name or expression finds none.

    Returns:
        The layers with their errors before and after, and what was left alone.

    Raises:
        InvalidArgumentError: an argument is not allowed, no layer is left to quantize, one is not run by the
            batches, or meets no token that counts, or inputs with NaN or infinities. The model is as it was.
        UnsupportedError: a layer is sharded. The model is as it was.

    Examples:
        >>> tilesparse.sparsify_(model, tilesparse.BlockSparseConfig(density=1.0, block_shape=64))
        >>> print(tilesparse.quantize_(model, batches, storage="int8"))
    """
    stored = _storage(storage)
    if activations == "auto":
        activations = storage if stored.dtype in LARGEST else None
    check_quantized_activations(activations, storage)
    for name, flag in (("smooth", smooth), ("clip", clip), ("strict", strict)):
        check_flag(name, flag)
    check_model(model)
    data = collected(batches)
    targets, skipped = _targets(model, layers, exclude, filter_fn, storage, activations, strict)
    if not targets:
        return QuantizeReport([], skipped, None, storage, activations)
    check_can_change(model)
    experts = [name for name in targets if getattr(model.get_submodule(name), "of_experts", False)]
    targets = [name for name in targets if name not in experts]
    made, described = rounded_experts(model, experts, storage)
    found, stack = [], None
    if targets:
        with observing(model):
            given = model, targets, data, forward or call_model, chosen_device(model, device), stored
            plan = WeightPlan(*given, clip) if activations is None else Plan(*given, smooth, clip)
            plan.make()
            plan.apply()
        found, stack = plan.layers, plan.stack
    for layer, rounded in made:
        layer.take_over(rounded)
    layers_changed(model)
    if activations is None:
        warn_of_few_tokens(model, {layer.name: layer.tokens for layer in found})
    return QuantizeReport([*found, *described], skipped, stack, storage, activations)


def _storage(name: str) -> QuantizedStorage:
    check_storage(name, None)
    storage = storage_of(name)
    if not isinstance(storage, QuantizedStorage):
        raise InvalidArgumentError(f"storage must have 8 or 4 bits, got {name!r}")
    return storage


def _targets(
    model: nn.Module,
    layers: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    storage: str,
    activations: str | None,
    strict: bool,
) -> tuple[list[str], list[SkippedLayer]]:
    """Return the layers to quantize, and the linear ones that stay as they are."""
    patterns, names = parsed("layers", ".*" if layers is None else layers), names_of_modules(model)
    targets: list[str] = []
    skipped: list[SkippedLayer] = []
    used: set[int] = set()  # places of patterns
    owners = owners_of_parameters(names)
    refusal = refusal_of(
        names,
        lambda module: _reason_to_skip(module, owners, storage, activations),
        exclude,
        filter_fn,
    )
    for module, places in matching(patterns, names).items():
        stacked = [] if isinstance(module, BlockSparseLinear) else stacked_parameters(module)
        if not places or not (is_linear(module) or stacked):
            continue
        name = names[module][0]
        reason = refusal(name, module)
        if reason is None:
            targets.append(name)
            used.update(places)
        else:
            skipped.append(SkippedLayer(name, type(module).__name__, reason))
    unused = (
        []
        if layers is None
        else [pattern.text for place, pattern in enumerate(patterns) if place not in used]
    )
    if strict and (unused or not targets):
        which = (
            f"layers must each name a layer to quantize, got {unused[0]!r}"
            if unused
            else "model: no layer is left to quantize"
        )
        why = "; ".join([*by_reason(skipped)][:3]) or "none is block-sparse"
        raise InvalidArgumentError(f"{which} ({why})")
    return targets, skipped


def _reason_to_skip(
    module: nn.Module,
    owners: Mapping[nn.Parameter, Sequence[nn.Module]],
    storage: str,
    activations: str | None,
) -> str | None:
    stacked = [] if isinstance(module, BlockSparseLinear) else stacked_parameters(module)
    if stacked:
        return f"dense 3-D {' and '.join(stacked)}; sparsify_ makes those of experts block-sparse"
    if not isinstance(module, BlockSparseLinear):
        return "dense; sparsify_ with density=1 makes it block-sparse with all of its blocks"
    if module.of_experts and activations is not None:
        return (
            "weights of experts, which have no products with 8-bit activations; activations=None stores them"
        )
    check_whole(module, "quantize_")
    if not storage_of(module.storage).trainable:
        stored = storage_of(module.storage).describe(module.nm, module.activations)
        return f"already stored as {stored}; to_storage('plain') makes it dense blocks again"
    if "weight" not in module._parameters:
        return "its weight is computed in every call"
    if len(owners[module.weight]) > 1:
        return "its weight is shared with another module"
    if module.weight.dtype == torch.float64 and activations is not None:
        return "its weight is float64, which has no products in 8 bits"
    if module.nm is not None and activations is None and storage_of(storage).allows_nm:
        return f"2:4, whose weights are rounded one by one, by to_storage({storage!r})"
    try:
        module.spec.with_storage(storage, activations=activations)
    except InvalidArgumentError as error:
        return str(error)
    return None
