"""``tilesparse convert``: read a sparse or quantized checkpoint of another library, and write one of this."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from .._reports import aligned
from ..errors import InvalidArgumentError
from ..io.conversion import ConvertReport, convert
from ..tuning.product import product_of_spec
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
    with ExitStack() as stack:
        folder = arguments.folder
        if arguments.prune is not None:
            if folder is None:
                raise InvalidArgumentError("folder must be given with --prune, got none")
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=folder.absolute().parent))
        report = convert(arguments.source, folder, dtype=dtype, max_shard_size=arguments.max_shard_size)
        print(report)
        if arguments.prune is not None:
            parser = argparse.ArgumentParser()
            prune.add_arguments(parser)
            options = [folder, str(arguments.folder), "--text", str(arguments.prune)]
            options += ["--density", str(arguments.density), "--device", str(arguments.device)]
            prune.main(parser.parse_args(options))
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
            product = product_of_spec(spec, count, "forward", spec.activations)
            choice = choose(product, device, policy="auto")
            own, dense = (
                "-" if time is None else f"{time:.1f}"
                for time in (choice.microseconds, choice.dense_microseconds)
            )
            shape = f"{spec.shape[0]}x{spec.shape[1]}"
            yield shape, layer.storage, str(count), own, dense, choice.kernel or "dense"
