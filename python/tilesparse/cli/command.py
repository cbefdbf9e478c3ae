"""The ``tilesparse`` command and its parts, such as ``info`` and ``prune``, see `COMMANDS`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import _C, _checks
from .._checks import logger
from ..errors import InvalidArgumentError, TileSparseError, UnsupportedError
from ..tuning.measure import device_to_measure
from ..tuning.product import OPS, Product, dtype_name

INTERRUPTED = 130  # the status of a program that SIGINT ends, in a shell

COMMANDS = {  # by the module beside this one that has `add_…` and `run_…` of each
    "info": (
        "kernels",
        "versions, devices, and which kernel a layer would use",
    ),
    "bench": ("kernels", "time one layer against torch.nn.functional.linear"),
    "tune": ("kernels", "measure kernels for a layer or a checkpoint here, and keep which is the fastest"),
    "demo": ("demo", "train a small GPT on Python's own sources, dense and block-sparse side by side"),
    "advise": ("models", "measure whether block sparsity pays for a model of Transformers on this device"),
    "convert": ("models", "read a sparse or quantized checkpoint of another library, and write one of this"),
    "prune": ("models", "make a model of Transformers block-sparse, calibrated on a text, and save it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for bad input, 130 if interrupted."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        return _run(_parser(argv).parse_args(argv))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    try:
        if "device" in arguments:
            arguments.device = device_to_measure(arguments.device)
        arguments.run(arguments)
    except (TileSparseError, OSError) as error:
        logger.error("tilesparse %s: %s", arguments.command, error)
        return 2
    return 0


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser of a command line; only the command that it names is imported and gets its options."""
    parser = argparse.ArgumentParser(prog="tilesparse", description="Block-sparse linear layers.")
    parser.add_argument("--version", action="version", version=f"tilesparse {_C.version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, (home, purpose) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        if name in argv:
            module = importlib.import_module(f"{__package__}.{home}")
            getattr(module, f"add_{name}")(command)
            command.set_defaults(run=getattr(module, f"run_{name}"))
    return parser


DTYPES = {dtype_name(dtype): dtype for dtype in _checks.DTYPES}


def parse_block(text: str) -> tuple[int, int]:
    """Return the (bn, bk) of "32" or "32x64"."""
    bn, _, bk = text.partition("x")
    return int(bn), int(bk or bn)


def add_layer(command: argparse.ArgumentParser, tokens: Sequence[int] = ()) -> None:
    """Add the options of one layer and one number of tokens, or where some are given, of several."""
    command.add_argument("--in-features", type=int, default=1024, help="(%(default)s)")
    command.add_argument("--out-features", type=int, default=4096, help="(%(default)s)")
    if tokens:
        shown = " ".join(map(str, tokens))
        command.add_argument("--tokens", type=int, nargs="+", default=tokens, help=f"rows of x ({shown})")
    else:
        command.add_argument("--tokens", type=int, default=1024, help="rows of x (%(default)s)")
    command.add_argument("--density", type=float, default=0.25, help="fraction of blocks kept (%(default)s)")
    command.add_argument("--block", type=parse_block, default=(64, 64), help="64, or 64x32 for out x in (64)")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    command.add_argument("--op", choices=OPS, help="one product (default: all)")


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the device to compute on."""
    command.add_argument("--device", help="cpu or cuda (default: cuda if kernels run there)")


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


def load_model(name: str, dtype: torch.dtype | str = "auto") -> Any:
    """Return a model of the class that its config names: a folder's, or that of a name on the Hub."""
    transformers = _transformers()
    with _reported():
        config = transformers.AutoConfig.from_pretrained(name)
        architecture = (config.architectures or ["AutoModel"])[0]
        kind = getattr(transformers, architecture, transformers.AutoModel)
        return kind.from_pretrained(name, dtype=dtype)


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model, see `load_model`."""
    transformers = _transformers()
    with _reported():
        return transformers.AutoTokenizer.from_pretrained(name)


def random_batch(model: Any, batch: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Return a batch of so many sequences of random tokens."""
    config, name = model.config, model.main_input_name
    if name != "input_ids":
        raise UnsupportedError(
            f"model must take tokens, got one that takes {name}: call tilesparse.advise in Python"
        )
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise InvalidArgumentError(f"--tokens must be at most {positions}, the positions of the model")
    ids = torch.randint(text.vocab_size, (batch, tokens), device=device)
    found = {name: ids, "attention_mask": torch.ones_like(ids)}
    return found | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedError("it needs Transformers: pip install transformers") from error


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"model cannot be loaded: {error}") from error
