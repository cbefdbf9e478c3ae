"""Plans of a pattern, made on its CUDA device, and the streams that write and read what is kept there."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from .device import allocate, scratch


class Streams:
    """The order of writes to what is kept on a CUDA device, and of the streams that read it.

    On the CPU nothing is recorded, so there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readers: dict[int, torch.cuda.Stream] = {}
        self._arrivals: list[torch.cuda.Event] = []  # of all that is written

    def record(self) -> None:
        """Note that the current stream was asked to write something."""
        if self._device.type == "cuda":
            self._arrivals.append(torch.cuda.current_stream(self._device).record_event())

    def record_all(self) -> None:
        """Note that the current stream was asked to write everything anew."""
        self._arrivals.clear()
        self.record()

    def wait(self) -> None:
        """Have the current stream wait for all that was written.

        A graph cannot wait for work outside of it, but that was asked for before its capture began, and so
        before any replay.
        """
        if self._arrivals and not torch.cuda.is_current_stream_capturing():
            for event in self._arrivals:
                torch.cuda.current_stream(self._device).wait_event(event)

    def read(self, tensors: Iterator[Tensor]) -> None:
        """Make tensors safe to read on the current stream, also after their owner is gone."""
        if self._device.type == "cpu":
            return
        stream = torch.cuda.current_stream(self._device)
        self.wait()
        self._readers[stream.cuda_stream] = stream
        for tensor in tensors:
            tensor.record_stream(stream)

    def others_read(self) -> bool:
        """Return True if another stream than the current one reads."""
        return bool(self._readers.keys() - {torch.cuda.current_stream(self._device).cuda_stream})

    def wait_to_write(self) -> None:
        """Have the current stream wait until no other stream writes or reads any more."""
        self.wait()
        current = torch.cuda.current_stream(self._device)
        for stream in self._readers.values():
            if stream != current:
                current.wait_stream(stream)


class Plan(NamedTuple):
    memory: Tensor
    kernel: int  # one of the kernels that walk it


class Plans:
    """The plans that were asked for so far."""

    def __init__(self, descriptor: _C.Pattern, device: torch.device, streams: Streams) -> None:
        self._descriptor, self._device, self._streams = descriptor, device, streams
        self._plans: dict[tuple[int, int], Plan] = {}

    @torch.inference_mode(False)
    def get(self, op: int, kernel: int, plan_id: int) -> Tensor:
        """Return the plan of kernels with that `plan` in the C interface, on the current device."""
        plan = self._plans.get((op, plan_id))
        if plan is None:
            (memory,) = allocate(_C.plan_device_size(self._descriptor, kernel, op)[:1], self._device)
            plan = Plan(memory, kernel)
            self._streams.wait()
            self._build(op, plan)
            self._streams.record()
            self._plans[op, plan_id] = plan
        return plan.memory

    def rebuild(self) -> None:
        """Write all plans anew in the same memory."""
        for (op, _), plan in self._plans.items():
            self._build(op, plan)

    def memory(self) -> Iterator[Tensor]:
        return (plan.memory for plan in self._plans.values())

    def _build(self, op: int, plan: Plan) -> None:
        workspace = scratch(_C.plan_device_size(self._descriptor, plan.kernel, op)[1], self._device)
        _C.plan_device_build(
            self._descriptor,
            plan.kernel,
            op,
            plan.memory.data_ptr(),
            plan.memory.numel(),
            workspace.data_ptr(),
            workspace.numel(),
            torch.cuda.current_stream(self._device).cuda_stream,
        )
