"""One submodule fitted to its targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..calibrate.stream import Call, swapped, tensor_of
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from .report import FittedSubmodule


class Settings(NamedTuple):
    """Settings of all fits."""

    epochs: int
    lr: float
    training: Sequence[int]  # indices of batches
    held_out: Sequence[int]
    masks: Sequence[Tensor | None]
    device: torch.device
    autocast: torch.dtype | None
    generator: torch.Generator


def fit(
    name: str, part: nn.Module, calls: Sequence[Call], targets: Sequence[Tensor], settings: Settings
) -> FittedSubmodule:
    """Fit a submodule to its targets and keep the weights with the least held-out error."""
    parameters = trained_parameters(part)
    pairs = [_Pair(*one) for one in zip(calls, targets, settings.masks, strict=True)]

    def holding(values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        return swapped(part, {parameters[key]: value for key, value in values.items()})

    def error(values: Mapping[str, Tensor]) -> float:
        with holding(values):
            sums = [torch.stack(pairs[i].squares(name, part, settings.device)) for i in settings.held_out]
        wrong, whole = torch.stack(sums).double().sum(0).tolist()
        return float(wrong / whole) if whole else float(wrong)

    masters = {key: _master(value) for key, value in parameters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=settings.lr, weight_decay=0.0)
    steps = settings.epochs * len(settings.training)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    before = error({})
    if not math.isfinite(before):
        raise InvalidArgumentError(f"batches: submodule {name!r} gives NaN or infinity for them")
    best, kept = math.inf, {}
    for _ in range(settings.epochs):
        for i in torch.randperm(len(settings.training), generator=settings.generator, device="cpu").tolist():
            with torch.enable_grad(), holding(_rounded(masters, parameters)):
                wrong, whole = pairs[i].squares(name, part, settings.device)
                # A sum, and no mean: gradients in float16 are then far from 0, and Adam scales them anyhow.
                scale = whole.div(targets[i].numel()).sqrt().clamp_min(1e-6)
                torch.autograd.backward(wrong / scale)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        values = {key: value.detach().clone() for key, value in _rounded(masters, parameters).items()}
        after = error(values)
        if after < best:  # never of NaN
            best, kept = after, values
    if best < before:
        _keep(part, parameters, kept)
    return FittedSubmodule(name, before, best, best < before)


class _Pair(NamedTuple):
    """Call of a submodule in the sparse model, and its target."""

    call: Call
    target: Tensor
    mask: Tensor | None

    def squares(self, name: str, part: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ‖y - t‖² and ‖t‖²."""
        moved = self.call.on(device)
        output = tensor_of(name, part(*moved.args, **moved.kwargs))
        target = self.target.to(device)
        if output.shape != target.shape:
            raise InvalidArgumentError(
                f"teacher must give outputs of shape {tuple(output.shape)} at {name!r}, "
                f"got {tuple(target.shape)}"
            )
        dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
        output, target = output.to(dtype), target.to(dtype)
        if self.mask is not None and output.dim() > 2 and output.shape[:2] == self.mask.shape:
            left_out = self.mask.to(device).eq(0).view(*self.mask.shape, *(1,) * (output.dim() - 2))
            output, target = output.masked_fill(left_out, 0), target.masked_fill(left_out, 0)
        return (output - target).square().sum(), target.square().sum()


def trained_parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {name: parameter for name, parameter in part.named_parameters() if parameter.requires_grad}


def _master(parameter: nn.Parameter) -> Tensor:
    """Copy a parameter in float32 at least, so that small steps of weights in 16 bits are not lost."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(dtype, copy=True).requires_grad_()


def _rounded(masters: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: master.to(parameters[name].dtype) for name, master in masters.items()}


def _keep(part: nn.Module, parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    masks = {id(layer.weight): layer.mask for layer in part.modules() if isinstance(layer, BlockSparseLinear)}
    for name, parameter in parameters.items():
        mask = masks.get(id(parameter))  # what is masked has had gradients, and counts for nothing
        parameter.copy_(values[name] if mask is None else torch.where(mask, values[name], parameter))
