"""Reconstruction: submodules of a sparse model fitted to those of the dense one, block by block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import checked_count, checked_number, checked_seed
from .._progress import Progress
from .._reports import aligned, listed, warn_user
from ..calibrate.stream import (
    Call,
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
    stacks,
    swapped,
    tensor_of,
)
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.dense import is_conv1d
from ..nn.linear import BlockSparseLinear
from .distillation import Forward, autocasting, check_autocast


def reconstruct_(
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
        batches: as of `distill_`; all are kept. Where the output of a submodule is
            [batch, tokens, …], tokens count that an ``attention_mask`` of the batch does not leave out.
        submodules: names; None takes the children of every block that have block-sparse layers, or the block
            where it has no such child. A warning names other block-sparse layers, as it does what has no
            parameter to train or does not run. They may not lie within each other.
        epochs: passes over the batches, for each submodule.
        lr: learning rate at first.
        held_out: fraction of the batches, the last ones, that are not trained on; at least one.
        forward: ``forward(model_or_teacher, batch)`` runs a model; None calls it as `distill_` does.
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


class Settings(NamedTuple):
    """Settings of all fits."""

    epochs: int
    lr: float
    training: Sequence[int]  # indices of batches
    held_out: Sequence[int]
    masks: Sequence[Tensor | None]
    device: torch.device
    autocast: torch.dtype | None
    generator: torch.Generator


def fit(
    name: str, part: nn.Module, calls: Sequence[Call], targets: Sequence[Tensor], settings: Settings
) -> FittedSubmodule:
    """Fit a submodule to its targets and keep the weights with the least held-out error."""
    parameters = trained_parameters(part)
    pairs = [_Pair(*one) for one in zip(calls, targets, settings.masks, strict=True)]

    def holding(values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        return swapped(part, {parameters[key]: value for key, value in values.items()})

    def error(values: Mapping[str, Tensor]) -> float:
        with holding(values):
            sums = [torch.stack(pairs[i].squares(name, part, settings.device)) for i in settings.held_out]
        wrong, whole = torch.stack(sums).double().sum(0).tolist()
        return float(wrong / whole) if whole else float(wrong)

    masters = {key: _master(value) for key, value in parameters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=settings.lr, weight_decay=0.0)
    steps = settings.epochs * len(settings.training)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    before = error({})
    if not math.isfinite(before):
        raise InvalidArgumentError(f"batches: submodule {name!r} gives NaN or infinity for them")
    best, kept = math.inf, {}
    for _ in range(settings.epochs):
        for i in torch.randperm(len(settings.training), generator=settings.generator, device="cpu").tolist():
            with torch.enable_grad(), holding(_rounded(masters, parameters)):
                wrong, whole = pairs[i].squares(name, part, settings.device)
                # A sum, and no mean: gradients in float16 are then far from 0, and Adam scales them anyhow.
                scale = whole.div(targets[i].numel()).sqrt().clamp_min(1e-6)
                torch.autograd.backward(wrong / scale)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        values = {key: value.detach().clone() for key, value in _rounded(masters, parameters).items()}
        after = error(values)
        if after < best:  # never of NaN
            best, kept = after, values
    if best < before:
        _keep(part, parameters, kept)
    return FittedSubmodule(name, before, best, best < before)


class _Pair(NamedTuple):
    """Call of a submodule in the sparse model, and its target."""

    call: Call
    target: Tensor
    mask: Tensor | None

    def squares(self, name: str, part: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ‖y - t‖² and ‖t‖²."""
        moved = self.call.on(device)
        output = tensor_of(name, part(*moved.args, **moved.kwargs))
        target = self.target.to(device)
        if output.shape != target.shape:
            raise InvalidArgumentError(
                f"teacher must give outputs of shape {tuple(output.shape)} at {name!r}, "
                f"got {tuple(target.shape)}"
            )
        dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
        output, target = output.to(dtype), target.to(dtype)
        if self.mask is not None and output.dim() > 2 and output.shape[:2] == self.mask.shape:
            left_out = self.mask.to(device).eq(0).view(*self.mask.shape, *(1,) * (output.dim() - 2))
            output, target = output.masked_fill(left_out, 0), target.masked_fill(left_out, 0)
        return (output - target).square().sum(), target.square().sum()


def trained_parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {name: parameter for name, parameter in part.named_parameters() if parameter.requires_grad}


def _master(parameter: nn.Parameter) -> Tensor:
    """Copy a parameter in float32 at least, so that small steps of weights in 16 bits are not lost."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(dtype, copy=True).requires_grad_()


def _rounded(masters: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: master.to(parameters[name].dtype) for name, master in masters.items()}


def _keep(part: nn.Module, parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    masks = {id(layer.weight): layer.mask for layer in part.modules() if isinstance(layer, BlockSparseLinear)}
    for name, parameter in parameters.items():
        mask = masks.get(id(parameter))  # what is masked has had gradients, and counts for nothing
        parameter.copy_(values[name] if mask is None else torch.where(mask, values[name], parameter))


class Piece(NamedTuple):
    """Blocks that data go through one by one, and the submodules in them that are fitted."""

    blocks: list[str]
    names: list[str]


def _stacks(model: nn.Module) -> list[list[str]]:
    """Return the blocks of all stacks that have block-sparse layers; none where most layers lie outside."""
    modules = dict(model.named_modules())
    sparse = [name for name, module in modules.items() if isinstance(module, BlockSparseLinear)]
    linear = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | BlockSparseLinear) or is_conv1d(module)
    ]
    found: list[list[str]] = []
    held = 0
    for stack in stacks(model, linear):
        container: Any = modules[stack]
        blocks = [_join(stack, key) for key, _ in container.named_children()]
        others = [block for other in found for block in other]
        if any(is_within(a, b) or is_within(b, a) for a in blocks for b in others):
            continue
        inside = sum(any(is_within(layer, block) for block in blocks) for layer in sparse)
        if inside and len(blocks) == len(container):  # none is there twice
            found.append(blocks)
            held += inside
    return found if 2 * held > len(sparse) else []


def pieces_of(model: nn.Module, names: Sequence[str]) -> list[Piece]:
    """Return the stacks with their submodules, or the whole model where a submodule lies in no stack."""
    pieces = [
        Piece(blocks, [name for name in names if any(is_within(name, block) for block in blocks)])
        for blocks in _stacks(model)
    ]
    if sum(len(piece.names) for piece in pieces) < len(names):
        return [Piece([""], list(names))]
    return [piece for piece in pieces if piece.names]


def in_order(
    model: nn.Module, pieces: list[Piece], batch: Any, run: Forward, device: torch.device
) -> list[Piece]:
    """Return pieces in the order in which they run, without those that do not."""
    if len(pieces) == 1:
        return pieces
    by_head = {piece.blocks[0]: piece for piece in pieces}
    return [by_head[name] for name in stream_of(model, list(by_head), [batch], run, device).order]


def stream_of(
    model: nn.Module, blocks: Sequence[str], batches: Sequence[Any], run: Forward, device: torch.device
) -> Stream:
    """Record how batches run through blocks.

    Raises:
        InvalidArgumentError: a block is given keys and values of former calls, which each run would change.
        UnsupportedError: a block runs more than once in a forward pass.
    """
    stream = Stream(model, blocks, batches, run, device)
    if stream.repeated is not None:
        raise UnsupportedError(f"model must run {stream.repeated!r} at most once in a forward pass")
    if stream.cached is not None:
        raise InvalidArgumentError(
            f"batches must come without past_key_values and use_cache=True, which reach {stream.cached!r}"
        )
    return stream


def checked_names(model: nn.Module, teacher: nn.Module, submodules: Sequence[str] | None) -> list[str]:
    """Return the names to fit, once both models are known to have them."""
    if submodules is None:
        names = _default_names(model)
        if not names:
            raise InvalidArgumentError("model must have a BlockSparseLinear; name submodules to fit others")
    elif isinstance(submodules, str) or not isinstance(submodules, Sequence) or not submodules:
        raise InvalidArgumentError(f"submodules must be a sequence of names, got {submodules!r}")
    else:
        names = list(submodules)
    for whose, one in (("model", model), ("teacher", teacher)):
        known = {name for name, _ in one.named_modules(remove_duplicate=False)}
        for name in names:
            if name not in known:
                raise InvalidArgumentError(f"submodules must name modules of the {whose}, {name!r} is none")
    for name in names:
        if sum(is_within(name, other) for other in names) > 1:
            raise InvalidArgumentError(f"submodules: {name!r} is there twice, or lies within another")
    for tensor in (*model.parameters(), *teacher.parameters()):
        if tensor.is_meta:
            raise InvalidArgumentError(
                "model and teacher must have parameters with data, got the meta device"
            )
    return names


def _default_names(model: nn.Module) -> list[str]:
    names = []
    for block in (block for blocks in _stacks(model) or [[""]] for block in blocks):
        module = model.get_submodule(block)
        names += _parts(block, module) or ([block] if _has_sparse(module) else [])
    return names


def _parts(name: str, module: nn.Module) -> list[str]:
    """Return the children with block-sparse layers, and the items of containers, which are never called."""
    parts = []
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            parts += _parts(_join(name, key), child)
        elif _has_sparse(child):
            parts.append(_join(name, key))
    return parts


def outside(model: nn.Module, names: Sequence[str]) -> list[SkippedSubmodule]:
    """Return the block-sparse layers that are in no submodule."""
    return [
        SkippedSubmodule(name, "outside of the stack of blocks; fitted where submodules names it")
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseLinear) and not any(is_within(name, one) for one in names)
    ]


def check_separate(model: nn.Module, names: Sequence[str]) -> None:
    """Raise UnsupportedError where two submodules share a trained parameter."""
    owners: dict[int, str] = {}
    for name in names:
        for parameter in trained_parameters(model.get_submodule(name)).values():
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise UnsupportedError(f"submodules: {other!r} and {name!r} share a parameter")


def check_running(names: Sequence[str], blocks: Sequence[str]) -> None:
    """Raise InvalidArgumentError unless each name lies in one of the blocks that run."""
    for name in names:
        if not any(is_within(name, block) for block in blocks):
            raise InvalidArgumentError(f"submodules: {name!r} does not run in a forward pass")


def check_runs(names: Iterable[str], found: Mapping[str, Sequence[Any]], batches: int) -> None:
    """Raise unless each submodule runs once in every batch."""
    for name in names:
        runs = len(found.get(name, ()))
        if runs < batches:
            raise InvalidArgumentError(f"submodules: {name!r} does not run in every forward pass")
        if runs > batches:
            raise UnsupportedError(f"submodules: {name!r} runs more than once in a forward pass")


def _has_sparse(module: nn.Module) -> bool:
    return any(isinstance(one, BlockSparseLinear) for one in module.modules())


def is_within(name: str, block: str) -> bool:
    """Return True for the block and what lies in it; the name of the model itself is empty."""
    return not block or name == block or name.startswith(f"{block}.")


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


@dataclass(frozen=True)
class FittedSubmodule:
    """Fitted submodule, and its error on the held-out batches: ‖y - t‖² / ‖t‖² of its output and its target.

    `after` is that of the fitted weights, in the model's dtype. They are `kept` where it is below `before`.
    """

    name: str
    before: float
    after: float
    kept: bool


@dataclass(frozen=True)
class SkippedSubmodule:
    """Submodule that was left alone, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class ReconstructionReport:
    """Result of `reconstruct_`; ``str()`` makes a table of it.

    `blocks` are the modules that were on the device one at a time; [""] is the whole model.
    """

    submodules: list[FittedSubmodule]
    skipped: list[SkippedSubmodule]
    blocks: list[str]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("submodule", "error before", "after", "")]
        for one in self.submodules:
            fate = "" if one.kept else "left as it was"
            rows.append((one.name, f"{one.before:.4f}", f"{one.after:.4f}", fate))
        lines = [line.rstrip() for line in aligned(rows)]
        return "\n".join([*lines, *(f"skipped {one.name}: {one.reason}" for one in self.skipped)])


def warn_of_skipped(skipped: Sequence[SkippedSubmodule]) -> None:
    """Warn of submodules that were not fitted, by reason."""
    reasons = dict.fromkeys(one.reason for one in skipped)
    texts = [
        f"{listed(one.name for one in skipped if one.reason == reason)} ({reason})" for reason in reasons
    ]
    if texts:
        warn_user(f"reconstruct did not fit {'; '.join(texts)}")
