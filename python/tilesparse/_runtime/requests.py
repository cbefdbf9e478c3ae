"""Products as they are asked for, and resolved ones."""

from typing import NamedTuple

from torch import Tensor

from .copies import Packed
from .device import Run
from .layout import Form

# Product (DDS_NT, …), first and second factor, bias, residual, activation, whether the result is
# column-major, metadata and scales of values, the kernel asked for, and whether the residual is a gate.
Request = tuple[
    int, Tensor, Tensor, Tensor | None, Tensor | None, int, bool, Tensor | None, Tensor | None, int, bool
]
# x, its values in 8 bits and their scales; values and scales of the weight; bias, residual, activation,
# whether the result is column-major, the kernel asked for, whether the residual is a gate, whether sums may
# be fast, and metadata of values.
QuantizedRequest = tuple[
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor | None,
    Tensor | None,
    int,
    bool,
    int,
    bool,
    bool,
    Tensor | None,
]


class Call(NamedTuple):
    """A resolved product whose operands were checked."""

    run: Run
    workspace: int  # elements
    form: Form  # of the result
    packed: Packed | None = None
