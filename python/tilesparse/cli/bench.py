"""``tilesparse bench``: time a layer against torch.nn.functional.linear, or an encoder against PyTorch's."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import nn

from .._ops.encoder import Encoder, EncoderLayer, EncoderNorm, EncoderWeight
from ..errors import UnsupportedError
from ..nn.linear import BlockSparseLinear
from ..tuning.measure import product_calls
from ..tuning.timing import milliseconds, own_numbers
from .command import DTYPES, add_device, add_layer, chosen_ops, describe_layer, parse_count, product_of

REPETITIONS = 21


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument(
        "what",
        nargs="?",
        choices=("layer", "encoder"),
        default="layer",
        help="one layer, or an encoder of texts in int8 on the CPU, whose MLPs widen in features to out",
    )
    add_layer(command)
    command.add_argument("--texts", type=parse_count, default=32, help="of so many tokens, for encoders")
    command.add_argument("--layers", type=parse_count, default=6, help="of an encoder (%(default)s)")
    command.add_argument("--heads", type=parse_count, default=16, help="of an encoder (%(default)s)")
    add_device(command)


@torch.no_grad()
def main(arguments: argparse.Namespace) -> None:
    """Print times of one layer: dense, sparse with the policy "dense", and sparse; or of an encoder.

    The speedup and η = t_dense · density / t_sparse belong to the last.
    """
    if arguments.what == "encoder":
        _bench_encoder(arguments)
        return
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


def _bench_encoder(arguments: argparse.Namespace) -> None:
    if arguments.device.type != "cpu":
        raise UnsupportedError(f"--device must be cpu for an encoder, got {arguments.device}")
    if arguments.op is not None:
        raise UnsupportedError(f"--op must be left out for an encoder, got {arguments.op}")
    features, hidden = arguments.in_features, arguments.out_features
    options = {"density": arguments.density, "block_shape": arguments.block}
    dtype = DTYPES[arguments.dtype]
    with own_numbers(arguments.device):
        sizes = features, arguments.heads, hidden
        sparse = Encoder([_random_layer(*sizes, **options) for _ in range(arguments.layers)])
        layer = nn.TransformerEncoderLayer(*sizes, activation="gelu", batch_first=True, dtype=dtype)
        dense = nn.TransformerEncoder(layer, arguments.layers).eval()
        x = torch.randn(arguments.texts, arguments.tokens, features, dtype=dtype)
        tokens, offsets = x.flatten(0, 1), torch.arange(arguments.texts + 1, dtype=torch.int32)
        calls = partial(dense, x), partial(sparse, tokens, offsets * arguments.tokens)
        of_dense, of_sparse = milliseconds(calls, arguments.device, REPETITIONS)
    texts = f"{arguments.texts} texts of {describe_layer(arguments)}"
    print(f"encoder of {arguments.layers} layers, {texts}, on cpu")
    print(f"{'dense':>12}{'sparse int8':>15}{'speedup':>10}")
    print(f"{of_dense:9.3f} ms{of_sparse:12.3f} ms{of_dense / of_sparse:9.2f}x")


def _random_layer(features: int, heads: int, hidden: int, **options: Any) -> EncoderLayer:
    shapes = (features, 3 * features), (features, features), (features, hidden), (hidden, features)
    options |= {"storage": "int8", "activations": "int8"}
    qkv, out, up, down = (EncoderWeight.of(BlockSparseLinear(*shape, **options)) for shape in shapes)
    norm = EncoderNorm(torch.ones(features), torch.zeros(features), 1e-5)
    return EncoderLayer(heads, qkv, out, up, down, norm, norm)
