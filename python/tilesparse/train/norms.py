"""Norms of the dense gradients of layers, taken in one step and averaged over processes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.linear import BlockSparseLinear
from ..nn.origin import has_peers
from ._layers import precision_of
from .gradients import Observer


class GradientNorms:
    """Observers of layers, for a step at a time.

    Args:
        layers: by name.
        norm: of a block of the dense gradient: 1, 2 or ``math.inf``.
        group: processes over which norms are averaged; None is the default group.

    Raises:
        UnsupportedError: a layer is one of experts.
    """

    def __init__(
        self, layers: Mapping[str, BlockSparseLinear], norm: float, group: dist.ProcessGroup | None
    ) -> None:
        for name, layer in layers.items():
            if layer.of_experts:
                raise UnsupportedError(
                    f"model: layer {name!r}: there are no dense gradients of experts; leave it out, or "
                    "choose blocks by other scores"
                )
        self._layers, self._norm, self._group = layers, norm, group
        self._observers: dict[str, Observer] = {}

    def start(self) -> None:
        """Take norms in the backward passes from now on."""
        self.stop()
        for name, layer in self._layers.items():
            self._observers[name] = layer.observe = Observer(layer, self._norm)

    def stop(self) -> None:
        """Take no norms any more."""
        for name, observer in self._observers.items():
            if self._layers[name].observe is observer:  # and not that of a schedule made later
                del self._layers[name].observe  # compiled code tells None from nothing
        self._observers = {}

    def taken(self) -> dict[str, Tensor]:
        """Return norms [R, C] by layer since `start`, zeros for a layer that was not called; {} if stopped.

        Raises:
            InvalidArgumentError: no backward pass has reached a layer.
        """
        if not self._observers:
            return {}
        given = {name: observer.take() for name, observer in self._observers.items()}
        if all(one is None for one in given.values()):
            raise InvalidArgumentError(
                "grow by gradients needs a backward pass through the layers since the last step; step the "
                "schedule after the backward pass and the optimizer"
            )
        norms = {}
        for name, one in given.items():
            seen = torch.zeros_like(self._observers[name].probe) if one is None else one
            weight = self._layers[name].weight  # which may have been moved or converted since
            norms[name] = seen.to(weight.device, precision_of(weight))
        return self._averaged(norms) if has_peers() else norms

    def _averaged(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average over the processes, with one call for all layers on a device."""
        together: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, one in norms.items():
            together.setdefault((one.device, one.dtype), {})[name] = one
        averaged: dict[str, Tensor] = {}
        for ones in together.values():
            flat = torch.cat([one.flatten() for one in ones.values()])
            dist.all_reduce(flat, group=self._group)
            flat /= dist.get_world_size(self._group)
            chunks = torch.split(flat, [one.numel() for one in ones.values()])
            averaged.update((name, own.view_as(ones[name])) for name, own in zip(ones, chunks, strict=True))
        return averaged
