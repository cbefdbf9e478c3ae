"""Averages of weights whose blocks move, come or go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from .._runtime.pattern_cache import content_of
from ..config import STORED_DTYPES
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..nn.weight import layer_index, make_room
from ._layers import check_plain_storage, sparse_layers


class AveragedModel(swa_utils.AveragedModel):
    """`torch.optim.swa_utils.AveragedModel` that averages block-sparse weights by place instead of by slot.

    Training that moves blocks, as `PatternSchedule` does, reuses their slots. PyTorch's class then mixes the
    average of a block that has gone with the weights of the one that has come. Here `update_parameters` gives
    the average the pattern of the model first: a block that stays keeps its average, in whichever slot it is,
    and a new block starts from its weight of now. Numbers of blocks may change, as `Gradual` changes them.
    Buffers that are not floating point, patterns and masks among them, are copied with ``use_buffers=True``,
    too.

    The mean of weights is that of Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
    Generalization", UAI 2018; ``multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)`` gives an
    exponential moving average.

    Args:
        model: what is averaged; it is copied.
        device: of the average; None is the model's.
        avg_fn: takes an average, a tensor of the model and the number of averaged models, and gives the new
            average; None is the mean.
        multi_avg_fn: takes lists of these and the number, and writes to the averages in place; or None.
        use_buffers: whether buffers are averaged as parameters are, or copied.

    Raises:
        UnsupportedError: by `update_parameters`, when a pattern has changed and its weight is not plain.
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: Callable[..., Any] | None = None,
        multi_avg_fn: Callable[..., Any] | None = None,
        use_buffers: bool = False,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise InvalidArgumentError("avg_fn and multi_avg_fn must not both be given")
        if avg_fn is None and multi_avg_fn is None:
            multi_avg_fn = swa_utils.get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        one = None if avg_fn is None else _of_numbers(avg_fn)
        several = None if multi_avg_fn is None else _of_lists_of_numbers(multi_avg_fn)
        super().__init__(model, device, one, several, use_buffers)
        self._seen: dict[str, tuple[object, int]] = {}  # what the model's patterns were at the last update

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the model's patterns, and its parameters into the average."""
        averages, layers = sparse_layers(self.module), sparse_layers(model)
        if averages.keys() != layers.keys() or len([*self.parameters()]) != len([*model.parameters()]):
            raise InvalidArgumentError(
                "model must be the one that is averaged, got one with other parameters"
            )
        for name, layer in layers.items():
            content = content_of(layer_index(layer))
            if self._seen.get(name) != content:
                _take_pattern(name, averages[name], layer)
                self._seen[name] = content
        super().update_parameters(model)


def _take_pattern(name: str, average: BlockSparseLinear, layer: BlockSparseLinear) -> None:
    if average.pattern == layer.pattern:
        return
    check_plain_storage(name, average)
    device = average.weight.device
    before, now = (_places(each).to(device) for each in (average, layer))
    found, order = before.sort()
    weight = layer.weight.detach().to(device, average.weight.dtype, copy=True)
    if len(found):
        nearest = torch.searchsorted(found, now).clamp(max=len(found) - 1)
        stays = found[nearest] == now
        weight[stays] = average.weight.detach()[order[nearest[stays]]]
    make_room(average, layer.pattern, {"weight": weight})
    average.pattern = layer.pattern
    average.weight.copy_(weight)


def _places(layer: BlockSparseLinear) -> Tensor:
    """Return block row times block columns plus block column of every slot, [nnz]."""
    rows, columns = layer.pattern.block_indices()
    return rows * layer.pattern.grid[1] + columns


def _of_numbers(avg_fn: Callable[..., Any]) -> Callable[..., Any]:
    def averaged(average: Tensor, current: Tensor, count: Any) -> Any:
        return avg_fn(average, current, count) if _is_averaged(average) else current

    return averaged


def _of_lists_of_numbers(multi_avg_fn: Callable[..., Any]) -> Callable[..., Any]:
    def average(averages: list[Tensor], currents: list[Tensor], count: Any) -> None:
        if _is_averaged(averages[0]):  # all have one dtype
            multi_avg_fn(averages, currents, count)
        else:
            for own, current in zip(averages, currents, strict=True):
                own.copy_(current)

    return average


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in STORED_DTYPES
