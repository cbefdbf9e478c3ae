"""The ``tilesparse`` command: ``info``, ``bench``, ``tune``, ``demo``, ``advise`` and ``prune``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

import torch

from .. import _C, _interrupt
from .._progress import logger
from ..errors import TileSparseError
from ..tuning.product import default_device

UNWRITABLE = 1  # the status of the system's own commands where stdout is full or closed
BROKEN_PIPE = 141  # the status of a program that SIGPIPE ends, in a shell

COMMANDS = {  # each is a module beside this one, which has `add_arguments` and `main`
    "info": "versions, devices, break-even densities, and which kernel a layer would use and why",
    "bench": "time one layer against torch.nn.functional.linear",
    "tune": "measure kernels for a layer or a checkpoint here, and keep which is the fastest",
    "demo": "train a small GPT on Python's own sources, dense and block-sparse side by side",
    "advise": "measure whether block sparsity pays for a model of Transformers on this device",
    "prune": "make a model of Transformers block-sparse, calibrated on a text, and save it",
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
        return _interrupt.say()
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
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        if name in argv:
            module = importlib.import_module(f"{__package__}.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.main)
    return parser


def _default_device() -> torch.device:
    """Return `selection.default_device`, whose warning becomes a message on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device = default_device()
    for warning in caught:
        logger.warning(warning.message)
    return device
