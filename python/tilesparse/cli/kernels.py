"""``tilesparse info``, ``bench`` and ``tune``: the kernels of this library, their choice and their times."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch

from .. import _C
from .._checks import Progress
from ..errors import InvalidArgumentError, TileSparseError, UnsupportedError
from ..tuning import measure, store
from ..tuning.measure import milliseconds, own_numbers, product_calls
from ..tuning.product import KINDS, Device, Product, choose, kernels, runs_on
from .command import add_device, add_layer, chosen_ops, describe_layer, product_of


def add_info(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_layer(command)
    command.add_argument(
        "--gpu",
        action="append",
        default=[],
        help="also show the choice for this GPU, such as H100, 'RTX 4090' or 8.6; may be repeated",
    )


def run_info(arguments: argparse.Namespace) -> None:
    """Print versions, devices, the kernel of the layer, and all kernels."""
    absent = [Device.find(name).info() for name in arguments.gpu]
    print(f"tilesparse {_C.version()}, PyTorch {torch.__version__}, Python {platform.python_version()}")
    library = next(iter(_C.libraries()), _C.__file__)
    print(f"library: {library}, ABI {_C.abi_version()}, for {_C.architectures()}")
    devices = []
    for device in chain(_devices(), absent):
        print(_describe_device(device))
        devices.append(device)
    print(store.status())
    print(f"{describe_layer(arguments)}:")
    places = [device.name if device in absent else KINDS[device.device] for device in devices]
    width = 1 + max(5, *map(len, places))
    for device, where in zip(devices, places, strict=True):
        for op in chosen_ops(arguments):
            kernel_and_reason = _selection(product_of(arguments, op, arguments.tokens), device)
            print(f"  {where:{width}}{op:9}{kernel_and_reason}")
    print("kernels:")
    for kernel in kernels():
        print(f"  {kernel.name}")


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
    families = _families(device)
    return (
        f"cuda: {device.name}, compute capability {major}.{minor}, {device.multiprocessors} multiprocessors, "
        f"{device.shared_memory >> 10} KiB shared memory\n"
        f"  kernels: {families or 'none of this library runs on it'}"
    )


def _families(device: _C.DeviceInfo) -> str:
    """Return the architectures whose kernels run on a GPU, the newest first."""
    found = (kernel.name for kernel in kernels() if runs_on(kernel, device.device, device.compute_capability))
    return ", ".join(sorted({name.partition("_")[0] for name in found}, reverse=True))


def _selection(product: Product, device: _C.DeviceInfo) -> str:
    try:
        chosen = choose(product, Device.of(device))
    except UnsupportedError as error:
        return str(error)
    return f"{chosen.kernel}: {chosen.reason}"


REPETITIONS = 21


def add_bench(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_layer(command)
    add_device(command)


@torch.no_grad()
def run_bench(arguments: argparse.Namespace) -> None:
    """Print times of one layer: dense, sparse with the policy "dense", and sparse.

    The speedup and η = t_dense · density / t_sparse belong to the last.
    """
    device = arguments.device
    print(f"{describe_layer(arguments)}, on {device}")
    print(f"{'':9}{'dense':>12}{'policy=dense':>15}{'sparse':>12}{'speedup':>10}{'η':>7}")
    for op in chosen_ops(arguments):
        product = product_of(arguments, op, arguments.tokens)
        with own_numbers(device):
            calls = product_calls(product, device)
        # With policy="dense" the gradient of x multiplies by the W that the forward pass has written out.
        written = calls.dense if op == "dgrad" else calls.expanded
        dense, materialized, sparse = milliseconds([calls.dense, written, calls.sparse], device, REPETITIONS)
        print(
            f"{op:9}{dense:9.3f} ms{materialized:12.3f} ms{sparse:9.3f} ms"
            f"{dense / sparse:9.2f}x{dense / sparse * product.nnz / product.blocks:7.2f}"
        )


TUNED_TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)


def add_tune(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_layer(command, TUNED_TOKENS)
    command.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="measure the layers of this checkpoint instead of the layer described",
    )
    add_device(command)


def run_tune(arguments: argparse.Namespace) -> None:
    """Print the times of kernels and of the dense product, and keep them for later programs."""
    ops = chosen_ops(arguments)
    if arguments.model is None:
        products = [product_of(arguments, op, tokens) for op in ops for tokens in arguments.tokens]
    else:
        products = measure.products_of(arguments.model, arguments.tokens, ops)
        if not products:
            raise InvalidArgumentError(
                f"{arguments.model}: no block-sparse layer has such a product; there is nothing to measure"
            )
    device = arguments.device
    print(f"{len(products)} products, on {Device.find(device)}")
    progress = Progress(len(products))
    for done, product in enumerate(products, 1):
        (measurement,) = measure.tune([product], device)
        print(measurement, flush=True)
        progress.show(done, "products measured")
    print(store.status())
