"""Memory on a device, and calls on another device than the current one."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..errors import UnsupportedError

# Takes the addresses of x, y, values, bias, residual and workspace, the stream, and metadata and scales.
Run = Callable[..., None]


def run_on(device: torch.device, run: Run) -> Run:
    """Wrap a call so that the device is the current one while it runs."""

    def guarded(*addresses: int) -> None:
        with torch.cuda.device(device):
            run(*addresses)

    return guarded


def on(device: torch.device) -> torch.cuda.device:
    """Make the device the current one in this context."""
    return torch.cuda.device(-1 if device.type == "cpu" else device)  # -1 changes nothing


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
