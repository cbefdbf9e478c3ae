"""Distillation in a plain loop, and its loss: the differences between a student and its teacher."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .._checks import (
    check_callable,
    check_flag,
    check_kind,
    check_module,
    checked_count,
    checked_number,
    shown,
)
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
from ..errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from ..nn.linear import BlockSparseLinear, evaluating

AT_ONCE = 1 << 27  # logits that are compared at once: 512 MiB in float32, and some copies


@dataclass(frozen=True)
class DistillationLoss:
    """A weighted sum of differences between the outputs of a student and of its teacher, both of one batch.

    Outputs are what models of Transformers give, or mappings or objects with such entries; a plain tensor
    stands for logits. Tokens that the attention mask leaves out do not count, whatever is computed for them.
    Everything is computed in float32, or in float64 where the student is in float64. More than 2^27 logits
    are compared some texts at a time: only those are in float32 at once.

    Args:
        task: weight of the student's own ``loss``, which it gives where the batch has labels.
        logits: weight of T² KL(teacher ‖ student) of ``logits`` [batch, tokens, classes] or [batch, classes]
            at the temperature T, averaged over tokens or samples (Hinton et al., "Distilling the Knowledge in
            a Neural Network", 2015).
        hidden_states: weight of ‖s - t‖² / ‖t‖² of ``hidden_states``, a sequence of tensors, each
            [batch, tokens, features], averaged over them (SquareHead; Kurtic et al., "Sparse Fine-tuning for
            Inference Acceleration of Large Language Models", 2023, who take the sum).
        embeddings: weight of 1 - cosine of ``embeddings`` [batch, features], averaged over the batch. Where
            there are none, the mean of ``last_hidden_state`` over the tokens of each text is taken.
        temperature: T, of the logits.
    """

    task: float = 0.0
    logits: float = 0.0
    hidden_states: float = 0.0
    embeddings: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            checked_number(one.name, getattr(self, one.name), above_zero=one.name == "temperature")
        if not self._weights():
            raise InvalidArgumentError(
                "at least one of task, logits, hidden_states and embeddings must be above 0"
            )

    def __call__(self, student: Any, teacher: Any, attention_mask: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar on the student's device; arguments as of `terms`."""
        return self.total(self.terms(student, teacher, attention_mask))

    def terms(self, student: Any, teacher: Any, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the differences that have a weight, by name and without their weights: scalars.

        Args:
            student: outputs of the model that is trained.
            teacher: outputs of the model it learns from; on any device.
            attention_mask: [batch, tokens], nonzero for tokens that count; None counts all.
        """
        terms = {}
        for name in self._weights():
            if name == "task":
                terms[name] = _output(student, "loss", "student")
            elif name == "logits":
                terms[name] = self._logits(student, teacher, attention_mask)
            elif name == "hidden_states":
                terms[name] = _hidden_states(student, teacher, attention_mask)
            else:
                both = (
                    _pooled(student, "student", attention_mask),
                    _pooled(teacher, "teacher", attention_mask),
                )
                _check("embeddings", *both)
                terms[name] = (1 - F.cosine_similarity(*_alike(*both), dim=-1)).mean()
        return terms

    def total(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of `terms`."""
        first, *others = (weight * terms[name] for name, weight in self._weights().items())
        for term in others:
            first = first + term
        return first

    def _weights(self) -> dict[str, float]:
        weights = dataclasses.asdict(self)
        del weights["temperature"]
        return {name: weight for name, weight in weights.items() if weight > 0}

    def _logits(self, student: Any, teacher: Any, mask: Tensor | None) -> Tensor:
        ours, theirs = _output(student, "logits"), _output(teacher, "logits", "teacher")
        _check("logits", ours, theirs, mask)

        def compare(ours: Tensor, theirs: Tensor, mask: Tensor | None) -> Tensor:
            both = _alike(ours, theirs, mask)
            log_ours, log_theirs = (F.log_softmax(one / self.temperature, -1) for one in both)
            return F.kl_div(log_ours, log_theirs, reduction="sum", log_target=True)

        if ours.numel() <= AT_ONCE or torch.compiler.is_compiling():  # which fuses what takes memory
            divergence = compare(ours, theirs, mask)
        else:
            options: Any = {"use_reentrant": False, "preserve_rng_state": False}
            texts = max(1, AT_ONCE * len(ours) // ours.numel())
            masks = [None] * len(ours) if mask is None else torch.split(mask, texts)
            parts = zip(torch.split(ours, texts), torch.split(theirs, texts), masks, strict=False)
            divergence = torch.stack([checkpoint(compare, *part, **options) for part in parts]).sum()
        return torch.mul(divergence / _count(ours, mask), self.temperature**2)


def _hidden_states(student: Any, teacher: Any, mask: Tensor | None) -> Tensor:
    ours, theirs = _output(student, "hidden_states"), _output(teacher, "hidden_states", "teacher")
    if not (isinstance(ours, tuple | list) and isinstance(theirs, tuple | list) and ours):
        raise InvalidArgumentError("student and teacher must each give a tuple or list of hidden_states")
    if len(ours) != len(theirs):
        raise InvalidArgumentError(
            f"teacher must give {len(ours)} hidden_states, as the student does, got {len(theirs)}"
        )
    errors = []
    for index, both in enumerate(zip(ours, theirs, strict=True)):
        _check(f"hidden_states[{index}]", *both, mask)
        one, other = _alike(*both, mask)
        errors.append(
            (one - other).square().sum() / other.square().sum().clamp_min(torch.finfo(other.dtype).tiny)
        )
    return torch.stack(errors).mean()


def _pooled(outputs: Any, whose: str, mask: Tensor | None) -> Tensor:
    """Return one vector for each text, [batch, features]."""
    given = _find(outputs, "embeddings")
    if isinstance(given, Tensor):
        return given
    tokens: Tensor = _output(outputs, "last_hidden_state", whose)
    tokens = tokens.to(_precision(tokens))
    if mask is None:
        return tokens.mean(1)
    _check("last_hidden_state", tokens, tokens, mask)
    counts = mask.to(tokens.device).ne(0).sum(1, keepdim=True).clamp_min(1)
    return _without_padding(tokens, mask).sum(1) / counts


def _check(name: str, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> None:
    shape = student.shape
    if shape != teacher.shape:
        raise InvalidArgumentError(
            f"teacher must give {name} of the student's shape {tuple(shape)}, got {tuple(teacher.shape)}"
        )
    dims = 1 if _is_of_texts(student) else 2
    if mask is not None and shape[:dims] != mask.shape[:dims]:
        given = tuple(mask.shape)
        raise InvalidArgumentError(
            f"attention_mask must be [batch, tokens] of {name} {tuple(shape)}, got {given}"
        )


def _alike(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return both in one dtype on one device, without padding, the teacher's without gradient."""
    dtype = _precision(student)
    teacher = teacher.detach().to(student.device).to(dtype)
    return _without_padding(student.to(dtype), mask), _without_padding(teacher, mask)


def _is_of_texts(tensor: Tensor) -> bool:
    """Return True if there is one row for each text, for which a mask of tokens says nothing."""
    return tensor.dim() == 2


def _count(student: Tensor, mask: Tensor | None) -> Tensor | int:
    """Return how many tokens or samples count; nothing waits for it."""
    samples = math.prod(student.shape[:-1])
    if mask is None or _is_of_texts(student):
        return max(samples, 1)
    others = samples // max(mask.numel(), 1)
    return mask.to(student.device).ne(0).sum().clamp_min(1) * others


def _without_padding(outputs: Tensor, mask: Tensor | None) -> Tensor:
    """Return outputs with zeros for tokens that do not count: NaN there reaches neither loss nor gradient."""
    if mask is None or _is_of_texts(outputs):
        return outputs
    left_out = mask.to(outputs.device).eq(0)
    return outputs.masked_fill(left_out.view(*left_out.shape, *(1,) * (outputs.dim() - 2)), 0)


def _output(outputs: Any, name: str, whose: str = "student") -> Any:
    found = _find(outputs, name)
    if found is None and name == "logits" and isinstance(outputs, Tensor):
        return outputs
    if found is None:
        raise InvalidArgumentError(f"{whose} must give outputs with {name!r}, got {type(outputs).__name__}")
    return found


def _find(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


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

    loss: list[float]
    terms: dict[str, list[float]]
    gradient_norm: list[float]
    replayed: int


def distill_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    lr: float | None = None,
    loss: DistillationLoss | None = None,
    forward: Forward | None = None,
    scheduler: Any = None,
    accumulate: int = 1,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    graph: bool = False,
    callback: Callable[[int, Mapping[str, Tensor]], None] | None = None,
) -> DistillationHistory:
    """Train a model to give what its teacher gives, once through the batches.

    The model stays in the mode it is in; the teacher is run in evaluation mode without gradients, on its own
    device. A GPU is not waited for until the end, so that nothing stops where the loss becomes NaN; see
    ``callback``. Patterns stay fixed unless it steps a schedule of them.

    To go on after an interruption, save ``state_dict()`` of model, optimizer and scheduler in a
    ``callback``, load them, and call this again with the batches that are left: there is no other state.

    Args:
        model: the student.
        teacher: the dense model.
        batches: as of `prune_`; model and teacher each get a copy on their device. ``attention_mask`` says
            which tokens count; of an encoder-decoder ``decoder_attention_mask`` does, or ``labels`` other
            than -100. Both models compute their own loss where there are ``labels``.
        optimizer: has the model's parameters; made after the model was pruned. None is AdamW without weight
            decay on all parameters that are trained, at learning rate ``lr``.
        lr: learning rate, in place of an optimizer; for schedules and resumption give an optimizer.
        loss: what is to become small; None is the divergence of the logits, ``DistillationLoss(logits=1.0)``.
        forward: ``forward(model_or_teacher, batch)`` gives the outputs; None calls the module, with
            ``output_hidden_states=True`` where the loss needs them.
        scheduler: of the learning rate, stepped after each step of the optimizer.
        accumulate: batches per step, whose gradients are averaged. The last step takes what is left.
        clip: largest norm of all gradients together; None leaves them.
        autocast: torch.bfloat16 to run the model in mixed precision; None does not.
        graph: capture a step, teacher to optimizer, in a CUDA graph and replay it, see docs/recovery.md.
        callback: ``callback(step, terms)`` after each step, the first being 1. ``terms`` are scalars on the
            device: reading one waits for it.

    Raises:
        UnsupportedError: with ``graph`` the optimizer has hooks, which a graph would not call again.
    """
    check_flag("graph", graph)
    check_callable("callback", callback)
    check_callable("forward", forward)
    if (optimizer is None) == (lr is None):
        raise InvalidArgumentError(
            f"lr must be given in place of an optimizer, and not beside it, got {shown(lr)}"
        )
    check_module(model)
    check_module(teacher, "teacher")
    if optimizer is None:
        rate = checked_number("lr", lr, above_zero=True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise InvalidArgumentError("model must have parameters that require gradients")
        optimizer = torch.optim.AdamW(trained, rate, weight_decay=0.0, capturable=graph)
    loss = DistillationLoss(logits=1.0) if loss is None else loss
    check_kind("loss", loss, DistillationLoss)
    check_distinct(model, teacher)
    _check_optimizer(model, optimizer)
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if scheduler is not None and (plateau or not callable(getattr(scheduler, "step", None))):
        given = type(scheduler).__name__
        raise InvalidArgumentError(f"scheduler must have a step() without arguments, got {given}")
    accumulate = checked_count("accumulate", accumulate)
    clip = None if clip is None else checked_number("clip", clip, above_zero=True)
    check_batches(batches)
    check_autocast(autocast)

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def terms_of(batch: Any) -> dict[str, Tensor]:
        # Copies for both models: either may write to its input.
        own, mask = moved(checked_batch(batch), device_of(model), copy=True), mask_of_outputs(model, batch)
        device = device_of(teacher)
        with torch.no_grad(), autocasting(device, autocast):
            targets = outputs_of(teacher, moved(batch, device, copy=True), loss, forward)
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
        optimizer.zero_grad()
        return sums

    graphed = None
    if graph:
        graphed = _GraphedStep(update, _checked_device(model, teacher, optimizer, scheduler))
    seen: list[dict[str, Tensor]] = []
    with evaluating(teacher):
        optimizer.zero_grad()
        remaining = iter(batches)
        while group := list(islice(remaining, accumulate)):
            terms = (graphed or update)(group)
            if scheduler is not None:
                scheduler.step()
            seen.append(terms)
            if callback is not None:
                callback(len(seen), terms)
    if not seen:
        raise InvalidArgumentError("batches must have at least one batch, got none")
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
    if dtype not in (None, torch.bfloat16):
        raise InvalidArgumentError(f"autocast must be torch.bfloat16 or None, got {dtype!r}")


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise InvalidTypeError(f"optimizer must be a torch.optim.Optimizer, got {shown(optimizer)}")
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, module in model.named_modules():
        trained = isinstance(module, BlockSparseLinear) and module.weight.requires_grad
        if trained and id(module.weight) not in known:
            raise InvalidArgumentError(
                f"optimizer: the weight of layer {name!r} is not among its parameters; make it after the "
                "model was pruned, or call requires_grad_(False) on what is to stay as it is"
            )
    if not any(id(parameter) in known for parameter in model.parameters() if parameter.requires_grad):
        raise InvalidArgumentError("optimizer must have parameters of the model, it has none")


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
    model: nn.Module, teacher: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> torch.device:
    """Return the device of a step that can be captured; raise for one that cannot."""
    device = device_of(model)
    if device.type != "cuda" or device_of(teacher) != device:
        raise InvalidArgumentError("model and teacher must be on one CUDA device where graph is True")
    if has_step_hooks(optimizer):
        raise UnsupportedError(
            "optimizer must have no hooks where graph is True, as those of MaskSchedule are: a captured step "
            "repeats what they decided once"
        )
    for group in optimizer.param_groups:
        if not group.get("capturable") or not (scheduler is None or isinstance(group["lr"], Tensor)):
            raise InvalidArgumentError(
                "optimizer must have capturable=True where graph is True, and a tensor as its lr where a "
                "scheduler is given"
            )
    return device
