"""The ``tilesparse`` command: ``info``, ``bench``, ``tune``, ``demo``, ``advise`` and ``prune``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C, _belongs, _checks
from .._checks import BLOCK_SIDES, logger
from ..errors import InvalidArgumentError, TileSparseError, UnsupportedError
from ..tuning.product import KINDS, OPS, Product, default_device, dtype_name

UNWRITABLE = 1  # the status of the system's own commands where stdout is full or closed
BROKEN_PIPE = 141  # the status of a program that SIGPIPE ends, in a shell

COMMANDS = {  # by the module beside this one that has `add_…` and `run_…` of each
    "info": (
        "kernels",
        "versions, devices, break-even densities, and which kernel a layer would use",
    ),
    "bench": ("kernels", "time one layer against torch.nn.functional.linear"),
    "tune": ("kernels", "measure kernels for a layer or a checkpoint here, and keep which is the fastest"),
    "demo": ("demo", "train a small GPT on Python's own sources, dense and block-sparse side by side"),
    "advise": ("models", "measure whether block sparsity pays for a model of Transformers on this device"),
    "convert": ("models", "read a sparse or quantized checkpoint of another library, and write one of this"),
    "prune": ("models", "make a model of Transformers block-sparse, calibrated on a text, and save it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    It is 0, 1 if the output cannot be written, 2 for bad input, 130 if interrupted, or 141 if nobody reads
    the output any more.
    """
    if sys.stdout is None:  # closed, and the first file that is opened would take its place
        logger.error("tilesparse: stdout must be open, got a closed one")
        return UNWRITABLE
    try:
        try:
            argv = sys.argv[1:] if argv is None else argv
            return _run(_parser(argv).parse_args(argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _belongs.say()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            logger.error("tilesparse: stdout cannot be written: %s", error.strerror)
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


def _default_device() -> torch.device:
    """Return `selection.default_device`, whose warning becomes a message on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device = default_device()
    for warning in caught:
        logger.warning(warning.message)
    return device


DTYPES = {dtype_name(dtype): dtype for dtype in _checks.DTYPES}


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
    sizes = {str(size): size for size in BLOCK_SIDES}
    sides = text.split("x")
    if len(sides) > 2 or not set(sides) <= set(sizes):
        raise argparse.ArgumentTypeError(f"{text} is not a block such as 32 or 32x64, with sides of 2 to 128")
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


_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


def load_model(name: str) -> Any:
    """Return a model of the class that its config names: a folder's, or that of a name on the Hub."""
    kind, _ = _class_and_config(name)
    with _reported():
        return kind.from_pretrained(name, dtype="auto")


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model, see `load_model`."""
    transformers = _transformers()
    with _reported():
        return transformers.AutoTokenizer.from_pretrained(name)


def load_or_make_model(name: str, device: torch.device, dtype: torch.dtype | None) -> tuple[nn.Module, bool]:
    """Return a model in evaluation mode on a device, and True if its weights are random.

    They are where the folder has a config alone, or the name is that of the config's file.
    """
    kind, config = _class_and_config(name)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # which would keep what each call adds to it
    path = Path(name)
    alone = path.is_file() or (path.is_dir() and not any(any(path.glob(text)) for text in _WEIGHTS))
    if not alone:
        with _reported():
            model = kind.from_pretrained(name, config=config, dtype="auto" if dtype is None else dtype)
        return model.to(device).eval(), False
    with _reported(), device, _default(dtype or getattr(config, "dtype", None) or torch.float32):
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    return model.to(device).eval(), True


def random_batch(model: Any, batch: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Return a batch of so many sequences of random tokens, or images where the model takes these."""
    config, name = model.config, model.main_input_name
    if name == "pixel_values":
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size
        return {name: torch.randn(batch, channels, height, width, device=device, dtype=model.dtype)}
    if name != "input_ids":
        raise UnsupportedError(
            f"model must take tokens or images, got one that takes {name}: call tilesparse.advise in Python, "
            "with a batch of yours"
        )
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise InvalidArgumentError(f"--tokens must be at most {positions}, the positions of the model")
    ids = torch.randint(text.vocab_size, (batch, tokens), device=device)
    found = {name: ids, "attention_mask": torch.ones_like(ids)}
    return found | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def _class_and_config(name: str) -> tuple[Any, Any]:
    transformers = _transformers()
    with _reported():
        config = transformers.AutoConfig.from_pretrained(name)
    architecture = (config.architectures or ["AutoModel"])[0]
    return getattr(transformers, architecture, transformers.AutoModel), config


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


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
