"""``tilesparse advise``: measure whether block sparsity pays for a model of Transformers here."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .._checks import check_writable
from ..tuning.advise import DENSITIES, advise
from .command import (
    DTYPES,
    add_device,
    load_or_make_model,
    parse_block,
    parse_count,
    parse_density,
    random_batch,
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument(
        "model",
        help="a folder that from_pretrained loads, or a name on the Hub; a folder or file with a config "
        "alone gets random weights",
    )
    command.add_argument("--batch", type=parse_count, default=1, help="sequences or images (%(default)s)")
    command.add_argument("--tokens", type=parse_count, default=512, help="of a sequence (%(default)s)")
    shown = " ".join(f"{density:g}" for density in DENSITIES)
    command.add_argument(
        "--density",
        type=parse_density,
        nargs="+",
        default=DENSITIES,
        help=f"fractions of blocks kept ({shown})",
    )
    command.add_argument(
        "--block", type=parse_block, nargs="+", help="such as 32 64x128 (64 with CUDA, 32 on the CPU)"
    )
    command.add_argument("--dtype", choices=DTYPES, help="of the model (default: as it was saved)")
    command.add_argument("--layers", action="append", metavar="REGEX", help="of names; may be repeated (all)")
    add_device(command)
    command.add_argument("--json", type=Path, metavar="FILE", help="to write the times to as well")


def main(arguments: argparse.Namespace) -> None:
    """Measure, and print tables and a recommendation."""
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    device: torch.device = arguments.device
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    model, is_random = load_or_make_model(arguments.model, device, dtype)
    batch = random_batch(model, arguments.batch, arguments.tokens, device)
    report = advise(
        model,
        batch,
        densities=arguments.density,
        block_shapes=arguments.block,
        layers=arguments.layers,
    )
    if arguments.json is not None:
        report.save(arguments.json)
    weights = "random weights, " if is_random else ""
    name, x = next(iter(batch.items()))
    print(f"{arguments.model}: {weights}{name} {'x'.join(map(str, x.shape))}, on {device}")
    print(report)
