"""Which kernel computes a product on a GPU or CPU, and why; also on a GPU that is not there.

`choose` asks the library what it would do. The choice is a function of the product, the device, what
`tilesparse.tune` has measured on such a device, and preferences: a `prefer` that is in force, and the
environment's ``TILESPARSE_KERNEL``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .. import _C
from .._arguments import checked
from .._checks import (
    DTYPES,
    POLICIES,
    QUANTIZED,
    check_policy,
)
from .._runtime.choice import EXPAND_AND_RUN_DENSE
from .._runtime.kernels import prefer_kernels, preference
from ..errors import InvalidArgumentError, UnsupportedError
from .devices import KINDS, Device
from .products import OPS, Product, dtype_name


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of the library.

    Attributes:
        name: which `prefer` and ``TILESPARSE_KERNEL`` take, or its beginning.
        device: "cpu" or "cuda".
        compute_capability: (major, minor), the least it needs; None on the CPU.
        ops: of "forward", "dgrad", "wgrad".
        dtypes: of activations.
        tf32: whether it multiplies float32 in TF32.
        tile: tokens and features that are computed together; None where that is not fixed.
        max_tokens: for which it is made; None for any number.
        storages: of "plain" and "compressed", what values it reads as they are.
        values_dtypes: of values of 8 bits that it reads as they are; empty: none, values have the dtype of
            the activations.
    """

    name: str
    device: str
    compute_capability: tuple[int, int] | None
    ops: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    tf32: bool
    tile: tuple[int, int] | None
    max_tokens: int | None
    storages: tuple[str, ...]
    values_dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        where = self.device
        if self.compute_capability is not None:
            where += f" from {self.compute_capability[0]}.{self.compute_capability[1]}"
        what = f"{', '.join(self.ops)}; {', '.join(dtype_name(dtype) for dtype in self.dtypes)}"
        few = f"; up to {self.max_tokens} tokens" if self.max_tokens else ""
        return f"{self.name}: {where}; {what}{few}"


@cache
def kernels() -> tuple[KernelInfo, ...]:
    """All kernels of the library, those of the CPU first. What runs where is `choose`'s to say."""
    return tuple(map(_kernel_info, _C.kernels()))


def _kernel_info(kernel: _C.KernelInfo) -> KernelInfo:
    def members(bits: int, names: Mapping[Any, int]) -> tuple[Any, ...]:
        return tuple(name for name, place in names.items() if bits >> place & 1)

    capability = kernel.min_compute_capability
    return KernelInfo(
        kernel.name,
        KINDS[kernel.device],
        divmod(capability, 10) if capability else None,
        members(kernel.ops, {op: place for place, op in enumerate(OPS)}),
        members(kernel.dtypes, DTYPES),
        kernel.precision == 1,
        (kernel.tile_tokens, kernel.tile_features) if kernel.tile_tokens else None,
        kernel.max_tokens or None,
        members(kernel.storages, {"plain": 0, "compressed": 1}),
        members(kernel.values_dtypes, QUANTIZED),
    )


@dataclass(frozen=True)
class Candidate:
    """A kernel that computes a product.

    Attributes:
        kernel: its name.
        microseconds: that are estimated; None where there are no estimates.
    """

    kernel: str
    microseconds: float | None

    def __str__(self) -> str:
        return f"{self.kernel}, {_microseconds(self.microseconds)}"


@dataclass(frozen=True)
class KernelChoice:
    """What computes a product on a device.

    Attributes:
        product, device: what was asked for.
        kernel: its name; None where W is to be written out and multiplied densely.
        reason: why, with what was estimated or measured.
        microseconds: that are estimated for what was chosen; None where there is no estimate.
        runner_up: what has the least estimate of the other kernels, or None.
        dense_microseconds: that are estimated for writing W out and the dense product; None where that was
            not measured on such a device.
        candidates: all kernels that compute the product, the least estimate first, otherwise as the library
            prefers them.
        refused: why the other kernels of this kind of device do not, by name.
    """

    product: Product
    device: Device
    kernel: str | None
    reason: str
    microseconds: float | None
    runner_up: Candidate | None
    dense_microseconds: float | None
    candidates: tuple[Candidate, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [
            str(self.product),
            f"  on {self.device}",
            f"  {self.kernel or 'dense'}: {self.reason}",
            f"  next: {self.runner_up or 'no other kernel computes it'}",
        ]
        return "\n".join(lines)


@checked
def choose(
    product: Product,
    device: Device | torch.device | str | tuple[int, int] | None = None,
    *,
    policy: str = "sparse",
) -> KernelChoice:
    """What would compute a product, and why; nothing is run.

    Args:
        product: its sizes, dtypes and storage.
        device: see `Device.find`; a GPU need not be there. What `tilesparse.tune` has measured counts for
            devices of the same name.
        policy: that of a layer: "sparse", "auto" or "dense".

    Raises:
        InvalidArgumentError: no such device or policy; or TILESPARSE_KERNEL names no kernel.
        UnsupportedError: no kernel computes the product there, and why.
        NoDeviceError: the device "cuda" is not there.
    """
    check_policy(policy)
    on = Device.find(device)
    info, names = on.info(), [kernel.name for kernel in kernels()]
    asked = product.descriptor(info, policy=POLICIES.index(policy), prefer=preference())
    index, reason = asked.select(info)
    candidates, refused = _candidates(product, info)
    dense = asked.estimate(info, EXPAND_AND_RUN_DENSE) or None
    kernel = None if index == EXPAND_AND_RUN_DENSE else names[index]
    times = {candidate.kernel: candidate.microseconds for candidate in candidates}
    return KernelChoice(
        product,
        on,
        kernel,
        reason,
        dense if kernel is None else times[kernel],
        next((candidate for candidate in candidates if candidate.kernel != kernel), None),
        dense,
        candidates,
        refused,
    )


def _candidates(product: Product, info: _C.DeviceInfo) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    found, refused = [], {}
    asked = product.descriptor(info)
    for number, kernel in enumerate(kernels()):
        if kernel.device != KINDS[info.device]:
            continue
        try:
            found.append(Candidate(kernel.name, asked.estimate(info, number) or None))
        except UnsupportedError as error:
            refused[kernel.name] = str(error).partition(": ")[2]
    return tuple(sorted(found, key=lambda each: each.microseconds or math.inf)), refused


def _microseconds(time: float | None) -> str:
    return "no estimate" if time is None else f"estimated {time:.1f} us"


@checked
@contextmanager
def prefer(kernel: str) -> Iterator[None]:
    """Within it products run on kernels with a certain name or beginning of one, where these compute them.

    All others run on what is best; ``TILESPARSE_LOG=1`` and `choose` say which. It comes before
    ``TILESPARSE_KERNEL``, what was measured, estimates, and the policy "auto". It counts for the whole
    process, since backward passes run in threads of their own: for those that run within it, whenever their
    forward pass did. Compiled code follows it but for what the policy "auto" has decided; a captured CUDA
    graph keeps its kernels.

    Args:
        kernel: as "sm80_dds_nt_bf16_128x128", or the beginning of several names, as "sm80_".

    Raises:
        InvalidArgumentError: no kernel's name begins so; the text lists all.
        UnsupportedError: it is within code that is being compiled or exported; enter it around the call.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "tilesparse.prefer is within code that is compiled, where it would be lost; enter it around the "
            "call of the compiled function"
        )
    names = [known.name for known in kernels()]
    if not isinstance(kernel, str) or not kernel or not any(name.startswith(kernel) for name in names):
        raise InvalidArgumentError(
            f"kernel: the name of a kernel or its beginning expected, got {kernel!r}; there are "
            f"{', '.join(names)}"
        )
    with prefer_kernels(kernel):
        yield
