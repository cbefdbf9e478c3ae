"""The native module's handles, devices and streams, and the lock of shared state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import RLock

import torch
from torch import Tensor

from .. import _C
from ..errors import UnsupportedError
from .torch_private import current_device, tf32_allowed

DDS_NT, DDS_NN, SDD_TN = range(3)
SCALES_PER_BLOCK, SCALES_PER_ROW, SCALES_PER_FEATURE = range(1, 4)  # granularities of scales; 0: no scales
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}

# The native reader of tensors, the patterns that it finds, and activations that it quantizes. PyTorch before
# 2.10 offers no way to read tensors natively: these find nothing then, and callers do the same in Python.
TENSORS = _C.Tensors(
    getattr(Tensor, "__dlpack_c_exchange_api__", None),
    Tensor,
    torch.nn.Parameter,
    current_device,
    tf32_allowed,
)
KNOWN = _C.Known(TENSORS)
QUANTIZER = _C.Quantizer(TENSORS)


# Takes the addresses of x, y, values, bias, residual and workspace, the stream, and metadata and scales.
Run = Callable[..., None]


def run_on(device: torch.device, run: Run) -> Run:
    """Wrap a call so that the device is the current one while it runs."""

    def guarded(*addresses: int) -> None:
        with torch.cuda.device(device):
            run(*addresses)

    return guarded


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make the device the current one in this context."""
    here = device.type == "cpu" or device.index == current_device()
    return nullcontext() if here else torch.cuda.device(device)


def allocate(sizes: Iterable[int], device: torch.device) -> list[Tensor]:
    """Allocate a tensor of each number of bytes, on a CUDA device for the current stream to fill.

    ``torch.compile(mode="reduce-overhead")`` takes back what the thread allocates while it runs a graph for
    the first time, on another stream than the default one. So another thread allocates there.
    """

    def allocated() -> list[Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    if device.type == "cpu":
        return allocated()
    refuse_capture()
    stream, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if stream == default:
        return allocated()
    with ThreadPoolExecutor(1) as executor:
        tensors = executor.submit(allocated).result()
    stream.wait_stream(default)  # that of the new thread: it may still use what lay there before
    return tensors


def scratch(size: int, device: torch.device) -> Tensor:
    """Return memory for what the current stream does next; hold it until that was asked for."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def refuse_capture() -> None:
    """Raise if a CUDA graph is being captured."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "the pattern must be on the GPU in the form that this product needs before a CUDA graph is "
            "captured: call the product once with the same arguments before the capture, and after each write"
        )


# Held while something is derived from a pattern or its tensors are written to here, and, on CUDA devices,
# from the resolution of a kernel's operands until its launch. So a thread sees the pattern from before an
# update or from after it. Finalizers, which may run anywhere, do not take it.
_lock = RLock()


def exclusive() -> AbstractContextManager[object]:
    """Return the lock that keeps other threads from updating patterns and from reading their tensors."""
    return _lock


def _renew_lock() -> None:
    """Free the lock in a forked process, where the thread that may have held it does not exist."""
    global _lock
    _lock = RLock()


os.register_at_fork(after_in_child=_renew_lock)
