"""Reconstruction: submodules of a sparse model fitted to those of the dense one, block by block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._arguments import checked
from .._checks import checked_count, checked_number, checked_seed
from .._progress import Progress
from ..calibrate.stream import (
    Stream,
    call,
    check_batches,
    check_distinct,
    checked_batch,
    chosen_device,
    device_of,
    mask_of,
    moved,
    observing,
    placed,
)
from ..errors import InvalidArgumentError
from .distillation import Forward, autocasting, check_autocast
from .fitting import Settings, fit, trained_parameters
from .report import FittedSubmodule, ReconstructionReport, SkippedSubmodule, warn_of_skipped
from .submodules import (
    Piece,
    check_running,
    check_runs,
    check_separate,
    checked_names,
    in_order,
    is_within,
    outside,
    pieces_of,
    stream_of,
)


@checked
def reconstruct(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    submodules: Sequence[str] | None = None,
    epochs: int = 4,
    lr: float = 1e-3,
    held_out: float = 0.125,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> ReconstructionReport:
    """Fit submodules of a sparse model to those of the dense one, one after the other, in place.

    Each is given what it gets in the model as reconstructed so far, and is to give what the dense submodule
    gives in the dense model: ‖y - t‖² is lowered by AdamW with a cosine schedule, on weights in float32 that
    are rounded to the model's dtype in every step. Attention and feed-forward part are fitted apart, as
    "Reconstruction of attention and MLP" (2510.14444) found better than whole blocks. The weights of the
    epoch with the least error on held-out batches are kept, if that error is less than before. Parameters
    are written in place, so optimizers may go on; patterns and masks of 2:4 stay.

    Blocks are the items of a `torch.nn.ModuleList` or `torch.nn.Sequential`, such as decoder layers, found as
    by `prune_`; where there are several such stacks, as an encoder and a decoder, they are gone through
    in the order in which they run. Where blocks do not take as their first argument what the one before them
    gave, or take something else that a block gave, or where stacks hold no more than half of the block-sparse
    layers, the whole model is one block. One block of each model is on ``device`` at a time, so that models
    may be larger than it. Inputs and outputs of one block for all batches are kept where the models are.
    Several processes that hold one model each give all of them the same batches.

    Args:
        model: the sparse one; in evaluation mode while this runs, and then as it was.
        teacher: the dense one, whose modules have the same names.
        batches: as of `distill`; all are kept. Where the output of a submodule is
            [batch, tokens, …], tokens count that an ``attention_mask`` of the batch does not leave out.
        submodules: names; None takes the children of every block that have block-sparse layers, or the block
            where it has no such child. A warning names other block-sparse layers, as it does what has no
            parameter to train or does not run. They may not lie within each other.
        epochs: passes over the batches, for each submodule.
        lr: learning rate at first.
        held_out: fraction of the batches, the last ones, that are not trained on; at least one.
        forward: ``forward(model_or_teacher, batch)`` runs a model; None calls it as `distill` does.
        device: where blocks are computed; None is where the model is.
        autocast: torch.bfloat16 to run blocks in mixed precision; None does not.
        seed: of the order of batches, which is all that is random.

    Raises:
        InvalidArgumentError: an argument is not allowed, there are fewer than two batches, a name is not in
            both models or within another, a submodule does not run or has other outputs in the teacher,
            models share parameters, or activations are NaN or infinite.
        UnsupportedError: a block or a submodule runs more than once in a forward pass, or two submodules
            share a parameter. After any error or interruption the parameters are as they were.
    """
    check_distinct(model, teacher)
    epochs = checked_count("epochs", epochs)
    lr = checked_number("lr", lr, above_zero=True)
    check_autocast(autocast)
    generator = torch.Generator().manual_seed(checked_seed(seed))
    home = chosen_device(model, device)
    batches = _checked_batches(batches)
    count = _held_out(held_out, len(batches))
    masks = [mask_of(batch) for batch in batches]
    for kind, part in (("training", masks[:-count]), ("held-out", masks[-count:])):
        if not any(mask is None or mask.any() for mask in part):
            raise InvalidArgumentError(
                f"batches must have tokens that attention_mask keeps, got none in the {kind} ones"
            )
    names = checked_names(model, teacher, submodules)
    skipped = outside(model, names) if submodules is None else []
    skipped += [
        SkippedSubmodule(name, "no parameter of it is trained")
        for name in names
        if not trained_parameters(model.get_submodule(name))
    ]
    names = [name for name in names if not any(one.name == name for one in skipped)]
    if not names:
        raise InvalidArgumentError(f"submodules must have parameters to train, {skipped[-1].name!r} has none")
    check_separate(model, names)
    settings = Settings(
        epochs,
        lr,
        range(len(batches) - count),
        range(len(batches) - count, len(batches)),
        masks,
        home,
        autocast,
        generator,
    )
    with observing(model, teacher), _without_cache(model, teacher), _restored_on_error(model, names):
        run = _on_copies(forward or call)
        pieces = in_order(model, pieces_of(model, names), batches[0], run, home)
        idle = [name for name in names if not any(name in piece.names for piece in pieces)]
        if idle and (submodules is not None or not pieces):
            check_running(idle, [])
        blocks, fitted = _reconstruct(model, teacher, batches, pieces, run, settings)
    skipped += [SkippedSubmodule(name, "does not run in a forward pass") for name in idle]
    warn_of_skipped(skipped)
    return ReconstructionReport(fitted, skipped, blocks)


def _on_copies(forward: Forward) -> Forward:
    """Call a model with copies on its device, which it may write to."""
    return lambda model, batch: forward(model, moved(batch, device_of(model), copy=True))


@torch.no_grad()
def _reconstruct(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Any],
    pieces: Sequence[Piece],
    run: Forward,
    settings: Settings,
) -> tuple[list[str], list[FittedSubmodule]]:
    progress = Progress(sum(len(piece.names) for piece in pieces))
    fitted: list[FittedSubmodule] = []
    done: list[str] = []
    for piece in pieces:
        ours, theirs = _streams(model, teacher, batches, piece.blocks, run, settings)
        check_running(piece.names, ours.order)
        done += ours.order
        for block in ours.order:
            parts = {name: model.get_submodule(name) for name in piece.names if is_within(name, block)}
            dense = {name: teacher.get_submodule(name) for name in parts}
            with (
                placed((model.get_submodule(block), teacher.get_submodule(block)), settings.device),
                autocasting(settings.device, settings.autocast),
            ):
                targets = theirs.outputs(block, dense)
                check_runs(parts, targets, len(batches))
                for name in list(targets):  # in the order in which they run
                    calls = ours.capture(block, {name: parts[name]})
                    check_runs([name], calls, len(batches))
                    fitted.append(fit(name, parts[name], calls[name], targets.pop(name), settings))
                    progress.show(len(fitted), f"submodules reconstructed, {name} the last")
                ours.outputs(block, {})
    return list(dict.fromkeys(done)), fitted


def _streams(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Any],
    blocks: Sequence[str],
    run: Forward,
    settings: Settings,
) -> tuple[Stream, Stream]:
    """Return streams of both models through blocks, or through the whole model where these are no chain."""

    def through(blocks: Sequence[str]) -> tuple[Stream, Stream]:
        ours, theirs = (stream_of(one, blocks, batches, run, settings.device) for one in (model, teacher))
        return ours, theirs

    if {name for name, _ in teacher.named_modules(remove_duplicate=False)}.issuperset(blocks):
        ours, theirs = through(blocks)
        chains = all(stream.is_chain and not stream.shares for stream in (ours, theirs))
        if chains and ours.order == theirs.order:
            return ours, theirs
    return through([""])


def _checked_batches(batches: Iterable[Any]) -> list[Any]:
    check_batches(batches)
    listed = [checked_batch(batch) for batch in batches]
    if len(listed) < 2:
        raise InvalidArgumentError(
            f"batches must be at least two, of which one is held out, got {len(listed)}"
        )
    return listed


def _held_out(fraction: object, batches: int) -> int:
    number = checked_number("held_out", fraction)
    if not 0 < number < 1:
        raise InvalidArgumentError(f"held_out must be above 0 and below 1, got {fraction!r}")
    return min(math.ceil(number * batches), batches - 1)


@contextlib.contextmanager
def _restored_on_error(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Write the parameters back if anything goes wrong; copies are kept where the model is."""
    parameters = [one for name in names for one in trained_parameters(model.get_submodule(name)).values()]
    copies = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, copy in zip(parameters, copies, strict=True):
                parameter.copy_(copy)
        raise


@contextlib.contextmanager
def _without_cache(*models: nn.Module) -> Iterator[None]:
    """Have Transformers' models keep no keys and values, which a block that runs again would append to."""
    configs = {id(config): config for model in models for config in _configs(model)}
    before = [(config, config.use_cache) for config in configs.values()]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, use_cache in before:
            config.use_cache = use_cache


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            yield config
