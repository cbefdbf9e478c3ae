"""What the native library needs of a pattern: descriptors, plans and resolved launches."""

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from . import _C
from .errors import UnsupportedError

HOST = torch.device("cpu")
MAX_LAUNCHES = 1024  # a program whose token counts never repeat must not grow without bound


class LaunchKey(NamedTuple):
    """All that decides which kernel runs and what it needs besides the operands."""

    op: int
    dtype: int
    device: int  # CUDA ordinal, -1 for the CPU
    stream: int
    tokens: int
    x_layout: int
    y_layout: int
    activation: int
    precision: int
    kernel: int  # 0: the library chooses; k: kernel k - 1
    residual: bool


class Launch(NamedTuple):
    """Arguments of ``_C.Launch`` that follow from a LaunchKey."""

    pattern: _C.Pattern
    kernel: int
    plan: int
    plan_bytes: int
    workspace_bytes: int


# Of the addresses of x, y, values, bias, residual and workspace.
Run = Callable[[int, int, int, int, int, int], None]


class Call(NamedTuple):
    """How to run a product whose operands were checked."""

    run: Run
    workspace: int  # elements
    shape: tuple[int, ...]  # of the result
    strides: tuple[int, ...] | None = None  # None: contiguous


class PreparedPattern:
    """The arrays of one version of a pattern in every form that was asked for so far."""

    def __init__(
        self,
        row_ptr: Tensor,
        col_idx: Tensor,
        slot: Tensor,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
    ) -> None:
        self.values_shape = (len(col_idx), *block_shape)
        self._rows = (row_ptr, col_idx, slot)
        self._shape = shape
        self._columns: tuple[Tensor, ...] = ()
        self._block_indices: dict[torch.device, Tensor] = {}
        self._descriptors: dict[torch.device, _C.Pattern] = {}
        self._tensors: dict[torch.device, list[Tensor]] = {}
        self._plans: dict[tuple[torch.device, int, int], Tensor] = {}
        self._arrivals: dict[torch.device, list[torch.cuda.Event]] = {}  # of all that was put there
        self._launches: dict[Hashable, Call] = {}
        self.find: Callable[[Hashable], Call | None] = self._launches.get

    def validate(self) -> None:
        """Raises InvalidPatternError if the arrays break an invariant."""
        _C.pattern_validate(self._describe(self._rows))

    def columns(self) -> tuple[Tensor, ...]:
        """(col_ptr [C + 1], row_idx [nnz], col_slot [nnz]), int32: the same blocks by column."""
        if not self._columns:
            nnz, _, bk = self.values_shape
            sizes = (self._shape[1] // bk + 1, nnz, nnz)
            columns = tuple(torch.empty(size, dtype=torch.int32, device=HOST) for size in sizes)
            _C.pattern_transpose(self._describe(self._rows), *(array.data_ptr() for array in columns))
            self._columns = columns
        return self._columns

    def block_indices(self) -> Tensor:
        """[2, nnz] int64 on the host: block row and block column of the block at every slot."""
        row_ptr, col_idx, slot = self._rows
        indices = torch.empty(2, len(slot), dtype=torch.int64, device=HOST)
        entries = torch.arange(len(slot), device=HOST)
        indices[0, slot.long()] = torch.bucketize(entries, row_ptr[1:].long(), right=True)
        indices[1, slot.long()] = col_idx.long()
        return indices

    def block_indices_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The two rows of `block_indices` on a device, for use on its current stream."""
        if device not in self._block_indices:
            indices = self.block_indices()
            if device != HOST:
                (indices,) = self._place((indices,), device)
                torch.cuda.current_stream(device).synchronize()  # once, so that no call has to wait
            self._block_indices[device] = indices
        indices = self._block_indices[device]
        if indices.is_cuda:
            indices.record_stream(torch.cuda.current_stream(device))
        rows, cols = indices
        return rows, cols

    def remember(self, key: Hashable, call: Call) -> None:
        """Lets ``find`` return the call for that key."""
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[key] = call

    def launch(self, key: LaunchKey) -> Launch:
        """The kernel for a product and what it needs, on the current device and stream."""
        device = HOST if key.device < 0 else torch.device("cuda", key.device)
        kernel, plan_key, workspace_bytes = _C.query(
            self.descriptor(HOST),
            key.op,
            key.dtype,
            int(device != HOST),
            key.activation,
            key.precision,
            key.kernel,
            key.tokens,
            key.x_layout,
            key.y_layout,
            key.residual,
        )
        plan = self._plan(device, key.op, kernel, plan_key) if plan_key else None
        launch = Launch(
            self.descriptor(device),
            kernel + 1,
            plan.data_ptr() if plan is not None else 0,
            plan.numel() if plan is not None else 0,
            workspace_bytes,
        )
        if device != HOST:
            self._wait(device)
            # Their memory must not be reused before this stream has read it, even if the pattern is
            # updated or dropped right after the launch.
            for tensor in self._tensors[device]:
                tensor.record_stream(torch.cuda.current_stream(device))
        return launch

    def descriptor(self, device: torch.device) -> _C.Pattern:
        if device not in self._descriptors:
            arrays = (*self._rows, *self.columns())
            if device != HOST:
                arrays = self._place(arrays, device)
            self._descriptors[device] = self._describe(arrays)
        return self._descriptors[device]

    def _plan(self, device: torch.device, op: int, kernel: int, plan_key: int) -> Tensor:
        """The plan for kernels with that key, made on the current device: those of the CPU have none."""
        key = (device, op, plan_key)
        if key not in self._plans:
            pattern = self.descriptor(device)
            plan_bytes, workspace_bytes = _C.plan_device_size(pattern, kernel, op)
            (plan,) = _allocate((plan_bytes,), device)
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
            self._wait(device)
            _C.plan_device_build(
                pattern,
                kernel,
                op,
                plan.data_ptr(),
                plan.numel(),
                workspace.data_ptr(),
                workspace.numel(),
                torch.cuda.current_stream(device).cuda_stream,
            )
            self._keep((plan,), device)  # before another thread can find it
            self._plans[key] = plan
        return self._plans[key]

    def _place(self, arrays: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Copies of the host's arrays on the device."""
        placed = _allocate((array.nbytes for array in arrays), device)
        copies = tuple(
            memory.view(array.dtype).view(array.shape).copy_(array.pin_memory(), non_blocking=True)
            for memory, array in zip(placed, arrays, strict=True)
        )
        self._keep(copies, device)
        return copies

    def _keep(self, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        """Lets what the current stream was asked to put on the device live as long as this object."""
        self._tensors.setdefault(device, []).extend(tensors)
        event = torch.cuda.current_stream(device).record_event()
        self._arrivals.setdefault(device, []).append(event)

    def _wait(self, device: torch.device) -> None:
        """Lets the current stream wait for all that any stream was asked to put on the device.

        A graph cannot wait for what is not part of it, but whatever it needs was asked for before its
        capture began, and so before any replay.
        """
        if not torch.cuda.is_current_stream_capturing():
            for event in self._arrivals.get(device, ()):
                torch.cuda.current_stream(device).wait_event(event)

    def _describe(self, arrays: tuple[Tensor, ...]) -> _C.Pattern:
        nnz, bn, bk = self.values_shape
        return _C.Pattern(bn, bk, *self._shape, nnz, *(array.data_ptr() for array in arrays))


def _allocate(sizes: Iterable[int], device: torch.device) -> list[Tensor]:
    """So many bytes each on a CUDA device, for the current stream to fill.

    With ``torch.compile(mode="reduce-overhead")`` whatever the thread allocates while it runs a graph for the
    first time, on another stream than the default one, is taken back. So another thread allocates there.
    """
    _refuse_capture()
    stream, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)

    def allocate() -> list[Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    if stream == default:
        return allocate()
    with ThreadPoolExecutor(1) as executor:
        tensors = executor.submit(allocate).result()
    stream.wait_stream(default)  # that of the new thread: it may still use what lay there before
    return tensors


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a CUDA graph is being captured and the pattern is not on the GPU in the form that this product "
            "needs: call it once with the same arguments before the capture"
        )
