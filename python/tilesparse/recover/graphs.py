"""Steps of training that are replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import shown
from .._runtime.private import has_step_hooks
from ..calibrate.stream import device_of, mapped, moved, tensors_in
from ..errors import InvalidArgumentError, UnsupportedError

WARM_UP = 3  # steps before a capture: they make plans and the optimizer's states, and compile

Step = Callable[[Sequence[Any]], dict[str, Tensor]]


class GraphedStep:
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
            return self._aside(group)
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

    def _aside(self, group: Sequence[Any]) -> dict[str, Tensor]:
        """Run the step on a stream of its own, as PyTorch asks of what is captured later."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            terms = self._step(group)
        current.wait_stream(self._stream)
        return terms


def _form(value: Any) -> Any:
    """Return a nested value with (shape, dtype) in place of tensors."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else mapped(value, _form)


def check_graph(
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
