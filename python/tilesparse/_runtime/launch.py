"""Patterns and products as the native library takes them: transposes, plans, kernels that were chosen.

All that is derived from a pattern is kept by the identity of its index tensors. Kernels read that alone,
never the tensors themselves, so a product sees one pattern from its first block to its last, whoever writes
to them meanwhile.

On the CPU what was derived is never written to again: every call compares the tensors with the copy that it
was made of, and where they differ it is made anew. On CUDA devices it is written again in the same memory,
behind what other streams still read, so that graphs that were captured follow a pattern that is updated.
"""

import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from threading import Lock, RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._checks import (
    ALIGNMENT,
    COMPRESSIBLE,
    DTYPES,
    QUANTIZED,
    Index,
    check_dds,
    check_dense,
    check_index,
    check_nothing_added,
    check_one,
    check_sdd,
    check_separate,
    check_stored,
    check_values,
)
from ..errors import InvalidArgumentError, InvalidPatternError, UnsupportedError
from .layout import (
    Form,
    Lines,
    aligned,
    allocation,
    empty,
    like_result,
    result_form,
    row_pitch,
    usable,
)
from .private import (
    constant_when_compiled,
    current_device,
    current_stream,
    is_exporting,
    of_example,
    tf32_allowed,
    version,
)
from .writes import watch

DDS_NT, DDS_NN, SDD_TN = range(3)
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}
# Gradients of biases come with others where these have so many elements. Of fewer, what the GPU saves is not
# more than what the host takes longer.
MANY_ELEMENTS = 1 << 23
_GATED = (torch.float32, torch.float16, torch.bfloat16)
MAX_CALLS = 1024  # a program whose token counts never repeat must not grow without bound
EXPAND_AND_RUN_DENSE = -1  # in place of a kernel
_SPARSE, _AUTO = 0, 1  # TS_POLICY_SPARSE and TS_POLICY_AUTO
_COMPRESSED = 1  # TS_STORAGE_2_4

Context = tuple[int, int, int, int]  # kernel asked for, stream, current device, precision
# A product's letter code, its first and second factor, bias, residual, activation, whether the result is
# feature-major, the metadata and scales of values, the kernel asked for, and whether the residual is a gate.
Request = tuple[
    int, Tensor, Tensor, Tensor | None, Tensor | None, int, bool, Tensor | None, Tensor | None, int, bool
]
# Of the addresses of x, y, values, bias, residual and workspace, the stream, and of metadata and scales.
Run = Callable[..., None]


class Packed:
    """A copy of values in the order in which kernels multiply them, which packs anew what has changed."""

    def __init__(self, product: _C.Product, memory: Tensor, plan_key: int) -> None:
        self.product, self.memory, self.plan_key = product, memory, plan_key
        self._of: tuple[int, ...] = ()
        self._values: Callable[[], Tensor | None] = lambda: None

    def follow(self, values: Tensor, generation: int, stream: int) -> None:
        """Packs these values, unless they are what was packed last."""
        if not values.is_inference():  # where changes are counted
            of = id(values), values.data_ptr(), values._version, generation
            if self._of == of and self._values() is values:
                return
            self._of, self._values = of, weakref.ref(values)
        self.product.pack(values.data_ptr(), self.memory.data_ptr(), self.memory.numel(), stream)


class Expanded:
    """Plain values made of others, on the CPU, and anew once one of these has changed."""

    def __init__(self) -> None:
        self._kept: tuple[Hashable, list[weakref.ref[Tensor]], Tensor] | None = None

    def follow(self, make: Callable[..., Tensor], *sources: Any) -> Tensor:
        """What ``make`` gives for these, of which some are tensors."""
        tensors = [source for source in sources if isinstance(source, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):  # whose changes are not counted
            return make(*sources)
        state = tuple(
            (source.data_ptr(), source._version) if isinstance(source, Tensor) else source
            for source in sources
        )
        kept = self._kept
        if kept is not None and kept[0] == state and [id(one()) for one in kept[1]] == list(map(id, tensors)):
            return kept[2]
        with torch.inference_mode(False):  # autograd may keep it
            made = make(*sources)
        self._kept = state, [weakref.ref(tensor) for tensor in tensors], made
        return made


class Call(NamedTuple):
    """How to run a product whose operands were checked."""

    run: Run
    workspace: int  # elements
    form: Form  # of the result
    packed: Packed | None = None


class Plan(NamedTuple):
    memory: Tensor
    kernel: int  # one of those that walk it


State = tuple[int, ...]


# Held while something is derived from a pattern or its tensors are written to here, and, on CUDA devices,
# from where a kernel's operands are settled until it is launched. So a thread sees the pattern from before an
# update or from after it. Finalizers, which may run anywhere, do not take it.
_lock = RLock()


def exclusive() -> AbstractContextManager[object]:
    """Return what keeps other threads from updating patterns and from looking at their tensors."""
    return _lock


def _renew_lock() -> None:
    """Free the lock in a forked process, where the thread that may have held it does not exist."""
    global _lock
    _lock = RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _state(index: Index) -> State:
    """What changes when the tensors of a pattern on a CUDA device are written to or moved.

    Tensors made in inference mode count no writes: of these only `BlockPattern.update_` is noticed.
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
    """A pattern in every form that was asked for so far.

    Attributes:
        generation: how often its contents have changed: never on the CPU, where each has its own object.
        run: a product like one that has run before, and its result; None for any other, or one out of the
            ordinary (see `_C.Calls`).
        find: the call that was kept under a key, or None.
        packs: whether values are kept packed from call to call; see `BlockSparseLinear.pack`.
        watch: what looks for writes that PyTorch does not count; None on the CPU and for tensors of its own.
        plain: those that are kept on the CPU.
    """

    @torch.inference_mode(False)  # what is made in it could not be written outside of it
    def __init__(self, index: Index, watched: bool = True) -> None:
        check_index(index)
        shape, (bn, bk), nnz = index.shape, index.block_shape, index.col_indices.shape[0]
        self.shape, self.block_shape, self.values_shape = shape, (bn, bk), (nnz, bn, bk)
        self.device = index.col_indices.device
        self.generation = 0
        self.packs = False
        self.plain = Expanded()
        self._packed: dict[tuple[int, int, int], Packed] = {}
        self.state: State = ()
        self._tensors = tuple(weakref.ref(tensor) for tensor in index[:3])
        sizes = shape[0] // bn + 1, nnz, nnz, shape[1] // bk + 1, nnz, nnz
        memory = [area.view(torch.int32) for area in _allocate((4 * size for size in sizes), self.device)]
        self._snapshot, self._columns = memory[:3], memory[3:]
        pointers = (tensor.data_ptr() for tensor in memory)
        self.descriptor = _C.Pattern(bn, bk, *shape, nnz, *pointers)
        self._plans: dict[tuple[int, int], Plan] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}  # that may be reading
        self._arrivals: list[torch.cuda.Event] = []  # of all that is written
        self._places: Tensor | None = None
        self._transposed: Prepared | None = None
        self._calls: dict[Hashable, Call] = {}
        self.find: Callable[[Hashable], Call | None] = self._calls.get
        self._kept = _C.Calls(TENSORS)
        self.run: Callable[..., Tensor | None] = self._kept.run
        self.watch = watch(self.device) if self.device.type == "cuda" and watched else None
        self._place = -1 if self.watch is None else self.watch.add(self)
        self._memory: list[torch.UntypedStorage] = []  # which is looked at, and stays while it is
        self._write(index)

    def is_of(self, index: Index) -> bool:
        """Return True if it was made of these tensors as they are; on CUDA, of tensors of this size."""
        if index.col_indices.device != self.device or index.col_indices.shape[0] != self.values_shape[0]:
            return False
        on_cpu = self.device.type == "cpu"
        return not on_cpu or _C.pattern_holds(self.descriptor, *(tensor.data_ptr() for tensor in index[:3]))

    def snapshot(self) -> tuple[int, int, int] | None:
        """Return where the copies of the tensors lie on the CPU, None on a CUDA device."""
        crow, col, slot = (tensor.data_ptr() for tensor in self._snapshot)
        return (crow, col, slot) if self.device.type == "cpu" else None

    def launching(self) -> AbstractContextManager[object]:
        """Return what is held from settling a product's operands until it is launched."""
        return nullcontext() if self.device.type == "cpu" else exclusive()

    def index(self) -> Index:
        """The pattern as kernels read it: copies of the tensors it was made of."""
        crow, col, slot = self._snapshot
        return Index(crow, col, slot, self.shape, self.block_shape)

    def columns(self) -> list[Tensor]:
        """[col_ptr [C + 1], row_idx [nnz], col_slot [nnz]], int32: the same blocks by column."""
        self._wait()
        return self._columns

    def transposed(self) -> "Prepared":
        """The pattern of the transposed weight, whose values have the same slots."""
        with _lock:
            if self._transposed is None:
                self._transposed = Prepared(self._transposed_index(), watched=False)
            return self._transposed

    def _transposed_index(self) -> Index:
        col_ptr, row_idx, col_slot = self.columns()
        return Index(col_ptr, row_idx, col_slot, self.shape[::-1], self.block_shape[::-1])

    @torch.inference_mode(False)
    def block_indices(self) -> tuple[Tensor, Tensor]:
        """(rows, cols), each [nnz] int64: where the block at every slot lies."""
        with _lock:
            return self._block_indices()

    def _block_indices(self) -> tuple[Tensor, Tensor]:
        if self._places is None:
            (memory,) = _allocate((16 * self._snapshot[1].shape[0],), self.device)
            self._wait()
            places = memory.view(torch.int64).view(2, -1)
            self._write_places(places)
            self._places = places
            self._record()
        elif self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            self._wait()
            self._streams[stream.cuda_stream] = stream
            self._places.record_stream(stream)
        return self._places[0], self._places[1]

    def stop(self) -> None:
        """Have calls that are made from now on wait for what is written next, and that for those before."""
        self._forget_calls()
        self.wait_for_readers()

    @torch.inference_mode(False)
    def rewrite(self, index: Index) -> None:
        """Follow changed contents on a CUDA device: everything derived is written anew, where it is."""
        self.generation += 1
        self.stop()
        self._write(index)
        if self._transposed is not None:
            self._transposed.rewrite(self._transposed_index())

    def wait_for_readers(self) -> None:
        """Lets the current stream wait until no other one reads the pattern or its plans any more."""
        current = torch.cuda.current_stream(self.device)
        for stream in self._streams.values():
            if stream != current:
                current.wait_stream(stream)
        if self._transposed is not None:
            self._transposed.stop()

    def follow(self) -> None:
        """Look whether tensors on a CUDA device that were written to hold something else.

        DistributedDataParallel writes all buffers of a model before every forward pass, in general with
        what they hold. So all patterns of the device are looked at together, and the host waits once.
        """
        _refuse_capture()
        written = [
            (entry, index)
            for entry in list(_entries.values())
            if entry.device == self.device and (index := entry._written()) is not None
        ]
        same = torch.equal(
            torch.cat([tensor for _, index in written for tensor in index[:3]]),
            torch.cat([tensor for entry, _ in written for tensor in entry._snapshot]),
        )
        for entry, index in written:
            if same or all(map(torch.equal, index[:3], entry._snapshot)):
                entry._note(index)
            elif entry is self:
                validate(index)
                entry.rewrite(index)

    def call(self, key: Hashable, product: _C.Product, op: int, itemsize: int, form: Form) -> Call:
        """How to run the product on the current device and stream, kept under the key."""
        with _lock, _on(self.device):
            kernel, plan_id = product.resolve()
            plan_key = _C.plan_key(self.descriptor, kernel, op)
            if plan_id:
                memory = self._plan(op, kernel, plan_id).memory
                product.use_plan(memory.data_ptr(), memory.numel(), plan_key)
            packed = self._pack(product, op, plan_id, plan_key) if self.packs else None
            workspace_bytes = product.workspace_size()
            if self.device.type == "cuda":
                self._read_on(torch.cuda.current_stream(self.device))
        if len(self._calls) >= MAX_CALLS:
            self._forget_calls()
        here = self.device.type == "cpu" or self.device.index == torch.cuda.current_device()
        run = product.run if here else _run_on(self.device, product.run)
        self._calls[key] = call = Call(run, -(-workspace_bytes // itemsize), form, packed)
        return call

    def keep_packed(self, keep: bool) -> None:
        """Whether values are kept packed from call to call; what was kept is packed anew in any case."""
        self.packs = keep
        self._forget_calls()
        self._packed.clear()
        self.plain = Expanded()

    def keep(self, request: Request, product: _C.Product, call: Call) -> None:
        """Lets `run` do the same from now on."""
        # On a GPU it may pack, but not in a graph that is being captured.
        if not self.packs or self.device.type == "cpu":
            workspace = (Tensor.new_empty, (call.workspace,)) if call.workspace else None
            self._kept.keep(*request, product, allocation(call.form), workspace)

    def _forget_calls(self) -> None:
        self._calls.clear()
        self._kept.clear()

    def follow_writes(self) -> bool:
        """Follow tensors on a CUDA device that were written to; return False if they were not."""
        index = self._held()
        if index is None or all(map(torch.equal, index[:3], self._snapshot)):
            return False
        validate(index)
        self.rewrite(index)
        return True

    def distrust(self) -> None:
        """Have the next call look at the tensors itself, which hold no pattern."""
        self.state = ()
        crow, col, slot = (reference() for reference in self._tensors)
        KNOWN.forget((crow, col, slot, self.shape, self.block_shape))
        if self.watch is not None:
            self.watch.rest(self._place)

    def forget(self) -> None:
        """Look at the tensors no more: they are gone, or somebody else's."""
        if self.watch is not None:
            self.watch.remove(self._place)

    def _held(self) -> Index | None:
        """The tensors this was made of, if they are still there, and of the same size."""
        crow, col, slot = (reference() for reference in self._tensors)
        if crow is None or col is None or slot is None:
            return None
        index = Index(crow, col, slot, self.shape, self.block_shape)
        return index if self.is_of(index) else None

    def _written(self) -> Index | None:
        """The tensors this was made of, if they may hold something else by now."""
        index = self._held()
        return None if index is None or _state(index) == self.state else index

    def _write(self, index: Index) -> None:
        """Writes copies, the transpose and all plans on the current stream."""
        col_ptr, row_idx, col_slot = self._columns
        columns = col_ptr.data_ptr(), row_idx.data_ptr(), col_slot.data_ptr()
        if self.device.type == "cpu":
            self._copy(index)
            validate(self.index())  # the copy: others may write to the tensors at any time
            _C.pattern_transpose(self.descriptor, *columns)
        else:
            _refuse_capture()
            with _on(self.device):
                self._copy(index)
                workspace = self._scratch(_C.pattern_device_transpose_size(self.descriptor))
                stream = torch.cuda.current_stream(self.device).cuda_stream
                _C.pattern_device_transpose(
                    self.descriptor, *columns, workspace.data_ptr(), workspace.numel(), stream
                )
                for (op, _), plan in self._plans.items():
                    self._build(op, plan)
                if self._places is not None:
                    self._write_places(self._places)
                self._arrivals.clear()
                self._record()
        self._note(index)

    def _note(self, index: Index) -> None:
        """Note that these tensors hold what was copied."""
        self.state = _state(index)
        if self.watch is not None:
            memory = [tensor.untyped_storage() for tensor in index[:3]]
            self.watch.point(self._place, index, self.index())
            self._memory = memory

    def _copy(self, index: Index) -> None:
        for snapshot, tensor in zip(self._snapshot, index[:3], strict=True):
            snapshot.copy_(tensor)

    def _write_places(self, places: Tensor) -> None:
        for place, indices in zip(places, block_indices(self.index()), strict=True):
            place.copy_(indices)

    def _record(self) -> None:
        """Notes that the current stream was asked to write something."""
        if self.device.type == "cuda":
            self._arrivals.append(torch.cuda.current_stream(self.device).record_event())

    @torch.inference_mode(False)
    def _plan(self, op: int, kernel: int, plan_id: int) -> Plan:
        """The plan for kernels with that `plan` in the C interface, on the current device."""
        plan = self._plans.get((op, plan_id))
        if plan is None:
            (memory,) = _allocate(_C.plan_device_size(self.descriptor, kernel, op)[:1], self.device)
            plan = Plan(memory, kernel)
            self._wait()
            self._build(op, plan)
            self._record()
            self._plans[op, plan_id] = plan
        return plan

    def _pack(self, product: _C.Product, op: int, plan_id: int, plan_key: int) -> Packed | None:
        """Lets the product read packed values, where its kernel wants them so.

        Not in a graph that is being captured: its replays would not see the values change.
        """
        size = product.packed_size()  # 0 on the CPU
        if size == 0 or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(self.device)
        key = op, plan_id, stream.cuda_stream  # what one stream packs another may not have to wait for
        packed = self._packed.get(key)
        if packed is None:
            (memory,) = _allocate((size,), self.device)
            memory.record_stream(stream)
            packed = self._packed[key] = Packed(product, memory, plan_key)
        product.use_packed(packed.memory.data_ptr(), size, packed.plan_key)
        return packed

    def _build(self, op: int, plan: Plan) -> None:
        workspace = self._scratch(_C.plan_device_size(self.descriptor, plan.kernel, op)[1])
        _C.plan_device_build(
            self.descriptor,
            plan.kernel,
            op,
            plan.memory.data_ptr(),
            plan.memory.numel(),
            workspace.data_ptr(),
            workspace.numel(),
            torch.cuda.current_stream(self.device).cuda_stream,
        )

    def _scratch(self, size: int) -> Tensor:
        """Memory for what the current stream does next; to be held until that was asked for."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _read_on(self, stream: torch.cuda.Stream) -> None:
        """Makes what was written safe to read on a stream, also after this object is gone."""
        self._wait()
        self._streams[stream.cuda_stream] = stream
        for tensor in (*self._snapshot, *self._columns, *(plan.memory for plan in self._plans.values())):
            tensor.record_stream(stream)

    def _wait(self) -> None:
        """Lets the current stream wait for all that was written.

        A graph cannot wait for what is not part of it, but whatever it needs was asked for before its
        capture began, and so before any replay.
        """
        if self._arrivals and not torch.cuda.is_current_stream_capturing():
            for event in self._arrivals:
                torch.cuda.current_stream(self.device).wait_event(event)


_Key = tuple[int, int, int, tuple[int, int], tuple[int, int]]
_entries: dict[_Key, Prepared] = {}


def prepared(index: Index, looking: bool = False) -> Prepared:
    """What is kept of a pattern, as its tensors are now.

    Args:
        index: the pattern.
        looking: whether to find writes on CUDA devices that PyTorch does not count, too, see `_writes`: for
            forward products, as gradients are those of the pattern that these have read.
    """
    entry: Prepared | None = KNOWN.find(index, looking)
    return _looked_up(index, looking) if entry is None else entry


def content_of(index: Index) -> tuple[object, int]:
    """Return what is equal for as long as a pattern's tensors hold what they do now."""
    entry = prepared(index)
    return entry, entry.generation


def _looked_up(index: Index, looking: bool) -> Prepared:
    check_index(index)
    with _lock:
        entry = _entries.get(_key(index))
        if entry is None or not entry.is_of(index):
            entry = _prepare(index, entry)
        elif entry.device.type == "cuda":
            known = entry.state == _state(index)
            if known and looking and entry.watch is not None and not torch.cuda.is_current_stream_capturing():
                entry.watch.look()
            if entry.state != _state(index):
                entry.follow()
        KNOWN.keep(index, entry, entry.snapshot(), None if entry.watch is None else entry.watch.looks)
        return entry


def _prepare(index: Index, before: Prepared | None) -> Prepared:
    key, entry = _key(index), Prepared(index)
    if before is None:
        for tensor in index[:3]:
            weakref.finalize(tensor, _forget, key).atexit = False
    else:
        entry.packs = before.packs
        before.forget()
    _entries[key] = entry
    return entry


def _key(index: Index) -> _Key:
    crow, col, slot, shape, block_shape = index
    return id(crow), id(col), id(slot), shape, block_shape


def _forget(key: _Key) -> None:
    entry = _entries.pop(key, None)
    if entry is not None:
        entry.forget()
    KNOWN.forget(key)


@contextmanager
def update_of(index: Index) -> Iterator[None]:
    """Within it a pattern may be given other contents. What is derived from them follows, without a wait."""
    with _lock:
        key = _key(index)
        entry = _entries.get(key)
        if entry is None or entry.device.type == "cpu" or not entry.is_of(index):
            yield  # calls find out by themselves
            return
        _refuse_capture()
        KNOWN.forget(key)  # so that calls of other threads wait for the lock
        entry.stop()
        yield
        entry.rewrite(index)


# ---- products ----

# What products are to run on: 0 whichever is best; k the kernel k - 1 of ``_C.kernels()`` and no other; -k
# those whose names begin with ``_preferences[k - 1]``, where one of them computes the product. One for the
# process, not for a thread: backward passes run in threads of PyTorch's.
_asked_kernel = 0
_asked: dict[object, int] = {}  # all that are in force; the last one counts
_asking = Lock()
_preferences: list[str] = []


@contextmanager
def ask_for(kernel: int) -> Iterator[None]:
    """Within it products run on what the number stands for.

    Of several the last one that was entered counts, whichever is left first: threads do not wait for others.
    """
    global _asked_kernel
    own = object()
    with _asking:
        _asked[own] = _asked_kernel = kernel
    try:
        yield
    finally:
        with _asking:
            del _asked[own]
            _asked_kernel = next(reversed(_asked.values()), 0)


def use_kernel(name: str) -> AbstractContextManager[None]:
    """Within it every product runs on the named kernel of ``_C.kernels()``, or raises."""
    names = [kernel.name for kernel in _kernels()]
    if name not in names:
        raise InvalidArgumentError(f"name: one of {names} expected, got {name!r}")
    return ask_for(names.index(name) + 1)


def prefer_kernels(prefix: str) -> AbstractContextManager[None]:
    """Within it products run on kernels whose names begin so, where these compute them."""
    if prefix not in _preferences:
        _preferences.append(prefix)
    return ask_for(-1 - _preferences.index(prefix))


def preference() -> str:
    """What kernels' names are to begin with, or nothing."""
    return _preferences[-1 - _asked_kernel] if _asked_kernel < 0 else ""


def add_measurement(
    product: _C.Product, device: _C.DeviceInfo, kernel: int, microseconds: float, dense_microseconds: float
) -> None:
    """See ``ts_measurement_add``; `measurements_changed` is to be called after the last."""
    product.add_measurement(device, kernel, microseconds, dense_microseconds)
    _devices_to_choose_for.add(("cpu", "cuda")[device.device])


def measurements_changed() -> None:
    """Has every product choose anew."""
    _selected.cache_clear()
    for entry in list(_entries.values()):
        entry._forget_calls()


# All that decides whether a product can run, and how, makes up a key, but for the alignment of its
# operands. What a key stands for is checked and resolved once, so that later calls cost one look-up.


def dds(
    op: int,
    source: Tensor,
    values: Tensor,
    pattern: Prepared,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    feature_major: bool = False,
    metadata: Tensor | None = None,
    scales: Tensor | None = None,
    transposed: bool = False,
    gate: Tensor | None = None,
) -> Tensor:
    """x Wᵀ or y W, as ``op`` says. With ``transposed`` the values are those of Wᵀ."""
    if transposed:
        check_nothing_added(bias, residual, activation, gate)
        pattern, op = pattern.transposed(), DDS_NN - op
    if pattern.packs and source.is_cpu and not (metadata is None and scales is None):
        values = pattern.plain.follow(_expanded, values, metadata, scales, source.dtype)
        metadata = scales = None
    # Either of the two takes the same way.
    other = check_one(residual, gate)
    gated = gate is not None
    request = (
        op,
        source,
        values,
        bias,
        other,
        activation,
        feature_major,
        metadata,
        scales,
        _asked_kernel,
        gated,
    )
    result = pattern.run(*request)
    if result is not None:
        return result
    with pattern.launching():
        return _dds(request, pattern)


def _dds(request: Request, pattern: Prepared) -> Tensor:
    """The product that is asked for, which `Prepared.run` does not know."""
    op, source, values, bias, other, activation, feature_major, metadata, scales, _, gated = request
    context = _context(source)
    key: Hashable = (
        op,
        source.shape,
        source.stride(),
        source.dtype,
        source.get_device(),
        values.shape,
        values.stride(),
        values.dtype,
        values.get_device(),
        None if bias is None else _form(bias),
        None if other is None else _form(other),
        gated,
        None if metadata is None else _form(metadata),
        None if scales is None else _form(scales),
        activation,
        feature_major,
        context,
    )
    if pattern.packs and source.is_cuda:
        key = key, torch.cuda.is_current_stream_capturing()
    call = pattern.find(key)
    source_at, values_at = source.data_ptr(), values.data_ptr()
    other_at = 0 if other is None else other.data_ptr()
    metadata_at = 0 if metadata is None else metadata.data_ptr()
    scales_at = 0 if scales is None else scales.data_ptr()
    addresses = source_at | values_at | other_at | metadata_at
    if call is None or (addresses % ALIGNMENT and source.is_cuda):
        name, index = "x" if op == DDS_NT else "y", pattern.index()
        residual, gate = (None, other) if gated else (other, None)
        check_dds(name, source, values, index, bias, residual, metadata, scales, gate)
        (operand, lines), weight = usable(name, source), aligned(values)
        kept = None if metadata is None else aligned(metadata)
        near, other_lines = (None, None) if other is None else like_result(other, feature_major)
        if operand is not source or weight is not values or near is not other or kept is not metadata:
            residual, gate = (None, near) if gated else (near, None)
            return dds(
                op,
                operand,
                weight,
                pattern,
                bias,
                residual,
                activation,
                feature_major,
                kept,
                scales,
                gate=gate,
            )
        form = result_form(source, index.shape[op], feature_major)
        stored = storage_of(values, metadata, scales)
        added = {"residual": other_lines, "gated": gated, "activation": activation}
        product = _dds_product(op, pattern, source, lines, form, context, added | stored)
        call = pattern.call(key, product, op, source.itemsize, form)
        pattern.keep(request, product, call)
    result = empty(source, call.form)
    bias = None if bias is None else bias.contiguous()
    bias_at = 0 if bias is None else bias.data_ptr()
    workspace = source.new_empty(call.workspace) if call.workspace else None
    workspace_at = 0 if workspace is None else workspace.data_ptr()
    if call.packed is not None:
        call.packed.follow(values, pattern.generation, context[1])
    if op == DDS_NT:
        x_at, y_at = source_at, result.data_ptr()
    else:
        x_at, y_at = result.data_ptr(), source_at
    call.run(x_at, y_at, values_at, bias_at, other_at, workspace_at, context[1], metadata_at, scales_at)
    return result


def sdd(y: Tensor, x: Tensor, pattern: Prepared) -> Tensor:
    """yᵀ x on the pattern."""
    result = pattern.run(SDD_TN, y, x, None, None, 0, False, None, None, _asked_kernel, False)
    if result is not None:
        return result
    out = x.new_empty(*pattern.values_shape)
    write_sdd(y, x, out, pattern, False)
    return out


def sdd_with_bias(y: Tensor, x: Tensor, pattern: Prepared) -> tuple[Tensor, Tensor]:
    """yᵀ x on the pattern, and the sums over tokens of y: the gradients of a weight and of its bias."""
    out, of_bias = x.new_empty(*pattern.values_shape), y.new_empty(pattern.shape[0])
    write_sdd(y, x, out, pattern, False, of_bias)
    return out, of_bias


def activation_gradient(grad: Tensor, z: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """The gradient of z from that of its activation, and its sums over tokens, that of the bias in z.

    Both are contiguous, aligned, alike, and on a CUDA device.
    """
    features, dtype = z.shape[-1], DTYPES[z.dtype]
    tokens = z.numel() // features
    result, of_bias = torch.empty_like(z), z.new_empty(features)
    with _on(z.device):
        workspace = z.new_empty(
            _C.activation_gradient_workspace_size(dtype, tokens, features), dtype=torch.uint8
        )
        _C.activation_gradient(
            dtype,
            activation,
            tokens,
            features,
            z.data_ptr(),
            grad.data_ptr(),
            result.data_ptr(),
            of_bias.data_ptr(),
            workspace.data_ptr(),
            workspace.numel(),
            current_stream(z.get_device()),
        )
    return result, of_bias


def gate(y: Tensor, by: Tensor | None, activation: int) -> Tensor:
    """y ⊙ activation(by), or of the halves of y, of what `multiplies_by_gate` says yes to."""
    tokens, features, gate_rows, rows = _operands(y, by)
    result = y.new_empty(*y.shape[:-1], features)
    run, stream = _C.gate, current_stream(y.get_device())
    if y.get_device() != current_device():
        run = _run_on(y.device, run)
    code, here = DTYPES[y.dtype], (result.data_ptr(), features)
    run(code, activation, tokens, features, gate_rows, rows, here, stream)
    return result


def gate_gradient(
    grad: Tensor, y: Tensor, by: Tensor | None, activation: int
) -> tuple[Tensor, Tensor | None]:
    """The gradients of y and ``by`` from that of what `gate` gives, which has rows as `row_pitch` reads."""
    tokens, features, gate_rows, rows = _operands(y, by)
    of_y, of_by = y.new_empty(y.shape), None if by is None else by.new_empty(by.shape)
    *_, of_gate, of_factor = _operands(of_y, of_by)
    run, stream = _C.gate_gradient, current_stream(y.get_device())
    if y.get_device() != current_device():
        run = _run_on(y.device, run)
    pitch = row_pitch(grad)
    assert pitch is not None
    given = grad.data_ptr(), pitch
    run(DTYPES[y.dtype], activation, tokens, features, gate_rows, rows, given, of_gate, of_factor, stream)
    return of_y, of_by


def multiplies_by_gate(y: Tensor, by: Tensor | None) -> bool:
    """Whether a kernel reads them where they lie; of halves both in y."""
    if not may_multiply_by_gate(y, 32 if by is None else 16) or row_pitch(y) is None:
        return False
    return by is None or row_pitch(by) is not None


def may_multiply_by_gate(y: Tensor, multiple: int) -> bool:
    """Whether a kernel does, once they are row-major; ``multiple``: of which y's features are one."""
    return y.is_cuda and y.dtype in _GATED and y.shape[-1] % multiple == 0


def _operands(y: Tensor, by: Tensor | None) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """(tokens, features, rows of the gate, of the factor); rows are an address, and elements to the next."""
    pitch, features, start = row_pitch(y), y.shape[-1], y.data_ptr()
    assert pitch is not None
    tokens = y.numel() // features
    if by is None:
        features //= 2
        return tokens, features, (start, pitch), (start + features * y.itemsize, pitch)
    gate_pitch = row_pitch(by)
    assert gate_pitch is not None
    return tokens, features, (by.data_ptr(), gate_pitch), (start, pitch)


def sdd_into(y: Tensor, x: Tensor, out: Tensor, pattern: Prepared, accumulate: bool) -> None:
    """yᵀ x on the pattern, written or added to ``out``."""
    check_sdd(y, x, pattern.index(), out)
    check_separate(out, y, x)
    write_sdd(y, x, out, pattern, accumulate)


def write_sdd(
    y: Tensor,
    x: Tensor,
    out: Tensor,
    pattern: Prepared,
    accumulate: bool,
    of_bias: Tensor | None = None,
    accumulate_bias: bool = False,
) -> None:
    """`sdd_into`, where ``out`` is known to be contiguous and aligned, and apart from y and x.

    ``of_bias``: [out_features] for the sums over tokens of y, likewise, or None.
    """
    with pattern.launching():
        _write_sdd(y, x, out, pattern, accumulate, of_bias, accumulate_bias)


def _write_sdd(
    y: Tensor,
    x: Tensor,
    out: Tensor,
    pattern: Prepared,
    accumulate: bool,
    of_bias: Tensor | None,
    accumulate_bias: bool,
) -> None:
    context = _context(x)
    sums_y = None if of_bias is None else (of_bias.dtype, accumulate_bias)
    key = (SDD_TN, _form(y), _form(x), accumulate, sums_y, out.dtype, context)
    call = pattern.find(key)
    y_at, x_at = y.data_ptr(), x.data_ptr()
    if call is None or ((y_at | x_at) % ALIGNMENT and x.is_cuda):
        check_sdd(y, x, pattern.index(), out)
        (usable_y, y_lines), (usable_x, x_lines) = usable("y", y), usable("x", x)
        if usable_y is not y or usable_x is not x:
            return _write_sdd(usable_y, usable_x, out, pattern, accumulate, of_bias, accumulate_bias)
        result_dtype = -1 if out.dtype == x.dtype else DTYPES[out.dtype]
        bias_dtype = -1 if of_bias is None or of_bias.dtype == x.dtype else DTYPES[of_bias.dtype]
        product = _product(
            SDD_TN,
            pattern,
            x,
            x_lines,
            y_lines,
            context,
            accumulate=accumulate,
            result_dtype=result_dtype,
            bias_gradient=of_bias is not None,
            bias_gradient_dtype=bias_dtype,
            accumulate_bias=accumulate_bias,
        )
        call = pattern.call(key, product, SDD_TN, x.itemsize, (out.shape, None))
        if not accumulate and of_bias is None and out.dtype == x.dtype:
            pattern.keep((SDD_TN, y, x, None, None, 0, False, None, None, context[0], False), product, call)
    workspace = x.new_empty(call.workspace) if call.workspace else None
    workspace_at = 0 if workspace is None else workspace.data_ptr()
    bias_at = 0 if of_bias is None else of_bias.data_ptr()
    call.run(x_at, y_at, out.data_ptr(), bias_at, 0, workspace_at, context[1])


def expand(values: Tensor, pattern: Prepared) -> Tensor:
    """The dense W."""
    check_values("values", values, pattern.index())
    dense = values.new_zeros(pattern.shape)
    # Written through a view: building the blocks and then transposing them takes twice as long.
    with pattern.launching():
        blocks_of(dense, pattern.block_shape)[pattern.block_indices()] = values
    return dense


def gather(dense: Tensor, pattern: Prepared) -> Tensor:
    """The values of a dense W."""
    check_dense(dense, pattern.index())
    with pattern.launching():
        return blocks_of(dense, pattern.block_shape)[pattern.block_indices()].contiguous()


def expand_values(
    values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Values as a plain storage has them, of that dtype unless they have one."""
    nnz, bn, bk = values.shape[0], values.shape[1], values.shape[2] * (1 if metadata is None else 2)
    if scales is None:
        dtype = values.dtype
    plain = values.new_empty(nnz, bn, bk, dtype=dtype)
    device, stream = values.device, 0
    product = _C.Product(
        _blocks(nnz, (bn, bk)),
        DDS_NT,
        DTYPES[dtype],
        int(values.is_cuda),
        0,
        **storage_of(values, metadata, scales),
    )
    with _on(device):
        if values.is_cuda:
            values, stream = aligned(values), torch.cuda.current_stream(device).cuda_stream
            metadata = None if metadata is None else aligned(metadata)
        metadata_at = 0 if metadata is None else metadata.data_ptr()
        scales_at = 0 if scales is None else scales.data_ptr()
        product.expand(values.data_ptr(), metadata_at, scales_at, plain.data_ptr(), plain.nbytes, stream)
    return plain


def _expanded(values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"x must have one of the dtypes {list(DTYPES)}, got {dtype}")
    check_stored(values, metadata, scales)
    return expand_values(values, metadata, scales, dtype)


def compress(values: Tensor, mask: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """(compressed, metadata) of plain values, where a mask keeps two of four, or those of the transpose."""
    nnz, bn, bk = values.shape
    compressed, metadata = empty_compressed(values, transposed)
    dtype, stream = {**DTYPES, **QUANTIZED}[values.dtype], 0
    with _on(values.device):
        if values.is_cuda:
            values, mask = aligned(values), aligned(mask)
            stream = torch.cuda.current_stream(values.device).cuda_stream
        _C.values_compress(
            _blocks(nnz, (bn, bk)),
            int(values.is_cuda),
            dtype,
            values.data_ptr(),
            mask.data_ptr(),
            transposed,
            compressed.data_ptr(),
            metadata.data_ptr(),
            stream,
        )
    return compressed, metadata


def empty_compressed(values: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    nnz, rows, columns = values.shape
    if transposed:
        rows, columns = columns, rows
    compressed = values.new_empty(nnz, rows, columns // 2)
    return compressed, values.new_empty(nnz, columns // COMPRESSIBLE, rows, dtype=torch.int32)


def _blocks(nnz: int, block_shape: tuple[int, int]) -> _C.Pattern:
    """Some pattern of so many blocks, of which only sizes are read."""
    (bn, bk), rows = block_shape, min(nnz, 1 << 16)
    columns = -(-nnz // rows) if rows else 0
    return _C.Pattern(bn, bk, rows * bn, columns * bk, nnz, 0, 0, 0)


def storage_of(values: Tensor, metadata: Tensor | None, scales: Tensor | None) -> dict[str, Any]:
    """How values are stored, as `_C.Product` takes it."""
    return {
        "storage": int(metadata is not None),
        "values_dtype": -1 if scales is None else QUANTIZED[values.dtype],
        "row_scales": scales is not None and scales.dim() == 2,
    }


def blocks_of(matrix: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """[out, in] as a view [R, C, bn, bk]."""
    (bn, bk), (rows, cols) = block_shape, matrix.shape
    return matrix.reshape(rows // bn, bn, cols // bk, bk).transpose(1, 2)


def validate(index: Index) -> None:
    """Raises InvalidPatternError unless the tensors hold a pattern; the host waits for those of a GPU."""
    host = [tensor.cpu() for tensor in index[:3]]
    addresses = (tensor.data_ptr() for tensor in host)
    try:
        _C.pattern_validate(_C.Pattern(*index.block_shape, *index.shape, len(host[1]), *addresses))
    except InvalidPatternError as error:
        text = str(error).replace("row_ptr", "crow_indices").replace("col_idx", "col_indices")
        raise InvalidPatternError(text) from None


def block_indices(index: Index) -> tuple[Tensor, Tensor]:
    """(rows, cols), each [nnz] int64: where the block at every slot lies."""
    crow, col, slot = index[:3]
    nnz, rows = col.shape[0], crow.shape[0] - 1
    every_row = torch.arange(rows, device=crow.device)
    by_entry = torch.repeat_interleave(every_row, crow.diff(), output_size=nnz)
    places = slot.long()
    found = torch.empty(2, nnz, dtype=torch.int64, device=crow.device)
    found[0, places], found[1, places] = by_entry, col.long()
    return found[0], found[1]


def prefers_dense(x: Tensor, index: Index, storage: dict[str, Any]) -> bool:
    """Whether writing W out and a dense product are estimated to take less time than the sparse one."""
    what = _to_choose_by(x, index)
    faster: bool = what is not None and _is_dense_faster(*what, _AUTO, tuple(storage.items()))
    return faster


def multiplies_compressed(x: Tensor, index: Index) -> bool:
    """Whether a kernel of the device at hand multiplies 2:4 values by x as they are, and is chosen for it."""
    what = _to_choose_by(x, index)
    reads: bool = what is not None and _is_compressed_read(*what, _SPARSE, (("storage", _COMPRESSED),))
    return reads


def _to_choose_by(x: Tensor, index: Index) -> tuple[Any, ...] | None:
    """What of a product decides on its kernel; None where there is none to choose."""
    if x.device.type not in _devices_to_choose_for or x.dtype not in DTYPES:
        return None
    tokens, nnz = _tokens(x.numel() // index.shape[1]), index.col_indices.shape[0]
    if tokens is None:
        return None
    tf32 = x.is_cuda and x.dtype == torch.float32 and tf32_allowed()
    return tokens, nnz, index.shape, index.block_shape, x.dtype, x.get_device(), tf32


# Where there is something to choose by: estimates, or on the CPU what was measured.
_devices_to_choose_for = {"cuda"}


def _tokens(tokens: int) -> int | None:
    """The number of tokens to choose for.

    Compiled code serves many: those up to the next power of two share a choice. A program that torch.export
    makes (strict=False) has one for all, that of its example, and none for what the example cannot tell.
    """
    if is_exporting() and not torch.compiler.is_dynamo_compiling():
        return of_example(tokens)
    if not torch.compiler.is_compiling():
        return tokens
    limit = 1
    while limit < tokens:
        limit *= 2
    return limit


@constant_when_compiled
def _is_dense_faster(*what: Any) -> bool:
    return _selected(*what, preference()) == EXPAND_AND_RUN_DENSE


@constant_when_compiled
def _is_compressed_read(*what: Any) -> bool:
    return bool(_kernels()[_selected(*what, preference())].storages >> _COMPRESSED & 1)


@lru_cache(MAX_CALLS)
def _selected(
    tokens: int,
    nnz: int,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    dtype: torch.dtype,
    device: int,
    tf32: bool,
    policy: int,
    storage: tuple[tuple[str, Any], ...],
    prefer: str,
) -> int:
    product = _C.Product(
        _C.Pattern(*block_shape, *shape, nnz, 0, 0, 0),
        DDS_NT,
        DTYPES[dtype],
        int(device >= 0),
        tokens,
        precision=int(tf32),
        policy=policy,
        ldx=shape[1],
        ldy=shape[0],
        prefer=prefer,
        **dict(storage),
    )
    return product.select(_device_info(device))[0]


@cache
def _kernels() -> list[_C.KernelInfo]:
    return _C.kernels()


@cache
def _device_info(ordinal: int) -> _C.DeviceInfo:
    """Of a CUDA device, or of the CPU, which PyTorch gives the number -1."""
    return _C.device_info(int(ordinal >= 0), ordinal)


def _context(operand: Tensor) -> Context:
    """What decides on a call besides its arguments."""
    device = operand.get_device()
    if device < 0:
        return _asked_kernel, 0, device, 0
    tf32 = operand.dtype == torch.float32 and tf32_allowed()
    return _asked_kernel, current_stream(device), current_device(), int(tf32)


def _form(tensor: Tensor) -> tuple[object, ...]:
    """All of a tensor but its memory. Only tensors of the CPU (-1) and of CUDA devices come here."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _dds_product(
    op: int,
    pattern: Prepared,
    source: Tensor,
    lines: Lines,
    form: Form,
    context: Context,
    options: dict[str, Any],
) -> _C.Product:
    shape, strides = form
    result_lines = (lines[0], shape[-1], 0) if strides is None else (lines[0], strides[-1], 1)
    x, y = (lines, result_lines) if op == DDS_NT else (result_lines, lines)
    return _product(op, pattern, source, x, y, context, **options)


def _product(
    op: int,
    pattern: Prepared,
    like: Tensor,
    x: Lines,
    y: Lines,
    context: Context,
    residual: Lines | None = None,
    **options: Any,
) -> _C.Product:
    kernel, _, device, precision = context
    return _C.Product(
        pattern.descriptor,
        op,
        DTYPES[like.dtype],
        int(device >= 0),
        x[0],
        precision=precision,
        kernel=max(kernel, 0),
        prefer=_preferences[-1 - kernel] if kernel < 0 else "",
        x_layout=x[2],
        ldx=x[1],
        y_layout=y[2],
        ldy=y[1],
        residual=residual is not None,
        ldr=0 if residual is None else residual[1],
        **options,
    )


def _run_on(device: torch.device, run: Run) -> Run:
    def guarded(*addresses: int) -> None:
        with torch.cuda.device(device):
            run(*addresses)

    return guarded


def _on(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(-1 if device.type == "cpu" else device)  # -1 changes nothing


def _allocate(sizes: Iterable[int], device: torch.device) -> list[Tensor]:
    """So many bytes each, on a CUDA device for the current stream to fill.

    With ``torch.compile(mode="reduce-overhead")`` whatever the thread allocates while it runs a graph for the
    first time, on another stream than the default one, is taken back. So another thread allocates there.
    """

    def allocate() -> list[Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    if device.type == "cpu":
        return allocate()
    _refuse_capture()
    stream, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
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
            "needs, or was written to: call it once with the same arguments before the capture"
        )


# How tensors are read natively, and the patterns that are found so. PyTorch before 2.10 offers no way to
# read them: then these find nothing, and all that asks them has a way of its own.
TENSORS = _C.Tensors(
    getattr(Tensor, "__dlpack_c_exchange_api__", None),
    Tensor,
    torch.nn.Parameter,
    current_device,
    tf32_allowed,
)
KNOWN = _C.Known(TENSORS)
