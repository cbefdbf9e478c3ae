"""Copies of values that are kept from call to call: packed for a kernel, or plain ones made of others."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .. import _C


class Packed:
    """A copy of values in the order in which kernels multiply them, which packs anew what has changed."""

    def __init__(self, product: _C.Product, memory: Tensor, plan_key: int) -> None:
        self.product, self.memory, self.plan_key = product, memory, plan_key
        self._of: tuple[int, ...] = ()
        self._values: Callable[[], Tensor | None] = lambda: None

    def follow(self, values: Tensor, generation: int, stream: int) -> None:
        """Packs these values, unless they are what was packed last."""
        if not values.is_inference():  # where changes are counted
            of = id(values), values.data_ptr(), values._version, generation
            if self._of == of and self._values() is values:
                return
            self._of, self._values = of, weakref.ref(values)
        self.product.pack(values.data_ptr(), self.memory.data_ptr(), self.memory.numel(), stream)


class Expanded:
    """Plain values made of others, on the CPU, and anew once one of these has changed."""

    def __init__(self) -> None:
        self._kept: tuple[Hashable, list[weakref.ref[Tensor]], Tensor] | None = None

    def follow(self, make: Callable[..., Tensor], *sources: Any) -> Tensor:
        """What ``make`` gives for these, of which some are tensors."""
        tensors = [source for source in sources if isinstance(source, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):  # whose changes are not counted
            return make(*sources)
        state = tuple(
            (source.data_ptr(), source._version) if isinstance(source, Tensor) else source
            for source in sources
        )
        kept = self._kept
        if kept is not None and kept[0] == state and [id(one()) for one in kept[1]] == list(map(id, tensors)):
            return kept[2]
        with torch.inference_mode(False):  # autograd may keep it
            made = make(*sources)
        self._kept = state, [weakref.ref(tensor) for tensor in tensors], made
        return made
