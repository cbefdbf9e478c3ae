"""Distillation in a plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import checked_count, checked_number, shown
from .._runtime.torch_private import has_step_hooks
from ..calibrate.stream import (
    call,
    check_batches,
    check_distinct,
    checked_batch,
    device_of,
    mapped,
    mask_of_outputs,
    moved,
    tensors_in,
)
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.linear import BlockSparseLinear, evaluating
from .losses import DistillationLoss

Forward = Callable[[nn.Module, Any], Any]


@dataclass
class DistillationHistory:
    """Losses of `distill_`, one entry for each step of the optimizer.

    Attributes:
        loss: the loss, averaged over the batches of a step.
        terms: its terms by name, see `DistillationLoss.terms`.
        gradient_norm: the norm of all gradients before it was clipped; empty without ``clip``.
        replayed: how many steps were replays of a CUDA graph.
    """

    loss: list[float] = field(default_factory=list)
    terms: dict[str, list[float]] = field(default_factory=dict)
    gradient_norm: list[float] = field(default_factory=list)
    replayed: int = 0


def distill_(
    model: nn.Module,
    teacher: nn.Module | Callable[[Any], Any],
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    lr: float | None = None,
    loss: DistillationLoss | None = None,
    forward: Forward | None = None,
    scheduler: Any = None,
    schedule: Any = None,
    steps: int | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    graph: bool = False,
    callback: Callable[[int, Mapping[str, Tensor]], None] | None = None,
) -> DistillationHistory:
    """Train a model to give what its teacher gives, once through the batches.

    The model stays in the mode it is in: ``model.train()`` before switches dropout on, which distillation on
    much text does not need. The teacher is run in evaluation mode without gradients, on its own device. A
    GPU is not waited for until the end, so that nothing stops where the loss becomes NaN; see ``callback``.

    Patterns stay fixed unless a ``schedule`` moves them, and so do masks of 2:4 unless a
    `tilesparse.train.MaskSchedule` chooses them, which hooks itself to the optimizer.

    To go on after an interruption, save ``state_dict()`` of model, optimizer, scheduler and schedule in a
    ``callback``, load them, and call this again with the batches that are left: there is no other state.

    Args:
        model: the student.
        teacher: the dense model; or a function of a batch that gives its outputs, as from a cache.
        batches: mappings are passed as keywords, tuples and lists as arguments, anything else as the one
            argument; model and teacher each get a copy on their device. ``attention_mask`` [batch, tokens] of
            a mapping says which tokens count; of an encoder-decoder ``decoder_attention_mask`` does, or
            ``labels`` other than -100. Both models compute their own loss where there are ``labels``.
        optimizer: has the model's parameters; made after the model was pruned. None is AdamW without weight
            decay on all parameters that are trained, at learning rate ``lr``.
        lr: learning rate, in place of an optimizer; for schedules and resumption give an optimizer.
        loss: what is to become small; None is the divergence of the logits, ``DistillationLoss(logits=1.0)``.
        forward: ``forward(model_or_teacher, batch)`` gives the outputs; None calls the module as said above,
            with ``output_hidden_states=True`` where the loss needs them.
        scheduler: a scheduler of the learning rate, or several, each stepped once per step of the optimizer.
        schedule: of patterns: an object whose ``step()`` is called after each step of the optimizer, while
            the gradients are still there.
        steps: stop after so many steps of the optimizer; None takes all batches.
        accumulate: batches per step, whose gradients are averaged. The last step takes what is left.
        clip: largest norm of all gradients together; None leaves them.
        autocast: torch.bfloat16 to run the model in mixed precision; None does not.
        graph: capture a step, teacher to optimizer, in a CUDA graph and replay it: small models are bound
            by the host otherwise. Batches must have one form: others run as without it, and so do the first
            three. Neither models nor loss may wait for the GPU; what they decide on the host is decided once.
            The optimizer must be capturable, and its ``lr`` a tensor on the GPU where there is a scheduler.
        callback: ``callback(step, terms)`` after each step, the first being 1. ``terms`` are scalars on the
            device: reading one waits for it.

    Raises:
        InvalidArgumentError: an argument is not allowed, there is no batch, the optimizer lacks the weight of
            a block-sparse layer, teacher and model share parameters, or outputs do not fit each other; with
            ``graph``, model and teacher are not on one GPU, or the optimizer is not capturable. The model is
            as it was.
        UnsupportedError: ``autocast`` is torch.float16, which needs scaled gradients; with ``graph``, there
            is a ``schedule`` or the optimizer has hooks, which a graph would not call again.
    """
    if (optimizer is None) == (lr is None):
        raise InvalidArgumentError(
            f"lr must be given in place of an optimizer, and not beside it, got {shown(lr)}"
        )
    if optimizer is None:
        rate = checked_number("lr", lr, above_zero=True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise InvalidArgumentError("model must have parameters that require gradients")
        optimizer = torch.optim.AdamW(trained, rate, weight_decay=0.0, capturable=graph)
    loss = DistillationLoss(logits=1.0) if loss is None else loss
    _check_models(model, teacher, optimizer)
    accumulate = checked_count("accumulate", accumulate)
    steps = None if steps is None else checked_count("steps", steps)
    clip = None if clip is None else checked_number("clip", clip, above_zero=True)
    check_batches(batches)
    schedulers = _schedulers(scheduler)
    if schedule is not None and not callable(getattr(schedule, "step", None)):
        raise InvalidArgumentError(f"schedule must have step(), got {type(schedule).__name__}")
    check_autocast(autocast)

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def terms_of(batch: Any) -> dict[str, Tensor]:
        # Copies for both models: either may write to its input.
        own, mask = moved(checked_batch(batch), device_of(model), copy=True), mask_of_outputs(model, batch)
        if isinstance(teacher, nn.Module):
            device = device_of(teacher)
            with torch.no_grad(), autocasting(device, autocast):
                targets = outputs_of(teacher, moved(batch, device, copy=True), loss, forward)
        else:
            with torch.no_grad():
                targets = teacher(batch)
        with autocasting(device_of(model), autocast):
            outputs = outputs_of(model, own, loss, forward)
        return loss.terms(outputs, targets, mask)

    def update(group: Sequence[Any]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for batch in group:
            with torch.enable_grad():
                terms = {name: term / len(group) for name, term in terms_of(batch).items()}
                total = loss.total(terms)
                torch.autograd.backward(total)
            for name, term in {"loss": total, **terms}.items():
                sums[name] = sums[name] + term.detach() if name in sums else term.detach()
        if clip is not None:
            sums["gradient_norm"] = nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        return sums

    graphed = None
    if graph:
        graphed = _GraphedStep(update, _checked_device(model, teacher, optimizer, schedulers, schedule))
    seen: list[dict[str, Tensor]] = []
    with evaluating(teacher) if isinstance(teacher, nn.Module) else contextlib.nullcontext():
        optimizer.zero_grad()
        for step, group in enumerate(islice(_groups(batches, accumulate), steps), 1):
            terms = (graphed or update)(group)
            for one in schedulers:
                one.step()
            seen.append(terms)
            if callback is not None:
                callback(step, terms)
    # One copy to the host for each name: it waits no more often.
    values = {name: torch.stack([terms[name].double() for terms in seen]).tolist() for name in seen[0]}
    total, norms = values.pop("loss"), values.pop("gradient_norm", [])
    return DistillationHistory(total, values, norms, graphed.replayed if graphed else 0)


def outputs_of(model: nn.Module, batch: Any, loss: DistillationLoss, forward: Forward | None = None) -> Any:
    """Return what a loss compares: the outputs of a model."""
    if forward is not None:
        return forward(model, batch)
    return call(model, batch, **({"output_hidden_states": True} if loss.hidden_states else {}))


def autocasting(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context that computes in ``dtype``, or changes nothing where that is None."""
    # Without its cache: within one context the optimizer changes weights, whose casts it would keep.
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def check_autocast(dtype: object) -> None:
    """Raise unless the dtype is bfloat16 or None: float16 needs scaled gradients."""
    if dtype == torch.float16:
        raise UnsupportedError(
            "autocast must be torch.bfloat16, got torch.float16, whose gradients must be scaled; "
            "tilesparse.recover.trainer.DistillationTrainer does that"
        )
    if dtype not in (None, torch.bfloat16):
        raise InvalidArgumentError(f"autocast must be torch.bfloat16 or None, got {dtype!r}")


def _groups(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Return lists of so many batches, and at last what is left."""
    remaining = iter(batches)
    first = list(islice(remaining, size))
    if not first:
        raise InvalidArgumentError("batches must have at least one batch, got none")
    return chain([first], iter(lambda: list(islice(remaining, size)), []))


def _check_models(model: nn.Module, teacher: object, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(teacher, nn.Module):
        check_distinct(model, teacher)
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, module in model.named_modules():
        if not isinstance(module, BlockSparseLinear) or not module.weight.requires_grad:
            continue
        if id(module.weight) not in known:
            raise InvalidArgumentError(
                f"optimizer: the weight of layer {name!r} is not among its parameters; make it after the "
                "model was pruned, or call requires_grad_(False) on what is to stay as it is"
            )
    if not any(id(parameter) in known for parameter in model.parameters() if parameter.requires_grad):
        raise InvalidArgumentError("optimizer must have parameters of the model, it has none")


def _schedulers(scheduler: Any) -> Sequence[Any]:
    several = scheduler if isinstance(scheduler, list | tuple) else [] if scheduler is None else [scheduler]
    for one in several:
        plateau = isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau or not callable(getattr(one, "step", None)):
            raise InvalidArgumentError(
                f"scheduler must have a step() without arguments, or several must, got {type(one).__name__}"
            )
    return several


WARM_UP = 3  # steps before a capture: they make plans and the optimizer's states, and compile

Step = Callable[[Sequence[Any]], dict[str, Tensor]]


class _GraphedStep:
    """A step of training that runs as it is a few times, then is captured, and replayed from there on.

    Steps whose batches have another form than the first ones, such as a last, smaller batch, run as they are.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step, self._device = step, device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._form: Any = None
        self._warm = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batches: Sequence[Any] = ()
        self._terms: dict[str, Tensor] = {}
        self.replayed = 0

    def __call__(self, group: Sequence[Any]) -> dict[str, Tensor]:
        """Return the terms of a step on some batches; the graph does not write to them later."""
        form = _form(group)
        if self._warm == 0:
            self._form = form
        if form != self._form:
            return self._step(group)
        if self._warm < WARM_UP:
            self._warm += 1
            # On a stream of its own, as PyTorch asks of what is captured later.
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                terms = self._step(group)
            current.wait_stream(self._stream)
            return terms
        if self._graph is None:
            self._batches = moved(group, self._device, copy=True)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._terms = self._step(self._batches)
        else:
            for ours, theirs in zip(tensors_in(self._batches), tensors_in(group), strict=True):
                ours.copy_(theirs, non_blocking=True)
        self._graph.replay()
        self.replayed += 1
        return {name: term.clone() for name, term in self._terms.items()}


def _form(value: Any) -> Any:
    """Return a nested value with (shape, dtype) in place of tensors."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else mapped(value, _form)


def _checked_device(
    model: nn.Module,
    teacher: object,
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any],
    schedule: Any,
) -> torch.device:
    """Return the device of a step that can be captured; raise for one that cannot."""
    device = device_of(model)
    if device.type != "cuda":
        raise InvalidArgumentError(f"model must be on a CUDA device where graph is True, got {device}")
    if not isinstance(teacher, nn.Module) or device_of(teacher) != device:
        what = f"one on {device_of(teacher)}" if isinstance(teacher, nn.Module) else shown(teacher)
        raise InvalidArgumentError(
            f"teacher must be a torch.nn.Module on {device} where graph is True, got {what}"
        )
    if schedule is not None:
        raise UnsupportedError("schedule must be None where graph is True: a captured step moves no blocks")
    if has_step_hooks(optimizer):
        raise UnsupportedError(
            "optimizer must have no hooks where graph is True, as those of MaskSchedule are: a captured step "
            "repeats what they decided once"
        )
    for group in optimizer.param_groups:
        if not group.get("capturable"):
            raise InvalidArgumentError(
                "optimizer must have capturable=True in all groups where graph is True, "
                f"as torch.optim.AdamW can, got {type(optimizer).__name__} without it"
            )
        if schedulers and not isinstance(group["lr"], Tensor):
            raise InvalidArgumentError(
                "optimizer must have a tensor as its lr where graph is True and a scheduler is given, "
                f"got {shown(group['lr'])}, which a captured step never reads again"
            )
    return device
