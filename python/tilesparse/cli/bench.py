"""``tilesparse bench``: time a layer against torch.nn.functional.linear."""

from __future__ import annotations

import argparse

import torch

from ..tuning.measure import product_calls
from ..tuning.timing import milliseconds, own_numbers
from .command import add_device, add_layer, chosen_ops, describe_layer, product_of

REPETITIONS = 21


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_layer(command)
    add_device(command)


@torch.no_grad()
def main(arguments: argparse.Namespace) -> None:
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
