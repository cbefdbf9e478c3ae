"""``tilesparse tune``: measure kernels for a layer or a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from .._reports import Progress
from ..errors import InvalidArgumentError
from ..tuning import measure, store
from ..tuning.product import Device
from .command import add_device, add_layer, chosen_ops, parse_count, product_of

TUNED_TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_layer(command, TUNED_TOKENS)
    command.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="measure the layers of this checkpoint instead of the layer described",
    )
    add_device(command)
    command.add_argument(
        "--candidates", type=parse_count, default=3, help="kernels to measure per product (%(default)s)"
    )
    command.add_argument(
        "--repetitions",
        type=parse_count,
        default=21,
        help="times that each kernel is measured (%(default)s)",
    )


def main(arguments: argparse.Namespace) -> None:
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
        (measurement,) = measure.tune(
            [product],
            device,
            candidates=arguments.candidates,
            repetitions=arguments.repetitions,
        )
        print(measurement, flush=True)
        progress.show(done, "products measured")
    print(store.status())
