"""Layers that are called with one x, one after the other, and share one product of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._runtime.prepared import state_of
from .._runtime.private import is_exporting
from ..config import LayerSpec
from ..storage.base import STORED_NAMES
from .joined import concatenate
from .linear import BlockSparseLinear

_ROWS = ("weight", *STORED_NAMES, "bias")  # tensors of which a part of the layer has a slice


class Joint:
    """One product for several layers of one x.

    Attributes:
        layer: has the rows of all layers, see `concatenate`; their tensors are slices of its own.
    """

    def __init__(self, layers: Sequence[BlockSparseLinear]) -> None:
        self.layer = concatenate(layers).eval().requires_grad_(False)
        self._sizes = [layer.out_features for layer in layers]
        self._left: tuple[Tensor, dict[int, Tensor]] | None = None  # x, and results by the layer's number

    def result(self, number: int, x: Tensor) -> Tensor | None:
        """Return the result of one layer; the first one's call computes all, None if that had another x."""
        if number == 0:
            first, *others = self.layer(x).split(self._sizes, -1)
            self._left = x, dict(enumerate(others, 1))
            return first  # type: ignore[no-any-return]
        left = self._left  # read once: another thread may put its own there
        if left is None or left[0] is not x:
            return None
        result = left[1].pop(number, None)
        if not left[1]:
            self._left = None
        return result


class JointLinear(BlockSparseLinear):
    """A `BlockSparseLinear` that takes its result from a product that it shares with others, see `join`.

    Its tensors are its own slices of those of the shared product: names, shapes and contents are as before,
    and what is written to weight or bias in place counts. Any other change ends the sharing: another pattern
    or storage, `load_state_dict`, a move to another device or dtype. A copied or unpickled layer does not
    share, and neither do exported programs.
    """

    _joint: Joint | None = None
    _number = 0
    _made_of: tuple[int, ...] = ()

    @property
    def joint(self) -> Joint | None:
        """The shared product; None once the layer computes its own."""
        return self._joint

    def share(self, joint: Joint, number: int, tensors: dict[str, Tensor]) -> None:
        """Take results from a product, as its layer of that number, with slices of its tensors."""
        for name, tensor in tensors.items():
            if name in self._parameters:
                self._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            else:
                self._buffers[name] = tensor
        self._joint, self._number = joint, number
        self._made_of = self._addresses()

    def forward(self, input: Tensor, **options: Any) -> Tensor:
        """Compute y = x Wᵀ + bias, see `BlockSparseLinear.forward`."""
        joint = self._joint
        if joint is not None and not options and not is_exporting() and self._is_as_made():
            result = joint.result(self._number, input)
            if result is not None:
                return result
        return super().forward(input, **options)

    def _is_as_made(self) -> bool:
        """Return True if no tensor was replaced, and no write to the pattern is counted.

        Compiled code does not ask: what PyTorch can see of changes compiles it anew.
        """
        if self.weight.requires_grad or self.observe is not None:
            return False
        return is_compiling() or self._made_of == self._addresses()

    def _addresses(self) -> tuple[int, ...]:
        tensors = (self._parameters.get(name, self._buffers.get(name)) for name in _ROWS)
        own = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        return *own, *state_of(self.index())

    def _describe(self, spec: LayerSpec) -> None:
        if self._joint is not None and replace(spec, policy=self.policy) != self.spec:
            self._joint = None
        super()._describe(spec)

    def _updated(self) -> None:
        self._joint = None
        super()._updated()

    def _apply(self, *arguments: Any) -> JointLinear:
        self._joint = None
        return super()._apply(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._joint = None
        super()._load_from_state_dict(*arguments)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_joint"}


@torch.no_grad()
def join(layers: Sequence[BlockSparseLinear]) -> Joint:
    """Have layers share one product, in the order in which they are called with one x.

    They become `JointLinear`, in place: they keep their names, hooks and contents. One that is called with
    another x than the first was, or with anything fused into its product, computes that by itself.

    Args:
        layers: as of `concatenate`, with equal blocks; frozen.
    """
    joint = Joint(layers)
    whole, begin = joint.layer, dict.fromkeys(_ROWS, 0)
    for number, layer in enumerate(layers):
        own = {name: getattr(layer, name) for name in _ROWS}
        tensors = {}
        for name, tensor in own.items():
            if tensor is not None:
                tensors[name] = getattr(whole, name)[begin[name] :][: len(tensor)]
            rows = layer.out_features if name == "bias" else 0 if tensor is None else len(tensor)
            begin[name] += rows  # a layer without a bias has zeros there
        layer.__class__ = JointLinear
        assert isinstance(layer, JointLinear)
        layer.share(joint, number, tensors)
    return joint
