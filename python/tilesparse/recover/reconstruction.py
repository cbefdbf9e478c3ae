"""Reconstruction: submodules of a sparse model fitted to those of the dense one, block by block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .._checks import Progress, checked_count, checked_number, listed, warn_user
from ..calibrate.calibration import Improvement, check_model
from ..calibrate.stream import (
    Call,
    Stream,
    call,
    caller,
    check_batches,
    check_distinct,
    checked_batch,
    chosen_device,
    device_of,
    mask_of,
    moved,
    observing,
    placed,
    restoring,
    stacks,
    swapped,
    tensor_of,
)
from ..errors import InvalidArgumentError, UnsupportedError
from ..model.match import SkippedLayer
from ..model.report import Report
from ..nn.linear import BlockSparseLinear, is_conv1d
from .distillation import Forward, _alike, autocasting, check_autocast


def reconstruct_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    epochs: int = 4,
    lr: float = 1e-3,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
    autocast: torch.dtype | None = None,
) -> Report:
    """Fit submodules of a sparse model to those of the dense one, one after the other, in place.

    Each is given what it gets in the model as reconstructed so far, and is to give what the dense submodule
    gives in the dense model: ‖y - t‖² is lowered by AdamW with a cosine schedule, on weights in float32 that
    are rounded to the model's dtype in every step. Submodules are the children of every block that have
    block-sparse layers, or the block where it has no such child: attention and feed-forward part are fitted
    apart, as "Reconstruction of attention and MLP" (2510.14444) found better. The weights of the epoch with
    the least error on the last eighth of the batches, which are not trained on, are kept if that error is
    less than before. They are written in place, so optimizers may go on; patterns and masks stay. A warning
    names block-sparse layers that are not fitted.

    Blocks are found as by `prune_`; of several stacks, in the order in which they run. Where they are no
    chain, or hold no more than half of the block-sparse layers, the whole model is one block. One block of
    each model is on ``device`` at a time. Several processes that hold one model each give all of them the
    same batches.

    Args:
        model: the sparse one; in evaluation mode while this runs, and then as it was.
        teacher: the dense one, whose modules have the same names.
        batches: as of `distill_`; all are kept.
        epochs: passes over the batches, for each submodule.
        lr: learning rate at first.
        forward: ``forward(model_or_teacher, batch)`` runs a model; None calls it as `distill_` does.
        device: where blocks are computed; None is where the model is.
        autocast: torch.bfloat16 to run blocks in mixed precision; None does not.

    Raises:
        UnsupportedError: a block or a submodule runs more than once in a forward pass, or two submodules
            share a parameter. After any error or interruption the parameters are as they were.
    """
    check_model(model)
    check_model(teacher, "teacher")
    check_distinct(model, teacher)
    epochs = checked_count("epochs", epochs)
    lr = checked_number("lr", lr, above_zero=True)
    check_autocast(autocast)
    home = chosen_device(model, device)
    check_batches(batches)
    batches = [checked_batch(batch) for batch in batches]
    if len(batches) < 2:
        raise InvalidArgumentError(
            f"batches must be at least two, of which one is held out, got {len(batches)}"
        )
    count = len(batches) - math.ceil(len(batches) / 8)  # the others are held out
    masks = [mask_of(batch) for batch in batches]
    for kind, part in (("training", masks[:count]), ("held-out", masks[count:])):
        if not any(mask is None or mask.any() for mask in part):
            raise InvalidArgumentError(
                f"batches must have tokens that attention_mask keeps, got none in the {kind} ones"
            )
    names, skipped = _chosen(model)
    run = _Run(model, teacher, batches, count, caller(forward, call), home, epochs, lr, autocast)
    trained = [one for name in names for one in _trained(model.get_submodule(name)).values()]
    with observing(model, teacher), _without_cache(model, teacher), restoring(trained):
        blocks, fitted = run.reconstruct(run.pieces(names))
        if not fitted:
            raise InvalidArgumentError(f"batches must run submodules of model, {names[0]!r} does not run")
    idle = [name for name in names if all(name != one.name for one in fitted)]
    skipped += [_skipped(model, name, "does not run in a forward pass") for name in idle]
    reasons = {one.reason: [other.name for other in skipped if other.reason == one.reason] for one in skipped}
    if reasons:
        texts = (f"{listed(own)} ({reason})" for reason, own in reasons.items())
        warn_user(f"reconstruct did not fit {'; '.join(texts)}")
    kept = sum(one.kept for one in fitted)
    notes = [f"{kept} of {len(fitted)} submodules have new weights"]
    return Report("reconstruct_", fitted, skipped, notes=notes, facts={"blocks": blocks})


_Piece: TypeAlias = tuple[list[str], list[str]]  # blocks that data go through, and submodules to fit in them


class _Run(NamedTuple):
    """Both models, the batches, the first ``split`` of which are trained on, and the settings of all fits."""

    model: nn.Module
    teacher: nn.Module
    batches: list[Any]
    split: int
    forward: Forward
    device: torch.device
    epochs: int
    lr: float
    autocast: torch.dtype | None

    def stream(self, model: nn.Module, blocks: Sequence[str], batches: Sequence[Any]) -> Stream:
        """Record how batches run through blocks, which must not get keys and values that each run changes."""

        def run(model: nn.Module, batch: Any) -> Any:
            """Call a model with copies on its device, which it may write to."""
            return self.forward(model, moved(batch, device_of(model), copy=True))

        stream = Stream(model, blocks, batches, run, self.device)
        if stream.repeated is not None:
            raise UnsupportedError(f"model must run {stream.repeated!r} at most once in a forward pass")
        if stream.cached is not None:
            raise InvalidArgumentError(
                f"batches must come without past_key_values and use_cache=True, which reach {stream.cached!r}"
            )
        return stream

    def pieces(self, names: Sequence[str]) -> list[_Piece]:
        """Return the stacks with their submodules in the order in which they run."""
        pieces = [
            (blocks, [name for name in names if any(_is_within(name, block) for block in blocks)])
            for blocks in _stacks(self.model) or [[""]]
        ]
        by_head = {blocks[0]: (blocks, own) for blocks, own in pieces if own}
        if len(by_head) == 1:
            return list(by_head.values())
        return [by_head[name] for name in self.stream(self.model, list(by_head), self.batches[:1]).order]

    def streams(self, blocks: Sequence[str]) -> list[Stream]:
        """Return streams of both models through blocks, or the whole model where these are no chain."""
        both = self.model, self.teacher
        if {name for name, _ in self.teacher.named_modules(remove_duplicate=False)}.issuperset(blocks):
            streams = [self.stream(one, blocks, self.batches) for one in both]
            chains = all(stream.is_chain and not stream.shares for stream in streams)
            if chains and streams[0].order == streams[1].order:
                return streams
        return [self.stream(one, [""], self.batches) for one in both]

    @torch.no_grad()
    def reconstruct(self, pieces: Sequence[_Piece]) -> tuple[list[str], list[Improvement]]:
        """Fit all submodules; return the blocks that were on the device, and the fits."""
        progress = Progress(sum(len(names) for _, names in pieces))
        fitted: list[Improvement] = []
        done: list[str] = []
        for of_stack, names in pieces:
            ours, theirs = self.streams(of_stack)
            done += ours.order
            for block in ours.order:
                parts = {n: self.model.get_submodule(n) for n in names if _is_within(n, block)}
                dense = {name: self.teacher.get_submodule(name) for name in parts}
                blocks = self.model.get_submodule(block), self.teacher.get_submodule(block)
                with placed(blocks, self.device), autocasting(self.device, self.autocast):
                    targets = theirs.outputs(block, dense)
                    _check_runs(parts, targets, len(self.batches))
                    for name in list(targets):  # in the order in which they run
                        calls = ours.capture(block, {name: parts[name]})
                        _check_runs([name], calls, len(self.batches))
                        fitted.append(self.fit(name, parts[name], calls[name], targets.pop(name)))
                        progress.show(len(fitted), f"submodules reconstructed, {name} the last")
                    ours.outputs(block, {})
        return list(dict.fromkeys(done)), fitted

    def fit(
        self, name: str, part: nn.Module, calls: Sequence[Call], targets: Sequence[Tensor]
    ) -> Improvement:
        """Fit a submodule to its targets and keep the weights with the least held-out error."""
        parameters = _trained(part)
        # In float32 at least, so that small steps of weights in 16 bits are not lost.
        masters = {
            key: value.detach()
            .to(torch.promote_types(value.dtype, torch.float32), copy=True)
            .requires_grad_()
            for key, value in parameters.items()
        }

        def rounded() -> dict[str, Tensor]:
            return {key: master.to(parameters[key].dtype) for key, master in masters.items()}

        def holding(values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
            return swapped(part, {parameters[key]: value for key, value in values.items()})

        def squares(i: int) -> tuple[Tensor, Tensor]:
            call = calls[i].on(self.device)
            output = tensor_of(name, part(*call.args, **call.kwargs))
            return _squares(name, output, targets[i].to(self.device), mask_of(self.batches[i]))

        def error(values: Mapping[str, Tensor]) -> float:
            with holding(values):
                sums = [torch.stack(squares(i)) for i in range(self.split, len(self.batches))]
            wrong, whole = torch.stack(sums).double().sum(0).tolist()
            return float(wrong / whole) if whole else float(wrong)

        generator = torch.Generator().manual_seed(0)  # of the order of batches
        optimizer = torch.optim.AdamW(masters.values(), lr=self.lr, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs * self.split)
        before = error({})
        if not math.isfinite(before):
            raise InvalidArgumentError(f"batches: submodule {name!r} gives NaN or infinity for them")
        best, kept = math.inf, {}
        for _ in range(self.epochs):
            for i in torch.randperm(self.split, generator=generator, device="cpu").tolist():
                with torch.enable_grad(), holding(rounded()):
                    wrong, whole = squares(i)
                    # No mean: gradients in float16 are then far from 0, and Adam scales them anyhow.
                    scale = whole.div(targets[i].numel()).sqrt().clamp_min(1e-6)
                    torch.autograd.backward(wrong / scale)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            values = {key: value.detach().clone() for key, value in rounded().items()}
            after = error(values)
            if after < best:  # never of NaN
                best, kept = after, values
        if best < before:
            layers = [layer for layer in part.modules() if isinstance(layer, BlockSparseLinear)]
            masks = {id(layer.weight): layer.mask for layer in layers}
            for key, parameter in parameters.items():
                mask = masks.get(id(parameter))  # what is masked has had gradients, and counts for nothing
                parameter.copy_(kept[key] if mask is None else torch.where(mask, kept[key], parameter))
        return Improvement(name, before, best, best < before)


def _squares(name: str, output: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ‖y - t‖² and ‖t‖² of an output and its target, of the tokens that count."""
    if output.shape != target.shape:
        raise InvalidArgumentError(
            f"teacher must give outputs of shape {tuple(output.shape)} at {name!r}, got {tuple(target.shape)}"
        )
    fits = mask is not None and output.shape[:2] == mask.shape
    output, target = _alike(output, target, mask if fits else None)
    return (output - target).square().sum(), target.square().sum()


@contextlib.contextmanager
def _without_cache(*models: nn.Module) -> Iterator[None]:
    """Have Transformers' models keep no keys and values, which a block that runs again would append to."""
    modules = (module for model in models for module in model.modules())
    held: Iterator[Any] = (getattr(module, "config", None) for module in modules)
    configs = {id(config): config for config in held if hasattr(config, "use_cache")}
    before = [(config, config.use_cache) for config in configs.values()]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, use_cache in before:
            config.use_cache = use_cache


def _trained(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {name: parameter for name, parameter in part.named_parameters() if parameter.requires_grad}


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
        blocks = [f"{stack}.{key}".lstrip(".") for key, _ in container.named_children()]
        others = [block for other in found for block in other]
        if any(_is_within(a, b) or _is_within(b, a) for a in blocks for b in others):
            continue
        inside = sum(any(_is_within(layer, block) for block in blocks) for layer in sparse)
        if inside and len(blocks) == len(container):  # none is there twice
            found.append(blocks)
            held += inside
    return found if 2 * held > len(sparse) else []


def _skipped(model: nn.Module, name: str, reason: str) -> SkippedLayer:
    return SkippedLayer(name, type(model.get_submodule(name)).__name__, reason)


def _chosen(model: nn.Module) -> tuple[list[str], list[SkippedLayer]]:
    """Return the names to fit, and what is left out."""
    names = []
    for block in (block for blocks in _stacks(model) or [[""]] for block in blocks):
        module = model.get_submodule(block)
        names += _parts(block, module) or ([block] if _has_sparse(module) else [])
    if not names:
        raise InvalidArgumentError("model must have a BlockSparseLinear")
    skipped = [
        _skipped(model, name, "outside of the stack of blocks")
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseLinear) and not any(_is_within(name, one) for one in names)
    ]
    frozen = [name for name in names if not _trained(model.get_submodule(name))]
    skipped += [_skipped(model, name, "no parameter of it is trained") for name in frozen]
    names = [name for name in names if name not in frozen]
    if not names:
        raise InvalidArgumentError(f"model must have parameters to train, {frozen[-1]!r} has none")
    owners: dict[int, str] = {}
    for name in names:
        for parameter in _trained(model.get_submodule(name)).values():
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise UnsupportedError(f"submodules {other!r} and {name!r} share a parameter")
    return names, skipped


def _parts(name: str, module: nn.Module) -> list[str]:
    """Return the children with block-sparse layers, and the items of containers, which are never called."""
    parts = []
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            parts += _parts(f"{name}.{key}".lstrip("."), child)
        elif _has_sparse(child):
            parts.append(f"{name}.{key}".lstrip("."))
    return parts


def _check_runs(names: Iterable[str], found: Mapping[str, Sequence[Any]], batches: int) -> None:
    """Raise unless each submodule runs once in every batch."""
    for name in names:
        runs = len(found.get(name, ()))
        if runs < batches:
            raise InvalidArgumentError(f"batches must run submodule {name!r} in every forward pass")
        if runs > batches:
            raise UnsupportedError(f"submodule {name!r} runs more than once in a forward pass")


def _has_sparse(module: nn.Module) -> bool:
    return any(isinstance(one, BlockSparseLinear) for one in module.modules())


def _is_within(name: str, block: str) -> bool:
    """Return True for the block and what lies in it; the name of the model itself is empty."""
    return not block or name == block or name.startswith(f"{block}.")
