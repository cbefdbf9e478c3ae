"""``tilesparse convert``: read a sparse or quantized checkpoint of another library, and write one of this."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from .._reports import aligned
from ..errors import InvalidArgumentError
from ..io.conversion import ConvertReport, convert
from ..tuning.product import Product
from ..tuning.selection import choose
from . import prune
from .command import DTYPES, add_device, parse_count, parse_density


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("source", type=Path, help="a folder, or a file of .safetensors, .pt, .npz or .mtx")
    command.add_argument("folder", type=Path, nargs="?", help="to write to, empty or new (a report alone)")
    command.add_argument("--dtype", choices=DTYPES, help="of activations (default: as the checkpoint says)")
    command.add_argument("--max-shard-size", default="2GB", metavar="SIZE", help="of a file (%(default)s)")
    command.add_argument("--tokens", type=parse_count, nargs="+", help="of products whose times to estimate")
    command.add_argument("--prune", type=Path, metavar="TEXT", help="prune afterwards, calibrated on a text")
    command.add_argument("--density", type=parse_density, default=0.5, help="of --prune (%(default)s)")
    add_device(command)


def main(arguments: argparse.Namespace) -> None:
    """Convert, and print what is in the checkpoint."""
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    if arguments.prune is None:
        report = convert(
            arguments.source, arguments.folder, dtype=dtype, max_shard_size=arguments.max_shard_size
        )
        print(report)
    else:
        if arguments.folder is None:
            raise InvalidArgumentError("folder must be given with --prune, got none")
        parser = argparse.ArgumentParser()
        prune.add_arguments(parser)
        with tempfile.TemporaryDirectory(dir=arguments.folder.absolute().parent) as temporary:
            report = convert(
                arguments.source, temporary, dtype=dtype, max_shard_size=arguments.max_shard_size
            )
            print(report)
            options = [temporary, str(arguments.folder), "--text", str(arguments.prune)]
            prune.main(
                parser.parse_args(
                    [*options, "--density", str(arguments.density), "--device", str(arguments.device)]
                )
            )
    if arguments.tokens is not None:
        rows = [("shape", "stored", "tokens", "us", "dense us", "kernel")]
        print("\n".join(aligned([*rows, *_times(report, arguments.tokens, arguments.device)])))


def _times(report: ConvertReport, tokens: list[int], device: torch.device) -> Iterator[tuple[str, ...]]:
    """Yield estimated times of the products of each kind of weight."""
    seen = set()
    for layer in report.layers:
        spec = layer.spec
        if spec is None or (key := (spec.shape, layer.storage, round(spec.density, 1))) in seen:
            continue
        seen.add(key)
        for count in tokens:
            product = Product(
                spec.shape[1],
                spec.shape[0],
                count,
                spec.density,
                spec.block_shape,
                spec.dtype,
                storage=spec.storage,
                nm=None if spec.storage == "plain" else spec.nm,
                activations=spec.activations,
            )
            choice = choose(product, device, policy="auto")
            own, dense = (
                "-" if time is None else f"{time:.1f}"
                for time in (choice.microseconds, choice.dense_microseconds)
            )
            shape = f"{spec.shape[0]}x{spec.shape[1]}"
            yield shape, layer.storage, str(count), own, dense, choice.kernel or "dense"
