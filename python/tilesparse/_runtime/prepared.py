"""Patterns and products as the native library takes them: transposes, plans, kernels that were chosen.

All that is derived from a pattern is kept by the identity of its index tensors. Kernels read that alone,
never the tensors themselves, so a product sees one pattern from its first block to its last, whoever writes
to them meanwhile.

On the CPU what was derived is never written to again: every call compares the tensors with the copy that it
was made of, and where they differ it is made anew. On CUDA devices it is written again in the same memory,
behind what other streams still read, so that graphs that were captured follow a pattern that is updated.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._checks import Index, check_index
from .copies import Derived, Packed
from .device import allocate, on, refuse_capture, run_on, scratch
from .indices import block_indices, validate
from .layout import Form, allocation
from .lock import exclusive
from .native import KNOWN, TENSORS
from .plans import Plans, Streams
from .private import version
from .requests import Call, QuantizedRequest, Request
from .writes import watch

SETTLING = 0.01  # seconds that a thread may need between a write and its count
MAX_CALLS = 1024  # a program whose token counts never repeat must not grow without bound

State = tuple[int, ...]


def state_of(index: Index) -> State:
    """Return addresses and versions, which change when tensors on a CUDA device are written to or moved.

    Tensors made in inference mode have no versions: only `BlockPattern.update_` is noticed there.
    """
    crow, col, slot, _, _ = index
    return (
        crow.data_ptr(),
        col.data_ptr(),
        slot.data_ptr(),
        version(crow),
        version(col),
        version(slot),
    )


class Prepared:
    """A pattern in every form that was asked for so far: copies of its tensors, transpose, plans, calls.

    Attributes:
        generation: number of changes of its contents; 0 on the CPU, where each content has its own object.
        run: runs a product like one that has run before and returns its result; None for any other (see
            `_C.Calls`).
        run_quantized: the same for products of two factors in 8 bits.
        find: returns the call that was kept under a key, or None.
        on_cpu: True for a pattern on the CPU.
        packs: True if values are kept packed from call to call; see `BlockSparseLinear.pack`.
        watch: finds writes that PyTorch does not count; None on the CPU and for the transpose.
        use: what products that look for such writes note of their use; None likewise.
        noted: when the copies were last known to be those of the tensors, on the clock ``time.monotonic``.
        plain: dense blocks that are kept on the CPU.
        scales: scales of the rows of blocks, made from those of output features.
        plans: plans of CUDA kernels.
    """

    @torch.inference_mode(False)  # tensors made in it could not be written outside of it
    def __init__(self, index: Index, watched: bool = True, groups: int = 1) -> None:
        check_index(index)
        shape, (bn, bk), nnz = index.shape, index.block_shape, index.col_indices.shape[0]
        self.shape, self.block_shape, self.values_shape = shape, (bn, bk), (nnz, bn, bk)
        self.device = index.col_indices.device
        self.on_cpu = self.device.type == "cpu"
        self.generation = 0
        self.packs = False
        self.plain, self.scales = Derived(), Derived()
        self._packed: dict[tuple[int, int, int], Packed] = {}
        self.state: State = ()
        self._tensors = tuple(weakref.ref(tensor) for tensor in index[:3])
        sizes = shape[0] // bn + 1, nnz, nnz, groups * (shape[1] // bk) + 1, nnz, nnz
        memory = [area.view(torch.int32) for area in allocate((4 * size for size in sizes), self.device)]
        self._snapshot, self._columns = memory[:3], memory[3:]
        row_ptr, col_idx, row_slot, *columns = (tensor.data_ptr() for tensor in memory)
        col_ptr, row_idx, col_slot = columns
        self.descriptor = _C.Pattern(
            bn, bk, *shape, nnz, row_ptr, col_idx, row_slot, col_ptr, row_idx, col_slot, groups
        )
        self._streams = Streams(self.device)
        self.plans = Plans(self.descriptor, self.device, self._streams)
        self._places: Tensor | None = None
        self._transposed: Prepared | None = None
        self._grouped: dict[int, Prepared] = {}
        self._calls: dict[Hashable, Call] = {}
        self.find: Callable[[Hashable], Call | None] = self._calls.get
        self._kept = _C.Calls(TENSORS)
        self.run: Callable[..., Tensor | None] = self._kept.run
        self.run_quantized: Callable[..., Tensor | None] = self._kept.run_quantized
        self.noted = 0.0
        self.watch = watch(self.device) if self.device.type == "cuda" and watched else None
        self.use = None if self.watch is None else _C.Use(self.watch.clock)
        self._place = -1 if self.watch is None else self.watch.add(self)
        self._memory: list[torch.UntypedStorage] = []  # kept alive while it is watched
        self._write(index)

    def is_of(self, index: Index) -> bool:
        """Return True if it was made of these tensors as they are; on CUDA, of tensors of this size."""
        if index.col_indices.device != self.device or index.col_indices.shape[0] != self.values_shape[0]:
            return False
        return not self.on_cpu or _C.pattern_holds(
            self.descriptor, *(tensor.data_ptr() for tensor in index[:3])
        )

    def snapshot(self) -> tuple[int, int, int] | None:
        """Return the addresses of the copies on the CPU, None on a CUDA device."""
        crow, col, slot = (tensor.data_ptr() for tensor in self._snapshot)
        return (crow, col, slot) if self.on_cpu else None

    def launching(self) -> AbstractContextManager[object]:
        """Return the lock to hold from resolving a product until its launch."""
        return nullcontext() if self.on_cpu else exclusive()

    def index(self) -> Index:
        """Return the pattern as kernels read it: copies of the tensors it was made from."""
        crow, col, slot = self._snapshot
        return Index(crow, col, slot, self.shape, self.block_shape)

    def columns(self) -> list[Tensor]:
        """Return [col_ptr [C + 1], row_idx [nnz], col_slot [nnz]], int32: the same blocks by column."""
        self._streams.wait()
        return self._columns

    def transposed(self) -> "Prepared":
        """Return the pattern of the transposed weight, whose values have the same slots."""
        with exclusive():
            if self._transposed is None:
                self._transposed = Prepared(self._transposed_index(), watched=False)
            return self._transposed

    def grouped(self, groups: int) -> "Prepared":
        """Return the pattern as that of weights of equal shape below each other, see `ts_pattern.groups`."""
        found = self._grouped.get(groups)
        if found is None:
            with exclusive():
                self._streams.wait()
                found = self._grouped.get(groups) or Prepared(self.index(), watched=False, groups=groups)
                self._grouped[groups] = found
        return found

    def _others(self) -> Iterator["Prepared"]:
        """Yield what was made of this pattern and follows it."""
        yield from self._grouped.values()
        if self._transposed is not None:
            yield self._transposed

    def _transposed_index(self) -> Index:
        col_ptr, row_idx, col_slot = self.columns()
        return Index(col_ptr, row_idx, col_slot, self.shape[::-1], self.block_shape[::-1])

    @torch.inference_mode(False)
    def block_indices(self) -> tuple[Tensor, Tensor]:
        """Return (rows, cols), each [nnz] int64: the block row and column of every slot."""
        with exclusive():
            return self._block_indices()

    def _block_indices(self) -> tuple[Tensor, Tensor]:
        if self._places is None:
            (memory,) = allocate((16 * self._snapshot[1].shape[0],), self.device)
            self._streams.wait()
            places = memory.view(torch.int64).view(2, -1)
            self._write_places(places)
            self._places = places
            self._streams.record()
        else:
            self._streams.read(iter((self._places,)))
        return self._places[0], self._places[1]

    @torch.inference_mode(False)
    def rewrite(self, index: Index) -> None:
        """Follow changed contents on a CUDA device: write everything derived anew, in the same memory."""
        self.generation += 1
        self.forget_calls()
        self._wait_to_write()
        self._write(index)
        for grouped in self._grouped.values():
            grouped.rewrite(self.index())
        if self._transposed is not None:
            self._transposed.rewrite(self._transposed_index())

    def _wait_to_write(self) -> None:
        """Have the current stream wait until no other uses the pattern, what follows it, or their plans."""
        self._streams.wait_to_write()
        for other in self._others():
            other._wait_to_write()

    def wait(self) -> None:
        """Have the current stream wait for what another one has yet to write."""
        self._streams.wait()

    def call(self, key: Hashable, product: _C.Product, op: int, itemsize: int, form: Form) -> Call:
        """Resolve a product on the current device and stream, and keep it under the key."""
        with exclusive(), on(self.device):
            kernel, plan_id = product.resolve()
            plan_key = _C.plan_key(self.descriptor, kernel, op)
            if plan_id:
                memory = self.plans.get(op, kernel, plan_id)
                product.use_plan(memory.data_ptr(), memory.numel(), plan_key)
            packed = self._pack(product, op, plan_id, plan_key) if self.packs else None
            workspace_bytes = product.workspace_size()
            self._streams.read(chain(self._snapshot, self._columns, self.plans.memory()))
        if len(self._calls) >= MAX_CALLS:
            self.forget_calls()
        here = self.on_cpu or self.device.index == torch.cuda.current_device()
        run = product.run if here else run_on(self.device, product.run)
        self._calls[key] = call = Call(run, -(-workspace_bytes // itemsize), form, packed)
        return call

    def keep_packed(self, keep: bool) -> None:
        """Keep values packed from call to call, or not; drop the packed copies in either case."""
        self.packs = keep
        self.forget_calls()
        self._packed.clear()
        self.plain, self.scales = Derived(), Derived()

    def keep(self, request: Request, product: _C.Product, call: Call) -> None:
        """Have `run` do the same from now on."""
        if self._is_kept():
            self._kept.keep(*request, product, *_allocations(call))

    def keep_quantized(self, request: QuantizedRequest, product: _C.Product, call: Call) -> None:
        """Have `run_quantized` do the same from now on."""
        if self._is_kept():
            self._kept.keep_quantized(*request, product, *_allocations(call))

    def _is_kept(self) -> bool:
        # On a GPU a call may pack, but not in a graph that is being captured.
        return not self.packs or self.on_cpu

    def forget_calls(self) -> None:
        """Resolve every product anew, also one that another thread has found but not launched."""
        self._calls.clear()
        self._kept.clear()
        for other in self._others():
            other.forget_calls()

    def follow_writes(self) -> bool:
        """Follow tensors on a CUDA device that were written to; return True if PyTorch has not counted it.

        What it has counted the next product of this pattern follows. The host waits for the tensors.
        """
        index = self._held()
        if index is None or state_of(index) != self.state:
            return False
        self.wait()  # what a thread wrote on another stream is no write that was missed
        if all(map(torch.equal, index[:3], self._snapshot)):
            return False
        # PyTorch counts a write after it has enqueued it, and another thread may be between the two.
        sleep(SETTLING)
        if state_of(index) != self.state:
            return False
        self.adopt(index)
        return True

    def adopt(self, index: Index) -> None:
        """Follow tensors on a CUDA device, whose contents are checked in a copy: others may write to them."""
        state = state_of(index)
        crow, col, slot = (tensor.clone() for tensor in index[:3])
        copy = Index(crow, col, slot, self.shape, self.block_shape)
        validate(copy)
        self.rewrite(copy)
        self.note(index, state)

    def distrust(self) -> None:
        """Have the next call validate the tensors, which hold no pattern."""
        self.state = ()
        crow, col, slot = (reference() for reference in self._tensors)
        KNOWN.forget((crow, col, slot, self.shape, self.block_shape))
        if self.watch is not None:
            self.watch.rest(self._place)

    def forget(self) -> None:
        """Stop watching the tensors: they are gone, or have another owner."""
        if self.watch is not None:
            self.watch.remove(self._place)

    def _held(self) -> Index | None:
        """Return the tensors this was made from, if they still exist with the same size."""
        crow, col, slot = (reference() for reference in self._tensors)
        if crow is None or col is None or slot is None:
            return None
        index = Index(crow, col, slot, self.shape, self.block_shape)
        return index if self.is_of(index) else None

    def written(self) -> tuple[Index, State] | None:
        """Return the tensors this was made from and their state, if they may have other contents by now."""
        index = self._held()
        if index is None:
            return None
        state = state_of(index)
        return None if state == self.state else (index, state)

    def is_read_elsewhere(self) -> bool:
        """Return True if other streams than the current one read this, so that they may write the tensors."""
        return self._streams.others_read()

    def _write(self, index: Index) -> None:
        """Write copies, the transpose and all plans on the current stream."""
        col_ptr, row_idx, col_slot = self._columns
        columns = col_ptr.data_ptr(), row_idx.data_ptr(), col_slot.data_ptr()
        if self.on_cpu:
            self._copy(index)
            validate(self.index())  # the copy: others may write to the tensors at any time
            _C.pattern_transpose(self.descriptor, *columns)
        else:
            refuse_capture()
            with on(self.device):
                self._copy(index)
                workspace = scratch(_C.pattern_device_transpose_size(self.descriptor), self.device)
                stream = torch.cuda.current_stream(self.device).cuda_stream
                _C.pattern_device_transpose(
                    self.descriptor, *columns, workspace.data_ptr(), workspace.numel(), stream
                )
                self.plans.rebuild()
                if self._places is not None:
                    self._write_places(self._places)
                self._streams.record_all()
        self.note(index, state_of(index))

    def note(self, index: Index, state: State) -> None:
        """Note that these tensors, in a state from before they were read, have the copied contents."""
        before, self.state = self.state, state
        if self.watch is not None:
            self.noted = monotonic()
            if self.state[:3] != before[:3]:  # the addresses
                memory = [tensor.untyped_storage() for tensor in index[:3]]
                self.watch.point(self._place, index, self.index())
                self._memory = memory

    def _copy(self, index: Index) -> None:
        for snapshot, tensor in zip(self._snapshot, index[:3], strict=True):
            snapshot.copy_(tensor)

    def _write_places(self, places: Tensor) -> None:
        for place, indices in zip(places, block_indices(self.index()), strict=True):
            place.copy_(indices)

    def _pack(self, product: _C.Product, op: int, plan_id: int, plan_key: int) -> Packed | None:
        """Have the product read packed values, if its kernel wants them.

        Not while a graph is captured: its replays would not see the values change.
        """
        size = product.prepacked_size()  # 0 on the CPU
        if size == 0 or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(self.device)
        key = op, plan_id, stream.cuda_stream  # what one stream packs another may not have to wait for
        packed = self._packed.get(key)
        if packed is None:
            (memory,) = allocate((size,), self.device)
            memory.record_stream(stream)
            packed = self._packed[key] = Packed(product, memory, plan_key)
        product.use_prepacked(packed.memory.data_ptr(), size, packed.plan_key)
        return packed


def _allocations(call: Call) -> tuple[Any, Any]:
    """Return how result and workspace are allocated."""
    workspace = (Tensor.new_empty, (call.workspace,)) if call.workspace else None
    return allocation(call.form), workspace
