"""Tensors made from values and scales and kept from call to call: prepacked for a kernel, or expanded."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .. import _C


class Packed:
    """A prepacked copy of values, in the order in which a kernel multiplies them."""

    def __init__(self, product: _C.Product, memory: Tensor, plan_key: int) -> None:
        self.product, self.memory, self.plan_key = product, memory, plan_key
        self._of: tuple[int, ...] = ()
        self._values: Callable[[], Tensor | None] = lambda: None

    def follow(self, values: Tensor, generation: int, stream: int) -> None:
        """Pack these values, unless they were packed last and have not changed since."""
        if not values.is_inference():  # where changes are counted
            of = id(values), values.data_ptr(), values._version, generation
            if self._of == of and self._values() is values:
                return
            self._of, self._values = of, weakref.ref(values)
        self.product.prepack(values.data_ptr(), self.memory.data_ptr(), self.memory.numel(), stream)


class Derived:
    """A tensor made from others, as dense blocks from stored values; made anew once these have changed."""

    def __init__(self) -> None:
        self._kept: tuple[Hashable, list[weakref.ref[Tensor]], Tensor] | None = None

    def follow(self, make: Callable[..., Tensor], *sources: Any) -> Tensor:
        """Return ``make(*sources)``, kept from the last call if no tensor among the sources has changed."""
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
