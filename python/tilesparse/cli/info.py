"""``tilesparse info``: versions, devices, where dense is faster, and which kernel a layer would use."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch

from .. import _C, _checks
from ..errors import TileSparseError, UnsupportedError
from ..tuning import store
from ..tuning.product import KINDS, OPS, Device, Product, describe_estimates, dtype_name, runs_on
from ..tuning.selection import choose
from .command import add_layer, chosen_ops, describe_layer, product_of

# In the order of their numbers.
KERNEL_DTYPES = ("default", *map(dtype_name, (*_checks.DTYPES, *_checks.QUANTIZED)))
STORED = tuple(  # all but dense blocks in the dtype of the activations: a storage, a dtype or None for that
    (storage, dtype)
    for dtype in (None, *_checks.SCALED.values())
    for storage in (0, 1)
    if (storage or dtype) and not (storage and dtype == _checks.SCALED[_checks.PACKED])
)
BREAK_EVEN = Path(__file__).with_name("break_even.json")  # printed by benchmarks/report.py --break-even


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_layer(command)
    command.add_argument(
        "--gpu",
        action="append",
        default=[],
        help="also show the choice for this GPU, such as H100, 'RTX 4090' or 8.6; may be repeated",
    )


def main(arguments: argparse.Namespace) -> None:
    """Print versions, devices, break-even densities, the kernel of the layer, and all kernels."""
    absent = [Device.find(name).info() for name in arguments.gpu]
    print(f"tilesparse {_C.version()}, PyTorch {torch.__version__}, Python {platform.python_version()}")
    library = next(iter(_C.libraries()), _C.__file__)
    print(f"library: {library}, ABI {_C.abi_version()}, for {_C.architectures()}")
    devices = []
    for device in chain(_devices(), absent):
        print(_describe_device(device))
        if storages := _describe_storages(device):
            print(storages)
        devices.append(device)
    print(store.status())
    _print_break_even()
    print(f"{describe_layer(arguments)}:")
    places = [device.name if device in absent else KINDS[device.device] for device in devices]
    width = 1 + max(5, *map(len, places))
    for device, where in zip(devices, places, strict=True):
        for op in chosen_ops(arguments):
            kernel_and_reason = _selection(product_of(arguments, op, arguments.tokens), device)
            print(f"  {where:{width}}{op:9}{kernel_and_reason}")
    print("kernels:")
    for kernel in _C.kernels():
        dtypes = _members(kernel.dtypes, KERNEL_DTYPES)
        values = "".join(f"; {_stored_name(*stored)}" for stored in STORED if _reads(kernel, *stored))
        print(f"  {kernel.name:32} {KINDS[kernel.device]:6}{_members(kernel.ops, OPS)}; {dtypes}{values}")


def _devices() -> Iterable[_C.DeviceInfo]:
    yield _C.device_info(KINDS.index("cpu"))
    if not torch.cuda.is_available():
        print("cuda: PyTorch finds no device")
    for ordinal in range(torch.cuda.device_count()):
        try:
            yield _C.device_info(KINDS.index("cuda"), ordinal)
        except TileSparseError as error:
            print(f"cuda:{ordinal} cannot be used: {error}")


def _describe_device(device: _C.DeviceInfo) -> str:
    if KINDS[device.device] == "cpu":
        return f"cpu: {device.name}, {device.multiprocessors} processors"
    major, minor = divmod(device.compute_capability, 10)
    text = (
        f"cuda: {device.name}, compute capability {major}.{minor}, {device.multiprocessors} multiprocessors, "
        f"{device.shared_memory >> 10} KiB shared memory\n"
        f"  kernels: {_families(device) or 'none of this library runs on it'}"
    )
    if _kernels_for(device):
        text += f"\n  estimated times: {describe_estimates(Device.of(device))}"
    return text


def _families(device: _C.DeviceInfo) -> str:
    """Return the architectures whose kernels run on a GPU, the newest first, with their dtypes."""
    dtypes: dict[str, int] = {}
    for kernel in _kernels_for(device):
        family = kernel.name.partition("_")[0]
        dtypes[family] = dtypes.get(family, 0) | kernel.dtypes
    return ", ".join(f"{family} ({_members(bits, KERNEL_DTYPES)})" for family, bits in dtypes.items())


def _kernels_for(device: _C.DeviceInfo) -> list[_C.KernelInfo]:
    """Return the kernels that run on a device, those of the newest architecture first."""
    kernels = sorted(_C.kernels(), key=lambda kernel: kernel.min_compute_capability, reverse=True)
    return [kernel for kernel in kernels if runs_on(kernel, device.device, device.compute_capability)]


def _describe_storages(device: _C.DeviceInfo) -> str:
    """Describe the storages that kernels read without conversion; see `tilesparse.storage`.

    It is empty for a device on which no kernel runs.
    """
    if not _kernels_for(device):
        return ""
    lines, decompressed = [], []
    for stored in STORED:
        readers = _readers([kernel for kernel in _kernels_for(device) if _reads(kernel, *stored)])
        if readers:
            lines.append(f"  {_stored_name(*stored)}: {readers}, otherwise decompressed in every call")
        else:
            decompressed.append(_stored_name(*stored))
    if decompressed:
        lines.append(f"  {', '.join(decompressed)}: decompressed in every call")
    return "\n".join(lines)


def _readers(kernels: Iterable[_C.KernelInfo]) -> str:
    dtypes: dict[tuple[str, str], int] = {}
    for kernel in kernels:
        tokens = f" up to {kernel.max_tokens} tokens" if kernel.max_tokens else ""
        reader = kernel.name.partition("_")[0], _members(kernel.ops, OPS) + tokens
        dtypes[reader] = dtypes.get(reader, 0) | kernel.dtypes
    return ", ".join(
        f"{family} ({ops}; {_members(bits, KERNEL_DTYPES)})" for (family, ops), bits in dtypes.items()
    )


def _reads(kernel: _C.KernelInfo, storage: int, dtype: int | None) -> bool:
    """Return True if a kernel reads values of this storage and dtype without conversion."""
    dtypes = kernel.values_dtypes
    return bool(kernel.storages >> storage & 1) and (
        not dtypes if dtype is None else bool(dtypes >> dtype & 1)
    )


def _stored_name(storage: int, dtype: int | None) -> str:
    names = [
        "int4" if known == _checks.PACKED else dtype_name(known)
        for known, code in _checks.SCALED.items()
        if code == dtype
    ]
    return " ".join(["2:4"] * storage + names)


def _print_break_even() -> None:
    measured = json.loads(BREAK_EVEN.read_text())
    blocks = list(measured["densities"]["forward"])
    print(f"density from which dense is faster, measured on {measured['gpu']} in {measured['dtype']},")
    print(f"{'; '.join(measured['layers'])}:")
    print(f"  {'blocks':9}" + "".join(f"{block + 'x' + block:>9}" for block in blocks))
    for op, densities in measured["densities"].items():
        print(f"  {op:9}" + "".join(f"{densities[block]:9.2f}" for block in blocks))
    print("a layer with policy='dense' computes densely instead, and with 'auto' where that is likely")
    print("to be faster; tilesparse bench times a layer")


def _members(bits: int, names: Iterable[str]) -> str:
    return ", ".join(name for position, name in enumerate(names) if bits >> position & 1)


def _selection(product: Product, device: _C.DeviceInfo) -> str:
    try:
        chosen = choose(product, Device.of(device))
    except UnsupportedError as error:
        return str(error)
    return f"{chosen.kernel}: {chosen.reason}; next: {chosen.runner_up or 'none'}"
