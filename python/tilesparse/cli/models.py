"""``tilesparse advise``, ``prune`` and ``convert``: whole models and checkpoints."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import aligned, check_writable
from ..config import STORAGES, BlockSparseConfig
from ..errors import InvalidArgumentError
from ..io.conversion import ConvertReport, convert
from ..prune.driver import METHODS, prune_
from ..tuning.advise import DENSITIES, advise
from ..tuning.product import choose, product_of_spec
from .command import (
    DTYPES,
    add_device,
    load_model,
    load_tokenizer,
    parse_block,
    random_batch,
)


def add_advise(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument(
        "model",
        help="a folder that from_pretrained loads, or a name on the Hub",
    )
    command.add_argument("--batch", type=int, default=1, help="sequences (%(default)s)")
    command.add_argument("--tokens", type=int, default=512, help="of a sequence (%(default)s)")
    shown = " ".join(f"{density:g}" for density in DENSITIES)
    command.add_argument(
        "--density",
        type=float,
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


def run_advise(arguments: argparse.Namespace) -> None:
    """Measure, and print tables and a recommendation."""
    device: torch.device = arguments.device
    model = load_model(arguments.model, DTYPES.get(arguments.dtype, "auto")).to(device).eval()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # which would keep what each call adds to it
    batch = random_batch(model, arguments.batch, arguments.tokens, device)
    report = advise(
        model,
        batch,
        densities=arguments.density,
        block_shapes=arguments.block,
        layers=arguments.layers,
    )
    name, x = next(iter(batch.items()))
    print(f"{arguments.model}: {name} {'x'.join(map(str, x.shape))}, on {device}")
    print(report)


SAMPLES, LENGTH = 128, 2048


def add_prune(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("model", help="a folder that from_pretrained loads, or a name on the Hub")
    command.add_argument("output", type=Path, help="the folder to save to, which must be empty or not exist")
    command.add_argument("--text", type=Path, required=True, help="a file of text to calibrate on, in UTF-8")
    command.add_argument("--density", type=float, default=0.5, help="fraction of blocks kept (%(default)s)")
    command.add_argument("--block", type=parse_block, default=(64, 64), help="64, or 64x32 for out x in (64)")
    command.add_argument("--method", choices=METHODS, default="obs", help="to choose blocks by (%(default)s)")
    command.add_argument("--layers", action="append", metavar="REGEX", help="of names; may be repeated (all)")
    command.add_argument("--nm", action="store_true", help="2:4 inside the blocks")
    command.add_argument("--storage", choices=STORAGES, default="plain", help="(%(default)s)")
    command.add_argument(
        "--samples",
        type=int,
        default=SAMPLES,
        help="samples of text, evenly spread (%(default)s)",
    )
    command.add_argument(
        "--length", type=int, default=LENGTH, help="tokens of a sample, at most (%(default)s)"
    )
    add_device(command)


def run_prune(arguments: argparse.Namespace) -> None:
    """Prune, save, and print a report."""
    output: Path = arguments.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidArgumentError(f"output must be a folder that is empty or does not exist, got {output}")
    check_writable("output", output)
    try:
        text = arguments.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--text cannot be read: {error}") from error
    tokenizer = load_tokenizer(arguments.model)
    model = load_model(arguments.model)
    length = min(arguments.length, getattr(model.config, "max_position_embeddings", None) or arguments.length)
    batches = _samples(tokenizer, text, arguments.samples, length)
    nm = (2, 4) if arguments.nm else None
    report = prune_(
        model,
        BlockSparseConfig(arguments.density, arguments.block, nm, arguments.storage),
        batches,
        layers=arguments.layers,
        method=arguments.method,
        device=arguments.device,
    )
    try:
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
    except OSError as error:
        raise InvalidArgumentError(
            f"output must be a folder that can be written, got {output}: {error}"
        ) from error
    print(report)  # only now: where nobody reads it the model is not lost
    print(f"saved to {output}")


def _samples(tokenizer: Any, text: str, samples: int, length: int) -> list[dict[str, Tensor]]:
    """Return samples evenly spread over a text, each between the tokens that the tokenizer adds."""
    encoded = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    own = [place for place, added in enumerate(special) if not added] or [len(ids)]
    before, after = ids[: own[0]], ids[own[-1] + 1 :]
    ids = ids[own[0] : own[-1] + 1]
    size = length - len(before) - len(after)
    if size < 1 or len(ids) < 2:
        raise InvalidArgumentError(f"--text and --length must have more tokens, got {len(ids)} and {length}")
    samples = min(samples, -(-len(ids) // size))
    last = max(0, len(ids) - size)
    starts = [round(last * number / max(1, samples - 1)) for number in range(samples)]
    return [{"input_ids": torch.tensor([[*before, *ids[start : start + size], *after]])} for start in starts]


def add_convert(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("source", type=Path, help="a folder, or a file of .safetensors, .pt, .npz or .mtx")
    command.add_argument("folder", type=Path, nargs="?", help="to write to, empty or new (a report alone)")
    command.add_argument("--dtype", choices=DTYPES, help="of activations (default: as the checkpoint says)")
    command.add_argument("--max-shard-size", default="2GB", metavar="SIZE", help="of a file (%(default)s)")
    command.add_argument(
        "--tokens", type=int, nargs="+", default=(), help="of products whose times to estimate"
    )
    command.add_argument("--prune", type=Path, metavar="TEXT", help="prune afterwards, calibrated on a text")
    command.add_argument("--density", type=float, default=0.5, help="of --prune (%(default)s)")
    add_device(command)


def run_convert(arguments: argparse.Namespace) -> None:
    """Convert, and print what is in the checkpoint."""
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    folder: Path | None = arguments.folder
    if arguments.prune is None:
        between: Any = nullcontext(folder)
    elif folder is None:
        raise InvalidArgumentError("folder must be given with --prune, got none")
    else:
        between = tempfile.TemporaryDirectory(dir=folder.absolute().parent)
    with between as target:
        report = convert(arguments.source, target, dtype=dtype, max_shard_size=arguments.max_shard_size)
        print(report)
        if arguments.prune is not None:
            command = argparse.ArgumentParser()
            add_prune(command)
            options = [target, str(folder), f"--text={arguments.prune}", f"--density={arguments.density}"]
            run_prune(command.parse_args([*options, f"--device={arguments.device}"]))
    if arguments.tokens:
        print("\n".join(aligned(_times(report, arguments.tokens, arguments.device))))


def _times(report: ConvertReport, tokens: list[int], device: torch.device) -> list[tuple[str, ...]]:
    """Return estimated times of the products of each kind of weight."""
    rows = {("shape", "stored", "tokens", "us", "dense us", "kernel"): None}
    for layer in report.layers:
        for count in tokens if layer.spec is not None else ():
            assert layer.spec is not None
            choice = choose(
                product_of_spec(layer.spec, count, "forward", layer.spec.activations), device, policy="auto"
            )
            times = [choice.microseconds, choice.dense_microseconds]
            own, dense = ("-" if time is None else f"{time:.1f}" for time in times)
            shape = "x".join(map(str, layer.spec.shape))
            rows[shape, layer.storage, str(count), own, dense, choice.kernel or "dense"] = None
    return [*rows]
