"""Measure the layers of a model as a call uses them, dense and block-sparse, and say what that is worth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..._arguments import checked, shown
from ..._checks import check_block_shape, checked_fraction
from ..._progress import Progress
from ..._runtime.timing import Call, name_of, own_numbers, undisturbed
from ...calibrate.calibration import check_model
from ...calibrate.stream import device_of, evaluating, tensors_in
from ...config import BlockSparseConfig
from ...errors import InvalidArgumentError, InvalidTypeError, TileSparseError, UnsupportedError
from ...nn.experts import BlockSparseExperts
from ...prune.measured import versions_of
from ..devices import KINDS
from ..products import dtype_name
from .contenders import Contender, call_of, contenders_for, in_own_dtype
from .model import Product, left_out, milliseconds_of_call, products_of
from .report import AdviceReport, MeasuredProduct

DENSITIES = (0.5, 0.25, 0.1)
_BLOCKS = {"cpu": 32, "cuda": 64}
_SECONDS = 40.0  # for the calls of all layers, about
_REPETITIONS = 3, 21  # of a call, at least and at most


@checked
@torch.no_grad()
def advise(
    model: nn.Module,
    batch: Any,
    *,
    densities: Sequence[float] = DENSITIES,
    block_shapes: Sequence[int | Sequence[int]] | None = None,
    layers: str | Sequence[str] | None = None,
) -> AdviceReport:
    """Measure whether block sparsity pays for a dense model, on its device and for its batch.

    Each product that a call of the model computes is measured once and counted as often as it is called:
    dense, dense in 8 bits, and sparse at each density, in the dtype of the model, in 8 bits with activations
    in 8 bits, and for decode with weights in int4. Dense 8 bits are what PyTorch has: on CUDA devices
    `torch._scaled_mm` of float8 with scales of rows, on the CPU its dynamically quantized int8 layer; the
    time to quantize x counts. Sparse layers have random blocks and values, as their time depends on neither.
    A call of the whole model is measured as well, and one in which these layers return zeros: what that
    takes counts as constant.

    The report recommends the highest density at which the model is estimated to be at least 1.1 times as
    fast as the fastest dense one, 8 bits included, or to stay dense. It knows nothing of quality: that
    depends on the model, and on pruning and training.

    Nothing is changed, converted or written. It takes about a minute, longer where single calls take
    seconds.

    Args:
        model: dense, on its device; experts of Transformers count, see `BlockSparseExperts.from_experts`.
        batch: what the model is called with: a mapping of keywords, a tuple or list of arguments, or one
            tensor, on the model's device.
        densities: kept fractions of the blocks.
        block_shapes: sizes of blocks, each (bn, bk) or one number for both; None is 64 on CUDA devices and
            32 on the CPU.
        layers: regular expressions of names, or None for all that can become block-sparse, as of
            `prune_`; all others count as the rest of the model.

    Returns:
        Times by layer and contender, estimates of the whole model, and a recommendation; ``print`` it.

    Raises:
        InvalidArgumentError: the model has no layer that can become block-sparse, is on the meta device or
            on several devices, or another argument is not allowed.
        InvalidTypeError: the batch has no tensor.

    Examples:
        >>> model = AutoModel.from_pretrained("sentence-transformers/all-MiniLM-L6-v2").eval()
        >>> print(advise(model, tokenizer(["A text"] * 32, return_tensors="pt")))
    """
    device = _checked_device(model)
    if next(tensors_in(batch), None) is None:
        raise InvalidTypeError(
            f"batch must be a tensor, or a mapping, tuple or list of tensors, got {shown(batch)}"
        )
    densities = _checked_densities(densities)
    shapes = _checked_shapes((_BLOCKS[device.type],) if block_shapes is None else block_shapes)
    configs = [BlockSparseConfig(densities[0], shape) for shape in shapes]
    with evaluating(model), own_numbers(device):
        products = products_of(model, batch, layers, configs)
        milliseconds, busy = milliseconds_of_call(model, batch, device)
        with left_out(model, [name for product in products for name in product.names]):
            rest, busy_in_rest = milliseconds_of_call(model, batch, device)
        dtype = max(products, key=lambda product: product.calls).dtype
        tokens = max(product.tokens for product in products)
        contenders = contenders_for(device, dtype, densities, shapes, tokens)
        measured, refused = _measured(products, contenders, device)
    return AdviceReport(
        name_of(device),
        dtype_name(dtype),
        versions_of(device),
        milliseconds,
        busy,
        rest if busy_in_rest is None else busy_in_rest,
        tuple(measured),
        {str(contender): reason for contender, reason in refused.items()},
    )


def _measured(
    products: Sequence[Product], contenders: Sequence[Contender], device: torch.device
) -> tuple[list[MeasuredProduct], dict[Contender, str]]:
    """Measure every product by every contender that computes it; also say why some compute none."""
    progress, found = Progress(len(products)), []
    refused: dict[Contender, str] = {}
    for done, product in enumerate(products, 1):
        calls, why = _calls_of(product, contenders, device)
        refused = {**why, **refused}
        times = _milliseconds(list(calls.values()), device, _SECONDS / len(products))
        kind = "linear" if product.experts is None else "experts"
        of = dict(zip(calls, times, strict=True))
        found.append(
            MeasuredProduct(tuple(product.names), kind, product.shape, product.tokens, product.calls, of)
        )
        progress.show(done, f"products measured, {'x'.join(map(str, product.shape))} the last")
    known = {contender for product in found for contender in product.milliseconds}
    return found, {contender: reason for contender, reason in refused.items() if contender not in known}


def _calls_of(
    product: Product, contenders: Sequence[Contender], device: torch.device
) -> tuple[dict[Contender, Call], dict[Contender, str]]:
    """Return a call of each contender that computes a product, and why others do not."""
    calls: dict[Contender, Call] = {}
    refused: dict[Contender, str] = {}
    *_, out_features, in_features = product.shape
    x = torch.randn(product.tokens, in_features, device=device, dtype=product.dtype)
    for contender in contenders:
        try:
            if product.experts is None:
                calls[contender] = call_of(contender, (out_features, in_features), x)
            else:
                calls[contender] = _call_of_experts(contender, *product.experts)
        except UnsupportedError as error:
            refused[contender] = str(error)
        except TileSparseError:  # its shape does not fit the blocks
            continue
    return calls, refused


def _call_of_experts(
    contender: Contender, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    if contender != in_own_dtype(contender):
        raise UnsupportedError("experts are measured in their own dtype")
    config = contender.config
    sparse = (
        None
        if config is None
        else BlockSparseExperts.from_experts(module, config.density, block_shape=config.block_shape)
    )
    computing = module if sparse is None else sparse.eval()
    return lambda: computing(*args, **kwargs)


def _milliseconds(calls: Sequence[Call], device: torch.device, seconds: float) -> list[float]:
    """Return the time of each call, of as many calls as fit into so many seconds."""
    for call in calls:
        call()
    start = time.perf_counter()
    for call in calls:
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    least, most = _REPETITIONS
    fitting = int(seconds / (time.perf_counter() - start))
    return undisturbed(calls, device, min(most, max(least, fitting)))


def _checked_device(model: nn.Module) -> torch.device:
    check_model(model)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise InvalidArgumentError(f"model must be on one device, got {sorted(map(str, devices))}")
    device = device_of(model)
    if device.type not in KINDS:
        raise InvalidArgumentError(f"model must be on the CPU or a CUDA device, got {device}")
    return device


def _checked_densities(densities: Sequence[float]) -> list[float]:
    found = [checked_fraction("densities", density) for density in densities]
    if not found or 0 in found:
        raise InvalidArgumentError(f"densities must be numbers above 0 and at most 1, got {shown(densities)}")
    return sorted(dict.fromkeys(found), reverse=True)


def _checked_shapes(block_shapes: Sequence[Any]) -> list[tuple[int, int]]:
    found = [check_block_shape(shape) for shape in block_shapes]
    if not found:
        raise InvalidArgumentError("block_shapes must have at least one block shape, got none")
    return list(dict.fromkeys(found))
