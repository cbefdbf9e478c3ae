"""The ``tilesparse`` command: ``info``, ``bench``, ``tune``, ``demo``, ``prune`` and ``plot``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _C, _checks, _interrupt, functional
from .._checks import BLOCK_SIZES
from .._progress import Progress
from ..errors import InvalidArgumentError, TileSparseError, UnsupportedError
from ..nn.linear import BlockSparseLinear
from ..pattern.block_pattern import BlockPattern
from ..tuning import measuring as tuning
from ..tuning.selection import KINDS, OPS, Device, Product, choose, default_device, dtype_name, runs_on
from . import demo
from . import plot as _plot_command
from . import prune as prune

DTYPES = {dtype_name(dtype): dtype for dtype in _checks.DTYPES}
STORED = (
    tuple(  # all but plain values in the dtype of the activations: a storage, and a dtype or None for that
        (storage, dtype)
        for dtype in (None, *_checks.QUANTIZED.values())
        for storage in (0, 1)
        if storage or dtype
    )
)
BREAK_EVEN = Path(__file__).with_name("break_even.json")  # printed by benchmarks/break_even.py
UNWRITABLE = 1  # the status of the system's own commands where stdout is full or closed
BROKEN_PIPE = 141  # the status of a program that SIGPIPE ends, in a shell
TUNED_TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)
ROUNDS = 9
ROUND_SECONDS = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    That is 0, 1 when the output cannot be written, 2 for bad input, 130 when interrupted, or 141 when nobody
    reads the output any more.
    """
    if sys.stdout is None:  # closed, and the first file that is opened would take its place
        print("tilesparse: stdout must be open, got a closed one", file=sys.stderr)
        return UNWRITABLE
    try:
        try:
            return _run(_parser().parse_args(argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _interrupt.say()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"tilesparse: stdout cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        return BROKEN_PIPE if isinstance(error, BrokenPipeError) else UNWRITABLE


def _run(arguments: argparse.Namespace) -> int:
    if "device" in arguments and arguments.device is None:
        arguments.device = _default_device()
    try:
        arguments.run(arguments)
    except (TileSparseError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and not isinstance(error, TileSparseError):
            raise  # that of stdout
        print(f"tilesparse {arguments.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tilesparse", description="Block-sparse linear layers.")
    parser.add_argument("--version", action="version", version=f"tilesparse {_C.version()}")
    metavar = "info | bench | tune | demo | prune | plot"
    commands = parser.add_subparsers(dest="command", required=True, metavar=metavar)
    layer = _layer_options()

    command = commands.add_parser(
        "info",
        parents=[layer],
        help="versions, devices, where dense is faster, and which kernel a layer would use and why",
    )
    command.add_argument(
        "--gpu",
        action="append",
        default=[],
        help="what would be chosen on another GPU, as H100, 'RTX 4090' or 8.6; may be repeated",
    )
    command.set_defaults(run=info)

    command = commands.add_parser(
        "bench", parents=[layer], help="time one layer against torch.nn.functional.linear"
    )
    command.add_argument("--device", type=_device, help="cpu or cuda (default: cuda if kernels run there)")
    command.set_defaults(run=bench)

    command = commands.add_parser(
        "tune",
        parents=[_layer_options(tokens=TUNED_TOKENS)],
        help="measure kernels for a layer or a checkpoint here, and keep which is the fastest",
    )
    command.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="a checkpoint, whose layers are measured instead of the one described",
    )
    command.add_argument("--device", type=_device, help="cpu or cuda (default: cuda if kernels run there)")
    command.add_argument(
        "--candidates", type=_count, default=3, help="kernels measured of each product (%(default)s)"
    )
    command.add_argument(
        "--repetitions", type=_count, default=21, help="of which the median is taken (%(default)s)"
    )
    command.set_defaults(run=_tune)

    command = commands.add_parser(
        "demo", help="train a small GPT on Python's own sources, dense and block-sparse side by side"
    )
    command.add_argument(
        "--density", type=_density, default=0.25, help="fraction of blocks kept (%(default)s)"
    )
    command.add_argument("--block", type=_block, help="32, or 32x64 for out x in (32; on a GPU 64)")
    command.add_argument("--size", choices=demo.SIZES, help="of the model (small; on a GPU medium or large)")
    command.add_argument("--steps", type=_count, help="of training (80; on a GPU 300)")
    command.add_argument("--device", type=_device, help="cpu or cuda (default: cuda if kernels run there)")
    command.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of products, by autocast; parameters are float32 (float32; on a GPU bfloat16)",
    )
    command.add_argument("--text", type=Path, help="a file to train on")
    command.set_defaults(run=_demo)

    prune.add_parser(commands, _count, _density, _block, _device)
    _plot_command.add_to(commands)
    return parser


def _layer_options(tokens: Sequence[int] = ()) -> argparse.ArgumentParser:
    """Of one layer and one number of tokens, or where some are given, of several."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--in-features", type=_count, default=1024, help="(%(default)s)")
    options.add_argument("--out-features", type=_count, default=4096, help="(%(default)s)")
    if tokens:
        shown = " ".join(map(str, tokens))
        options.add_argument("--tokens", type=_count, nargs="+", default=tokens, help=f"rows of x ({shown})")
    else:
        options.add_argument("--tokens", type=_count, default=1024, help="rows of x (%(default)s)")
    options.add_argument(
        "--density", type=_density, default=0.25, help="fraction of blocks kept (%(default)s)"
    )
    options.add_argument("--block", type=_block, default=(32, 32), help="32, or 32x64 for out x in (32)")
    options.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    options.add_argument("--op", choices=OPS, help="one product (default: all)")
    return options


def info(arguments: argparse.Namespace) -> None:
    """Prints versions, devices, where dense is faster, which kernel the layer would use, and all kernels."""
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
    print(tuning.status())
    _print_break_even()
    print(f"{_describe_layer(arguments)}:")
    places = [device.name if device in absent else KINDS[device.device] for device in devices]
    width = 1 + max(5, *map(len, places))
    for device, where in zip(devices, places, strict=True):
        for op in _chosen_ops(arguments):
            kernel_and_reason = _selection(_product(arguments, op, arguments.tokens), device)
            print(f"  {where:{width}}{op:9}{kernel_and_reason}")
    print("kernels:")
    for kernel in _C.kernels():
        dtypes = _members(kernel.dtypes, DTYPES)
        values = "".join(f"; {_stored_name(*stored)}" for stored in STORED if _reads(kernel, *stored))
        print(f"  {kernel.name:32} {KINDS[kernel.device]:6}{_members(kernel.ops, OPS)}; {dtypes}{values}")


def bench(arguments: argparse.Namespace) -> None:
    """Prints times of one layer: dense, sparse with the policy "dense", and sparse.

    The speedup and η = t_dense · density / t_sparse are those of the last.
    """
    device = arguments.device
    pattern = _pattern(arguments)
    print(f"{_describe_layer(arguments)}, on {device}")
    print(f"{'':9}{'dense':>12}{'policy=dense':>15}{'sparse':>12}{'speedup':>10}{'η':>7}")
    for op in _chosen_ops(arguments):
        products = _products(pattern, op, arguments.tokens, DTYPES[arguments.dtype], device)
        dense, expanded, sparse = _median_seconds(products, device)
        print(
            f"{op:9}{1e3 * dense:9.3f} ms{1e3 * expanded:12.3f} ms{1e3 * sparse:9.3f} ms"
            f"{dense / sparse:9.2f}x{dense / sparse * pattern.density:7.2f}"
        )


def _tune(arguments: argparse.Namespace) -> None:
    """Prints the times of kernels and of dense, which are kept for later programs."""
    ops = _chosen_ops(arguments)
    if arguments.model is None:
        products = [_product(arguments, op, tokens) for op in ops for tokens in arguments.tokens]
    else:
        products = tuning.products_of(arguments.model, arguments.tokens, ops)
        if not products:
            raise InvalidArgumentError(
                f"{arguments.model}: no block-sparse layer has such a product; there is nothing to measure"
            )
    device = arguments.device
    print(f"{len(products)} products, on {Device.find(device)}")
    progress = Progress(len(products))
    for done, product in enumerate(products, 1):
        (measurement,) = tuning.tune(
            [product],
            device,
            candidates=arguments.candidates,
            repetitions=arguments.repetitions,
        )
        print(measurement, flush=True)
        progress.show(done, "products measured")
    print(tuning.status())


def _demo(arguments: argparse.Namespace) -> None:
    device = arguments.device
    size, dtype, block, steps = ("small", "float32", (32, 32), 80)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        size = "large" if memory > 32 << 30 else "medium"
        dtype, block, steps = ("bfloat16", (64, 64), 300)
    demo.run(
        demo.Settings(
            size=demo.SIZES[arguments.size or size],
            device=device,
            dtype=DTYPES[arguments.dtype or dtype],
            density=arguments.density,
            block_shape=arguments.block or block,
            steps=arguments.steps or steps,
            text=arguments.text,
        )
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def _density(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number between 0 and 1")
    return number


def _block(text: str) -> tuple[int, int]:
    sizes = {str(size): size for size in BLOCK_SIZES}
    sides = text.split("x")
    if len(sides) > 2 or not set(sides) <= set(sizes):
        raise argparse.ArgumentTypeError(
            f"{text} is not a block such as 32 or 32x64, of sizes {', '.join(sizes)}"
        )
    return sizes[sides[0]], sizes[sides[-1]]


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text} is neither cpu nor cuda") from None
    if device.type not in KINDS:
        raise argparse.ArgumentTypeError(f"{text} is neither cpu nor cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"PyTorch finds no device {text}")
    return device


def _default_device() -> torch.device:
    """That of `selection.default_device`, whose warning becomes a sentence on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device = default_device()
    for warning in caught:
        print(warning.message, file=sys.stderr)
    return device


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
    return (
        f"cuda: {device.name}, compute capability {major}.{minor}, {device.multiprocessors} multiprocessors, "
        f"{device.shared_memory >> 10} KiB shared memory\n"
        f"  kernels: {_families(device) or 'none of this library runs on it'}"
    )


def _families(device: _C.DeviceInfo) -> str:
    """The architectures whose kernels run on a GPU, the newest first, and what these compute."""
    dtypes: dict[str, int] = {}
    for kernel in _kernels_for(device):
        family = kernel.name.partition("_")[0]
        dtypes[family] = dtypes.get(family, 0) | kernel.dtypes
    return ", ".join(f"{family} ({_members(bits, DTYPES)})" for family, bits in dtypes.items())


def _kernels_for(device: _C.DeviceInfo) -> list[_C.KernelInfo]:
    """Those that run on it, for the newest architecture first."""
    kernels = sorted(_C.kernels(), key=lambda kernel: kernel.min_compute_capability, reverse=True)
    return [kernel for kernel in kernels if runs_on(kernel, device.device, device.compute_capability)]


def _describe_storages(device: _C.DeviceInfo) -> str:
    """Which values in fewer bytes are multiplied as they are, and by what; see `tilesparse.storage`.

    Nothing of a device on which no kernel runs: what is expanded there meets no kernel either.
    """
    if not _kernels_for(device):
        return ""
    lines, expanded = [], []
    for stored in STORED:
        readers = _readers([kernel for kernel in _kernels_for(device) if _reads(kernel, *stored)])
        if readers:
            lines.append(f"  {_stored_name(*stored)}: {readers}, otherwise expanded in every call")
        else:
            expanded.append(_stored_name(*stored))
    if expanded:
        lines.append(f"  {', '.join(expanded)}: expanded in every call")
    return "\n".join(lines)


def _readers(kernels: Iterable[_C.KernelInfo]) -> str:
    dtypes: dict[tuple[str, str], int] = {}
    for kernel in kernels:
        tokens = f" up to {kernel.max_tokens} tokens" if kernel.max_tokens else ""
        reader = kernel.name.partition("_")[0], _members(kernel.ops, OPS) + tokens
        dtypes[reader] = dtypes.get(reader, 0) | kernel.dtypes
    return ", ".join(f"{family} ({ops}; {_members(bits, DTYPES)})" for (family, ops), bits in dtypes.items())


def _reads(kernel: _C.KernelInfo, storage: int, dtype: int | None) -> bool:
    """Whether it multiplies such values as they are."""
    dtypes = kernel.values_dtypes
    return bool(kernel.storages >> storage & 1) and (
        not dtypes if dtype is None else bool(dtypes >> dtype & 1)
    )


def _stored_name(storage: int, dtype: int | None) -> str:
    names = [dtype_name(known) for known, code in _checks.QUANTIZED.items() if code == dtype]
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


def _pattern(arguments: argparse.Namespace) -> BlockPattern:
    return BlockPattern.random(
        (arguments.out_features, arguments.in_features),
        block_shape=arguments.block,
        density=arguments.density,
        generator=torch.Generator().manual_seed(0),
    )


def _describe_layer(arguments: argparse.Namespace) -> str:
    bn, bk = arguments.block
    return (
        f"{arguments.in_features} -> {arguments.out_features} features, {arguments.tokens} tokens, "
        f"density {arguments.density:g}, blocks {bn}x{bk}, {arguments.dtype}"
    )


def _chosen_ops(arguments: argparse.Namespace) -> Sequence[str]:
    return [arguments.op] if arguments.op else OPS


def _selection(product: Product, device: _C.DeviceInfo) -> str:
    try:
        chosen = choose(product, Device.of(device))
    except UnsupportedError as error:
        return str(error)
    return f"{chosen.kernel}: {chosen.reason}; next: {chosen.runner_up or 'none'}"


def _product(arguments: argparse.Namespace, op: str, tokens: int) -> Product:
    return Product(
        arguments.in_features,
        arguments.out_features,
        tokens,
        arguments.density,
        arguments.block,
        DTYPES[arguments.dtype],
        op,
    )


def _products(
    pattern: BlockPattern, op: str, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], Tensor], ...]:
    """One product on random operands as computed dense, by a layer with the policy "dense", and sparse."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    x, y = randn(tokens, pattern.in_features), randn(tokens, pattern.out_features)
    weight, values = randn(*pattern.shape), randn(pattern.nnz, *pattern.block_shape)
    layer = BlockSparseLinear(
        pattern.in_features,
        pattern.out_features,
        bias=False,
        pattern=pattern,
        policy="dense",
        device=device,
        dtype=dtype,
    )
    if op == "forward":
        layer.requires_grad_(False)
        return (
            lambda: F.linear(x, weight),
            lambda: layer(x),
            lambda: functional.linear(x, values, pattern),
        )
    if op == "dgrad":  # its dense weight is still there from the forward pass
        return (
            lambda: y @ weight,
            lambda: y @ weight,
            lambda: functional.dds(y, values, pattern, transpose=False),
        )
    result = layer(x)
    return (
        lambda: y.t() @ x,
        lambda: torch.autograd.grad(result, layer.weight, y, retain_graph=True)[0],
        lambda: functional.sdd(y, x, pattern),
    )


def _median_seconds(functions: Sequence[Callable[[], Tensor]], device: torch.device) -> list[float]:
    """Median time of one call of each, measured in turns so that a busy machine slows all of them."""
    for function in functions:
        _seconds(function, 3, device)
    calls = [max(1, round(ROUND_SECONDS / _seconds(function, 1, device))) for function in functions]
    rounds = [
        [_seconds(function, count, device) for function, count in zip(functions, calls, strict=True)]
        for _ in range(ROUNDS)
    ]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _seconds(function: Callable[[], Tensor], calls: int, device: torch.device) -> float:
    """Mean time of a call."""
    demo.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    demo.synchronize(device)
    return (time.perf_counter() - start) / calls
