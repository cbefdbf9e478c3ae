"""The kernel that computes a product on a GPU or CPU, and the reason; also on a GPU that is not there.

`choose` asks the library for its choice, which depends on the product, the device, what `tune` has measured
on such a device, and preferences: an active `prefer` and the environment's ``TILESPARSE_KERNEL``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from .. import _C
from .._checks import DTYPES, PACKED, POLICIES, QUANTIZED, SCALED, check_policy
from .._runtime.launch import prefer_kernels, preference
from .._runtime.select import DEQUANTIZE_AND_RUN_DENSE
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.linear import BlockSparseLinear
from ..nn.weight import INDEX_NAMES, dense_blocks
from ..storage.formats import storage_of
from .product import KINDS, OPS, Device, Product, dtype_name


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of the library.

    Attributes:
        name: name that `prefer` and ``TILESPARSE_KERNEL`` take, or a prefix of it.
        device: "cpu" or "cuda".
        compute_capability: (major, minor) that it needs at least; None on the CPU.
        ops: some of "forward", "dgrad", "wgrad".
        dtypes: dtypes of the activations.
        tf32: True if it multiplies float32 in TF32.
        tile: (tokens, features) of a tile; None if that is not fixed.
        max_tokens: largest number of tokens; None for any number.
        storages: some of "plain" and "compressed", which it reads without conversion.
        values_dtypes: dtypes of values with scales that it reads without dequantization, torch.uint8 for
            int4; empty if values have the dtype of the activations.
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
        stored = ["2:4"] if "compressed" in self.storages else []
        stored += ["int4" if dtype == PACKED else dtype_name(dtype) for dtype in self.values_dtypes]
        values = f"; values {', '.join(stored)}" if stored else ""
        few = f"; up to {self.max_tokens} tokens" if self.max_tokens else ""
        return f"{self.name}: {where}; {what}{values}{few}"


@cache
def kernels() -> tuple[KernelInfo, ...]:
    """Return all kernels of the library, those of the CPU first; `choose` says what runs where."""
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
        members(kernel.dtypes, {**DTYPES, **QUANTIZED}),
        kernel.precision == 1,
        (kernel.tile_tokens, kernel.tile_features) if kernel.tile_tokens else None,
        kernel.max_tokens or None,
        members(kernel.storages, {"plain": 0, "compressed": 1}),
        members(kernel.values_dtypes, SCALED),
    )


@dataclass(frozen=True)
class Candidate:
    """A kernel that computes a product.

    Attributes:
        kernel: name of the kernel.
        microseconds: estimated time; None if there is no estimate.
    """

    kernel: str
    microseconds: float | None

    def __str__(self) -> str:
        time = self.microseconds
        return f"{self.kernel}, " + ("no estimate" if time is None else f"estimated {time:.1f} us")


@dataclass(frozen=True)
class KernelChoice:
    """The choice of a kernel for a product on a device.

    Attributes:
        product, device: arguments of `choose`.
        kernel: name of the kernel; None if W is written out and multiplied densely.
        reason: reason of the choice, with estimated or measured times.
        microseconds: estimated time of the choice; None if there is no estimate.
        runner_up: other kernel with the least estimate, or None.
        dense_microseconds: estimated time of writing W out and the dense product; None if dense products
            were not measured on such a device.
        candidates: all kernels that compute the product, the least estimate first, otherwise in the order
            in which the library prefers them.
        refused: reasons why the other kernels for this kind of device do not compute it, by name.
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

    @property
    def dequantizes(self) -> bool:
        """True if every call first writes dense blocks of values that are stored in fewer bytes."""
        product = self.product
        storage = storage_of(product.storage)
        if storage.trainable or self.kernel is None:
            return not storage.trainable
        if product.activations is not None:
            return False
        kernel = next(kernel for kernel in kernels() if kernel.name == self.kernel)
        read = "plain" if product.nm is None else "compressed"
        return read not in kernel.storages or storage.dtype not in (None, *kernel.values_dtypes)

    def __str__(self) -> str:
        lines = [
            str(self.product),
            f"  on {self.device}",
            f"  {self.kernel or 'dense'}: {self.reason}",
            f"  next: {self.runner_up or 'no other kernel computes it'}",
        ]
        return "\n".join(lines)


def choose(
    product: Product,
    device: Device | torch.device | str | tuple[int, int] | None = None,
    *,
    policy: str = "sparse",
) -> KernelChoice:
    """Return the kernel that would compute a product, and the reason; nothing is run.

    Args:
        product: sizes, dtypes and storage.
        device: see `Device.find`; a GPU need not be there. Measurements of `tilesparse.tuning.tune` count for
            devices of the same name.
        policy: policy of the layer: "sparse", "auto" or "dense".

    Raises:
        InvalidArgumentError: the device or policy is unknown, or TILESPARSE_KERNEL names no kernel.
        UnsupportedError: no kernel computes the product there; the text says why.
        NoDeviceError: the device "cuda" is not there.
    """
    check_policy(policy)
    on = Device.find(device)
    info, names = on.info(), [kernel.name for kernel in kernels()]
    asked = product.descriptor(info, policy=POLICIES.index(policy), prefer=preference())
    index, reason = asked.select(info)
    candidates, refused = _candidates(product, info)
    dense = asked.estimate(info, DEQUANTIZE_AND_RUN_DENSE) or None
    kernel = None if index == DEQUANTIZE_AND_RUN_DENSE else names[index]
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


@contextmanager
def prefer(kernel: str) -> Iterator[None]:
    """Prefer kernels by name or prefix for the products that run within this context.

    Products that these kernels do not compute run on the best other kernel; ``TILESPARSE_LOG=1`` and `choose`
    say which. The preference comes before ``TILESPARSE_KERNEL``, measurements, estimates and the policy
    "auto". It holds for the whole process, because backward passes run in threads of their own: for each
    backward pass that runs within the context, whenever its forward pass ran. Compiled code follows it except
    for decisions of the policy "auto"; a captured CUDA graph keeps its kernels.

    Args:
        kernel: a name as "sm80_dds_nt_bf16_128x128", or the prefix of several names, as "sm80_".

    Raises:
        InvalidArgumentError: no kernel's name has this prefix; the text lists all names.
        UnsupportedError: the code is being compiled or exported; enter the context around the call.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "prefer has no effect within code that is compiled; enter it around the call of the "
            "compiled function"
        )
    names = [known.name for known in kernels()]
    if not isinstance(kernel, str) or not kernel or not any(name.startswith(kernel) for name in names):
        raise InvalidArgumentError(
            f"kernel must be the name of a kernel or a prefix of it, got {kernel!r}; there are "
            f"{', '.join(names)}"
        )
    with prefer_kernels(kernel):
        yield


def is_converted_in_calls(layer: BlockSparseLinear, tokens: Iterable[int] = ()) -> bool:
    """Return True if products with so many tokens would convert a layer's values in every call.

    Without numbers of tokens that of decode counts, 1: some kernels of the CPU read 4 bits of few tokens.
    """
    if storage_of(layer.storage).multiplied(layer.nm) != layer.storage:
        return True
    products = [Product.of(layer, tokens=count) for count in tokens or (1,)]
    return any(choose(product, layer.weight.device).dequantizes for product in products)


def stored_for_kernels(layer: BlockSparseLinear, tokens: int = 1) -> BlockSparseLinear:
    """Return a layer whose values no call of so many tokens has to convert: kernels read them so."""
    if choose(Product.of(layer, tokens=tokens), layer.weight.device).dequantizes:
        spec = replace(
            layer.spec, storage="plain", nm=None, transposable=False, granularity=None, activations=None
        )
        own = {name: layer.get_buffer(name) for name in INDEX_NAMES}
        own |= {} if layer.bias is None else {"bias": layer.bias}
        return type(layer).from_state(spec, {"weight": dense_blocks(layer), **own})
    multiplied = storage_of(layer.storage).multiplied(layer.nm)
    return layer if multiplied == layer.storage else layer.to_storage(multiplied)
