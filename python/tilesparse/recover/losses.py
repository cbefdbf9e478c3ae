"""Loss of distillation: the differences between a student and its teacher."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .._checks import checked_number
from ..errors import InvalidArgumentError

SIMILARITY_TEMPERATURE = 0.05
AT_ONCE = 1 << 27  # logits that are compared at once: 512 MiB in float32, and some copies


@dataclass(frozen=True)
class DistillationLoss:
    """A weighted sum of differences between the outputs of a student and of its teacher, both of one batch.

    Outputs are what models of Transformers give, or mappings or objects with such entries; a plain tensor
    stands for logits. Tokens that the attention mask leaves out do not count, whatever is computed for them.
    Everything is computed in float32, or in float64 where the student is in float64. More than 2^27 logits
    are compared some texts at a time, without gradients of gradients: only those are in float32 at once.

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
        similarities: weight of KL(teacher ‖ student) of which texts of the batch a text is like: the softmax
            of the cosines of its embedding to those of the others at the temperature 0.05, averaged over the
            texts (as in Fang et al., "SEED: Self-supervised Distillation for Visual Representation", 2021).
            A batch of one text adds nothing.

    Raises:
        InvalidArgumentError: a weight is negative, all are 0, or another argument is not allowed; in a call,
            where outputs lack what is asked for, or student and teacher differ in vocabulary, number of
            hidden states or shape.
    """

    task: float = 0.0
    logits: float = 0.0
    hidden_states: float = 0.0
    embeddings: float = 0.0
    temperature: float = 1.0
    similarities: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checked_number(field.name, getattr(self, field.name), above_zero=field.name == "temperature")
        if not self._weights():
            raise InvalidArgumentError(
                "at least one of task, logits, hidden_states, embeddings and similarities must be above 0"
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
            elif name == "embeddings":
                both = _embeddings(student, teacher, attention_mask)
                terms[name] = (1 - F.cosine_similarity(*both, dim=-1)).mean()
            else:
                log_ours, log_theirs = map(_shares, _embeddings(student, teacher, attention_mask))
                terms[name] = _divergence(log_ours, log_theirs) / len(log_ours)
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
        _check_shapes("logits", ours, theirs)
        _check_mask("logits", ours, mask)
        if ours.numel() <= AT_ONCE or torch.compiler.is_compiling():  # which fuses what takes memory
            divergence = _divergence(*_logarithms(ours, theirs, mask, self.temperature))
        else:
            parts = _parts(ours, theirs, mask)
            apply: Any = _DivergenceOfMany.apply
            divergence = torch.stack([apply(*part, self.temperature) for part in parts]).sum()
        return torch.mul(divergence / _count(ours, mask), self.temperature**2)


def _logarithms(
    ours: Tensor, theirs: Tensor, mask: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of both models' softmax, which are the same for tokens that do not count."""
    both = (_without_padding(one, mask) for one in _alike(ours, theirs))
    log_ours, log_theirs = (F.log_softmax(one / temperature, -1) for one in both)
    return log_ours, log_theirs


def _divergence(log_ours: Tensor, log_theirs: Tensor) -> Tensor:
    """Return KL(teacher ‖ student), added up over tokens or samples."""
    return F.kl_div(log_ours, log_theirs, reduction="sum", log_target=True)


def _parts(ours: Any, theirs: Any, mask: Any) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield as many texts at a time as are compared at once, at least one."""
    texts = max(1, AT_ONCE * len(ours) // ours.numel())
    parts = ours.split(texts), theirs.split(texts)
    masks = [None] * len(parts[0]) if mask is None else mask.split(texts)
    yield from zip(*parts, masks, strict=True)


class _DivergenceOfMany(torch.autograd.Function):
    """The divergence of some texts of many: its gradient comes with it, and nothing in float32 is kept."""

    @staticmethod
    def forward(ctx: Any, ours: Tensor, theirs: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
        log_ours, log_theirs = _logarithms(ours, theirs, mask, temperature)
        if ctx.needs_input_grad[0]:
            slope = (log_ours.exp() - log_theirs.exp()) / temperature
            ctx.save_for_backward(slope.to(ours.dtype))
        return _divergence(log_ours, log_theirs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (gradient * slope).to(slope.dtype), None, None, None


def _hidden_states(student: Any, teacher: Any, mask: Tensor | None) -> Tensor:
    ours, theirs = _output(student, "hidden_states"), _output(teacher, "hidden_states", "teacher")
    for whose, states in (("student", ours), ("teacher", theirs)):
        if not isinstance(states, tuple | list) or not states:
            raise InvalidArgumentError(
                f"{whose} must give a tuple or list of hidden_states, got {type(states).__name__}"
                + (" without any" if isinstance(states, tuple | list) else "")
            )
    if len(ours) != len(theirs):
        raise InvalidArgumentError(
            f"teacher must give {len(ours)} hidden_states, as the student does, got {len(theirs)}"
        )
    errors = []
    for index, both in enumerate(zip(ours, theirs, strict=True)):
        name = f"hidden_states[{index}]"
        both = _pair(name, *both)
        _check_mask(name, both[0], mask)
        one, other = (_without_padding(states, mask) for states in both)
        errors.append(
            (one - other).square().sum() / other.square().sum().clamp_min(torch.finfo(other.dtype).tiny)
        )
    return torch.stack(errors).mean()


def _embeddings(student: Any, teacher: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return one vector for each text of both models, [batch, features]."""
    return _pair("embeddings", _pooled(student, "student", mask), _pooled(teacher, "teacher", mask))


def _shares(embeddings: Tensor) -> Tensor:
    """Return logarithms of how much each text is like each of the others, [texts, texts - 1]."""
    unit, count = F.normalize(embeddings, dim=-1), len(embeddings)
    cosines = (unit @ unit.t()).flatten()[1:].view(count - 1, count + 1)  # the diagonal is the last column
    return F.log_softmax(cosines[:, :-1].reshape(count, count - 1) / SIMILARITY_TEMPERATURE, -1)


def _pooled(outputs: Any, whose: str, mask: Tensor | None) -> Tensor:
    """Return one vector for each text, [batch, features]."""
    given = _find(outputs, "embeddings")
    if isinstance(given, Tensor):
        return given
    tokens: Tensor = _output(outputs, "last_hidden_state", whose)
    tokens = tokens.to(_precision(tokens))
    if mask is None:
        return tokens.mean(1)
    _check_mask("last_hidden_state", tokens, mask)
    counts = mask.to(tokens.device).ne(0).sum(1, keepdim=True).clamp_min(1)
    return _without_padding(tokens, mask).sum(1) / counts


def _check_shapes(name: str, student: Any, teacher: Any) -> None:
    if student.shape != teacher.shape:
        what = "classes" if name == "logits" and student.shape[:-1] == teacher.shape[:-1] else "shape"
        sizes = [tuple(one.shape) if what == "shape" else one.shape[-1] for one in (student, teacher)]
        raise InvalidArgumentError(
            f"teacher must give {name} with the student's {what}, {sizes[0]}, got {sizes[1]}"
        )


def _pair(name: str, student: Any, teacher: Any) -> tuple[Tensor, Tensor]:
    """Return both in one dtype on one device, the teacher's without gradient; their shapes are equal."""
    _check_shapes(name, student, teacher)
    return _alike(student, teacher)


def _alike(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    dtype = _precision(student)
    return student.to(dtype), teacher.detach().to(student.device).to(dtype)


def _check_mask(name: str, student: Tensor, mask: Tensor | None) -> None:
    dims = 1 if _is_of_texts(student) else 2
    if mask is not None and student.shape[:dims] != mask.shape[:dims]:
        raise InvalidArgumentError(
            f"attention_mask must be [batch, tokens] of {name} of shape {tuple(student.shape)}, "
            f"got {tuple(mask.shape)}"
        )


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
    """Return outputs of a model with zeros for tokens that do not count.

    Zeros are written before anything is computed, so that what a model gives for padding, which may be NaN,
    reaches neither the loss nor a gradient.
    """
    if mask is None or _is_of_texts(outputs):
        return outputs
    left_out = mask.to(outputs.device).eq(0)
    return outputs.masked_fill(left_out.view(*left_out.shape, *(1,) * (outputs.dim() - 2)), 0)


def _output(outputs: Any, name: str, whose: str = "student") -> Any:
    found = _find(outputs, name)
    if found is None and name == "logits" and isinstance(outputs, Tensor):
        return outputs
    if found is None:
        keys = f" with {sorted(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
        raise InvalidArgumentError(
            f"{whose} must give outputs with {name!r}, got {type(outputs).__name__}{keys}"
        )
    return found


def _find(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
