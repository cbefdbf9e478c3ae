"""Options of several commands, and the layer that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from .. import _checks
from .._checks import BLOCK_SIZES
from ..tuning.product import KINDS, OPS, Product, dtype_name

DTYPES = {dtype_name(dtype): dtype for dtype in _checks.DTYPES}
VALUES_DTYPES = {
    "int4" if dtype == _checks.PACKED else dtype_name(dtype): code for dtype, code in _checks.SCALED.items()
}
# In the order of their numbers.
KERNEL_DTYPES = ("default", *map(dtype_name, (*_checks.DTYPES, *_checks.QUANTIZED)))


def parse_count(text: str) -> int:
    """Return a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def parse_density(text: str) -> float:
    """Return a fraction from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number between 0 and 1")
    return number


def parse_block(text: str) -> tuple[int, int]:
    """Return the (bn, bk) of "32" or "32x64"."""
    sizes = {str(size): size for size in BLOCK_SIZES}
    sides = text.split("x")
    if len(sides) > 2 or not set(sides) <= set(sizes):
        raise argparse.ArgumentTypeError(
            f"{text} is not a block such as 32 or 32x64, of sizes {', '.join(sizes)}"
        )
    return sizes[sides[0]], sizes[sides[-1]]


def parse_device(text: str) -> torch.device:
    """Return a device that is there."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text} is neither cpu nor cuda") from None
    if device.type not in KINDS:
        raise argparse.ArgumentTypeError(f"{text} is neither cpu nor cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"PyTorch finds no device {text}")
    return device


def add_layer(command: argparse.ArgumentParser, tokens: Sequence[int] = ()) -> None:
    """Add the options of one layer and one number of tokens, or where some are given, of several."""
    command.add_argument("--in-features", type=parse_count, default=1024, help="(%(default)s)")
    command.add_argument("--out-features", type=parse_count, default=4096, help="(%(default)s)")
    if tokens:
        shown = " ".join(map(str, tokens))
        command.add_argument(
            "--tokens", type=parse_count, nargs="+", default=tokens, help=f"rows of x ({shown})"
        )
    else:
        command.add_argument("--tokens", type=parse_count, default=1024, help="rows of x (%(default)s)")
    command.add_argument(
        "--density", type=parse_density, default=0.25, help="fraction of blocks kept (%(default)s)"
    )
    command.add_argument("--block", type=parse_block, default=(64, 64), help="64, or 64x32 for out x in (64)")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    command.add_argument("--op", choices=OPS, help="one product (default: all)")


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the device to compute on."""
    command.add_argument(
        "--device", type=parse_device, help="cpu or cuda (default: cuda if kernels run there)"
    )


def chosen_ops(arguments: argparse.Namespace) -> Sequence[str]:
    """Return the products asked for."""
    return [arguments.op] if arguments.op else OPS


def describe_layer(arguments: argparse.Namespace) -> str:
    """Return the layer in words, as the title of a table."""
    bn, bk = arguments.block
    return (
        f"{arguments.in_features} -> {arguments.out_features} features, {arguments.tokens} tokens, "
        f"density {arguments.density:g}, blocks {bn}x{bk}, {arguments.dtype}"
    )


def product_of(arguments: argparse.Namespace, op: str, tokens: int) -> Product:
    """Return the product of the layer and so many tokens."""
    return Product(
        arguments.in_features,
        arguments.out_features,
        tokens,
        arguments.density,
        arguments.block,
        DTYPES[arguments.dtype],
        op,
    )
